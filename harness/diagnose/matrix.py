"""What the self-test keeps of a case, and the confusion matrix over all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from harness.diagnose.causes import CAUSES, NONE, UNKNOWN
from harness.diagnose.restored import WITHIN, Accepted, Fixed
from harness.errors import one_line


class CaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """One planted case: what should have been called, and what was.

    `what`: the fault or variant. `right`: every cause that is a right answer. `ranked`: the first
    five causes of the verdict. `emulated`: the planting stands for what needs GPUs or several
    ranks. `code`: the digests of what found the evidence and of what judged it. `then`: of two
    faults, what was called once the first that was called was mended (None: not in our power);
    `both`: whether each of them was called. `mends`, `mendable`: as the case says; `fixed`: what
    `--fix` did, None where it is not tried, or not yet.
    """

    name: str
    kind: Literal["fault", "healthy", "compound"]
    what: str
    engine: str
    seed: int
    severity: float
    cause: str
    right: tuple[str, ...]
    called: str
    collapse: bool
    ranked: tuple[str, ...]
    first: bool
    among_three: bool
    expected: float | None
    observed: float | None
    experiments: tuple[str, ...]
    skipped: dict[str, str]
    took_s: float
    code: str
    emulated: bool = False
    then: str | None = None
    both: bool | None = None
    mends: bool = False
    mendable: bool = False
    fixed: Fixed | None = None

    @property
    def to_fix(self) -> bool:
        """Whether `--fix` is tried: what is called is right, and it may mend that."""
        right = self.first or self.kind == "compound"
        return self.mends and right and self.called in CAUSES and CAUSES[self.called].fixable

    @property
    def untried(self) -> bool:
        """Whether `--fix` is still to be tried."""
        return self.to_fix and self.fixed is None

    @property
    def restored(self) -> bool:
        """Whether as much is accepted after `--fix` as of the case without its fault."""
        held = None if self.fixed is None else self.fixed.held
        return held is not None and abs(held.difference) <= WITHIN


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """So many of so many."""

    hits: int
    of: int

    def __str__(self) -> str:
        share = f" ({100 * self.hits / self.of:.0f}%)" if self.of else ""
        return f"{self.hits} of {self.of}{share}"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """All cases of one fault or variant."""

    what: str
    kind: Literal["fault", "healthy", "compound"]
    cause: str
    emulated: bool
    first: Tally
    among_three: Tally
    otherwise: dict[str, int]
    """What was called instead, by how often."""
    median_s: float
    severities: tuple[float, ...] = ()


class Mending(msgspec.Struct, frozen=True, kw_only=True):
    """One case after `--fix`."""

    what: str
    severity: float
    seed: int
    called: str
    restored: bool
    fixed: Fixed | None


class Matrix(msgspec.Struct, frozen=True, kw_only=True):
    """All cases of one engine. `planned`: how many there are, done or not."""

    engine: str
    planned: int
    done: int
    faults: int
    first: Tally
    among_three: Tally
    healthy: Tally
    compound: Tally
    both: Tally
    """Of two faults at once, of which one was called and mended: the other was called then."""
    unknown: int
    """Faults of which no cause was named: neither right nor a wrong name."""
    missed: int
    """Faults that were called none."""
    rows: tuple[Row, ...]
    confusion: dict[str, dict[str, int]]
    """By the true cause: what was called, by how often. Cases of one fault at a time."""
    seeds: tuple[int, ...] = ()
    """Of the cases of faults that are done."""
    median_s: float | None = None
    longest_s: float | None = None
    first_seed: int = 0
    restored: Tally = Tally(hits=0, of=0)
    """Cases of faults in our power, of which as much as expected is accepted after `--fix`."""
    mendings: tuple[Mending, ...] = ()
    """These cases."""
    beyond: tuple[str, ...] = ()
    """Faults that `--fix` has no means against."""
    schema: str = "1.1"

    @property
    def right(self) -> bool:
        """Whether every case that is done was called by a right name."""
        tallies = (self.first, self.healthy, self.compound)
        return all(tally.hits == tally.of for tally in tallies)


def matrix_of(
    engine: str, results: Sequence[CaseResult], *, planned: int, first_seed: int = 0
) -> Matrix:
    """Pool the cases."""
    faults = [r for r in results if r.kind == "fault"]
    healthy = [r for r in results if r.kind == "healthy"]
    compound = [r for r in results if r.kind == "compound"]
    confusion: dict[str, Counter[str]] = {}
    for result in (*faults, *healthy):
        called = result.cause if result.first else result.called
        confusion.setdefault(result.cause, Counter())[called] += 1
    times = sorted(r.took_s for r in results)
    mended = [r for r in faults if _in_our_power(r)]
    return Matrix(
        engine=engine,
        planned=planned,
        done=len(results),
        faults=len({r.what for r in faults}),
        first=_tally(r.first for r in faults),
        among_three=_tally(r.among_three for r in faults),
        healthy=_tally(r.first and not r.collapse for r in healthy),
        compound=_tally(r.first for r in compound),
        both=_tally(r.both for r in compound if r.both is not None),
        unknown=sum(r.called == UNKNOWN for r in faults),
        missed=sum(r.called == NONE for r in faults),
        rows=tuple(_rows(results)),
        confusion={cause: dict(called.most_common()) for cause, called in confusion.items()},
        seeds=tuple(sorted({r.seed for r in faults})),
        median_s=times[len(times) // 2] if times else None,
        longest_s=times[-1] if times else None,
        first_seed=first_seed,
        restored=_tally(r.restored for r in mended),
        mendings=tuple(_mending(r) for r in mended),
        beyond=_beyond(faults),
    )


def _in_our_power(result: CaseResult) -> bool:
    """A case that `--fix` changed something of, or has to; one that is not tried yet is neither."""
    if not result.mends or result.untried:
        return False
    return result.mendable or (result.fixed is not None and bool(result.fixed.changes))


def _beyond(faults: Sequence[CaseResult]) -> tuple[str, ...]:
    tried = [r for r in faults if r.mends and not r.untried]
    power = {r.what for r in faults if r.mendable or _in_our_power(r)}
    return tuple(dict.fromkeys(r.what for r in tried if r.what not in power))


def _mending(result: CaseResult) -> Mending:
    return Mending(
        what=result.what,
        severity=result.severity,
        seed=result.seed,
        called=result.called,
        restored=result.restored,
        fixed=result.fixed,
    )


def _tally(hits: Iterable[bool]) -> Tally:
    whole = list(hits)
    return Tally(hits=sum(whole), of=len(whole))


def _rows(results: Sequence[CaseResult]) -> Iterable[Row]:
    groups: dict[tuple[str, str], list[CaseResult]] = {}
    for result in results:
        groups.setdefault((result.kind, result.what), []).append(result)
    for group in groups.values():
        one = group[0]
        otherwise = Counter(r.called for r in group if not r.first)
        times = sorted(r.took_s for r in group)
        yield Row(
            what=one.what,
            kind=one.kind,
            cause=one.cause,
            emulated=one.emulated,
            first=_tally(r.first for r in group),
            among_three=_tally(r.among_three for r in group),
            otherwise=dict(otherwise.most_common()),
            median_s=times[len(times) // 2],
            severities=tuple(sorted({r.severity for r in group}, reverse=True)),
        )


def to_markdown(matrix: Matrix) -> str:
    """The page that is kept in docs/."""
    lines = [
        f"# Diagnosis of planted faults: {matrix.engine}",
        "",
        "Made by `python -m harness diagnose --self-test"
        + ("" if matrix.engine == "reference" else f" --engine {matrix.engine}")
        + (f" --first-seed {matrix.first_seed}" if matrix.first_seed else "")
        + " --write`; a case is one fault at one severity with the prompts of one seed. Faults "
        "marked with * stand for what needs GPUs or several ranks, by a hook.",
        "",
        f"- cases: {matrix.done} of {matrix.planned} done, {matrix.faults} distinct faults"
        + (f", prompts of seed {', '.join(map(str, matrix.seeds))}" if matrix.seeds else ""),
        f"- the true cause is called: {matrix.first}; among the first three: {matrix.among_three}",
        f'- otherwise: "unknown" {matrix.unknown}, "none" {matrix.missed}, a wrong name '
        f"{matrix.first.of - matrix.first.hits - matrix.unknown - matrix.missed}",
        f"- healthy variants without a fault called: {matrix.healthy}",
        f"- two faults at once, one of them called: {matrix.compound}; of those that could be "
        f"mended the other was called then: {matrix.both}",
        *_power(matrix),
        *_times(matrix),
        "",
    ]
    for kind, title in (
        ("fault", "Faults"),
        ("healthy", "Healthy variants"),
        ("compound", "Two faults at once"),
    ):
        rows = [row for row in matrix.rows if row.kind == kind]
        if rows:
            lines += [f"## {title}", "", *_table(rows), ""]
    if matrix.mendings:
        lines += ["## After --fix", "", *_mended(matrix.mendings), ""]
    lines += ["## What was called, by the true cause", "", *_confusion(matrix.confusion), ""]
    return "\n".join(lines)


def _power(matrix: Matrix) -> Iterable[str]:
    if matrix.restored.of or matrix.beyond:
        names = f" ({', '.join(matrix.beyond)})" if matrix.beyond else ""
        faults = f"{len(matrix.beyond)} fault{'' if len(matrix.beyond) == 1 else 's'}"
        yield (
            f"- `--fix`: restored to within {100 * WITHIN:g} points: {matrix.restored}; not in our "
            f"power: {faults}{names}"
        )


def _times(matrix: Matrix) -> Iterable[str]:
    if matrix.median_s is not None and matrix.longest_s is not None:
        median, longest = matrix.median_s, matrix.longest_s
        yield f"- seconds a case: {median:.0f} in the median, {longest:.0f} at most"


def _table(rows: Sequence[Row]) -> Iterable[str]:
    yield "| planted | severity | true cause | called | among three | otherwise | seconds |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        star = "*" if row.emulated else ""
        otherwise = ", ".join(f"{name} {count}" for name, count in row.otherwise.items())
        at = ", ".join(f"{severity:g}" for severity in row.severities)
        yield (
            f"| {row.what}{star} | {at} | {row.cause} | {row.first.hits}/{row.first.of} | "
            f"{row.among_three.hits}/{row.among_three.of} | {otherwise} | {row.median_s:.0f} |"
        )


def _mended(mendings: Sequence[Mending]) -> Iterable[str]:
    """Before, after and expected: accepted of the drafts, and tokens a step."""
    yield (
        "Shares of the drafts that are accepted, with the 95% interval over the prompts; tokens a "
        "step. What is expected is what the drafter promises that was there before the fault, on "
        "the same prompts; the difference is in points, with its standard error, paired by prompt. "
        f"Prompts of seed {', '.join(map(str, sorted({m.seed for m in mendings})))}."
    )
    yield ""
    yield "| fault | severity | before | after | expectation | difference | changed |"
    yield "|---|---|---|---|---|---|---|"
    for each in mendings:
        fixed = each.fixed
        held = None if fixed is None else fixed.held
        cells = (
            each.what,
            f"{each.severity:g}",
            "-" if fixed is None or fixed.before is None else f"{100 * fixed.before:.1f}%",
            "-" if held is None else _accepted(held.after, interval=True),
            "-" if held is None else _accepted(held.expected, interval=False),
            "-" if held is None else _points(held.difference, held.error),
            _changed(each),
        )
        yield f"| {' | '.join(cells)} |"


def _accepted(found: Accepted, *, interval: bool) -> str:
    share, length = found.share, found.length
    told = "-" if share.share is None else f"{100 * share.share:.1f}%"
    if interval and share.low is not None and share.high is not None:
        told += f" [{100 * share.low:.1f}, {100 * share.high:.1f}]"
    return told + ("" if length.length is None else f", {length.length:.2f}")


def _points(difference: float, error: float | None) -> str:
    scatter = "" if error is None else f" ± {100 * error:.1f}"
    points = round(100 * difference, 1) + 0.0  # not -0.0
    return f"{points:+.1f}{scatter}"


def _changed(mending: Mending) -> str:
    """What was changed, and what was left; of what was not tried what was called."""
    fixed = mending.fixed
    if fixed is None:
        return f"not tried: {mending.called} was called"
    told = [*fixed.changes]
    if fixed.left is not None:
        told.append(f"still called: {fixed.left}")
    if fixed.why_not is not None:
        told.append(fixed.why_not)
    return one_line("; ".join(told), 160).replace("|", "/")


def _confusion(confusion: dict[str, dict[str, int]]) -> Iterable[str]:
    yield "| true cause | called |"
    yield "|---|---|"
    for cause in sorted(confusion):
        called = ", ".join(f"{name} {count}" for name, count in confusion[cause].items())
        yield f"| {cause} | {called} |"
