"""The same prompts in a real engine: started with the drafter, asked, and its figures read."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from drafters.formats import text_config
from engines.base import Adapter, ServeSpec
from engines.catalog import adapter as adapter_named
from engines.checkpoint import read_config
from engines.process import EngineProcess
from harness.alive import Attached, Launched
from harness.errors import UsageError
from harness.load.drive import Driven, drive
from harness.load.prompts.prompt import Prompt
from harness.load.slices import Tally
from harness.load.streaming.client import Asking
from harness.load.streaming.plain import plain_client
from harness.measure.counters import CounterReader, CounterWindow
from harness.measure.metrics import client_counts, from_histogram, pool
from harness.plan.schema import SamplingSection
from harness.records import DraftCounts, LoadPoint, RequestRecord
from training.evaluation.records import Asked, HeldOut, Online, Source
from training.launch import serve_spec, start_teller
from training.plan import TrainingPlan
from training.progress import Progress

MODEL = "target"


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be served, and how many of the plan's words that takes.

    `greedy`: asked at temperature 0; else with the plan's own sampling.
    """

    plan: TrainingPlan
    target: Path
    drafter: Path
    k: int
    context: int
    url: str | None = None
    greedy: bool = True

    @property
    def sampling(self) -> SamplingSection:
        """How every prompt is asked."""
        own = self.plan.sampling
        return msgspec.structs.replace(own, temperature=0.0) if self.greedy else own

    def spec(self) -> ServeSpec:
        """The neutral specification for an engine that is started here."""
        return dataclasses.replace(
            serve_spec(self.plan, self.target, self.context, "speculative"),
            served_name=MODEL,
            drafter=self.drafter,
            k=self.k,
            dtype=served_dtype(self.plan, self.target),
            max_num_seqs=self.plan.engine.max_num_seqs or max(4, self.plan.generate.concurrency),
            temperature=self.sampling.temperature,
            reasoning_parser=None,
        )


def served_dtype(plan: TrainingPlan, target: Path) -> str:
    """The plan's type, else the target's own: vLLM's `auto` makes bfloat16 of float32."""
    if plan.engine.dtype != "auto":
        return plan.engine.dtype
    text = text_config(read_config(target, "target"))
    own = str(text.get("dtype") or text.get("torch_dtype") or "auto").removeprefix("torch.")
    return own if own in ("float32", "float16", "bfloat16") else "auto"


def check_engine(name: str, serving: Serving) -> None:
    """Raise `EngineUsageError` or `UsageError` where the engine cannot be asked at all."""
    if name == "openai":
        if serving.url is None:
            raise UsageError(
                "evaluate: the engine openai is a server that runs already: give its --url"
            )
        return
    adapter_named(name).check(serving.spec())


def ask_engine(name: str, serving: Serving, held: Sequence[HeldOut], folder: Path) -> Online:
    """Serve the drafter in engine `name` and ask it `held`.

    The engine's log and its translated drafter go to `folder`. Raises `EngineFailed`.
    """
    adapter = adapter_named(name)
    begun = time.perf_counter()
    with _server(adapter, serving, folder) as (host, model, ready_s):
        http = plain_client(host.url, serving.plan.client, None)
        reader = CounterReader(adapter, host.url, http)
        try:
            window = CounterWindow(reader)
            driven = _drive(adapter, serving, held, host, model)
            window.close()
        finally:
            reader.close()
        failed = [record.error for record in driven.records if record.status != "ok"]
        lost = driven.interrupted or (host.lost() if failed else None)
        if lost is not None:
            raise host.failed(lost)
        if len(failed) == len(driven.records):  # no figure to keep
            reason = next(filter(None, failed), "no answer")
            raise host.failed(f"{name}: no prompt was answered: {reason}")
    counters = window.difference()
    counts, source = _taken(counters.delta, driven.records)
    return Online(
        engine=name,
        answers=tuple(_asked(r, held) for r in driven.records),
        counters=counters.delta,
        requests=_pooled(driven.records),
        counts=counts,
        source=source,
        note=counters.note,
        ready_s=ready_s,
        seconds=time.perf_counter() - begun,
    )


Server = tuple[Launched | Attached, str, float | None]


@contextmanager
def _server(adapter: Adapter, serving: Serving, folder: Path) -> Iterator[Server]:
    """The server, the model's name there, and how long it took to start."""
    if serving.url is not None and adapter.name == "openai":
        attached = Attached(serving.url, serving.plan.client)
        yield attached, serving.plan.target.served_name or MODEL, None
        return
    spec = serving.spec()

    with EngineProcess(
        adapter,
        spec,
        workdir=folder / "work",
        log_path=folder / "engine.log",
        deadline_s=serving.plan.engine.startup_deadline_s,
        patience=serving.plan.engine.stall_patience,
        on_phase=start_teller("evaluate", adapter.name),
    ) as process:
        process.start()
        process.wait_ready()
        host = Launched(process)
        yield host, MODEL, process.ready_s
        host.check()


def _drive(
    adapter: Adapter,
    serving: Serving,
    held: Sequence[HeldOut],
    host: Launched | Attached,
    model: str,
) -> Driven:
    """Every prompt once, as many at once as the plan's `generate.concurrency`."""
    plan = serving.plan
    # Token ids and the completions endpoint: the same tokens for every engine, and ids come back.
    asking = Asking(
        url=host.url,
        model=model,
        endpoint="completions",
        max_tokens=plan.generate.max_tokens,
        sampling=serving.sampling,
        timeout_s=plan.generate.timeout_s,
        extra=dict(adapter.request_fields(speculative=True, endpoint="completions")),
        client=plan.client,
    )
    prompts = [
        Prompt(id=h.prompt_id, category=h.category, token_ids=h.token_ids, max_tokens=h.max_tokens)
        for h in held
    ]
    load = LoadPoint(
        mode="closed",
        concurrency=min(plan.generate.concurrency, len(prompts)),
        num_requests=len(prompts),
    )
    progress, done = Progress(f"evaluate: {adapter.name}", len(prompts)), Tally()

    def on_tally(tally: Tally) -> None:
        nonlocal done
        text = f"{tally.failed} failed" if tally.failed else "answers"
        progress.update(tally.done - 1, tokens=tally.tokens - done.tokens, text=text)
        done = tally

    return drive(
        asking,
        prompts,
        load,
        cell_id=adapter.name,
        seed=plan.seed,
        engine_gone=host.gone,
        on_tally=on_tally,
        workers=1,
        read_acceptance=lambda payloads: _read(adapter, payloads),
    )


def _read(adapter: Adapter, payloads: list[dict[str, Any]]) -> DraftCounts | None:
    """One request's own figures; None where the server tells none of a known shape."""
    try:
        told = adapter.request_acceptance(payloads)
    except (AttributeError, LookupError, TypeError, ValueError):
        return None
    if told is None:
        return None
    if told.histogram is None:
        return DraftCounts(drafts=told.drafts, drafted=told.drafted, accepted=told.accepted)
    counts = from_histogram(told.drafts, told.drafted, told.histogram)
    return msgspec.structs.replace(counts, past_end=told.past_end)


def _pooled(records: Sequence[RequestRecord]) -> DraftCounts | None:
    """The requests' own figures; an answer of one token had no verify step, and needs none."""
    ok = [r for r in records if r.status == "ok"]
    told = [r for r in ok if r.acceptance is not None or (r.output_tokens or 2) > 1]
    return pool([r.acceptance for r in told])


def _taken(
    delta: DraftCounts | None, records: Sequence[RequestRecord]
) -> tuple[DraftCounts | None, Source | None]:
    """The counters where they tell all, else the requests' own figures, else the chunks seen."""
    if delta is not None and delta.drafts and delta.drafted:
        return delta, "counters"
    requests = _pooled(records)
    if requests is not None and requests.drafted:
        return requests, "requests"
    seen = client_counts(records)
    return (seen, "client") if seen is not None else (None, None)


def _asked(record: RequestRecord, held: Sequence[HeldOut]) -> Asked:
    return Asked(
        prompt_id=held[record.index].prompt_id,
        token_ids=record.token_ids,
        output_tokens=record.output_tokens,
        finish_reason=record.finish_reason,
        counts=record.acceptance,
        error=record.error,
    )
