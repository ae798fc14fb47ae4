"""Service levels: which requests met them. Goodput counts those alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from harness.measure.columns import Bools, Floats
from harness.measure.metrics import e2el_from_due_s, e2el_s, tpot_s, ttft_from_due_s, ttft_s
from harness.measure.table import RequestTable
from harness.records import RequestRecord


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """The most that each figure of a request may be, in seconds; None: any."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2el_s: float | None = None

    @property
    def said(self) -> bool:
        """Whether any level is set."""
        return any(getattr(self, name) is not None for name in self.__struct_fields__)

    def words(self) -> str:
        """The levels in words, for example `ttft <= 200 ms, tpot <= 50 ms`."""
        levels = [(name, getattr(self, name)) for name in self.__struct_fields__]
        return ", ".join(
            f"{name.removesuffix('_s')} <= {1000 * bound:g} ms"
            for name, bound in levels
            if bound is not None
        )


def slo_of(plan: Mapping[str, Any]) -> Slo:
    """The levels of a stored plan; none in a plan of a time before there were any."""
    return msgspec.convert(plan.get("slo") or {}, Slo)


def meets(records: Sequence[RequestRecord], slo: Slo) -> Bools:
    """Which requests were answered whole and within every level.

    Open loop: the time to the first token and to the end count from when the request was due. A
    time per token that is undefined, as of an answer in one chunk, breaks no level; one that is
    not known, as the server counts no tokens, is not known to meet one.
    """
    return strain(records, slo) <= 1


def strain(records: Sequence[RequestRecord], slo: Slo) -> Floats:
    """The largest of each request's figures over their bounds: 1 is just within the levels.

    0 where no level is set; NaN where it was not answered whole, or cannot be judged.
    """
    table = RequestTable.of(records)
    due = table.ints("due_ns").known
    first = np.where(due, ttft_from_due_s(table), ttft_s(table))
    judged = table.answered & np.isfinite(first)
    if slo.tpot_s is not None:
        judged &= ~uncounted(table)
    used = np.full(len(table), -np.inf)
    for bound, figure in (
        (slo.ttft_s, lambda: first),
        (slo.tpot_s, lambda: tpot_s(table)),
        (slo.e2el_s, lambda: np.where(due, e2el_from_due_s(table), e2el_s(table))),
    ):
        if bound is not None:
            used = np.fmax(used, figure() / bound)
    return np.where(judged, np.where(np.isfinite(used), used, 0.0), np.nan)


def uncounted(records: Sequence[RequestRecord]) -> Bools:
    """Of which requests the time per token is unknown, for want of the server's own counts."""
    table = RequestTable.of(records)
    counted = table.ints("output_tokens").known & table.lists("chunk_tokens").known
    return (table.lists("chunk_ns").sizes > 1) & ~counted


def attained(records: Sequence[RequestRecord], slo: Slo) -> tuple[int, int]:
    """How many requests met the levels, and of how many: failed and dropped ones are missed."""
    return int(meets(records, slo).sum()), len(records)
