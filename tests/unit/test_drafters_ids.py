"""Who counts layers how: each convention read and written, and each engine's capture."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters import ids
from drafters.ids import captured, family_of, from_index, to_index
from drafters.spec import DrafterError

LAYERS = 61
indices = st.sets(st.integers(0, LAYERS), min_size=1, max_size=5).map(lambda s: tuple(sorted(s)))
families = st.sampled_from(ids.FAMILIES)


@given(wanted=indices, convention=st.sampled_from(ids.CONVENTIONS), family=families)
def test_what_is_written_is_read_back(
    wanted: tuple[int, ...], convention: ids.Convention, family: ids.Family
) -> None:
    try:
        written = from_index(convention, wanted, family, LAYERS)
    except DrafterError as error:
        counts_outputs = convention in ("sglang", "speculators-0.3", "specforge")
        assert counts_outputs and wanted[0] <= 1, (wanted, str(error))
        return
    assert to_index(convention, written, family, LAYERS) == wanted


@given(written=indices, family=families)
def test_sglang_captures_by_its_own_rules(written: tuple[int, ...], family: ids.Family) -> None:
    """The rules of sglang 0.5.23, told once more: models/llama.py, deepseek_v2.py, gpt_oss.py."""
    given_ids = list(written)
    if family == "deepseek":
        expected = [i + 1 for i in given_ids] if given_ids[0] == 1 else given_ids
    elif family == "gpt-oss":
        expected = given_ids if max(given_ids) == LAYERS else [i + 1 for i in given_ids]
    else:
        expected = [i + 1 for i in given_ids]
    assert captured("sglang", given_ids, family, LAYERS) == tuple(expected)
    assert captured("vllm", given_ids, family, LAYERS) == written


@pytest.mark.parametrize("convention", ["speculators-0.3", "specforge"])
def test_the_output_of_a_layer_is_the_next_ones_input(convention: ids.Convention) -> None:
    assert to_index(convention, [2, 30, 58]) == (3, 31, 59)
    assert from_index(convention, [2, 30, 58]) == [1, 29, 57]
    with pytest.raises(DrafterError, match="index 0 is the embedding"):
        from_index(convention, [0, 2])


def test_without_ids_both_engines_take_their_default() -> None:
    for engine in ("vllm", "sglang"):
        assert captured(engine, None, "deepseek", 61) == (2, 30, 58)
        assert captured(engine, [], "llama", 32) == (2, 16, 29)
        assert captured(engine, None, "llama", None) is None


def test_where_the_target_is_unknown_sglang_is_understood_or_not() -> None:
    assert to_index("sglang", [1, 29, 57]) == (2, 30, 58)  # alike on every target
    with pytest.raises(DrafterError, match="--target"):
        to_index("sglang", [2, 30, 58])
    assert from_index("sglang", [2, 30, 58]) == [1, 29, 57]
    with pytest.raises(DrafterError, match="--target"):
        from_index("sglang", [3, 31, 59])


@pytest.mark.parametrize(
    ("architecture", "family"),
    [
        ("KimiK25ForConditionalGeneration", "deepseek"),
        ("DeepseekV3ForCausalLM", "deepseek"),
        ("Glm4MoeLiteForCausalLM", "deepseek"),
        ("Glm4MoeForCausalLM", "llama"),
        ("GptOssForCausalLM", "gpt-oss"),
        ("Qwen3MoeForCausalLM", "llama"),
        ("", "llama"),
    ],
)
def test_families(architecture: str, family: str) -> None:
    assert family_of(architecture) == family


@pytest.mark.parametrize(
    ("engine", "wanted", "family", "said"),
    [
        ("vllm", (5, 2), "llama", "ascending order"),
        ("sglang", (2, 2), "llama", "each once"),
        ("vllm", (0, 2), "deepseek", "embedding"),
        ("sglang", (2, 61), "llama", "no index 61"),
        ("sglang", (2, 61), "gpt-oss", None),
        ("sglang", (1, 2, 3), "deepseek", "begins with 1"),
        ("sglang", (1, 2, 3), "llama", None),
        ("sglang", (0, 2), "llama", "index 0 is the embedding"),
        ("sglang", (0, 2), "deepseek", None),
        ("vllm", (2, 61), "deepseek", None),
        ("vllm", (0, 2), "llama", None),
    ],
)
def test_what_no_ids_can_express(
    engine: str, wanted: tuple[int, ...], family: ids.Family, said: str | None
) -> None:
    problem = ids.why_not_captured(engine, wanted, family, 61)
    assert (problem is None) if said is None else said in str(problem)
