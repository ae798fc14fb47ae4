"""Which samples the plan asks for, and which of them are still to be had."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from harness.errors import UsageError
from harness.load.prompts.prompt import Prompt
from training.plan import TrainingPlan
from training.samples import Sample

MOST_SEED = 2**31 - 1


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """One sample: turn `turn` of a prompt's conversation, asked for the `round`-th time.

    `index`: its place in the plan's order. `greedy`: asked at temperature 0; `seed` else.
    """

    id: str
    index: int
    prompt: Prompt
    round: int
    turn: int
    greedy: bool
    seed: int | None


class Talk(msgspec.Struct, frozen=True, kw_only=True):
    """What is left of one conversation: the prompt to ask, and the sample of each of its turns."""

    prompt: Prompt
    wanted: tuple[Wanted, ...]


def wanted_samples(prompts: Sequence[Prompt], plan: TrainingPlan) -> list[Wanted]:
    """Every sample the plan asks for, in order.

    Prompts are taken in order, and from the first again with other seeds; of the last round, where
    it is not a whole one, as many as are needed in an order that the plan's seed gives. An id is
    the prompt's, `#` and the round, and from the second turn on `.` and the turn. Raises
    `UsageError` where a prompt would be asked again at temperature 0.
    """
    whole = sum(1 + len(prompt.turns) for prompt in prompts)
    count = whole if plan.generate.samples is None else plan.generate.samples
    found: list[Wanted] = []
    number = 0
    while len(found) < count:
        order = list(prompts)
        if count - len(found) < whole:
            random.Random(f"{plan.seed}-round-{number}").shuffle(order)
        for prompt in order:
            greedy = _temperature(prompt, plan) == 0
            if number > 0 and greedy:
                raise UsageError(
                    f"generate.samples={count}: there are {whole} prompts, and at temperature 0 "
                    "each answer comes only once; set sampling.temperature, or leave "
                    "generate.samples out"
                )
            turns = range(min(1 + len(prompt.turns), count - len(found)))
            found += [_wanted(prompt, number, turn, len(found) + turn, plan) for turn in turns]
        number += 1
    return found


def _temperature(prompt: Prompt, plan: TrainingPlan) -> float:
    """The temperature a prompt is asked at: its own goes before the plan's."""
    own = prompt.sampling.get("temperature")
    return plan.sampling.temperature if own is None else float(own)


def _wanted(prompt: Prompt, number: int, turn: int, index: int, plan: TrainingPlan) -> Wanted:
    greedy = _temperature(prompt, plan) == 0
    base = plan.seed if plan.sampling.seed is None else plan.sampling.seed
    return Wanted(
        id=f"{prompt.id}#{number}" + (f".{turn}" if turn else ""),
        index=index,
        prompt=prompt,
        round=number,
        turn=turn,
        greedy=greedy,
        seed=None if greedy else (base + index) % (MOST_SEED + 1),
    )


def talks(wanted: Sequence[Wanted], have: Mapping[str, str]) -> list[Talk]:
    """What is still to be asked, conversation by conversation.

    `have`: the samples there are, id -> what they answered. A conversation goes on behind its last
    answer that is there; its prompt's id is the first turn's sample's.
    """
    groups: dict[tuple[str, int], list[Wanted]] = {}
    for one in wanted:
        groups.setdefault((one.prompt.id, one.round), []).append(one)
    left = []
    for group in groups.values():
        done = next((i for i, one in enumerate(group) if one.id not in have), len(group))
        if done < len(group):
            answers = [have[one.id] for one in group[:done]]
            left.append(Talk(prompt=_going_on(group, answers), wanted=tuple(group[done:])))
    return left


def _going_on(group: Sequence[Wanted], answers: Sequence[str]) -> Prompt:
    """The conversation's prompt with the turns that are left, all that was said before in it."""
    prompt, last = group[0].prompt, len(group) - 1
    said: tuple[dict[str, Any], ...] | None = prompt.messages
    for answer, turn in zip(answers, prompt.turns, strict=False):
        opened = said or ({"role": "user", "content": prompt.text or ""},)
        said = (*opened, {"role": "assistant", "content": answer}, turn)
    return msgspec.structs.replace(
        prompt,
        id=group[0].id,
        messages=said,
        text=None if said is not None else prompt.text,
        turns=prompt.turns[len(answers) : last],
        answer=None,  # nothing is judged here
    )


def answered(samples: Sequence[Sample]) -> dict[str, str]:
    """What each sample answered, by id."""
    return {sample.id: sample.answer or "" for sample in samples}
