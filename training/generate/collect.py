"""Asking what is left and writing each sample down as it comes.

The load harness's own client and closed loop do the asking; here each answer becomes a sample the
moment it is whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import msgspec

from harness.errors import one_line
from harness.load.interrupt import run_interruptible
from harness.load.limits import raise_file_limit
from harness.load.prompts.prompt import Prompt
from harness.load.schedule.executors import Stop, execute
from harness.load.streaming.answer import NO_OUTPUT, Answer
from harness.load.streaming.client import Asking, Client
from harness.records import LoadPoint, RequestRecord
from training.generate.meter import Meter
from training.generate.server import Server, api_key
from training.generate.shards import ShardWriter
from training.generate.text import TargetText
from training.generate.wanted import Talk, Wanted
from training.plan import TrainingPlan
from training.samples import Sample

WATCH_EVERY_S = 0.25
RETRIES = 3
"""Of a request that the server puts off (429, 503)."""


def endpoint_of(plan: TrainingPlan) -> str:
    """Where requests go: SGLang streams token ids on the completions endpoint alone."""
    return "completions" if plan.generate.engine == "sglang" else plan.workload.endpoint


def asking_for(plan: TrainingPlan, server: Server) -> Asking:
    """What all requests have in common; seeds and limits are each request's own."""
    endpoint = endpoint_of(plan)
    return Asking(
        url=server.host.url,
        model=server.model,
        endpoint=endpoint,
        max_tokens=plan.generate.max_tokens,
        sampling=msgspec.structs.replace(plan.sampling, seed=None),
        timeout_s=plan.generate.timeout_s,
        api_key=api_key(plan),
        extra=dict(server.adapter.request_fields(speculative=False, endpoint=endpoint)),
        chat_template_kwargs=plan.workload.chat_template_kwargs,
        retries=RETRIES,
        client=plan.client,
    )


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One request as it was sent: its ids as the template gives them, `messages` None: no chat."""

    wanted: Wanted
    prompt: Prompt
    messages: tuple[dict[str, Any], ...] | None
    variables: dict[str, Any]
    ids: list[int]


class Collector:
    """Asks the conversations that are left; `failures` holds why a sample is missing, by id."""

    def __init__(
        self, plan: TrainingPlan, text: TargetText, server: Server, writer: ShardWriter
    ) -> None:
        self.failures: dict[str, str] = {}
        self._plan, self._text, self._server, self._writer = plan, text, server, writer
        self._endpoint = endpoint_of(plan)
        self._answers: dict[int, Answer] = {}

    def collect(self, left: Sequence[Talk], meter: Meter) -> str | None:
        """Ask everything that is left; why it was given up before its end, None: it was not."""
        raise_file_limit()
        return run_interruptible(self._go(left, meter))

    async def _go(self, left: Sequence[Talk], meter: Meter) -> str | None:
        stop = Stop()
        starts = [0, *accumulate(len(talk.wanted) for talk in left)]
        by_index = [wanted for talk in left for wanted in talk.wanted]
        client = Client(asking_for(self._plan, self._server), "generate", on_answer=self._keep)

        async def send(index: int, prompt: Prompt, due_ns: int | None) -> RequestRecord:
            try:
                asked = self._asked(by_index[index], prompt)
                record = await client.ask(index, self._sendable(asked), due_ns)
                client.tails.pop(index, None)
                return self._taken(asked, record, self._answers.pop(index), meter)
            except Exception as error:  # a full disk, say: the others need not go on to their end
                stop.set(str(error))
                raise

        load = LoadPoint(
            mode="closed", concurrency=self._plan.generate.concurrency, num_requests=starts[-1]
        )
        watch = asyncio.create_task(self._watch(stop, meter))
        try:
            prompts = [talk.prompt for talk in left]
            await execute(send, prompts, load, seed=0, stop=stop)
        finally:
            watch.cancel()
            await client.aclose()
        return stop.reason or (self._server.host.lost() if self.failures else None)

    async def _watch(self, stop: Stop, meter: Meter) -> None:
        while True:
            reason = self._server.host.gone()
            if reason is not None:
                stop.set(reason)
            meter.tick()
            await asyncio.sleep(WATCH_EVERY_S)

    def _keep(self, index: int, answer: Answer) -> None:
        self._answers[index] = answer

    def _asked(self, wanted: Wanted, prompt: Prompt) -> Asked:
        """The request for a sample: its seed, and no more tokens than the context has room for."""
        ids = prompt_ids(self._text, prompt, self._plan)
        most = prompt.max_tokens or self._plan.generate.max_tokens
        if self._server.context is not None:
            most = max(1, min(most, self._server.context - len(ids)))
        sampling = {k: v for k, v in prompt.sampling.items() if k != "seed"}
        if wanted.seed is not None:
            sampling["seed"] = wanted.seed
        asked = msgspec.structs.replace(prompt, max_tokens=most, sampling=sampling)
        return Asked(
            wanted=wanted,
            prompt=asked,
            messages=messages_of(prompt, self._plan),
            variables=variables_of(prompt, self._plan),
            ids=ids,
        )

    def _sendable(self, asked: Asked) -> Prompt:
        """As ids where the endpoint takes them and the server is one of ours, else as it is."""
        if self._endpoint == "chat" or self._plan.generate.engine == "openai":
            return asked.prompt
        return msgspec.structs.replace(
            asked.prompt, messages=None, text=None, token_ids=tuple(asked.ids)
        )

    def _taken(
        self, asked: Asked, record: RequestRecord, answer: Answer, meter: Meter
    ) -> RequestRecord:
        """Write the sample down; the record as the conversation is to go on with it."""
        if record.error == NO_OUTPUT and record.finish_reason is not None:
            record = msgspec.structs.replace(record, status="ok", error=None)
        if record.status != "ok":
            self.failures[asked.wanted.id] = one_line(record.error or "no answer", 200)
            meter.fail()
            return record
        sample = sample_of(self._text, asked, record, answer)
        self._writer.append(sample)
        self.failures.pop(sample.id, None)
        meter.add(len(sample.answer_ids))
        return msgspec.structs.replace(record, text=sample.answer or "")


def variables_of(prompt: Prompt, plan: TrainingPlan) -> dict[str, Any]:
    """What a server gives the chat template beside the messages."""
    tools = prompt.sampling.get("tools")
    return {**({"tools": tools} if tools else {}), **plan.workload.chat_template_kwargs}


def messages_of(prompt: Prompt, plan: TrainingPlan) -> tuple[dict[str, Any], ...] | None:
    """The chat that is asked; None where the prompt is a raw text or ids."""
    if prompt.messages is not None or prompt.token_ids is not None:
        return prompt.messages
    if plan.workload.endpoint == "completions":
        return None
    return ({"role": "user", "content": prompt.text or ""},)


def prompt_ids(text: TargetText, prompt: Prompt, plan: TrainingPlan) -> list[int]:
    """A prompt's ids as the target's tokenizer and chat template give them. Raises `UsageError`."""
    if prompt.token_ids is not None:
        return list(prompt.token_ids)
    messages = messages_of(prompt, plan)
    if messages is None:
        return text.encode(prompt.text or "", special=True)
    return text.prompt_ids(messages, variables_of(prompt, plan))


def sample_of(text: TargetText, asked: Asked, record: RequestRecord, answer: Answer) -> Sample:
    """The sample of one whole answer, by the ids the server sent where it sent them."""
    told = told_prompt_ids(answer.head)
    ids = asked.ids if told is None else told
    agrees: bool | None
    if record.token_ids is not None:
        answer_ids = list(record.token_ids)
        agrees = text.gives(answer_ids, (record.reasoning or "") + (record.text or ""))
    else:
        count = record.output_tokens
        answer_ids = text.rebuilt(
            (ids, asked.messages, asked.variables),
            (record.text or "", record.reasoning),
            record.finish_reason,
            count,
        )
        agrees = None if count is None else len(answer_ids) == count
    parts = text.parts(ids, answer_ids)
    return Sample(
        id=asked.wanted.id,
        prompt_id=asked.wanted.prompt.id,
        category=asked.wanted.prompt.category,
        messages=asked.messages,
        token_ids=(*ids, *answer_ids),
        loss_from=len(ids),
        text=parts.text,
        reasoning=parts.reasoning,
        answer=parts.answer,
        finish_reason=record.finish_reason,
        greedy=asked.wanted.greedy,
        seed=asked.wanted.seed,
        index=asked.wanted.index,
        ids_from="text" if record.token_ids is None else "server",
        agrees=agrees,
    )


def told_prompt_ids(head: bytes | None) -> list[int] | None:
    """The prompt's ids where the first payload of an answer tells them, as vLLM's does."""
    try:
        told = msgspec.json.decode(head or b"null", type=_Head | None)
    except msgspec.DecodeError:
        return None
    if told is None:
        return None
    own = told.prompt_token_ids
    if own is None and told.choices:
        own = told.choices[0].prompt_token_ids
    return own or None


class _HeadChoice(msgspec.Struct):
    prompt_token_ids: list[int] | None = None


class _Head(msgspec.Struct):
    prompt_token_ids: list[int] | None = None
    choices: list[_HeadChoice] | None = None
