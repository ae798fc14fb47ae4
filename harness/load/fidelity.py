"""Whether the load generator keeps up: its CPU, and how late its event loop comes round."""

from __future__ import annotations

import asyncio
import gc
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter_ns

from harness.records import ClientFigures

SAMPLE_EVERY_S = 0.01
KEPT = 100_000
"""Samples (1,000 s); later ones take the place of the oldest."""


class LagSampler:
    """Samples the running event loop's lag until it is stopped."""

    def __init__(self) -> None:
        self._lags = array("q")
        self._at = 0
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while True:
            due_ns = perf_counter_ns() + int(SAMPLE_EVERY_S * 1e9)
            await asyncio.sleep(SAMPLE_EVERY_S)
            self._keep(max(0, perf_counter_ns() - due_ns))

    def _keep(self, lag_ns: int) -> None:
        if len(self._lags) < KEPT:
            self._lags.append(lag_ns)
        else:
            self._lags[self._at % KEPT] = lag_ns
        self._at += 1

    def stop(self) -> list[int]:
        """End the sampling; the lags in ns, ascending."""
        self._task.cancel()
        return sorted(self._lags)


class CpuClock:
    """This process's CPU time against the wall's."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def figures(self, worker: int, lags_ns: list[int]) -> ClientFigures:
        """The figures since this clock was made."""
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        return ClientFigures(
            worker=worker,
            cpu_share=cpu / wall if wall > 0 else 0.0,
            cpu_s=cpu,
            loop_lag_p50_s=_rank(lags_ns, 0.5),
            loop_lag_p99_s=_rank(lags_ns, 0.99),
            loop_lag_max_s=lags_ns[-1] / 1e9 if lags_ns else None,
        )


def _rank(ascending: list[int], share: float) -> float | None:
    if not ascending:
        return None
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))] / 1e9


@contextmanager
def few_collections() -> Iterator[None]:
    """The collector leaves what lives already alone and comes by rarely: it stops the loop."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
