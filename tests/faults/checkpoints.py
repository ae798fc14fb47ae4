"""Faults of checkpoints and their configs: they work on every engine that reads what is changed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from faults.algebra import (
    turned_drafter,
    with_draft_vocabulary,
    with_own_embeddings,
    with_uneven_norm,
)
from faults.folders import Config, Tensors, edited, layers_of, read, set_flag, set_layers
from faults.pair import Pair
from faults.planting import changed_drafter, healthy, write_plugin
from faults.records import EVERY_ENGINE, NOT_SGLANG, Fault, Planted
from faults.trainings import frequent_tokens, trained

if TYPE_CHECKING:
    from torch import Generator

LAYER = "layers.0."
DRAFTED = 448
NOISE = 1.2
"""Of a tensor's own size, at full severity."""


def _plus_one(config: Config, tensors: Tensors, seed: int, severity: float) -> None:
    set_layers(config, tuple(i + 1 for i in layers_of(config)))


def _minus_one(config: Config, tensors: Tensors, seed: int, severity: float) -> None:
    set_layers(config, tuple(i - 1 for i in layers_of(config)))


def _reordered(config: Config, tensors: Tensors, seed: int, severity: float) -> None:
    one, two, three = layers_of(config)
    set_layers(config, (three, two, one) if severity >= 1 else (two, one, three))


def _other_layers(config: Config, tensors: Tensors, seed: int, severity: float) -> None:
    set_layers(config, (1, 2, 3) if severity >= 1 else (2, 3, 4))


def _trained_descending(config: Config, tensors: Tensors, seed: int, severity: float) -> None:
    """A drafter of layers in descending order, named so: engines capture in ascending order."""
    import torch

    set_layers(config, layers_of(config)[::-1])
    tensors["fc.weight"] = torch.cat(tensors["fc.weight"].chunk(3, dim=1)[::-1], dim=1)


def _default_layers(pair: Pair, folder: Path, seed: int, severity: float) -> Planted:
    """The config names no layers. The reference engine refuses that: it gets the defaults said."""
    from drafters.ids import default_layers

    depth = read_depth(pair)

    def defaults(config: Config, tensors: Tensors) -> None:
        set_layers(config, default_layers(depth))

    drafter = edited(pair.drafter, folder / "drafter", defaults)
    return healthy(pair, seed).harmed(drafter=drafter)


def read_depth(pair: Pair) -> int:
    """The target's number of layers."""
    import json

    depth: int = json.loads((pair.target / "config.json").read_text())["num_hidden_layers"]
    return depth


def _unnamed_layers(config: Config, tensors: Tensors, seed: int, severity: float) -> None:
    set_layers(config, None)


def restricted(pair: Pair, folder: Path, seed: int) -> Path:
    """The pair's drafter with the most frequent tokens as its draft vocabulary."""
    return with_draft_vocabulary(pair.drafter, folder, frequent_tokens(pair, DRAFTED))


def _absolute(config: Config, tensors: Tensors, seed: int, severity: float) -> None:
    """Ids, not offsets; cut off where the sum would leave the vocabulary."""
    import torch

    own = torch.arange(len(tensors["d2t"]))
    ids = tensors["d2t"] + own
    absolute = torch.minimum(ids, config["vocab_size"] - 1 - own)
    wrong = _some(len(own), severity, seed)
    tensors["d2t"] = torch.where(wrong, absolute, tensors["d2t"])


def _other_vocabulary(config: Config, tensors: Tensors, seed: int, severity: float) -> None:
    """The table of a vocabulary that was counted on other text: some tokens of it are others."""
    import torch

    own = torch.arange(len(tensors["d2t"]))
    ids = tensors["d2t"] + own
    absent = torch.tensor(sorted(set(range(config["vocab_size"])) - set(ids.tolist())))
    swapped = round(len(ids) * (0.35 if severity >= 1 else 0.1))
    generator = _generator(seed)
    kept = ids[
        torch.randperm(len(ids), generator=generator)[: len(ids) - min(swapped, len(absent))]
    ]
    added = absent[torch.randperm(len(absent), generator=generator)[: len(ids) - len(kept)]]
    tensors["d2t"] = torch.cat((kept, added)).sort().values - own


def _shifted_table(config: Config, tensors: Tensors, seed: int, severity: float) -> None:
    """Each draft id stands for the token of its neighbour."""
    import torch

    own = torch.arange(len(tensors["d2t"]))
    ids = tensors["d2t"] + own
    begin = 0 if severity >= 1 else len(ids) // 2
    ids[begin:] = ids[begin:].roll(1)
    tensors["d2t"] = ids - own


def _random_embeddings(config: Config, tensors: Tensors, seed: int, severity: float) -> None:
    """Embeddings that were never trained, stored where the target's were meant."""
    import torch

    shape = (config["vocab_size"], config["hidden_size"])
    tensors["embed_tokens.weight"] = torch.randn(shape, generator=_generator(seed)) * 0.02


def flag(name: str, value: bool) -> Any:
    """Sets one flag of the architecture, whatever the drafter was trained with."""

    def change(config: Config, tensors: Tensors, seed: int, severity: float) -> None:
        set_flag(config, name, value)

    return change


def of(recipe: str) -> Any:
    """The drafter of this recipe as what a fault begins with."""
    return lambda pair, folder, seed: trained(pair, recipe)


def _fc_norm_dropped(config: Config, tensors: Tensors, seed: int, severity: float) -> None:
    set_flag(config, "fc_norm", False)
    for name in [name for name in tensors if name.startswith("fc_norm.")]:
        del tensors[name]


def _norm_before_fc_dropped(config: Config, tensors: Tensors, seed: int, severity: float) -> None:
    set_flag(config, "norm_before_fc", False)
    del tensors["input_norm.weight"]


def _fc_norm_added(config: Config, tensors: Tensors, seed: int, severity: float) -> None:
    import torch

    set_flag(config, "fc_norm", True)
    for index in range(len(layers_of(config))):
        tensors[f"fc_norm.{index}.weight"] = torch.ones(config["target_hidden_size"])


def _rope_theta(config: Config, tensors: Tensors, seed: int, severity: float) -> None:
    config["rope_theta"] = 50.0 if severity >= 1 else 500.0


def _rope_scaling(config: Config, tensors: Tensors, seed: int, severity: float) -> None:
    """Another stretch of the context than was trained with."""
    scaling = {
        "rope_type": "linear",
        "type": "linear",
        "factor": 16.0 if severity >= 1 else 4.0,
    }
    config["rope_scaling"] = scaling


def _final_norm(config: Config, tensors: Tensors, seed: int, severity: float) -> None:
    """The last norm's weights are lost: they are ones, all of them or half."""
    import torch

    weight = tensors["norm.weight"]
    lost = torch.arange(len(weight)) < len(weight) * severity
    tensors["norm.weight"] = torch.where(lost, torch.ones_like(weight), weight)


def uneven(pair: Pair, folder: Path, seed: int) -> Path:
    """The pair's drafter with a last norm that matters."""
    return with_uneven_norm(pair.drafter, folder, seed)


def _zeroed(config: Config, tensors: Tensors, seed: int, severity: float) -> None:
    names = ["mlp.down_proj", "self_attn.o_proj"] if severity >= 1 else ["self_attn.o_proj"]
    for name in names:
        tensors[f"{LAYER}{name}.weight"] = tensors[f"{LAYER}{name}.weight"] * 0


def _noised(config: Config, tensors: Tensors, seed: int, severity: float) -> None:
    import torch

    generator = _generator(seed)
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and tensor.is_floating_point() and "embed" not in name:
            size = tensor.std() * NOISE * severity
            tensors[name] = tensor + size * torch.randn(tensor.shape, generator=generator)


def _fc_permuted(config: Config, tensors: Tensors, seed: int, severity: float) -> None:
    """The chunks of fc stand in another order than the layers that the config names."""
    import torch

    one, two, three = tensors["fc.weight"].chunk(3, dim=1)
    order = (three, two, one) if severity >= 1 else (two, one, three)
    tensors["fc.weight"] = torch.cat(order, dim=1)


def _stored_head(pair: Pair, folder: Path, seed: int, severity: float) -> Planted:
    """The checkpoint carries the target's head, or its first shard; its own is lost there."""
    import torch

    _, target = read(pair.target)
    source = _with_own_head(pair, folder, seed, 1.0)

    def change(config: Config, tensors: Tensors) -> None:
        lost = round(severity * len(tensors["lm_head.weight"]))
        rows = (target["lm_head.weight"][:lost], tensors["lm_head.weight"][lost:])
        tensors["lm_head.weight"] = torch.cat(rows)

    right = healthy(pair, seed, drafter=source)
    return right.harmed(drafter=edited(source, folder / "drafter", change))


def _with_own_head(pair: Pair, folder: Path, seed: int, severity: float) -> Path:
    """The demo's head began as the target's; at full severity one that is nothing like it."""
    if severity < 1:
        return pair.drafter
    return turned_drafter(pair.drafter, folder / "turned", seed)


def _shared(what: str) -> Any:
    """The engine takes the target's tensor although the checkpoint has its own."""

    def plant(pair: Pair, folder: Path, seed: int, severity: float) -> Planted:
        if what == "target_embeddings":
            drafter = with_own_embeddings(pair, pair.drafter, folder / "drafter", seed)
        else:
            drafter = _with_own_head(pair, folder, seed, severity)
        plugin = write_plugin(folder, "faults.hooks.drafting", "change_drafter", what=what)
        return healthy(pair, seed, drafter=drafter, plugin=plugin)

    return plant


def _own_embeddings(pair: Pair, folder: Path, seed: int, severity: float) -> Planted:
    """Nothing is wrong with this checkpoint; SGLang puts the target's embeddings over its own."""
    drafter = with_own_embeddings(pair, pair.drafter, folder / "drafter", seed)
    return healthy(pair, seed, drafter=drafter)


def _input_norm_ignored(recipe: str) -> Any:
    def plant(pair: Pair, folder: Path, seed: int, severity: float) -> Planted:
        plugin = write_plugin(
            folder, "faults.hooks.drafting", "change_drafter", what="no_input_norm"
        )
        return healthy(pair, seed, drafter=trained(pair, recipe), plugin=plugin)

    return plant


def _unread(pair: Pair, folder: Path, seed: int, severity: float) -> Planted:
    """Nothing is wrong with this checkpoint; SGLang does not read its norm_before_residual."""
    return healthy(pair, seed, drafter=trained(pair, "norm_before_residual"))


def _generator(seed: int) -> Generator:
    import torch

    return torch.Generator().manual_seed(seed)


def _some(count: int, share: float, seed: int) -> Any:
    import torch

    return torch.rand(count, generator=_generator(seed)) < share


TWO = (1.0, 0.5)


def _fault(name: str, cause: str, change: Any, costs: float, **more: Any) -> Fault:
    source = more.pop("source", None)
    return Fault(
        name=name,
        cause=cause,
        way="checkpoint",
        plant=changed_drafter(change, source),
        costs=costs,
        engines=more.pop("engines", EVERY_ENGINE),
        **more,
    )


def _plugged(name: str, cause: str, plant: Any, costs: float, **more: Any) -> Fault:
    return Fault(name=name, cause=cause, way="checkpoint", plant=plant, costs=costs, **more)


CHECKPOINTS: tuple[Fault, ...] = (
    _fault("layers_plus_one", "layers_shifted", _plus_one, 0.1, engines=NOT_SGLANG, mendable=True),
    _fault(
        "layers_minus_one", "layers_shifted", _minus_one, 0.1, engines=NOT_SGLANG, mendable=True
    ),
    _plugged(
        "layers_default",
        "layers_default",
        _default_layers,
        0.1,
        also=("layers_other",),
        mendable=True,
    ),
    _fault(
        "layers_unnamed",
        "layers_default",
        _unnamed_layers,
        0.1,
        engines=("vllm", "sglang"),
        also=("layers_other",),
        mendable=True,
    ),
    _fault(
        "layers_order",
        "layers_order",
        _reordered,
        0.1,
        engines=("reference",),
        severities=TWO,
        mendable=True,
    ),
    _fault(
        "layers_descending",
        "layers_order",
        _trained_descending,
        0.1,
        engines=("vllm", "sglang"),
    ),
    _fault(
        "layers_other",
        "layers_other",
        _other_layers,
        0.1,
        severities=TWO,
        engines=NOT_SGLANG,
        mendable=True,
    ),
    # SGLang reads layers that begin with 1 one later, whatever is written: two faults at once
    _fault(
        "layers_from_one",
        "layers_shifted",
        _other_layers,
        0.05,
        engines=("sglang",),
        also=("layers_other",),
    ),
    _fault(
        "layers_from_two",
        "layers_other",
        _other_layers,
        0.05,
        severities=(0.5,),
        engines=("sglang",),
    ),
    _fault(
        "fc_permuted",
        "layers_order",
        _fc_permuted,
        0.1,
        severities=TWO,
        also=("tensors_damaged",),
        mendable=True,
    ),
    _fault(
        "d2t_absolute",
        "vocabulary_map",
        _absolute,
        0.1,
        source=restricted,
        severities=TWO,
        mendable=True,
    ),
    _fault(
        "d2t_other_vocabulary",
        "vocabulary_map",
        _other_vocabulary,
        0.1,
        source=restricted,
        severities=TWO,
    ),
    _fault(
        "d2t_neighbours",
        "vocabulary_map",
        _shifted_table,
        0.1,
        source=restricted,
        severities=TWO,
    ),
    _plugged("lm_head_shared", "lm_head_replaced", _shared("target_lm_head"), 0.1, severities=TWO),
    _plugged(
        "lm_head_stored",
        "lm_head_replaced",
        _stored_head,
        0.1,
        severities=TWO,
        by_quality=True,
        engines=EVERY_ENGINE,
        also=("tensors_damaged", "undertrained"),
    ),
    _fault(
        "embeddings_random",
        "embeddings_replaced",
        _random_embeddings,
        0.1,
        engines=NOT_SGLANG,
        mendable=True,
    ),
    _plugged("embeddings_shared", "embeddings_replaced", _shared("target_embeddings"), 0.1),
    _plugged(
        "embeddings_overwritten",
        "embeddings_replaced",
        _own_embeddings,
        0.1,
        engines=("sglang",),
    ),
    _fault(
        "norm_before_residual_on",
        "norm_before_residual",
        flag("norm_before_residual", True),
        0.1,
        engines=NOT_SGLANG,
        mendable=True,
    ),
    _fault(
        "norm_before_residual_off",
        "norm_before_residual",
        flag("norm_before_residual", False),
        0.1,
        source=of("norm_before_residual"),
        engines=NOT_SGLANG,
        mendable=True,
    ),
    _plugged(
        "norm_before_residual_unread",
        "norm_before_residual",
        _unread,
        0.1,
        engines=("sglang",),
    ),
    _fault(
        "norm_output_on",
        "norm_output",
        flag("norm_output", True),
        0.05,
        mendable=True,
    ),
    _fault(
        "norm_output_off",
        "norm_output",
        flag("norm_output", False),
        0.05,
        source=of("norm_output"),
        mendable=True,
    ),
    _plugged("fc_norm_ignored", "input_norm", _input_norm_ignored("fc_norm"), 0.05),
    _plugged("norm_before_fc_ignored", "input_norm", _input_norm_ignored("norm_before_fc"), 0.05),
    _fault(
        "fc_norm_dropped",
        "input_norm",
        _fc_norm_dropped,
        0.05,
        source=of("fc_norm"),
        also=("tensors_damaged",),
    ),
    _fault(
        "norm_before_fc_dropped",
        "input_norm",
        _norm_before_fc_dropped,
        0.05,
        source=of("norm_before_fc"),
        also=("tensors_damaged",),
    ),
    _fault("fc_norm_added", "input_norm", _fc_norm_added, 0.05, mendable=True),
    _fault("rope_theta", "rope", _rope_theta, 0.05, severities=TWO, mendable=True),
    _fault("rope_scaling", "rope", _rope_scaling, 0.05, severities=TWO, mendable=True),
    _fault("final_norm", "final_norm", _final_norm, 0.05, source=uneven, severities=TWO),
    _fault("tensors_zeroed", "tensors_damaged", _zeroed, 0.1, severities=TWO),
    _fault(
        "tensors_noised",
        "tensors_damaged",
        _noised,
        0.1,
        severities=(1.0, 0.7),
        also=("undertrained",),
        by_quality=True,
    ),
)
