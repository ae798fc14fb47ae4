"""Copies of drafter and target folders with something changed in them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Tensors = dict[str, "Tensor"]
Config = dict[str, Any]
IDS = "eagle_aux_hidden_state_layer_ids"


def read(folder: Path) -> tuple[Config, Tensors]:
    """config.json and the weights of a folder with one file of them."""
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    return config, load_file(folder / "model.safetensors")


def write(folder: Path, config: Config, tensors: Mapping[str, Tensor], source: Path) -> Path:
    """A folder with these, and every other file of `source`; returns it."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and file.name not in ("config.json", "model.safetensors", "build.json"):
            shutil.copyfile(file, folder / file.name)
    whole = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    partial = folder / "model.partial"
    save_file(whole, partial, metadata={"format": "pt"})
    os.replace(partial, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder


def edited(source: Path, folder: Path, change: Callable[[Config, Tensors], None]) -> Path:
    """A copy of `source` in `folder` after `change` has had its config and tensors in hand."""
    config, tensors = read(source)
    change(config, tensors)
    return write(folder, config, tensors, source)


def set_layers(config: Config, ids: tuple[int, ...] | None) -> None:
    """Name these layers everywhere a config names them; None: nowhere."""
    config.pop("drafter_format", None)
    if ids is None:
        config.pop(IDS, None)
        config["eagle_config"].pop(IDS, None)
        return
    config[IDS] = config["eagle_config"][IDS] = list(ids)
    # as an exporter marks its folders that is sure of what it writes
    config["drafter_format"] = {
        "ids_for": "vllm",
        "hidden_states_index": list(ids),
        "layer_ids": list(ids),
    }


def set_flag(config: Config, flag: str, value: bool) -> None:
    """Set a flag of the architecture everywhere a config has it."""
    config[flag] = value
    if flag == "norm_before_fc":
        config["eagle_config"][flag] = value


def layers_of(config: Config) -> tuple[int, ...]:
    return tuple(config[IDS])
