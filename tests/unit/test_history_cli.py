"""`python -m harness history` and `prune`: what they print, and their exit codes."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from history_runs import BEGUN, plan, told, write_many, write_one

from harness import cli
from harness.history.show import BARS, sparkline
from harness.report.words import DASH

Said = tuple[int, str, str]
Harness = Callable[..., Said]


@pytest.fixture
def harness(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Harness:
    """Run a command over the test's results: its exit code, standard output and error."""
    monkeypatch.setenv("COLUMNS", "100")

    def call(*words: str) -> Said:
        line = ["harness", *words, "--results", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", line)
        with pytest.raises(SystemExit) as left:
            cli.main()
        shown = capsys.readouterr()
        return int(left.value.code or 0), shown.out, shown.err

    return call


def test_the_list_of_runs(harness: Harness, tmp_path: Path) -> None:
    write_many(tmp_path, 3)
    write_one(tmp_path, "named", created=BEGUN + timedelta(days=1), plan=plan(profile="kimi"))
    (tmp_path / "foreign").mkdir()
    code, out, err = harness("history", "--limit", "2")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split() == [
        "run", "profile", "engine,", "load", "base", "spec.", "ratio", "(interval)", "length",
    ]  # fmt: skip
    assert lines[2].split() == [
        "2026-01-02", "named", "kimi", "reference", "c1", "50.5", "62.6", "1.24x",
        f"(1.15{DASH}1.33)", "2.64",
    ]  # fmt: skip
    assert "20260101-020000-reference-00002" in lines[3]
    assert lines[-1] == "2 of 4 runs; --limit shows more"
    assert max(map(len, lines)) <= 100
    assert err == "harness: skipped foreign: no run's: neither manifest.json nor summary.json\n"


def test_a_run_s_name_can_be_copied_whatever_stands_beside_it(
    harness: Harness, tmp_path: Path
) -> None:
    name = "20260101-020000-reference-0a0b"
    write_one(tmp_path, name, created=BEGUN, plan=plan(profile="a profile with a long name"))
    write_many(tmp_path, 2)
    out = harness("history")[1]
    assert name in out and "20260101-010000-reference-00001" in out


def test_a_run_without_a_speed_is_listed_too(harness: Harness, tmp_path: Path) -> None:
    write_one(tmp_path, "good")
    started = told("bad")
    cells = tuple(
        msgspec.structs.replace(c, status="failed", metrics=None, acceptance=None)
        for c in started.cells
    )
    nothing: dict[str, Any] = {"estimates": (), "comparisons": (), "speed": ()}
    bad = msgspec.structs.replace(started, cells=cells, **nothing)
    write_one(tmp_path, "bad", of=bad)
    empty = msgspec.structs.replace(bad, run_id="empty", cells=(), integrity=(), parity=())
    write_one(tmp_path, "empty", of=empty)
    code, out, err = harness("history")
    assert code == 0
    assert re.search(rf"2026-01-01 bad +reference all +{DASH} +{DASH} +{DASH}", out)
    assert "--limit" not in out
    assert err == "harness: skipped empty: no figures: no cell of it was measured\n"


def test_a_metric_is_followed(harness: Harness, tmp_path: Path) -> None:
    write_many(tmp_path, 5)
    code, out, _ = harness("history", "--metric", "output_tokens_per_s", "--variant", "baseline")
    assert code == 0
    assert "demo reference baseline demo c1: output_tokens_per_s" in " ".join(out.split())
    assert any(bar in out for bar in BARS)
    assert out.count("-reference-0000") == 5  # a single series is told point by point
    _, several, _ = harness("history", "--metric", "output_tokens_per_s")
    assert several.count("output_tokens_per_s") == 3
    assert "-reference-0000" not in several


def test_void_runs_are_listed_and_in_no_series(harness: Harness, tmp_path: Path) -> None:
    write_one(tmp_path, "a", of=told("a", void="too few requests succeeded"))
    assert "void" in harness("history")[1]
    code, out, err = harness("history", "--metric", "acceptance_length")
    assert (code, out) == (0, "")
    assert err == "harness: no run tells acceptance_length under these filters\n"


def test_json_and_csv_hold_the_same(harness: Harness, tmp_path: Path) -> None:
    write_many(tmp_path, 4)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "summary.json").write_text("{")
    listed = json.loads(harness("history", "--json")[1])
    assert [run["ratio"] for run in listed["runs"]] == [1.24] * 4
    assert listed["problems"] == [
        {"path": str(tmp_path / "cut"), "reason": "summary.json: no JSON: Input data was truncated"}
    ]
    rows = list(csv.DictReader(io.StringIO(harness("history", "--csv")[1])))
    assert [row["run_id"] for row in rows] == [run["run_id"] for run in listed["runs"]]
    wanted = ("--metric", "ttft_s.p50", "--variant", "baseline", "--since", "2026-01-01T01:30")
    series = json.loads(harness("history", *wanted, "--json")[1])["series"]
    assert [one["metric"] for one in series] == ["ttft_s.p50"]
    points = list(csv.DictReader(io.StringIO(harness("history", *wanted, "--csv")[1])))
    assert [p["run_id"] for p in points] == [p["run_id"] for p in series[0]["points"]]
    assert len(points) == 2
    assert [float(p["value"]) for p in points] == [p["value"] for p in series[0]["points"]]
    assert series[0]["value"] == series[0]["points"][-1]["value"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("history", "--since", "soon"), "--since soon: give a date such as"),
        (("history", "--variant", "both"), "--variant both: give baseline, speculative, ratio"),
        (("history", "--json", "--csv"), "--json --csv: give one of them"),
        (("prune",), "prune: say what may go, with --older-than 30d or --max-size 20GB"),
        (("prune", "--max-size", "much"), "--max-size much: give a size such as"),
        (("prune", "--older-than", "old"), "--older-than old: give a date such as"),
        (("prune", "--older-than", "", "--max-size", "1GB"), "--older-than : give a date such as"),
        (("prune", "--older-than", "1d", "--yes", "--dry-run"), "--yes --dry-run: give one"),
    ],
)
def test_a_mistake_is_one_line(harness: Harness, words: tuple[str, ...], said: str) -> None:
    code, out, err = harness(*words)
    assert (code, out) == (2, "")
    assert err.startswith(f"harness: {said}") and err.count("\n") == 1


def test_no_results_and_no_fitting_run_are_told(harness: Harness, tmp_path: Path) -> None:
    assert harness("history")[2].startswith("harness: no run fits")
    write_one(tmp_path, "a")
    assert harness("history", "--engine", "vllm") == (
        0, "", "harness: no run fits; without filters `python -m harness history` lists all\n",
    )  # fmt: skip
    tmp_path.rename(tmp_path.with_name("moved"))
    code, _, err = harness("history")
    assert code == 2 and "no such folder of results" in err


def test_diagnoses_and_nights_beside_the_runs_are_no_problems(
    harness: Harness, tmp_path: Path
) -> None:
    write_one(tmp_path, "one")
    for name in ("diagnose/20260102-000000-reference-ab12", "self-test/reference", "nightly/demo"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "dossier.json").write_text("{}")
    done = harness("history")
    assert done[0] == 0 and "skipped" not in done[2]


def test_many_problems_are_counted(harness: Harness, tmp_path: Path) -> None:
    for number in range(13):
        (tmp_path / f"foreign-{number:02d}").mkdir()
    lines = harness("history")[2].splitlines()
    assert lines[-1] == "harness: skipped 3 more; --problems lists all"
    assert len(lines) == 12
    assert len(harness("history", "--problems")[2].splitlines()) == 14


def test_prune_says_what_would_go_and_then_does_it(harness: Harness, tmp_path: Path) -> None:
    write_many(tmp_path, 5)
    (tmp_path / "photos").mkdir()
    asked = ("prune", "--older-than", "2026-02-01", "--keep", "2")
    code, out, err = harness(*asked)
    assert code == 0
    assert out.count("its age") == 3
    assert "stay: the newest 2\n3 go; the folder holds " in out
    assert "stays: photos (not recognised: no run's: no manifest.json)" in out
    assert err == "harness: nothing was removed; the same with --yes removes them\n"
    assert len(list(tmp_path.iterdir())) == 6
    assert json.loads(harness(*asked, "--dry-run", "--json")[1])["bytes_after"] > 0
    code, _, err = harness(*asked, "--yes")
    assert code == 0
    assert err.count("harness: removed 20260101-0") == 3
    assert len(list(tmp_path.iterdir())) == 3
    assert len(json.loads(harness("history", "--json")[1])["runs"]) == 2


def test_prune_tells_names_and_reasons_of_any_bytes(harness: Harness, tmp_path: Path) -> None:
    name = os.fsdecode(b"run-\xff\x1b[2J")
    write_one(tmp_path, "odd", place=name)
    pinned = write_one(tmp_path, "pinned") / "labels.json"
    pinned.write_text(json.dumps({"pinned": "a\nb\x1b]0;title\x07"}))
    (tmp_path / os.fsdecode(b"photos-\xfe")).mkdir()
    asked = ("prune", "--older-than", "2030-01-01", "--keep", "0")
    out = harness(*asked)[1]
    assert not [c for c in out if c != "\n" and not c.isprintable()]
    assert "stays: pinned (pinned: a b ]0;title)\n" in out
    told = json.loads(harness(*asked, "--json")[1])
    assert told["going"][0]["place"] == "run-\\xff [2J"
    assert {one["place"] for one in told["staying"]} == {"pinned", "photos-\\xfe"}
    assert harness(*asked, "--yes")[::2] == (0, "harness: removed run-\\xff [2J\n")
    assert not (tmp_path / name).exists()


def test_prune_says_where_a_size_is_not_reached(harness: Harness, tmp_path: Path) -> None:
    write_many(tmp_path, 2)
    _, out, err = harness("prune", "--max-size", "1kB")
    assert "0 go" in out
    assert err.startswith("harness: --max-size is not reached: what stays holds ")


def test_a_sparkline_shows_the_shape_and_the_gaps() -> None:
    assert sparkline([1, 2, None, 3, 8]) == "▁▂ ▃█"
    assert sparkline([5, 5]) == "▄▄"
    assert sparkline([None, None]) == sparkline([]) == ""
    assert sparkline(list(range(100)), width=3) == "▁▅█"
