"""The OpenAI-compatible server: starlette in front of an engine that runs in its own thread."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from engines.reference.answers import Answer, error_body
from engines.reference.engine import Engine
from engines.reference.protocol import Job, RequestError, read_job
from engines.reference.request import Delta, Request

MAX_BODY_BYTES = 32_000_000
CLIENT_LEFT = 499
"""The status of an answer that nobody is there to read."""


class JsonResponse(Response):
    """A JSON body, encoded by msgspec."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def failure(message: str, *, status: int = 400, param: str | None = None) -> JsonResponse:
    """An error answer in OpenAI's form."""
    kinds = {400: "BadRequestError", 404: "NotFoundError"}
    kind = kinds.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    body = error_body(message, kind=kind, status=status, param=param)
    return JsonResponse(body, status_code=status)


class Service:
    """The endpoints, over one engine."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine, self.name = engine, name
        self.started = int(time.time())

    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/health", self.health),
                Route("/metrics", self.metrics),
                Route("/v1/models", self.models),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
            ],
            exception_handlers={
                404: lambda _, __: failure("no such path", status=404),
                405: lambda _, __: failure("this path wants another method", status=405),
            },
        )

    async def health(self, _: HttpRequest) -> Response:
        """200 as long as requests are served."""
        if self.engine.failure is None:
            return Response(status_code=200)
        return failure(f"the engine failed: {self.engine.failure}", status=503)

    async def metrics(self, _: HttpRequest) -> Response:
        """Prometheus text."""
        text = self.engine.metrics.text()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, _: HttpRequest) -> Response:
        """The one model that is served."""
        model = {
            "id": self.name,
            "object": "model",
            "created": self.started,
            "owned_by": "spec-harness",
            "root": self.name,
            "max_model_len": self.engine.max_len,
        }
        return JsonResponse({"object": "list", "data": [model]})

    async def completions(self, http: HttpRequest) -> Response:
        """POST /v1/completions"""
        return await self._serve(http, chat=False)

    async def chat(self, http: HttpRequest) -> Response:
        """POST /v1/chat/completions"""
        return await self._serve(http, chat=True)

    async def _serve(self, http: HttpRequest, *, chat: bool) -> Response:
        try:
            body = msgspec.json.decode(await _body(http))
            job = read_job(body, self.engine, self.name, chat=chat)
        except ClientDisconnect:
            return Response(status_code=CLIENT_LEFT)
        except (msgspec.DecodeError, RecursionError) as error:
            return failure(f"the body is not JSON: {error}")
        except RequestError as error:
            return failure(str(error), status=error.status, param=error.param)
        name = http.headers.get("x-request-id") or body.get("request_id")
        return EngineResponse(self.engine, job, name=str(name) if name else None)


async def _body(http: HttpRequest) -> bytes:
    """The request's body. Raises RequestError where it is longer than any prompt can be."""
    body = bytearray()
    async for piece in http.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise RequestError(f"the body is longer than {MAX_BODY_BYTES:,} bytes", status=413)
    return bytes(body)


class EngineResponse(Response):
    """Submits a job once the answer is wanted, and cancels it when the client goes away."""

    def __init__(self, engine: Engine, job: Job, *, name: str | None = None) -> None:
        super().__init__()
        self.engine, self.job, self.name = engine, job, name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, watching for the client's disconnection all the while."""
        deltas: asyncio.Queue[Delta] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def hand_over(delta: Delta) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(deltas.put_nowait, delta)

        job = self.job
        request = Request(
            job.prompt,
            job.params,
            tokenizer=self.engine.tokenizer,
            on_delta=hand_over,
            stream=job.stream,
            name=self.name,
        )
        assert self.engine.tokenizer is not None
        answer = Answer(job, request, self.engine.tokenizer)
        self.engine.submit(request)
        work = asyncio.ensure_future(
            self._stream(answer, deltas, send)
            if job.stream
            else self._whole(answer, deltas, scope, receive, send)
        )
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            gone.cancel()
            work.cancel()
            if not request.finished:
                self.engine.cancel(request)

    async def _whole(
        self,
        answer: Answer,
        deltas: asyncio.Queue[Delta],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        last = await deltas.get()
        if last.finish_reason in ("error", "abort"):
            response = failure(self._reason(), status=500)
        else:
            response = JsonResponse(answer.whole())
        await response(scope, receive, send)

    async def _stream(self, answer: Answer, deltas: asyncio.Queue[Delta], send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for event in self._events(answer, deltas):
            message = {"type": "http.response.body", "body": event, "more_body": True}
            await send(message)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self, answer: Answer, deltas: asyncio.Queue[Delta]) -> AsyncIterator[bytes]:
        """Server-sent events; what one step accepted comes in one chunk."""
        while True:
            delta = await deltas.get()
            if delta.finish_reason in ("error", "abort"):
                body = error_body(self._reason(), kind="InternalServerError", status=500)
                yield _event(body)
                break
            yield b"".join(_event(body) for body in answer.chunks(delta))
            if delta.finish_reason is not None:
                for body in answer.closing():
                    yield _event(body)
                break
        yield b"data: [DONE]\n\n"

    def _reason(self) -> str:
        return f"the engine failed: {self.engine.failure or 'it is shutting down'}"


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def serve(engine: Engine, name: str, socket: Any) -> int:
    """Serve on a bound socket until SIGTERM, SIGINT or a failure of the engine; the exit code."""
    import uvicorn

    config = uvicorn.Config(
        Service(engine, name).app(),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=5,
        lifespan="off",
    )

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: Any = None) -> None:
            """Ends the requests under way first, so that their connections can close."""
            engine.stop()
            await super().shutdown(sockets)

    server = Server(config)

    def run_engine() -> None:
        try:
            engine.run()
        finally:
            server.should_exit = True

    # uvicorn shuts down gracefully, then raises the signal again for whoever handled it before:
    # here nobody must, so that a stop that was asked for ends with exit code 0
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    thread = threading.Thread(target=run_engine, name="engine", daemon=True)
    thread.start()
    try:
        server.run(sockets=[socket])
    finally:
        engine.stop()
        thread.join(timeout=10)
    return 1 if engine.failure else 0
