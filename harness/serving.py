"""A server to measure: one that the harness starts, or one that runs already."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from engines.base import Adapter, EngineError, EngineFailed
from engines.process import EngineProcess
from harness.alive import Attached, Launched
from harness.errors import HarnessError, one_line
from harness.load.drive import drive
from harness.load.prompts.datasets import Prompt
from harness.load.streaming.client import Asking, ReadAcceptance
from harness.load.streaming.plain import plain_client
from harness.measure.counters import CounterReader
from harness.measure.replicas import ReplicaReader
from harness.measure.store import to_json, write_atomic
from harness.measure.told import read_acceptance_of
from harness.plan.schema import Length, Plan
from harness.plan.secret import secrets_of
from harness.plan.serve import served_name
from harness.prepare import Prepared, api_key
from harness.progress import Progress
from harness.records import Cell, DraftCounts, LaunchRecord, LoadPoint, Phase, Variant
from harness.stored import LAUNCH
from harness.telemetry import Watch, watching


class Server(Protocol):
    """A server that answers."""

    url: str
    """Its root; of several replicas the first one's, which alone is asked what is no load."""
    urls: str
    """The roots of all its replicas, joined by commas: where the load goes."""
    argv: tuple[str, ...]
    phases: tuple[Phase, ...]
    ready_s: float | None
    log_path: Path | None
    pid: int | None
    watch: Watch | None

    def gone(self) -> str | None:
        """Why the server no longer answers, or None while it does."""

    def lost(self) -> str | None:
        """Asked once, after requests failed: whether the server is gone for good, and why."""

    def failed(self, reason: str) -> EngineFailed:
        """The error to end with, given what the client saw."""


class LaunchedServer(Launched):
    """An engine of the harness's own."""

    watch: Watch | None = None

    def __init__(self, process: EngineProcess) -> None:
        super().__init__(process)
        self.pid = process.pid
        self.argv = process.argv
        self.ready_s = process.ready_s
        self.phases = phases_of(process)


class AttachedServer(Attached):
    """A server that someone else runs, or replicas of one."""

    argv: tuple[str, ...] = ()
    phases: tuple[Phase, ...] = ()
    ready_s: float | None = None
    pid: int | None = None
    watch: Watch | None = None


def phases_of(process: EngineProcess) -> tuple[Phase, ...]:
    """The process's start-up phases as records."""
    return tuple(
        Phase(
            phase=p.phase,
            start_s=p.start_s,
            end_s=p.end_s,
            progress=p.progress,
            weight_bytes=p.weight_bytes,
            **({} if p.use is None else vars(p.use)),
        )
        for p in process.phases
    )


class Started:
    """What is known of a start while it goes on; a start that fails leaves its phases here."""

    def __init__(self) -> None:
        self.phases: tuple[Phase, ...] = ()
        self.argv: tuple[str, ...] = ()
        self.wall_s: float | None = None


@contextmanager
def serving(
    prepared: Prepared, variant: Variant, folder: Path, progress: Progress, started: Started
) -> Iterator[Server]:
    """The server of one variant; one that was started here is gone when the block ends.

    Raises `EngineFailed` where it does not come up.
    """
    if prepared.attached:
        yield AttachedServer(prepared.urls[variant], prepared.plan.client)
        return
    what = f"{prepared.name} {variant}"

    def on_phase(phase: str, elapsed_s: float) -> None:
        # With a count each beat is a new text, whose own clock begins anew: the launch's is told.
        since = f", {elapsed_s:.0f} s since the launch" if " of " in phase else ""
        progress.stage(f"starting {what}: {phase}{since}")

    with EngineProcess(
        prepared.adapter,
        prepared.spec(variant),
        workdir=folder / "work",
        log_path=folder / "engine.log",
        deadline_s=prepared.plan.engine.startup_deadline_s,
        patience=prepared.plan.engine.stall_patience,
        on_phase=on_phase,
        secrets=[*secrets_of(prepared.plan), api_key(prepared.plan) or ""],
    ) as process:
        try:
            process.start()
            process.wait_ready()
        finally:
            started.phases, started.argv = phases_of(process), process.argv
            started.wall_s = process.wall_s
        yield LaunchedServer(process)


@contextmanager
def launched(
    prepared: Prepared, variant: Variant, repeat: int, launch_dir: Path, progress: Progress
) -> Iterator[Server]:
    """`serving`, with the start's record in `launch_dir` when the block ends, whatever ended it."""
    started = Started()
    failure: str | None = None
    server: Server | None = None
    try:
        with (
            serving(prepared, variant, launch_dir, progress, started) as server,
            watching(prepared, server.urls, server.pid) as server.watch,
        ):
            yield server
    except Exception as error:
        told = isinstance(error, EngineError | HarnessError)
        failure = str(error) if told else one_line(f"{type(error).__name__}: {error}", 600)
        raise
    finally:
        record = LaunchRecord(
            name=launch_dir.name,
            engine=prepared.name,
            variant=variant,
            repeat=repeat,
            argv=started.argv,
            phases=started.phases,
            ready_s=server.ready_s if server else None,
            failure=failure,
            label=prepared.label,
            variant_known=prepared.variant_known,
            wall_s=started.wall_s,
        )
        write_atomic(launch_dir / LAUNCH, to_json(record))


def most_tokens(wanted: int | Length) -> int:
    """`max_tokens` of a request whose prompt says none of its own."""
    if isinstance(wanted, int):
        return wanted
    return wanted.max or math.ceil(wanted.mean + 4 * wanted.spread)


def acceptance_reader(adapter: Adapter, variant: Variant) -> ReadAcceptance | None:
    """Reads a request's own acceptance out of its last payloads; a baseline has none."""

    def read(payloads: list[dict[str, Any]]) -> DraftCounts | None:
        return read_acceptance_of(adapter, payloads)

    return read if variant == "speculative" else None


def asking(adapter: Adapter, url: str, model: str, plan: Plan, *, speculative: bool) -> Asking:
    """How requests to this server look."""
    return Asking(
        url=url,
        model=model,
        endpoint=plan.workload.endpoint,
        max_tokens=most_tokens(plan.workload.output_tokens),
        sampling=plan.sampling,
        timeout_s=plan.load.timeout_s,
        api_key=api_key(plan),
        extra=dict(
            adapter.request_fields(speculative=speculative, endpoint=plan.workload.endpoint)
        ),
        ignore_eos=plan.workload.ignore_eos,
        chat_template_kwargs=plan.workload.chat_template_kwargs,
        retries=plan.load.retries,
        new_connections=plan.load.new_connections,
        client=plan.client,
        secrets=tuple(secrets_of(plan)),
    )


def asking_of(prepared: Prepared, server: Server, variant: Variant) -> Asking:
    """How requests to a prepared engine's server look."""
    model = prepared.model
    if model is None:
        assert prepared.target is not None
        model = served_name(prepared.plan, prepared.target)
    return asking(
        prepared.adapter, server.urls, model, prepared.plan, speculative=variant == "speculative"
    )


def counter_reader(prepared: Prepared, server: Server) -> CounterReader:
    """Reads the server's counters; of several replicas their sums."""
    plan = prepared.plan
    readers = [
        CounterReader(prepared.adapter, url, plain_client(url, plan.client, api_key(plan)))
        for url in server.urls.split(",")
    ]
    return readers[0] if len(readers) == 1 else ReplicaReader(readers)


def warm_up(ask: Asking, prompts: tuple[Prompt, ...], cells: list[Cell], server: Server) -> None:
    """Ask what is not measured. Raises `EngineFailed` where nothing is answered."""
    if not prompts:
        return
    most = max(((c.load.concurrency or 1) for c in cells), default=1)
    load = LoadPoint(mode="closed", concurrency=min(most, len(prompts)), num_requests=len(prompts))
    driven = drive(ask, prompts, load, cell_id="warm-up", seed=0, engine_gone=server.gone)
    if driven.interrupted is not None:
        raise server.failed(driven.interrupted)
    if not any(r.status == "ok" for r in driven.records):
        raise server.failed(
            f"none of {len(driven.records)} warm-up requests was answered: "
            f"{driven.records[0].error}"
        )
