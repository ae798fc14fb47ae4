"""Does the engine compute the target? Its log-probabilities beside the reference engine's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Literal

from engines.checkpoint import read_config
from harness.analyse.integrity import near_tie_bound
from harness.diagnose.experiments.known import Knowledge
from harness.diagnose.experiments.lengths import share_of
from harness.diagnose.records import Subject, TargetParity
from harness.measure.logprobs import LogprobReader, NoAnswer, NoLogprobs

if TYPE_CHECKING:
    from torch import Tensor

    from harness.diagnose.experiments.asking import Answered, Question

PROMPTS = 6
TOKENS = 32
FLOORS = {"float32": 0.005, "float16": 0.02}
BEHIND = 3.0
"""So many near-tie bounds behind the reference's likeliest token no rounding chooses another."""
FLOOR_ELSE = 0.1
"""Median gaps in nats that two right computations in this type may have, kernels being others."""
DType = Literal["float32", "float16", "bfloat16"]
_NAMES: dict[str, DType] = {
    "float32": "float32",
    "float": "float32",
    "float16": "float16",
    "half": "float16",
}
_OF_FLOAT32 = {"vllm": "bfloat16", "sglang": "float16"}


def parity(
    knowledge: Knowledge, reader: LogprobReader, answers: Sequence[tuple[Question, Answered]] = ()
) -> TargetParity:
    """The engine against the reference on the knowledge's own prompts and texts.

    `answers`: what the engine answered greedily, to which questions. Raises `NoLogprobs` where the
    server tells no log-probabilities at all, and there are no answers.
    """
    dtype = dtype_of(knowledge.subject)
    bound = near_tie_bound(dtype)
    overruled = share_of(_overruled(knowledge, answers, BEHIND * bound))
    told = _Told(knowledge, bound)
    why: NoLogprobs | None = None
    for number, text in enumerate(knowledge.texts[:PROMPTS]):
        try:
            told.text(str(number), text.prompt, text.answer, reader)
        except NoAnswer as error:  # the next text would be waited for as long
            why = error
            break
        except NoLogprobs as error:
            why = error
    if not told.said and why is not None and overruled is None:
        raise why
    return TargetParity(
        prompt_gap=_middle(told.prompt),
        decode_gap=_middle(told.decode),
        rescored_gap=_middle(told.rescored),
        argmax=share_of(told.argmax),
        floor=FLOORS.get(dtype, FLOOR_ELSE),
        overruled=overruled,
    )


def _overruled(
    knowledge: Knowledge, answers: Sequence[tuple[Question, Answered]], bound: float
) -> Iterator[tuple[str, bool]]:
    """Each token that the target chose: whether the reference's is ahead by more than `bound`."""
    for question, answer in answers:
        whole = [*question.token_ids, *answer.token_ids]
        if not answer.token_ids or len(whole) > knowledge.engine.max_len:
            continue
        expected = scores(knowledge, whole)[len(question.token_ids) - 1 :]
        behind = expected.amax(-1) - expected.gather(1, _column(answer.token_ids))[:, 0]
        for at in _chosen(answer):
            yield question.name, behind[at].item() > bound


def _chosen(answer: Answered) -> list[int]:
    """Which of the tokens the target chose itself: those behind the accepted drafts of each step.

    What a verification accepts wrongly is no word of the target's. All, where no steps are told.
    """
    count = len(answer.token_ids)
    if answer.steps is None:
        return list(range(count))
    ends = itertools.accumulate((accepted + 1 for accepted in answer.steps), initial=0)
    return [at for at in ends if at < count]


class _Told:
    """Differences gathered text by text, in nats; `argmax`: prompt, and whether a token is it."""

    def __init__(self, knowledge: Knowledge, tie: float) -> None:
        self.knowledge, self.tie = knowledge, tie
        self.prompt: list[float] = []
        self.decode: list[float] = []
        self.rescored: list[float] = []
        self.argmax: list[tuple[str, bool]] = []

    @property
    def said(self) -> bool:
        return bool(self.prompt or self.decode)

    def text(
        self, name: str, prompt: Sequence[int], answer: Sequence[int], reader: LogprobReader
    ) -> None:
        """Ask of one text: scored as a prompt, and generated anew and then scored."""
        wanted = max(1, min(TOKENS, len(answer)))
        made, logprobs = reader.continued(prompt, wanted)
        whole = [*prompt, *made]
        expected = scores(self.knowledge, whole)  # [T - 1, V]
        begin = len(prompt) - 1
        own = expected[begin:].gather(1, _column(made))[:, 0]
        self.decode += _gaps(own.tolist(), logprobs)
        best = expected[begin:].topk(2, dim=-1)
        for token, ids, values in zip(
            made, best.indices.tolist(), best.values.tolist(), strict=True
        ):
            if values[0] - values[1] > self.tie:
                self.argmax.append((name, token == ids[0]))
        scored = reader.scored(whole)
        given = expected[:begin].gather(1, _column(prompt[1:]))[:, 0]
        self.prompt += _gaps(given.tolist(), scored[1 : len(prompt)])
        self.rescored += _gaps(logprobs, scored[len(prompt) :])


def scores(knowledge: Knowledge, tokens: Sequence[int]) -> Tensor:
    """The reference's log-probabilities of what follows each token but the last, [T - 1, V]."""
    states = knowledge.states(tokens)
    return knowledge.engine.model.logits(states.normed[:-1]).float().log_softmax(-1)


def dtype_of(subject: Subject) -> DType:
    """The type that the target is served in, as far as it is known beforehand.

    `auto` is the checkpoint's own, but of float32 vLLM makes bfloat16 and SGLang float16.
    """
    from drafters.formats import text_config

    name = subject.dtype
    if name == "auto":
        text = text_config(read_config(Path(subject.target), "target"))
        own = text.get("dtype") or text.get("torch_dtype") or "bfloat16"
        name = str(own).removeprefix("torch.")
        if name == "float32":
            name = _OF_FLOAT32.get(subject.engine, name)
    return _NAMES.get(name, "bfloat16")


def _column(tokens: Sequence[int]) -> Tensor:
    import torch

    return torch.tensor(list(tokens), dtype=torch.int64)[:, None]


def _gaps(one: Sequence[float], other: Sequence[float | None]) -> list[float]:
    return [abs(a - b) for a, b in zip(one, other, strict=False) if b is not None]


def _middle(values: Sequence[float]) -> float | None:
    return median(values) if values else None
