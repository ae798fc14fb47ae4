"""One request's state: its tokens, its text, why it ended, and what became of its drafts."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from engines.reference.sampling import SamplingParams, TokenLogprob
from engines.reference.tokenizer import Detokenizer, Tokenizer

FinishReason = Literal["stop", "length", "abort", "error"]
_ids = itertools.count()


class Delta(msgspec.Struct, kw_only=True):
    """What one step added to a request: any number of tokens, one with speculation off.

    `text` may lag behind the tokens: incomplete characters and possible beginnings of a stop
    string wait. The last delta has `finish_reason`; `stop_reason` is the stop string or token id
    that was hit, None for the model's own end token.
    """

    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class DraftLog(msgspec.Struct, kw_only=True):
    """One request's verify steps in order.

    `accepted` counts the draft tokens that the target accepted, as vLLM does; `past_end` is how
    many of them were dropped because they stood behind a stop.
    """

    k: int
    accepted: list[int] = msgspec.field(default_factory=list)
    proposed: list[int] = msgspec.field(default_factory=list)
    past_end: int = 0

    def histogram(self) -> list[int]:
        """Index j: steps that accepted exactly j tokens (length k + 1)."""
        counts = [0] * (self.k + 1)
        for accepted in self.accepted:
            counts[accepted] += 1
        return counts


class Request:
    """A request on its way through the engine. The engine's thread alone changes it.

    `on_delta` is called from that thread after every step that gave output, or once at the end
    when `stream` is False. `cancelled` may be set from any thread. `name` is the client's own id,
    where it gave one.
    """

    def __init__(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        tokenizer: Tokenizer | None = None,
        on_delta: Callable[[Delta], None] | None = None,
        stream: bool = True,
        name: str | None = None,
    ) -> None:
        self.number = next(_ids)
        self.name = name or f"request-{self.number}"
        self.prompt, self.params = prompt, params
        self.on_delta, self.stream = on_delta, stream
        self.cancelled = False
        self.output: list[int] = []
        self.text = ""
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.drafts: DraftLog | None = None
        self.random = random.Random(params.seed)
        self.submitted = time.perf_counter()
        self.started: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        self._detokenizer = (
            Detokenizer(tokenizer, skip_special=params.skip_special_tokens) if tokenizer else None
        )
        self._sent_tokens = self._sent_text = 0
        # a stop string's beginning must not be sent before it is known not to be one
        self._hold = max((len(s) for s in params.stop), default=1) - 1

    @property
    def finished(self) -> bool:
        """Whether the request has ended, for whatever reason."""
        return self.finish_reason is not None

    def take(self, tokens: list[int], *, end_ids: frozenset[int], room: int) -> int:
        """Append tokens up to the first stop; how many were taken.

        `end_ids` are the model's end tokens; `room` is how many tokens the context still holds.
        """
        before = len(self.output)
        limit = min(self.params.max_tokens, before + room)
        for token in tokens:
            self.output.append(token)
            self._check_token(token, end_ids, limit)
            if self.params.stop and self._detokenizer is not None:
                self._add_text([token])
            if self.finished:
                break
        taken = self.output[before:]
        if not self.params.stop and self._detokenizer is not None:
            self._add_text(taken)
        return len(taken)

    def end(self, reason: FinishReason) -> None:
        """End the request from outside: cancelled, or the engine failed."""
        self.finish_reason = reason

    def emit(self) -> None:
        """Hand what is new to `on_delta`."""
        if self.on_delta is None or not (self.stream or self.finished):
            return
        shown = len(self.text) if self.finished else max(len(self.text) - self._hold, 0)
        shown = max(shown, self._sent_text)
        delta = Delta(
            token_ids=self.output[self._sent_tokens :],
            text=self.text[self._sent_text : shown],
            logprobs=(
                self.logprobs[self._sent_tokens : len(self.output)]
                if self.params.logprobs is not None
                else None
            ),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
        self._sent_tokens, self._sent_text = len(self.output), shown
        self.on_delta(delta)

    def _check_token(self, token: int, end_ids: frozenset[int], limit: int) -> None:
        if len(self.output) > self.params.min_tokens or self.params.min_tokens == 0:
            if token in end_ids and not self.params.ignore_eos:
                self.finish_reason = "stop"
                return
            if token in self.params.stop_token_ids:
                self.finish_reason, self.stop_reason = "stop", token
                return
        if len(self.output) >= limit:
            self.finish_reason = "length"

    def _add_text(self, tokens: list[int]) -> None:
        """Decode new tokens, look for stop strings; the text leaves out what ended it."""
        assert self._detokenizer is not None
        ended_by_token = self.finish_reason == "stop"
        if ended_by_token and not self.params.include_stop:
            tokens = tokens[:-1]
        old = len(self.text)
        self.text += self._detokenizer.push(tokens)
        if self.finished:
            self.text += self._detokenizer.finish()
        if not self.params.stop or len(self.output) <= self.params.min_tokens:
            return
        found = [
            (at, stop)
            for stop in self.params.stop
            if (at := self.text.find(stop, max(old - len(stop) + 1, 0))) >= 0
        ]
        if found:
            at, stop = min(found)
            self.text = self.text[: at + (len(stop) if self.params.include_stop else 0)]
            self.finish_reason, self.stop_reason = "stop", stop
