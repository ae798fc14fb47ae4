"""The pure-torch `sgl_kernel` module, function by function, against plain loops."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_slots import POOL, ROWS, slot_table

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "engines" / "sglang_cpu"))
sgl_kernel = pytest.importorskip("sgl_kernel")


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
    table = slot_table()
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
    table = slot_table()
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
    table, rows, lengths = slot_table(), torch.tensor([4, 0, 2]), torch.tensor([3, 0, 9])
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
    table, rows, lengths = slot_table(), torch.tensor([5, 1]), torch.tensor([2, 11])
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


def test_native_kernel_marker_is_absent() -> None:
    """SGLang takes this operator's presence for a native AMX build."""
    assert not hasattr(torch.ops.sgl_kernel, "convert_weight_packed")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_calls_do_nothing_without_cuda() -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
