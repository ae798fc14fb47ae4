"""The engine's counters, published under vLLM's names and with vLLM's meanings.

That includes one doubtful meaning: draft tokens accepted behind a stop token, a stop string or the
length limit never become output, and vLLM and SGLang count them as accepted all the same. So does
this engine, which also publishes them apart (`reference:…past_end…`): `accepted - past_end` is
what the client got.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics import disable_created_metrics

from engines.reference.request import Request

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
REASONS = ("stop", "length", "abort", "error")


class EngineMetrics:
    """All series of one engine. The engine's thread writes, the server's thread reads."""

    def __init__(self, model_name: str, k: int | None) -> None:
        disable_created_metrics()
        self.registry = CollectorRegistry()
        self._labels = {"engine": "0", "model_name": model_name}
        self.running = self._gauge("vllm:num_requests_running", "Requests being decoded.")
        self.waiting = self._gauge("vllm:num_requests_waiting", "Requests waiting for a slot.")
        self.cache_usage = self._gauge("vllm:kv_cache_usage_perc", "Used slots, 1 is all.")
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens prefilled.")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens given out.")
        self.success = {
            reason: self._counter(
                "vllm:request_success", "Finished requests.", finished_reason=reason
            )
            for reason in REASONS
        }
        self.ttft = self._histogram("vllm:time_to_first_token_seconds", SECONDS)
        self.itl = self._histogram("vllm:inter_token_latency_seconds", SECONDS)
        self.e2el = self._histogram("vllm:e2e_request_latency_seconds", SECONDS)
        self.queue = self._histogram("vllm:request_queue_time_seconds", SECONDS)
        self.request_prompt = self._histogram("vllm:request_prompt_tokens", TOKENS)
        self.request_generation = self._histogram("vllm:request_generation_tokens", TOKENS)
        if k is not None:
            self._add_speculative(k)

    def _add_speculative(self, k: int) -> None:
        base = "vllm:spec_decode_num"
        self.drafts = self._counter(f"{base}_drafts", "Verify steps that had drafts.")
        self.drafted = self._counter(f"{base}_draft_tokens", "Draft tokens proposed.")
        self.accepted = self._counter(f"{base}_accepted_tokens", "Draft tokens accepted.")
        self.past_end = self._counter(
            "reference:spec_decode_num_accepted_past_end_tokens",
            "Of the accepted draft tokens, those behind a request's end.",
        )
        self.per_position = [
            self._counter(
                f"{base}_accepted_tokens_per_pos", "By draft position.", position=str(position)
            )
            for position in range(k)
        ]

    def observe_verify(self, proposed: int, accepted: int, past_end: int) -> None:
        """One request's verify step."""
        self.drafts.inc()
        self.drafted.inc(proposed)
        self.accepted.inc(accepted)
        for counter in self.per_position[:accepted]:
            counter.inc()
        if past_end:
            self.past_end.inc(past_end)

    def observe_tokens(self, request: Request, count: int, now: float) -> None:
        """`count` tokens of a request became output at `now` (perf_counter seconds)."""
        self.generation_tokens.inc(count)
        if request.first_token is None:
            request.first_token = now
            self.ttft.observe(now - request.submitted)
        elif request.last_token is not None:
            self.itl.observe(now - request.last_token)
        request.last_token = now

    def observe_finish(self, request: Request, now: float) -> None:
        """A request ended, whether it ran or not."""
        self.success[request.finish_reason or "error"].inc()
        self.e2el.observe(now - request.submitted)
        if request.started is not None:
            self.queue.observe(request.started - request.submitted)
        self.request_prompt.observe(len(request.prompt))
        self.request_generation.observe(len(request.output))

    def text(self) -> bytes:
        """The Prometheus exposition."""
        return generate_latest(self.registry)

    def _parent(
        self, kind: type, name: str, doc: str, labels: tuple[str, ...], **more: object
    ) -> Any:
        known = self.registry._names_to_collectors.get(name)
        return known or kind(name, doc, labels, registry=self.registry, **more)

    def _counter(self, name: str, doc: str, **labels: str) -> Counter:
        every = {**self._labels, **labels}
        return self._parent(Counter, name, doc, tuple(every)).labels(**every)

    def _gauge(self, name: str, doc: str) -> Gauge:
        return self._parent(Gauge, name, doc, tuple(self._labels)).labels(**self._labels)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        doc = name.split(":")[1].replace("_", " ").capitalize() + "."
        parent = self._parent(Histogram, name, doc, tuple(self._labels), buckets=buckets)
        return parent.labels(**self._labels)
