"""Start-ups told and compared: every phase of a start, and the phases of several side by side.

Engines name their phases by their own log lines. To be compared they are put into stages, which are
the same for all; a phase that no stage is known for is a stage of its own name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from harness.findings import Summary
from harness.records import LaunchRecord, Phase, Timeline, Variant
from harness.report import words

STAGES: dict[str, tuple[str, ...]] = {
    "process start, imports": ("launch", "config", "configure"),
    "engine processes": ("engine_core", "start_workers"),
    "distributed init": ("distributed",),
    "model construction": ("import_models", "load_model"),
    "target's weights": ("load_weights", "load_target"),
    "after the weights": ("process_weights", "weights_loaded"),
    "drafter": ("load_drafter",),
    "compilation": ("compile",),
    "memory profiling": ("profile_memory",),
    "KV cache": ("kv_cache", "memory_pool", "cache"),
    "graph capture": ("capture_graphs", "graph_capture"),
    "warm-up": ("warm_up", "warmup"),
    "server": ("init_done", "graph_captured", "scheduler", "start_server", "ready"),
}
"""What engines call it, by stage, in the order of a start."""
STAGE_OF = {phase: stage for stage, phases in STAGES.items() for phase in phases}
DRAFTER = "drafter"
WEIGHTS = "target's weights"
OF_A_MODEL = (WEIGHTS, "after the weights", "model construction")
TOTAL = "in all"
STARTUP_NOTE = (
    "means over n starts that came up, in brackets the quickest and the slowest of them; engines "
    "name their phases differently, stages are the same for all"
)
SPEED = "target's weights, speed"
SHORTEST_LOAD_S = 1.0
"""Phases are told apart ten times a second: a shorter one's time is too uncertain a divisor."""
PHASE_COLUMNS = (
    *("phase", "s", "share", "CPU s", "read", "load speed", "network", "memory", "GPU memory"),
    "done",
)


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of an engine. `wall_s`: how long it took, whether or not it came up; None: unknown.

    `came_up`: whether its last phase ended.
    """

    engine: str
    variant: Variant
    repeat: int
    phases: tuple[Phase, ...]
    wall_s: float | None

    @property
    def side(self) -> str:
        """Its engine and variant in the reader's words."""
        return f"{words.one_line(self.engine, 80)}, {self.variant}"

    @property
    def came_up(self) -> bool:
        return all(p.end_s is not None for p in self.phases)


def starts_of(
    summary: Summary,
    timelines: Iterable[tuple[str, Variant, int, Timeline]] = (),
    launches: Iterable[LaunchRecord] = (),
) -> list[Start]:
    """Each start that told its phases, once: the cells of a start share them."""
    told: list[tuple[str, Variant, int, tuple[Phase, ...], float | None]] = [
        (c.engine, c.variant, c.repeat, c.startup, None) for c in summary.cells
    ]
    told += [(e, v, r, timeline.startup, timeline.ready_s) for e, v, r, timeline in timelines]
    told += [(one.engine, one.variant, one.repeat, one.phases, one.wall_s) for one in launches]
    seen: dict[tuple[str, Variant, int], Start] = {}
    for engine, variant, repeat, phases, wall_s in told:
        if phases:
            start = Start(
                engine=engine, variant=variant, repeat=repeat, phases=phases, wall_s=wall_s
            )
            seen.setdefault((engine, variant, repeat), start)
    return list(seen.values())


def staged(phases: Sequence[Phase]) -> list[tuple[str, Phase]]:
    """Each phase with its stage. What a model is loaded with a second time is the drafter's."""
    found: list[tuple[str, Phase]] = []
    seen_weights = drafting = False
    for phase in phases:
        stage = STAGE_OF.get(phase.phase, words.one_line(phase.phase, 40))
        drafting |= stage == DRAFTER or (stage == WEIGHTS and seen_weights)
        seen_weights |= stage == WEIGHTS
        found.append((DRAFTER if drafting and stage in OF_A_MODEL else stage, phase))
    return found


def seconds_by_stage(start: Start) -> dict[str, float]:
    """The seconds of each stage that ended; they add up to the start's whole time."""
    seconds: dict[str, float] = {}
    for stage, phase in staged(start.phases):
        if phase.end_s is not None:
            seconds[stage] = seconds.get(stage, 0.0) + phase.end_s - phase.start_s
    return seconds


def load_speed(phase: Phase) -> float | None:
    """Bytes of the checkpoint per second of the phase that loaded it; None of a very short one."""
    took = 0.0 if phase.end_s is None else phase.end_s - phase.start_s
    return phase.weight_bytes / took if phase.weight_bytes and took >= SHORTEST_LOAD_S else None


def side_by_side(starts: Sequence[Start]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows: mean seconds of each stage for each engine and variant.

    Starts that did not come up are left out where others of their side did.
    """
    sides: dict[str, list[Start]] = {}
    for start in starts:
        sides.setdefault(start.side, []).append(start)
    seconds: list[dict[str, list[float]]] = []
    speeds: list[float | None] = []
    names = ["stage"]
    for side, own in sides.items():
        up = [s for s in own if s.came_up]
        names.append(f"{side} (n = {len(up)})" if up else f"{side} (did not come up)")
        told = [seconds_by_stage(s) for s in up or own]
        stages = dict.fromkeys(stage for one in told for stage in one)
        of_stage = {stage: [one.get(stage, 0.0) for one in told] for stage in stages}
        if stages:
            of_stage[TOTAL] = [sum(one.values()) for one in told]
        seconds.append(of_stage)
        known = [load_speed(p) for s in up or own for n, p in staged(s.phases) if n == WEIGHTS]
        found = [speed for speed in known if speed is not None]
        speeds.append(fmean(found) if found else None)
    every = dict.fromkeys((*STAGES, *(stage for one in seconds for stage in one)))
    every.pop(TOTAL, None)
    rows = [
        (stage, *(_mean_and_ends(one.get(stage)) for one in seconds))
        for stage in (*every, TOTAL)
        if stage == TOTAL or any(stage in one for one in seconds)
    ]
    if any(speed is not None for speed in speeds):
        rows.append((SPEED, *(per_second(speed) for speed in speeds)))
    return tuple(names), rows


def _mean_and_ends(seconds: list[float] | None) -> str:
    """The mean with the least and the most: 1.88 (1.70-2.10); no ends of one alone."""
    if not seconds:
        return words.DASH
    mean = words.fixed(fmean(seconds))
    low, high = words.fixed(min(seconds)), words.fixed(max(seconds))
    return mean if low == high else f"{mean} ({low}{words.DASH}{high})"


def phase_table(start: Start) -> list[tuple[str, ...]]:
    """One start phase by phase, in the columns of `PHASE_COLUMNS`."""
    ends = [p.end_s for p in start.phases if p.end_s is not None]
    whole = start.wall_s or (ends[-1] if ends else 0.0)
    return [_phase_row(phase, start, whole) for phase in start.phases]


def _phase_row(phase: Phase, start: Start, whole: float) -> tuple[str, ...]:
    took = None if phase.end_s is None else phase.end_s - phase.start_s
    seconds = words.fixed(took)
    if took is None and start.wall_s is not None:
        seconds = f"{words.fixed(start.wall_s - phase.start_s)}, not ended"
    return (
        words.one_line(phase.phase, 60),
        seconds,
        words.percent(took / whole if took is not None and whole else None),
        words.fixed(phase.cpu_s),
        size(phase.read_bytes),
        per_second(load_speed(phase)),
        size(phase.network_bytes),
        size(phase.rss_bytes),
        size(phase.gpu_bytes),
        words.DASH if phase.progress is None else words.share(*phase.progress),
    )


def first_of_each_side(starts: Sequence[Start]) -> dict[str, Start]:
    """The first start of each engine and variant, by its side."""
    found: dict[str, Start] = {}
    for start in starts:
        found.setdefault(start.side, start)
    return found


def size(count: float | None) -> str:
    """Bytes in the unit that fits, decimal: 547 GB."""
    if count is None or words.missing(count):
        return words.DASH
    for unit, one in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= one:
            return f"{words.number(count / one)} {unit}"
    return f"{round(count)} B"


def per_second(speed: float | None) -> str:
    """Bytes a second."""
    return words.DASH if speed is None else f"{size(speed)}/s"
