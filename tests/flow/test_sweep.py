"""`python -m harness sweep`, on the embedded engine and against running servers."""

from __future__ import annotations

import json
import shutil
import subprocess
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from attached import Start, harness, measured

SMALL = ["--set", "load.num_requests=4", "--set", "compare.launches=1"]
SMALL += ["--set", "load.warmup_requests=1", "--set", "workload.output_tokens=24"]
# On a machine that does something else besides, figures may be void: they are not what is tested.
SMALL += ["--set", "load.allow_client_bound=true"]


def told(done: subprocess.CompletedProcess[str]) -> tuple[Path, dict[str, Any]]:
    folder = Path(done.stdout.strip().splitlines()[-1])
    return folder, json.loads((folder / "sweep.json").read_text())


def summary(folder: Path, setting: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / setting["run"] / "summary.json").read_text())
    return found


def test_k_and_forced_acceptance_share_one_baseline(demo_pair: Path, tmp_path: Path) -> None:
    over = ["--over", "speculative.k=1,3", "--over", "speculative.forced_length=none,2"]
    more = ["--set", "workload.ignore_eos=true", "--set", "load.concurrency=1"]
    done = harness("sweep", *over, *SMALL, *more, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    folder, found = told(done)
    assert folder.parent == tmp_path
    assert {s["baseline"] for s in found["settings"]} == {"k=1, forced_length=none"}
    # One measurement of the baseline, under four names.
    files = [
        folder / s["run"] / "cells" / "reference-baseline-c1-r0" / "requests.parquet"
        for s in found["settings"]
    ]
    assert len({file.stat().st_ino for file in files}) == 1
    for setting, point in zip(found["settings"], found["points"], strict=True):
        one = summary(folder, setting)
        (speed,) = one["speed"]
        gain = speed["tokens_per_step"]["value"] / speed["relative_step_cost"]["value"]
        assert speed["decode"]["value"] == pytest.approx(gain, rel=1e-9)
        assert speed["residual"]["value"] == pytest.approx(1, rel=1e-6)
        spec = next(c for c in one["cells"] if c["variant"] == "speculative")
        codes = [c["code"] for c in one["cautions"]]
        if "forced_length=2" in setting["name"]:
            assert spec["acceptance"]["length"] == point["acceptance_length"] == 2
            assert spec["integrity"] is None
            assert "forced_acceptance" in codes
        else:
            assert spec["integrity"]["identical"] == spec["integrity"]["compared"] == 4
            assert "forced_acceptance" not in codes
    (best,) = found["best"]
    assert best["named"] is None  # one start each
    assert set(best["undecided"]) == {
        *("no drafter", "k=1, forced_length=none", "k=3, forced_length=none"),
    }
    assert (folder / "report.html").stat().st_size > 0
    assert list((folder / "plots").glob("*.svg"))

    before = (folder / "sweep.json").read_bytes()
    assert harness("analyse", str(folder)).returncode == 0
    assert (folder / "sweep.json").read_bytes() == before
    lost = folder / found["settings"][2]["run"] / "cells" / "reference-speculative-c1-r0"
    kept = files[0].stat().st_mtime_ns
    shutil.rmtree(lost)
    again = harness("resume", str(folder))
    assert again.returncode == 0, again.stderr
    assert lost.is_dir()
    assert files[0].stat().st_mtime_ns == kept
    # What lasts is told again: a line that follows itself is one start's.
    told_of = [text for text, _ in groupby(x.partition("] ")[2] for x in again.stderr.splitlines())]
    assert told_of.count("starting reference speculative: launch") == 1
    assert "starting reference baseline" not in again.stderr


@measured
def test_running_servers_are_swept_by_what_is_asked_of_them(start: Start, tmp_path: Path) -> None:
    urls = ["--url", f"baseline={start('--step-ms', '20')}"]
    urls += ["--url", f"speculative={start('--step-ms', '20', '--drafts', '3')}"]
    over = ["--over", "sampling.temperature=0,0.5", "--over", "load.concurrency=1,2"]
    quick = [*SMALL, "--set", "compare.launches=2", "--set", "load.num_requests=6"]
    done = harness("sweep", *urls, *over, *quick, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    folder, found = told(done)
    # A temperature is a condition: each has a baseline of its own, and one candidate beside it.
    assert [s["baseline"] for s in found["settings"]] == ["temperature=0", "temperature=0.5"]
    assert [(b["condition"], b["load"]["concurrency"]) for b in found["best"]] == [
        (["sampling.temperature=0"], 1),
        (["sampling.temperature=0"], 2),
        (["sampling.temperature=0.5"], 1),
        (["sampling.temperature=0.5"], 2),
    ]
    assert {b["compared"] for b in found["best"]} == {2}
    assert {b["leader"] for b in found["best"]} == {"with the drafter"}
    for point in found["points"]:
        # Three tokens a step at the price of one.
        assert point["decode"]["value"] > 1.5
    assert len(list((folder / "plots").glob("*.svg"))) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "say what to sweep"),
        (["--over", "speculative.k=1,2", "--set", "speculative.k=3"], "leave one of the two out"),
        (["--over", "speculative.k=1,2", "--variants", "baseline"], "--variants leaves out"),
        (["--over", "speculative.k=1,2", "--set", "compare.precision=0.03"], "stops at none"),
        (["--over", "speculative.k=1,9"], "drafts 1 to 8 tokens"),
        (["--over", "speculative.forced_length=5"], "yields 1 to 4 tokens"),
        (["--over", "speculative.k=1,2", "--url", "http://127.0.0.1:9"], "cannot be changed"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(
    demo_pair: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    done = harness("sweep", *options, "--out", str(tmp_path))
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
