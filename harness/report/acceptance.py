"""What a report says of acceptance beyond its headline: intervals, sources, splits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.analyse.acceptance import pooled_sources
from harness.findings import (
    AcceptanceEstimates,
    AcceptanceSplits,
    Estimate,
    MergedChunks,
    Split,
    Summary,
)
from harness.records import DraftCounts
from harness.report import words
from harness.report.view import Group

TITLES = {
    "category": "By category",
    "output_tokens": "By place in the output, in tokens",
    "output_quarter": "By place in the output, in quarters of the answer",
    "thinking": "Inside and after the thinking",
    "request": "The prompts with the lowest and the highest length",
    "run_time": "Over the measured phase",
}
SOURCE_WORDS = {
    "counters": "the server's counters",
    "per_request": "the engine's figures of each request",
    "client": "tokens in each chunk at the client",
}


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table of strings, neither escaped nor marked up; the first column is text."""

    title: str
    note: str
    columns: tuple[str, ...]
    rows: list[list[str]]


def acceptance_tables(summary: Summary, group: Group) -> list[Table]:
    """The tables of one engine and load; none where it has no speculative figures."""
    sources = _sources(group)
    found = next(
        (s for s in summary.splits if (s.engine, s.load) == (group.engine, group.load)), None
    )
    tables = [] if sources is None else [sources]
    if found is not None:
        tables = [*_figures(found), *tables, *map(_split, found.splits)]
    return tables


def _figures(found: AcceptanceSplits) -> list[Table]:
    if found.estimates is None:
        return []
    e = found.estimates
    level = f"{e.confidence:.0%} interval"
    rows = [
        ["acceptance length, pooled over steps", *_length(e.length)],
        ["acceptance length, mean over requests", *_length(e.length_request_mean)],
        ["acceptance rate, pooled over steps", *_share(e.rate)],
        ["acceptance rate, mean over requests", *_share(e.rate_request_mean)],
    ]
    if e.source == "per_request":
        rows.append(["acceptance length, of the output alone", *_length(e.length_output)])
    for i, position in enumerate(e.per_position):
        rows.append([f"accepted at position {i}", *_share(position)])
    for i, position in enumerate(e.per_position_conditional[1:], start=1):
        rows.append([f"accepted at position {i}, given {i - 1}", *_share(position)])
    return [
        Table(
            title="Acceptance with intervals",
            note=_basis(e, found.merged),
            columns=("figure", "value", level),
            rows=rows,
        )
    ]


def _basis(e: AcceptanceEstimates, merged: MergedChunks | None) -> str:
    said = [
        f"from {SOURCE_WORDS[e.source]}, {words.plural(e.requests, 'request')} to "
        f"{words.plural(e.clusters, 'prompt')}"
    ]
    if e.past_end:
        said.append(
            f"{words.plural(e.past_end, 'accepted token')} stood behind an answer's end and "
            "count in all figures but that of the output"
        )
    if e.uncorrected and e.source == "per_request":
        said.append(f"of {words.plural(e.uncorrected, 'request')} that is not known")
    if merged is not None and merged.share is not None:
        least = "at least " if merged.by == "chunk_size" else ""
        of = "verify steps" if merged.steps is not None else "chunks"
        said.append(f"{least}{words.percent(merged.share)} of {of} came merged with another")
    return "; ".join(said)


def _sources(group: Group) -> Table | None:
    """Each source's pooled counts; a source that a cell lacks is told of none."""
    cells = [c.acceptance for c in group.cells if c.acceptance is not None]
    if not cells:
        return None
    believed = ", ".join(dict.fromkeys(SOURCE_WORDS[a.source] for a in cells))
    return Table(
        title="By source",
        note=f"believed: {believed}",
        columns=("source", "length", "drafts", "drafted", "accepted"),
        rows=[
            [SOURCE_WORDS[name], *_counts(counts)] for name, counts in pooled_sources(cells).items()
        ],
    )


def _counts(counts: DraftCounts | None) -> Sequence[str]:
    if counts is None or not counts.drafts:
        return [words.DASH] * 4
    numbers = map(words.count, (counts.drafts, counts.drafted, counts.accepted))
    return [words.fixed(1 + counts.accepted / counts.drafts, 3), *numbers]


def _split(split: Split) -> Table:
    return Table(
        title=TITLES[split.by],
        note=f"from {SOURCE_WORDS[split.source]}",
        columns=("part", "length", "interval", "verify steps", "requests"),
        rows=[
            [
                words.one_line(part.name, 60),
                *_length(part.length),
                words.count(part.drafts),
                words.count(part.requests),
            ]
            for part in split.parts
        ],
    )


def _length(e: Estimate) -> list[str]:
    ends = f"{words.fixed(e.low, 3)} to {words.fixed(e.high, 3)}"
    return [words.fixed(e.value, 3), words.DASH if e.low is None else ends]


def _share(e: Estimate) -> list[str]:
    ends = f"{words.percent(e.low)} to {words.percent(e.high)}"
    return [words.percent(e.value), words.DASH if e.low is None else ends]
