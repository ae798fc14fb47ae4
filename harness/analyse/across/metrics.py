"""The figures that runs are compared by: unit, direction, area, and which family they belong to."""

from __future__ import annotations

import difflib

import msgspec

from harness.analyse.across.records import Area, Kind
from harness.analyse.compare import COMPARED
from harness.errors import UsageError
from harness.measure.metrics import DEFINITIONS, Better

LATENCIES = COMPARED[1:]
PARTS = ("mean", "p50", "p99")
SHARES = ("answered", "task_accuracy", "identical")
POSITION = "per_position"
GPU_MEMORY = "gpu.memory_used_bytes.most"


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure. `kind`: its family where the plan does not make it the question."""

    unit: str
    better: Better
    area: Area
    kind: Kind


def _defined(name: str, area: Area, kind: Kind) -> Figure:
    found = DEFINITIONS[name]
    assert found.better is not None
    return Figure(unit=found.unit, better=found.better, area=area, kind=kind)


FIGURES: dict[str, Figure] = {
    COMPARED[0]: _defined(COMPARED[0], "speed", "figure"),
    **{
        f"{name}.{part}": _defined(name, "speed", "figure" if part == "mean" else "detail")
        for part in PARTS
        for name in LATENCIES
    },
    "requests_per_s": _defined("requests_per_s", "speed", "detail"),
    "goodput_per_s": _defined("goodput_per_s", "speed", "figure"),
    "acceptance_length": _defined("acceptance_length", "acceptance", "figure"),
    "acceptance_rate": _defined("acceptance_rate", "acceptance", "figure"),
    POSITION: _defined(POSITION, "acceptance", "detail"),
    "answered": Figure(unit="fraction", better="higher", area="output", kind="figure"),
    "task_accuracy": _defined("task_accuracy", "output", "figure"),
    "identical": Figure(unit="fraction", better="higher", area="output", kind="figure"),
    "startup_s": Figure(unit="s", better="lower", area="start-up", kind="figure"),
    "startup_rss_bytes": Figure(unit="bytes", better="lower", area="memory", kind="detail"),
    "startup_gpu_bytes": Figure(unit="bytes", better="lower", area="memory", kind="detail"),
    GPU_MEMORY: Figure(unit="bytes", better="lower", area="memory", kind="detail"),
}
"""By name, in the order of a table; `per_position` stands for `per_position.0` and on."""

FAMILIES: tuple[Kind, ...] = ("question", "figure", "detail")


def figure_of(metric: str) -> Figure:
    """The definition of a row's metric; positions share one."""
    return FIGURES.get(metric) or FIGURES[metric.partition(".")[0]]


def order_of(metric: str) -> tuple[int, str]:
    """Where a metric's row stands."""
    names = list(FIGURES)
    return names.index(metric if metric in FIGURES else metric.partition(".")[0]), metric


def question_of(plan_metric: str) -> str:
    """The name here of a plan's `compare.metric`: latencies are compared by their means."""
    return f"{plan_metric}.mean" if plan_metric in LATENCIES else plan_metric


def fits(wanted: str, metric: str) -> bool:
    """Whether a name that a user gave means a metric: `ttft_s` means all of its parts."""
    return metric == wanted or metric.startswith(wanted + ".")


def check_name(option: str, name: str) -> None:
    """Raise `UsageError`, with the nearest name, where no metric is called so."""
    if any(fits(name, known) for known in FIGURES):
        return
    stem, _, at = name.partition(".")
    if stem == POSITION and at.isdecimal():
        return
    near = difflib.get_close_matches(name, [*FIGURES, *LATENCIES], n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(FIGURES)}"
    raise UsageError(f"{option} {name}: no such metric; {hint}")
