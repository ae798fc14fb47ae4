"""Packing a whole epoch: which samples share a row, chosen by length, with little padding.

`training.data.pack` fills rows from a stream as documents come; here all lengths are known.
"""

from __future__ import annotations

import bisect
import random
from collections.abc import Sequence

import msgspec

Rows = tuple[tuple[int, ...], ...]


class Packing(msgspec.Struct, frozen=True, kw_only=True):
    """Batches of rows of sample numbers; `left_out`: samples longer than a row.

    `tokens` are the samples' own, `width` of each batch the length of its longest row.
    """

    batches: tuple[Rows, ...]
    widths: tuple[int, ...]
    left_out: tuple[int, ...]
    tokens: int

    @property
    def padding(self) -> float:
        """The share of slots that hold no token."""
        slots = sum(len(b) * w for b, w in zip(self.batches, self.widths, strict=True))
        return 1 - self.tokens / slots if slots else 0.0


def pack_epoch(
    lengths: Sequence[int], *, row_tokens: int, batch_tokens: int, seed: int | None = None
) -> Packing:
    """Pack samples of these lengths into rows of `row_tokens`, rows into batches.

    Each sample goes whole into the row that it fills best, the longest samples first (best fit
    decreasing). Rows that are filled alike share a batch of at most `batch_tokens` slots (one row
    at least). With a `seed` samples of one length, and the batches, are shuffled by it; the same
    lengths and seed give the same packing.
    """
    shuffled = random.Random(seed)
    order = [i for i, length in enumerate(lengths) if 0 < length <= row_tokens]
    if seed is not None:
        shuffled.shuffle(order)
    order.sort(key=lambda i: -lengths[i])
    rows = _best_fit(lengths, order, row_tokens)
    filled = [sum(lengths[i] for i in row) for row in rows]
    batches: list[Rows] = []
    widths: list[int] = []
    begin = 0
    by_size = sorted(range(len(rows)), key=lambda r: -filled[r])
    while begin < len(by_size):
        width = filled[by_size[begin]]
        count = max(batch_tokens // width, 1)
        batches.append(tuple(tuple(rows[r]) for r in by_size[begin : begin + count]))
        widths.append(width)
        begin += count
    if seed is not None:
        turn = list(range(len(batches)))
        shuffled.shuffle(turn)
        batches, widths = [batches[i] for i in turn], [widths[i] for i in turn]
    return Packing(
        batches=tuple(batches),
        widths=tuple(widths),
        left_out=tuple(i for i, length in enumerate(lengths) if length > row_tokens),
        tokens=sum(filled),
    )


def _best_fit(lengths: Sequence[int], order: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Each sample in turn into the open row with the least space that still holds it."""
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (space left, row), ascending
    for sample in order:
        length = lengths[sample]
        at = bisect.bisect_left(open_rows, (length, -1))
        if at == len(open_rows):
            space, row = row_tokens, len(rows)
            rows.append([])
        else:
            space, row = open_rows.pop(at)
        rows[row].append(sample)
        if space > length:
            bisect.insort(open_rows, (space - length, row))
    return rows
