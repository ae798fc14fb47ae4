"""Attention over the paged KV cache, as the torch operators SGLang's CPU backend calls.

Shapes: query [tokens, heads, dk]; cache buffers [slots, kv_heads, dk | dv]. Grouped-query
attention shares one KV head among heads / kv_heads queries; latent attention (MLA) is the case
kv_heads = 1 with dk = 576 and dv = 512, its value buffer a view of its key buffer. Scores and
softmax are computed in float32 whatever the cache's type.
"""

from __future__ import annotations

import torch

DECODE_SCHEMA = (
    "decode_attention_cpu(Tensor query, Tensor(a!) k_buffer, Tensor(b!) v_buffer, float k_scale, "
    "float v_scale, Tensor(c!) output, Tensor? key, Tensor? value, Tensor loc, "
    "Tensor attn_logits, Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, "
    "float sm_scale, float logit_cap, bool is_cross_attn, int sliding_window_size, "
    "Tensor? encoder_lens, Tensor? sinks) -> ()"
)
EXTEND_SCHEMA = (
    "extend_attention_cpu(Tensor q_extend, Tensor? k_extend, Tensor? v_extend, "
    "Tensor(a!) o_extend, Tensor k_buffer, Tensor v_buffer, float k_scale, float v_scale, "
    "Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, Tensor extend_seq_lens, "
    "Tensor extend_start_loc, int max_len_extend, float sm_scale, float logit_cap, "
    "bool is_cross_attn, int sliding_window_size, Tensor? encoder_lens, Tensor? sinks, "
    "Tensor? tree_mask, bool is_causal) -> ()"
)
# Scores of one block of queries at a time, so that a long prefill needs bounded memory.
MAX_SCORES = 1 << 25

_library: torch.library.Library | None = None


def register() -> None:
    """Define `torch.ops.sgl_kernel.{decode,extend}_attention_cpu` on the CPU key, once."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("sgl_kernel", "FRAGMENT")
    _library.define(DECODE_SCHEMA)
    _library.define(EXTEND_SCHEMA)
    _library.impl("decode_attention_cpu", decode_attention, "CPU")
    _library.impl("extend_attention_cpu", extend_attention, "CPU")


def decode_attention(
    query: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale: float,
    v_scale: float,
    output: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    loc: torch.Tensor,
    attn_logits: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window_size: int,
    encoder_lens: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    """One new token a request: store its key and value at `loc`, then attend over its cache.

    query [B, heads, dk]; key, value of the new tokens (None: already stored); loc [B]; seq_lens
    [B] counts the new token; output [B, heads, dv], in place. `attn_logits` is the native
    kernel's scratch space and is not used. `sliding_window_size` 0 means none. Raises
    NotImplementedError for cross-attention.
    """
    _refuse(is_cross_attn)
    if key is not None and value is not None:
        k_buffer[loc] = key.view(-1, *k_buffer.shape[1:]).to(k_buffer.dtype)
        if v_buffer.data_ptr() != k_buffer.data_ptr():
            v_buffer[loc] = value.view(-1, *v_buffer.shape[1:]).to(v_buffer.dtype)
    width = int(seq_lens.max())
    slots = req_to_token[req_pool_indices, :width]  # [B, L]
    mask = None
    if seq_lens.numel() > 1 or sliding_window_size > 0:
        mask = _causal_mask(seq_lens, 1, width, sliding_window_size)
    keys, values = _gather(k_buffer, v_buffer, slots, k_scale, v_scale)
    out = _attend(query[:, None], keys, values, mask, sm_scale, logit_cap, sinks)
    output.copy_(out[:, 0])


def extend_attention(
    q_extend: torch.Tensor,
    k_extend: torch.Tensor | None,
    v_extend: torch.Tensor | None,
    o_extend: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    extend_start_loc: torch.Tensor,
    max_len_extend: int,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window_size: int,
    encoder_lens: torch.Tensor | None,
    sinks: torch.Tensor | None,
    tree_mask: torch.Tensor | None,
    is_causal: bool,
) -> None:
    """Several new tokens a request (prefill, verification, the draft's catching up).

    q_extend [T, heads, dk], request i's tokens at extend_start_loc[i] .. + extend_seq_lens[i];
    seq_lens [B] counts them; o_extend [T, heads, dv], in place. A request without a committed
    prefix attends over `k_extend` [T, kv_heads, dk] and `v_extend` alone: DeepSeek's prefill
    hands multi-head keys here while the cache holds latent ones. Otherwise all keys are read
    from the cache, where the caller has just stored the new ones.
    `tree_mask`, flat bool [B, N, N]: which of the N new tokens each may see; the committed
    prefix is always visible. Raises NotImplementedError for cross-attention, ValueError for a
    mask of another size.
    """
    _refuse(is_cross_attn)
    lengths, starts = extend_seq_lens.tolist(), extend_start_loc.tolist()
    totals = seq_lens.tolist()
    # A verify batch extends every request by the same few tokens: one padded batch. Prefills
    # differ in length: one after another.
    alike = len(set(lengths)) == 1 and starts == list(range(0, sum(lengths), lengths[0] or 1))
    size = len(lengths) if alike else 1
    trees = None if tree_mask is None else _trees(tree_mask, lengths)
    for first in range(0, len(lengths), size):
        group = slice(first, first + size)
        new, width = lengths[first], max(totals[group])
        if new == 0:
            continue
        span = slice(starts[first], starts[first] + new * size)
        query = q_extend[span].unflatten(0, (size, new))
        if k_extend is not None and v_extend is not None and width == new:
            keys = k_extend[span].unflatten(0, (size, new)).float()
            values = v_extend[span].unflatten(0, (size, new)).float()
        else:
            slots = req_to_token[req_pool_indices[group], :width]  # [size, L]
            keys, values = _gather(k_buffer, v_buffer, slots, k_scale, v_scale)
        mask = _extend_mask(
            seq_lens[group],
            new,
            width,
            window=sliding_window_size,
            tree=None if trees is None else trees[group],
            is_causal=is_causal,
        )
        out = _attend(query, keys, values, mask, sm_scale, logit_cap, sinks)
        o_extend[span] = out.flatten(0, 1).to(o_extend.dtype)


def _refuse(is_cross_attn: bool) -> None:
    if is_cross_attn:
        raise NotImplementedError("cross-attention on the CPU")


def _trees(tree_mask: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """The flat tree mask as [B, N, N]."""
    batch, nodes = len(lengths), lengths[0]
    if len(set(lengths)) != 1 or tree_mask.numel() != batch * nodes * nodes:
        raise ValueError(
            f"tree mask of {tree_mask.numel()} entries for {batch} requests of {nodes} tokens: "
            "want one square mask a request"
        )
    return tree_mask.view(batch, nodes, nodes).to(torch.bool)


def _causal_mask(totals: torch.Tensor, new: int, width: int, window: int) -> torch.Tensor:
    """[B, new, width]: True where query t (at position total - new + t) may see the column."""
    position = totals[:, None, None] - new + torch.arange(new)[None, :, None]
    column = torch.arange(width)
    mask = column <= position
    if window > 0:
        mask &= column > position - window
    return mask


def _extend_mask(
    totals: torch.Tensor,
    new: int,
    width: int,
    *,
    window: int,
    tree: torch.Tensor | None,
    is_causal: bool,
) -> torch.Tensor:
    """[B, new, width]: the causal mask, or the whole sequence, or the prefix and the tree."""
    if tree is None and is_causal:
        return _causal_mask(totals, new, width, window)
    column = torch.arange(width)
    mask = (column < totals[:, None]).unsqueeze(1).expand(-1, new, -1).clone()
    if tree is not None:
        prefix = totals - new  # [B]
        inside = prefix[:, None] + torch.arange(new)  # [B, new] columns of the tree
        mask.scatter_(2, inside[:, None].expand(-1, new, -1), tree)
    if window > 0:
        position = totals[:, None, None] - new + torch.arange(new)[None, :, None]
        mask &= column > position - window
    return mask


def _gather(
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    slots: torch.Tensor,
    k_scale: float,
    v_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [B, L, kv_heads, dk] and values [B, L, kv_heads, dv] in float32.

    Slots past a sequence's end may hold anything: they are masked later, and NaN there would
    still poison the product with a zero weight, so values must be finite; cache rows are.
    """
    keys = _rows(k_buffer, slots).float()
    if k_scale != 1.0:
        keys = keys * k_scale
    if v_buffer.data_ptr() == k_buffer.data_ptr() and v_scale == k_scale:
        return keys, keys[..., : v_buffer.shape[-1]]
    values = _rows(v_buffer, slots).float()
    return keys, values if v_scale == 1.0 else values * v_scale


def _rows(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """buffer[slots], by the faster operator: whole rows are copied."""
    return buffer.index_select(0, slots.flatten()).unflatten(0, slots.shape)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    sm_scale: float,
    logit_cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Masked softmax attention: query [B, T, heads, dk] -> [B, T, heads, dv], float32.

    mask [B, T, L] or None (all visible). `logit_cap` > 0 bounds scores by
    cap * tanh(score / cap). `sinks` [heads]: a score that takes weight and gives no value.
    """
    batch, tokens, heads, _ = query.shape
    kv_heads, length = keys.shape[2], keys.shape[1]
    keys_t = keys.permute(0, 2, 3, 1)  # [B, kv, dk, L]
    values_t = values.permute(0, 2, 1, 3)  # [B, kv, L, dv]
    block = max(1, MAX_SCORES // max(1, batch * heads * length))
    hidden = None if mask is None else ~mask
    outputs = []
    for first in range(0, tokens, block):
        part = query[:, first : first + block].float()  # [B, t, heads, dk]
        grouped = part.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)  # [B, kv, G, t, dk]
        scores = torch.matmul(grouped.flatten(2, 3), keys_t) * sm_scale  # [B, kv, G*t, L]
        if logit_cap > 0:
            scores = logit_cap * torch.tanh(scores / logit_cap)
        scores = scores.view(batch, kv_heads, heads // kv_heads, -1, length)
        if hidden is not None:
            scores.masked_fill_(hidden[:, None, None, first : first + block], float("-inf"))
        weights = _softmax(scores, sinks)
        out = torch.matmul(weights.flatten(2, 3), values_t)  # [B, kv, G*t, dv]
        out = out.view(batch, heads, -1, values.shape[-1]).transpose(1, 2)
        outputs.append(out)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the last axis of [B, kv, G, t, L], with one extra score a head if `sinks`."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    extra = sinks.float().view(1, *scores.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, extra], dim=-1), dim=-1)[..., :-1]
