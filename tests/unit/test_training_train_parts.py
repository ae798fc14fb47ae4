"""The parts of the stage `train`: rows, split, schedule, rules, events, checkpoints on disk."""

from __future__ import annotations

import errno
import io
import itertools
import math
import struct
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference_models import build_drafter, build_target
from safetensors.torch import save_file

from drafters.checkpoint import save
from drafters.spec import MlaDims, RopeSpec
from drafters.validate import check_numbers
from harness.errors import UsageError
from training.errors import TrainingError
from training.heads import TargetFacts, expected_rope, read_facts, scratch_spec
from training.pipeline import check_finetuned
from training.plan import HeadSection, TrainingPlan, TrainSection
from training.train import checkpoints as disk
from training.train import guard
from training.train.build import build, same_rope
from training.train.console import Console
from training.train.events import EventFile, masked_crc
from training.train.metrics import Metrics, read_metrics
from training.train.optimizer import rate
from training.train.proof import right_choices
from training.train.rows import group_updates, pack_rows, plan_epoch
from training.train.split import split
from training.train.stage import read_vocabulary
from training.train.target import off_norm, read_tensors
from training.train.validation import HeldOut

FACTS = TargetFacts(
    folder=Path("target"),
    hidden_size=64,
    intermediate_size=96,
    layers=6,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocab_size=100,
    eps=1e-6,
    max_positions=256,
    rope=RopeSpec(theta=5e4),
    mla=None,
    bos_token_id=None,
    eos_token_id=1,
    tied=False,
)
DIMS = MlaDims(
    q_lora_rank=8, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16
)
YARN = RopeSpec(theta=5e4, scaling={"rope_type": "yarn", "factor": 4.0})
LENGTHS = st.lists(st.integers(6, 300), min_size=1, max_size=60)


@given(LENGTHS, st.integers(8, 200), st.integers(8, 1000), st.integers(0, 5))
def test_an_epoch_holds_every_sample_once(
    lengths: list[int], row_tokens: int, batch_tokens: int, epoch: int
) -> None:
    members = range(len(lengths))
    updates = plan_epoch(
        members,
        lengths,
        seed=3,
        epoch=epoch,
        row_tokens=row_tokens,
        batch_tokens=batch_tokens,
    )
    rows = [row for update in updates for row in update]
    assert sorted(i for row in rows for i in row.indices) == list(members)
    assert [row.number for row in rows] == list(range(len(rows)))
    for row in rows:
        assert row.tokens == sum(lengths[i] for i in row.indices)
        assert row.tokens <= row_tokens or len(row.indices) == 1  # a long sample is not cut
    assert all(update for update in updates)
    again = plan_epoch(
        members, lengths, seed=3, epoch=epoch, row_tokens=row_tokens, batch_tokens=batch_tokens
    )
    assert again == updates


def test_epochs_and_seeds_shuffle_otherwise() -> None:
    def first(seed: int, epoch: int) -> tuple[int, ...]:
        updates = plan_epoch(
            range(50), [10] * 50, seed=seed, epoch=epoch, row_tokens=40, batch_tokens=80
        )
        return tuple(i for update in updates for row in update for i in row.indices)

    assert len({first(0, 0), first(0, 1), first(1, 0)}) == 3


def test_updates_hold_about_the_tokens_asked_for_and_a_small_rest_joins_the_last() -> None:
    rows = pack_rows(range(21), [10] * 21, 10)
    updates = group_updates(rows, row_tokens=10, batch_tokens=50)
    assert [len(update) for update in updates] == [5, 5, 5, 6]


@given(st.lists(st.integers(0, 30), min_size=2, max_size=60), st.floats(0.05, 0.6))
def test_no_prompt_is_in_both_parts(prompts: list[int], share: float) -> None:
    ids = [f"s{i}" for i in range(len(prompts))]
    by_sample = {sample: f"p{p}" for sample, p in zip(ids, prompts, strict=True)}
    parts = split(ids, by_sample, share, 0)
    assert sorted(parts.train + parts.held_out) == list(range(len(ids)))
    assert parts.shared_prompts == 0
    assert parts.held_out


def test_the_rate_rises_and_falls_as_planned() -> None:
    section = TrainSection(warmup=0.1, schedule="cosine")
    rates = [rate(update, 100, section) for update in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[10] == 1
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))
    assert 0 < rates[-1] < 0.01
    middle = rate(55, 100, section)
    assert middle == pytest.approx(0.5)
    linear = msgspec.structs.replace(section, schedule="linear")
    assert rate(55, 100, linear) == pytest.approx(0.5)
    assert rate(99, 100, msgspec.structs.replace(section, schedule="constant")) == 1
    assert rate(0, 1, msgspec.structs.replace(section, warmup=0.0)) == 1


def test_a_jump_of_the_loss_stops_and_one_odd_batch_does_not() -> None:
    rule = guard.SpikeRule([2.0 + 0.01 * (i % 5) for i in range(30)])
    assert not rule.add(50.0)
    assert not rule.add(2.0)
    assert [rule.add(loss) for loss in (9.0, 9.0, 9.0)] == [False, False, True]
    young = guard.SpikeRule()
    assert not any(young.add(loss) for loss in (9.0, 1.0, 20.0, 20.0, 20.0))


@given(st.lists(st.floats(0.5, 8.0), min_size=1, max_size=100))
def test_a_falling_loss_is_never_a_jump(losses: list[float]) -> None:
    rule = guard.SpikeRule()
    assert not any(rule.add(loss) for loss in sorted(losses, reverse=True))


def test_what_is_no_number_is_found() -> None:
    assert guard.not_finite([1.0, 2.0], 3.0) is None
    assert guard.not_finite([1.0, math.nan, math.inf], 3.0) == [1, 2]
    assert guard.not_finite([1.0], math.inf) == []


def test_waiting_for_data_is_told_and_ends_the_training_at_last() -> None:
    rule = guard.Starvation()
    assert rule.add(10.0, 9.9) is None
    found = [rule.add(10.0, 9.9) for _ in range(40)]
    assert ("slow", pytest.approx(0.99)) in found
    assert found[-1] == ("stop", pytest.approx(0.99))
    for _ in range(60):
        found.append(rule.add(10.0, 0.0))
    assert found[-1] is None


def test_event_files_are_tfrecords_of_scalars(tmp_path: Path) -> None:
    # the check value of CRC32C is E3069283, masked as TFRecord has it
    crc = 0xE3069283
    assert masked_crc(b"123456789") == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    events = EventFile(tmp_path)
    events.add(300, {"update/loss": 1.5})
    events.close()
    (file,) = tmp_path.iterdir()
    data, records = file.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert struct.unpack("<I", data[8:12])[0] == masked_crc(data[:8])
        body = data[12 : 12 + length]
        assert struct.unpack("<I", data[12 + length : 16 + length])[0] == masked_crc(body)
        records.append(body)
        data = data[16 + length :]
    assert b"brain.Event:2" in records[0]
    assert records[1].endswith(b"\x0bupdate/loss\x15" + struct.pack("<f", 1.5))
    assert records[1][9:12] == b"\x10\xac\x02"  # step 300


def test_metrics_behind_the_checkpoint_are_dropped_on_resume(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, resumed_at=0)
    for update in (1, 2, 3):
        metrics.add("update", update, loss=float(update), accuracy=[0.5, None])
    metrics.close()
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"kind": "update", "upd')
    Metrics(tmp_path, resumed_at=2).close()
    assert [r["update"] for r in read_metrics(tmp_path)] == [1, 2]
    assert read_metrics(tmp_path)[1]["accuracy"] == [0.5, None]


def test_the_console_breaks_every_long_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.train.console.QUIET_S", 0.5)
    stream = io.StringIO()
    console = Console(stream=stream)
    with console.speaking():
        console.doing("reading what takes long")
        deadline = time.monotonic() + 300
        while "so far" not in stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.05)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "train: reading what takes long"
    assert lines[1].startswith("train: reading what takes long: ")
    silent = io.StringIO()
    Console(speaks=False, stream=silent).say("nothing")
    assert not silent.getvalue()


def test_what_a_signal_says_is_said_whatever_it_interrupts() -> None:
    stream = io.StringIO()
    console = Console(stream=stream)
    with console.speaking():
        with console._lock:  # as where the signal comes while a line is being written
            console.soon("train: SIGINT received")
        console.soon("train: and nothing is lost at the end")
    assert stream.getvalue().splitlines() == [
        "train: SIGINT received",
        "train: and nothing is lost at the end",
    ]


def test_a_terminal_has_a_live_table_and_lines_above_it() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    console = Console(stream=stream)
    with console.speaking():
        console.figures("update 1/9", {"loss": "2.5"})
        console.say("train: a line [of brackets]")
    text = stream.getvalue()
    assert "update 1/9" in text and "2.5" in text
    assert "a line [of brackets]" in text


def state(update: int, *, scheduled: bool = True) -> disk.TrainingState:
    return disk.TrainingState(
        update=update, epoch=0, in_epoch=update, scheduled=scheduled, tokens=0, losses=()
    )


def written(train: Path, update: int, *, scheduled: bool = True) -> Path:
    optimizer = {"state": {"fc.weight": {"exp_avg": torch.ones(2)}}}
    drafter = build_drafter("llama")
    return disk.write_checkpoint(
        train, drafter, optimizer, {"update": update}, state(update, scheduled=scheduled)
    )


def test_old_checkpoints_go_and_the_best_stays(tmp_path: Path) -> None:
    places = [written(tmp_path, update) for update in (1, 2, 3, 4)]
    stopped = written(tmp_path, 5, scheduled=False)
    disk.point_best(tmp_path, places[0])
    assert (tmp_path / "best").readlink() == Path("checkpoints/update-00000001")
    disk.prune(tmp_path, 2)
    assert disk.all_checkpoints(tmp_path) == [places[0], places[3], stopped]
    written(tmp_path, 6)
    disk.prune(tmp_path, 2)
    assert stopped not in disk.all_checkpoints(tmp_path)
    disk.point_best(tmp_path, places[3])
    assert disk.best_of(tmp_path) == places[3]


def test_a_full_disk_keeps_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = written(tmp_path, 1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk, "save", full)
    with pytest.raises(TrainingError, match=f"disk is full.*kept: {good}"):
        written(tmp_path, 2)
    assert disk.all_checkpoints(tmp_path) == [good]
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == [good.name]


def test_optimizer_state_that_is_gone_or_cut_off_is_refused(tmp_path: Path) -> None:
    place = written(tmp_path, 1)
    found = disk.read_optimizer(place, restart=False)
    assert found is not None and torch.equal(found["random"]["cpu"], torch.get_rng_state())
    file = place / disk.OPTIMIZER
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(UsageError, match="damaged"):
        disk.read_optimizer(place, restart=False)
    file.unlink()
    with pytest.raises(UsageError, match=r"missing.*restart_optimizer=true"):
        disk.read_optimizer(place, restart=False)
    assert disk.read_optimizer(place, restart=True) is None


def test_the_final_norm_is_seen_in_the_states_size() -> None:
    norm = torch.linspace(0.5, 1.5, 64)
    states = torch.randn(20, 64, generator=torch.Generator().manual_seed(0)) * 7
    normed = states / states.square().mean(-1, keepdim=True).sqrt() * norm
    assert off_norm(normed, norm) < 1e-5
    assert off_norm(normed.bfloat16(), norm) < 0.005
    assert off_norm(states, norm) > 1
    assert off_norm(states / 7, norm) > 0.05  # of the right size all in all


def test_a_new_drafter_takes_the_targets_sizes_and_rope() -> None:
    llama = scratch_spec(HeadSection(), FACTS, (2, 3, 4), 50)
    assert (llama.num_key_value_heads, llama.head_dim, llama.rope.theta) == (2, 16, 5e4)
    assert llama.draft_vocab_size == 50
    latent = msgspec.structs.replace(FACTS, mla=DIMS, rope=YARN, kv_heads=4)
    mla = scratch_spec(HeadSection(kind="mla"), latent, (2, 3, 4), 100)
    assert mla.mla == DIMS and mla.rope == YARN and mla.num_key_value_heads == 4
    plain = scratch_spec(HeadSection(), latent, (2, 3, 4), 100)
    assert plain.rope == RopeSpec(theta=5e4) and plain.mla is None
    with pytest.raises(UsageError, match="no latent attention"):
        scratch_spec(HeadSection(kind="mla"), FACTS, (2, 3, 4), 100)
    with pytest.raises(UsageError, match="do not divide"):
        scratch_spec(HeadSection(num_key_value_heads=3), FACTS, (2,), 100)


def test_ropes_are_compared_by_what_they_mean() -> None:
    both = RopeSpec(theta=5e4, scaling={"type": "yarn", "rope_type": "yarn", "factor": 4.0})
    assert same_rope(YARN, both)
    assert not same_rope(YARN, RopeSpec(theta=5e4))
    assert not same_rope(RopeSpec(theta=1e4), RopeSpec(theta=5e4))
    assert expected_rope("mla", msgspec.structs.replace(FACTS, mla=DIMS, rope=YARN)) == YARN


def test_the_standard_error_is_that_of_the_accepted_counts() -> None:
    accepted = torch.tensor([0, 3, 1, 2, 0, 0, 3, 1], dtype=torch.float64)
    rates = tuple(float((accepted > i).double().mean()) for i in range(3))
    figures = HeldOut(
        **dict.fromkeys(("samples", "tokens"), 1),
        **dict.fromkeys(("loss", "outside", "acceptance_length", "acceptance_rate")),
        **dict.fromkeys(("accuracy", "marginal", "conditional"), ()),
        k=3,
        drafts=8,
        position_rates=rates,
    )
    wanted = float(accepted.var(unbiased=False) / 8) ** 0.5
    assert figures.standard_error == pytest.approx(wanted)


def test_the_vocabulary_is_read_as_offsets(tmp_path: Path) -> None:
    path = tmp_path / "vocab.safetensors"
    assert read_vocabulary(path, 10) is None  # no file: all can be drafted
    kept = torch.tensor([1, 4, 9])
    save_file({"d2t": kept - torch.arange(3)}, path)
    found = read_vocabulary(path, 10)
    assert found is not None and torch.equal(found, kept)
    save_file({"d2t": torch.zeros(10, dtype=torch.int64)}, path)
    assert read_vocabulary(path, 10) is None
    save_file({"d2t": kept}, path)  # absolute ids instead of offsets
    with pytest.raises(UsageError, match="no table of offsets"):
        read_vocabulary(path, 10)
    path.write_bytes(b"cut")
    with pytest.raises(UsageError, match="cannot be read"):
        read_vocabulary(path, 10)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda t: t[0, 0].fill_(torch.nan), "holds 1 NaN and 0 infinite of"),
        (lambda t: t[1, 2].fill_(torch.inf), "holds 0 NaN and 1 infinite of"),
        (lambda t: t.zero_(), "is zero everywhere"),
        (lambda t: t.fill_(0.5), "is 0.5 everywhere"),
    ],
    ids=["nan", "infinite", "zero", "constant"],
)
def test_a_checkpoint_with_a_tensor_that_was_lost_is_not_gone_on_from(
    tmp_path: Path, spoil: Callable[[torch.Tensor], object], said: str
) -> None:
    build_target("deepseek", tmp_path / "target")
    drafter = build_drafter("mla")
    save(drafter, tmp_path / "whole")
    check_numbers(tmp_path / "whole", tmp_path / "target")
    with torch.no_grad():
        spoil(drafter.layer.mlp.down_proj.weight)
    save(drafter, tmp_path / "old")
    section = HeadSection(kind="mla", finetune=str(tmp_path / "old"))
    facts = read_facts(tmp_path / "target")
    wanted = rf"drafter.finetune: .*old.*tensor layers\.0\.mlp\.down_proj\.weight {said}"
    with pytest.raises(UsageError, match=wanted):
        build(section, facts, read_tensors(facts), aux_layers=(0, 1, 3), kept=None, seed=0)
    plan = TrainingPlan(drafter=section)
    with pytest.raises(UsageError, match=wanted):  # before the first sample is asked for
        check_finetuned(plan, tmp_path / "target")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_near_ties_of_a_rounded_head_are_the_targets_choice_all_the_same(
    dtype: torch.dtype,
) -> None:
    head = torch.tensor([[100.0, 0.0], [100.0, 0.125]], dtype=dtype)  # 0.1% apart: a tie in 8 bits
    states = torch.ones(3, 2)
    assert right_choices(states, torch.tensor([1, 1, 0]), head) == 2
    assert right_choices(states[:0], torch.tensor([], dtype=torch.int64), head) == 0
