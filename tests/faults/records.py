"""What a planted fault, and a variant that has none, are made of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from faults.pair import Pair
from harness.diagnose.causes import CAUSES

Way = Literal["checkpoint", "training", "engine", "flags", "prompts"]
Engine = Literal["reference", "vllm", "sglang"]
EVERY_ENGINE: tuple[Engine, ...] = ("reference", "vllm", "sglang")
NOT_SGLANG: tuple[Engine, ...] = ("reference", "vllm")
"""SGLang puts the target's embeddings over the drafter's, reads no norm_before_residual, and counts
layer ids its own way."""


class Planted(msgspec.Struct, frozen=True, kw_only=True):
    """All that serving a case takes; what is not said is the engine's default.

    `plugin`: FILE.py:FUNCTION, called with the loaded engine. `rounds`: how often the prompts are
    sent, one time after the other (what is planted in a prefix cache shows at the second).
    `form`: templated or raw, as the prompts are; `other_form`: the same ones as they are not.
    `unharmed`: the same without its fault, which is what mending it is held against; None where
    the target, the drafter and the prompts are right as they are.
    """

    target: Path
    drafter: Path
    prompts: tuple[tuple[int, ...], ...]
    k: int = 3
    temperature: float = 0.0
    concurrency: int = 4
    max_tokens: int = 64
    dtype: str = "auto"
    max_model_len: int | None = None
    plugin: str | None = None
    extra_args: tuple[str, ...] = ()
    extra_env: dict[str, str] = msgspec.field(default_factory=dict)
    rounds: int = 1
    trained_target: Path | None = None
    trained_on: Path | None = None
    form: str = "templated"
    other_form: tuple[tuple[int, ...], ...] = ()
    unharmed: Planted | None = None

    def changed(self, **changes: Any) -> Planted:
        return msgspec.structs.replace(self, **changes)

    def harmed(self, **changes: Any) -> Planted:
        """The fault that is planted in this case by `changes`."""
        return self.changed(**changes, unharmed=self)


Plant = Callable[[Pair, Path, int, float], Planted]
"""`plant(pair, folder, seed, severity)` writes what the case needs into `folder`."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault: what must be called of it, and what it costs.

    `also`: causes beside `cause` and its family that count as right, as nothing seen from outside
    tells them apart in this case. `costs`: accepted drafts lost at the full severity, as a share of
    all drafts, at the least. `emulated`: the hook stands for what needs GPUs or several ranks.
    `mendable`: `--fix` can restore it from what is left. `by_quality`: nothing is otherwise but how
    well the drafter predicts; no reading restores it, and it is expected to be accepted as little
    as it is.
    """

    name: str
    cause: str
    way: Way
    plant: Plant
    costs: float
    also: tuple[str, ...] = ()
    engines: tuple[Engine, ...] = ("reference",)
    severities: tuple[float, ...] = (1.0,)
    kind: Literal["mla", "llama"] = "mla"
    emulated: bool = False
    mendable: bool = False
    by_quality: bool = False

    @property
    def right(self) -> frozenset[str]:
        """Every cause that is a right answer: the cause, its family, and `also`."""
        named = {self.cause, *self.also}
        families = {CAUSES[name].family for name in named} - {None}
        return frozenset(named | {name for name, c in CAUSES.items() if c.family in families})


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """A way to serve a pair that has no fault, however unusual it is."""

    name: str
    plant: Plant
    engines: tuple[Engine, ...] = ("reference",)
    kind: Literal["mla", "llama"] = "mla"
    minutes: float = 0.0
    """What it takes beyond the others; the cheap ones go first."""


class Compound(msgspec.Struct, frozen=True, kw_only=True):
    """Two faults at once: the second is planted over the first one's pair."""

    name: str
    first: str
    second: str
    plant: Plant
