"""All evidence of a dossier, as points for and against each cause."""

from __future__ import annotations

from harness.diagnose.causes import CAUSES
from harness.diagnose.records import Dossier, Point
from harness.diagnose.rules.execution import execution_points
from harness.diagnose.rules.hints import hint_points
from harness.diagnose.rules.states import state_points
from harness.diagnose.rules.target import target_points
from harness.diagnose.rules.training import training_points
from harness.diagnose.rules.verification import verification_points
from harness.diagnose.rules.wanted import wanted_points

RULES = (
    *(target_points, state_points, execution_points, wanted_points, training_points),
    *(verification_points, hint_points),
)


def points(dossier: Dossier) -> list[Point]:
    """Every piece of evidence, sorted: the same dossier gives the same list in any order."""
    found = [p for rule in RULES for p in rule(dossier) if p.cause in CAUSES]
    return sorted(found, key=lambda p: (p.cause, -p.weight, p.experiment, p.says))
