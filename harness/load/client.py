"""One OpenAI-compatible server, asked one request at a time by each caller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns
from typing import Any

import msgspec

from harness.errors import UsageError
from harness.load.answer import Answer, AnswerReader
from harness.load.datasets import Prompt, is_correct
from harness.load.http import ExchangeError, Origin, Pool, post
from harness.plan.schema import SamplingSection
from harness.records import DraftCounts, RequestRecord

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
ReadAcceptance = Callable[[list[dict[str, Any]]], DraftCounts | None]


class Asking(msgspec.Struct, frozen=True, kw_only=True):
    """What all requests of a cell have in common.

    `extra` holds the engine's own request fields; `read_acceptance` reads its per-request figures.
    """

    url: str
    model: str
    endpoint: str
    max_tokens: int
    sampling: SamplingSection
    timeout_s: float
    api_key: str | None = None
    extra: Mapping[str, Any] = {}
    read_acceptance: ReadAcceptance | None = None


def check_prompts(endpoint: str, prompts: Sequence[Prompt]) -> None:
    """Raise `UsageError` where a prompt cannot be asked at the endpoint."""
    chats = [prompt.id for prompt in prompts if prompt.text is None]
    if endpoint == "completions" and chats:
        raise UsageError(
            f"workload.endpoint=completions: prompt '{chats[0]}' holds messages; "
            "a raw 'prompt' text is wanted, or use workload.endpoint=chat"
        )


def request_body(asking: Asking, prompt: Prompt, index: int) -> dict[str, Any]:
    """The JSON body of one request; prompt and endpoint fit (`check_prompts`)."""
    body: dict[str, Any] = {
        "model": asking.model,
        "max_tokens": asking.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "temperature": asking.sampling.temperature,
    }
    if asking.endpoint == "completions":
        body["prompt"] = prompt.text
    elif prompt.messages is not None:
        body["messages"] = list(prompt.messages)
    else:
        body["messages"] = [{"role": "user", "content": prompt.text}]
    for name in ("top_p", "top_k"):
        value = getattr(asking.sampling, name)
        if value is not None:
            body[name] = value
    if asking.sampling.seed is not None:
        body["seed"] = asking.sampling.seed + index
    return {**body, **asking.extra}


class Client:
    """Sends requests and turns their answers into records; one per cell."""

    def __init__(self, asking: Asking, cell_id: str) -> None:
        self._asking = asking
        self._cell_id = cell_id
        self._origin = Origin.parse(asking.url)
        self._pool = Pool(self._origin)
        self._headers = {"Authorization": f"Bearer {asking.api_key}"} if asking.api_key else {}

    def close(self) -> None:
        """Close the connections kept alive."""
        self._pool.close()

    async def ask(self, index: int, prompt: Prompt, due_ns: int | None) -> RequestRecord:
        """Send one request and wait for its whole answer. A failure is a record, not an error."""
        body = msgspec.json.encode(request_body(self._asking, prompt, index))
        request = post(self._origin, PATHS[self._asking.endpoint], body, self._headers)
        reader = AnswerReader()
        sent: list[int] = []
        end_ns: int | None = None
        failure: str | None = None
        try:
            async with asyncio.timeout(self._asking.timeout_s):
                end_ns = await self._exchange(request, reader, sent)
        except TimeoutError:
            failure = f"no whole answer within {self._asking.timeout_s:g} s (load.timeout_s)"
        except ExchangeError as error:
            failure = str(error)
        except asyncio.CancelledError as cancelled:
            # The executor cancels with a reason; without one the whole run is being stopped.
            if not cancelled.args:
                raise
            failure = str(cancelled.args[0])
        answer = reader.answer(failure)
        return self._record(index, prompt, due_ns, sent[-1] if sent else None, end_ns, answer)

    async def _exchange(self, request: bytes, reader: AnswerReader, sent: list[int]) -> int:
        """Send over a kept connection, once more over a new one if the server had closed it."""
        while True:
            connection, used = await self._pool.take()
            try:
                return await connection.exchange(request, reader, sent.append)
            except ExchangeError as error:
                if not (used and error.retry):
                    raise
            finally:
                self._pool.give_back(connection)

    def _record(
        self,
        index: int,
        prompt: Prompt,
        due_ns: int | None,
        sent_ns: int | None,
        end_ns: int | None,
        answer: Answer,
    ) -> RequestRecord:
        read = self._asking.read_acceptance
        ok = answer.error is None
        return RequestRecord(
            cell_id=self._cell_id,
            index=index,
            prompt_id=prompt.id,
            category=prompt.category,
            due_ns=due_ns,
            sent_ns=sent_ns,
            chunk_ns=answer.chunk_ns,
            chunk_tokens=answer.chunk_tokens,
            end_ns=end_ns if end_ns is not None else perf_counter_ns(),
            status="ok" if ok else "failed",
            error=answer.error,
            http_status=answer.http_status,
            prompt_tokens=answer.prompt_tokens,
            output_tokens=answer.output_tokens,
            token_source=answer.token_source,
            token_ids=answer.token_ids,
            text=answer.text,
            reasoning=answer.reasoning,
            finish_reason=answer.finish_reason,
            acceptance=read(answer.payloads) if read is not None and ok else None,
            correct=is_correct(answer.text, prompt.answer) if ok else None,
        )
