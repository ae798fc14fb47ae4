"""The demo pair made for real, with a handful of steps: every file, and that others can read it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from drafters import checkpoint
from drafters.validate import check_fit
from training.demo import build, corpus, pair
from training.demo.config import DrafterConfig, TargetConfig


@pytest.fixture(scope="module", autouse=True)
def few_prompts() -> Iterator[None]:
    """An untrained target never stops, so let it answer few of the prompts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "demo_dialogues", lambda: corpus.held_out_dialogues(77, 12))
        yield


@pytest.fixture(scope="module")
def made(few_prompts: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair of three steps with both drafters."""
    root = tmp_path_factory.mktemp("cache")
    target = TargetConfig(steps=3)
    first = pair.make(target, DrafterConfig(kind="mla", steps=2), root)
    second = pair.make(target, DrafterConfig(kind="llama", steps=2), root)
    assert first == second
    return first


def test_every_part_is_there_and_nothing_else(made: Path) -> None:
    names = {p.name for p in made.iterdir()}
    assert names == {"target", "drafter-mla", "drafter-llama", "prompts.jsonl", "pair.json"}
    assert {p.name for p in made.parent.iterdir()} == {made.name, f"{made.name}.lock"}
    record = json.loads((made / "pair.json").read_text())
    assert record["target"]["held_out"]["prompts"] == 12
    for kind in ("mla", "llama"):
        held_out = record["drafters"][kind]["held_out"]
        assert held_out["counts"]["drafted"] == 3 * held_out["counts"]["drafts"] > 0


@pytest.mark.parametrize("kind", ["mla", "llama"])
def test_the_drafter_fits_the_target(made: Path, kind: str) -> None:
    check_fit(made / f"drafter-{kind}", made / "target")
    drafter = checkpoint.load(made / f"drafter-{kind}")
    assert drafter.spec.kind == kind
    assert drafter.spec.aux_layers == (2, 4, 5)
    assert not drafter.owns_embeddings and drafter.owns_lm_head


def test_the_target_is_read_by_transformers(made: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made / "target")
    model = AutoModelForCausalLM.from_pretrained(made / "target", dtype=torch.float32)
    line = json.loads((made / "prompts.jsonl").read_text().splitlines()[0])
    ids = tokenizer.apply_chat_template(
        line["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    assert ids.max() < model.config.vocab_size == len(tokenizer)
    out = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert out.shape[1] > ids.shape[1]


def test_prompts_are_held_out_and_fit_the_context(made: Path) -> None:
    lines = [json.loads(line) for line in (made / "prompts.jsonl").read_text().splitlines()]
    assert len({line["id"] for line in lines}) == 12
    assert any(len(line["messages"]) == 3 for line in lines)
    for line in lines:
        for message in line["messages"]:
            assert message["role"] != "user" or corpus.is_held_out(message["content"])


def test_the_same_seed_gives_the_same_bytes(made: Path, tmp_path: Path) -> None:
    again = pair.make(TargetConfig(steps=3), DrafterConfig(kind="mla", steps=2), tmp_path)
    for name in ("target/model.safetensors", "target/tokenizer.json", "prompts.jsonl"):
        assert (again / name).read_bytes() == (made / name).read_bytes()
    weights = "drafter-mla/model.safetensors"
    assert (again / weights).read_bytes() == (made / weights).read_bytes()


def test_a_llama_target_takes_both_heads(tmp_path: Path) -> None:
    target = TargetConfig(kind="llama", steps=1)
    for kind in ("llama", "mla"):
        drafter = DrafterConfig(kind="llama", steps=1)
        folder = pair.make(target, msgspec.structs.replace(drafter, kind=kind), tmp_path)
        check_fit(folder / f"drafter-{kind}", folder / "target")
    config = json.loads((folder / "target" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
