"""A tiny target with samples of its own, and captures with a planted defect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from capture_samples import greedy_samples, write_samples
from reference_models import build_target, prompts

from engines.capture.base import Capturer, CaptureSpec, RowStates, open_capturer
from harness.errors import GateFailed
from training.capture import stage
from training.gate import Gate, read_gate
from training.plan import TrainingPlan
from training.samples import Sample

LENGTHS = (5, 40, 7, 7, 33, 50, 12, 12, 64, 9)


@pytest.fixture(scope="module", name="target")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random DeepSeek-V3-like target whose norm weights are far from constant."""
    folder = tmp_path_factory.mktemp("target")
    model = build_target("deepseek", folder)
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.2, 3.0)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", name="samples")
def tiny_samples(target: Path) -> list[Sample]:
    return greedy_samples(target, prompts(*LENGTHS), 24)


@pytest.fixture(name="work")
def tiny_work(tmp_path: Path, samples: list[Sample]) -> Path:
    write_samples(tmp_path, samples)
    return tmp_path


def failed(gate: Gate | None) -> list[str]:
    assert gate is not None
    return [check.name for check in gate.checks if not check.passed]


def check(gate: Gate | None, name: str) -> Any:
    assert gate is not None
    return next(check for check in gate.checks if check.name == name)


class Wrapped:
    """A source whose states are changed on their way, to plant a defect."""

    name = "planted"

    def __init__(
        self,
        inner: Capturer,
        change: Callable[[list[RowStates]], list[RowStates]],
        calls: list[int] | None = None,
    ) -> None:
        self.inner, self.change, self.calls = inner, change, calls

    def capture(self, rows: Sequence[Sequence[int]]) -> list[RowStates]:
        if self.calls is not None:
            self.calls.append(len(rows))
        return self.change(self.inner.capture(rows))

    def close(self) -> None:
        self.inner.close()


def planted(
    plan: TrainingPlan,
    work: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[list[RowStates]], list[RowStates]] = lambda states: states,
    *,
    spec: Callable[[CaptureSpec], CaptureSpec] = lambda spec: spec,
) -> tuple[Gate, str]:
    """The gate of a capture with a defect, and what the command would say."""
    monkeypatch.setattr(
        stage, "open_capturer", lambda name, s: Wrapped(open_capturer(name, spec(s)), change)
    )
    with pytest.raises(GateFailed) as caught:
        stage.run(plan, work)
    gate = read_gate(work / "states")
    assert gate is not None and not gate.passed
    return gate, str(caught.value)
