"""Random drafters and their folders, for the tests of `drafters`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from drafters import checkpoint
from drafters.eagle3 import Eagle3Drafter
from drafters.spec import DrafterSpec, MlaDims, RopeSpec

HIDDEN, VOCAB, DRAFTED, LAYERS = 32, 64, 24, 8
TARGET: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "vocab_size": VOCAB,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SCALINGS: list[dict[str, Any] | None] = [
    None,
    {"rope_type": "linear", "factor": 2.0},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
    {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
]


@st.composite
def specs(
    draw: st.DrawFn, kinds: tuple[str, ...] = ("llama", "mla"), held: bool = False
) -> DrafterSpec:
    """Drafters of every kind: some that each engine and format can hold, some that it cannot.

    `held`: only what the engines, and for a Llama head the speculators library, can all hold.
    """
    kind = draw(st.sampled_from(kinds))
    heads = draw(st.sampled_from([1, 2, 4]))
    mla = MlaDims(
        q_lora_rank=8 if held else draw(st.sampled_from([None, 8])),
        kv_lora_rank=8,
        qk_nope_head_dim=4,
        qk_rope_head_dim=4,
        v_head_dim=6,
    )
    norms = [{}, {"fc_norm": True}, *([] if held and kind == "mla" else [{"norm_before_fc": True}])]
    norm = draw(st.sampled_from(norms))
    first, last = (2, LAYERS - 1) if held else (0, LAYERS)
    ascending = st.sets(st.integers(first, last), min_size=1, max_size=4).map(sorted)
    anyhow = ascending if held else st.lists(st.integers(0, LAYERS), min_size=1, max_size=4)
    return DrafterSpec(
        kind=kind,  # type: ignore[arg-type]
        hidden_size=16,
        target_hidden_size=16 if held else draw(st.sampled_from([16, 16, 24])),
        intermediate_size=draw(st.integers(4, 20)),
        num_attention_heads=heads,
        num_key_value_heads=heads if kind == "mla" else draw(st.sampled_from([1, heads])),
        head_dim=draw(st.sampled_from([4, 8])) if kind == "llama" else 16 // heads,
        vocab_size=30,
        draft_vocab_size=draw(st.sampled_from([30, 12])),
        aux_layers=tuple(draw(st.one_of(ascending, ascending, anyhow))),
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-5])),
        rope=RopeSpec(
            theta=draw(st.sampled_from([1e4, 5e5])), scaling=draw(st.sampled_from(SCALINGS))
        ),
        mla=mla if kind == "mla" else None,
        norm_before_residual=not held and draw(st.booleans()),
        norm_output=draw(st.booleans()),
        bos_token_id=1,
        eos_token_id=draw(st.sampled_from([None, 2])),
        max_position_embeddings=32,
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        **norm,
    )


def build(spec: DrafterSpec, seed: int = 3) -> Eagle3Drafter:
    """A drafter of random weights, norms too, in the spec's type."""
    torch.manual_seed(seed)
    drafter = Eagle3Drafter(spec)
    if drafter.d2t is not None:
        step = (spec.vocab_size - 1) // spec.draft_vocab_size
        kept = torch.arange(spec.draft_vocab_size) * step + 1
        kept[: step + 1] = torch.arange(step + 1)  # neighbours, as real vocabularies have
        drafter.set_vocabulary(kept.sort().values)
    for name, parameter in drafter.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.1)
    drafter.to(getattr(torch, spec.dtype))
    drafter.reset_rope()  # stays float32
    return drafter.eval()


def folder_of(spec: DrafterSpec, path: Path, *, embedding: bool = True) -> Path:
    """The drafter of `spec` saved in `path`."""
    drafter = build(spec)
    drafter.owns_embeddings = embedding
    checkpoint.save(drafter, path)
    return path


def plain_spec(**changes: Any) -> DrafterSpec:
    """A Llama head for `TARGET`."""
    fields: dict[str, Any] = {
        "kind": "llama",
        "hidden_size": HIDDEN,
        "target_hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFTED,
        "aux_layers": (2, 4, 5),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return DrafterSpec(**{**fields, **changes})


MLA = MlaDims(q_lora_rank=8, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)


def mla_spec(**changes: Any) -> DrafterSpec:
    """An MLA head for `TARGET`."""
    return plain_spec(**{"kind": "mla", "mla": MLA, "num_key_value_heads": 4, **changes})


def target_folder(path: Path, *, weights: bool = False, **changes: Any) -> Path:
    """A target's config and, with `weights`, an embedding (rows of unequal length) and a head."""
    path.mkdir(parents=True, exist_ok=True)
    config = {**TARGET, **changes}
    (path / "config.json").write_text(json.dumps(config))
    if weights:
        generator = torch.Generator().manual_seed(5)
        lengths = torch.rand(VOCAB, 1, generator=generator) * 3 + 0.1
        save_file(
            {
                "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator)
                * lengths,
                "lm_head.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
            },
            path / "model.safetensors",
        )
    return path


def edit(folder: Path, *drop: str, **changes: Any) -> None:
    """Change config.json; `drop`: keys that go. New ids in eagle_config are the only ones."""
    config = json.loads((folder / "config.json").read_text())
    if "eagle_config" in changes:
        drop = (*drop, "eagle_aux_hidden_state_layer_ids")
    kept = {key: value for key, value in config.items() if key not in drop}
    (folder / "config.json").write_text(json.dumps({**kept, **changes}))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, by the names on disk."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found.update(load_file(file))
    return found


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors (dots of their names as two underscores); None leaves one out."""
    tensors = tensors_of(folder)
    for name, tensor in changes.items():
        key = name.replace("__", ".")
        if tensor is None:
            tensors.pop(key)
        else:
            tensors[key] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def renamed(folder: Path, old: str, new: str) -> None:
    """Other names for the tensors of a folder."""
    tensors = {name.replace(old, new): tensor for name, tensor in tensors_of(folder).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def as_old_trainer(folder: Path) -> Path:
    """Make a saved Llama head into the folder that a trainer of speculators 0.3 leaves."""
    flat = json.loads((folder / "config.json").read_text())
    layer_keys = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    config = {
        "architectures": ["Eagle3DraftModel"],
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": None, "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {
            "model_type": "llama",
            "num_hidden_layers": 1,
            "num_key_value_heads": flat["num_key_value_heads"],
            **{key: flat[key] for key in layer_keys},
        },
        "draft_vocab_size": flat["draft_vocab_size"],
        "norm_before_residual": flat["norm_before_residual"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "config.py").write_text("# the config's class lies here\n")
    (folder / "generation_config.json").write_text('{"_from_model_config": true}')
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([parameter])
    parameter.sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    torch.save(optimizer.state_dict(), folder / "optimizer_state_dict.pt")
    torch.save({"last_epoch": scheduler.last_epoch}, folder / "scheduler_state_dict.pt")
    return folder
