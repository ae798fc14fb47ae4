"""Put an engine together from the folders of a target and a drafter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from engines.base import EngineUsageError
from engines.reference.config import ModelConfig, read_config
from engines.reference.draft import EagleProposer
from engines.reference.engine import Engine
from engines.reference.model import Model
from engines.reference.tokenizer import Tokenizer
from engines.reference.weights import DTYPES, Weights


def load_engine(
    target: Path,
    *,
    drafter: Path | None = None,
    k: int = 3,
    forced_length: float | None = None,
    name: str = "reference",
    dtype: str = "auto",
    device: str = "cpu",
    max_len: int | None = None,
    slots: int = 16,
    seed: int = 0,
    threads: int | None = None,
    trust_remote_code: bool = False,
    on_phase: Callable[[str], None] = lambda _: None,
) -> Engine:
    """Load everything and allocate the caches. Raises EngineUsageError, one clear line."""
    if threads is not None:
        torch.set_num_threads(threads)
    config = read_config(target)
    length = _context(config, max_len)
    kind = _dtype(config, dtype, device)
    tokenizer = Tokenizer(target, trust_remote_code=trust_remote_code)
    on_phase(f"loading target: {config.family}, {config.layers} layers, {str(kind)[6:]}")
    model = load_model(target, config, kind, device)
    proposer = None
    if drafter is not None:
        on_phase(f"loading drafter: {drafter}")
        proposer = load_proposer(drafter, target, model, k=k, slots=slots, length=length)
    on_phase(f"allocating cache: {slots} slots of {length} tokens")
    return Engine(
        model,
        tokenizer=tokenizer,
        proposer=proposer,
        max_len=length,
        slots=slots,
        name=name,
        seed=seed,
        forced_length=forced_length if proposer is not None else None,
    )


def load_model(target: Path, config: ModelConfig, dtype: torch.dtype, device: str) -> Model:
    """The target's weights as a Model. A tensor the model has no use for is an error."""
    weights = Weights(target, prefix=config.weight_prefix, dtype=dtype, device=device)
    try:
        model = Model(config, weights)
    except RuntimeError as error:  # shapes that do not fit each other
        raise EngineUsageError(f"{target}: the weights do not fit the config: {error}") from error
    left = [n for n in weights.unused() if not _is_known_extra(n, config)]
    if left:
        raise EngineUsageError(
            f"{target}: the checkpoint holds {len(left)} tensors the engine would ignore, "
            f"such as {left[0]}; it is not the model its config says"
        )
    return model


def load_proposer(
    drafter: Path, target: Path, model: Model, *, k: int, slots: int, length: int
) -> EagleProposer:
    """An EAGLE-3 drafter that shares the target's embedding or head where it has none."""
    from drafters.checkpoint import load
    from drafters.spec import DrafterError

    try:
        head = load(drafter, target)
    except DrafterError as error:
        raise EngineUsageError(str(error)) from error
    config, spec = model.config, head.spec
    for what, theirs, ours in (
        ("target_hidden_size", spec.target_hidden_size, config.hidden_size),
        ("vocab_size", spec.vocab_size, config.vocab_size),
    ):
        if theirs != ours:
            raise EngineUsageError(f"{drafter}: its {what} is {theirs}, the target's {ours}")
    deepest = max(spec.aux_layers)
    if deepest > config.layers:
        raise EngineUsageError(
            f"{drafter}: aux layer {deepest}, but the target has {config.layers} layers"
        )
    head.share(
        embeddings=None if head.owns_embeddings else model.embedding,
        lm_head=None if head.owns_lm_head else model.head.weight.t(),
    )
    head.to(model.embedding.device, model.embedding.dtype).eval().requires_grad_(False)
    return EagleProposer(head, k=k, slots=slots, length=length, vocab_size=config.vocab_size)


def _is_known_extra(name: str, config: ModelConfig) -> bool:
    """Tensors beside the text model: a vision tower, extra prediction layers, rope tables."""
    if not name.startswith(config.weight_prefix) or name.endswith("rotary_emb.inv_freq"):
        return True
    if config.tied_embeddings and name.endswith("lm_head.weight"):
        return True
    parts = name.removeprefix(config.weight_prefix).split(".")
    return parts[:2] == ["model", "layers"] and int(parts[2]) >= config.layers


def _context(config: ModelConfig, wanted: int | None) -> int:
    length = wanted or config.max_positions
    if not 2 <= length <= config.max_positions:
        raise EngineUsageError(
            f"--max-model-len {length}: must be 2 to {config.max_positions}, the model's positions"
        )
    return length


def _dtype(config: ModelConfig, wanted: str, device: str) -> torch.dtype:
    name = config.dtype if wanted == "auto" else wanted
    name = name.removeprefix("torch.")
    if name not in DTYPES:
        raise EngineUsageError(f"--dtype {name}: must be auto or one of {', '.join(DTYPES)}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise EngineUsageError(f"--device {device}: torch finds no CUDA device; use cpu")
    return DTYPES[name]
