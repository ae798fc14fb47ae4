"""Formats: what a folder is taken for, round trips between them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_folders import (
    LAYERS,
    VOCAB,
    as_old_trainer,
    edit,
    folder_of,
    mla_spec,
    plain_spec,
    renamed,
    rewrite,
    specs,
    target_folder,
    tensors_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters import checkpoint
from drafters.convert import convert
from drafters.engines import gaps, readings
from drafters.formats import Destination
from drafters.headers import read_headers
from drafters.reading import Stated, describe_ids, neutral_name, read_folder, read_target
from drafters.spec import DrafterError, DrafterSpec
from drafters.speculators import why_not_held

ROUTES: list[tuple[Destination, ...]] = [
    ("speculators", "vllm"),
    ("sglang", "speculators", "vllm"),
    ("vllm", "sglang", "speculators"),
    ("sglang", "sglang"),
]


def holds(spec: DrafterSpec, to: Destination, folder: Path, target: Path) -> bool:
    """Whether a format or an engine can hold a drafter, by its own account."""
    if to == "speculators":
        return why_not_held(spec) is None
    model = read_target(target)
    return not list(gaps(read_folder(folder, model), to, model))


def same_tensors(one: Path, other: Path) -> None:
    """Bit for bit, names but for their spelling."""
    ours = {neutral_name(n): t for n, t in tensors_of(one).items()}
    theirs = {neutral_name(n): t for n, t in tensors_of(other).items()}
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        raw = tensor.contiguous().view(torch.uint8), theirs[name].contiguous().view(torch.uint8)
        assert torch.equal(*raw), name


ARCHITECTURES = st.sampled_from(["LlamaForCausalLM", "DeepseekV3ForCausalLM"])


@given(
    spec=specs(held=True),
    route=st.permutations(["vllm", "sglang", "speculators", "vllm"]),
    architecture=ARCHITECTURES,
    midlayer=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_what_all_can_hold_goes_round_bit_for_bit(
    spec: DrafterSpec,
    route: list[Destination],
    architecture: str,
    midlayer: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    work = tmp_path_factory.mktemp("held")
    target = target_folder(work / "target", architectures=[architecture])
    source = here = folder_of(spec, work / "source")
    if midlayer:
        renamed(source, "layers.0.", "midlayer.")
    for step, to in enumerate(route):
        if to == "speculators" and spec.kind == "mla":
            continue
        there = work / f"{step}-{to}"
        convert(here, to, there, target_path=target)
        assert_holds(there, to, target, spec)
        same_tensors(source, there)
        here = there


def assert_holds(folder: Path, to: Destination, target: Path, spec: DrafterSpec) -> None:
    """The folder is read as `spec`, by our own word in it and by its ids as `to` counts them."""
    model = read_target(target)
    assert read_folder(folder, model).spec == spec
    counted = Stated(ids="sglang" if to == "sglang" else "vllm")
    assert read_folder(folder, model, counted).spec == spec


@given(
    spec=specs(),
    route=st.sampled_from(ROUTES),
    architecture=ARCHITECTURES,
    midlayer=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_round_trips_are_exact_or_refused(
    spec: DrafterSpec,
    route: tuple[Destination, ...],
    architecture: str,
    midlayer: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    work = tmp_path_factory.mktemp("route")
    target = target_folder(work / "target", architectures=[architecture])
    source = here = folder_of(spec, work / "source")
    if midlayer:
        renamed(source, "layers.0.", "midlayer.")
    for step, to in enumerate(route):
        there = work / f"{step}-{to}"
        able = holds(spec, to, here, target)
        try:
            convert(here, to, there, target_path=target)
        except DrafterError as error:
            first = spec.aux_layers[0] if spec.aux_layers else 0
            unnamed = to == "sglang" and first in (0, 1)  # ids that its rules cannot give
            assert not able or unnamed, str(error)
            assert "\n" not in str(error)
            assert not there.exists() and not list(work.glob(".*partial*"))
            return
        assert able
        assert_holds(there, to, target, spec)
        same_tensors(source, there)
        here = there


@given(spec=specs(kinds=("llama",)))
@settings(max_examples=15, deadline=None)
def test_a_converted_drafter_computes_the_same(
    spec: DrafterSpec, tmp_path_factory: pytest.TempPathFactory
) -> None:
    work = tmp_path_factory.mktemp("same")
    if why_not_held(spec) is not None:
        return
    target = target_folder(work / "target")
    source = folder_of(spec, work / "source")
    convert(source, "speculators", work / "new", target_path=target)
    one, other = checkpoint.load(source), checkpoint.load(work / "new")
    aux = torch.randn(5, len(spec.aux_layers) * spec.target_hidden_size).to(one.fc.weight.dtype)
    ids, positions = torch.arange(5), torch.arange(5)
    for a, b in zip(
        one.project(one.embed(ids), one.fuse(aux), positions),
        other.project(other.embed(ids), other.fuse(aux), positions),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_the_written_ids_are_each_engines_own(tmp_path: Path) -> None:
    source = folder_of(plain_spec(), tmp_path / "d")
    llama = target_folder(tmp_path / "llama")
    deepseek = target_folder(tmp_path / "deepseek", architectures=["DeepseekV3ForCausalLM"])
    for name, to, target, ids in (
        ("a", "vllm", llama, [2, 4, 5]),
        ("b", "sglang", llama, [1, 3, 4]),
        ("c", "sglang", deepseek, [2, 4, 5]),
        ("d", "speculators", llama, [2, 4, 5]),
    ):
        made = convert(source, to, tmp_path / f"out-{name}", target_path=target)  # type: ignore[arg-type]
        assert made.written_ids == ids
        assert made.spec.aux_layers == (2, 4, 5)
        again = read_folder(tmp_path / f"out-{name}", read_target(target))
        assert again.certain and again.convention == ("sglang" if to == "sglang" else "vllm")
        assert f"{ids} in {'SGLang' if to == 'sglang' else 'vLLM'}" in describe_ids(again)
        right = [r.right for r in readings(again, read_target(target)) if r.engine == to]
        assert right in ([True], [])  # no engine is called speculators


def test_weights_are_linked_where_no_name_changes(tmp_path: Path) -> None:
    source = folder_of(plain_spec(), tmp_path / "d")
    convert(source, "vllm", tmp_path / "out")
    one, other = (tmp_path / n / "model.safetensors" for n in ("d", "out"))
    assert one.stat().st_ino == other.stat().st_ino
    renamed(source, "layers.0.", "model.layers.0.")
    made = convert(source, "vllm", tmp_path / "anew")
    assert "renamed" in made.weights
    assert "layers.0.hidden_norm.weight" in tensors_of(tmp_path / "anew")


def test_shards_stay_shards(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    source = folder_of(plain_spec(), tmp_path / "d")
    tensors = list(tensors_of(source).items())
    (source / "model.safetensors").unlink()
    shards = {"model-00001-of-00002.safetensors": dict(tensors[:7])}
    shards["model-00002-of-00002.safetensors"] = dict(tensors[7:])
    for file, part in shards.items():
        save_file({n.replace("layers.0", "midlayer"): t for n, t in part.items()}, source / file)
    names = {n.replace("layers.0", "midlayer"): f for f, part in shards.items() for n in part}
    index = {"metadata": {}, "weight_map": names}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    target = target_folder(tmp_path / "t")
    convert(source, "speculators", tmp_path / "out", target_path=target)
    same_tensors(source, tmp_path / "out")
    told = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(told["weight_map"]) == set(read_headers(tmp_path / "out"))
    assert set(told["weight_map"].values()) == set(shards)


def test_t2d_is_added_for_the_library_that_wants_it(tmp_path: Path) -> None:
    source = folder_of(plain_spec(), tmp_path / "d")
    wanted = tensors_of(source)["t2d"]
    rewrite(source, t2d=None)
    made = convert(
        source, "speculators", tmp_path / "out", target_path=target_folder(tmp_path / "t")
    )
    assert "added t2d" in made.weights
    assert torch.equal(tensors_of(tmp_path / "out")["t2d"], wanted)


@pytest.mark.parametrize(
    ("spec", "to", "said"),
    [
        (mla_spec(), "speculators", "no MLA head"),
        (plain_spec(target_hidden_size=24), "speculators", "target's hidden size"),
        (plain_spec(norm_before_residual=True), "sglang", "ignores norm_before_residual"),
        (mla_spec(norm_before_fc=True), "vllm", "ignores norm_before_fc"),
        (mla_spec(norm_before_fc=True), "sglang", "ignores norm_before_fc"),
        (plain_spec(aux_layers=(4, 2)), "vllm", "ascending order"),
        (plain_spec(aux_layers=(0, 2)), "sglang", "embedding"),
        (plain_spec(aux_layers=(2, LAYERS)), "sglang", f"no index {LAYERS}"),
    ],
)
def test_what_cannot_be_held_is_refused(
    spec: DrafterSpec, to: Destination, said: str, tmp_path: Path
) -> None:
    hidden = spec.target_hidden_size
    target = target_folder(tmp_path / "t", hidden_size=hidden)
    source = folder_of(spec, tmp_path / "d")
    with pytest.raises(DrafterError, match=said):
        convert(source, to, tmp_path / "out", target_path=target)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d", "t"]


def test_an_embedding_that_sglang_would_replace_is_refused(tmp_path: Path) -> None:
    source = folder_of(plain_spec(), tmp_path / "d")
    target = target_folder(tmp_path / "t", weights=True)
    with pytest.raises(DrafterError, match="puts the target's in its place"):
        convert(source, "sglang", tmp_path / "out", target_path=target)
    rewrite(source, embed_tokens__weight=tensors_of(target)["model.embed_tokens.weight"])
    convert(source, "sglang", tmp_path / "out", target_path=target)


def test_a_head_that_no_engine_can_fill_in_is_refused(tmp_path: Path) -> None:
    source = folder_of(plain_spec(), tmp_path / "d")
    rewrite(source, lm_head__weight=None)
    with pytest.raises(DrafterError, match="first 24 rows"):
        convert(source, "vllm", tmp_path / "out")
    with pytest.raises(DrafterError, match="name it with --target"):
        convert(source, "speculators", tmp_path / "out")


def test_an_mla_head_without_its_own_lm_head_shares_the_targets_in_sglang(tmp_path: Path) -> None:
    """SGLang's MLA drafter does so only where no draft vocabulary is named."""
    source = folder_of(mla_spec(draft_vocab_size=VOCAB), tmp_path / "d")
    rewrite(source, lm_head__weight=None)
    made = convert(source, "sglang", tmp_path / "out")
    assert "draft_vocab_size" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert made.spec.draft_vocab_size == VOCAB
    folder_of(plain_spec(draft_vocab_size=VOCAB), tmp_path / "llama")
    rewrite(tmp_path / "llama", lm_head__weight=None)
    target = target_folder(tmp_path / "t")
    with pytest.raises(DrafterError, match="Llama drafter would leave it random"):
        convert(tmp_path / "llama", "sglang", tmp_path / "no", target_path=target)


def test_a_folder_in_use_is_not_written_over(tmp_path: Path) -> None:
    source = folder_of(plain_spec(), tmp_path / "d")
    (tmp_path / "out").mkdir()
    convert(source, "vllm", tmp_path / "out")  # an empty one is free
    before = (tmp_path / "out" / "config.json").read_bytes()
    for _ in range(2):
        with pytest.raises(DrafterError, match="exists already"):
            convert(source, "vllm", tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_bytes() == before


def test_a_trainers_folder_of_speculators_0_3(tmp_path: Path) -> None:
    folder = as_old_trainer(folder_of(plain_spec(head_dim=16), tmp_path / "4"))
    seen = read_folder(folder)
    assert (seen.format, seen.convention) == ("speculators-0.3", "speculators-0.3")
    assert seen.ids is None and seen.num_aux == 3
    assert seen.spec.head_dim == 16  # by the tensors: the config leaves it out
    with pytest.raises(DrafterError, match="--layer-ids"):
        convert(folder, "vllm", tmp_path / "out")
    made = convert(folder, "vllm", tmp_path / "out", stated=Stated(layers=(2, 4, 5)))
    assert made.written_ids == [3, 5, 6]  # the outputs of layers 2, 4 and 5
    assert any("optimizer_state_dict.pt" in note for note in made.notes)
    with pytest.raises(DrafterError, match="but 4, out in it have"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ("version", "convention", "certain"),
    [
        ("0.3.0", "speculators-0.3", True),
        ("0.4.0.dev32", "speculators-0.3", True),
        ("0.5.0", "vllm", True),
        ("0.9.0", "vllm", True),
        (None, "speculators-0.3", False),
    ],
)
def test_the_version_says_how_layers_were_counted(
    version: str | None, convention: str, certain: bool, tmp_path: Path
) -> None:
    folder = as_old_trainer(folder_of(plain_spec(), tmp_path / "d"))
    edit(folder, speculators_version=version, eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    seen = read_folder(folder)
    assert (seen.convention, seen.certain) == (convention, certain)
    assert seen.spec.aux_layers == ((2, 4, 5) if convention == "vllm" else (3, 5, 6))
    assert read_folder(folder, stated=Stated(ids="hf")).spec.aux_layers == (2, 4, 5)


def unmarked(tmp_path: Path, ids: list[int], *, midlayer: bool, **changes: Any) -> Path:
    """A folder as others write it, without our word on how its layers are counted."""
    folder = folder_of(plain_spec(), tmp_path / "d")
    edit(
        folder,
        "drafter_format",
        eagle_config={"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True},
        **changes,
    )
    if midlayer:
        renamed(folder, "layers.0.", "midlayer.")
    return folder


@pytest.mark.parametrize(
    ("ids", "midlayer", "architecture", "indices", "said"),
    [
        ([2, 4, 5], False, None, (2, 4, 5), "written for vLLM"),
        ([1, 3, 4], True, None, (2, 4, 5), "begins with 1"),
        ([2, 4, 5], True, None, (3, 5, 6), "target unknown"),
        ([2, 4, 5], True, "LlamaForCausalLM", (3, 5, 6), "written for SGLang"),
        ([2, 4, 5], True, "DeepseekV3ForCausalLM", (2, 4, 5), "deepseek target"),
    ],
)
def test_what_is_assumed_is_said(
    ids: list[int],
    midlayer: bool,
    architecture: str | None,
    indices: tuple[int, ...],
    said: str,
    tmp_path: Path,
) -> None:
    folder = unmarked(tmp_path, ids, midlayer=midlayer)
    place = None
    if architecture:
        place = target_folder(tmp_path / "t", architectures=[architecture])
    seen = read_folder(folder, read_target(place) if place else None)
    assert seen.spec.aux_layers == indices
    assert checkpoint.load_spec(folder, place).aux_layers == indices
    assert not seen.certain and said in seen.why


def test_ids_edited_by_hand_are_not_vouched_for(tmp_path: Path) -> None:
    folder = folder_of(plain_spec(), tmp_path / "d")
    assert read_folder(folder).certain
    edit(folder, eagle_config={"eagle_aux_hidden_state_layer_ids": [3, 4, 5]})
    seen = read_folder(folder)
    assert not seen.certain and seen.spec.aux_layers == (3, 4, 5)


def test_specforges_norm_output_is_another_switch(tmp_path: Path) -> None:
    folder = unmarked(tmp_path, [1, 3, 4], midlayer=True, norm_output=True)
    assert read_folder(folder).spec.norm_output is True
    assert read_folder(folder, stated=Stated(ids="specforge")).spec.norm_output is False
    edit(folder, norm_output=False)
    with pytest.raises(DrafterError, match="no engine has that"):
        read_folder(folder, stated=Stated(ids="specforge"))


def test_a_missing_norm_before_residual_is_said(tmp_path: Path) -> None:
    target = target_folder(tmp_path / "t")
    source = folder_of(plain_spec(), tmp_path / "d")
    convert(source, "speculators", tmp_path / "s", target_path=target)
    edit(tmp_path / "s", "norm_before_residual")
    seen = read_folder(tmp_path / "s")
    assert seen.spec.norm_before_residual is False and "vLLM takes True" in seen.notes[0]
    edit(source, "norm_before_residual")
    assert read_folder(source).notes == ()  # flat: every reader takes False


def test_the_older_names_of_fc_norm(tmp_path: Path) -> None:
    folder = folder_of(plain_spec(fc_norm=True), tmp_path / "d")
    for number, older in enumerate(("low", "mid", "high")):
        renamed(folder, f"fc_norm.{number}.", f"aux_norm_{older}.")
    edit(folder, "fc_norm", use_aux_norm=True)
    assert read_folder(folder).spec.fc_norm is True
    assert checkpoint.load(folder).fc_norm is not None
    convert(folder, "vllm", tmp_path / "out")
    assert "fc_norm.2.weight" in tensors_of(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["fc_norm"] is True and "use_aux_norm" not in config


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"logit_scale": 2.0}, "logit_scale"),
        ({"num_hidden_layers": 2}, "one layer"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"layer_types": ["sliding_attention"]}, "sliding window"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "no EAGLE-3 drafter"),
        ({"hidden_size": -3}, "hidden_size is -3"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"rope_theta": "x"}, "float"),
        ({"rope_theta": 0}, "rope_theta is 0, not a positive number"),
        ({"rope_scaling": "x"}, "rope_scaling is 'x', not an object"),
        ({"rope_parameters": {"rope_theta": -1}}, r"rope_parameters\.rope_theta is -1, not a pos"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps: could not convert"),
        ({"rms_norm_eps": [1]}, "rms_norm_eps: "),
        ({"eagle_aux_hidden_state_layer_ids": [2, "x"]}, "not a list of layer numbers"),
        ({"eagle_aux_hidden_state_layer_ids": [-2]}, "not a list of layer numbers"),
    ],
)
def test_what_has_no_place_in_the_description_is_refused(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = folder_of(plain_spec(), tmp_path / "d")
    edit(folder, **changes)
    with pytest.raises(DrafterError, match=said):
        read_folder(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"speculators_model_type": "dflash"}, "only eagle3"),
        ({"transformer_layer_config": {"model_type": "qwen3"}}, "qwen3"),
        ({"transformer_layer_config": None}, "transformer_layer_config"),
    ],
)
def test_speculators_of_other_kinds_are_refused(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = as_old_trainer(folder_of(plain_spec(), tmp_path / "d"))
    edit(folder, **changes)
    with pytest.raises(DrafterError, match=said):
        read_folder(folder)
