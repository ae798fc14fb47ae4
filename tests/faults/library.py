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

FAULTS: dict[str, Fault] = {
    fault.name: fault for fault in (*CHECKPOINTS, *ENGINE, *FOREIGN, *TRAINING, *TEXTS)
}
HEALTHY: dict[str, Variant] = _HEALTHY
COMPOUND: dict[str, Compound] = compounds(FAULTS.values())
