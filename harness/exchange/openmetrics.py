"""Points as OpenMetrics text, for a push to Prometheus or to fill its storage from.

Only gauges: so the text is also valid in Prometheus's older text format, which a Pushgateway reads.
A gauge is of the newest point of its series; with timestamps, of all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import NamedTuple

from harness.history.records import Point

PREFIX = "spec_harness"
CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
# A point's unit: the suffixes its metric's name may have for it, and OpenMetrics' word for it.
UNITS: dict[str, tuple[tuple[str, ...], str]] = {
    "s": (("_s",), "seconds"),
    "tokens/s": (("_per_s",), "tokens_per_second"),
    "requests/s": (("_per_s",), "requests_per_second"),
    "fraction": (("_share",), "ratio"),
    "bytes": (("_bytes",), "bytes"),
    "J/token": ((), ""),  # joules_per_output_token says it
    "W": (("_w",), "watts"),
    "MHz": (("_mhz",), "megahertz"),
    "degrees C": (("_c",), "celsius"),
}
RATIO = "x"
"""The unit of speculative over baseline."""
WHERE = ("engine", "host", "gpu")
"""First words of metrics whose name goes on behind the dot."""


class Name(NamedTuple):
    """What a metric is called there. `unit` None: its name says what is counted."""

    stem: str
    unit: str | None
    part: str | None

    def family(self, bound: str = "") -> str:
        """The name of the family of gauges; `bound`: of an end of its interval."""
        words = [PREFIX, bound, self.stem, self.unit or ""]
        return "_".join(word for word in words if word)


class Sample(NamedTuple):
    """One gauge's value. `at`: seconds since 1970."""

    labels: tuple[tuple[str, str], ...]
    value: float
    at: float


def to_openmetrics(points: Sequence[Point], *, timestamps: bool = False) -> bytes:
    """The text, ended by `# EOF`; points without a value, and void ones, are left out.

    `timestamps`: every point at the time of its run, for `promtool`. A Pushgateway wants none.
    """
    families: dict[str, tuple[str | None, str, list[Sample]]] = {}

    def add(family: str, unit: str | None, told: str, sample: Sample) -> None:
        families.setdefault(family, (unit, told, []))[2].append(sample)

    for point in points:
        if point.value is None or point.void:
            continue
        name, labels, at = name_of(point), _labels(point), _seconds(point.created)
        for bound, value in (("", point.value), *_interval(point)):
            told = f"{point.metric.partition('.')[0]}{_TOLD[bound]}"
            add(name.family(bound), name.unit, told, Sample(labels, value, at))
    for labels, at in _runs(points):
        told = "when the run of the newest points was measured"
        add(f"{PREFIX}_run_created_seconds", "seconds", told, Sample(labels, at, at))
    lines = [line for name in sorted(families) for line in _lines(name, families[name], timestamps)]
    return "\n".join([*lines, "# EOF", ""]).encode()


_TOLD = {
    "": ": see docs/metrics.md",
    "ci_low": ": lower end of its interval",
    "ci_high": ": upper end of its interval",
}


def _interval(point: Point) -> Iterator[tuple[str, float]]:
    if point.ci_low is not None:
        yield "ci_low", point.ci_low
    if point.ci_high is not None:
        yield "ci_high", point.ci_high


def name_of(point: Point) -> Name:
    """`ttft_s.p50` in s: stem `ttft`, unit `seconds`, part `p50`."""
    words = point.metric.split(".")
    at = 2 if words[0] in WHERE and len(words) > 1 else 1
    base, part = "_".join(words[:at]), ".".join(words[at:]) or None
    if point.unit == RATIO:
        base = _without(base, [end for ends, _ in UNITS.values() for end in ends])
        return Name(_clean(f"{base}_speculative_over_baseline"), "ratio", part)
    ends, unit = UNITS.get(point.unit, ((), _clean(point.unit)))
    stem = _without(_clean(base), ends)
    first, _, rest = unit.partition("_")
    if first and (stem == first or stem.endswith(f"_{first}")):
        # output_tokens in tokens/s is output_tokens_per_second, and no word twice.
        kept = stem.removesuffix(first).removesuffix("_")
        return Name(kept, unit, part)
    said = not rest and first in stem.split("_")  # requests_failed
    return Name(stem, None if said else unit or None, part)


def _without(name: str, ends: Sequence[str]) -> str:
    """The name without its longest suffix of those."""
    own = max((end for end in ends if name.endswith(end)), key=len, default="")
    return name.removesuffix(own)


def _clean(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")


def _labels(point: Point) -> tuple[tuple[str, str], ...]:
    """What makes the series, and the part of the metric."""
    told = {
        "suite": point.suite,
        "profile": point.profile,
        "settings": point.settings,
        "engine": point.engine,
        "variant": point.variant,
        "workload": point.workload,
        "load": point.load,
        "source": point.source,
        "part": name_of(point).part,
    }
    return tuple((name, value) for name, value in told.items() if value)


def _runs(points: Sequence[Point]) -> Iterator[tuple[tuple[tuple[str, str], ...], float]]:
    """Each engine's newest run, with what it was of."""
    newest: dict[tuple[str | None, str | None, str, str], Point] = {}
    for point in points:
        key = (point.suite, point.profile, point.engine, point.source)
        if not point.void and (key not in newest or _moment(point) >= _moment(newest[key])):
            newest[key] = point
    for point in newest.values():
        told = {
            "suite": point.suite,
            "profile": point.profile,
            "engine": point.engine,
            "source": point.source,
            "run_id": point.run_id,
            "engine_version": point.engine_version,
            "git_commit": point.git_commit,
            "target": point.target_name,
        }
        yield tuple((n, v) for n, v in told.items() if v), _seconds(point.created)


def _moment(point: Point) -> tuple[float, str]:
    return _seconds(point.created), point.run_id


def _seconds(created: str) -> float:
    return datetime.fromisoformat(created).timestamp()


def _lines(
    name: str, family: tuple[str | None, str, list[Sample]], timestamps: bool
) -> Iterator[str]:
    unit, told, samples = family
    yield f"# TYPE {name} gauge"
    if unit is not None:
        yield f"# UNIT {name} {unit}"
    yield f"# HELP {name} {_escaped(told)}"
    series: dict[tuple[tuple[str, str], ...], dict[float, float]] = {}
    for sample in samples:
        series.setdefault(sample.labels, {})[sample.at] = sample.value
    for labels in sorted(series):
        text = ",".join(f'{key}="{_escaped(value)}"' for key, value in labels)
        moments = sorted(series[labels])
        for at in moments if timestamps else moments[-1:]:
            when = f" {at:.3f}" if timestamps else ""
            yield f"{name}{{{text}}} {series[labels][at]!r}{when}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
