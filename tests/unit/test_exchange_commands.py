"""`import` and `export` as they are typed: what they print, write and end with."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from exchange_files import SPECULATED, guidellm, sglang, vllm, write
from history_runs import write_one
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from harness import cli
from harness.errors import UsageError
from harness.exchange.exporting import FORMATS, export_files, of_folders
from harness.exchange.tables import read_points

REPO = Path(__file__).resolve().parents[2]


class Done(NamedTuple):
    """What a command printed, and the code it ended with."""

    code: int
    out: bytes
    err: str


class Typed:
    """The command line in this process, as `python -m harness` runs it."""

    def __init__(self, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[bytes]) -> None:
        self.patch, self.capture = patch, capture

    def __call__(self, *words: str | Path) -> Done:
        self.patch.setattr(sys, "argv", ["harness", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        out, err = self.capture.readouterr()
        code = left.value.code
        assert isinstance(code, int)
        return Done(code, out, err.decode())


@pytest.fixture
def harness(
    monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> Iterator[Typed]:
    """Signals are put back: the command line takes them."""
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.chdir(REPO)
    yield Typed(monkeypatch, capsysbinary)
    for n, handler in before.items():
        signal.signal(n, handler)


def test_results_go_in_and_come_out(tmp_path: Path, harness: Typed) -> None:
    root = tmp_path / "results"
    write(tmp_path / "in" / "a.json", vllm(backend="vllm", **SPECULATED))
    write(tmp_path / "in" / "b.jsonl", sglang())
    write(tmp_path / "in" / "c.json", {"alpha": 1})
    done = harness("import", tmp_path / "in", "--results", root)
    assert done.code == 0, done.err
    lines = done.out.decode().splitlines()
    assert len(lines) == 2 and lines[0].startswith(f"{tmp_path / 'in' / 'a.json'}: vllm-bench: 1 ")
    assert "skipped: " in done.err and "alpha" in done.err
    again = harness("import", tmp_path / "in" / "a.json", "--results", root, "--json")
    (told,) = json.loads(again.out)
    assert told["imported_before"] and told["tool"] == "vllm-bench"
    out = tmp_path / "points.parquet"
    exported = harness(
        *("export", "--results", root, "--format", "parquet", "--out", out),
        *("--engine", "vllm", "--metric", "ttft_s"),
    )
    assert exported.out.decode().strip() == str(out)
    points = read_points(out.read_bytes(), out)
    assert points is not None
    assert {p.metric for p in points} == {"ttft_s.mean", "ttft_s.p50", "ttft_s.p99"}
    text = harness("export", "--results", root, "--format", "openmetrics").out.decode()
    assert len(list(text_string_to_metric_families(text))) > 10


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("import", "nowhere.json"), "nowhere.json: no such file or folder"),
        (("import", "Makefile"), "not JSON; it begins with"),
        (("import", "pyproject.toml", "--variant", "fast"), "--variant fast"),
        (("import", "pyproject.toml", "--date", "soon"), "--date soon"),
        (("export", "--format", "xml"), "give csv, parquet, json, llm-d, openmetrics"),
        (("export", "--timestamps"), "--timestamps goes with"),
        (("export", "docs"), "docs: nothing to export"),
        (("export", "nowhere"), "nowhere: no such folder"),
        (("export", "results/example", "--engine", "vllm"), "not both"),
        (("export", "--results", "nowhere"), "nowhere: no such folder"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(
    words: tuple[str, ...], wanted: str, harness: Typed
) -> None:
    done = harness(*words)
    assert done.code == 2
    lines = done.err.splitlines()
    assert len(lines) == 1 and wanted in lines[0]
    assert done.out == b""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder, with a baseline and a speculative variant."""
    return write_one(tmp_path / "results", "20260101-000000-reference-ab12")


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_is_written_whole(run: Path, tmp_path: Path, form: str) -> None:
    out = tmp_path / ("reports" if form == "llm-d" else f"out.{form}")
    paths = export_files(of_folders([run]), form, out)
    assert len(paths) == (2 if form == "llm-d" else 1)
    assert all(path.stat().st_size > 100 for path in paths)
    assert not [p for p in tmp_path.rglob("*") if p.name.startswith(".out")]


def test_a_report_alone_may_be_a_file_and_several_may_not(
    run: Path, tmp_path: Path, harness: Typed
) -> None:
    done = write(tmp_path / "a.json", guidellm())
    harness("import", done, "--results", tmp_path / "other")
    one = of_folders([tmp_path / "other"])
    assert export_files(one, "llm-d", tmp_path / "one.json") == [tmp_path / "one.json"]
    file = tmp_path / "a.txt"
    file.touch()
    with pytest.raises(UsageError, match="2 reports; give a folder"):
        export_files(of_folders([run]), "llm-d", file)
    with pytest.raises(UsageError, match="no such folder; make it first"):
        export_files(one, "csv", tmp_path / "no" / "where.csv")
    with pytest.raises(UsageError, match="a folder; give a file's name"):
        export_files(one, "csv", tmp_path)
    with pytest.raises(UsageError, match="not a plain file"):
        export_files(one, "csv", Path("/dev/null"))


def test_the_import_of_an_export_is_the_same_history(
    run: Path, tmp_path: Path, harness: Typed
) -> None:
    csv = tmp_path / "points.csv"
    export_files(of_folders([run]), "csv", csv)
    assert harness("import", csv, "--results", tmp_path / "moved").code == 0
    again = harness("export", "--results", tmp_path / "moved", "--format", "csv").out
    ours, theirs = (read_points(data, csv) or [] for data in (csv.read_bytes(), again))
    assert sorted((p.metric, p.variant, p.load, p.value) for p in ours) == sorted(
        (p.metric, p.variant, p.load, p.value) for p in theirs
    )


def test_a_folder_that_is_no_run_is_named_and_left_out(run: Path) -> None:
    broken = run.parent / "20260102-000000-broken"
    broken.mkdir()
    (broken / "summary.json").write_text("{")
    (broken / "manifest.json").write_text("{")
    chosen = of_folders([run.parent])
    assert chosen.points and len(chosen.problems) == 1 and "broken" in chosen.problems[0]


def test_parquet_goes_to_a_pipe(run: Path, harness: Typed) -> None:
    done = harness("export", run, "--format", "parquet")
    assert done.code == 0 and done.out.startswith(b"PAR1")


def test_a_full_disk_is_one_line_that_names_the_file(
    run: Path, tmp_path: Path, harness: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    out = tmp_path / "points.csv"
    done = harness("export", run, "--out", out)
    assert (done.code, done.out) == (2, b"")
    assert done.err == f"harness: {out}: no space left on device\n"
    assert not out.exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_standard_output_that_takes_no_more_is_one_line(run: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "harness", "export", str(run)],
            cwd=REPO,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 2
    assert done.stderr == "harness: cannot be written: no space left on device\n"
