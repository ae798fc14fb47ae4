"""Hidden states from transformers' own model of the target, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engines.base import EngineUsageError
from engines.capture.base import CaptureSpec, RowStates
from engines.capture.target import capture_target, check_layers


class TransformersCapturer:
    """`output_hidden_states`: state i is the input of layer i, the last one comes after the final
    norm."""

    name = "transformers"

    def __init__(self, spec: CaptureSpec) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.spec = spec
        facts = capture_target(spec.target)
        check_layers(spec.aux_layers, facts)
        if spec.device.startswith("cuda") and not torch.cuda.is_available():
            raise EngineUsageError(f"device {spec.device}: torch finds no CUDA device; use cpu")
        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        dtype: Any = "auto" if spec.dtype == "auto" else getattr(torch, spec.dtype)
        try:
            model = AutoModelForCausalLM.from_pretrained(
                spec.target,
                dtype=dtype,
                trust_remote_code=spec.trust_remote_code,
                local_files_only=True,
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            said = str(error).strip().splitlines()
            raise EngineUsageError(
                f"{spec.target}: transformers cannot load it: {said[0] if said else error!r}"
            ) from None
        self.layers = facts.layers
        self.model: Any = model.eval()
        self.model.to(spec.device)

    def capture(self, rows: Sequence[Sequence[int]]) -> list[RowStates]:
        """One forward pass over the padded rows."""
        import torch

        longest = max(len(row) for row in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.int64)  # [n, T]
        mask = torch.zeros(len(rows), longest, dtype=torch.int64)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row)
            mask[i, : len(row)] = 1
        with torch.no_grad():
            told = self.model(
                input_ids=ids.to(self.spec.device),
                attention_mask=mask.to(self.spec.device),
                output_hidden_states=True,
                use_cache=False,
                logits_to_keep=1,
            )
        states = told.hidden_states  # L + 1 tensors, each [n, T, H]
        if len(states) != self.layers + 1:
            raise EngineUsageError(
                f"{self.spec.target}: transformers gives {len(states)} hidden states for "
                f"{self.layers} layers, so their indices are not known; use another engine"
            )
        return [
            RowStates(
                token_ids=ids[i, : len(row)].clone(),
                aux=torch.cat(
                    [states[layer][i, : len(row)] for layer in self.spec.aux_layers], dim=-1
                ).cpu(),
                last_normed=states[-1][i, : len(row)].cpu().clone(),
            )
            for i, row in enumerate(rows)
        ]

    def close(self) -> None:
        """Free the model."""
        self.model = None
