"""From all prompts of a set to those that are asked: chosen, limited, templated, checked."""

from __future__ import annotations

import difflib
import random
from collections import Counter
from typing import Any

import msgspec

from harness.errors import UsageError
from harness.load.prompts.lengths import draw_lengths
from harness.load.prompts.prompt import Prompt, said_texts
from harness.load.prompts.tokens import TargetTokenizer
from harness.plan.schema import WorkloadSection

TEMPLATE_TOKENS = 256
"""Below this distance from the context a prompt's bytes alone show that it fits."""
AT_ONCE = 1000
"""Prompts that are counted in one call."""


def unique_ids(prompts: list[Prompt]) -> list[Prompt]:
    """The same with `-2`, `-3` … behind an id that came before."""
    taken = {prompt.id for prompt in prompts}
    seen: Counter[str] = Counter()
    unique: list[Prompt] = []
    for prompt in prompts:
        seen[prompt.id] += 1
        name = prompt.id
        while seen[prompt.id] > 1 and name in taken:
            name = f"{prompt.id}-{seen[prompt.id]}"
            if name in taken:
                seen[prompt.id] += 1
        taken.add(name)
        unique.append(prompt if name == prompt.id else msgspec.structs.replace(prompt, id=name))
    return unique


def of_categories(prompts: list[Prompt], workload: WorkloadSection) -> list[Prompt]:
    """Those of the plan's categories. Raises `UsageError` where the set has no such category."""
    if workload.categories is None:
        return prompts
    there = sorted({prompt.category for prompt in prompts if prompt.category is not None})
    for wanted in workload.categories:
        if wanted not in there:
            near = difflib.get_close_matches(wanted, there, n=1)
            raise UsageError(
                f"workload.categories: {workload.dataset} has no category '{wanted}'; there are "
                f"{', '.join(there)[:200] or 'none'}"
                + (f"; did you mean {near[0]}?" if near else "")
            )
    return [prompt for prompt in prompts if prompt.category in workload.categories]


def of_lengths(
    prompts: list[Prompt], workload: WorkloadSection, tokens: TargetTokenizer
) -> list[Prompt]:
    """Those within the plan's lengths: of the texts, without what a chat template adds."""
    low, high = workload.min_input_tokens, workload.max_input_tokens
    if low is None and high is None:
        return prompts
    counted: list[Prompt] = []
    for at in range(0, len(prompts), AT_ONCE):
        chunk = prompts[at : at + AT_ONCE]
        ids = tokens.encode_all([said_texts(prompt) for prompt in chunk])
        for prompt, encoded in zip(chunk, ids, strict=True):
            length = len(prompt.token_ids) if prompt.token_ids is not None else len(encoded)
            if (low or 0) <= length <= (high or length):
                counted.append(msgspec.structs.replace(prompt, input_tokens=length))
    if not counted:
        raise UsageError(
            f"workload.min_input_tokens, workload.max_input_tokens: none of {len(prompts)} prompts "
            f"has from {low or 0} to {high or 'any number of'} tokens"
        )
    return counted


def sampled(prompts: list[Prompt], number: int | None, seed: int) -> list[Prompt]:
    """A sample without replacement, in the set's own order; all where no more are there."""
    if number is None or number >= len(prompts):
        return prompts
    chosen = random.Random(seed).sample(range(len(prompts)), number)
    return [prompts[i] for i in sorted(chosen)]


def limited(prompts: list[Prompt], workload: WorkloadSection, seed: int) -> list[Prompt]:
    """A `max_tokens` for each prompt that says none, where the plan gives a distribution."""
    if isinstance(workload.output_tokens, int):
        return prompts
    rng = random.Random(f"{seed}-output")
    drawn = draw_lengths(workload.output_tokens, len(prompts), rng)
    return [
        prompt if prompt.max_tokens is not None else msgspec.structs.replace(prompt, max_tokens=n)
        for prompt, n in zip(prompts, drawn, strict=True)
    ]


def templated(prompt: Prompt, workload: WorkloadSection, tokens: TargetTokenizer) -> Prompt:
    """The prompt as token ids, the chat template applied: a text would get a second BOS token."""
    if prompt.token_ids is not None:
        return prompt
    if prompt.turns:
        raise UsageError(
            f"workload.chat_template=client: prompt '{prompt.id}' has later turns, whose template "
            "the answers must go through; use workload.multi_turn=false, or endpoint=chat"
        )
    ids = tuple(tokens.chat_ids(_chat(prompt), workload.chat_template_kwargs))
    return msgspec.structs.replace(
        prompt, messages=None, text=None, token_ids=ids, input_tokens=len(ids)
    )


def _chat(prompt: Prompt) -> list[dict[str, Any]]:
    if prompt.messages is not None:
        return list(prompt.messages)
    return [{"role": "user", "content": prompt.text}]


def fitting(
    prompts: list[Prompt], workload: WorkloadSection, tokens: TargetTokenizer, context: int
) -> list[Prompt]:
    """The prompts, each of which leaves room for an answer in the context.

    Of the built-in set, which fits every use, those too long are left out; in any other they are a
    mistake. Raises `UsageError`. Without a tokenizer that can be read nothing is told.
    """
    kept: list[Prompt] = []
    for prompt in prompts:
        length = _length_near(prompt, tokens, context)
        if length is None or length < context:
            kept.append(prompt)
        elif workload.dataset != "builtin":
            raise UsageError(_too_long(prompt, length, workload, context))
    if not kept:
        raise UsageError(f"workload.dataset=builtin: no prompt fits the context of {context}")
    return kept


def surely_fits(prompt: Prompt, context: int) -> bool:
    """Whether the prompt is shorter than the context whatever the tokenizer.

    A token is a byte or more, but for what the template adds.
    """
    if prompt.token_ids is not None:
        return len(prompt.token_ids) < context
    return len(said_texts(prompt).encode()) + TEMPLATE_TOKENS < context


def _length_near(prompt: Prompt, tokens: TargetTokenizer, context: int) -> int | None:
    """The prompt's length where it may reach the context; None where it is surely shorter."""
    if prompt.token_ids is not None:
        return len(prompt.token_ids)
    if surely_fits(prompt, context):  # most need no counting
        return None
    try:
        return tokens.count(said_texts(prompt))
    except UsageError:
        return None


def _too_long(prompt: Prompt, length: int, workload: WorkloadSection, context: int) -> str:
    if workload.dataset in ("synthetic", "random"):
        way_out = "lower workload.input_tokens"
    elif prompt.position is not None:
        way_out = "take such lines out of the trace"
    else:
        way_out = f"leave such prompts out with workload.max_input_tokens={max(1, context // 2)}"
    return (
        f"workload.dataset={workload.dataset[:200]}: prompt '{prompt.id}' has {length} tokens, "
        f"but the context is {context} with room for an answer; {way_out}, or raise "
        "engine.max_model_len"
    )
