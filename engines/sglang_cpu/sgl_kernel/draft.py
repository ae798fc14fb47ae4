"""Small index work around the draft model: its inputs, its slot table, what was accepted."""

from __future__ import annotations

import torch


def rotate_input_ids_cpu(
    input_ids: torch.Tensor,
    extend_start_loc: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    topk_index: torch.Tensor,
    select_index: torch.Tensor | None = None,
) -> None:
    """Shift each request's ids left by one and put its new token at the end, in place.

    EAGLE pairs the hidden state of position t with the token of t + 1. The new token goes to
    the segment's last place, or to `select_index[i]` of the flat ids where that is given; the
    last place then keeps its old id.

    input_ids [T]; extend_start_loc, extend_seq_lens [B]; topk_index [B] or [B, 1].
    """
    tokens = topk_index.reshape(-1)
    for i, (start, length) in enumerate(
        zip(extend_start_loc.tolist(), extend_seq_lens.tolist(), strict=True)
    ):
        if length <= 0:
            continue
        end = start + length
        input_ids[start : end - 1] = input_ids[start + 1 : end].clone()
        last = end - 1 if select_index is None else int(select_index[i])
        input_ids[last] = tokens[i]


def build_draft_decode_metadata_cpu(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> torch.Tensor:
    """The slot table the draft's decode steps attend over, one row a branch.

    Row i * topk + b: the request's seq_lens[i] committed slots, then the num_steps slots of
    branch b (columns seq_lens[i] + b * num_steps and on, see
    `assign_draft_cache_locs_contiguous_cpu`).

    req_to_token [requests, pool_len]; req_pool_indices, seq_lens [B]
    -> [B * topk, max(seq_lens) + num_steps], dtype of `req_to_token`; columns past a row's
    sequence and steps are unspecified slots that no step's sequence length reaches.
    """
    lengths = seq_lens.to(torch.int64)
    width = int(lengths.max()) + num_steps if lengths.numel() else num_steps
    rows = req_pool_indices.to(torch.int64)
    if topk == 1:
        return req_to_token[rows, :width]
    column = torch.arange(width)  # [W]
    branch = torch.arange(topk)[None, :, None]  # [1, topk, 1]
    drafted = column >= lengths[:, None, None]  # [B, 1, W]
    source = torch.where(drafted, column + branch * num_steps, column)  # [B, topk, W]
    source = source.clamp_(max=pool_len - 1)
    return req_to_token[rows[:, None, None], source].flatten(0, 1)


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_stride: int,
) -> None:
    """The last accepted token of each request, in place in `bonus_tokens` [B].

    accept_tokens [B * accept_stride] flat; accept_lens [B] counts the bonus token.
    """
    lengths = accept_lens.to(torch.int64)
    last = torch.arange(lengths.numel()) * accept_stride + lengths - 1
    bonus_tokens[: lengths.numel()] = accept_tokens.reshape(-1)[last].to(bonus_tokens.dtype)


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """Pack the slots of the accepted tokens to the front of `accept_out_cache_loc`, in place.

    accept_index [N]: index into `out_cache_loc`, -1 where nothing was accepted.
    """
    index = accept_index.reshape(-1)
    kept = index[index >= 0].to(torch.int64)
    accept_out_cache_loc[: kept.numel()] = out_cache_loc[kept].to(accept_out_cache_loc.dtype)
