"""What stands beside a group's figures on the page: their intervals, and the corrected ones."""

from __future__ import annotations

import math

from harness.analyse.estimates import ACCEPTANCE
from harness.findings import VariantEstimate
from harness.records import Variant
from harness.report import words
from harness.report.view import Group, MetricRow


def figure(group: Group, row: MetricRow, variant: Variant) -> str:
    """A variant's figure in the label's unit, with its interval: 445 (318-624)."""
    value = row.baseline if variant == "baseline" else row.speculative
    scale = row.spec.scale
    shown = words.number(None if value is None else value * scale)
    return shown + _ends(group.estimates.get((variant, row.spec.key)), value, scale)


def acceptance_length(group: Group) -> str:
    """The interval behind the acceptance length; empty where there is none."""
    length = None if group.acceptance is None else group.acceptance.length
    return _ends(group.estimates.get(("speculative", ACCEPTANCE)), length, 1.0)


def _ends(found: VariantEstimate | None, value: float | None, scale: float) -> str:
    """The ends of the estimate where it is of this very value, else nothing."""
    if found is None or value is None or found.ci_low is None or found.ci_high is None:
        return ""
    if not math.isclose(found.value, value, rel_tol=1e-6):
        return ""  # of other cells: those without a partner are in the estimate alone
    low, high = (words.number(end * scale) for end in (found.ci_low, found.ci_high))
    return f" ({low}{words.DASH}{high})"


def shows_corrected(group: Group) -> bool:
    """Whether any of the ratios has another interval once it is corrected."""
    return any(
        row.corrected is not None and row.corrected != (row.ci_low, row.ci_high)
        for row in group.rows
    )


def corrected(row: MetricRow) -> str:
    """The ends of the corrected interval, or a dash."""
    return words.DASH if row.corrected is None else words.interval(*row.corrected) or words.DASH


def basis(group: Group) -> str:
    """How the intervals of the figures are made; empty where no figure has one."""
    known = [e.method for e in group.estimates.values() if e.ci_low is not None]
    over = dict.fromkeys(
        words.one_line(method.partition(" over ")[2].removesuffix(" on the log scale"), 120)
        for method in known
    )
    return f"; in brackets: over {', or over '.join(over)}" if known else ""
