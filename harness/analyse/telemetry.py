"""A cell's telemetry over its window: figures, energy a token, and what to be careful of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal
from urllib.parse import urlsplit

import numpy as np

from harness.analyse.data import CellData, RunData
from harness.findings import Caution, Gauge, GpuFigures, Metrics, Telemetry
from harness.measure.hardware import (
    CPU,
    ENERGY,
    ENGINE_BYTES,
    GPU_TOTALS,
    HOST_TOTALS,
    POWER,
    THROTTLE,
)
from harness.measure.metrics import window_ns
from harness.measure.series import Series, Source, Track

COUNTED = ("preemptions", "prefix_queries", "prefix_hits")
"""The engine's totals; see `engines.gauges`."""
THROTTLE_BITS = {
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x10: "synchronised boost",
    0x20: "temperature, by the driver",
    0x40: "temperature, by the hardware",
    0x80: "power brake",
}
"""NVML's reasons why clocks are below what was asked for; idling and settings of the user are none.
"""
POWER_LIMIT = "power limit"
SLOWED_SHARE = 0.01
CAPPED_SHARE = 0.10
SATURATED = 0.95
LOCAL = ("localhost", "127.0.0.1", "::1")


class Bounds:
    """A window on the clock of the samples."""

    def __init__(self, begin_ns: int, end_ns: int) -> None:
        self.begin_ns, self.end_ns = begin_ns, end_ns

    def gauge(self, track: Track | None) -> Gauge | None:
        """The samples inside; None where there is none."""
        if track is None:
            return None
        inside = track.values[(self.begin_ns <= track.at_ns) & (track.at_ns <= self.end_ns)]
        if not len(inside):
            return None
        return Gauge(
            mean=float(inside.mean()),
            least=float(inside.min()),
            most=float(inside.max()),
            n=len(inside),
        )

    def growth(self, track: Track | None) -> float | None:
        """How much a total grew, on straight lines between samples.

        None where the samples do not reach over both ends, or the total ran backwards.
        """
        if track is None or not self._covered(track) or (np.diff(track.values) < 0).any():
            return None
        ends = np.interp([self.begin_ns, self.end_ns], track.at_ns, track.values)
        return float(ends[1] - ends[0])

    def counted(self, track: Track | None) -> float | None:
        """How much a count grew from the last sample before the window to the first behind it."""
        if track is None or not self._covered(track) or (np.diff(track.values) < 0).any():
            return None
        first = track.values[track.at_ns <= self.begin_ns][-1]
        return float(track.values[track.at_ns >= self.end_ns][0] - first)

    def integral(self, track: Track | None) -> float | None:
        """The area below, in units times seconds; None where it is not covered."""
        if track is None or not self._covered(track):
            return None
        inside = (self.begin_ns < track.at_ns) & (track.at_ns < self.end_ns)
        at = np.concatenate(([self.begin_ns], track.at_ns[inside], [self.end_ns]))
        values = np.interp(at, track.at_ns, track.values)
        seconds = np.diff(at) / 1e9
        return float((seconds * (values[1:] + values[:-1]) / 2).sum())

    def _covered(self, track: Track) -> bool:
        return bool(
            len(track.at_ns) > 1
            and track.at_ns[0] <= self.begin_ns
            and track.at_ns[-1] >= self.end_ns
        )


def telemetry_of(run: RunData, data: CellData, metrics: Metrics) -> Telemetry | None:
    """The figures of one cell; None where nothing was sampled, or nothing was sent."""
    series = data.telemetry
    begin, end = window_ns(data.records)
    if series is None or begin is None or end is None:
        return None
    bounds = Bounds(begin, end)
    gpus = tuple(_gpu(series, index, bounds) for index in series.devices("gpu"))
    energy, of = _energy(run, data, gpus)
    queries = bounds.counted(series.track("engine", "prefix_queries"))
    hits = bounds.counted(series.track("engine", "prefix_hits"))
    preemptions = bounds.counted(series.track("engine", "preemptions"))
    return Telemetry(
        interval_s=series.interval_s,
        missing={**_unseen(series, bounds), **series.missing},
        engine=_gauges(series, "engine", "", bounds, apart=COUNTED),
        preemptions=None if preemptions is None else round(preemptions),
        prefix_hit_rate=hits / queries if queries and hits is not None else None,
        host=_gauges(series, "host", "", bounds, apart=HOST_TOTALS),
        host_totals={
            name: grown
            for name in HOST_TOTALS
            if (grown := bounds.growth(series.track("host", name))) is not None
        },
        gpus=gpus,
        energy_j=energy,
        energy_of=of,
        joules_per_output_token=energy / metrics.output_tokens
        if energy is not None and metrics.output_tokens
        else None,
    )


def _unseen(series: Series, bounds: Bounds) -> dict[str, str]:
    """The sources that were sampled, but never within the window, as it was so short."""
    seconds = (bounds.end_ns - bounds.begin_ns) / 1e9
    every = "" if series.interval_s is None else f", sampled every {series.interval_s:g} s"
    why = f"no sample fell into a window of {seconds:.2g} s{every}"
    sources: tuple[Source, ...] = ("engine", "host", "gpu")
    return {
        source: why
        for source in sources
        if series.names(source) and not _sampled_within(series, source, bounds)
    }


def _sampled_within(series: Series, source: Source, bounds: Bounds) -> bool:
    devices = series.devices(source) if source == "gpu" else [""]
    tracks = [series.track(source, n, d) for n in series.names(source) for d in devices]
    return any(bounds.gauge(track) is not None for track in tracks)


def _gauges(
    series: Series, source: Source, device: str, bounds: Bounds, *, apart: Sequence[str]
) -> dict[str, Gauge]:
    found = {
        name: bounds.gauge(series.track(source, name, device))
        for name in series.names(source)
        if name not in apart
    }
    return {name: gauge for name, gauge in found.items() if gauge is not None}


def _gpu(series: Series, index: str, bounds: Bounds) -> GpuFigures:
    counted = bounds.growth(series.track("gpu", ENERGY, index))
    energy = bounds.integral(series.track("gpu", POWER, index)) if counted is None else counted
    by: Literal["counter", "power"] = "power" if counted is None else "counter"
    held = bounds.gauge(series.track("gpu", ENGINE_BYTES, index))
    return GpuFigures(
        index=index,
        name=series.gpus.get(index, {}).get("name"),
        engine=None if held is None else held.most > 0,
        energy_j=energy,
        energy_by=None if energy is None else by,
        gauges=_gauges(series, "gpu", index, bounds, apart=(*GPU_TOTALS, THROTTLE)),
        throttled=_throttled(series.track("gpu", THROTTLE, index), bounds),
    )


def _throttled(track: Track | None, bounds: Bounds) -> dict[str, float] | None:
    """For each reason the share of samples in the window that have it; None: none was told."""
    if track is None:
        return None
    inside = (bounds.begin_ns <= track.at_ns) & (track.at_ns <= bounds.end_ns)
    reasons = track.values[inside].astype(np.int64)
    if not len(reasons):
        return None
    shares = {told: float(((reasons & bit) != 0).mean()) for bit, told in THROTTLE_BITS.items()}
    return {told: share for told, share in shares.items() if share}


def _energy(
    run: RunData, data: CellData, gpus: Sequence[GpuFigures]
) -> tuple[float | None, str | None]:
    """Of the engine's GPUs, or of all where its processes cannot be seen; and of which.

    None where a GPU did not tell, or where it is not known that the engine runs on this machine's.
    """
    mine = engine_gpus(run, data, gpus)
    if not mine:
        return None, None
    if not mine[0].engine:
        of = f"all {len(gpus)} GPUs of the machine"
    else:
        of = f"the engine's {len(mine)} GPUs" if len(mine) > 1 else "the engine's GPU"
    told = [gpu.energy_j for gpu in mine if gpu.energy_j is not None]
    return (sum(told), of) if len(told) == len(mine) else (None, None)


def engine_gpus(run: RunData, data: CellData, gpus: Sequence[GpuFigures]) -> list[GpuFigures]:
    """Those its processes hold memory on; where they are not seen, all it may run on."""
    mine = [gpu for gpu in gpus if gpu.engine]
    return mine or (list(gpus) if on_these_gpus(run, data) else [])


def on_these_gpus(run: RunData, data: CellData) -> bool:
    """Whether the server runs on GPUs, and on this machine, as far as the plan says."""
    plan = run.plan(data.cell.engine)["engine"]
    if run.attached:
        return _local(run, data)
    return plan["device"] != "cpu" and not plan.get("command_prefix")


def _local(run: RunData, data: CellData) -> bool:
    urls = (run.manifest.plan.get("request") or {}).get("urls") or {}
    url = urls.get(data.cell.variant) or urls.get("") or ""
    return all(
        urlsplit(one if "//" in one else f"//{one}").hostname in LOCAL for one in url.split(",")
    )


def telemetry_cautions(
    run: RunData, data: CellData, found: Telemetry | None
) -> tuple[Caution, ...]:
    """What the machine or the engine did that figures of this cell must be read with."""
    if found is None:
        return ()
    gpus = engine_gpus(run, data, found.gpus)
    checks = (_preempted(found), _slowed(gpus), _capped(gpus), _saturated(run, data, found))
    return tuple(c for c in checks if c is not None)


def _preempted(found: Telemetry) -> Caution | None:
    if not found.preemptions:
        return None
    usage = found.engine.get("kv_usage")
    full = "" if usage is None else f"; its KV cache was up to {usage.most:.0%} in use"
    return Caution(
        code="preempted",
        text=f"the engine preempted requests {found.preemptions} times in the window{full}",
        advice=(
            "Preempted requests are computed again, which is in every figure: give the KV cache "
            "more memory, or lower the concurrency or engine.max_num_seqs."
        ),
    )


def _worst(
    gpus: Sequence[GpuFigures], reasons: Sequence[str], least: float
) -> tuple[float, str, str] | None:
    """Share, reason and GPU where clocks were held back most; None: nowhere that much."""
    told = [
        (share, reason, gpu.index)
        for gpu in gpus
        for reason, share in (gpu.throttled or {}).items()
        if reason in reasons and share >= least
    ]
    return max(told) if told else None


def _slowed(gpus: Sequence[GpuFigures]) -> Caution | None:
    worst = _worst(gpus, [r for r in THROTTLE_BITS.values() if r != POWER_LIMIT], SLOWED_SHARE)
    if worst is None:
        return None
    share, reason, index = worst
    return Caution(
        code="gpu_throttled",
        text=f"GPU {index} was slowed down in {share:.0%} of the samples ({reason})",
        advice=(
            "Both variants must run at the same clocks: look at cooling and power supply, or lock "
            "the clocks (nvidia-smi --lock-gpu-clocks), and measure again."
        ),
    )


def _capped(gpus: Sequence[GpuFigures]) -> Caution | None:
    worst = _worst(gpus, [POWER_LIMIT], CAPPED_SHARE)
    if worst is None:
        return None
    share, _, index = worst
    return Caution(
        code="gpu_power_limited",
        text=f"GPU {index} was at its power limit in {share:.0%} of the samples",
        advice=(
            "Clocks then follow the work, and the variants' may differ: compare their clocks in "
            "the report, or lock them (nvidia-smi --lock-gpu-clocks)."
        ),
    )


def _saturated(run: RunData, data: CellData, found: Telemetry) -> Caution | None:
    """The host's processors, where the model is computed elsewhere."""
    cpu = found.host.get(CPU)
    remote = run.attached and not _local(run, data)
    on_gpu = not run.attached and run.plan(data.cell.engine)["engine"]["device"] != "cpu"
    if cpu is None or cpu.mean < SATURATED or not (remote or on_gpu):
        return None
    return Caution(
        code="host_cpu_saturated",
        text=f"this host's processors were {cpu.mean:.0%} busy on average through the window",
        advice=(
            "Scheduling and the load generator wait for a core, which looks like a slow engine: "
            "stop other work, or drive the load from another machine."
        ),
    )
