"""What was not the same in the last good and the first bad run: the usual cause, in words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from harness.analyse.across.differences import differences
from harness.analyse.across.metrics import FIGURES, figure_of
from harness.analyse.across.records import Area, Difference
from harness.compare import read_stored
from harness.errors import UsageError
from harness.measure.store import RunFolder
from harness.nightly.judge import Case
from harness.nightly.records import Finding
from harness.nightly.view import SEARCH
from harness.report import words

NOTHING = "nothing that is recorded changed: suspect the machine"


def with_causes(findings: Sequence[Finding], case: Case, results: Path) -> list[Finding]:
    """The findings, each loss with what was not the same in the last good and the first bad run."""
    return [_with_cause(f, case, results) for f in findings]


def _with_cause(finding: Finding, case: Case, results: Path) -> Finding:
    if finding.direction != "worse" or finding.status in ("refuted", "known"):
        return finding
    readings = {r.night: r.run for r in case.series[finding.series].readings}
    good = readings.get(finding.last_good or "")
    if finding.source == "baseline" and case.baseline is not None:
        good = case.baseline.run
    bad = readings.get(finding.first_bad or "")
    if good is None or bad is None:
        return finding
    told = between(results / good, results / bad, finding.series.rpartition("/")[2])
    hints = bisections(results / good, results / bad, finding.series)
    return msgspec.structs.replace(finding, changed=(*told, *hints))


def between(good: Path, bad: Path, metric: str) -> list[str]:
    """Everything that differs in plan, code, versions, models and machine.

    What may move `metric` comes first. Says so where nothing does, or where a run is gone.
    """
    try:
        then, now = read_stored(good, "good"), read_stored(bad, "bad")
    except UsageError:
        gone = bad if good.is_dir() else good
        return [f"what changed is not known: the run {gone.name} is gone or cannot be read"]
    engines = {name: name for name in then.plans if name in now.plans}
    found = differences(then, now, engines)
    area = area_of(metric)
    found.sort(key=lambda d: area is not None and area not in d.affects)
    return [_line(d) for d in found] or [NOTHING]


def bisections(good: Path, bad: Path, series: str) -> list[str]:
    """The searches that would find the cause, where a commit or an engine's version changed."""
    try:
        then, now = RunFolder(good).manifest(), RunFolder(bad).manifest()
    except UsageError:
        return []
    command = f"{SEARCH}python -m harness nightly bisect {series} --suite FILE"
    found = []
    if then.git_commit and now.git_commit and then.git_commit != now.git_commit:
        found.append(f"{command} --commits {then.git_commit[:12]}..{now.git_commit[:12]}")
    engine = series.split("/")[1]
    was, is_ = (m.engine_versions.get(engine, {}) for m in (then, now))
    for name in (engine, f"{engine}-cpu"):
        if was.get(name) and is_.get(name) and was[name] != is_[name]:
            found.append(f"{command} --versions {was[name]},VERSIONS BETWEEN,{is_[name]}")
    return found


def area_of(metric: str) -> Area | None:
    """What a metric is about; None where the comparison of runs does not know it."""
    known = metric in FIGURES or metric.partition(".")[0] in FIGURES
    return figure_of(metric).area if known else None


def _line(told: Difference) -> str:
    was, is_ = (
        words.DASH if value is None else words.one_line(value, 120)
        for value in (told.reference, told.candidate)
    )
    return f"{told.key}: {was} -> {is_}"
