"""Whether a cell measured the server or the load generator itself."""

from __future__ import annotations

from harness.analyse.data import CellData
from harness.findings import Caution, Metrics
from harness.records import ClientFigures

BOUND_CPU = 0.95
BUSY_CPU = 0.8
BOUND_LAG_S = 0.005
"""Of the median: an event loop that is late every other time stamps nothing truly."""
LAG_SHARE = 0.1
LATE_LAG_S = 0.01
"""A p99 of the loop's lag above this, and above so much of the mean TTFT, colours the figures."""


def client_bound(data: CellData) -> str | None:
    """Why the load generator was the bottleneck of the cell, with the numbers; None: it was not."""
    share = data.timeline.client_cpu_share
    if share is not None and share > BOUND_CPU:
        return f"{share:.0%} of a core"
    for figures in data.timeline.client:
        lag = figures.loop_lag_p50_s
        if lag is not None and lag > BOUND_LAG_S:
            return f"its event loop came {1000 * lag:.1f} ms late at the median"
    return None


def client_cautions(data: CellData, metrics: Metrics) -> list[Caution]:
    """What of the load generator's own doing may show in the figures."""
    found = []
    share = data.timeline.client_cpu_share
    if share is not None and share >= BUSY_CPU:
        found.append(
            Caution(
                code="client_cpu_bound",
                text=(
                    f"the load generator used {share:.0%} of a core, so it may have been the "
                    "bottleneck"
                ),
                advice="Raise load.workers, lower the load or run the client on another machine.",
            )
        )
    worst = max(data.timeline.client, key=_lag, default=None)
    ttft = metrics.ttft_s.mean
    if worst is not None and ttft and _lag(worst) > max(LATE_LAG_S, LAG_SHARE * ttft):
        found.append(
            Caution(
                code="client_loop_lag",
                text=(
                    f"the load generator's event loop came up to {1000 * _lag(worst):.0f} ms late "
                    f"(p99; the mean TTFT is {1000 * ttft:.0f} ms)"
                ),
                advice="Other work on its cores delays the stamps: give the client a core.",
            )
        )
    return found


def _lag(figures: ClientFigures) -> float:
    return figures.loop_lag_p99_s or 0.0
