"""Runs inside vLLM's and SGLang's own processes: hidden states of a prefill, written to files.

This folder is put on the PYTHONPATH of the engine, which imports the module by name; it uses
torch and safetensors alone, which every engine has, and no part of this repository.

A request's rows are written while its prefill runs, one file a chunk of the prefill, named
`<request id>.<first row>.safetensors` and whole as soon as it has that name. It holds the token
ids int64 [T] that the model was fed, and the states [T, n + 1, H]: n layers' inputs in ascending
order, then the last state after the final norm.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from safetensors.torch import save_file


def write_rows(
    folder: str, request: str, first_row: int, token_ids: torch.Tensor, states: torch.Tensor
) -> None:
    """One chunk: token ids [T], states [T, n + 1, H]."""
    path = os.path.join(folder, f"{request}.{first_row:08d}.safetensors")
    partial = f"{path}.partial"
    tensors = {
        "token_ids": token_ids.detach().to("cpu", torch.int64).clone(),
        "states": states.detach().to("cpu").contiguous(),
    }
    save_file(tensors, partial)
    os.replace(partial, path)


class VllmCapture:
    """Mixed into vLLM's worker (`--worker-extension-cls`); called by `collective_rpc`."""

    def begin_capture(self, folder: str, layers: str) -> dict[str, Any]:
        """From now on write the states of every prefill into `folder`.

        `layers`: comma-separated, in vLLM's reading (id i is the input of layer i). The model is
        made to return these states beside its output, as it does for a drafter; they are taken
        off again before vLLM sees them.
        """
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        rank: int = self.rank  # type: ignore[attr-defined]
        wanted = tuple(int(layer) for layer in layers.split(",") if layer)
        model = runner.model
        if wanted:
            model.set_aux_hidden_state_layers(wanted)

        def after_forward(_: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
            last, aux = output if wanted else (output, [])
            if rank == 0:
                if len(aux) != len(wanted):
                    raise RuntimeError(f"the model gave {len(aux)} of {len(wanted)} aux states")
                fed = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
                _write_vllm_batch(runner, folder, fed, [*aux, last])
            return last

        model.register_forward_hook(after_forward, with_kwargs=True)
        return {"rank": rank, "layers": list(wanted)}


def _write_vllm_batch(
    runner: Any, folder: str, token_ids: torch.Tensor, states: list[torch.Tensor]
) -> None:
    """Cut one forward pass's rows into its requests, by the runner's own row offsets."""
    batch = runner.input_batch
    requests = list(batch.req_ids)
    offsets = [int(n) for n in runner.query_start_loc.np[: len(requests) + 1]]
    for index, request in enumerate(requests):
        begin, end = offsets[index], offsets[index + 1]
        first_row = int(batch.num_computed_tokens_cpu[index])
        if begin == end or first_row >= int(batch.num_prompt_tokens[index]):
            continue  # a decode step: nobody asked for these
        rows = torch.stack([state[begin:end] for state in states], dim=1)  # [T, n + 1, H]
        write_rows(folder, request, first_row, token_ids[begin:end], rows)


def sglang_capture(config: dict[str, Any]) -> Any:
    """A forward hook on SGLang's logits processor (`--forward-hooks`).

    Its input holds the aux states of the batch's rows and the last states after the final norm;
    what SGLang itself returns to a client holds the aux states alone. `config`: the `folder` to
    write to and the `prefix` of the request ids that are meant.
    """
    folder, prefix = str(config["folder"]), str(config["prefix"])

    def after_logits(_: Any, args: tuple[Any, ...], output: Any) -> None:
        if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
            return
        token_ids, last, _, forward, aux = args[:5]
        lengths = getattr(forward, "extend_seq_lens_cpu", None)
        requests = getattr(forward, "rids", None)
        if lengths is None or requests is None or not forward.forward_mode.is_extend():
            return
        width = last.shape[-1]
        packed = aux if isinstance(aux, torch.Tensor) else torch.cat(list(aux), dim=-1)
        layers = packed.unflatten(-1, (-1, width))  # [rows, n, H]
        begin = 0
        for request, length, first_row in zip(
            requests, lengths, forward.extend_prefix_lens_cpu, strict=False
        ):
            end = begin + int(length)
            if request.startswith(prefix):
                rows = torch.cat((layers[begin:end], last[begin:end, None]), dim=1)
                write_rows(folder, request, int(first_row), token_ids[begin:end], rows)
            begin = end

    return after_logits
