"""Runs inside vLLM and SGLang: doubles the states of requests called `spoiled-…`, on their way.

Verification is lossless, so the output stays what it is; the trace must show the doubled states.
"""

from __future__ import annotations

from typing import Any

MARK = "spoiled"


def spoil_vllm(runner: Any) -> None:
    """Given the worker's model runner."""
    inner = runner.drafter.propose

    def propose(*args: Any, **kwargs: Any) -> Any:
        states = kwargs["target_hidden_states"].clone()
        cuts = kwargs["common_attn_metadata"].query_start_loc_cpu.tolist()
        for i, request in enumerate(runner.input_batch.req_ids):
            if MARK in request:
                states[cuts[i] : cuts[i + 1]] *= 2
        return inner(*args, **{**kwargs, "target_hidden_states": states})

    runner.drafter.propose = propose


def spoil_sglang(drafter: Any) -> None:
    """Given the draft worker."""
    prefill, decode = drafter._draft_extend_for_prefill, drafter._draft_extend_for_decode

    def doubled(states: Any, batch: Any, lengths: list[int]) -> Any:
        states, begin = states.clone(), 0
        for request, length in zip(batch.reqs, lengths, strict=True):
            if MARK in request.rid:
                states[begin : begin + length] *= 2
            begin += length
        return states

    def extend_prefill(batch: Any, states: Any, *args: Any, **named: Any) -> Any:
        lengths = [int(n) for n in batch.extend_lens]
        return prefill(batch, doubled(states, batch, lengths), *args, **named)

    def extend_decode(batch: Any, result: Any, *args: Any, **named: Any) -> Any:
        lengths = [drafter.speculative_num_draft_tokens] * len(batch.reqs)
        output = result.logits_output
        output.hidden_states = doubled(output.hidden_states, batch, lengths)
        return decode(batch, result, *args, **named)

    drafter._draft_extend_for_prefill = extend_prefill
    drafter._draft_extend_for_decode = extend_decode
