"""Reading the Prometheus text format, no more of it than engines' counters need."""

from __future__ import annotations

import re
from dataclasses import dataclass

from engines.base import RankCounters

_SAMPLE = re.compile(
    r"^(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)"
    r"(?:\{(?P<labels>(?:[^\"}]|\"(?:\\.|[^\"\\])*\")*)\})?"
    r"\s+(?P<value>\S+)"
)
_LABEL = re.compile(r"([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*\"((?:\\.|[^\"\\])*)\"")
MAX_VALUE = 2.0**63
"""Of a sample: what is no finite number below it is no count."""
MAX_POSITION = 1024
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One line of the text: a series and its value."""

    name: str
    labels: dict[str, str]
    value: float


def parse(text: str) -> list[Sample]:
    """All samples of a metrics page; comments and lines that are no samples are left out."""
    samples = []
    for line in text.splitlines():
        found = _SAMPLE.match(line.strip())
        if found is None:
            continue
        try:
            value = float(found["value"])
        except ValueError:
            continue
        if not abs(value) < MAX_VALUE:
            continue
        labels = {
            name: re.sub(r"\\[\\\"n]", lambda match: _ESCAPES[match[0]], raw)
            for name, raw in _LABEL.findall(found["labels"] or "")
        }
        samples.append(Sample(name=found["name"], labels=labels, value=value))
    return samples


REPEATING = ("tp_rank", "pp_rank", "moe_ep_rank")
"""Labels of ranks that work on the same requests: each tells the same figure."""
SEPARATE = ("engine", "dp_rank")
"""Labels of data-parallel ranks: each counts requests of its own."""


def once(samples: list[Sample]) -> list[Sample]:
    """Of series that differ in labels of `REPEATING` alone, the one of the lowest ranks.

    Not simply rank 0: where attention is data-parallel, rank 1 of the tensor-parallel group is the
    first of another data-parallel rank, and counts requests of its own.
    """
    lowest: dict[tuple[str, frozenset[tuple[str, str]]], tuple[tuple[int, ...], Sample]] = {}
    for sample in samples:
        own = frozenset(pair for pair in sample.labels.items() if pair[0] not in REPEATING)
        order = tuple(_rank(sample.labels.get(label, "")) for label in REPEATING)
        found = lowest.get((sample.name, own))
        if found is None or order < found[0]:
            lowest[sample.name, own] = (order, sample)
    return [sample for _, sample in lowest.values()]


def _rank(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) <= 6 else 0


def by_rank(samples: list[Sample], name: str) -> dict[str, int]:
    """`name` summed for each data-parallel rank, by its label, such as `engine=0`."""
    sums: dict[str, float] = {}
    for sample in samples:
        rank = next((f"{at}={sample.labels[at]}" for at in SEPARATE if at in sample.labels), None)
        if sample.name == name and rank is not None:
            sums[rank] = sums.get(rank, 0.0) + sample.value
    return {rank: round(value) for rank, value in sums.items()}


def rank_counters(
    samples: list[Sample],
    *,
    drafts: str,
    tokens: str,
    accepted: str = "",
    created: str = "",
) -> tuple[RankCounters, ...]:
    """Each data-parallel rank's share, from the series of these names; none without such labels."""
    by = {name: by_rank(samples, name) for name in (drafts, accepted, tokens, created)}
    return tuple(
        RankCounters(
            rank=rank,
            drafts=by[drafts].get(rank),
            accepted=by[accepted].get(rank),
            generation_tokens=by[tokens].get(rank),
            created_s=by[created].get(rank),
        )
        for rank in sorted({*by[drafts], *by[accepted], *by[tokens]})
    )


def first(samples: list[Sample], name: str) -> float | None:
    """The smallest value of `name`; None where there is no such series."""
    return min((s.value for s in samples if s.name == name), default=None)


def total(samples: list[Sample], name: str) -> int | None:
    """The sum of `name` over its series (one a rank); None where there is no such series."""
    values = [sample.value for sample in samples if sample.name == name]
    return round(sum(values)) if values else None


def total_by_position(samples: list[Sample], name: str) -> tuple[int, ...] | None:
    """`name` summed for each value of its label `position`, from 0; None where absent."""
    sums: dict[int, float] = {}
    for sample in samples:
        position = sample.labels.get("position", "")
        known = position.isdecimal() and len(position) <= 4 and int(position) < MAX_POSITION
        if sample.name == name and known:
            sums[int(position)] = sums.get(int(position), 0.0) + sample.value
    if not sums:
        return None
    return tuple(round(sums.get(position, 0.0)) for position in range(max(sums) + 1))
