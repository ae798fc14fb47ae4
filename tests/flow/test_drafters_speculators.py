"""What we export loads in the `speculators` library and computes the same there; and back."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_folders import (
    SCALINGS,
    VOCAB,
    build,
    folder_of,
    plain_spec,
    target_folder,
    tensors_of,
)
from safetensors.torch import load_file, save_file

from drafters.convert import convert
from drafters.eagle3 import Eagle3Drafter
from drafters.reading import Stated, read_folder, read_target
from drafters.spec import DrafterSpec, RopeSpec
from engines.base import EngineUsageError
from engines.install import engine_python

TOKENS = 40
PROGRAM = """
import json, sys
import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig

for work in sys.argv[1:]:
    folder, seen = f"{work}/made", {}
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "sdpa"
    model = SpeculatorModel.from_pretrained(folder, config=config).float().eval()
    given = load_file(f"{work}/in.safetensors")
    model.lm_head.register_forward_hook(lambda m, i, out: seen.setdefault("logits", out))
    with torch.no_grad():
        drafts = model(
            hidden_states=given["aux"][None],
            input_ids=given["ids"][None],
            document_ids=torch.zeros_like(given["ids"])[None],
            ttt_steps=1,
        )
    tensors = {"logits": seen["logits"][0].contiguous(), "drafts": drafts[0][0].contiguous()}
    save_file(tensors, f"{work}/out.safetensors")
    model.save_pretrained(f"{work}/again")
    print(json.dumps({
        "class": type(model).__name__,
        "ids": model.config.eagle_aux_hidden_state_layer_ids,
        "norm_output": model.config.norm_output,
        "verifier": model.config.speculators_config.verifier.name_or_path,
    }))
"""

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        return engine_python("speculators")
    except EngineUsageError as error:
        pytest.skip(str(error))


@torch.no_grad()
def ours(drafter: Eagle3Drafter, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits [T, D] of the first draft at every position."""
    hidden = drafter.fuse(given["aux"])
    q, k, v, residual = drafter.project(
        drafter.embed(given["ids"]), hidden, torch.arange(1, TOKENS + 1)
    )
    groups = drafter.spec.num_attention_heads // drafter.spec.num_key_value_heads
    attended = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1),
        k.transpose(0, 1).repeat_interleave(groups, 0),
        v.transpose(0, 1).repeat_interleave(groups, 0),
        is_causal=True,
        scale=drafter.scale,
    ).transpose(0, 1)
    return drafter.logits(drafter.finish(attended, residual)[1])


CASES: list[dict[str, Any]] = [
    {"norm_output": True, "fc_norm": True},
    {"norm_before_residual": True, "norm_before_fc": True, "rope": SCALINGS[2]},
    {"draft_vocab_size": VOCAB, "head_dim": 16, "rope": SCALINGS[3]},
    {"aux_layers": (0, 8), "rope": SCALINGS[1]},
]


def spec_of(case: dict[str, Any]) -> DrafterSpec:
    rope = RopeSpec(theta=50000.0, scaling=case.get("rope"))
    return plain_spec(**{**case, "rope": rope, "max_position_embeddings": 256})


def given_to(spec: DrafterSpec) -> dict[str, torch.Tensor]:
    """Aux states and token ids, the same for the library and for us."""
    generator = torch.Generator().manual_seed(1)
    width = len(spec.aux_layers) * spec.target_hidden_size
    return {
        "aux": torch.randn(TOKENS, width, generator=generator),
        "ids": torch.randint(VOCAB, (TOKENS,), generator=generator),
    }


@pytest.fixture(scope="module")
def loaded(python: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Any]]:
    """Every case exported, loaded in the library, run there, and saved again from there."""
    root = tmp_path_factory.mktemp("library")
    target_folder(root / "target", weights=True, model_type="llama")
    works = []
    for number, case in enumerate(CASES):
        spec, work = spec_of(case), root / str(number)
        source = folder_of(spec, work / "source")
        convert(source, "speculators", work / "made", target_path=root / "target")
        save_file(given_to(spec), work / "in.safetensors")
        works.append(work)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [python, "-c", PROGRAM, *map(str, works)],
        capture_output=True,
        text=True,
        env={**env, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return list(zip(works, told, strict=True))


@pytest.mark.parametrize("number", range(len(CASES)))
def test_an_export_computes_the_same_in_the_library(
    number: int, loaded: list[tuple[Path, Any]]
) -> None:
    spec, (work, told) = spec_of(CASES[number]), loaded[number]
    assert told["class"] == "Eagle3DraftModel"
    assert told["ids"] == list(spec.aux_layers)
    assert told["norm_output"] is spec.norm_output
    assert told["verifier"] == str((work.parent / "target").resolve())
    theirs, logits = load_file(work / "out.safetensors"), ours(build(spec), given_to(spec))
    torch.testing.assert_close(theirs["logits"], logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(theirs["drafts"], logits.argmax(-1))


@pytest.mark.parametrize("number", range(len(CASES)))
def test_what_the_library_writes_is_read_back(number: int, loaded: list[tuple[Path, Any]]) -> None:
    spec, (work, _) = spec_of(CASES[number]), loaded[number]
    target, again = work.parent / "target", work / "again"
    seen = read_folder(again, read_target(target))
    assert seen.spec == spec and seen.format == "speculators"
    counted = read_folder(again, stated=Stated(ids="vllm"))
    assert counted.spec.aux_layers == spec.aux_layers
    kept = tensors_of(again)
    for name, tensor in tensors_of(work / "source").items():
        assert torch.equal(kept[name], tensor), name
    convert(again, "vllm", work / "flat", target_path=target)
    assert read_folder(work / "flat").spec == spec
