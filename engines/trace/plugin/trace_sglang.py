"""The trace of SGLang (0.5.23), inside its scheduler.

`--forward-hooks` names `sglang_trace`, which SGLang calls while it loads a model; the hook that it
returns does nothing. What it does by being called is to wrap the EAGLE worker's methods
(srt/speculative/eagle_worker_v2.py), for chains of drafts (top-k 1). Proven on a CPU; on GPUs the
same methods run outside the graphs, which was read, not run.

`EAGLEWorkerV2` knows the target's step: which requests, what was fed, what was accepted. Its draft
worker's methods are the door: `_draft_extend_for_prefill` and `_draft_extend_for_decode` are handed
the states, and the next iteration's `draft` answers, perhaps for another batch. A step's rows are
therefore written when they are handed over, and its drafts, to a file beside, when they are made.

A plugin is given the draft worker before its first call. What it sets on that object lies outside
the door, which is set on the class.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from trace_files import (  # type: ignore[import-not-found]  # by name, in the engine's process
    CallFiles,
    Handed,
    call_plugins,
    say,
)

WORKER = "sglang.srt.speculative.eagle_worker_v2"
_set: list[_Trace] = []


def sglang_trace(config: dict[str, Any]) -> Any:
    """A forward hook that does nothing. `config`: the `folder` to write to."""
    if not _set:
        module: Any = importlib.import_module(WORKER)
        _set.append(_Trace(str(config["folder"])))
        _set[0].wrap(module.EAGLEWorkerV2, module.EagleDraftWorker)
    return lambda module, args, output: None


@dataclass(kw_only=True)
class _Fed:
    """What the target was fed in one step, request by request."""

    requests: list[str]
    positions: list[torch.Tensor]
    token_ids: list[torch.Tensor]
    valid: list[int]
    next_token: list[int | None]


class _Trace:
    """Joins what the target's step tells with what the drafter is handed for it."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.files: CallFiles | None = None
        self.began = False
        self.fed: _Fed | None = None

    def wrap(self, worker: Any, drafter: Any) -> None:
        """Set the wrappers on the classes."""
        _around(worker, "forward_batch_generation", self._generation)
        _around(worker, "verify", self._verify)
        _around(drafter, "_draft_extend_for_prefill", self._extend_prefill)
        _around(drafter, "_draft_extend_for_decode", self._extend_decode)
        _around(drafter, "draft", self._draft)

    def _generation(self, inner: Callable[..., Any], worker: Any, *args: Any, **named: Any) -> Any:
        """One iteration of the worker: a prefill of new requests, or draft, verify and extend."""
        if not self.began:
            self.began = True
            self._begin(worker)
        batch = args[0] if args else named["batch"]
        self.fed = None
        if batch.forward_mode.is_extend():
            self._guarded(self._read_prefill, batch)
        return inner(worker, *args, **named)

    def _begin(self, worker: Any) -> None:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if worker.topk != 1:
            say(f"trees of drafts (top-k {worker.topk}) are not traced")
        elif rank == 0:
            self.files = CallFiles(self.folder)
        call_plugins(worker.draft_worker)

    def _read_prefill(self, batch: Any) -> None:
        """The rows of a prefill; what follows them is known when the target has run."""
        if self.files is None:
            return
        lengths = [int(n) for n in batch.extend_lens]
        starts = [int(n) for n in batch.prefix_lens]
        ids = batch.input_ids.detach().to("cpu", torch.int64, copy=True).split(lengths)
        self.fed = _Fed(
            requests=[request.rid for request in batch.reqs],
            positions=[torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)],
            token_ids=list(ids),
            valid=lengths,
            next_token=[None] * len(lengths),
        )

    def _verify(self, inner: Callable[..., Any], worker: Any, *args: Any, **named: Any) -> Any:
        """The target's step: its batch holds the chain [n, k + 1] that is verified, and where."""
        batch = args[0] if args else named["batch"]
        known = self._guarded(self._read_verify, batch)
        result = inner(worker, *args, **named)
        if known is not None:
            self._guarded(self._read_verified, known, result)
        return result

    def _read_verify(self, batch: Any) -> _Fed | None:
        if self.files is None or batch.forward_mode.is_idle():
            return None
        starts = batch.seq_lens.tolist()
        chains = batch.spec_info.draft_token.detach().to("cpu", torch.int64, copy=True)
        table = chains.view(len(starts), -1)
        return _Fed(
            requests=[request.rid for request in batch.reqs],
            positions=[torch.arange(start, start + table.shape[1]) for start in starts],
            token_ids=list(table),
            valid=[],
            next_token=[],
        )

    def _read_verified(self, fed: _Fed, result: Any) -> None:
        fed.valid = [int(n) for n in result.accept_lens.tolist()]
        picked = result.next_token_ids.view(len(fed.valid), -1).tolist()
        fed.next_token = [row[n - 1] for row, n in zip(picked, fed.valid, strict=True)]
        self.fed = fed

    def _extend_prefill(
        self, inner: Callable[..., Any], drafter: Any, *args: Any, **named: Any
    ) -> Any:
        self._guarded(self._write_prefill, *args, **named)
        return inner(drafter, *args, **named)

    def _write_prefill(
        self, batch: Any, target_hidden_states: Any, next_token_ids: Any, *_: Any, **__: Any
    ) -> None:
        if self.fed is None:
            return
        told = next_token_ids.tolist()
        self.fed.next_token = [
            None if request is batch.chunked_req else int(token)
            for request, token in zip(batch.reqs, told, strict=True)
        ]
        self._write("prefill", target_hidden_states)

    def _extend_decode(
        self, inner: Callable[..., Any], drafter: Any, *args: Any, **named: Any
    ) -> Any:
        result = args[1] if len(args) > 1 else named["batch_result"]
        self._guarded(self._write, "decode", result.logits_output.hidden_states)
        return inner(drafter, *args, **named)

    def _write(self, kind: str, states: Any) -> None:
        """One call: the states [rows, n * H] behind one another, as the target's rows are."""
        fed, self.fed = self.fed, None
        if self.files is None or fed is None or states is None:
            return
        lengths = [len(ids) for ids in fed.token_ids]
        if len(states) < sum(lengths):
            say(f"{len(states)} rows of states for {sum(lengths)} tokens: a call left out")
            return
        parts = []
        for i, aux in enumerate(states[: sum(lengths)].split(lengths)):
            part = Handed(
                request=fed.requests[i],
                kind=kind,
                positions=fed.positions[i],
                token_ids=fed.token_ids[i],
                aux=aux,
                valid=fed.valid[i],
                next_token=fed.next_token[i],
                drafts=torch.empty(0, dtype=torch.int64),
            )
            parts.append(part)
        if parts:
            self.files(parts, len(parts))

    def _draft(self, inner: Callable[..., Any], drafter: Any, *args: Any, **named: Any) -> Any:
        answer = inner(drafter, *args, **named)
        batch = args[0] if args else named["batch"]
        self._guarded(self._write_drafts, batch, answer)
        return answer

    def _write_drafts(self, batch: Any, answer: Any) -> None:
        """The chain [n, k + 1] begins with the target's own token."""
        chain = answer[0] if isinstance(answer, tuple) else answer
        if self.files is None or not batch.reqs:
            return
        table = chain.draft_token.detach().to("cpu", torch.int64).view(len(batch.reqs), -1)
        self.files.answer([request.rid for request in batch.reqs], table[:, 1:].contiguous())

    def _guarded(self, read: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Whatever goes wrong in the trace costs the trace a call, and never the engine."""
        try:
            return read(*args, **named)
        except Exception as error:
            say(f"a call of SGLang's drafter could not be traced: {error!r}")
            return None


def _around(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def wrapped(self: Any, *args: Any, **named: Any) -> Any:
        return wrapper(inner, self, *args, **named)

    setattr(owner, name, wrapped)
