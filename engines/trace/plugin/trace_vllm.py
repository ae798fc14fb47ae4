"""The trace of vLLM (0.32), inside its worker.

Written against the model runner `GPUModelRunner` (v1/worker/gpu_model_runner.py) and the proposers
on `SpecDecodeBaseProposer` (v1/spec_decode/llm_base_proposer.py). On a CPU `CPUModelRunner`, which
inherits all of that, is proven; the same code paths on GPUs were read, not run. The second model
runner (VLLM_USE_V2_MODEL_RUNNER=1) drafts elsewhere and is refused.

The runner's `propose_draft_token_ids` is where the target's step is known whole: which rows belong
to which request, what was fed, what was sampled. The drafter's `propose` is the door: what states
it is handed for those rows, and what it answers. A plugin that spoils something wraps the runner's
or the drafter's methods after the door was set, and so lies outside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from trace_files import (  # type: ignore[import-not-found]  # by name, in the engine's process
    CallFiles,
    Handed,
    call_plugins,
    say,
)


class VllmTrace:
    """Mixed into vLLM's worker (`--worker-extension-cls`); called by `collective_rpc`."""

    def begin_trace(self, folder: str) -> dict[str, Any]:
        """From now on write every call of the drafter into `folder`; again: nothing happens."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        rank: int = self.rank  # type: ignore[attr-defined]
        drafter = getattr(runner, "drafter", None)
        if not hasattr(runner, "propose_draft_token_ids") or not hasattr(drafter, "propose"):
            return {"traced": False, "why": f"{type(runner).__name__} drafts in another way"}
        if not hasattr(runner, "spec_harness_trace"):
            runner.spec_harness_trace = _RunnerTrace(runner, folder if rank == 0 else None)
        return {"traced": True, "rank": rank, "runner": type(runner).__name__}


@dataclass(kw_only=True)
class _Step:
    """What the target was fed in one step, and what came of it; rows as `offsets` cut them."""

    requests: list[str]
    offsets: list[int]
    positions: torch.Tensor
    token_ids: torch.Tensor
    sampled: list[list[int]]
    prompts: list[int]
    partial: list[bool]


class _RunnerTrace:
    """Wraps one runner's and its drafter's methods; only a rank with a `folder` writes."""

    def __init__(self, runner: Any, folder: str | None) -> None:
        self.runner = runner
        self.files = CallFiles(folder) if folder is not None else None
        self.step: _Step | None = None
        self.states: torch.Tensor | None = None
        self.offsets: list[int] = []
        self.drafts: torch.Tensor | None = None
        if self.files is not None:
            self._set_door(runner.drafter)
        call_plugins(runner)
        if self.files is not None:
            self._set_outside(runner)

    def _set_door(self, drafter: Any) -> None:
        inner = drafter.propose

        def propose(*args: Any, **kwargs: Any) -> Any:
            try:
                # [rows, n * H] and the rows' cuts; both are changed while the drafter works
                states, cuts = kwargs["target_hidden_states"], kwargs["common_attn_metadata"]
                self.states = states.detach().clone()
                self.offsets = cuts.query_start_loc_cpu.tolist()
            except Exception as error:
                say(f"what vLLM's drafter was handed could not be read: {error!r}")
            drafts = inner(*args, **kwargs)
            self.drafts = drafts
            return drafts

        drafter.propose = propose

    def _set_outside(self, runner: Any) -> None:
        inner = runner.propose_draft_token_ids

        def propose_draft_token_ids(*args: Any, **kwargs: Any) -> Any:
            self.step = self.states = self.drafts = None
            try:
                self.step = self._read(*args, **kwargs)
            except Exception as error:
                say(f"vLLM's step could not be read: {error!r}")
            drafts = inner(*args, **kwargs)
            try:
                self._write()
            except Exception as error:
                say(f"vLLM's step could not be written: {error!r}")
            return drafts

        runner.propose_draft_token_ids = propose_draft_token_ids

    def _read(self, scheduled: Any, sampled: Any, *rest: Any, **named: Any) -> _Step:
        """The arguments are the runner's own; the attention metadata is the sixth behind these."""
        runner, batch = self.runner, self.runner.input_batch
        metadata: Any = named.get("common_attn_metadata", rest[5] if len(rest) > 5 else None)
        requests = list(batch.req_ids)
        count = len(requests)
        offsets = metadata.query_start_loc_cpu.tolist()[: count + 1]
        rows = offsets[-1]
        positions = runner._get_positions(rows)
        if positions.dim() > 1:  # M-RoPE: three coordinates, equal for text
            positions = positions[0]
        size = batch.vocab_size
        told = sampled.tolist() if isinstance(sampled, torch.Tensor) else sampled
        return _Step(
            requests=requests,
            offsets=offsets,
            positions=positions.detach().to("cpu", torch.int64, copy=True),
            token_ids=runner.input_ids.gpu[:rows].detach().to("cpu", torch.int64, copy=True),
            sampled=[[token for token in row if 0 <= token < size] for row in told],
            prompts=[int(n) for n in batch.num_prompt_tokens[:count]],
            partial=[bool(n) for n in runner.discard_request_mask.np[:count]],
        )

    def _write(self) -> None:
        step, states, drafts = self.step, self.states, self.drafts
        if self.files is None or step is None or states is None or drafts is None:
            return
        count = len(step.requests)
        table = drafts.to("cpu", torch.int64) if isinstance(drafts, torch.Tensor) else None
        parts = []
        for i in range(count):
            begin, end = self.offsets[i], self.offsets[i + 1]
            own = [] if table is None else table[i].tolist()
            part = self._part(step, i, states[begin:end], own)
            if part is not None:
                parts.append(part)
        if parts:
            self.files(parts, count)

    @staticmethod
    def _part(step: _Step, i: int, states: torch.Tensor, drafts: list[int]) -> Handed | None:
        """Request i's part; where rejected rows are left out, its states are the first ones."""
        begin, rows = step.offsets[i], len(states)
        if rows == 0:
            return None
        positions = step.positions[begin : begin + rows]
        prefill = int(positions[0]) < step.prompts[i]
        sampled = [] if step.partial[i] else step.sampled[i]
        return Handed(
            request=step.requests[i],
            kind="prefill" if prefill else "decode",
            positions=positions,
            token_ids=step.token_ids[begin : begin + rows],
            aux=states,
            valid=rows if prefill else min(max(len(sampled), 1), rows),
            next_token=sampled[-1] if sampled else None,
            drafts=torch.tensor(drafts if sampled else [], dtype=torch.int64),
        )
