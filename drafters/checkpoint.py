"""Read and write drafter folders: config.json and model.safetensors.

Tensor names on disk are `layers.0.*`; `midlayer.*` is read too. torch is imported only to load
and save.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from drafters.checks import check_ids
from drafters.flat import to_config
from drafters.headers import weight_files
from drafters.reading import neutral_name, read_folder, read_target
from drafters.spec import DrafterError, DrafterSpec

if TYPE_CHECKING:
    import torch

    from drafters.eagle3 import Eagle3Drafter


def load_spec(path: Path, target: Path | None = None) -> DrafterSpec:
    """The neutral spec of the drafter in folder `path`. Raises DrafterError.

    `target`: the target's folder, by which a folder that does not say how its layer ids are
    counted is read as SGLang would read it beside that target.
    """
    checkpoint = read_folder(path, None if target is None else read_target(target))
    for missing in check_ids(checkpoint, None):
        raise DrafterError(missing.line())
    return checkpoint.spec


def load(path: Path, target: Path | None = None) -> Eagle3Drafter:
    """The drafter in folder `path` with its weights, in the stored type, in eval mode.

    `target` as for `load_spec`.

    Where the checkpoint has no embed_tokens or lm_head the drafter's `owns_…` flag is False and
    the caller must `share` the target's. Raises DrafterError on missing or misshapen tensors.
    """
    import torch
    from safetensors.torch import load_file

    from drafters.eagle3 import Eagle3Drafter

    spec = load_spec(path, target)
    tensors: dict[str, torch.Tensor] = {}
    for file in weight_files(path):
        tensors.update(load_file(file))
    tensors = {
        neutral_name(name): tensor
        for name, tensor in tensors.items()
        if not name.startswith("verifier_")
    }
    with torch.device("meta"):
        drafter = Eagle3Drafter(spec)
    drafter.owns_embeddings = "embed_tokens.weight" in tensors
    drafter.owns_lm_head = "lm_head.weight" in tensors
    _check_tensors(drafter, tensors, path)
    if drafter.t2d is not None and "t2d" not in tensors:
        kept = tensors["d2t"] + torch.arange(spec.draft_vocab_size)
        tensors["t2d"] = torch.zeros(spec.vocab_size, dtype=torch.bool).index_fill(0, kept, True)
    drafter.load_state_dict(tensors, strict=False, assign=True)
    drafter.reset_rope()  # computed, not stored
    return drafter.eval()


def _check_tensors(drafter: Eagle3Drafter, tensors: dict[str, torch.Tensor], path: Path) -> None:
    optional = {"embed_tokens.weight", "lm_head.weight", "t2d"}
    wanted = drafter.state_dict()
    missing = sorted(set(wanted) - set(tensors) - optional)
    if missing:
        raise DrafterError(f"{path}: tensor {missing[0]} is missing ({len(missing)} in all)")
    unknown = sorted(set(tensors) - set(wanted) - {"t2d", "d2t"})
    if unknown:
        raise DrafterError(f"{path}: tensor {unknown[0]} fits no part of the drafter")
    for name, tensor in tensors.items():
        if name in wanted and tensor.shape != wanted[name].shape:
            raise DrafterError(
                f"{path}: tensor {name} has shape {tuple(tensor.shape)}, "
                f"the config wants {tuple(wanted[name].shape)}"
            )


def save(drafter: Eagle3Drafter, path: Path) -> None:
    """Write the drafter's folder; shared embeddings and heads are left out.

    The weights are written first and both files appear whole or not at all.
    """
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    left_out = set()
    if not drafter.owns_embeddings:
        left_out.add("embed_tokens.weight")
    if not drafter.owns_lm_head:
        left_out.add("lm_head.weight")
    tensors = {
        name: tensor.detach().contiguous().cpu()
        for name, tensor in drafter.state_dict().items()
        if name not in left_out
    }
    weights = path / "model.safetensors"
    partial = weights.with_suffix(".partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    os.replace(partial, weights)
    config = path / "config.json"
    partial = config.with_suffix(".partial")
    partial.write_text(json.dumps(to_config(drafter.spec), indent=2) + "\n", encoding="utf-8")
    os.replace(partial, config)
