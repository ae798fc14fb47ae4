"""Token-slot tables: which slot of the KV cache holds which position of which request.

`req_to_token` [requests, pool_len] int32 is SGLang's table: row = request, column = position,
value = slot of the KV cache. The functions gather from and scatter into runs of its columns; a
batch's runs lie one after another in the flat tensor of slots.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch


def _runs(starts: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every (owner, column) of the half-open runs [starts[i], ends[i]), owners in order.

    starts, ends [B] -> two int64 tensors [sum(ends - starts)].
    """
    starts = starts.to(torch.int64)
    lengths = ends.to(torch.int64) - starts
    owner = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    first = torch.cumsum(lengths, 0) - lengths
    column = torch.arange(owner.numel()) - first[owner] + starts[owner]
    return owner, column


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write newly allocated slots into the table.

    Columns [start_offset[i], end_offset[i]) of row req_pool_indices[i] take the next
    end - start values of `out_cache_loc`, requests in order. In place on `req_to_token`.

    req_pool_indices, start_offset, end_offset [B]; out_cache_loc [sum of lengths];
    `pool_len` is the table's width and is not needed here.
    """
    owner, column = _runs(start_offset, end_offset)
    rows = req_pool_indices.to(torch.int64)[owner]
    req_to_token[rows, column] = out_cache_loc[: owner.numel()].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Read runs of slots from the table: the inverse of `assign_req_to_token_pool_cpu`.

    Shapes as there; in place on `out_cache_loc`, whose entries past the runs stay as they are.
    """
    owner, column = _runs(start_offset, end_offset)
    rows = req_pool_indices.to(torch.int64)[owner]
    out_cache_loc[: owner.numel()] = req_to_token[rows, column].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Read the slots the draft will write: topk * num_steps columns from each sequence's end.

    req_pool_indices, seq_lens [B]; out_cache_loc [B * topk * num_steps], written in place,
    request by request.
    """
    width = topk * num_steps
    rows = req_pool_indices.to(torch.int64)[:, None]
    columns = seq_lens.to(torch.int64)[:, None] + torch.arange(width)  # [B, width]
    out_cache_loc.view(-1, width).copy_(req_to_token[rows, columns])


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Copy KV rows from slots `src_loc` to slots `tgt_loc` in every buffer.

    data_ptrs [buffers] addresses; strides [buffers] bytes a slot; tgt_loc, src_loc [N]. All rows
    are read before any is written, so the two may overlap.
    """
    if tgt_loc.numel() == 0:
        return
    source, target = src_loc.to(torch.int64).numpy(), tgt_loc.to(torch.int64).numpy()
    slots = int(max(source.max(), target.max())) + 1
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (slots * stride)).from_address(address)
        rows = np.frombuffer(memory, dtype=np.uint8).reshape(slots, stride)
        rows[target] = rows[source]
