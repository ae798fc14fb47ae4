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
from training.samples import Sample, read_samples
from training.states import StateSource
from training.targets import LONGEST_CONTEXT
from training.unchanged import unchanged_samples

LEAST_ANSWER = 2
"""Tokens: the first is the prefill's, a draft needs a second."""


def context_of(plan: TrainingPlan, positions: int) -> int:
    """Tokens of prompt and answer together: the plan's, else the model's, at most 4,096."""
    return min(plan.engine.max_model_len or min(positions, LONGEST_CONTEXT), positions)


def of_samples(plan: TrainingPlan, work: Path, context: int) -> list[HeldOut]:
    """The prompts that training was kept from, in the samples' order; one sample of each.

    Raises `UsageError` where there is none, or where the samples changed since their gate.
    """
    samples: dict[str, Sample] = {}
    for sample in _kept_from_training(plan, work):
        samples.setdefault(sample.prompt_id, sample)
    prompts = [
        (s.prompt_id, s.category, s.token_ids[: s.loss_from], _greedy(s)) for s in samples.values()
    ]
    return _fitting(prompts, plan, context)


def _kept_from_training(plan: TrainingPlan, work: Path) -> Iterator[Sample]:
    """Every sample of a held-out prompt, in order.

    The samples are read twice, and never held all at once: which prompts are held out is known
    when the last was seen. Raises `UsageError` where there is none, or where the samples changed
    since their gate.
    """
    folder = stage_folder(work, "generate")
    prompts = [sample.prompt_id for sample in unchanged_samples(work)[1]]
    kept = held_out_prompts(prompts, plan.train.held_out, plan.train.seed)
    if not kept:
        raise UsageError(f"{folder}: holds no sample to evaluate on; run `generate` first")
    return (sample for sample in read_samples(folder) if sample.prompt_id in kept)


def _greedy(sample: Sample) -> tuple[int, ...] | None:
    return sample.token_ids[sample.loss_from :] if sample.greedy else None


def of_states(
    plan: TrainingPlan, work: Path, source: StateSource, context: int
) -> list[tuple[HeldOut, int]]:
    """Held-out prompts whose answers' states were captured, and the number of each in `source`.

    An answer is to be walked, and asked for, up to k tokens before its end: what an engine's last
    verify step accepts behind the limit counts, and is known only where the text goes on. Of the
    answers those made at the plan's own temperature count. Raises `UsageError` where there is none.
    """
    numbers = {sample: number for number, sample in enumerate(source.sample_ids)}
    greedy = plan.sampling.temperature == 0
    chosen: dict[str, tuple[int, int]] = {}  # of each prompt: its number, its answer's tokens
    found: list[Found] = []
    for sample in _kept_from_training(plan, work):
        number = numbers.get(sample.id)
        if number is None or sample.greedy != greedy or sample.prompt_id in chosen:
            continue
        walked = source.lengths[number] - sample.loss_from - plan.evaluate.k
        if walked >= LEAST_ANSWER and sample.loss_from:
            chosen[sample.prompt_id] = (number, walked)
            prompt = sample.token_ids[: sample.loss_from]
            found.append((sample.prompt_id, sample.category, prompt, None))
    if not found:
        kind = "greedy" if greedy else "sampled"
        raise UsageError(
            f"evaluate: no held-out prompt has a {kind} answer of {LEAST_ANSWER} tokens and k "
            f"({plan.evaluate.k}) more among the captured states; generate longer answers, or set "
            "evaluate.offline=engine"
        )
    held = []
    for each in _fitting(found, plan, context):
        number, walked = chosen[each.prompt_id]
        limit = min(each.max_tokens, walked)
        held.append((msgspec.structs.replace(each, max_tokens=limit), number))
    return held


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
        if room < LEAST_ANSWER:
            continue
        yield HeldOut(
            prompt_id=prompt_id,
            category=category,
            token_ids=ids,
            max_tokens=room,
            greedy_ids=greedy if greedy and len(greedy) <= room else None,
        )
