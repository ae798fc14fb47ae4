"""Which samples share a row, and which rows an update: a function of seed and epoch alone.

Neither depends on the number of processes, so that a run may go on with more or fewer of them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

OPEN_ROWS = 64  # rows that still take samples; more would pack tighter and mix less


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Samples packed side by side; attention stays within each. `number`: within the epoch."""

    number: int
    indices: tuple[int, ...]
    tokens: int


Update = tuple[Row, ...]


def order(members: Sequence[int], *, seed: int, epoch: int) -> list[int]:
    """The samples of one epoch, shuffled."""
    shuffled = list(members)
    random.Random(f"{seed}:{epoch}").shuffle(shuffled)
    return shuffled


def pack_rows(indices: Sequence[int], lengths: Sequence[int], row_tokens: int) -> list[Row]:
    """First fit in the given order. A sample longer than a row gets a row of its own, uncut.

    Cutting it would take from its later slots the context that they have when served.
    """
    rows: list[list[int]] = []
    space: list[int] = []
    first_open = 0
    for index in indices:
        need = lengths[index]
        fits = (r for r in range(first_open, len(rows)) if space[r] >= need)
        place = next(fits, None)
        if place is None:
            rows.append([])
            space.append(max(row_tokens, need))
            place = len(rows) - 1
            first_open = max(first_open, len(rows) - OPEN_ROWS)
        rows[place].append(index)
        space[place] -= need
    return [
        Row(number=n, indices=tuple(row), tokens=sum(lengths[i] for i in row))
        for n, row in enumerate(rows)
    ]


def group_updates(rows: Sequence[Row], *, row_tokens: int, batch_tokens: int) -> list[Update]:
    """Rows in order to updates of about `batch_tokens`; a small rest joins the last update."""
    updates: list[list[Row]] = []
    filled = batch_tokens  # opens the first update
    for row in rows:
        if filled + min(row_tokens, row.tokens) / 2 >= batch_tokens:
            updates.append([])
            filled = 0
        updates[-1].append(row)
        filled += row.tokens
    if len(updates) > 1 and filled < batch_tokens / 4:
        updates[-2:] = [updates[-2] + updates[-1]]
    return [tuple(update) for update in updates]


def plan_epoch(
    members: Sequence[int],
    lengths: Sequence[int],
    *,
    seed: int,
    epoch: int,
    row_tokens: int,
    batch_tokens: int,
) -> list[Update]:
    """The updates of one epoch over the samples `members`."""
    rows = pack_rows(order(members, seed=seed, epoch=epoch), lengths, row_tokens)
    return group_updates(rows, row_tokens=row_tokens, batch_tokens=batch_tokens)
