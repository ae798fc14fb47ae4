"""Service levels: which requests met them. Goodput counts those alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from harness.measure.metrics import e2el_from_due_s, e2el_s, tpot_s, ttft_from_due_s, ttft_s
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


def meets(r: RequestRecord, slo: Slo) -> bool:
    """Whether the request was answered whole and within every level.

    Open loop: the time to the first token and to the end count from when the request was due. A
    time per token that is undefined, as of an answer in one chunk, breaks no level; one that is
    not known, as the server counts no tokens, is not known to meet one.
    """
    used = strain(r, slo)
    return used is not None and used <= 1


def strain(r: RequestRecord, slo: Slo) -> float | None:
    """The largest of the request's figures over their bounds: 1 is just within the levels.

    0 where no level is set; None where the request was not answered whole, or cannot be judged.
    """
    if r.status != "ok" or (slo.tpot_s is not None and uncounted(r)):
        return None
    due = r.due_ns is not None
    found = {
        "ttft_s": ttft_from_due_s(r) if due else ttft_s(r),
        "tpot_s": tpot_s(r),
        "e2el_s": e2el_from_due_s(r) if due else e2el_s(r),
    }
    if found["ttft_s"] is None:
        return None
    used = [
        value / bound
        for name, value in found.items()
        if value is not None and (bound := getattr(slo, name)) is not None
    ]
    return max(used, default=0.0)


def uncounted(r: RequestRecord) -> bool:
    """Whether the time per token is unknown, for want of the server's own counts."""
    return len(r.chunk_ns) > 1 and (r.output_tokens is None or r.chunk_tokens is None)


def attained(records: Sequence[RequestRecord], slo: Slo) -> tuple[int, int]:
    """How many requests met the levels, and of how many: failed and dropped ones are missed."""
    return sum(meets(r, slo) for r in records), len(records)
