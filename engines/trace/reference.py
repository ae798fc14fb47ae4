"""The trace of the reference engine, taken by two wrappers around whatever proposes.

The outer one hears what the engine says: which request, which tokens at which positions, how many
counted. The inner one, right at the drafter's door, sees what the drafter is handed and what it
answers. A plugin that spoils something does so between the two, as a wrapper that holds what it
wraps in its attribute `inner`; the trace then shows the engine's truth beside the spoiled states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engines.base import EngineUsageError
from engines.reference.draft import Proposer
from engines.reference.engine import Engine
from engines.reference.request import Request
from engines.reference.sampling import SamplingParams
from engines.trace.base import StepKind, TraceStep
from engines.trace.plugin.trace_files import CallFiles, Handed, say

Sink = Callable[[Sequence[Handed], int], None]


def trace_to_folder(engine: Engine, folder: Path) -> None:
    """From now on write every call of the engine's drafter into `folder` (`read_trace`).

    Raises `EngineUsageError` where the engine has no drafter, or the folder cannot be made.
    """
    try:
        files = CallFiles(str(folder))
    except OSError as error:
        raise EngineUsageError(
            f"--trace {folder}: the folder cannot be made: {error.strerror}"
        ) from error
    _attach(engine, files)


def trace_to_memory(engine: Engine) -> dict[str, list[TraceStep]]:
    """The steps by request (`Request.name`), in a dict that grows as the engine serves.

    Raises `EngineUsageError` where the engine has no drafter.
    """
    steps: dict[str, list[TraceStep]] = {}
    calls = iter(range(2**62))

    def keep(handed: Sequence[Handed], batch: int) -> None:
        call = next(calls)
        for part in handed:
            of_request = steps.setdefault(part.request, [])
            step = _kept(part, step=len(of_request), call=call, batch=batch)
            of_request.append(step)

    _attach(engine, keep)
    return steps


def _kept(part: Handed, *, step: int, call: int, batch: int) -> TraceStep:
    kind: StepKind = "prefill" if part.kind == "prefill" else "decode"
    with torch.inference_mode(False):  # tensors that others may compute with as they like
        return TraceStep(
            request=part.request,
            step=step,
            call=call,
            batch=batch,
            kind=kind,
            positions=part.positions.cpu().clone(),
            token_ids=part.token_ids.cpu().clone(),
            aux=part.aux.detach().to("cpu", torch.float32, copy=True),
            valid=part.valid,
            next_token=part.next_token,
            drafts=part.drafts.cpu().clone(),
        )


def _attach(engine: Engine, sink: Sink) -> None:
    if engine.proposer is None:
        raise EngineUsageError("there is no drafter to trace: serve with --drafter")
    trace = _Trace(engine, sink)
    holder: Any = None
    drafter: Any = engine.proposer
    while hasattr(drafter, "inner"):
        holder, drafter = drafter, drafter.inner
    door = _Door(trace, drafter)
    if holder is None:
        engine.proposer = _Told(trace, door)
    else:
        holder.inner = door
        engine.proposer = _Told(trace, engine.proposer)
    before = engine.on_close

    def on_close(request: Request) -> None:
        trace.closed(request)
        before(request)

    engine.on_close = on_close


@dataclass(kw_only=True)
class _Rows:
    """What the target was fed in one step, which the drafter has not answered yet."""

    kind: StepKind
    start: int
    token_ids: list[int]
    valid: int
    next_token: int
    batch: int


@dataclass(kw_only=True)
class _Slot:
    """One running request as the engine tells of it. `fed`: the drafts it verifies next."""

    request: Request
    last: int
    fed: list[int]
    rows: _Rows | None


class _Trace:
    """Joins what the two wrappers see, by slot, and hands each call on to the sink."""

    def __init__(self, engine: Engine, sink: Sink) -> None:
        self.engine, self.sink = engine, sink
        self.slots: dict[int, _Slot] = {}
        self.handed: dict[int, Tensor] = {}  # aux [T, A] by the slot it was handed over in
        self.drafts: dict[int, list[int]] = {}

    def began(self, slot: int, tokens: list[int]) -> None:
        rows = _Rows(
            kind="prefill",
            start=0,
            token_ids=tokens[:-1],
            valid=len(tokens) - 1,
            next_token=tokens[-1],
            batch=1,
        )
        request = self.engine.running[slot]
        self.slots[slot] = _Slot(request=request, last=tokens[-1], fed=[], rows=rows)

    def verified(self, starts: list[int], accepted: list[int], tokens: Tensor) -> None:
        picked = tokens.tolist()
        for slot, (start, count) in enumerate(zip(starts, accepted, strict=True)):
            state = self.slots.get(slot)
            if state is None:  # it began before the trace did
                continue
            state.rows = _Rows(
                kind="decode",
                start=start,
                token_ids=[state.last, *state.fed],
                valid=count + 1,
                next_token=picked[slot][count],
                batch=len(starts),
            )
            state.last = state.rows.next_token

    def moved(self, source: int, target: int) -> None:
        self._end(target)
        if source in self.slots:
            self.slots[target] = self.slots.pop(source)

    def proposed(self, verified: Tensor) -> None:
        """A call is answered; `verified` [n, k] is what the target will be fed."""
        rows, fed = len(verified), verified.tolist()
        parts, batch = [], rows
        for slot in range(rows):
            state = self.slots.get(slot)
            if state is None:
                continue
            if state.rows is not None:
                batch = max(batch, state.rows.batch)
            part = self._part(slot, state, self.drafts.get(slot, []))
            if part is not None:
                parts.append(part)
            state.rows, state.fed = None, fed[slot]
        if parts:
            self.sink(parts, batch)

    def closed(self, request: Request) -> None:
        """A request ended: its last verify step is in the trace before the client hears of it."""
        for slot, state in list(self.slots.items()):
            if state.request is request:
                self._end(slot)

    def _end(self, slot: int) -> None:
        state = self.slots.pop(slot, None)
        if state is None or state.rows is None:
            return
        part = self._part(slot, state, [])
        if part is not None:
            self.sink([part], state.rows.batch)

    def _part(self, slot: int, state: _Slot, drafts: list[int]) -> Handed | None:
        rows, aux = state.rows, self.handed.get(slot)
        if rows is None:
            return None
        count = len(rows.token_ids)
        if aux is None or len(aux) != count:
            got = "no" if aux is None else len(aux)
            say(f"{state.request.name}: {got} rows of states for {count} tokens: step left out")
            return None
        return Handed(
            request=state.request.name,
            kind=rows.kind,
            positions=torch.arange(rows.start, rows.start + count),
            token_ids=torch.tensor(rows.token_ids),
            aux=aux,
            valid=rows.valid,
            next_token=rows.next_token,
            drafts=torch.tensor(drafts, dtype=torch.int64),
        )


class _Wrapper:
    """A proposer around another, which it holds in `inner`."""

    def __init__(self, trace: _Trace, inner: Proposer) -> None:
        self.trace, self.inner = trace, inner
        self.k, self.aux_layers = inner.k, inner.aux_layers


class _Told(_Wrapper):
    """The outer wrapper: the engine's own words, before anybody changed them."""

    def begin(self, slot: int, tokens: list[int], aux: Tensor) -> None:
        self.trace.began(slot, tokens)
        self.inner.begin(slot, tokens, aux)

    def record(self, starts: list[int], accepted: list[int], tokens: Tensor, aux: Tensor) -> None:
        self.trace.verified(starts, accepted, tokens)
        self.inner.record(starts, accepted, tokens, aux)

    def move(self, source: int, target: int) -> None:
        self.trace.moved(source, target)
        self.inner.move(source, target)

    def propose(
        self, rows: int, params: list[SamplingParams] | None, uniform: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        drafts, chances = self.inner.propose(rows, params, uniform)
        self.trace.proposed(drafts)
        return drafts, chances


class _Door(_Wrapper):
    """The inner wrapper: what the drafter is really handed, and what it really answers."""

    def begin(self, slot: int, tokens: list[int], aux: Tensor) -> None:
        self.trace.handed[slot] = aux.clone()
        self.inner.begin(slot, tokens, aux)

    def record(self, starts: list[int], accepted: list[int], tokens: Tensor, aux: Tensor) -> None:
        self.trace.handed.update(enumerate(aux.clone()))
        self.inner.record(starts, accepted, tokens, aux)

    def move(self, source: int, target: int) -> None:
        if source in self.trace.handed:
            self.trace.handed[target] = self.trace.handed[source]
        self.inner.move(source, target)

    def propose(
        self, rows: int, params: list[SamplingParams] | None, uniform: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        drafts, chances = self.inner.propose(rows, params, uniform)
        self.trace.drafts = dict(enumerate(drafts.tolist()))
        return drafts, chances
