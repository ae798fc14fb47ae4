"""The engine: continuous batching over slots, one prefill or one verify step at a time.

`step` is the whole of it: drop what was cancelled, prefill what fits, then decode every running
request once in one batched forward pass. With a proposer a decode step verifies k drafts a row.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engines.reference.cache import Batch
from engines.reference.draft import Proposer
from engines.reference.metrics import EngineMetrics
from engines.reference.model import Model
from engines.reference.request import DraftLog, Request
from engines.reference.sampling import (
    SamplingParams,
    distributions,
    force,
    pick,
    top_logprobs,
    verify_greedy,
    verify_sampled,
)
from engines.reference.tokenizer import Tokenizer

PREFILL_CHUNK = 512  # tokens of a prompt that go through the model at once


class Engine:
    """Serves requests with `model`, drafting with `proposer` where there is one.

    `submit`, `cancel` and `stop` may be called from any thread; `run` (or `step`, or `generate`)
    from one thread only.
    """

    def __init__(
        self,
        model: Model,
        *,
        tokenizer: Tokenizer | None,
        proposer: Proposer | None = None,
        max_len: int,
        slots: int,
        name: str = "reference",
        seed: int = 0,
        forced_length: float | None = None,
    ) -> None:
        self.model, self.tokenizer, self.proposer = model, tokenizer, proposer
        self.max_len, self.slots = max_len, slots
        self.k = proposer.k if proposer is not None else 0
        # a verify step may run k tokens past the last one that can become output
        length = max_len + self.k + 1
        model.prepare_rope(length)
        self.cache = model.new_cache(slots=slots, length=length)
        self.device = str(model.embedding.device)
        self.end_ids = frozenset(model.config.eos_token_ids)
        self.metrics = EngineMetrics(name, self.k or None)
        self.running: list[Request] = []  # the request in slot i is running[i]
        self.waiting: deque[Request] = deque()
        self.failure: str | None = None
        # called with every request that ended, before its client hears of it
        self.on_close: Callable[[Request], None] = lambda _: None
        self._lengths: list[int] = []  # cached positions by slot: all tokens but the last
        self._seeds = random.Random(seed)
        self.forced_length, self._coin = forced_length, random.Random(seed)
        self._wake = threading.Condition()
        self._stopping = False

    # -- from any thread ---------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. Its prompt must be within 1..max_len - 1 tokens (`fits`)."""
        if request.params.seed is None:
            request.random.seed(self._seeds.getrandbits(64))
        with self._wake:
            if self._stopping or self.failure:
                request.end("error")
                request.emit()
                return
            self.waiting.append(request)
            self._wake.notify()

    def cancel(self, request: Request) -> None:
        """Free the request's slot before the next step."""
        with self._wake:
            request.cancelled = True
            self._wake.notify()

    def fits(self, prompt_tokens: int) -> bool:
        """Whether a prompt leaves room for at least one token."""
        return 0 < prompt_tokens < self.max_len

    def stop(self) -> None:
        """Let `run` return after its step; what is unfinished ends as aborted."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    # -- the engine's thread -----------------------------------------------------------------

    def run(self) -> None:
        """Serve until `stop`. An exception ends all requests, is kept in `failure`, and raised."""
        reason = "abort"
        try:
            while not self._stopping:
                with self._wake:
                    while not (self._stopping or self.waiting or self.running):
                        self._wake.wait()
                self.step()
        except Exception as error:
            self.failure, reason = f"{type(error).__name__}: {error}", "error"
            raise
        finally:
            for request in [*self.running, *self.waiting]:
                request.end("error" if reason == "error" else "abort")
                self._close(request)
            self.running.clear()
            self.waiting.clear()

    @torch.inference_mode()
    def step(self) -> None:
        """One round: drop, prefill, decode."""
        self._drop_cancelled()
        while self.waiting and len(self.running) < self.slots:
            self._prefill(self.waiting.popleft())
        if self.running:
            self._decode()
        self._set_gauges()

    def generate(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[Request]:
        """Serve these prompts to their end and return the finished requests (no thread)."""
        requests = [
            Request(prompt, params, tokenizer=self.tokenizer, stream=False) for prompt in prompts
        ]
        for request in requests:
            if not self.fits(len(request.prompt)):
                raise ValueError(f"a prompt of {len(request.prompt)} tokens does not fit")
            self.submit(request)
        while not all(request.finished for request in requests):
            self.step()
        return requests

    @torch.inference_mode()
    def capture(
        self,
        tokens: list[int],
        layers: tuple[int, ...],
        sink: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """The target's hidden states of `tokens` at transformers' indices `layers`: [T, n, H].

        Index 0 is the embeddings, index i the input of layer i, the number of layers the normed
        last state. Runs beside no request: call it on an engine that is not serving.
        """
        assert not self.running, "capture needs an idle engine"
        _, aux = self._forward_prompt(0, tokens, layers, sink=sink)
        assert aux is not None
        return aux.unflatten(-1, (len(layers), -1))

    def _drop_cancelled(self) -> None:
        for request in [r for r in self.waiting if r.cancelled]:
            self.waiting.remove(request)
            request.end("abort")
            self._close(request)
        for slot in reversed(range(len(self.running))):
            if self.running[slot].cancelled:
                self.running[slot].end("abort")
                self._release(slot)

    # -- prefill -----------------------------------------------------------------------------

    def _prefill(self, request: Request) -> None:
        """Run a prompt, take its first token, and give the request the next free slot."""
        slot, prompt = len(self.running), request.prompt
        self.running.append(request)
        self._lengths.append(len(prompt))
        request.started = time.perf_counter()
        aux_layers = self.proposer.aux_layers if self.proposer is not None else ()
        sink = (
            self._prompt_logprobs(request) if request.params.prompt_logprobs is not None else None
        )
        last, aux = self._forward_prompt(slot, prompt, aux_layers, sink=sink)
        logits = self.model.logits(last[None])  # [1, 1, V]
        raw, logits = logits, self._constrain(logits, [request])
        if request.params.greedy:
            token = int(logits.argmax())
        else:
            uniform = torch.tensor([[request.random.random()]], device=self.device)
            token = int(pick(distributions(logits, [request.params]), uniform))
        self.metrics.prompt_tokens.inc(len(prompt))
        if self.proposer is not None:
            request.drafts = DraftLog(k=self.k)
        self._deliver([request], [[token]], raw)
        if request.finished:
            self._release(slot)
        elif self.proposer is not None and aux is not None:
            self.proposer.begin(slot, [*prompt, token], aux)

    def _forward_prompt(
        self,
        slot: int,
        prompt: list[int],
        aux_layers: tuple[int, ...],
        *,
        sink: Callable[[Tensor], None] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The last normed state [1, H] and all aux states [T, A]; `sink` gets normed chunks."""
        pieces = []
        states = torch.empty(0)
        for start in range(0, len(prompt), PREFILL_CHUNK):
            ids = torch.tensor([prompt[start : start + PREFILL_CHUNK]], device=self.device)
            batch = Batch(
                self.cache,
                first_slot=slot,
                starts=[start],
                tokens=ids.shape[1],
                device=self.device,
            )
            states, aux = self.model.forward(ids, batch, self.cache, aux_layers)
            pieces.append(aux)
            if sink is not None:
                sink(states[0])
        whole = torch.cat([p[0] for p in pieces if p is not None]) if aux_layers else None
        return states[0, -1:], whole

    def _prompt_logprobs(self, request: Request) -> Callable[[Tensor], None]:
        """A sink that scores each prompt token by the state before it; the first has no score."""
        scores = request.prompt_logprobs = [None]
        prompt, count = request.prompt, request.params.prompt_logprobs or 0

        def sink(states: Tensor) -> None:
            at = len(scores)
            following = prompt[at : at + len(states)]
            if following:
                logits = self.model.logits(states[: len(following)])
                scores.extend(top_logprobs(logits, following, count))

        return sink

    # -- decode ------------------------------------------------------------------------------

    def _decode(self) -> None:
        """One token, or one verify step of k drafts, for every running request."""
        requests = list(self.running)
        rows = len(requests)
        params = [request.params for request in requests]
        sampled = not all(p.greedy for p in params)
        uniform = self._uniform(requests) if sampled else None  # [n, 2k + 1]
        last = torch.tensor([[request.output[-1]] for request in requests], device=self.device)
        chances = None
        if self.proposer is not None:
            drafts, chances = self.proposer.propose(rows, params if sampled else None, uniform)
        else:
            drafts = last[:, :0]
        starts = self._lengths[:rows]
        batch = Batch(
            self.cache, first_slot=0, starts=starts, tokens=self.k + 1, device=self.device
        )
        aux_layers = self.proposer.aux_layers if self.proposer is not None else ()
        ids = torch.cat((last, drafts), dim=1)
        states, aux = self.model.forward(ids, batch, self.cache, aux_layers)
        raw = self.model.logits(states)
        logits = self._constrain(raw, requests)
        if uniform is None:
            tokens, accepted = verify_greedy(logits, drafts)
        else:
            target = distributions(logits, params)
            draft = chances if chances is not None else target[:, :0]
            tokens, accepted = verify_sampled(target, draft, drafts, uniform[:, self.k :])
        if self.forced_length is not None:
            flips = [self._coin.random() for _ in requests]
            tokens, accepted = force(logits, drafts, self.forced_length, flips)
        counts = accepted.tolist()
        if self.proposer is not None and aux is not None:
            self.proposer.record(starts, counts, tokens, aux)
        produced = [row[: count + 1] for row, count in zip(tokens.tolist(), counts, strict=True)]
        for slot, row in enumerate(produced):
            self._lengths[slot] += len(row)
        self._deliver(requests, produced, raw)
        for slot in reversed(range(rows)):
            if requests[slot].finished:
                self._release(slot)

    def _uniform(self, requests: list[Request]) -> Tensor:
        """Random numbers [n, 2k + 1] from each request's own stream; greedy rows need none."""
        count = 2 * self.k + 1
        rows = [
            [0.0] * count if r.params.greedy else [r.random.random() for _ in range(count)]
            for r in requests
        ]
        return torch.tensor(rows, device=self.device)

    def _constrain(self, logits: Tensor, requests: list[Request]) -> Tensor:
        """Forbid end tokens before `min_tokens`; logits [n, T, V] are copied where changed."""
        constrained = logits
        for row, request in enumerate(requests):
            params = request.params
            short = params.min_tokens - len(request.output)
            if short <= 0:
                continue
            if constrained is logits:
                constrained = logits.clone()
            banned = list(self.end_ids | set(params.stop_token_ids))
            constrained[row, :short, banned] = -torch.inf
        return constrained

    def _deliver(self, requests: list[Request], produced: list[list[int]], raw: Tensor) -> None:
        """Give each request its tokens, up to its first stop, and count what became of drafts."""
        now = time.perf_counter()
        verified = raw.shape[1] > 1
        for row, (request, tokens) in enumerate(zip(requests, produced, strict=True)):
            room = self.max_len - len(request.prompt) - len(request.output)
            taken = request.take(tokens, end_ids=self.end_ids, room=room)
            if request.params.logprobs is not None:
                scored = top_logprobs(raw[row, :taken], tokens[:taken], request.params.logprobs)
                request.logprobs.extend(scored)
            if verified and request.drafts is not None:
                accepted = len(tokens) - 1
                past_end = max(accepted - taken, 0)
                request.drafts.accepted.append(accepted)
                request.drafts.proposed.append(self.k)
                request.drafts.past_end += past_end
                self.metrics.observe_verify(self.k, accepted, past_end)
            self.metrics.observe_tokens(request, taken, now)
            if not request.finished:
                request.emit()

    def _release(self, slot: int) -> None:
        """Free a slot and fill the hole with the last running request."""
        request, last = self.running[slot], len(self.running) - 1
        if slot != last:
            self.cache.move(last, slot, self._lengths[last])
            if self.proposer is not None:
                self.proposer.move(last, slot)
            self.running[slot], self._lengths[slot] = self.running[last], self._lengths[last]
        self.running.pop()
        self._lengths.pop()
        self._close(request)

    def _close(self, request: Request) -> None:
        """Count a finished request, then hand out its last delta: who has it finds all counted."""
        self.on_close(request)
        self.metrics.observe_finish(request, time.perf_counter())
        self._set_gauges()
        request.emit()

    def _set_gauges(self) -> None:
        self.metrics.running.set(len(self.running))
        self.metrics.waiting.set(len(self.waiting))
        self.metrics.cache_usage.set(len(self.running) / self.slots)
