"""The EAGLE-3 draft model: layers against transformers, shapes, recurrence and vocabulary."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.eagle3 import Eagle3Drafter
from drafters.layers import RMSNorm, apply_rope, mla_softmax_scale, rope_frequencies, rope_table
from drafters.spec import DrafterError, DrafterSpec, MlaDims, RopeSpec

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def make_spec(kind: str = "llama", **changes: object) -> DrafterSpec:
    fields: dict[str, object] = {
        "kind": kind,
        "hidden_size": 32,
        "target_hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 4 if kind == "mla" else 2,
        "head_dim": 8,
        "vocab_size": 50,
        "draft_vocab_size": 50,
        "aux_layers": (2, 4, 5),
        "max_position_embeddings": 64,
        "rope": RopeSpec(theta=10000.0, scaling=YARN if kind == "mla" else None),
    }
    if kind == "mla":
        fields["mla"] = MlaDims(
            q_lora_rank=12, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8
        )
    return DrafterSpec(**{**fields, **changes})  # type: ignore[arg-type]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of one sequence [T, heads, dim], written out."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    mask = torch.ones(q.shape[0], k.shape[0]).tril().bool()
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


@pytest.mark.parametrize("scaling", [None, YARN, LLAMA3], ids=["default", "yarn", "llama3"])
def test_frequencies_equal_transformers(scaling: dict[str, object] | None) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {**(scaling or {"rope_type": "default"}), "rope_theta": 50000.0}
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=1024,
        rope_parameters=parameters,
    )
    theirs = LlamaRotaryEmbedding(config)
    inv_freq, magnitude = rope_frequencies(32, 50000.0, scaling)
    torch.testing.assert_close(inv_freq, theirs.inv_freq, rtol=1e-6, atol=0)
    assert magnitude == pytest.approx(theirs.attention_scaling)


def test_unknown_rope_type_is_refused() -> None:
    with pytest.raises(ValueError, match="known: default, linear, llama3, yarn"):
        rope_frequencies(8, 10000.0, {"rope_type": "spiral", "factor": 2})


@given(shift=st.integers(0, 20), interleaved=st.booleans())
@settings(max_examples=25, deadline=None)
def test_rope_scores_depend_on_distance_alone(shift: int, interleaved: bool) -> None:
    cos, sin = rope_table(8, 10000.0, None, 64)
    generator = torch.Generator().manual_seed(shift)
    q, k = torch.randn(2, 1, 1, 8, generator=generator)
    scores = [
        (
            apply_rope(q, cos[i + 5 : i + 6], sin[i + 5 : i + 6], interleaved=interleaved)
            * apply_rope(k, cos[i : i + 1], sin[i : i + 1], interleaved=interleaved)
        ).sum()
        for i in (0, shift)
    ]
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-4, atol=1e-4)


def test_rms_norm_keeps_the_type_and_scales_to_one() -> None:
    norm = RMSNorm(16)
    x = torch.randn(3, 16) * 7
    assert norm(x).pow(2).mean(-1).sqrt().tolist() == pytest.approx([1, 1, 1], abs=1e-3)
    assert norm(x.bfloat16()).dtype == torch.bfloat16


def test_mla_scale_carries_yarn_magnitude() -> None:
    assert mla_softmax_scale(64, None) == pytest.approx(1 / 8)
    assert mla_softmax_scale(64, YARN) == pytest.approx((0.1 * 1.3862944 + 1) ** 2 / 8)


@pytest.mark.parametrize("kind", ["llama", "mla"])
def test_incremental_attention_equals_the_whole(kind: str) -> None:
    """Keys of earlier positions do not change when later tokens come: a cache is allowed."""
    torch.manual_seed(0)
    drafter = Eagle3Drafter(make_spec(kind)).eval()
    ids, aux = torch.randint(50, (6,)), torch.randn(6, 96)
    q, k, v, residual = drafter.project(drafter.embed(ids), drafter.fuse(aux), torch.arange(6))
    whole, normed = drafter.finish(attend(q, k, v, drafter.scale), residual)
    q1, k1, v1, r1 = drafter.project(
        drafter.embed(ids[5:]), drafter.fuse(aux[5:]), torch.arange(5, 6)
    )
    torch.testing.assert_close(k1, k[5:])
    torch.testing.assert_close(v1, v[5:])
    scores = torch.einsum("qhd,khd->hqk", q1, k.repeat_interleave(q.shape[1] // k.shape[1], 1)).mul(
        drafter.scale
    )
    values = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    last, _ = drafter.finish(attended, r1)
    torch.testing.assert_close(last, whole[5:])
    assert drafter.logits(normed).shape == (6, 50)


def test_norm_flags_change_what_they_should() -> None:
    """norm_output moves the recurrence only; norm_before_residual moves both."""
    outputs = {}
    for name, flags in {
        "plain": {},
        "norm_output": {"norm_output": True},
        "norm_before_residual": {"norm_before_residual": True},
    }.items():
        torch.manual_seed(1)
        drafter = Eagle3Drafter(make_spec(**flags)).eval()
        drafter.layer.hidden_norm.weight.data.fill_(1.5)
        h = drafter.fuse(torch.randn(4, 96, generator=torch.Generator().manual_seed(2)))
        ids = torch.arange(4)
        q, k, v, residual = drafter.project(drafter.embed(ids), h, ids)
        outputs[name] = drafter.finish(attend(q, k, v, drafter.scale), residual)
    plain, output, residual_first = outputs.values()
    assert torch.equal(plain[1], output[1]) and not torch.allclose(plain[0], output[0])
    assert torch.equal(output[0], output[1])
    assert not torch.allclose(plain[1], residual_first[1])


def test_fc_norm_and_norm_before_fc() -> None:
    aux = torch.randn(2, 96)
    per_layer = Eagle3Drafter(make_spec(fc_norm=True))
    # each layer's state is normed alone: scaling one of them changes nothing
    scaled = torch.cat((aux[:, :32] * 5, aux[:, 32:]), -1)
    torch.testing.assert_close(per_layer.fuse(aux), per_layer.fuse(scaled), rtol=1e-4, atol=1e-5)
    together = Eagle3Drafter(make_spec(norm_before_fc=True))
    torch.testing.assert_close(together.fuse(aux), together.fuse(aux * 5), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(together.fuse(aux), together.fuse(scaled), atol=1e-3)


@given(kept=st.sets(st.integers(0, 49), min_size=5, max_size=5))
@settings(max_examples=30, deadline=None)
def test_draft_vocabulary_maps_to_the_kept_ids(kept: set[int]) -> None:
    drafter = Eagle3Drafter(make_spec(draft_vocab_size=5))
    ids = torch.tensor(sorted(kept))
    drafter.set_vocabulary(ids)
    assert drafter.to_target(torch.arange(5)).tolist() == sorted(kept)
    assert drafter.t2d is not None and drafter.t2d.nonzero().flatten().tolist() == sorted(kept)


def test_contradicting_specs_are_refused() -> None:
    with pytest.raises(DrafterError, match="mla"):
        Eagle3Drafter(make_spec(kind="mla", mla=None))
    with pytest.raises(DrafterError, match="exclude each other"):
        Eagle3Drafter(make_spec(fc_norm=True, norm_before_fc=True))
    with pytest.raises(DrafterError, match="strictly increasing"):
        Eagle3Drafter(make_spec(draft_vocab_size=2)).set_vocabulary(torch.tensor([3, 3]))
