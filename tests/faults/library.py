"""All faults, all healthy variants and all pairs of faults, by name."""

from __future__ import annotations

from faults.checkpoints import CHECKPOINTS
from faults.compound import compounds
from faults.engine import ENGINE
from faults.foreign import FOREIGN
from faults.healthy import HEALTHY as _HEALTHY
from faults.records import Compound, Fault, Variant
from faults.texts import TEXTS
from faults.training import TRAINING

ORDINARY = ("trained_own_tokens",)
"""Trainings that could be better and leave an ordinary drafter (docs/faults.md: four of five first
drafts are right). They are no faults: that nothing is wrong is what has to be said of them."""
_EVERY = {fault.name: fault for fault in (*CHECKPOINTS, *ENGINE, *FOREIGN, *TRAINING, *TEXTS)}
FAULTS: dict[str, Fault] = {n: fault for n, fault in _EVERY.items() if n not in ORDINARY}
HEALTHY: dict[str, Variant] = {
    **_HEALTHY,
    **{n: Variant(name=n, plant=_EVERY[n].plant, engines=_EVERY[n].engines) for n in ORDINARY},
}
COMPOUND: dict[str, Compound] = compounds(FAULTS.values())
