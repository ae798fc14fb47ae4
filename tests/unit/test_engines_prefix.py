"""Engines started through another program: here a stand-in for ssh, and programs of this machine.

The far end of the stand-in is below a process of its own, so that nothing of the engine is a
descendant of the harness: as on another machine, only what the connection carries can end it.
"""

from __future__ import annotations

import contextlib
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_engines_process import SERVER, FakeAdapter, alive, gone, wait_for

from engines import process as process_module
from engines.base import EngineFailed, EngineUsageError, Launch, ServeSpec
from engines.prefix import check_prefix, is_elsewhere, through
from engines.process import EngineProcess, free_port

FAR = Path(__file__).with_name("far_shell.py")


@pytest.fixture
def far(tmp_path: Path) -> Iterator[tuple[tuple[str, ...], psutil.Process]]:
    """The prefix that runs a command on the far side, and the process that is the far side."""
    path = tmp_path / "s"
    server = subprocess.Popen([sys.executable, str(FAR), "serve", str(path)])
    deadline = time.monotonic() + 300
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    yield (sys.executable, str(FAR), "run", str(path), "{command}"), psutil.Process(server.pid)
    for child in psutil.Process(server.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()
    server.kill()
    server.wait()


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "server.py").write_text(textwrap.dedent(SERVER))
    monkeypatch.setattr(process_module, "GRACE_S", 2.0)
    made: list[EngineProcess] = []

    def build(prefix: tuple[str, ...], mode: str) -> EngineProcess:
        spec = ServeSpec(target=tmp_path, served_name="m", port=free_port(), command_prefix=prefix)
        made.append(
            EngineProcess(
                FakeAdapter(tmp_path / "server.py", mode),
                spec,
                workdir=tmp_path / "work",
                log_path=tmp_path / "engine.log",
                deadline_s=120,
            )
        )
        return made[-1]

    yield build
    for engine in made:
        engine.stop()


def below(root: psutil.Process, least: int = 0) -> list[int]:
    """The processes below it, once there are `least`: shell, supervisor, engine and its orphans."""
    deadline = time.monotonic() + 300
    while len(found := [child.pid for child in root.children(recursive=True)]) < least:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


def test_stop_ends_what_runs_on_the_far_side(make: Any, far: Any, tmp_path: Path) -> None:
    prefix, machine = far
    engine = make(prefix, "orphans")
    engine.start()
    engine.wait_ready()
    there = below(machine, 5)
    assert not set(there) & set(below(psutil.Process(engine.pid)))
    engine.stop()
    assert gone(there)


@pytest.mark.parametrize("victim", ["client", "supervisor"])
def test_a_killed_connection_ends_the_far_engine(
    make: Any, far: Any, tmp_path: Path, victim: str
) -> None:
    prefix, machine = far
    engine = make(prefix, "serve")
    engine.start()
    engine.wait_ready()
    there = below(machine)
    assert there
    supervisor = psutil.Process(engine.pid)
    killed = supervisor if victim == "supervisor" else supervisor.children()[0]
    killed.kill()
    assert gone(there)
    assert not engine.alive()


def test_kill_9_of_the_harness_ends_the_far_engine(far: Any, tmp_path: Path) -> None:
    prefix, machine = far
    (tmp_path / "server.py").write_text(textwrap.dedent(SERVER))
    harness = f"""
        import sys, time
        sys.path[:0] = {[str(FAR.parent), str(FAR.parents[2])]!r}
        import engines.process as process
        from pathlib import Path
        from test_engines_process import FakeAdapter, ServeSpec
        process.GRACE_S = 2.0
        here = Path({str(tmp_path)!r})
        spec = ServeSpec(target=here, served_name="m", port=process.free_port(),
                         command_prefix={prefix!r})
        adapter = FakeAdapter(here / "server.py", "orphans")
        with process.EngineProcess(adapter, spec, workdir=here, log_path=here / "engine.log",
                                   deadline_s=120) as engine:
            engine.start()
            engine.wait_ready()
            print(engine.pid, flush=True)
            time.sleep(600)
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(harness)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    supervisor = int(child.stdout.readline())
    there = [supervisor, *below(machine, 5)]
    assert all(alive(pid) for pid in there)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert gone(there)


def test_a_far_engine_that_dies_is_told_with_its_own_code(make: Any, far: Any) -> None:
    engine = make(far[0], "die")
    engine.start()
    with pytest.raises(EngineFailed, match=r"exited with code 7.*no such tensor"):
        engine.wait_ready()


def test_a_program_of_this_machine_changes_nothing(make: Any, tmp_path: Path) -> None:
    engine = make(("env", "PLACE=here"), "serve")
    engine.start()
    engine.wait_ready()
    here = below(psutil.Process(engine.pid))
    environments = [psutil.Process(pid).environ() for pid in here]
    told = {(e.get("PLACE"), e.get("PYTHONFAULTHANDLER")) for e in environments}
    assert told == {("here", "1")}
    assert engine.argv[:2] == ("env", "PLACE=here")
    wait_for(tmp_path / "engine.log", "begin weights")
    engine.stop()
    assert gone(here)


def test_a_prefix_that_is_not_there_is_told(make: Any) -> None:
    engine = make(("no-such-program",), "serve")
    engine.start()
    with pytest.raises(EngineFailed, match="cannot start no-such-program"):
        engine.wait_ready()


@pytest.mark.parametrize(
    ("prefix", "said"),
    [
        (("docker", "run", "--rm", "image"), "docker needs -i"),
        (("kubectl", "exec", "pod", "--"), "kubectl needs -i"),
        (("ssh", "-n", "host"), "ssh -n"),
        (("srun", "--input=none"), "srun --input=none"),
        (("nice", "-n", "5", "ssh", "-n", "host"), "ssh -n"),
    ],
)
def test_a_prefix_that_cuts_standard_input_is_refused(prefix: tuple[str, ...], said: str) -> None:
    with pytest.raises(EngineUsageError, match=said):
        check_prefix(prefix)


@pytest.mark.parametrize(
    "prefix",
    [
        ("docker", "run", "-i", "--rm", "image"),
        ("podman", "exec", "--interactive", "box"),
        ("kubectl", "exec", "-i", "pod", "--"),
        ("ssh", "-p", "22", "host"),
        ("srun", "--nodes=1"),
        ("nice", "-n", "5", "ssh", "host"),
        ("sshpass", "-f", "/secret", "ssh", "host"),
    ],
)
def test_programs_that_run_it_elsewhere_are_known(prefix: tuple[str, ...]) -> None:
    check_prefix(prefix)
    assert is_elsewhere(prefix)
    assert not is_elsewhere(("numactl", "--cpunodebind=0"))


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)))
def test_what_ssh_hands_to_a_shell_comes_out_as_it_went_in(words: list[str]) -> None:
    launch = Launch(argv=("/x/bin/python3", *words), env={"A": "1 2'"}, cwd=Path("/a b"))
    *head, told = through(("ssh", "host"), launch, grace_s=5.0, env={"M": "$x"})
    assert head == ["ssh", "host"]
    command = shlex.split(told)
    assert command[:5] == ["env", "-C", "/a b", "A=1 2'", "M=$x"]
    assert command[len(command) - len(words) :] == words
    assert through(("srun",), launch, grace_s=5.0, env={"M": "$x"}) == ("srun", *command)
    by_password = ("sshpass", "-e", "/usr/bin/ssh", "host")
    assert through(by_password, launch, grace_s=5.0, env={"M": "$x"}) == (*by_password, told)


@pytest.mark.parametrize(
    ("prefix", "quoted"),
    [
        (("env", "SSH_AUTH_SOCK=/s", "ssh", "host"), True),
        (("nice", "-n", "5", "/usr/bin/ssh", "-p", "22", "host"), True),
        (("/usr/bin/env", "A=1", "ionice", "-c3", "sshpass", "-e", "ssh", "host"), True),
        (("sudo", "-u", "bench", "ssh", "host"), True),
        (("env", "A=1", "numactl", "-N0"), False),
        (("nice", "docker", "run", "-i", "--name", "ssh", "image"), False),
        (("srun", "--job-name", "ssh"), False),
        (("kubectl", "exec", "-i", "ssh", "--"), False),
    ],
)
def test_ssh_behind_what_merely_starts_it_reads_its_words_by_a_shell_too(
    prefix: tuple[str, ...], quoted: bool
) -> None:
    launch = Launch(argv=("/x/bin/python3", "a b", "$HOME"), env={"A": "1 2"})
    told = through(prefix, launch, grace_s=5.0, env={})
    assert told[: len(prefix)] == prefix
    rest = told[len(prefix) :]
    words = shlex.split(rest[0]) if quoted else list(rest)
    assert words[:2] == ["env", "A=1 2"]
    assert words[-3:] == ["/x/bin/python3", "a b", "$HOME"]
