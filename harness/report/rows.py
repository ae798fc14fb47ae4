"""A group's figures as labelled rows of text, the same on the terminal and on the page."""

from __future__ import annotations

from collections.abc import Callable

from harness.records import VARIANTS, Variant
from harness.report import view, words
from harness.report.telemetry import telemetry_rows
from harness.report.view import Group
from harness.report.words import DASH


def how_pooled(groups: tuple[Group, ...]) -> str:
    """What the figures of several repeats are made of."""
    every = {group.blocks[variant] for group in groups for variant in sides(group)}
    most = max(every, default=0)
    few = "" if len(every) < 2 else " at most"
    told = next((group.method for group in groups if group.method), "over paired blocks")
    averaged = f"Throughput and latency: average over {words.plural(most, 'block')} a variant{few}"
    if all(len(sides(group)) < 2 for group in groups):
        return f"{averaged}. Acceptance and task accuracy: pooled counts."
    told = told.partition("; verdicts by")[0] + _correction(groups)
    return (
        f"{averaged}; ratio: speculative over baseline, {words.one_line(told, 300)}. "
        "Acceptance, identical outputs and task accuracy: pooled counts."
    )


def _correction(groups: tuple[Group, ...]) -> str:
    """Of how many comparisons verdicts take account; the run's question has a family of its own."""
    families = [row.family for g in groups for row in g.rows if row.family > 1]
    if not families:
        return ""
    most = max(families)
    told = f"up to {most}" if min(families) < most else str(most)
    return f"; verdicts take account of {told} comparisons made at once (Holm)"


def sides(group: Group) -> tuple[Variant, ...]:
    """The variants to show: those that have cells; both where none has."""
    return tuple(v for v in VARIANTS if any(c.variant == v for c in group.cells)) or VARIANTS


def side_rows(group: Group) -> list[tuple[str, tuple[str, ...]]]:
    """`quality_rows` of the variants that are shown; of one alone no row that says nothing."""
    shown = sides(group)
    rows = [
        (label, tuple(dict(zip(VARIANTS, both, strict=True))[v] for v in shown))
        for label, *both in quality_rows(group)
    ]
    return [row for row in rows if len(shown) > 1 or row[1] != (DASH,)]


def quality_rows(group: Group) -> list[tuple[str, str, str]]:
    """Label, baseline and speculative of all that has no ratio: acceptance, identity, accuracy."""
    pooled = group.acceptance
    accuracy = group.accuracy
    base, spec = group.quantiles["baseline"], group.quantiles["speculative"]
    rows = [
        *((f"TTFT/TPOT/E2E, {q}, ms", _triple(base[q]), _triple(spec[q])) for q in base),
        ("acceptance rate", DASH, words.percent(pooled.rate if pooled else None)),
        ("acceptance length", DASH, words.fixed(pooled.length if pooled else None)),
        ("accepted, by position", DASH, _positions(pooled.per_position if pooled else ())),
        ("  given the one before", DASH, _positions(pooled.conditional if pooled else ())),
        ("identical outputs", DASH, identical(group)),
    ]
    if any(side.n for side in accuracy.values()):
        right = [_accuracy(accuracy[v].rate, accuracy[v].n) for v in ("baseline", "speculative")]
        rows.append(("task accuracy", right[0], right[1]))
    base_ok, base_failed = group.requests["baseline"]
    spec_ok, spec_failed = group.requests["speculative"]
    if base_failed or spec_failed:
        shares = (_failed(base_ok, base_failed), _failed(spec_ok, spec_failed))
        rows.append(("failed requests", *shares))
    return [*rows, *_window_rows(group), *telemetry_rows(group)]


def _window_rows(group: Group) -> list[tuple[str, str, str]]:
    """The steady window, and what there is of goodput and of dropped and late requests."""
    both = [group.windows["baseline"], group.windows["speculative"]]

    def row(label: str, of: Callable[[view.Window], str]) -> tuple[str, str, str]:
        shown = [DASH if window is None else of(window) for window in both]
        return label, shown[0], shown[1]

    known = [window for window in both if window is not None]
    rows = [row("in the steady window", lambda w: words.share(w.requests, w.of))] if known else []
    if any(w.goodput_share is not None for w in known):
        rows.append(row("met the service levels", lambda w: words.percent(w.goodput_share)))
        rows.append(row("goodput, requests/s", lambda w: words.number(w.goodput_per_s)))
    if any(w.dropped for w in known):
        rows.append(row("dropped requests", lambda w: words.share(w.dropped, w.of)))
    if any(w.first_reasoning_s is not None for w in known):
        rows.append(row("first thinking / answer, ms", _firsts))
    if any(w.late for w in known):
        rows.append(row("sent late", lambda w: words.share(w.late, w.of)))
    return rows


def _firsts(window: view.Window) -> str:
    thinking = words.milliseconds(window.first_reasoning_s)
    return f"{thinking} / {words.milliseconds(window.first_answer_s)}"


CATEGORY_COLUMNS = (
    "category",
    "answered",
    "TPOT, ms, baseline",
    "TPOT, ms, speculative",
    "ratio",
    "length",
    "right, baseline",
    "right, speculative",
)


def category_table(group: Group) -> tuple[tuple[str, ...], list[list[str]]]:
    """Columns and rows, without those of a variant that was not measured."""
    shown = sides(group)
    gone = {v for v in VARIANTS if v not in shown}
    keep = [
        i
        for i, name in enumerate(CATEGORY_COLUMNS)
        if not any(name.endswith(v) for v in gone)
        and not (gone and name == "ratio")
        and not ("speculative" in gone and name == "length")
    ]
    rows = [[row[i] for i in keep] for row in category_rows(group)]
    return tuple(CATEGORY_COLUMNS[i] for i in keep), rows


def category_rows(group: Group) -> list[list[str]]:
    """One row a category, by `CATEGORY_COLUMNS`; the ratio is of times, without an interval."""
    rows = []
    for name, sides in group.categories.items():
        base, spec = sides["baseline"], sides["speculative"]
        times = [side.tpot_s if side else None for side in (base, spec)]
        ratio = times[1] / times[0] if times[0] and times[1] else None
        known = [side for side in (base, spec) if side is not None]
        rows.append(
            [
                words.one_line(name, 60),
                words.share(sum(s.ok for s in known), sum(s.requests for s in known)),
                *(words.milliseconds(t) for t in times),
                words.ratio(ratio, None, None),
                words.fixed(spec.acceptance_length if spec else None),
                *(words.percent(s.accuracy.rate if s else None) for s in (base, spec)),
            ]
        )
    return rows


def window_rules(groups: tuple[Group, ...]) -> str:
    """Which requests the latencies are of; empty where that is not known.

    Each rule stands once, behind the loads that it is for where there are several rules.
    """
    loads: dict[str, dict[str, None]] = {}
    for group in groups:
        for window in group.windows.values():
            for rule in () if window is None else window.rules:
                loads.setdefault(rule, {})[group.name] = None
    if not loads:
        return ""
    told = [f"{' and '.join(names)}: {rule}" for rule, names in loads.items()]
    return f"Steady window, which latencies are of: {'; '.join(told if len(loads) > 1 else loads)}."


def identical(group: Group) -> str:
    """Outputs equal to the baseline's, of those compared."""
    part = group.integrity
    return DASH if part is None else words.share(part.identical, part.compared)


def _positions(rates: tuple[float | None, ...] | tuple[float, ...]) -> str:
    return " / ".join(words.fixed(rate) for rate in rates) or DASH


def _triple(seconds: tuple[float | None, ...]) -> str:
    if all(words.missing(value) for value in seconds):
        return DASH
    return " / ".join(words.milliseconds(value) for value in seconds)


def _accuracy(rate: float | None, n: int) -> str:
    return DASH if rate is None else f"{words.percent(rate)} (n = {n:,d})"


def _failed(ok: int, failed: int) -> str:
    return words.share(failed, ok + failed)
