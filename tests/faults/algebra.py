"""Drafters and targets that compute the same as the demo's by other tensors.

What is equal in every output, and needs its own embeddings, or hands over other states, is made
here by algebra: nothing has to be trained, and what a fault costs is the fault's alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from faults.folders import Config, Tensors, edited, read
from faults.pair import Pair

if TYPE_CHECKING:
    from torch import Tensor

LAYER = "layers.0."


def orthogonal(size: int, seed: int) -> Tensor:
    """A random orthogonal matrix [size, size], float32."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    square = torch.randn(size, size, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(square).Q.float()


def with_own_embeddings(pair: Pair, source: Path, folder: Path, seed: int) -> Path:
    """The same drafter with embeddings of its own: the target's turned, and turned back behind.

    A turn keeps the norm's root mean square, so that the norm's weight can go into the
    projections before the turn back: W diag(w) Q on the embedding's half of their columns.
    """
    import torch

    _, target = read(pair.target)
    turn = orthogonal(target["model.embed_tokens.weight"].shape[1], seed)

    def change(config: Config, tensors: Tensors) -> None:
        embeddings = tensors.get("embed_tokens.weight", target["model.embed_tokens.weight"])
        hidden = embeddings.shape[1]
        weight = tensors[f"{LAYER}input_layernorm.weight"]
        for name in _first_projections(tensors):
            mine, rest = tensors[name][:, :hidden], tensors[name][:, hidden:]
            tensors[name] = torch.cat(((mine * weight) @ turn, rest), dim=1)
        tensors["embed_tokens.weight"] = embeddings @ turn
        tensors[f"{LAYER}input_layernorm.weight"] = torch.ones_like(weight)

    return edited(source, folder, change)


def _first_projections(tensors: Tensors) -> list[str]:
    parts = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")
    names = [f"{LAYER}self_attn.{part}.weight" for part in parts]
    return [name for name in names if name in tensors]


def turned_drafter(source: Path, folder: Path, seed: int) -> Path:
    """The same drafter with its own stream turned, so that no head but its own reads it.

    Of a drafter whose residual is the state before `hidden_norm`, as the demo's is.
    """
    import torch

    def change(config: Config, tensors: Tensors) -> None:
        turn = orthogonal(config["hidden_size"], seed)
        for name in ("fc", f"{LAYER}self_attn.o_proj", f"{LAYER}mlp.down_proj"):
            tensors[f"{name}.weight"] = turn.T @ tensors[f"{name}.weight"]
        entering = tensors[f"{LAYER}hidden_norm.weight"]
        for name in _first_projections(tensors):
            rest, mine = tensors[name].chunk(2, dim=1)
            tensors[name] = torch.cat((rest, (mine * entering) @ turn), dim=1)
        feed = tensors[f"{LAYER}post_attention_layernorm.weight"]
        for name in ("gate_proj", "up_proj"):
            full = f"{LAYER}mlp.{name}.weight"
            tensors[full] = (tensors[full] * feed) @ turn
        last = tensors["norm.weight"]
        tensors["lm_head.weight"] = (tensors["lm_head.weight"] * last) @ turn
        for name in ("norm", f"{LAYER}hidden_norm", f"{LAYER}post_attention_layernorm"):
            tensors[f"{name}.weight"] = last.new_ones(last.shape)

    return edited(source, folder, change)


def with_uneven_norm(source: Path, folder: Path, seed: int) -> Path:
    """The same drafter whose last norm weighs unevenly, and whose head takes that back."""
    import torch

    def change(config: Config, tensors: Tensors) -> None:
        generator = torch.Generator().manual_seed(seed)
        uneven = torch.randn(config["hidden_size"], generator=generator).exp()
        tensors["norm.weight"] = tensors["norm.weight"] * uneven
        tensors["lm_head.weight"] = tensors["lm_head.weight"] / uneven

    return edited(source, folder, change)


def with_draft_vocabulary(source: Path, folder: Path, kept: Tensor) -> Path:
    """The drafter with its head cut to the target's tokens `kept` (ascending), d2t and t2d set."""
    import torch

    def change(config: Config, tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][kept]
        tensors["d2t"] = kept - torch.arange(len(kept))
        known = torch.zeros(config["vocab_size"], dtype=torch.bool)
        known[kept] = True
        tensors["t2d"] = known
        config["draft_vocab_size"] = len(kept)

    return edited(source, folder, change)


def turned_target(pair: Pair, folder: Path, seed: int) -> Path:
    """The same target with its residual stream turned: equal answers, other hidden states.

    As rotation before quantisation does it: the norms' weights go into the matrices behind them.
    """

    def change(config: Config, tensors: Tensors) -> None:
        turn = orthogonal(config["hidden_size"], seed)
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"] @ turn
        for index in range(config["num_hidden_layers"]):
            _turn_layer(tensors, f"model.layers.{index}.", turn)
        norm = tensors["model.norm.weight"]
        tensors["lm_head.weight"] = (tensors["lm_head.weight"] * norm) @ turn
        tensors["model.norm.weight"] = norm.new_ones(norm.shape)

    return edited(pair.target, folder, change)


def _turn_layer(tensors: Tensors, base: str, turn: Tensor) -> None:
    attention = tensors[f"{base}input_layernorm.weight"]
    feed = tensors[f"{base}post_attention_layernorm.weight"]
    for name in [name for name in tensors if name.startswith(base)]:
        tensor = tensors[name]
        if tensor.dim() != 2 or name.endswith(("q_b_proj.weight", "kv_b_proj.weight")):
            continue
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = turn.T @ tensor
        else:
            norm = attention if ".self_attn." in name else feed
            tensors[name] = (tensor * norm) @ turn
    for name, norm in (("input_layernorm", attention), ("post_attention_layernorm", feed)):
        tensors[f"{base}{name}.weight"] = norm.new_ones(norm.shape)
