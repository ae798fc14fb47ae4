"""EngineProcess and its supervisor, against real processes that misbehave on purpose."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.base import (
    EngineFailed,
    EngineUsageError,
    Launch,
    PhaseMark,
    ServeSpec,
)
from engines.phases import LogFollower, PhaseTracker, read_log
from engines.process import EngineProcess, check_port, free_port
from engines.supervise import descendants

SERVER = """
    import http.server, os, signal, subprocess, sys, time
    port, mode = int(sys.argv[1]), sys.argv[2]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()
        def log_message(self, *args): pass

    def orphan(code):
        # forked twice and in a session of its own: its parent is gone before it does anything
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execv(sys.executable, [sys.executable, "-c", code])
            os._exit(0)
        os.wait()

    print("begin weights", flush=True)
    if mode == "litter":
        import socket, tempfile, uuid
        for _ in range(20):
            tempfile.NamedTemporaryFile(delete=False)
            left = socket.socket(socket.AF_UNIX)
            left.bind(f"{tempfile.gettempdir()}/{uuid.uuid4()}")
        print("temp", os.environ.get("TMPDIR"), os.environ.get("TORCHINDUCTOR_CACHE_DIR"),
              flush=True)
    if mode == "orphans":
        note = "import os, time; print('orphan', os.getpid(), flush=True); time.sleep(600)"
        orphan(note)
        orphan("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + note)
        time.sleep(0.5)
    if mode == "die":
        print("CAUSE: no such tensor", flush=True)
        print("Traceback: something later", flush=True)
        sys.exit(7)
    if mode == "leave-orphan":
        orphan("import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
               "print('orphan', os.getpid(), flush=True); open('deaf', 'w'); time.sleep(600)")
        while not os.path.exists("deaf"):
            time.sleep(0.02)
        sys.exit(9)
    if mode == "hang":
        time.sleep(600)
    if mode == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if mode == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "starved":
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        bytearray(1 << 33)
    if mode == "port":
        import socket
        first = socket.create_server(("127.0.0.1", port))
    if mode == "flag":
        import argparse
        parser = argparse.ArgumentParser(prog="server")
        parser.add_argument("--max-model-len")
        parser.parse_args(["--max-modle-len", "7"])
    print("begin drafter", flush=True)
    print("begin weights", flush=True)
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


class FakeAdapter:
    """The contract over a small Python server."""

    name = "fake"
    phases = (
        PhaseMark(phase="weights", pattern="^begin weights"),
        PhaseMark(phase="drafter", pattern="^begin drafter"),
    )
    ready_path = "/health"
    metrics_path = None

    def __init__(self, script: Path, mode: str) -> None:
        self.script = script
        self.mode = mode

    def check(self, spec: ServeSpec) -> None:
        pass

    def launch(self, spec: ServeSpec, workdir: Path) -> Launch:
        argv = (sys.executable, str(self.script), str(spec.port), self.mode)
        return Launch(argv=argv, env={"FAKE": "1"})

    def failure_cause(self, log_text: str) -> str | None:
        found = re.search(r"^CAUSE: (.*)$", log_text, re.MULTILINE)
        return found.group(1) if found else None

    def counters(self, metrics_text: str) -> None:
        return None

    def request_fields(self, *, speculative: bool, endpoint: str = "chat") -> dict[str, Any]:
        return {}

    def request_acceptance(self, payloads: list[dict[str, Any]]) -> None:
        return None


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    script = tmp_path / "server.py"
    script.write_text(textwrap.dedent(SERVER))
    made: list[EngineProcess] = []

    def build(mode: str, *, deadline_s: float = 120.0, **more: Any) -> EngineProcess:
        spec = ServeSpec(target=tmp_path, served_name="m", port=more.pop("port", free_port()))
        engine = EngineProcess(
            FakeAdapter(script, mode),
            spec,
            workdir=tmp_path / "work",
            log_path=tmp_path / "logs" / "engine.log",
            deadline_s=deadline_s,
            **more,
        )
        made.append(engine)
        return engine

    yield build
    for engine in made:
        engine.stop()


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def gone(pids: list[int], within_s: float = 300.0) -> bool:
    """Whether all have gone, waiting for it."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def wait_for(log: Path, text: str) -> None:
    """Until the log holds `text`: how long a machine takes for that is not under test."""
    deadline = time.monotonic() + 300
    while text not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def orphans(log: Path, n: int) -> list[int]:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        pids = [int(found) for found in re.findall(r"orphan (\d+)", log.read_text())]
        if len(pids) == n:
            return pids
        time.sleep(0.05)
    raise AssertionError(log.read_text())


def test_a_folder_named_from_here_is_found_from_the_engines_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's own folder is another than the one that paths of the command line are from."""
    monkeypatch.chdir(tmp_path)
    spec = ServeSpec(target=Path("target"), served_name="x", port=free_port(), drafter=Path("d"))
    process = EngineProcess(
        FakeAdapter(Path("s"), "ok"),
        spec,
        workdir=Path("work"),
        log_path=Path("log"),
        deadline_s=1,
    )
    assert (process.spec.target, process.spec.drafter) == (tmp_path / "target", tmp_path / "d")
    assert process.spec.pair_drafter is None
    assert process.workdir == tmp_path / "work"


def test_ready_phases_and_stop(make: Any) -> None:
    seen: list[str] = []
    engine = make("serve", on_phase=lambda phase, elapsed_s: seen.append(phase))
    with engine:
        engine.start()
        phases = engine.wait_ready()
        assert engine.alive()
        # The weights are loaded twice, for the target and for the drafter: two stretches.
        assert [phase.phase for phase in phases] == ["launch", "weights", "drafter", "weights"]
        assert phases[0].start_s == 0.0
        assert [p.end_s for p in phases[:-1]] == [p.start_s for p in phases[1:]]
        assert phases[-1].end_s == engine.ready_s == engine.wall_s
        # A server of Python's own takes some tenths of a second to come up.
        uses = [p.use for p in phases if p.use is not None]
        assert sum(u.cpu_s for u in uses) > 0
        assert max(u.rss_bytes for u in uses) > 1_000_000
        # A phase that lasts is told again.
        assert [phase for phase, _ in itertools.groupby(seen)][:2] == ["launch", "weights"]
        assert engine.base_url == f"http://127.0.0.1:{engine.spec.port}"
        pid = engine.pid
    assert not engine.alive()
    engine.stop()
    assert gone([pid])
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", engine.spec.port)) != 0


def test_stop_ends_orphans_in_other_sessions(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.process.GRACE_S", 1.0)
    engine = make("orphans")
    engine.start()
    engine.wait_ready()
    pids = orphans(engine.log_path, 2)
    assert all(alive(pid) for pid in pids)
    engine.stop()
    assert not any(alive(pid) for pid in pids)
    assert "killed" in engine.log_path.read_text()


def test_term_ignoring_engine_is_killed(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.process.GRACE_S", 0.5)
    engine = make("stubborn")
    engine.start()
    engine.wait_ready()
    engine.stop()
    assert engine.failure().phase == "serving"
    assert "SIGKILL" in str(engine.failure())
    assert "killed" in engine.log_path.read_text()


def test_an_engine_that_obeys_is_not_called_killed(make: Any) -> None:
    engine = make("serve")
    engine.start()
    engine.wait_ready()
    engine.stop()
    assert "SIGTERM" in str(engine.failure())


def test_death_in_start_up(make: Any) -> None:
    engine = make("die")
    engine.start()
    with pytest.raises(EngineFailed) as caught:
        engine.wait_ready()
    error = caught.value
    assert error.phase == "weights"
    assert error.cause == "no such tensor"
    assert error.tail[-1] == "Traceback: something later"
    assert error.log_path == engine.log_path
    assert "\n" not in str(error)
    assert "exited with code 7" in str(error)
    assert str(engine.log_path) in str(error)


@pytest.mark.parametrize(
    ("mode", "kind", "said"),
    [
        ("port", "port", r"exited with code 1 .*Address already in use; port taken: "),
        ("flag", "flag", r"code 2 .*unrecognized .*; wrong flag: --max-modle-len may be meant as "),
        ("crash", "crash", r"was ended by SIGSEGV .*Segmentation fault in <module> \(server.py"),
        ("starved", "out_of_memory", r"exited with code 1 .*MemoryError; out of memory: lower"),
        ("killed", "crash", r"was ended by SIGKILL \(often: out of memory\) in start-up phase"),
    ],
)
def test_each_way_to_die_has_its_own_line(make: Any, mode: str, kind: str, said: str) -> None:
    engine = make(mode)
    engine.start()
    with pytest.raises(EngineFailed, match=said) as caught:
        engine.wait_ready()
    assert caught.value.kind == kind
    assert "\n" not in str(caught.value)


def test_a_kill_that_the_kernel_counted_is_one_for_want_of_memory(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter([{"control group": 1}, {"control group": 2}])
    monkeypatch.setattr("engines.process.oom_kills", lambda: next(counts))
    engine = make("killed")
    engine.start()
    with pytest.raises(EngineFailed, match="the kernel killed 1 process of its control") as caught:
        engine.wait_ready()
    assert caught.value.kind == "out_of_memory"
    assert "often" not in str(caught.value)
    assert engine.failure().kind == "out_of_memory"  # read once, at the death


def test_death_is_told_before_the_leftovers_are_cleared(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An orphan that ignores SIGTERM keeps the supervisor busy; the death is known all the same."""
    monkeypatch.setattr("engines.process.GRACE_S", 600.0)
    engine = make("leave-orphan")
    engine.start()
    with pytest.raises(EngineFailed, match="exited with code 9"):
        engine.wait_ready()
    (pid,) = orphans(engine.log_path, 1)
    assert alive(pid)
    os.kill(pid, signal.SIGKILL)  # spares this test the grace


def test_deadline(make: Any) -> None:
    beats: list[tuple[str, float]] = []
    engine = make("hang", deadline_s=0.5, on_phase=lambda *beat: beats.append(beat))
    engine.start()
    wait_for(engine.log_path, "begin weights")
    with pytest.raises(EngineFailed, match=r"not ready after 0.5 s in start-up phase 'weights'"):
        engine.wait_ready()
    assert engine.alive()
    engine.stop()
    assert not engine.alive()
    assert beats[0][0] == "launch"


def test_heartbeat(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.process.HEARTBEAT_S", 0.2)
    in_weights: list[float] = []

    class Enough(Exception):
        pass

    def beat(phase: str, elapsed_s: float) -> None:
        in_weights.extend([elapsed_s] if phase == "weights" else [])
        if len(in_weights) == 3:
            raise Enough

    engine = make("hang", on_phase=beat)
    engine.start()
    wait_for(engine.log_path, "begin weights")
    with pytest.raises(Enough):
        engine.wait_ready()
    assert in_weights == sorted(in_weights)


def test_killed_while_serving(make: Any) -> None:
    engine = make("serve")
    engine.start()
    engine.wait_ready()
    children = Path(f"/proc/{engine.pid}/task/{engine.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    assert gone([int(children[0])])
    deadline = time.monotonic() + 300
    while engine.alive() and time.monotonic() < deadline:
        time.sleep(0.02)
    error = engine.failure()
    assert error.phase == "serving"
    assert "SIGKILL" in str(error)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_harness_ends_and_nothing_survives(how: signal.Signals, tmp_path: Path) -> None:
    """The harness killed or interrupted: also its engine's orphans go."""
    (tmp_path / "server.py").write_text(textwrap.dedent(SERVER))
    harness = f"""
        import sys, time
        sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[2])]!r}
        import engines.process as process
        from pathlib import Path
        from test_engines_process import FakeAdapter, ServeSpec
        process.GRACE_S = 1.0
        here = Path({str(tmp_path)!r})
        spec = ServeSpec(target=here, served_name="m", port=process.free_port())
        adapter = FakeAdapter(here / "server.py", "orphans")
        with process.EngineProcess(adapter, spec, workdir=here, log_path=here / "engine.log",
                                   deadline_s=120) as engine:
            engine.start()
            engine.wait_ready()
            print(engine.pid, flush=True)
            time.sleep(600)
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(harness)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert child.stdout is not None
    supervisor = int(child.stdout.readline())
    pids = [supervisor, *orphans(tmp_path / "engine.log", 2)]
    assert all(alive(pid) for pid in pids)
    child.send_signal(how)
    child.wait()
    child.stdout.close()
    assert gone(pids)


def test_supervisor_killed(make: Any) -> None:
    """Should the supervisor itself be killed, stop() finds the engine by its mark."""
    engine = make("orphans")
    engine.start()
    engine.wait_ready()
    pids = orphans(engine.log_path, 2)
    os.kill(engine.pid, signal.SIGKILL)
    assert gone([engine.pid])
    assert not engine.alive()
    engine.stop()
    assert gone(pids)


@pytest.fixture
def temp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The machine's temporary folder, as far as engines see it."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:  # sockets need a short name
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        yield Path(folder)


def told_temp(engine: EngineProcess) -> list[str]:
    found = re.search(r"^temp (\S+) (\S+)$", read_log(engine.log_path), re.MULTILINE)
    assert found is not None
    return list(found.groups())


@pytest.mark.parametrize("killed", ["nothing", "engine", "supervisor"])
def test_what_an_engine_leaves_in_the_temporary_folder_goes(
    make: Any, temp: Path, killed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temp))  # as a process finds it that begins now
    engine = make("litter")
    engine.start()
    engine.wait_ready()
    own, cache = told_temp(engine)
    assert Path(own).parent == temp
    assert len(list(Path(own).iterdir())) == 40
    # Compiled kernels outlive a start, as they do without a folder of its own.
    assert Path(cache).parent == temp
    pids = {"engine": descendants(engine.pid), "supervisor": [engine.pid]}.get(killed, [])
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    engine.stop()
    assert list(temp.iterdir()) == []


def test_the_temporary_folder_goes_when_the_program_cannot_be_started(
    make: Any, temp: Path
) -> None:
    engine = make("serve")
    engine.adapter.launch = lambda spec, workdir: Launch(argv=("/no/such/python",), env={})
    engine.start()
    with pytest.raises(EngineFailed):
        engine.wait_ready()
    engine.stop()
    assert list(temp.iterdir()) == []


def test_a_temporary_folder_too_long_for_sockets_is_made_no_longer(
    make: Any, temp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the user has set it, an engine's sockets just fit in."""
    long = temp / ("x" * (107 - 37 - len(str(temp)) - 1))
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    engine = make("litter")
    engine.start()
    engine.wait_ready()
    assert told_temp(engine)[0] == str(long)


def test_missing_program(make: Any, tmp_path: Path) -> None:
    engine = make("serve")
    engine.adapter.launch = lambda spec, workdir: Launch(argv=("/no/such/python",), env={})
    engine.start()
    with pytest.raises(EngineFailed, match="cannot start /no/such/python: No such file"):
        engine.wait_ready()


def test_port_in_use(make: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        engine = make("serve", port=port)
        with pytest.raises(EngineUsageError, match=f"port {port} .* is in use"):
            engine.start()
        assert engine.pid is None


@pytest.mark.parametrize("port", [0, -1, 70000])
def test_not_a_port(port: int) -> None:
    with pytest.raises(EngineUsageError, match="not a port"):
        check_port("127.0.0.1", port)


def test_free_ports_differ() -> None:
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == 50
    for port in ports:
        check_port("127.0.0.1", port)


PIECES = st.lists(st.text(alphabet="abü \r\n", max_size=8), max_size=20)


@given(PIECES)
def test_log_follower_gives_each_line_once(tmp_path_factory: Any, pieces: list[str]) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    path.touch()
    follower = LogFollower(path)
    read: list[str] = []
    with open(path, "ab", buffering=0) as file:
        for piece in pieces:
            file.write(piece.encode())
            read += follower.new_lines()
        file.write(b"\n")
        read += follower.new_lines()
    expected = [line for line in re.split("[\r\n]", "".join(pieces)) if line.strip()]
    assert read == expected


@given(st.lists(st.sampled_from(["one", "two", "noise"]), max_size=30))
def test_phase_tracker(lines: list[str]) -> None:
    tracker = PhaseTracker(
        (PhaseMark(phase="a", pattern="one"), PhaseMark(phase="b", pattern="two"))
    )
    for now, line in enumerate(lines):
        tracker.feed(line, float(now + 1))
    timings = tracker.timings(None)
    assert timings[-1].end_s is None
    assert all(x.phase != y.phase for x, y in itertools.pairwise(timings))
    assert all(x.end_s == y.start_s for x, y in itertools.pairwise(timings))
    marks = [{"one": "a", "two": "b"}[line] for line in lines if line != "noise"]
    kept = [m for i, m in enumerate(marks) if i == 0 or marks[i - 1] != m]
    assert [timing.phase for timing in timings[1:]] == kept


def test_a_log_taken_away_or_cut_short_ends_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"one\ntwo")
    follower = LogFollower(log)
    assert follower.new_lines() == ["one"]
    log.unlink()
    assert follower.new_lines() == []
    log.write_bytes(b"\nnew\n")
    assert follower.new_lines() == ["two", "new"]


def test_a_line_without_end_is_not_kept_whole(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * 3_000_000)
    follower = LogFollower(log)
    assert follower.new_lines() == []
    with open(log, "ab") as file:
        file.write(b"end\nnext\n")
    first, second = follower.new_lines()
    assert (len(first), first.endswith("xend"), second) == (1_000_003, True, "next")


def test_a_log_larger_than_the_memory_is_read_at_its_ends(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with open(log, "wb") as file:
        file.write(b"first line\n")
        file.seek(2**36)  # a hole of 64 GiB
        file.write(b"\nlast line\n")
    text = read_log(log)
    assert text.startswith("first line\n")
    assert text.endswith("\nlast line\n")
    assert len(text) < 4_100_000
    assert read_log(tmp_path / "none") == ""


def test_a_line_of_a_million_digits_is_searched_for_no_progress() -> None:
    tracker = PhaseTracker(())
    assert not tracker.feed("1" * 1_000_000, 1.0)  # by squares this would take an hour
    tracker.feed("Loading shards:  50% Completed | 1/2 [00:01<00:01]" + "1" * 1_000_000, 2.0)
    assert tracker.said == "launch 1 of 2"


def test_the_message_of_a_failure_is_of_bounded_length(make: Any, tmp_path: Path) -> None:
    with make("hang", deadline_s=0.5) as engine:
        engine.start()
        with open(engine.log_path, "ab") as log:
            log.write(b"y" * 100_000)
        with pytest.raises(EngineFailed) as failed:
            engine.wait_ready()
    assert len(str(failed.value)) < 1500
    assert max(map(len, failed.value.tail)) <= 2000
