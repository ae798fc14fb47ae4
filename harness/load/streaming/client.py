"""One OpenAI-compatible server, asked one request at a time by each caller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns
from typing import Any

import httpx
import msgspec

from engines.secret import without_values
from harness.errors import UsageError
from harness.load.prompts.datasets import Prompt, is_correct
from harness.load.streaming.answer import Answer, AnswerReader, payloads_of
from harness.load.streaming.origin import Origin
from harness.load.streaming.transport import Exchange, StampingTransport
from harness.load.streaming.turnstile import Turnstile
from harness.plan.schema import ClientSection, SamplingSection
from harness.records import DraftCounts, RequestRecord

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
ReadAcceptance = Callable[[list[dict[str, Any]]], DraftCounts | None]
OnAnswer = Callable[[int, Answer], None]
RETRIED = (429, 503)
RETRY_AFTER_S = 1.0
"""Waited where a server asks for patience and does not say how long."""


class Asking(msgspec.Struct, frozen=True, kw_only=True):
    """What all requests of a cell have in common.

    `url` may be several, joined by commas: replicas that requests go to in turn, by their index.
    `extra` holds the engine's own request fields. `ignore_eos` is a field that vLLM, SGLang and the
    reference engine know alike. `retries`, `new_connections`: see `plan.schema.LoadSection`.
    `secrets`: what a record shows nothing of, beside the key, though a server may repeat it.
    `quiet_s`: once no byte has come of any answer for so long, the server is taken to hang and the
    load ends (each process of a load minds its own answers, so give it loads of one process); None:
    each request has its `timeout_s` alone.
    """

    url: str
    model: str
    endpoint: str
    max_tokens: int
    sampling: SamplingSection
    timeout_s: float
    api_key: str | None = None
    extra: dict[str, Any] = {}
    ignore_eos: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    retries: int = 0
    new_connections: bool = False
    client: ClientSection = ClientSection()
    secrets: tuple[str, ...] = ()
    quiet_s: float | None = None


def check_prompts(endpoint: str, prompts: Sequence[Prompt]) -> None:
    """Raise `UsageError` where a prompt cannot be asked at the endpoint."""
    chats = [prompt.id for prompt in prompts if prompt.messages is not None]
    if endpoint == "completions" and chats:
        raise UsageError(
            f"workload.endpoint=completions: prompt '{chats[0]}' holds messages; "
            "a raw 'prompt' text is wanted, or use workload.endpoint=chat"
        )
    ids = [prompt.id for prompt in prompts if prompt.token_ids is not None]
    if endpoint == "chat" and ids:
        raise UsageError(
            f"workload.endpoint=chat: prompt '{ids[0]}' holds token ids; "
            "use workload.endpoint=completions"
        )


def request_body(asking: Asking, prompt: Prompt, index: int) -> dict[str, Any]:
    """The JSON body of one request; prompt and endpoint fit (`check_prompts`)."""
    body: dict[str, Any] = {
        "model": asking.model,
        "max_tokens": prompt.max_tokens or asking.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "temperature": asking.sampling.temperature,
    }
    if asking.endpoint == "completions":
        body["prompt"] = prompt.text if prompt.token_ids is None else prompt.token_ids
    elif prompt.messages is not None:
        body["messages"] = prompt.messages
    else:
        body["messages"] = [{"role": "user", "content": prompt.text}]
    for name in ("top_p", "top_k"):
        value = getattr(asking.sampling, name)
        if value is not None:
            body[name] = value
    if asking.sampling.seed is not None:
        body["seed"] = asking.sampling.seed + index
    if asking.ignore_eos:
        body["ignore_eos"] = True
    if asking.chat_template_kwargs and asking.endpoint == "chat":
        body["chat_template_kwargs"] = asking.chat_template_kwargs
    return {**body, **asking.extra, **prompt.sampling}


class Client:
    """Sends requests and turns their answers into records; one per cell and event loop.

    `tails` holds, by index, the last payloads of each whole answer: `with_acceptance` reads an
    engine's own figures out of them when the load is over. `on_answer` is given each request's
    index and answer, failed ones too, before its record is returned.
    """

    def __init__(
        self,
        asking: Asking,
        cell_id: str,
        *,
        worker: int = 0,
        on_answer: OnAnswer | None = None,
    ) -> None:
        self._asking = asking
        self._on_answer = on_answer
        self._cell_id = cell_id
        self._worker = worker
        urls = [origin.root + PATHS[asking.endpoint] for origin in Origin.several(asking.url)]
        headers = {
            "Accept": "text/event-stream, application/json",
            "Accept-Encoding": "identity",  # a compressed stream comes late, in lumps
            "Content-Type": "application/json",
            "User-Agent": "spec-harness",
            **asking.client.headers,
        }
        if asking.api_key:
            headers["Authorization"] = f"Bearer {asking.api_key}"
        self._transport = StampingTransport(asking.client, fresh=asking.new_connections)
        http = httpx.AsyncClient(transport=self._transport, headers=headers, trust_env=False)
        self._templates = [
            self._transport.template(
                http.build_request("POST", url), asking.client.connect_timeout_s
            )
            for url in urls
        ]
        self._turnstile = Turnstile()
        self.tails: dict[int, tuple[bytes, ...]] = {}
        self._under_way: dict[int, tuple[int, AnswerReader]] = {}
        self._heard_ns = 0

    def silent_s(self) -> float:
        """How long no byte has come of any answer though requests wait for one."""
        if not self._under_way:
            return 0.0
        begun_ns = min(begun for begun, _ in self._under_way.values())
        heard_ns = max(reader.last_ns for _, reader in self._under_way.values())
        return (perf_counter_ns() - max(begun_ns, heard_ns, self._heard_ns)) / 1e9

    async def aclose(self) -> None:
        """Close the connections kept alive."""
        await self._transport.aclose()

    async def ask(self, index: int, prompt: Prompt, due_ns: int | None) -> RequestRecord:
        """Send one request and wait for its whole answer. A failure is a record, not an error."""
        tries = 0
        while True:
            tries += 1
            answer, exchange = await self._attempt(index, prompt)
            if answer.http_status not in RETRIED or tries > self._asking.retries:
                break
            wait_s = RETRY_AFTER_S if answer.retry_after_s is None else answer.retry_after_s
            if wait_s > self._asking.timeout_s:
                break
            try:
                await asyncio.sleep(wait_s)
            except asyncio.CancelledError as cancelled:
                if not cancelled.args:
                    raise
                break
        if answer.error is None and answer.tail:
            self.tails[index] = answer.tail
        if self._on_answer is not None:
            self._on_answer(index, answer)
        return self._record(index, prompt, due_ns, answer, exchange, tries)

    async def _attempt(self, index: int, prompt: Prompt) -> tuple[Answer, Exchange]:
        reader = AnswerReader()
        exchange = Exchange(sink=reader)
        failure: str | None = None
        try:
            await self._turnstile.enter()
            self._under_way[index] = (perf_counter_ns(), reader)
            body = msgspec.json.encode(request_body(self._asking, prompt, index))
            async with asyncio.timeout(self._asking.timeout_s):
                template = self._templates[index % len(self._templates)]
                await self._transport.exchange(template, body, exchange)
            await self._turnstile.enter()
        except TimeoutError:
            failure = f"no whole answer within {self._asking.timeout_s:g} s (load.timeout_s)"
        except httpx.TransportError as error:
            failure = str(error)
        except asyncio.CancelledError as cancelled:
            # The executor cancels with a reason; without one the whole run is being stopped.
            if not cancelled.args:
                raise
            if exchange.end_ns is None:
                failure = str(cancelled.args[0])
        finally:
            self._under_way.pop(index, None)
            self._heard_ns = max(self._heard_ns, reader.last_ns)
        return reader.answer(failure), exchange

    def _record(
        self,
        index: int,
        prompt: Prompt,
        due_ns: int | None,
        answer: Answer,
        exchange: Exchange,
        tries: int,
    ) -> RequestRecord:
        ok, error = answer.error is None, answer.error
        if error is not None:
            error = without_values(error, (*self._asking.secrets, self._asking.api_key or ""))
        return RequestRecord(
            cell_id=self._cell_id,
            index=index,
            prompt_id=prompt.id,
            category=prompt.category,
            due_ns=due_ns,
            sent_ns=exchange.sent_ns,
            chunk_ns=answer.chunk_ns,
            chunk_tokens=answer.chunk_tokens,
            end_ns=exchange.end_ns if exchange.end_ns is not None else perf_counter_ns(),
            status="ok" if ok else "failed",
            error=error,
            http_status=answer.http_status,
            prompt_tokens=answer.prompt_tokens,
            output_tokens=answer.output_tokens,
            token_source=answer.token_source,
            token_ids=answer.token_ids,
            text=answer.text,
            reasoning=answer.reasoning,
            finish_reason=answer.finish_reason,
            acceptance=None,
            correct=is_correct(answer.text, prompt.answer) if ok else None,
            first_reasoning_ns=answer.first_reasoning_ns,
            first_answer_ns=answer.first_answer_ns,
            connect_ns=exchange.connect_ns,
            worker=self._worker,
            tries=tries,
        )


def with_acceptance(
    records: Sequence[RequestRecord],
    tails: Mapping[int, tuple[bytes, ...]],
    read: ReadAcceptance | None,
) -> list[RequestRecord]:
    """The records with each request's own acceptance, where its engine told it."""
    if read is None:
        return list(records)
    return [
        msgspec.structs.replace(r, acceptance=read(payloads_of(tails[r.index])))
        if r.status == "ok" and r.index in tails
        else r
        for r in records
    ]
