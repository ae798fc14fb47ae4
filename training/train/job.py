"""What a training is made of, whoever put it together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
from torch import Tensor

from harness.errors import UsageError
from training.heads import TargetFacts
from training.plan import TrainingPlan
from training.states import StateSource
from training.train.split import Split, split

BASELINE = "baseline.json"
"""The held-out figures before the first update."""


class Asked(NamedTuple):
    """What a sample answers, and whether it was answered without sampling."""

    prompt_id: str
    greedy: bool


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides what is trained.

    `folder`: the stage's own. `greedy`: ids of samples without sampling. `vocabulary` [D]: target
    ids that can be drafted, None: all.
    """

    plan: TrainingPlan
    folder: Path
    facts: TargetFacts
    source: StateSource
    split: Split
    greedy: frozenset[str]
    vocabulary: Tensor | None


def make_job(
    plan: TrainingPlan,
    folder: Path,
    facts: TargetFacts,
    source: StateSource,
    *,
    asked: Mapping[str, Asked],
    vocabulary: Tensor | None,
) -> Job:
    """Split the samples (`asked`: by sample id) and check that both parts are there.

    Raises `UsageError`.
    """
    unknown = [sample for sample in source.sample_ids if sample not in asked]
    if unknown:
        raise UsageError(
            f"the states hold sample {unknown[0]}, the samples do not ({len(unknown)} in all); "
            "capture again"
        )
    prompts = {sample: each.prompt_id for sample, each in asked.items()}
    parts = split(source.sample_ids, prompts, plan.train.held_out, plan.train.seed)
    for name, part in (("train on", parts.train), ("validate on", parts.held_out)):
        if not part:
            raise UsageError(
                f"train.held_out {plan.train.held_out:g} of {len(set(prompts.values()))} prompts "
                f"leaves none to {name}; generate more samples"
            )
    return Job(
        plan=plan,
        folder=folder,
        facts=facts,
        source=source,
        split=parts,
        greedy=frozenset(sample for sample, each in asked.items() if each.greedy),
        vocabulary=vocabulary,
    )
