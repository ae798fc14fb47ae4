"""Hidden states from vLLM (0.32).

On GPUs by its own method `extract_hidden_states`: a stand-in drafter lays the states into a KV
cache of their own, and the ExampleHiddenStatesConnector writes them to a file a request, guarded
by a lock. Layer id i is the input of layer i, id L the output of the last layer BEFORE the final
norm, which is therefore applied here.

On a CPU that connector writes nothing (its copies go over CUDA streams). There a worker extension
of ours (`plugin/hidden_state_files.py`) asks the model for the same aux states, as the drafter
would, and writes them while the prefill runs; the last state comes after the final norm.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engines.base import EngineFailed
from engines.capture.base import CaptureSpec
from engines.capture.served import (
    PLUGIN,
    SERVED_NAME,
    ServedCapturer,
    read_chunks,
    removed,
    states_folder,
)
from engines.capture.target import capture_target, inner_layers
from engines.catalog import adapter

if TYPE_CHECKING:
    from torch import Tensor

EXTENSION = "hidden_state_files.VllmCapture"


class VllmCapturer(ServedCapturer):
    """vLLM's server, asked for one token behind each sample."""

    name = "vllm"

    def __init__(self, spec: CaptureSpec) -> None:
        self.on_cpu = spec.device == "cpu"
        self.last_is_normed = self.on_cpu
        args = cpu_arguments() if self.on_cpu else gpu_arguments(spec)
        super().__init__(spec, adapter("vllm"), args, _cpu_environment() if self.on_cpu else {})

    def _begin(self) -> None:
        if not self.on_cpu:
            return
        layers = ",".join(str(layer) for layer in self.layers)
        told = self._post(
            "/collective_rpc",
            {"method": "begin_capture", "args": [str(self.folder), layers]},
        )
        results = told.get("results") or []
        if not results or results[0].get("layers") != list(self.layers):
            raise EngineFailed(f"vllm did not take the layers {list(self.layers)}: {told}")

    def _ask(self, token_ids: Sequence[int], request: str) -> tuple[Tensor, Tensor]:
        body = {
            "model": SERVED_NAME,
            "prompt": list(token_ids),
            "max_tokens": 1,
            "temperature": 0,
        }
        told = self._post("/v1/completions", body, {"X-Request-Id": request})
        if self.on_cpu:
            return read_chunks(self.folder, request, len(token_ids))
        params = told.get("kv_transfer_params") or {}
        if "hidden_states_path" not in params:
            raise EngineFailed(f"vllm answered without a hidden_states_path: {str(told)[:300]}")
        return read_handed_over(Path(params["hidden_states_path"]))


def cpu_arguments() -> tuple[str, ...]:
    """What vLLM must be told beside the adapter's arguments, on a CPU."""
    return ("--worker-extension-cls", EXTENSION)


def _cpu_environment() -> dict[str, str]:
    return {
        "PYTHONPATH": str(PLUGIN),
        # The extension is called through the development routes, and reads the row offsets of
        # this model runner.
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }


def gpu_arguments(spec: CaptureSpec) -> tuple[str, ...]:
    """What vLLM must be told beside the adapter's arguments, on GPUs."""
    facts = capture_target(spec.target)
    layers = [*inner_layers(spec.aux_layers, facts.layers), facts.layers]
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
    }
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(states_folder(spec))},
    }
    return (
        *("--speculative-config", json.dumps(speculative)),
        *("--kv-transfer-config", json.dumps(transfer)),
    )


def read_handed_over(path: Path) -> tuple[Tensor, Tensor]:
    """Token ids [T] and states [T, n + 1, H] from the connector's file, which goes.

    The writer holds an exclusive lock on the file beside it until everything is written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    lock = Path(f"{path}.lock")
    try:
        with removed(lock), removed(path):
            with open(lock, "rb") as held:
                fcntl.flock(held, fcntl.LOCK_SH)
            tensors = load(path.read_bytes())
            return tensors["token_ids"].long(), tensors["hidden_states"]
    except (OSError, SafetensorError, KeyError) as error:
        raise EngineFailed(f"{path}: vllm's hidden states cannot be read: {error}") from None
