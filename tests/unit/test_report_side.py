"""Several runs on one page: what each is called, what differs, and that nothing is claimed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import report_run as made
from typer.testing import CliRunner

from harness.cli import app
from harness.errors import UsageError
from harness.report.run_data import read_run
from harness.report.side import Side, differences, labels_of, results_of, write_page
from harness.report.words import DASH


def run(
    folder: Path, *, engine: str = "vllm", k: int = 3, drafter: str = "a", **changes: Any
) -> Path:
    """A run's folder whose plan tells the engine, the drafter and k."""
    cells = tuple(
        made.cell(v, r, engine=engine) for r in (0, 1) for v in ("baseline", "speculative")
    )
    told = made.summary(
        run_id=folder.name, cells=cells, comparisons=(made.comparison(engine=engine),)
    )
    made.write_run(folder, told)
    manifest = made.manifest(
        told,
        plan={
            "request": {"sets": [folder.name]},
            "models": {engine: {"target": "/models/target", "drafter": f"/models/{drafter}"}},
            "engines": {engine: {"speculative": {"k": k}, "engine": {"device": "cpu"}}},
        },
        **changes,
    )
    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    return folder


def sides(*folders: Path) -> list[Side]:
    runs = [read_run(folder) for folder in folders]
    named = zip(labels_of(runs, folders), folders, runs, strict=True)
    return [Side(label=label, folder=folder, run=run) for label, folder, run in named]


def labels(*folders: Path) -> list[str]:
    return [one.label for one in sides(*folders)]


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        ({"k": 3}, {"k": 5}, ["k=3", "k=5"]),
        ({"drafter": "old"}, {"drafter": "new"}, ["old", "new"]),
        ({"engine": "vllm"}, {"engine": "sglang"}, ["vllm", "sglang"]),
        ({"k": 1, "drafter": "x"}, {"k": 2, "drafter": "y"}, ["x, k=1", "y, k=2"]),
        ({}, {}, ["one", "two"]),
    ],
)
def test_a_run_is_called_by_what_others_have_not(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], names: list[str]
) -> None:
    assert labels(run(tmp_path / "one", **first), run(tmp_path / "two", **second)) == names


def test_folders_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    assert labels(run(tmp_path / "a" / "run"), run(tmp_path / "b" / "run")) == ["a/run", "b/run"]


def test_what_differs_is_told_and_what_always_does_is_not(tmp_path: Path) -> None:
    loads = [{"load_average": [n], "memory_free_bytes": n, "cpu": {"cores": n}} for n in (1, 2)]
    told = {
        name: values
        for name, *values in differences(
            sides(
                run(tmp_path / "one", environment=loads[0], versions={"torch": "2.9"}),
                run(tmp_path / "two", environment=loads[1], k=5, versions={"torch": "3", "x": "1"}),
            )
        )
    }
    assert told == {
        "plan.engines.vllm.speculative.k": ["3", "5"],
        "environment.cpu.cores": ["1", "2"],
        "versions.torch": ["2.9", "3"],
        "versions.x": [DASH, "1"],
    }


@pytest.mark.parametrize(
    ("second", "told", "apart"),
    [
        ({"k": 5}, "engine vllm, drafter a", ["k"]),
        ({"k": 3}, "engine vllm, drafter a, k 3", []),
        ({"engine": "sglang", "k": 5, "drafter": "b"}, "", ["engine", "drafter", "k"]),
    ],
)
def test_settings_that_all_runs_share_are_told_once(
    tmp_path: Path, second: dict[str, Any], told: str, apart: list[str]
) -> None:
    both = sides(run(tmp_path / "one"), run(tmp_path / "two", **second))
    shared, columns, rows = results_of(both)
    assert shared == told
    assert columns[: len(apart) + 2] == ["run", *apart, "load"]
    assert {len(row) for row in rows} == {len(columns)} and len(rows) == 2


def test_the_page_has_every_run_and_claims_nothing_between_them(tmp_path: Path) -> None:
    one, two, three = (run(tmp_path / f"k{k}", k=k) for k in (1, 3, 5))
    write_page([one], None)
    page = write_page([one, two, three, one], tmp_path / "side").read_text("utf-8")
    assert "3 runs side by side" in page and "nothing is claimed between them" in page
    assert page.count('href="../k1/report.html"') == 1 and "../k3/report.html" not in page
    for k in (1, 3, 5):
        assert page.count(f"k={k}, concurrency 1") >= 3  # in the figures, and in their words
    assert {p.name for p in (tmp_path / "side" / "plots").glob("*.svg")} >= {
        "effects.svg", "acceptance.svg", "tokens-per-step.svg",
        "latency-concurrency-1-with-the-drafter.svg",
    }  # fmt: skip
    assert "Seconds by stage" in page and "k=3, speculative (n = 2)" in page


def test_a_run_without_a_manifest_stands_beside_others(tmp_path: Path) -> None:
    one, two = run(tmp_path / "one"), run(tmp_path / "two")
    (two / "manifest.json").unlink()
    (two / "cells" / "vllm-baseline-c1-r0" / "requests.parquet").write_bytes(b"PAR1")
    both = sides(one, two)
    assert [side.label for side in both] == ["one", "two"]
    assert len(both[1].run.notes) == 3
    assert all(row[2] == DASH for row in differences(both))


def test_mistakes_are_told_before_anything_is_written(tmp_path: Path) -> None:
    one, two = run(tmp_path / "one"), run(tmp_path / "two")
    with pytest.raises(UsageError, match="2 runs: say with --out DIR"):
        write_page([one, two], None)
    with pytest.raises(UsageError, match=r"--out .*: holds a run's manifest\.json"):
        write_page([one, two], two)
    with pytest.raises(UsageError, match="goes into its own folder; leave it out"):
        write_page([one], tmp_path / "side")
    with pytest.raises(UsageError, match="not a run's folder"):
        write_page([one, tmp_path], tmp_path / "side")
    assert not (tmp_path / "side").exists() and not (two / "report.html").exists()


def test_the_command_prints_where_the_page_is(tmp_path: Path) -> None:
    one, two = run(tmp_path / "one"), run(tmp_path / "two", k=5)
    out = tmp_path / "new" / "side"
    result = CliRunner().invoke(app, ["report", str(one), str(two), "--out", str(out)])
    assert (result.exit_code, result.stdout) == (0, f"{out / 'report.html'}\n")
    assert json.loads((one / "summary.json").read_bytes())["run_id"] == "one"
