"""A run of a million requests is analysed in seconds; its figures are those of plain arithmetic."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import pytest
from many_records import CONCURRENCY, write_run

from harness.analyse.bootstrap import figures
from harness.findings import CellSummary, Summary
from harness.measure.store import RunFolder
from harness.records import RequestRecord

REPO = Path(__file__).resolve().parents[2]
FEW, MANY = 20_000, 1_000_000
MOST_S, MOST_GB = 10.0, 2.0


class Took(NamedTuple):
    """What one command used: seconds by the clock and of the processors, and memory at its peak."""

    wall_s: float
    cpu_s: float
    gigabytes: float

    def words(self, command: str) -> str:
        return (
            f"{command}: {self.wall_s:.1f} s, {self.cpu_s:.1f} s of the processors, "
            f"{self.gigabytes:.2f} GB at most"
        )


def harness(command: str, folder: Path) -> Took:
    """Run a command on a folder, to its end; what it used is the kernel's own count."""
    begun = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "harness", command, str(folder)],
        cwd=REPO, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    said = process.stderr.read()
    process.stderr.close()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, said.decode()
    cpu_s = used.ru_utime + used.ru_stime
    return Took(time.monotonic() - begun, cpu_s, used.ru_maxrss * 1024 / 1e9)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 20,000 requests, analysed."""
    folder = tmp_path_factory.mktemp("many") / "run"
    write_run(folder, FEW, repeats=2, blocks=1)
    harness("analyse", folder)
    return folder


def told(folder: Path) -> Summary:
    return RunFolder(folder).summary()


def inside(cell: CellSummary, records: list[RequestRecord]) -> list[RequestRecord]:
    """The whole answers of the steady window, by its rule: all but the first and last senders'."""
    ends = sorted((r.end_ns or 0) for r in records if r.status == "ok")
    full = sorted(r.sent_ns or 0 for r in records)[CONCURRENCY - 1]
    opened = next(e for e in ends if e >= full)
    placed = sorted(records, key=lambda r: r.sent_ns or 0)
    window = [r for r in placed if (r.sent_ns or 0) >= opened][:-CONCURRENCY]
    assert cell.metrics is not None and cell.metrics.steady is not None
    assert cell.metrics.steady.level == "steady"
    return [r for r in window if r.status == "ok"]


def test_the_figures_are_those_of_plain_arithmetic(few: Path) -> None:
    for cell in told(few).cells:
        records = list(RunFolder(few).requests(cell.cell_id))
        ok = [r for r in records if r.status == "ok"]
        mine, m = inside(cell, records), cell.metrics
        assert m is not None
        first = [(r.chunk_ns[0] - (r.sent_ns or 0)) / 1e9 for r in mine]
        assert m.ttft_s.n == len(mine)
        assert m.ttft_s.mean == pytest.approx(fmean(first), rel=1e-12)
        assert m.ttft_s.p50 == pytest.approx(median(first), rel=1e-12)
        each = [
            (r.chunk_ns[-1] - r.chunk_ns[0]) / 1e9 / ((r.output_tokens or 0) - r.chunk_tokens[0])
            for r in mine
            if r.chunk_tokens
        ]
        assert m.tpot_s.mean == pytest.approx(fmean(each), rel=1e-12)
        assert m.output_tokens == sum(r.output_tokens or 0 for r in ok)
        assert (m.requests_ok, m.requests_failed) == (len(ok), len(records) - len(ok))
        assert cell.categories["code"].ok == sum(r.category == "code" for r in ok)


def test_the_acceptance_is_that_of_the_requests(few: Path) -> None:
    summary = told(few)
    for cell in summary.cells:
        if cell.variant == "baseline":
            continue
        ok = [r for r in RunFolder(few).requests(cell.cell_id) if r.status == "ok"]
        own = [r.acceptance for r in ok if r.acceptance is not None]
        assert cell.acceptance is not None
        told_ = cell.acceptance.sources["per_request"]
        assert told_ is not None
        assert (told_.drafts, told_.accepted) == (
            sum(c.drafts for c in own),
            sum(c.accepted for c in own),
        )
        assert told_.per_position == tuple(
            sum(c.per_position[i] for c in own if c.per_position) for i in range(3)
        )
    (splits,) = summary.splits
    steps = sum(c.acceptance.sources["per_request"].drafts for c in summary.cells if c.acceptance)  # type: ignore[union-attr]
    for split in splits.splits:
        if split.by in ("category", "output_tokens", "output_quarter", "run_time"):
            assert sum(part.drafts for part in split.parts) == steps


def test_outputs_are_compared_answer_by_answer(few: Path) -> None:
    folder = RunFolder(few)
    for cell in told(few).cells:
        if cell.variant == "baseline":
            continue
        partner = folder.requests(cell.cell_id.replace("speculative", "baseline"))
        theirs = {r.index: r for r in partner if r.status == "ok"}
        both = [
            (theirs[r.index], r)
            for r in folder.requests(cell.cell_id)
            if r.status == "ok" and r.index in theirs
        ]
        assert cell.integrity is not None
        assert cell.integrity.compared == len(both)
        parted = [r for base, r in both if base.token_ids != r.token_ids]
        assert cell.integrity.diverged == len(parted) > 0
        assert cell.integrity.first_divergence[0]["index"] == parted[0].index


def test_the_same_records_give_the_same_bytes(few: Path) -> None:
    before = (few / "summary.json").read_bytes()
    harness("analyse", few)
    assert (few / "summary.json").read_bytes() == before


def test_requests_are_drawn_anew_by_their_own_figures(few: Path) -> None:
    table = RunFolder(few).requests(told(few).cells[0].cell_id)
    rows = figures(table)
    assert len(rows) == len(table.ok)
    assert rows[:50].tolist() == figures(table.records()[:51])[:50].tolist()


@pytest.mark.full
def test_the_report_of_200_000_requests_is_made_in_ten_seconds_and_stays_small(
    tmp_path: Path,
) -> None:
    """By the clock; where others' work is in that too, on a busy machine, by the processors."""
    folder = tmp_path / "run"
    write_run(folder, 200_000)
    harness("analyse", folder)
    took = harness("report", folder)
    size = (folder / "report.html").stat().st_size
    print(f"\n{took.words('report')}; {size:,} bytes")
    assert min(took.wall_s, took.cpu_s) < MOST_S
    assert took.gigabytes < MOST_GB
    assert size < 5_000_000


@pytest.mark.full
def test_a_million_requests_are_analysed_in_ten_seconds_and_two_gigabytes(tmp_path: Path) -> None:
    """By the clock; where others' work is in that too, on a busy machine, by the processors."""
    folder = tmp_path / "run"
    cells = write_run(folder, MANY)
    took = harness("analyse", folder)
    print(f"\n{MANY:,} requests in {len(cells)} cells\n{took.words('analyse')}")
    print(harness("report", folder).words("report"))
    assert sum(c.metrics.requests_ok for c in told(folder).cells if c.metrics) > 0.98 * MANY
    assert min(took.wall_s, took.cpu_s) < MOST_S
    assert took.gigabytes < MOST_GB
