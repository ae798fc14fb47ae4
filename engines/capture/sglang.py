"""Hidden states from SGLang (0.5.23).

`--enable-return-aux-hidden-states` makes the model capture aux states without a drafter. What a
client gets back by `return_hidden_states` are these states alone, as JSON (about ten bytes a
number): the last state after the final norm is kept inside ("not copied into the response"), and
no layer id stands for it. A forward hook on the logits processor (`--forward-hooks`, SGLang's own
option) sees both, and writes them to files as `plugin/hidden_state_files.py` says.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from drafters.formats import aux_ids_for
from drafters.spec import DrafterError
from engines.base import EngineFailed, EngineUsageError
from engines.capture.base import CaptureSpec
from engines.capture.served import PLUGIN, ServedCapturer, read_chunks, states_folder
from engines.capture.target import capture_target, inner_layers
from engines.catalog import adapter
from engines.sglang import KERNEL_PATH

if TYPE_CHECKING:
    from torch import Tensor

HOOK = "hidden_state_files:sglang_capture"


class SglangCapturer(ServedCapturer):
    """SGLang's server, asked for one token behind each sample."""

    name = "sglang"
    headroom = 8  # it refuses inputs within six of the context's end

    def __init__(self, spec: CaptureSpec) -> None:
        paths = [str(PLUGIN)]
        if spec.device == "cpu":
            paths.insert(0, str(KERNEL_PATH))
        env = {"PYTHONPATH": os.pathsep.join(paths)}
        super().__init__(spec, adapter("sglang"), capture_arguments(spec), env)

    def _ask(self, token_ids: Sequence[int], request: str) -> tuple[Tensor, Tensor]:
        body = {
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "rid": request,
        }
        told = self._post("/generate", body)
        if not isinstance(told.get("meta_info"), dict):
            raise EngineFailed(f"sglang answered without meta_info: {str(told)[:300]}")
        return read_chunks(self.folder, request, len(token_ids))


def capture_arguments(spec: CaptureSpec) -> tuple[str, ...]:
    """What SGLang must be told beside the adapter's arguments (which disable the radix cache)."""
    facts = capture_target(spec.target)
    layers = inner_layers(spec.aux_layers, facts.layers)
    try:
        # In any order: states come in the order of the layers. Highest first, for on DeepSeek-like
        # targets a list that begins with 1 is read one layer later.
        ids = aux_ids_for("sglang", layers[::-1], facts.architecture)
    except DrafterError as error:
        raise EngineUsageError(str(error)) from None
    hook = {
        "name": "capture",
        "target_modules": ["logits_processor", "*.logits_processor"],
        "hook_factory": HOOK,
        "config": {"folder": str(states_folder(spec)), "prefix": "capture-"},
    }
    args = (
        "--enable-return-aux-hidden-states",
        *("--speculative-algorithm", "EAGLE3"),
        *("--return-aux-hidden-state-layer-ids", *(str(i) for i in ids)),
        *("--forward-hooks", json.dumps([hook])),
    )
    # A hook runs where Python runs: not in a replayed graph.
    return args if spec.device == "cpu" else (*args, "--disable-prefill-cuda-graph")
