"""Packing of an epoch: nothing lost, nothing cut, little padding, the same again from its seed."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from training.packing import pack_epoch

LENGTHS = st.lists(st.integers(0, 60), max_size=80)


@given(
    lengths=LENGTHS,
    row_tokens=st.integers(1, 64),
    batch_tokens=st.integers(1, 200),
    seed=st.none() | st.integers(0, 3),
)
def test_every_sample_lies_whole_in_one_row(
    lengths: list[int], row_tokens: int, batch_tokens: int, seed: int | None
) -> None:
    packed = pack_epoch(lengths, row_tokens=row_tokens, batch_tokens=batch_tokens, seed=seed)
    found = sorted(i for batch in packed.batches for row in batch for i in row)
    assert found == [i for i, n in enumerate(lengths) if 0 < n <= row_tokens]
    assert list(packed.left_out) == [i for i, n in enumerate(lengths) if n > row_tokens]
    assert packed.tokens == sum(lengths[i] for i in found)
    for batch, width in zip(packed.batches, packed.widths, strict=True):
        filled = [sum(lengths[i] for i in row) for row in batch]
        assert max(filled) == width <= row_tokens
        assert len(batch) == 1 or len(batch) * width <= batch_tokens
    again = pack_epoch(lengths, row_tokens=row_tokens, batch_tokens=batch_tokens, seed=seed)
    assert again == packed


def test_a_sample_goes_where_it_fits_best() -> None:
    packed = pack_epoch([7, 6, 3, 4], row_tokens=10, batch_tokens=10)
    rows = {tuple(sorted(row)) for batch in packed.batches for row in batch}
    assert rows == {(0, 2), (1, 3)}
    assert packed.padding == 0.0


def test_padding_of_mixed_lengths_is_little() -> None:
    lengths = [min(int(random.Random(i).lognormvariate(5.5, 0.8)), 2048) for i in range(2000)]
    packed = pack_epoch(lengths, row_tokens=2048, batch_tokens=8192, seed=1)
    assert packed.padding < 0.01
    other = pack_epoch(lengths, row_tokens=2048, batch_tokens=8192, seed=2)
    assert other.batches != packed.batches
    assert other.padding < 0.01


def test_nothing_to_pack_is_no_batch() -> None:
    packed = pack_epoch([], row_tokens=8, batch_tokens=8, seed=0)
    assert packed.batches == () and packed.padding == 0.0
