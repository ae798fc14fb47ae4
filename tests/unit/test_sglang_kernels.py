"""The pure-torch `sgl_kernel` module, function by function, against plain loops."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "engines" / "sglang_cpu"))
sgl_kernel = pytest.importorskip("sgl_kernel")

POOL = 24
ROWS = 6


def _table(seed: int = 0) -> torch.Tensor:
    """A slot table in which every slot occurs once, so that a wrong read shows."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(ROWS * POOL, generator=generator) + 1
    return slots.view(ROWS, POOL).to(torch.int32)


@st.composite
def runs(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Distinct table rows with a half-open run of columns each, empty runs among them."""
    rows = draw(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=ROWS, unique=True))
    starts = [draw(st.integers(0, POOL)) for _ in rows]
    ends = [draw(st.integers(start, POOL)) for start in starts]
    return torch.tensor(rows), torch.tensor(starts), torch.tensor(ends)


@given(runs())
@settings(deadline=None)
def test_assign_req_to_token_pool_scatters_runs(batch: tuple[torch.Tensor, ...]) -> None:
    rows, starts, ends = batch
    table = _table()
    expected = table.clone()
    new_slots = torch.arange(1000, 1000 + int((ends - starts).sum()))
    taken = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        for column in range(start, end):
            expected[row, column] = new_slots[taken]
            taken += 1
    sgl_kernel.assign_req_to_token_pool_cpu(rows, table, starts, ends, new_slots, POOL)
    assert torch.equal(table, expected)


@given(runs())
@settings(deadline=None)
def test_assign_extend_cache_locs_gathers_runs(batch: tuple[torch.Tensor, ...]) -> None:
    rows, starts, ends = batch
    table = _table()
    expected = [
        int(table[row, column])
        for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
        for column in range(start, end)
    ]
    out = torch.full((len(expected) + 2,), -7)
    sgl_kernel.assign_extend_cache_locs_cpu(rows, table, starts.int(), ends.int(), out, POOL)
    assert out.tolist() == [*expected, -7, -7]


@pytest.mark.parametrize(("topk", "steps"), [(1, 3), (2, 3), (4, 1)])
def test_assign_draft_cache_locs_reads_from_each_sequence_end(topk: int, steps: int) -> None:
    table, rows, lengths = _table(), torch.tensor([4, 0, 2]), torch.tensor([3, 0, 9])
    out = torch.empty(3 * topk * steps, dtype=torch.int64)
    sgl_kernel.assign_draft_cache_locs_contiguous_cpu(rows, table, lengths, out, POOL, topk, steps)
    expected = [
        int(table[row, length + offset])
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True)
        for offset in range(topk * steps)
    ]
    assert out.tolist() == expected


@pytest.mark.parametrize("topk", [1, 3])
def test_draft_metadata_agrees_with_the_slots_the_draft_writes(topk: int) -> None:
    """Row i * topk + b is the prefix, then the slots that branch b's steps write."""
    steps = 3
    table, rows, lengths = _table(), torch.tensor([5, 1]), torch.tensor([2, 11])
    written = torch.empty(2 * topk * steps, dtype=torch.int64)
    sgl_kernel.assign_draft_cache_locs_contiguous_cpu(
        rows, table, lengths, written, POOL, topk, steps
    )
    written = written.view(2, topk, steps)
    draft = sgl_kernel.build_draft_decode_metadata_cpu(table, rows, lengths, topk, steps, POOL)
    assert draft.shape[0] == 2 * topk and draft.dtype == table.dtype
    for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        for branch in range(topk):
            line = draft[i * topk + branch].tolist()
            assert line[:length] == table[row, :length].tolist()
            assert line[length : length + steps] == written[i, branch].tolist()


def test_copy_all_layer_kv_cache_reads_all_rows_before_writing() -> None:
    buffers = [torch.randn(10, 2, 3), torch.randn(10, 5, dtype=torch.float64)]
    expected = [buffer.clone() for buffer in buffers]
    target, source = torch.tensor([1, 2, 3]), torch.tensor([2, 3, 9])
    for buffer in expected:
        buffer[target] = buffer[source].clone()
    pointers = torch.tensor([buffer.data_ptr() for buffer in buffers])
    strides = torch.tensor([buffer[0].numel() * buffer.element_size() for buffer in buffers])
    sgl_kernel.copy_all_layer_kv_cache_cpu(pointers, strides, target, source)
    assert all(torch.equal(a, b) for a, b in zip(buffers, expected, strict=True))


def test_copy_of_nothing_touches_nothing() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    sgl_kernel.copy_all_layer_kv_cache_cpu(torch.tensor([0]), torch.tensor([8]), empty, empty)


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_rotate_shifts_each_segment_and_appends_the_new_token(shape: tuple[int, ...]) -> None:
    ids = torch.tensor([1, 2, 3, 10, 99, 20, 21])
    starts, lengths = torch.tensor([0, 3, 4, 5]), torch.tensor([3, 1, 0, 2])
    new = torch.tensor([4, 11, 0, 22]).view(shape)
    sgl_kernel.rotate_input_ids_cpu(ids, starts, lengths, new)
    assert ids.tolist() == [2, 3, 4, 11, 99, 21, 22]


def test_rotate_writes_at_the_selected_place_and_keeps_the_last() -> None:
    ids = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8])
    starts, lengths = torch.tensor([0, 4]), torch.tensor([4, 4])
    sgl_kernel.rotate_input_ids_cpu(
        ids, starts, lengths, torch.tensor([50, 60]), torch.tensor([1, 7])
    )
    assert ids.tolist() == [2, 50, 4, 4, 6, 7, 8, 60]


def test_bonus_token_is_the_last_accepted() -> None:
    tokens = torch.arange(12, dtype=torch.int32)
    bonus = torch.full((3,), -1, dtype=torch.int64)
    sgl_kernel.fill_bonus_tokens_cpu(tokens, torch.tensor([1, 4, 2], dtype=torch.int32), bonus, 4)
    assert bonus.tolist() == [0, 7, 9]


def test_accepted_slots_are_packed_to_the_front() -> None:
    index = torch.tensor([[0, 2, -1], [4, -1, -1]], dtype=torch.int32)
    slots = torch.tensor([100, 101, 102, 103, 104, 105])
    out = torch.zeros(6, dtype=torch.int64)
    sgl_kernel.fill_accept_out_cache_loc_cpu(index, slots, out)
    assert out.tolist() == [100, 102, 104, 0, 0, 0]


# --- the draft tree ---------------------------------------------------------------------------


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int], int, int]:
    """A draft as SGLang makes it: (parent_list, selected candidates, topk, steps).

    Level 0 has topk candidates; each later level expands topk nodes of the level before into
    topk candidates each. Group g's entry in `parent_list` is the candidate it hangs off.
    """
    topk, steps = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    groups, level = [-1], list(range(topk))
    candidates, parent_of = list(range(topk)), dict.fromkeys(range(topk), None)
    for _ in range(1, steps):
        expanded = draw(st.permutations(level).map(lambda p: sorted(p[:topk])))
        fresh = []
        for parent in expanded:
            groups.append(parent)
            base = (len(groups) - 1) * topk
            for candidate in range(base, base + topk):
                parent_of[candidate] = parent
                fresh.append(candidate)
        candidates, level = candidates + fresh, fresh
    chosen: list[int] = []
    for candidate in candidates:  # a node is chosen only where its parent was
        parent = parent_of[candidate]
        if (parent is None or parent in chosen) and (not chosen or draw(st.booleans())):
            chosen.append(candidate)
    return groups, chosen, topk, steps


def _paths(groups: list[int], chosen: list[int], topk: int) -> list[list[int]]:
    """Every node's path of nodes from the root, itself last."""
    paths = [[0]]
    for node, candidate in enumerate(chosen, start=1):
        group = candidate // topk
        parent = 0 if group == 0 else chosen.index(groups[group]) + 1
        paths.append([*paths[parent], node])
    return paths


@given(trees(), st.integers(0, 1), st.integers(0, 5))
@settings(deadline=None)
def test_tree_links_positions_and_masks(
    tree: tuple[list[int], list[int], int, int], mode: int, length: int
) -> None:
    groups, chosen, topk, steps = tree
    nodes, lengths = len(chosen) + 1, [length, length + 2]
    width = [nodes + (n if mode == 0 else 0) for n in lengths]
    mask = torch.ones(nodes * sum(width), dtype=torch.bool)
    positions = torch.empty(2 * nodes, dtype=torch.int64)
    index, child, sibling = torch.full((3, 2, nodes), -1)
    sgl_kernel.build_tree_kernel_efficient_cpu(
        torch.tensor([groups, groups]),
        torch.tensor([chosen, chosen]),
        torch.tensor(lengths),
        mask,
        positions,
        index,
        child,
        sibling,
        topk,
        steps,
        nodes,
        mode,
    )
    paths = _paths(groups, chosen, topk)
    assert index.tolist() == [list(range(nodes)), list(range(nodes, 2 * nodes))]
    start = 0
    for i in range(2):
        assert positions.view(2, nodes)[i].tolist() == [lengths[i] + len(p) - 1 for p in paths]
        for parent in range(nodes):
            children, node = [], int(child[i, parent])
            while node != -1:
                children.append(node)
                node = int(sibling[i, node])
            assert children == [n for n in range(1, nodes) if paths[n][-2] == parent]
        block = mask[start : start + nodes * width[i]].view(nodes, width[i])
        start += nodes * width[i]
        assert block[:, : width[i] - nodes].all()
        for node in range(nodes):
            seen = block[node, width[i] - nodes :].nonzero().flatten().tolist()
            assert seen == sorted(paths[node])


def test_packed_tree_mask_is_refused() -> None:
    blank = torch.empty(0)
    with pytest.raises(NotImplementedError, match="mask mode 2"):
        sgl_kernel.build_tree_kernel_efficient_cpu(
            blank, blank, blank, blank, blank, blank, blank, blank, 1, 1, 2, 2
        )


@given(trees(), st.data())
@settings(deadline=None)
def test_greedy_verification_follows_the_targets_choice(
    tree: tuple[list[int], list[int], int, int], data: st.DataObject
) -> None:
    groups, chosen, topk, steps = tree
    nodes = len(chosen) + 1
    tokens = torch.tensor(
        [data.draw(st.lists(st.integers(0, 2), min_size=nodes, max_size=nodes)) for _ in range(2)]
    )
    target = torch.tensor(
        [data.draw(st.lists(st.integers(0, 2), min_size=nodes, max_size=nodes)) for _ in range(2)]
    )
    depth = data.draw(st.integers(1, steps + 1))
    index, child, sibling = torch.full((3, 2, nodes), -1)
    scratch = torch.empty(2 * nodes, dtype=torch.int64), torch.empty(2 * nodes * nodes)
    sgl_kernel.build_tree_kernel_efficient_cpu(
        torch.tensor([groups] * 2),
        torch.tensor([chosen] * 2),
        torch.zeros(2, dtype=torch.int64),
        scratch[1].bool(),
        scratch[0],
        index,
        child,
        sibling,
        topk,
        steps,
        nodes,
        1,
    )
    predicts = torch.full((2 * nodes,), -9, dtype=torch.int32)
    accepted = torch.full((2, depth), -1, dtype=torch.int32)
    count = torch.empty(2, dtype=torch.int32)
    sgl_kernel.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accepted,
        accept_token_num=count,
        candidates=tokens,
        retrive_index=index,
        retrive_next_token=child,
        retrive_next_sibling=sibling,
        target_predict=target,
    )
    paths = _paths(groups, chosen, topk)
    for i in range(2):
        walked = [0]
        while len(walked) < depth:
            wanted = int(target[i, walked[-1]])
            step = [
                n for n in range(1, nodes) if paths[n][-2] == walked[-1] and tokens[i, n] == wanted
            ]
            if not step:
                break
            walked.append(step[0])
        assert int(count[i]) == len(walked) - 1
        assert accepted[i].tolist() == [
            *(i * nodes + n for n in walked),
            *[-1] * (depth - len(walked)),
        ]
        row = predicts.view(2, nodes)[i]
        assert [int(row[n]) for n in walked] == [int(target[i, n]) for n in walked]
        assert all(int(row[n]) == -9 for n in range(nodes) if n not in walked)


# --- attention --------------------------------------------------------------------------------

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
    table, rows, lengths = _table(), torch.tensor([3, 0, 5]), torch.tensor([1, 7, 20])
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
        _table(),
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
        slots = _table()[i, :length].long()
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
        slots = _table()[i, : lengths[i]].long()
        visible = [[*range(prefixes[i]), *(prefixes[i] + n for n in nodes)] for nodes in seen]
        span = slice(3 * i, 3 * i + 3)
        expected = _naive(
            query[span], k_buffer[slots], v_buffer[slots], visible, scale=query.shape[-1] ** -0.5
        )
        torch.testing.assert_close(out[span].double(), expected, atol=1e-5, rtol=1e-5)


def test_extend_not_causal_sees_everything() -> None:
    out, query = _extend("mha", [3, 6], [3, 3], causal=False)
    k_buffer, v_buffer = _cache("mha")
    slots = _table()[1, :6].long()
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
    table, rows, lengths = _table(), torch.tensor([1]), torch.tensor([9])
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


def test_native_kernel_marker_is_absent() -> None:
    """SGLang takes this operator's presence for a native AMX build."""
    assert not hasattr(torch.ops.sgl_kernel, "convert_weight_packed")


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_cuda_calls_do_nothing_without_cuda() -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
