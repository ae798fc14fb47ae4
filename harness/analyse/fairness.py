"""What stands between a run's comparisons and a fair verdict."""

from __future__ import annotations

from collections.abc import Sequence

from harness.analyse.compare import PRIMARY
from harness.analyse.data import RunData
from harness.analyse.drift import drift_cautions
from harness.analyse.stopping import half_width
from harness.analyse.words import DASH, load_words, metric_words
from harness.findings import Caution, Comparison, Metrics


def fairness_cautions(
    run: RunData, engine: str, comparisons: Sequence[Comparison], metrics: dict[str, Metrics]
) -> list[Caution]:
    """Everything odd about an engine's comparisons, and about its blocks over the run."""
    own = [c for c in comparisons if c.engine == engine]
    found = [_corrected_away(run, engine, own), _imprecise(run, engine, own)]
    return [*(c for c in found if c is not None), *drift_cautions(run, engine, metrics)]


def _corrected_away(run: RunData, engine: str, comparisons: Sequence[Comparison]) -> Caution | None:
    """Whether intervals as shown would carry a difference that they do not once corrected."""
    least = run.plan(engine)["compare"]["min_effect"]
    lost = [
        c
        for c in comparisons
        if _apart(c.ci_low, c.ci_high)
        and c.family > 1
        and c.ratio is not None
        and abs(c.ratio - 1) >= least
        and not _apart(c.corrected_low, c.corrected_high)
    ]
    if not lost:
        return None
    first = lost[0]
    more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
    return Caution(
        code="verdict_corrected",
        text=(
            f"{engine} at {load_words(first.load)}: {metric_words(first.metric)} differs by itself "
            f"({_ends(first.ci_low, first.ci_high)}), but not as one of {first.family} "
            f"comparisons ({_ends(first.corrected_low, first.corrected_high)}){more}"
        ),
        advice="Raise compare.launches to decide it, or compare fewer loads.",
    )


def _ends(low: float | None, high: float | None) -> str:
    return "no interval" if low is None or high is None else f"{low:.2f}{DASH}{high:.2f}"


def _apart(low: float | None, high: float | None) -> bool:
    return low is not None and high is not None and (low > 1 or high < 1)


def _imprecise(run: RunData, engine: str, comparisons: Sequence[Comparison]) -> Caution | None:
    """Whether a run that was to be precise ended, at its limit, before it was."""
    plan = run.plan(engine)["compare"]
    wanted, metric = plan.get("precision"), plan.get("metric", PRIMARY)
    if wanted is None or run.searching:
        return None  # a capacity search starts each variant once
    widths = [(half_width(c), c) for c in comparisons if c.metric == metric]
    wide = [(w, c) for w, c in widths if w is None or w > wanted]
    if not wide:
        return None
    width, worst = max(wide, key=lambda item: item[0] or float("inf"))
    reached = "no interval" if width is None else f"{width:.1%} to either side"
    return Caution(
        code="precision_not_reached",
        text=(
            f"{engine} at {load_words(worst.load)}: {wanted:.1%} to either side were wanted of "
            f"{metric_words(metric)}, and {worst.pairs} pairs reached {reached}"
        ),
        advice=(
            "Raise compare.max_launches or compare.time_limit_s, or quieten the machine; `resume` "
            "goes on with the same limits."
        ),
    )
