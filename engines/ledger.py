"""What each start-up phase used: the differences between samples, credited to the phase they span.

Samples are taken at every change of phase, so that none spans two. A process that came and went
between two of them is not seen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from engines.activity import ProcessUse, Sample
from engines.base import PhaseUse

NOTHING = ProcessUse(cpu_s=0.0, read_bytes=0, written_bytes=0, read_call_bytes=0)


@dataclass(kw_only=True)
class _Account:
    cpu_s: float = 0.0
    rss_bytes: int = 0
    read_bytes: int | None = 0
    written_bytes: int | None = 0
    read_call_bytes: int | None = 0
    network_bytes: int | None = 0
    gpu_bytes: int | None = None


class PhaseLedger:
    """Fed with samples in order, each with the phase that ended or went on with it."""

    def __init__(self) -> None:
        self._accounts: dict[int, _Account] = defaultdict(_Account)
        self._first: Sample | None = None
        self._last: Sample | None = None

    def feed(self, now: Sample, phase: int) -> None:
        """Credit what happened since the last sample to the stretch of number `phase`."""
        before, self._last = self._last, now
        if self._first is None:
            self._first = now
        if before is None or not now.each:
            return
        account = self._accounts[phase]
        for key, use in now.each.items():
            was = before.each.get(key, NOTHING)  # born since: all it used
            account.cpu_s += use.cpu_s - was.cpu_s
            for name in ("read_bytes", "written_bytes", "read_call_bytes"):
                known = (getattr(account, name), getattr(use, name), getattr(was, name))
                setattr(account, name, _grown(*known))
        account.rss_bytes = max(account.rss_bytes, now.rss_bytes)
        account.network_bytes = _grown(
            account.network_bytes, now.network_bytes, before.network_bytes
        )
        if now.gpu_used_bytes is not None and self._first.gpu_used_bytes is not None:
            above = max(0, now.gpu_used_bytes - self._first.gpu_used_bytes)
            account.gpu_bytes = max(above, account.gpu_bytes or 0)

    def use(self, phase: int) -> PhaseUse | None:
        """What was used in a stretch; None where no sample ends in it."""
        account = self._accounts.get(phase)
        return None if account is None else PhaseUse(**vars(account))


def _grown(total: int | None, now: int | None, was: int | None) -> int | None:
    """A counter's total and its growth; one that cannot be read makes the total unknown."""
    if total is None or now is None or was is None:
        return None
    return total + max(0, now - was)


def added(uses: Iterable[PhaseUse | None]) -> PhaseUse | None:
    """Several stretches as one: sums, and of memory the most."""
    known = [use for use in uses if use is not None]
    if not known:
        return None

    def total(name: str) -> int | None:
        values = [getattr(use, name) for use in known]
        return None if None in values else sum(values)

    gpus = [use.gpu_bytes for use in known if use.gpu_bytes is not None]
    return PhaseUse(
        cpu_s=sum(use.cpu_s for use in known),
        rss_bytes=max(use.rss_bytes for use in known),
        read_bytes=total("read_bytes"),
        written_bytes=total("written_bytes"),
        read_call_bytes=total("read_call_bytes"),
        network_bytes=total("network_bytes"),
        gpu_bytes=max(gpus) if gpus else None,
    )
