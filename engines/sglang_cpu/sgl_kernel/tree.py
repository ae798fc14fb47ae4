"""The draft tree: building it from the drafter's choices, and verifying it greedily.

A tree of `draft_token_num` nodes: node 0 is the last committed token, nodes 1.. are the chosen
draft tokens. Links are "first child" (`retrieve_next_token`) and "next sibling"
(`retrieve_next_sibling`), -1 where there is none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

FULL_MASK = 0
QLEN_ONLY = 1


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Fill the tree's tensors, in place (the link tensors arrive filled with -1).

    The drafter scored candidates level by level; candidate c belongs to group c // topk, group
    0 hangs off the root, and `parent_list[:, g]` is the candidate that group g hangs off.

    parent_list [B, groups] candidates; selected_index [B, N - 1] ascending candidates that
    became nodes 1..N-1; verified_seq_len [B] committed tokens; positions [B * N];
    retrieve_* [B, N]; `depth` is the most levels below the root. tree_mask, flat bool:
    `QLEN_ONLY` [B, N, N]; `FULL_MASK` per request [N, seq_len + N], prefix columns untouched.
    Raises NotImplementedError for a bit-packed mask.
    """
    if int(tree_mask_mode) not in (FULL_MASK, QLEN_ONLY):
        raise NotImplementedError(f"tree mask mode {tree_mask_mode} on the CPU")
    batch, nodes = verified_seq_len.numel(), draft_token_num
    retrieve_index.copy_(torch.arange(batch * nodes).view(batch, nodes))
    lengths = verified_seq_len.tolist()
    offset = 0
    for i, (groups, chosen) in enumerate(
        zip(parent_list.tolist(), selected_index.tolist(), strict=True)
    ):
        parents = _parents(groups, chosen, topk)
        first_child, next_sibling = _links(parents)
        retrieve_next_token[i] = torch.tensor(first_child)
        retrieve_next_sibling[i] = torch.tensor(next_sibling)
        visible, levels = _ancestry(parents, depth)
        positions[i * nodes : (i + 1) * nodes] = torch.tensor(levels) + lengths[i]
        width = nodes + (lengths[i] if int(tree_mask_mode) == FULL_MASK else 0)
        block = tree_mask[offset : offset + nodes * width].view(nodes, width)
        block[:, width - nodes :] = torch.tensor(visible, dtype=tree_mask.dtype)
        offset += nodes * width


def _parents(groups: Sequence[int], chosen: Sequence[int], topk: int) -> list[int | None]:
    """Every node's parent; None for the root and for a node whose parent was not chosen."""
    node_of = {candidate: node for node, candidate in reversed(list(enumerate(chosen, start=1)))}
    parents: list[int | None] = [None]
    for candidate in chosen:
        group = candidate // topk
        parents.append(0 if group == 0 else node_of.get(groups[group]))
    return parents


def _links(parents: Sequence[int | None]) -> tuple[list[int], list[int]]:
    """First child and next sibling of every node, children in ascending order."""
    first_child, next_sibling = [-1] * len(parents), [-1] * len(parents)
    for node in range(len(parents) - 1, 0, -1):
        parent = parents[node]
        if parent is not None:
            next_sibling[node] = first_child[parent]
            first_child[parent] = node
    return first_child, next_sibling


def _ancestry(parents: Sequence[int | None], depth: int) -> tuple[list[list[bool]], list[int]]:
    """Which nodes each node may attend to (the root, its ancestors, itself), and its level."""
    nodes = len(parents)
    visible, levels = [], []
    for node in range(nodes):
        row = [False] * nodes
        row[0] = True
        level, current = 0, node
        while current and level < depth:
            row[current] = True
            level += 1
            current = parents[current] or 0
        visible.append(row)
        levels.append(level)
    return visible, levels


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Walk each tree along the target's own choices. In place; keyword names are SGLang's.

    From the root: the target's token after the current node is looked for among the node's
    children; the walk ends where no child carries it. Along the path
    `predicts[node]` becomes the target's token there, so that at the end it holds the bonus
    token; `accept_index` [B, D] the path's nodes (flat indices, root first); `accept_token_num`
    [B] the draft tokens accepted, without the bonus.

    candidates, retrive_*, target_predict [B, N]; predicts [B * N].
    """
    tokens, targets = candidates.tolist(), target_predict.tolist()
    flat, child, sibling = (
        t.tolist() for t in (retrive_index, retrive_next_token, retrive_next_sibling)
    )
    limit = accept_index.shape[1]
    for i in range(len(tokens)):
        path = _accepted_path(tokens[i], targets[i], child[i], sibling[i], limit)
        where = [flat[i][node] for node in path]
        predicts[where] = torch.tensor([targets[i][node] for node in path], dtype=predicts.dtype)
        accept_index[i, : len(path)] = torch.tensor(where, dtype=accept_index.dtype)
        accept_token_num[i] = len(path) - 1


def _accepted_path(
    tokens: Sequence[int],
    targets: Sequence[int],
    child: Sequence[int],
    sibling: Sequence[int],
    limit: int,
) -> list[int]:
    """The nodes of one tree on the target's path, the root first, at most `limit` of them."""
    path = [0]
    while len(path) < limit:
        node = child[path[-1]]
        while node != -1 and tokens[node] != targets[path[-1]]:
            node = sibling[node]
        if node == -1:
            break
        path.append(node)
    return path
