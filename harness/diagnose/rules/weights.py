"""How much a piece of evidence weighs: log-likelihood ratios, in steps that can be told apart.

Nobody knows such a ratio to the second digit. `DECISIVE` (400 to 1): row for row or token for token
the engine did just this. `STRONG` (55 to 1), `GOOD` (12 to 1), `WEAK` (3 to 1).
"""

from __future__ import annotations

from harness.diagnose.causes import CAUSES
from harness.diagnose.records import Point

DECISIVE, STRONG, GOOD, WEAK = 6.0, 4.0, 2.5, 1.0


def of_stage(*stages: str) -> list[str]:
    """The causes that lie in one of the stages."""
    return [name for name, cause in CAUSES.items() if cause.stage in stages]


def point(cause: str, weight: float, says: str, experiment: str) -> Point:
    return Point(cause=cause, weight=weight, says=says, experiment=experiment)
