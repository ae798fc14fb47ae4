"""Conversations and their requests: who asks which, under which index.

Conversation k asks prompt k (from the first again when they run out). Its turns have the indices
after those of all conversations before it, so that an index is the same prompt and the same turn in
every variant, whatever was answered when. A prompt without `turns` is a conversation of one turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import msgspec

from harness.load.prompts.datasets import Prompt
from harness.records import LoadPoint, RequestRecord


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's part of a load: conversations `worker`, `worker + workers`, and so on."""

    worker: int = 0
    workers: int = 1

    def within(self, load: LoadPoint) -> Share | None:
        """The share that is really taken; None for nothing, which the first worker never gets.

        What must be divided into whole numbers may be fewer than the workers: then the last of
        them have nothing to do, and the others take the whole.
        """
        parts = (load.concurrency, load.max_concurrency, load.num_output_tokens)
        workers = min([self.workers, *(part for part in parts if part is not None)])
        if self.worker >= workers:
            return None
        return Share(worker=self.worker, workers=workers)

    def of(self, whole: int | None) -> int | None:
        """This worker's part of a number; the first workers take one more where it is uneven."""
        if whole is None:
            return None
        return whole // self.workers + (self.worker < whole % self.workers)


class Conversations:
    """The prompts as numbered conversations."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts
        self._before = [0, *accumulate(1 + len(prompt.turns) for prompt in prompts)]

    def prompt(self, number: int) -> Prompt:
        """What conversation `number` asks."""
        return self._prompts[number % len(self._prompts)]

    def first_index(self, number: int) -> int:
        """The index of its first request."""
        rounds, place = divmod(number, len(self._prompts))
        return rounds * self._before[-1] + self._before[place]


def opening(prompt: Prompt) -> Prompt:
    """The first turn as a prompt of its own."""
    if not prompt.turns:
        return prompt
    return msgspec.structs.replace(
        prompt, turns=(), answer=None, text=None, messages=_messages(prompt)
    )


def following(prompt: Prompt, said: Prompt, turn: int, record: RequestRecord) -> Prompt:
    """Turn `turn` (from 1): all that was said, the answer to it, and what the user says next.

    The answer goes without its reasoning. A right answer belongs to the last turn.
    """
    answer = {"role": "assistant", "content": record.text or ""}
    last = turn == len(prompt.turns)
    return msgspec.structs.replace(
        said,
        messages=(*(said.messages or ()), answer, prompt.turns[turn - 1]),
        text=None,
        input_tokens=None,
        answer=prompt.answer if last else None,
    )


def stamped(record: RequestRecord, prompt: Prompt, turn: int) -> RequestRecord:
    """The record with its place in the conversation, where there is one."""
    if not prompt.turns:
        return record
    return msgspec.structs.replace(record, conversation=prompt.id, turn=turn)


def dropped(prompt: Prompt, index: int, due_ns: int, under_way: int, cell_id: str) -> RequestRecord:
    """The record of an arrival that was not sent, because too many requests were under way."""
    return RequestRecord(
        cell_id=cell_id,
        index=index,
        prompt_id=prompt.id,
        category=prompt.category,
        due_ns=due_ns,
        sent_ns=None,
        chunk_ns=(),
        chunk_tokens=None,
        end_ns=None,
        status="cancelled",
        error=f"dropped: {under_way} requests under way (load.max_concurrency)",
        http_status=None,
        prompt_tokens=None,
        output_tokens=None,
        token_source=None,
        token_ids=None,
        text=None,
        reasoning=None,
        finish_reason=None,
        acceptance=None,
        correct=None,
    )


def _messages(prompt: Prompt) -> tuple[dict[str, Any], ...]:
    if prompt.messages is not None:
        return prompt.messages
    return ({"role": "user", "content": prompt.text or ""},)
