"""When requests are due: absolute offsets from the start, drawn from a seed before the run.

Offsets are seconds, ascending, as numpy arrays. The same load and seed give the same offsets in
every process, so that several workers agree on them without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from harness.records import LoadPoint

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Offsets = NDArray[np.float64]
    Gaps = Callable[[int], Offsets]

MOST_ARRIVALS = 1_000_000
"""Of one cell: how many are drawn where neither a count nor a duration ends it."""


def offsets(load: LoadPoint, *, seed: int) -> Offsets:
    """When the requests of an open-loop load are due.

    `num_requests` and `duration_s` end them; a schedule and a trace also have an end of their own.
    `load.arrival` None is Poisson at `request_rate`. Raises `UsageError` where a trace cannot be
    read.
    """
    count, duration_s = load.num_requests, load.duration_s
    if load.arrival == "burst":
        return burst(count or 0)
    if load.arrival == "schedule":
        return _cut(scheduled(load.schedule or (), seed=seed), count, duration_s)
    if load.arrival == "trace":
        from harness.load.schedule.trace import read_trace

        assert load.trace is not None
        at_s = read_trace(load.trace).offsets_s
        return _cut(replayed(at_s, load.time_scale or 1.0), count, duration_s)
    assert load.request_rate is not None
    if load.arrival == "constant":
        return constant(load.request_rate, count=count, duration_s=duration_s)
    shape = load.burstiness or 1.0 if load.arrival == "gamma" else 1.0
    return gamma(load.request_rate, shape, seed=seed, count=count, duration_s=duration_s)


def constant(rate: float, *, count: int | None = None, duration_s: float | None = None) -> Offsets:
    """Evenly spaced, the first at once: 0, 1/rate, 2/rate…"""
    import numpy as np

    if count is None:
        count = MOST_ARRIVALS if duration_s is None else int(np.ceil(rate * duration_s)) + 1
    return _cut(np.arange(count) / rate, count, duration_s)


def poisson(
    rate: float, *, seed: int, count: int | None = None, duration_s: float | None = None
) -> Offsets:
    """A Poisson process: exponential gaps of mean 1/rate."""
    return gamma(rate, 1.0, seed=seed, count=count, duration_s=duration_s)


def gamma(
    rate: float,
    burstiness: float,
    *,
    seed: int,
    count: int | None = None,
    duration_s: float | None = None,
) -> Offsets:
    """Gamma gaps of shape `burstiness` and mean 1/rate.

    Their coefficient of variation is burstiness**-0.5: 1 is a Poisson process, less is burstier.
    """
    import numpy as np

    generator = np.random.default_rng(seed)
    if burstiness == 1.0:
        return _renewal(lambda n: generator.exponential(1.0 / rate, n), rate, count, duration_s)
    scale = 1.0 / (rate * burstiness)
    return _renewal(lambda n: generator.gamma(burstiness, scale, n), rate, count, duration_s)


def burst(count: int) -> Offsets:
    """All at once."""
    import numpy as np

    return np.zeros(count)


def scheduled(segments: Sequence[tuple[float, float, float]], *, seed: int) -> Offsets:
    """A Poisson process whose rate follows the segments (seconds, first rate, last rate).

    A unit-rate process is drawn up to the expected number of arrivals, and its times are mapped
    back through the cumulative rate, which is exact: within a segment that rate is a parabola.
    """
    import numpy as np

    seconds, first, last = (np.array(column, float) for column in zip(*segments, strict=True))
    starts = np.concatenate(([0.0], np.cumsum(seconds)))
    expected = np.concatenate(([0.0], np.cumsum(seconds * (first + last) / 2)))
    if expected[-1] <= 0:
        return np.zeros(0)
    mass = poisson(1.0, seed=seed, duration_s=float(expected[-1]))
    at = np.searchsorted(expected, mass, side="right") - 1  # a segment at rate 0 is never found
    # first*t + slope*t*t/2 = inside, solved in the form that is stable for any slope.
    inside, slope = mass - expected[at], ((last - first) / seconds)[at]
    root = np.sqrt(np.maximum(first[at] ** 2 + 2 * slope * inside, 0.0))
    below = first[at] + root
    t = np.divide(2 * inside, below, out=np.zeros_like(inside), where=below > 0)
    return starts[at] + np.minimum(t, seconds[at])


def replayed(at_s: Sequence[float], time_scale: float = 1.0) -> Offsets:
    """A trace's own offsets times `time_scale`: 0.5 replays it in half its time."""
    import numpy as np

    return np.asarray(at_s, float) * time_scale


def think_times(
    kind: str | None, mean_s: float | None, *, seed: int, count: int = 1 << 16
) -> list[float]:
    """Think times in seconds, `constant` (or None) or `exponential`; request i has i % len's."""
    if not mean_s:
        return [0.0]
    if kind != "exponential":
        return [mean_s]
    import numpy as np

    times: list[float] = np.random.default_rng([seed, 1]).exponential(mean_s, count).tolist()
    return times


def _renewal(gaps: Gaps, rate: float, count: int | None, duration_s: float | None) -> Offsets:
    """Sums of gaps: `count` of them, or those before `duration_s`."""
    import numpy as np

    if duration_s is None:
        return np.cumsum(gaps(MOST_ARRIVALS if count is None else count))
    parts: list[Any] = []
    drawn, reached = 0, 0.0
    while reached < duration_s and drawn < MOST_ARRIVALS:
        wanted = rate * (duration_s - reached)
        more = gaps(min(int(wanted + 4 * wanted**0.5) + 64, MOST_ARRIVALS))
        parts.append(more)
        drawn += len(more)
        reached += float(more.sum())
    return _cut(np.cumsum(np.concatenate(parts)), count, duration_s)


def _cut(at_s: Offsets, count: int | None, duration_s: float | None) -> Offsets:
    """The first `count`, of those before `duration_s`."""
    import numpy as np

    if duration_s is not None:
        at_s = at_s[: int(np.searchsorted(at_s, duration_s, side="left"))]
    return at_s if count is None else at_s[:count]
