"""What training needs of the target's weights: three tensors, by memory map.

The target itself is never loaded: of 547 GB only the embedding, the head and the last norm are
read.
"""

from __future__ import annotations

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drafters.headers import TensorHeader, read_headers
from harness.errors import UsageError
from training.heads import TargetFacts


class TargetTensors(msgspec.Struct, frozen=True, kw_only=True):
    """embedding and lm_head [V, H], norm [H], as stored."""

    embedding: Tensor
    lm_head: Tensor
    norm: Tensor


def read_tensors(facts: TargetFacts) -> TargetTensors:
    """The three tensors, memory-mapped where the file allows. Raises `UsageError`."""
    headers = read_headers(facts.folder)
    width, vocab = facts.hidden_size, facts.vocab_size
    embedding = _take(headers, facts, "embed_tokens.weight", (vocab, width))
    has_head = any(name.endswith("lm_head.weight") for name in headers)
    lm_head = embedding
    if has_head and not facts.tied:
        lm_head = _take(headers, facts, "lm_head.weight", (vocab, width))
    norm = _take(headers, facts, "model.norm.weight", (width,))
    return TargetTensors(embedding=embedding, lm_head=lm_head, norm=norm)


def _take(
    headers: dict[str, TensorHeader], facts: TargetFacts, suffix: str, shape: tuple[int, ...]
) -> Tensor:
    """The one tensor whose name ends with `suffix`; vision towers have names of their own."""
    names = [n for n in headers if n.endswith(suffix) and ".layers." not in n]
    names = [n for n in names if "vision" not in n] or names
    if not names:
        raise UsageError(f"{facts.folder}: no tensor {suffix}; the drafter cannot be trained")
    header = headers[names[0]]
    if header.shape != shape:
        raise UsageError(
            f"{header.file}: {names[0]} has shape {list(header.shape)}, the config says "
            f"{list(shape)}; config and weights are not of one model"
        )
    try:
        with safe_open(header.file, framework="pt") as file:
            tensor: Tensor = file.get_tensor(names[0])
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{header.file}: cannot be read: {error}") from None
    if not tensor.is_floating_point():
        raise UsageError(
            f"{header.file}: {names[0]} is stored as {tensor.dtype}; a target whose head is "
            "quantised gives no soft targets: use the checkpoint with a bfloat16 head"
        )
    return tensor


def off_norm(last_normed: Tensor, norm: Tensor) -> float:
    """How far states [..., H] are from having passed the target's final norm.

    x / rms(x) * w divided by w has a root mean square of 1 at every token; the answer is the
    median distance from that. Weights near 0 are left out. States that passed it twice look alike
    here: only their argmax tells.
    """
    weight = norm.to(last_normed.device, torch.float32)
    kept = weight.abs() > 0.05 * weight.abs().mean()
    plain = last_normed.float()[..., kept] / weight[kept]
    rms = plain.square().mean(-1).sqrt()
    return float((rms - 1).abs().median())
