"""The held-out prompts of an evaluation, as token ids: every engine is asked the very same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from harness.errors import UsageError
from harness.load.prompts.datasets import Prompt, load_prompts, needs_tokenizer
from harness.load.prompts.tokens import TargetTokenizer
from training.evaluation.records import HeldOut
from training.folders import stage_folder
from training.held_out import held_out_prompts
from training.plan import TrainingPlan
from training.progress import note
from training.samples import Sample
from training.targets import LONGEST_CONTEXT
from training.unchanged import unchanged_samples


def context_of(plan: TrainingPlan, positions: int) -> int:
    """Tokens of prompt and answer together: the plan's, else the model's, at most 4,096."""
    return min(plan.engine.max_model_len or min(positions, LONGEST_CONTEXT), positions)


def of_samples(plan: TrainingPlan, work: Path, context: int) -> list[HeldOut]:
    """The prompts that training was kept from, in the samples' order; one sample of each.

    Raises `UsageError` where there is none, or where the samples changed since their gate.
    """
    folder = stage_folder(work, "generate")
    samples: dict[str, Sample] = {}
    for sample in unchanged_samples(work)[1]:
        samples.setdefault(sample.prompt_id, sample)
    kept = held_out_prompts(samples, plan.train.held_out, plan.train.seed)
    chosen = [s for s in samples.values() if s.prompt_id in kept]
    if not chosen:
        raise UsageError(f"{folder}: holds no sample to evaluate on; run `generate` first")
    prompts = [(s.prompt_id, s.category, s.token_ids[: s.loss_from], _greedy(s)) for s in chosen]
    return _fitting(prompts, plan, context)


def _greedy(sample: Sample) -> tuple[int, ...] | None:
    return sample.token_ids[sample.loss_from :] if sample.greedy else None


def of_workload(plan: TrainingPlan, target: Path, demo: Path | None, context: int) -> list[HeldOut]:
    """The workload's own prompts, the target's chat template applied. Raises `UsageError`."""
    tokens = TargetTokenizer(target, trust_remote_code=plan.engine.trust_remote_code)
    workload = plan.workload
    if needs_tokenizer(workload) and workload.num_prompts is None:
        workload = msgspec.structs.replace(workload, num_prompts=plan.evaluate.prompts)
    found = load_prompts(
        workload, demo_prompts=demo, tokenizer=target, seed=plan.seed, context=context
    )
    chosen = found[: plan.evaluate.prompts]
    kwargs = plan.workload.chat_template_kwargs
    asked = [(p.id, p.category, tuple(_ids(p, tokens, kwargs)), None) for p in chosen]
    return _fitting(asked, plan, context)


def _ids(prompt: Prompt, tokens: TargetTokenizer, template_kwargs: dict[str, object]) -> list[int]:
    if prompt.token_ids is not None:
        return list(prompt.token_ids)
    if prompt.messages is None:
        return tokens.chat_ids([{"role": "user", "content": prompt.text}], template_kwargs)
    return tokens.chat_ids(prompt.messages, template_kwargs)


Found = tuple[str, str | None, tuple[int, ...], tuple[int, ...] | None]


def _fitting(found: Sequence[Found], plan: TrainingPlan, context: int) -> list[HeldOut]:
    """Those that leave room for an answer, at most `evaluate.prompts` of them."""
    held = list(_with_room(found, plan.generate.max_tokens, context))
    if len(held) < len(found):
        note(f"evaluate: {len(found) - len(held)} prompts fill the context of {context}: left out")
    if not held:
        raise UsageError(f"evaluate: no prompt leaves room for an answer in {context} tokens")
    return held[: plan.evaluate.prompts]


def _with_room(found: Sequence[Found], most: int, context: int) -> Iterator[HeldOut]:
    for prompt_id, category, ids, greedy in found:
        room = min(most, context - len(ids))
        if room < 2:  # the first token is the prefill's: a draft needs a second
            continue
        yield HeldOut(
            prompt_id=prompt_id,
            category=category,
            token_ids=ids,
            max_tokens=room,
            greedy_ids=greedy if greedy and len(greedy) <= room else None,
        )
