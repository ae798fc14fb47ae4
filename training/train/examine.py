"""What each checkpoint must pass before it may become the best: read, fit, finite, served."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from drafters.eagle3 import Eagle3Drafter
from drafters.spec import DrafterError
from drafters.validate import validate
from engines.base import EngineUsageError
from harness.errors import UsageError
from training.gate import Check
from training.plan import TrainingPlan
from training.states import SampleStates
from training.train.checkpoints import CHECKS, read_optimizer, read_state
from training.train.serving import Served, serve
from training.train.validation import HeldOut


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint showed; `served` None: it was not asked to serve."""

    update: int
    checks: tuple[Check, ...]
    held_out: HeldOut
    served: Served | None

    @property
    def passed(self) -> bool:
        """Whether the checkpoint may become the best."""
        return all(check.passed for check in self.checks)


def examine(
    checkpoint: Path,
    drafter: Eagle3Drafter,
    held_out: HeldOut,
    *,
    target: Path,
    samples: Sequence[SampleStates],
    plan: TrainingPlan,
) -> Examination:
    """Read `checkpoint` back, hold it against `drafter`, the target, and the reference engine."""
    checks = [_read_back(checkpoint, drafter), _fit(checkpoint, target), _finite(held_out)]
    served = None
    if samples and all(check.passed for check in checks):
        try:
            served = serve(checkpoint, drafter, target, samples, plan)
            checks.append(_agrees(served))
        except (EngineUsageError, DrafterError) as error:
            checks.append(Check(name="served", passed=False, reason=str(error)))
    return Examination(
        update=read_state(checkpoint).update, checks=tuple(checks), held_out=held_out, served=served
    )


def read_examination(checkpoint: Path) -> Examination | None:
    """What was found of a checkpoint; None where it was not examined (to its end)."""
    try:
        return msgspec.json.decode((checkpoint / CHECKS).read_bytes(), type=Examination)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def _read_back(checkpoint: Path, drafter: Eagle3Drafter) -> Check:
    """Every tensor on disk is the one in memory, bit for bit, and finite."""
    wanted = drafter.state_dict()
    if not drafter.owns_embeddings:
        wanted.pop("embed_tokens.weight")
    bad = ""
    try:
        with safe_open(checkpoint / "model.safetensors", framework="pt") as file:
            names = set(file.keys())
            for name, tensor in wanted.items():
                if name not in names:
                    bad = f"{name} is missing"
                elif not torch.equal(file.get_tensor(name), tensor):
                    bad = f"{name} differs"
                elif tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                    bad = f"{name} is not finite"
                if bad:
                    break
        read_optimizer(checkpoint, restart=False)
    except (OSError, SafetensorError, UsageError) as error:
        bad = str(error)
    return Check(
        name="read_back",
        passed=not bad,
        value=len(wanted),
        reason=bad,
        advice="the disk lies: check it, and remove the checkpoint" if bad else "",
    )


def _fit(checkpoint: Path, target: Path) -> Check:
    """Every check of `drafters validate`; an error fails the checkpoint."""
    try:
        findings = validate(checkpoint, target)
        errors = [found.line() for found in findings if found.severity == "error"]
    except DrafterError as error:
        errors = [str(error)]
    return Check(
        name="validated",
        passed=not errors,
        value=len(errors),
        limit=0,
        relation="==",
        reason=errors[0] if errors else "",
    )


def _finite(held_out: HeldOut) -> Check:
    loss = held_out.loss
    return Check(
        name="held_out_loss",
        passed=loss is not None and math.isfinite(loss),
        value=loss if loss is not None and math.isfinite(loss) else None,
        reason="" if loss is not None else "no held-out answer carries loss",
    )


def _agrees(served: Served) -> Check:
    gap = served.gap
    told = (
        f"served {_rate(served.real.acceptance_rate)}, expected "
        f"{_rate(served.expected.acceptance_rate)} over {served.expected.drafts} drafts of "
        f"{served.prompts} prompts, states {served.states}"
    )
    return Check(
        name="served_as_expected",
        passed=gap is not None and abs(gap) <= served.tolerance,
        value=None if gap is None else abs(gap),
        limit=served.tolerance,
        relation="<=",
        reason=told if gap is not None else "the engine drafted nothing",
        advice="the engine computes another drafter than was trained: check the states' layers, "
        "and the drafter's config",
    )


def _rate(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
