"""Each planted defect is caught, by the code that names it; a sound drafter passes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from drafter_folders import (
    DRAFTED,
    HIDDEN,
    LAYERS,
    VOCAB,
    as_old_trainer,
    edit,
    folder_of,
    mla_spec,
    plain_spec,
    renamed,
    rewrite,
    target_folder,
    tensors_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from drafters.convert import convert
from drafters.engines import Engine
from drafters.findings import Finding, ordered
from drafters.headers import TensorHeader, read_header
from drafters.reading import Stated
from drafters.spec import DrafterError
from drafters.validate import validate
from drafters.weights import integers, likeness, sample, spread_of, stats


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    """A sound Llama head that shares the target's embedding."""
    return folder_of(plain_spec(), tmp_path / "drafter", embedding=False)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return target_folder(tmp_path / "target", weights=True)


def codes(found: list[Finding], severity: str | None = None) -> set[str]:
    return {f.code for f in found if severity in (None, f.severity)}


def test_a_sound_drafter_passes(drafter: Path, target: Path) -> None:
    found = validate(drafter, target)
    assert codes(found, "error") == set()
    # SGLang would read the ids of a folder made for vLLM one layer on
    assert codes(found, "warning") == {"ids_misread"}
    assert codes(validate(drafter, target, engine="vllm"), "warning") == set()


def test_an_mla_head_passes(tmp_path: Path) -> None:
    target = target_folder(tmp_path / "t", weights=True, architectures=["DeepseekV3ForCausalLM"])
    folder = folder_of(mla_spec(), tmp_path / "d", embedding=False)
    assert not codes(validate(folder, target)) & {"ids_misread"}
    assert codes(validate(folder, target), "error") == set()


def absolute(folder: Path) -> None:
    d2t = tensors_of(folder)["d2t"]
    rewrite(folder, d2t=d2t + torch.arange(len(d2t)))


def shuffled(folder: Path) -> None:
    d2t = tensors_of(folder)["d2t"].clone()
    d2t[[5, 6]] = d2t[[6, 5]] + torch.tensor([1, -1])
    rewrite(folder, d2t=d2t)


def beyond(folder: Path) -> None:
    d2t = tensors_of(folder)["d2t"].clone()
    d2t[-1] += VOCAB
    rewrite(folder, d2t=d2t)


def other_t2d(folder: Path) -> None:
    rewrite(folder, t2d=tensors_of(folder)["t2d"].roll(1))


def with_nan(folder: Path) -> None:
    tensor = tensors_of(folder)["fc.weight"].clone()
    tensor[3, 5] = float("nan")
    rewrite(folder, fc__weight=tensor)


def with_infinity(folder: Path) -> None:
    tensor = tensors_of(folder)["lm_head.weight"].clone()
    tensor[0, 0] = -float("inf")
    rewrite(folder, lm_head__weight=tensor)


def zero(folder: Path) -> None:
    name = "layers__0__mlp__up_proj__weight"
    rewrite(folder, **{name: torch.zeros(48, HIDDEN)})


def constant(folder: Path) -> None:
    rewrite(folder, layers__0__self_attn__o_proj__weight=torch.full((HIDDEN, HIDDEN), 0.02))


def wild_norm(folder: Path) -> None:
    rewrite(folder, norm__weight=torch.linspace(1, 1e5, HIDDEN))


def tiny_norm(folder: Path) -> None:
    rewrite(folder, norm__weight=torch.linspace(1e-8, 1e-6, HIDDEN))


def norm_partly_one(folder: Path) -> None:
    weight = torch.linspace(0.2, 4, HIDDEN)
    weight[: HIDDEN // 2] = 1
    rewrite(folder, norm__weight=weight)


def test_a_norm_that_is_one_in_part_is_told(drafter: Path, target: Path) -> None:
    norm_partly_one(drafter)
    found = {f.code: f for f in validate(drafter, target)}
    assert f"in {HIDDEN // 2} of {HIDDEN} places" in found["norm_partly_one"].what
    assert found["norm_partly_one"].severity == "warning"


def test_a_padded_latents_norm_is_not_told(demo_pair: Path) -> None:
    found = validate(demo_pair / "drafter-mla", demo_pair / "target")
    assert not [f.what for f in found if f.code == "norm_partly_one"]


@pytest.mark.parametrize("moved", [0.1, 0.6])
def test_ones_of_rounding_and_of_little_training_are_none(
    drafter: Path, target: Path, moved: float
) -> None:
    """Weights that began as 1 and moved by some of bfloat16's steps; many not at all."""
    steps = (torch.arange(HIDDEN) % 5 + 1) / 128
    weight = torch.where(torch.arange(HIDDEN) < moved * HIDDEN, 1 + steps, 1.0)
    rewrite(drafter, norm__weight=weight)
    assert "norm_partly_one" not in {f.code for f in validate(drafter, target)}


def random_embedding(folder: Path) -> None:
    generator = torch.Generator().manual_seed(9)
    rewrite(folder, embed_tokens__weight=torch.randn(VOCAB, HIDDEN, generator=generator))


def missing_tensor(folder: Path) -> None:
    rewrite(folder, layers__0__hidden_norm__weight=None)


def unknown_tensor(folder: Path) -> None:
    rewrite(folder, fc_norm__0__weight=torch.rand(HIDDEN))


def wrong_type(folder: Path) -> None:
    rewrite(folder, fc__weight=torch.zeros(HIDDEN, 3 * HIDDEN, dtype=torch.int8))


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def missing_shard(folder: Path) -> None:
    names = dict.fromkeys(tensors_of(folder), "model-00001-of-00002.safetensors")
    names["fc.weight"] = "model-00002-of-00002.safetensors"
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


PLANTED: list[tuple[Callable[[Path], None], str]] = [
    (absolute, "d2t_absolute"),
    (shuffled, "d2t_order"),
    (beyond, "d2t_range"),
    (other_t2d, "t2d_disagrees"),
    (with_nan, "not_finite"),
    (with_infinity, "not_finite"),
    (zero, "all_zero"),
    (constant, "constant"),
    (wild_norm, "norm_out_of_range"),
    (tiny_norm, "norm_out_of_range"),
    (random_embedding, "embedding_random"),
    (missing_tensor, "tensor_missing"),
    (unknown_tensor, "tensor_unknown"),
    (wrong_type, "tensor_dtype"),
    (truncated, "unreadable"),
    (missing_shard, "unreadable"),
]


@pytest.mark.parametrize(("plant", "code"), PLANTED, ids=[p.__name__ for p, _ in PLANTED])
def test_a_planted_defect_is_an_error(
    plant: Callable[[Path], None], code: str, drafter: Path, target: Path
) -> None:
    plant(drafter)
    found = validate(drafter, target)
    assert codes(found, "error") == {code}
    worst = found[0]
    assert worst.code == code and "\n" not in worst.line() and str(drafter) in worst.line()


@pytest.mark.parametrize("plant", [absolute, shuffled, other_t2d, missing_tensor, unknown_tensor])
def test_what_is_broken_is_not_converted(
    plant: Callable[[Path], None], drafter: Path, tmp_path: Path
) -> None:
    plant(drafter)
    with pytest.raises(DrafterError):
        convert(drafter, "vllm", tmp_path / "out")
    assert not (tmp_path / "out").exists()


ids = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
CONFIGS: list[tuple[dict[str, Any], str, str]] = [
    ({"rope_theta": 50000.0}, "warning", "rope_base"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "note", "rope_scaling"),
    ({"rope_scaling": {"rope_type": "odd", "factor": 2.0}}, "error", "rope_unknown"),
    ({"eagle_config": {}}, "error", "ids_missing"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4]}}, "error", "ids_number"),
    ({"num_aux_hidden_states": 2}, "error", "ids_number"),
    ({"eagle_aux_hidden_state_layer_ids": [3, 5, 6]}, "error", "ids_conflict"),
    ({"eagle_config": ids}, "warning", "ids_assumed"),
    (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, LAYERS + 1]}},
        "error",
        "layers_out_of_range",
    ),
    ({"vocab_size": VOCAB + 1}, "error", "target_size"),
    ({"norm_before_residual": True}, "warning", "flag_ignored"),
    ({"eos_token_id": 7}, "warning", "token_differs"),
    ({"bos_token_id": VOCAB}, "error", "token_out_of_range"),
    ({"norm_before_fc": True, "eagle_config": ids, "fc_norm": True}, "error", "norms_exclusive"),
    ({"num_key_value_heads": 3}, "error", "heads"),
]


@pytest.mark.parametrize(("changes", "severity", "code"), CONFIGS, ids=[c[2] for c in CONFIGS])
def test_a_planted_config_is_told(
    changes: dict[str, Any], severity: str, code: str, drafter: Path, target: Path
) -> None:
    before = codes(validate(drafter, target))
    edit(drafter, **changes)
    found = validate(drafter, target)
    assert code in codes(found, severity) - before
    assert all(f.remedy or f.severity == "note" for f in found if f.code == code), found


@pytest.mark.parametrize("layers", [-3, 0])
def test_a_target_of_no_layers_is_refused(layers: int, drafter: Path, target: Path) -> None:
    edit(target, num_hidden_layers=layers)
    with pytest.raises(DrafterError, match=f"num_hidden_layers is {layers}") as refused:
        validate(drafter, target)
    assert str(target / "config.json") in str(refused.value)


def test_ids_counted_otherwise_are_seen_by_the_range(drafter: Path, target: Path) -> None:
    """Trained on the last layers: as outputs these ids would go past the end."""
    edit(drafter, eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, LAYERS]})
    assert "layers_out_of_range" not in codes(validate(drafter, target))
    found = validate(drafter, target, stated=Stated(ids="speculators-0.3"))
    assert "layers_out_of_range" in codes(found, "error")


@pytest.mark.parametrize(("engine", "severity"), [("sglang", "error"), ("vllm", None), (None, "w")])
def test_what_an_engine_ignores_is_an_error_for_that_engine(
    engine: Engine | None, severity: str | None, drafter: Path, target: Path
) -> None:
    edit(drafter, norm_before_residual=True)
    found = [f for f in validate(drafter, target, engine=engine) if f.code == "flag_ignored"]
    assert [f.severity[: len(severity or "")] for f in found] == ([severity] if severity else [])


def test_flags_where_no_engine_looks_are_told(drafter: Path, target: Path) -> None:
    eagle = json.loads((drafter / "config.json").read_text())["eagle_config"]
    edit(drafter, eagle_config={**eagle, "norm_output": True})
    found = [f for f in validate(drafter, target) if f.code == "flag_ignored"]
    assert "inside eagle_config" in found[0].what


def test_a_folder_made_for_one_engine_is_misread_by_the_other(tmp_path: Path, target: Path) -> None:
    source = folder_of(plain_spec(), tmp_path / "s", embedding=False)
    convert(source, "sglang", tmp_path / "made", target_path=target)
    found = [f for f in validate(tmp_path / "made", target) if f.code == "ids_misread"]
    assert [f.severity for f in found] == ["warning"]
    assert "(model runner V1) reads the ids [1, 3, 4], and captures [1, 3, 4]" in found[0].what
    convert(source, "speculators", tmp_path / "lib", target_path=target)
    assert "format_unread" in codes(validate(tmp_path / "lib", target, engine="sglang"))


def test_a_trainers_layers_are_misread_by_vllm(trainers: Path, target: Path) -> None:
    """speculators 0.3 counts outputs, vLLM inputs; without ids vLLM takes its default."""
    found = [f for f in validate(trainers, target, engine="vllm") if f.code == "ids_misread"]
    assert "captures [1, 3, 4]; the drafter was trained on [2, 4, 5]" in found[0].what
    edit(trainers, "eagle_aux_hidden_state_layer_ids")
    assert "ids_missing" in codes(validate(trainers, target), "error")
    found = validate(trainers, target, engine="vllm", stated=Stated(layers=(2, 4, 5)))
    misread = [f for f in found if f.code == "ids_misread"]
    assert "no ids, so its default, and captures [2, 4, 5]" in misread[0].what
    assert "trained on [3, 5, 6]" in misread[0].what
    assert "ids_missing" not in codes(found)


def test_ids_that_vllms_runner_for_gpus_does_not_see_are_told(drafter: Path, target: Path) -> None:
    """Published flat folders name them in eagle_config alone, where runner V2 does not look."""
    assert "ids_misread" not in codes(validate(drafter, target, engine="vllm"))
    edit(drafter, "eagle_aux_hidden_state_layer_ids")
    edit(target, num_hidden_layers=16)
    found = [f for f in validate(drafter, target, engine="vllm") if f.code == "ids_misread"]
    assert len(found) == 1 and "model runner V2" in found[0].what
    assert "captures [2, 8, 13]; the drafter was trained on [2, 4, 5]" in found[0].what
    edit(target, num_hidden_layers=LAYERS)  # whose default is what it was trained on
    assert "ids_misread" not in codes(validate(drafter, target, engine="vllm"))


def test_without_a_target_less_is_said(drafter: Path) -> None:
    found = validate(drafter)
    assert "no_target" in codes(found, "note") and not codes(found, "error")
    assert "SGLang" in " ".join(f.what for f in found if f.code == "ids_misread")
    random_embedding(drafter)
    assert "embedding_random" in codes(validate(drafter), "warning")


def test_embeddings_are_compared(drafter: Path, target: Path) -> None:
    theirs = tensors_of(target)["model.embed_tokens.weight"]
    rewrite(drafter, embed_tokens__weight=theirs)
    assert "embedding_shared" in codes(validate(drafter, target), "note")
    rewrite(drafter, embed_tokens__weight=theirs.bfloat16())
    assert "embedding_shared" in codes(validate(drafter, target), "note")
    rewrite(drafter, embed_tokens__weight=theirs + 0.05 * torch.randn(VOCAB, HIDDEN))
    found = [f for f in validate(drafter, target) if f.code == "embedding_differs"]
    assert [f.severity for f in found] == ["warning"] and "SGLang puts" in found[0].why


def test_heads_are_compared_by_the_draft_vocabulary(drafter: Path, target: Path) -> None:
    tensors = tensors_of(drafter)
    rows = tensors_of(target)["lm_head.weight"][tensors["d2t"] + torch.arange(DRAFTED)]
    assert "head_differs" in codes(validate(drafter, target), "note")
    rewrite(drafter, lm_head__weight=rows.contiguous())
    assert "head_equal" in codes(validate(drafter, target), "note")


def test_an_end_token_that_cannot_be_drafted_is_told(drafter: Path, target: Path) -> None:
    tensors = tensors_of(drafter)
    kept = torch.arange(20, 20 + DRAFTED)
    t2d = torch.zeros_like(tensors["t2d"])
    t2d[kept] = True
    rewrite(drafter, d2t=torch.full((DRAFTED,), 20), t2d=t2d)
    assert "end_not_drafted" in codes(validate(drafter, target), "warning")


def test_tokens_named_by_the_tokenizer_count(drafter: Path, target: Path) -> None:
    edit(drafter, eos_token_id=7)
    assert "token_differs" in codes(validate(drafter, target))
    (target / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
    added = {"added_tokens": [{"id": 7, "content": "<end>"}]}
    (target / "tokenizer.json").write_text(json.dumps(added))
    assert "token_differs" not in codes(validate(drafter, target))


@pytest.fixture
def trainers(tmp_path: Path) -> Path:
    folder = as_old_trainer(folder_of(plain_spec(), tmp_path / "epoch"))
    edit(folder, eagle_aux_hidden_state_layer_ids=[1, 3, 4])
    return folder


def state_codes(folder: Path) -> dict[str, str]:
    return {f.code: f.severity for f in validate(folder) if f.code.startswith("state")}


def test_a_trainers_state_is_loaded(trainers: Path) -> None:
    assert state_codes(trainers) == {}
    (trainers / "optimizer_state_dict.pt").unlink()
    assert state_codes(trainers) == {"state_missing": "warning"}


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda f: f.write_bytes(f.read_bytes()[:-60]),
        lambda f: f.write_bytes(b"not a state"),
        lambda f: f.write_bytes(b""),
        lambda f: torch.save([1, 2], f),
        lambda f: torch.save({"state": {}, "param_groups": []}, f),
        lambda f: torch.save(
            {"state": {0: {"exp_avg": torch.full((2,), float("nan"))}}, "param_groups": []}, f
        ),
        lambda f: torch.save(Path("an object"), f),
        lambda f: (f.unlink(), f.mkdir()),
    ],
    ids=["cut", "text", "empty", "list", "nothing", "nan", "code", "folder"],
)
def test_a_corrupt_state_is_an_error(corrupt: Callable[[Path], object], trainers: Path) -> None:
    corrupt(trainers / "optimizer_state_dict.pt")
    assert state_codes(trainers) == {"state_unreadable": "error"}


def test_moments_of_16_bits_are_told(trainers: Path) -> None:
    moments = {"exp_avg": torch.ones(4, dtype=torch.bfloat16)}
    state = {"state": {0: moments}, "param_groups": [{}]}
    torch.save(state, trainers / "optimizer_state_dict.pt")
    assert state_codes(trainers) == {"state_reduced": "warning"}


def test_tensors_of_the_target_are_left_out(trainers: Path, tmp_path: Path) -> None:
    rewrite(trainers, verifier_lm_head__weight=torch.randn(DRAFTED, HIDDEN))
    assert "tensor_verifier" in codes(validate(trainers), "warning")
    made = convert(trainers, "vllm", tmp_path / "out")
    assert "verifier_lm_head.weight" in made.weights
    assert "verifier_lm_head.weight" not in tensors_of(tmp_path / "out")


def test_the_worst_comes_first() -> None:
    made = [
        Finding(severity=s, code=str(i), where="x", what="y")  # type: ignore[arg-type]
        for i, s in enumerate(["note", "error", "warning", "error"])
    ]
    assert [f.code for f in ordered(made)] == ["1", "3", "2", "0"]


@given(
    values=st.lists(st.floats(-8, 8, width=16), min_size=1, max_size=40),
    broken=st.lists(st.sampled_from([float("nan"), float("inf"), -float("inf")]), max_size=3),
    kind=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 9),
)
@settings(max_examples=60, deadline=None)
def test_stats_agree_with_torch(
    values: list[float],
    broken: list[float],
    kind: torch.dtype,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    order = torch.randperm(len(values) + len(broken), generator=torch.Generator().manual_seed(seed))
    tensor = torch.tensor([*values, *broken])[order].to(kind)
    found = stats(stored(tensor, tmp_path_factory.mktemp("s")))
    finite = tensor.float()[tensor.float().isfinite()]
    assert found.nan == int(tensor.isnan().sum()) and found.inf == int(tensor.isinf().sum())
    assert (found.low, found.high) == (finite.min().item(), finite.max().item())
    assert found.mean_abs == pytest.approx(finite.abs().mean().item(), rel=1e-5, abs=1e-9)


def stored(tensor: torch.Tensor, folder: Path) -> TensorHeader:
    save_file({"x": tensor}, folder / "x.safetensors")
    return read_header(folder / "x.safetensors")["x"]


def test_a_tensor_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("drafters.weights.PIECE", 7)
    tensor = torch.randn(50, 3)
    found = stats(stored(tensor, tmp_path))
    assert (found.low, found.high) == (tensor.min().item(), tensor.max().item())
    other = tensor.clone()
    other[33, 1] += 1
    (tmp_path / "o").mkdir()
    monkeypatch.setattr("drafters.weights.sample", lambda n: np.arange(0, n, 10))
    one, two = stored(tensor, tmp_path), stored(other, tmp_path / "o")
    assert likeness(one, one).equal and not likeness(one, two).equal


@pytest.mark.parametrize("kind", ["normal", "uniform"])
def test_drawn_rows_are_told_from_trained_ones(kind: str) -> None:
    random = np.random.default_rng(1)
    rows = random.normal(size=(500, 64)) if kind == "normal" else random.uniform(-1, 1, (500, 64))
    drawn = spread_of(rows.astype(np.float32))
    assert drawn is not None and drawn.looks_drawn
    spread = rows * random.lognormal(0, 0.3, size=(500, 1))
    trained = spread_of(spread.astype(np.float32))
    assert trained is not None and not trained.looks_drawn
    assert len(sample(10_000)) == 1024 and list(sample(3)) == [0, 1, 2]


def test_tables_of_other_widths_are_read(tmp_path: Path, drafter: Path, target: Path) -> None:
    d2t = tensors_of(drafter)["d2t"]
    assert integers(stored(d2t.int(), tmp_path)).tolist() == d2t.tolist()
    rewrite(drafter, d2t=d2t.int())
    found = validate(drafter, target)
    assert [f.severity for f in found if f.code == "tensor_dtype"] == ["warning"]


def test_findings_are_json(drafter: Path, target: Path) -> None:
    text = msgspec.json.encode(validate(drafter, target))
    assert {"severity", "code", "where", "what", "why", "remedy"} <= set(json.loads(text)[0])


def test_midlayer_names_with_norm_output_are_told(drafter: Path, target: Path) -> None:
    renamed(drafter, "layers.0.", "midlayer.")
    edit(drafter, norm_output=True)
    assert "norm_output_meaning" in codes(validate(drafter, target), "warning")
