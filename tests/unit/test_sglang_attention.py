"""The attention operators of the pure-torch `sgl_kernel` module against plain loops."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from sglang_slots import POOL, ROWS, slot_table

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "engines" / "sglang_cpu"))
sgl_kernel = pytest.importorskip("sgl_kernel")

HEAD_SHAPES = {  # heads, kv heads, key width, value width
    "mha": (4, 4, 16, 16),
    "gqa": (6, 2, 16, 16),
    "mla": (4, 1, 576, 512),
}


def _naive(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: list[list[int]],
    *,
    scale: float,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """query [T, heads, dk], keys [L, kv, dk], one list of visible keys a token, in float64."""
    heads, group = query.shape[1], query.shape[1] // keys.shape[1]
    out = torch.empty(*query.shape[:2], values.shape[-1], dtype=torch.float64)
    for t in range(query.shape[0]):
        for head in range(heads):
            k = keys[visible[t], head // group].double()
            score = (k @ query[t, head].double()) * scale
            if cap > 0:
                score = cap * torch.tanh(score / cap)
            weight = score.exp()
            rest = 0.0 if sinks is None else float(sinks[head].double().exp())
            weight = weight / (weight.sum() + rest)
            out[t, head] = weight @ values[visible[t], head // group].double()
    return out


def _cache(kind: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    _, kv_heads, dk, dv = HEAD_SHAPES[kind]
    keys = torch.randn(ROWS * POOL + 1, kv_heads, dk)
    if kind == "mla":
        return keys, keys[..., :dv]
    return keys, torch.randn(ROWS * POOL + 1, kv_heads, dv)


@pytest.mark.parametrize("kind", HEAD_SHAPES)
@pytest.mark.parametrize("options", [{}, {"cap": 3.0}, {"window": 4}, {"sinks": True}])
def test_decode_attention(kind: str, options: dict[str, float]) -> None:
    heads, kv_heads, dk, dv = HEAD_SHAPES[kind]
    k_buffer, v_buffer = _cache(kind)
    table, rows, lengths = slot_table(), torch.tensor([3, 0, 5]), torch.tensor([1, 7, 20])
    query, key = torch.randn(3, heads, dk), torch.randn(3, kv_heads, dk)
    value = key[..., :dv] if kind == "mla" else torch.randn(3, kv_heads, dv)
    loc = table[rows, lengths - 1].long()
    scale, cap, window = dk**-0.5, options.get("cap", 0.0), int(options.get("window", 0))
    sinks = torch.randn(heads) if options.get("sinks") else None
    out = torch.empty(3, heads, dv)
    torch.ops.sgl_kernel.decode_attention_cpu(
        query,
        k_buffer,
        v_buffer,
        1.0,
        1.0,
        out,
        key,
        value,
        loc,
        torch.empty(3, heads, 8, dv + 1),
        table,
        rows,
        lengths,
        scale,
        cap,
        False,
        window,
        None,
        sinks,
    )
    assert torch.equal(k_buffer[loc], key) and torch.equal(v_buffer[loc], value)
    for i, length in enumerate(lengths.tolist()):
        slots = table[rows[i], :length].long()
        first = max(0, length - window) if window else 0
        expected = _naive(
            query[i : i + 1],
            k_buffer[slots],
            v_buffer[slots],
            [list(range(first, length))],
            scale=scale,
            cap=cap,
            sinks=sinks,
        )
        torch.testing.assert_close(out[i : i + 1].double(), expected, atol=1e-5, rtol=1e-5)


def _extend(
    kind: str,
    lengths: list[int],
    new: list[int],
    *,
    k_extend: torch.Tensor | None = None,
    v_extend: torch.Tensor | None = None,
    tree: torch.Tensor | None = None,
    causal: bool = True,
    window: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the operator on a fresh cache; return its output and the query."""
    heads, _, dk, dv = HEAD_SHAPES[kind]
    k_buffer, v_buffer = _cache(kind)
    if k_extend is not None:
        dk, dv = k_extend.shape[-1], v_extend.shape[-1]
    query = torch.randn(sum(new), heads, dk)
    out = torch.empty(sum(new), heads, dv)
    extend = torch.tensor(new, dtype=torch.int32)
    torch.ops.sgl_kernel.extend_attention_cpu(
        query,
        k_extend,
        v_extend,
        out,
        k_buffer,
        v_buffer,
        1.0,
        1.0,
        slot_table(),
        torch.arange(len(new)),
        torch.tensor(lengths),
        extend,
        (extend.cumsum(0) - extend).int(),
        max(new),
        dk**-0.5,
        0.0,
        False,
        window,
        None,
        None,
        tree,
        causal,
    )
    return out, query


@pytest.mark.parametrize("kind", HEAD_SHAPES)
@pytest.mark.parametrize("new", [[4, 4, 4], [3, 1, 5], [5, 0, 2]])
@pytest.mark.parametrize("window", [0, 3])
def test_extend_attention_is_causal_over_prefix_and_new_tokens(
    kind: str, new: list[int], window: int
) -> None:
    lengths = [n + prefix for n, prefix in zip(new, [0, 6, 11], strict=True)]
    out, query = _extend(kind, lengths, new, window=window)
    k_buffer, v_buffer = _cache(kind)
    start = 0
    for i, (length, count) in enumerate(zip(lengths, new, strict=True)):
        slots = slot_table()[i, :length].long()
        ends = [length - count + t + 1 for t in range(count)]
        expected = _naive(
            query[start : start + count],
            k_buffer[slots],
            v_buffer[slots],
            [list(range(max(0, end - window) if window else 0, end)) for end in ends],
            scale=query.shape[-1] ** -0.5,
        )
        got = out[start : start + count].double()
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        start += count


@pytest.mark.parametrize("new", [[4, 4], [2, 5]])
def test_extend_without_prefix_attends_over_the_given_keys(new: list[int]) -> None:
    """DeepSeek's prefill hands multi-head keys while the cache holds latent ones."""
    k, v = torch.randn(sum(new), 4, 24), torch.randn(sum(new), 4, 16)
    out, query = _extend("mla", new, new, k_extend=k, v_extend=v)
    start = 0
    for count in new:
        span = slice(start, start + count)
        seen = [list(range(t + 1)) for t in range(count)]
        expected = _naive(query[span], k[span], v[span], seen, scale=24**-0.5)
        torch.testing.assert_close(out[span].double(), expected, atol=1e-5, rtol=1e-5)
        start += count


def test_extend_with_a_tree_sees_the_prefix_and_the_ancestors() -> None:
    chain, fork = [[0], [0, 1], [0, 1, 2]], [[0], [0, 1], [0, 2]]
    tree = torch.zeros(2, 3, 3, dtype=torch.bool)
    for i, seen in enumerate([chain, fork]):
        for node, ancestors in enumerate(seen):
            tree[i, node, ancestors] = True
    lengths, prefixes = [5, 9], [2, 6]
    out, query = _extend("gqa", lengths, [3, 3], tree=tree.flatten())
    k_buffer, v_buffer = _cache("gqa")
    for i, seen in enumerate([chain, fork]):
        slots = slot_table()[i, : lengths[i]].long()
        visible = [[*range(prefixes[i]), *(prefixes[i] + n for n in nodes)] for nodes in seen]
        span = slice(3 * i, 3 * i + 3)
        expected = _naive(
            query[span], k_buffer[slots], v_buffer[slots], visible, scale=query.shape[-1] ** -0.5
        )
        torch.testing.assert_close(out[span].double(), expected, atol=1e-5, rtol=1e-5)


def test_extend_not_causal_sees_everything() -> None:
    out, query = _extend("mha", [3, 6], [3, 3], causal=False)
    k_buffer, v_buffer = _cache("mha")
    slots = slot_table()[1, :6].long()
    expected = _naive(
        query[3:], k_buffer[slots], v_buffer[slots], [list(range(6))] * 3, scale=16**-0.5
    )
    torch.testing.assert_close(out[3:].double(), expected, atol=1e-5, rtol=1e-5)


def test_extend_refuses_a_mask_of_another_size() -> None:
    with pytest.raises(ValueError, match="one square mask a request"):
        _extend("mha", [4, 4], [3, 3], tree=torch.ones(17, dtype=torch.bool))


def test_long_prefill_in_blocks_equals_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    whole, _ = _extend("gqa", [20], [15])
    monkeypatch.setattr(sgl_kernel.attention, "MAX_SCORES", 6 * 20 * 4)
    torch.manual_seed(1)
    blocks, _ = _extend("gqa", [20], [15])
    torch.testing.assert_close(whole, blocks)


def test_bfloat16_cache_and_scales() -> None:
    k_buffer, v_buffer = (buffer.bfloat16() for buffer in _cache("gqa"))
    table, rows, lengths = slot_table(), torch.tensor([1]), torch.tensor([9])
    query = torch.randn(1, 6, 16, dtype=torch.bfloat16)
    out = torch.empty_like(query)
    torch.ops.sgl_kernel.decode_attention_cpu(
        query,
        k_buffer,
        v_buffer,
        0.5,
        2.0,
        out,
        None,
        None,
        torch.tensor([3]),
        torch.empty(0),
        table,
        rows,
        lengths,
        0.25,
        0.0,
        False,
        0,
        None,
        None,
    )
    slots = table[1, :9].long()
    expected = _naive(
        query, k_buffer[slots] * 0.5, v_buffer[slots] * 2.0, [list(range(9))], scale=0.25
    )
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)
