"""Trend plots: a series through the nights, where it changed, and what it is held to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from harness.nightly.places import places_of
from harness.nightly.records import Finding, Night
from harness.nightly.series import Series
from harness.report import style, words
from harness.report.style import Plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST = 12
"""Figures on one page; the sparklines show every series."""


def chosen(night: Night, series: Sequence[Series], watched: Sequence[str]) -> list[Series]:
    """Those worth a figure: what is cried or in doubt first, then the watched ones."""
    spoken = [f.series for f in night.findings if f.status != "refuted"]
    spoken += [g.series for g in night.gates if g.status in ("fail", "unconfirmed", "known")]
    by_name = {s.name: s for s in series}
    first = [by_name[name] for name in dict.fromkeys(spoken) if name in by_name]
    rest = [s for s in series if s.metric in watched and s not in first and _nights(s) > 1]
    rest.sort(key=lambda s: (watched.index(s.metric), s.point.variant != "speculative"))
    return [*first, *rest][:MOST]


def _nights(series: Series) -> int:
    return sum(r.value is not None for r in series.readings)


def plots(
    night: Night, series: Sequence[Series], baselines: Mapping[str, float | None]
) -> list[Plot]:
    """One figure a series; none of a series without a value."""
    shown = [s for s in series if _nights(s)]
    with style.drawing():
        return [
            _plot(one, number, night, baselines.get(one.name)) for number, one in enumerate(shown)
        ]


def _plot(series: Series, number: int, night: Night, baseline: float | None) -> Plot:
    figure, (axes,) = style.new_figure(1, 1, (6.4, 3.2))
    places = places_of(series)
    names = places.nights
    at = [i for i, v in enumerate(places.values) if v is not None]
    values = [v for v in places.values if v is not None]
    errors = [1.96 * (places.errors[i] or 0.0) for i in at]
    colour = style.SERIES[0]
    line = [math.nan if v is None else v for v in places.values]  # broken where none was measured
    axes.plot(range(len(line)), line, color=colour, marker="o", markersize=3.5, linewidth=1.4)
    axes.vlines(
        at,
        [v - e for v, e in zip(values, errors, strict=True)],
        [v + e for v, e in zip(values, errors, strict=True)],
        color=colour,
        alpha=0.35,
        linewidth=1.2,
    )
    said = []
    if baseline is not None:
        axes.axhline(baseline, color=style.INK, alpha=0.55, linewidth=0.9, linestyle=":")
        said.append(f"baseline {words.number(baseline, 4)} (dotted)")
    for finding in (f for f in night.findings if f.series == series.name):
        said += _mark(axes, finding, names)
    _name_nights(axes, names)
    told = "; ".join(said)
    axes.set_ylabel(style.plain(f"{series.metric}, {series.point.unit}"))
    axes.set_xlabel(f"night, n = {len(values)}")
    axes.set_title(style.plain(series.name.rpartition("/")[0]))
    slug = words.slug("trend", str(number), series.name)
    last = words.number(values[-1], 4)
    return Plot(
        name=slug,
        title=words.one_line(series.name, 120),
        svg=style.to_svg(figure, slug),
        alt=f"{series.name} over {len(values)} nights, {names[0]} to {names[-1]}; last {last} "
        f"{series.point.unit}. {told}",
        caption=f"Bars are 95% intervals by the night's own starts. {told[:1].upper()}{told[1:]}",
    )


def _mark(axes: Axes, finding: Finding, names: Sequence[str | None]) -> list[str]:
    """The level before and after a change, and the night it begins."""
    if finding.first_bad is None or finding.first_bad not in names:
        return []
    begin = names.index(finding.first_bad)
    for level, low, high in (
        (finding.before, 0.0, begin - 0.5),
        (finding.after, begin - 0.5, len(names) - 1.0),
    ):
        if level is not None and high > low:
            axes.hlines(level, low, high, color=style.SERIES[1], linewidth=2)
    axes.axvline(begin - 0.5, color=style.INK, alpha=0.5, linewidth=0.9, linestyle="--")
    return [f"{finding.status} {finding.kind} from {finding.first_bad} on (dashed)"]


def _name_nights(axes: Axes, names: Sequence[str | None]) -> None:
    """At most six names, so that none covers another; a day without a night has none."""
    known = [(i, name) for i, name in enumerate(names) if name is not None]
    shown = known[:: max(1, -(-len(known) // 6))]
    axes.set_xticks([i for i, _ in shown], [name for _, name in shown], rotation=20, ha="right")
    axes.set_xlim(-0.6, max(len(names) - 0.4, 0.6))
