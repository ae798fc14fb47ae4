"""The gate of a stage: what was checked of its output, and whether the next stage may use it.

Each stage's folder ends with `gate.json`, written last and whole. It names the inputs it was made
from by digest, so that a stage made from other inputs is known to be stale.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from harness.errors import GateFailed, UsageError
from training.files import read_record, write_record

GATE = "gate.json"


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was measured of a stage's output.

    `value` beside `limit`, as `relation` says ("<=", ">=", "=="); value None: it could not be
    measured, and `reason` says why. `advice`: what to do where it failed.
    """

    name: str
    passed: bool
    value: float | int | str | None = None
    limit: float | int | str | None = None
    relation: str = ""
    reason: str = ""
    advice: str = ""


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """`output` digests what the stage made, `inputs` the outputs of the stages it was made from."""

    stage: str
    passed: bool
    checks: tuple[Check, ...]
    output: str
    inputs: dict[str, str] = {}

    @classmethod
    def of(
        cls, stage: str, checks: tuple[Check, ...], *, output: str, inputs: Mapping[str, str]
    ) -> Gate:
        """The gate that passes if all its checks do."""
        passed = all(check.passed for check in checks)
        return cls(
            stage=stage,
            passed=passed,
            checks=checks,
            output=output,
            inputs=dict(sorted(inputs.items())),
        )

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that did not pass."""
        return tuple(check for check in self.checks if not check.passed)


def write_gate(folder: Path, gate: Gate) -> None:
    """The last file of a stage."""
    write_record(folder / GATE, gate)


def read_gate(folder: Path) -> Gate | None:
    """A stage's gate, None where the stage has not ended. Raises `UsageError`."""
    return read_record(folder / GATE, Gate, "remove it and run the stage again")


def passed_gate(folder: Path, stage: str) -> Gate:
    """The gate of the stage whose output is to be used.

    Raises `UsageError` where the stage has not ended, `GateFailed` where it did not pass.
    """
    gate = read_gate(folder)
    if gate is None:
        raise UsageError(
            f"{folder}: the stage {stage} has not ended; "
            f"run `python -m training {stage}` with this --plan and --out first"
        )
    if gate.stage != stage:
        raise UsageError(
            f"{folder / GATE}: is the gate of {gate.stage}, not of {stage}; remove it and run "
            f"`python -m training {stage}` again"
        )
    return require(gate, folder)


def require(gate: Gate, folder: Path, remedy: str = "") -> Gate:
    """The gate of the stage in `folder` where it passed. Raises `GateFailed` with what failed."""
    if gate.passed:
        return gate
    first, *others = gate.failed
    more = f" (also failed: {', '.join(check.name for check in others)})" if others else ""
    way_out = f"; {remedy}" if remedy else ""
    raise GateFailed(f"{folder}: {gate.stage} did not pass its gate: {said(first)}{more}{way_out}")


def check_line(check: Check) -> str:
    """A check as a line of a list."""
    mark = "FAIL" if not check.passed else "ok" if check.value is not None else "-"
    return f"{mark:<4}  {said(check)}"


def said(check: Check) -> str:
    """A check in one line: what, measured against which limit, and what to do."""
    measured = "not measured" if check.value is None else f"{_figure(check.value)}"
    limit = f" (wanted {check.relation} {_figure(check.limit)})" if check.limit is not None else ""
    reason = f": {check.reason}" if check.reason else ""
    advice = f"; {check.advice}" if check.advice and not check.passed else ""
    return f"{check.name} {measured}{limit}{reason}{advice}"


def _figure(value: float | int | str | None) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
