"""Greedy samples of a target, as the stage `generate` leaves them, for the tests of `capture`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from engines.reference.cache import Batch
from engines.reference.config import read_config
from engines.reference.loading import load_model
from engines.reference.model import Model
from training.gate import Check, Gate, write_gate
from training.generate.judge import digest
from training.plan import CaptureSection, TargetSection, TrainingPlan
from training.samples import Sample


@torch.no_grad()
def greedy_answer(model: Model, prompt: Sequence[int], tokens: int) -> list[int]:
    """The target's own greedy continuation, by its float32 forward pass."""
    cache = model.new_cache(slots=1, length=len(prompt) + tokens)
    fed, answer, start = list(prompt), [], 0
    for _ in range(tokens):
        batch = Batch(cache, first_slot=0, starts=[start], tokens=len(fed), device="cpu")
        last, _ = model.forward(torch.tensor([fed]), batch, cache)
        start += len(fed)
        fed = [int(model.logits(last[0, -1]).argmax())]
        answer += fed
    return answer


def greedy_samples(target: Path, prompts: Sequence[Sequence[int]], tokens: int) -> list[Sample]:
    """One sample a prompt, each with `tokens` greedy tokens."""
    config = read_config(target)
    model = load_model(target, config, torch.float32, "cpu")
    model.prepare_rope(config.max_positions)
    return [
        Sample(
            id=f"s{number:03d}",
            prompt_id=f"p{number:03d}",
            category="odd" if number % 2 else "even",
            token_ids=(*prompt, *greedy_answer(model, prompt, tokens)),
            loss_from=len(prompt),
            text="",
        )
        for number, prompt in enumerate(prompts)
    ]


def demo_samples(pair: Path, count: int, tokens: int = 48) -> list[Sample]:
    """Greedy answers of the demo pair's target to its first held-out prompts."""
    from engines.reference.tokenizer import Tokenizer

    tokenizer = Tokenizer(pair / "target")
    lines = (pair / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    asked = [tokenizer.render(json.loads(line)["messages"]) for line in lines]
    prompts = [tokenizer.encode(text, special=False) for text in asked]
    return greedy_samples(pair / "target", prompts, tokens)


def write_samples(work: Path, samples: Sequence[Sample]) -> None:
    """A samples folder with a passed gate."""
    folder = work / "samples"
    folder.mkdir(parents=True, exist_ok=True)
    lines = b"".join(msgspec.json.encode(sample) + b"\n" for sample in samples)
    (folder / "samples-00000.jsonl").write_bytes(lines)
    kept = digest(sample for sample in samples if sample.dropped is None)
    write_gate(
        folder, Gate.of("generate", (Check(name="made", passed=True),), output=kept, inputs={})
    )


def plan_for(target: Path, **capture: Any) -> TrainingPlan:
    """A plan that captures from this target."""
    fields: dict[str, Any] = {"aux_layers": (1, 2), "batch": 4, "max_length": 200, **capture}
    return TrainingPlan(target=TargetSection(path=str(target)), capture=CaptureSection(**fields))
