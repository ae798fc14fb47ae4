"""Stored states: 8-bit rounding, the shard file, the buffer that works ahead."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from training.capture.ahead import Ahead
from training.capture.fp8 import dequantise, quantise, relative_error
from training.capture.store import Layout, ShardWriter, plan_shards
from training.errors import TrainingError
from training.files import file_digest


@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 5),
    blocks=st.integers(1, 4),
    width=st.integers(1, 40),
    exponents=st.lists(st.integers(-40, 36), min_size=1, max_size=5),
)
def test_fp8_is_off_by_no_more_than_its_rounding(
    seed: int, rows: int, blocks: int, width: int, exponents: list[int]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(rows, blocks * width, generator=generator)
    for i, exponent in enumerate(exponents[:rows]):
        states[i] *= 10.0**exponent if abs(exponent) < 38 else 0.0
    stored, scale = quantise(states, blocks)
    assert stored.dtype == torch.float8_e4m3fn and stored.shape == states.shape
    assert scale.shape == (rows, blocks) and scale.dtype == torch.float32
    found = dequantise(stored, scale)
    assert found.isfinite().all()
    each = scale.repeat_interleave(width, dim=1).double()
    # Half a step of 3 bits; below the smallest normal number half a step of 2 ** -9.
    bound = torch.maximum(states.double().abs() / 16, each / 1024) * (1 + 1e-5)
    assert ((found.double() - states.double()).abs() <= bound + 1e-45).all()


@given(seed=st.integers(0, 2**31), factor=st.floats(1e-3, 1e3))
def test_fp8_scales_rows_apart(seed: int, factor: float) -> None:
    states = torch.randn(2, 64, generator=torch.Generator().manual_seed(seed))
    both = torch.cat((states, states[:1] * factor))
    alone = dequantise(*quantise(states, 2))
    torch.testing.assert_close(dequantise(*quantise(both, 2))[:2], alone, rtol=0, atol=0)
    assert relative_error(alone, states) < 0.04


def test_fp8_keeps_zeros_and_shows_what_is_no_number() -> None:
    states = torch.zeros(3, 4)
    states[1, 0] = float("inf")
    states[2, 3] = float("nan")
    found = dequantise(*quantise(states, 2))
    assert found[0].tolist() == [0] * 4
    assert not found[1, :2].isfinite().any() and found[1, 2:].tolist() == [0, 0]
    assert not found[2, 2:].isfinite().any()


@given(
    lengths=st.lists(st.integers(1, 50), max_size=40),
    shard_tokens=st.integers(1, 120),
)
def test_shards_hold_every_sample_once_in_order(lengths: list[int], shard_tokens: int) -> None:
    shards = plan_shards(lengths, shard_tokens)
    assert [i for shard in shards for i in shard] == list(range(len(lengths)))
    for shard in shards:
        tokens = sum(lengths[i] for i in shard)
        assert len(shard) == 1 or tokens <= shard_tokens


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    dtype=st.sampled_from(["float32", "bfloat16", "fp8"]),
    layers=st.integers(1, 4),
    width=st.integers(1, 9),
    data=st.data(),
)
def test_a_shard_is_a_safetensors_file_whatever_the_order_of_writing(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    dtype: str,
    layers: int,
    width: int,
    data: st.DataObject,
) -> None:
    path = tmp_path_factory.mktemp("shard") / "states-00000.safetensors"
    layout = Layout(aux_layers=tuple(range(layers)), hidden_size=width, dtype=dtype)  # type: ignore[arg-type]
    tokens = sum(lengths)
    ids = torch.arange(tokens)
    aux, last = torch.randn(tokens, layers * width), torch.randn(tokens, width)
    writer = ShardWriter(path, layout, lengths=lengths, loss_from=[0] * len(lengths))
    ends = torch.tensor(lengths).cumsum(0).tolist()
    for number in data.draw(st.permutations(range(len(lengths)))):
        rows = slice(ends[number] - lengths[number], ends[number])
        writer.add(number, ids[rows], aux[rows], last[rows])
    entry = writer.finish(tuple(map(str, lengths)), (None,) * len(lengths))
    assert path.stat().st_size == entry.bytes and file_digest(path) == entry.sha256
    assert not list(path.parent.glob("*.partial")) and not list(path.parent.glob(".*"))
    with safe_open(path, framework="pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert found["token_ids"].tolist() == ids.tolist()
    assert found["offsets"].tolist() == [0, *ends]
    if dtype == "fp8":
        stored, scale = quantise(aux, layers)
        assert found["aux"].float().tolist() == stored.float().tolist()
        assert found["aux_scale"].tolist() == scale.tolist()
        assert found["last_scale"].shape == (tokens, 1)
    else:
        assert found["aux"].tolist() == aux.to(getattr(torch, dtype)).tolist()
        assert found["last_normed"].tolist() == last.to(getattr(torch, dtype)).tolist()


def test_a_shard_left_open_leaves_nothing(tmp_path: Path) -> None:
    layout = Layout(aux_layers=(1,), hidden_size=4, dtype="float32")
    writer = ShardWriter(tmp_path / "s.safetensors", layout, lengths=[2], loss_from=[1])
    with pytest.raises(TrainingError, match="wanted"):
        writer.add(0, torch.zeros(2), torch.zeros(2, 8), torch.zeros(2, 4))
    writer.abandon()
    assert not list(tmp_path.iterdir())


def test_bytes_of_fp8_beside_bfloat16_at_a_real_width() -> None:
    sizes = {
        dtype: Layout(aux_layers=(2, 30, 58), hidden_size=7168, dtype=dtype).size(1, 1000)  # type: ignore[arg-type]
        for dtype in ("bfloat16", "fp8")
    }
    assert sizes["bfloat16"] == 1000 * (4 * 7168 * 2 + 8) + 24
    assert sizes["fp8"] == 1000 * (4 * (7168 + 4) + 8) + 24
    assert sizes["fp8"] / sizes["bfloat16"] < 0.51


def test_ahead_never_holds_more_than_its_buffer() -> None:
    made: list[int] = []
    held: list[int] = []
    taken = threading.Semaphore(0)

    def make() -> Iterator[int]:
        for number in range(20):
            made.append(number)
            yield number

    ahead = Ahead(make, 3)
    for position, item in enumerate(ahead):
        assert item == position
        taken.release()
        held.append(len(made) - position)
    assert made == list(range(20))
    assert max(held) <= 3 + 2  # the buffer, the one in work, and the one taken


def test_ahead_counts_waiting_and_hands_on_errors() -> None:
    asked = threading.Event()

    def slow() -> Iterator[int]:
        yield 1
        assert asked.wait(300)
        time.sleep(0.05)
        yield 2
        raise ValueError("broken")

    ahead = Ahead(slow, 4)
    empty = ahead._buffer.empty

    def looked() -> bool:
        found = empty()
        asked.set()
        return found

    ahead._buffer.empty = looked  # type: ignore[method-assign]
    found = []
    with pytest.raises(ValueError, match="broken"):
        for item in ahead:
            found.append(item)
    assert found == [1, 2]
    assert ahead.waits >= 1 and ahead.waited_s > 0


def test_ahead_ends_its_thread_with_the_loop() -> None:
    def endless() -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1

    before = set(threading.enumerate())  # of which one may end by itself meanwhile
    for item in Ahead(endless, 2):
        if item == 5:
            break
    assert set(threading.enumerate()) <= before
