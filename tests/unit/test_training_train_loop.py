"""The stage `train` on a small target: what it writes, how it goes on, and what it refuses."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from train_stage_job import USED, MemoryStates, job_of, make_root, read_states, run_job

from drafters.checkpoint import load, save
from drafters.eagle3 import Eagle3Drafter
from drafters.spec import RopeSpec
from drafters.validate import misfits
from engines.process import free_port
from harness.errors import GateFailed, UsageError
from training.errors import TrainingError
from training.gate import Gate, read_gate
from training.states import SampleStates
from training.train import checkpoints, loop
from training.train.checkpoints import OPTIMIZER, all_checkpoints, best_of, read_state
from training.train.examine import read_examination
from training.train.metrics import read_metrics
from training.train.stopping import Stop

REPO = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("train_stage_job.py")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("train"))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def whole(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training that ended undisturbed."""
    out = tmp_path_factory.mktemp("whole") / "train"
    run_job(job_of(root, out))
    return out


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(all_checkpoints(out)[-1] / "model.safetensors")


def same_weights(one: Path, other: Path) -> bool:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    return all(torch.equal(first[name], second[name]) for name in first)


def changed(samples: Sequence[SampleStates], **functions: object) -> list[SampleStates]:
    """The samples with fields replaced by functions of them."""
    return [
        msgspec.structs.replace(s, **{k: f(s) for k, f in functions.items()})  # type: ignore[operator]
        for s in samples
    ]


def test_a_training_ends_with_a_drafter_that_is_served_as_expected(root: Path, whole: Path) -> None:
    gate = read_gate(whole)
    assert gate is not None and gate.passed
    checks = {check.name: check for check in gate.checks}
    assert checks["held-out acceptance length"].value > checks["held-out acceptance length"].limit
    assert checks["prompts both trained on and held out"].value == 0
    best = best_of(whole)
    assert best is not None and (whole / "best").readlink().parts[0] == "checkpoints"
    drafter = load(best)
    assert not drafter.owns_embeddings and drafter.owns_lm_head
    assert not list(misfits(best, root / "target"))
    found = read_examination(best)
    assert found is not None and found.passed and found.served is not None
    assert found.served.reproduced == found.served.prompts == 3
    assert found.served.real == found.served.expected  # float32 states: draft for draft
    assert found.held_out.acceptance_length == checks["held-out acceptance length"].value
    assert found.held_out.conditional[0] == found.held_out.marginal[0]


def test_every_update_leaves_its_figures(whole: Path) -> None:
    records = read_metrics(whole)
    updates = [r for r in records if r["kind"] == "update"]
    assert [r["update"] for r in updates] == list(range(1, len(updates) + 1))
    wanted = {"loss", "accuracy", "lr", "grad_norm", "tokens_per_s", "data_wait_s"}
    assert wanted | {"outside_share", "memory_bytes", "epoch"} <= updates[0].keys()
    assert len(updates[0]["accuracy"]) == 3
    assert updates[-1]["loss"] < updates[0]["loss"]
    assert {r["epoch"] for r in updates} == {0, 1}
    validations = [r for r in records if r["kind"] == "validation"]
    assert [r["update"] for r in validations] == [0, len(updates) // 2, len(updates)]
    assert any((whole / "tensorboard").iterdir())


def test_signs_of_life_come_before_the_first_update(root: Path, tmp_path: Path, capfd) -> None:  # type: ignore[no-untyped-def]
    run_job(job_of(root, tmp_path / "train", "train.epochs=1", "train.serve_check=0"))
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("train: reading head, embedding and last norm of ")
    first = next(i for i, line in enumerate(lines) if line.startswith("train: update 1/"))
    assert any("proving the states" in line for line in lines[:first])
    assert any("before the first update: loss" in line for line in lines[:first])


@pytest.mark.parametrize("stop_at", [1, 4])
def test_a_signal_finishes_the_update_and_the_rest_is_bit_for_bit(
    root: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    out = tmp_path / "train"
    original = loop.Loop._check

    def interrupted(self: loop.Loop, *args: object) -> float:
        if self.position.update + 1 == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(loop.Loop, "_check", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_job(job_of(root, out))
    (stopped,) = all_checkpoints(out)
    state = read_state(stopped)
    assert state.update == stop_at and not state.scheduled
    monkeypatch.undo()
    run_job(job_of(root, out))
    assert same_weights(whole, out)
    ours, theirs = (
        [(r["update"], r["loss"]) for r in read_metrics(path) if r["kind"] == "update"]
        for path in (out, whole)
    )
    assert ours == theirs
    gates = [read_gate(path) for path in (out, whole)]
    assert gates[0] == gates[1]


def run_script(root: Path, out: Path, *sets: str, processes: int = 1, **env: str):  # type: ignore[no-untyped-def]
    command = [sys.executable, str(SCRIPT), str(root), str(out), *sets]
    if processes > 1:
        run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
        # Nobody looks up the host's name, which may take long.
        run += ["--master-addr", "127.0.0.1", "--local-addr", "127.0.0.1"]
        command = [*run, "--master-port", str(free_port()), *command[1:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **env}
    return subprocess.Popen(command, cwd=REPO, env=environment, stderr=subprocess.PIPE, text=True)


def killed_and_resumed(root: Path, out: Path, kills: int, seed: int) -> int:
    """Run to the end, killed with SIGKILL at random moments; how many kills hit a living run."""
    chance, hit = random.Random(seed), 0
    for attempt in range(kills + 1):
        # The first of them lasts: however late it is killed, it is alive.
        process = run_script(root, out, DELAY="1" if attempt == 0 else "0.005")
        assert process.stderr is not None
        if attempt < kills:
            for line in process.stderr:  # imports are done: what follows is the training
                if "reading head" in line:
                    break
            time.sleep(chance.uniform(0.0, 1.5))
            hit += process.poll() is None
            process.kill()
        errors = process.stderr.read()
        process.wait()
    assert process.returncode == 0, errors
    return hit


@pytest.mark.parametrize(
    "kills", [2, pytest.param(12, marks=pytest.mark.full)], ids=["twice", "often"]
)
def test_killed_at_random_the_weights_are_those_of_an_undisturbed_run(
    root: Path, whole: Path, tmp_path: Path, kills: int
) -> None:
    out = tmp_path / "train"
    assert killed_and_resumed(root, out, kills, seed=kills) > 0
    assert same_weights(whole, out)
    gates = [read_gate(path) for path in (out, whole)]
    assert gates[0] == gates[1] and isinstance(gates[0], Gate)
    assert not [p for p in (out / "checkpoints").iterdir() if p.name.startswith(".")]


def losses(out: Path) -> list[float]:
    return [r["loss"] for r in read_metrics(out) if r["kind"] == "update"]


def distributed(root: Path, out: Path, *sets: str, processes: int = 2) -> None:
    process = run_script(root, out, *sets, processes=processes)
    assert process.stderr is not None
    errors = process.stderr.read()
    assert process.wait() == 0, errors


# three rows an update: the two processes have unequal shares
UNEVEN = ("train.row_tokens=40", "train.batch_tokens=120")


def test_two_processes_learn_what_one_does(root: Path, tmp_path: Path) -> None:
    alone, both = tmp_path / "alone", tmp_path / "both"
    run_job(job_of(root, alone, *UNEVEN))
    distributed(root, both, *UNEVEN, "train.parallel=fsdp")
    assert losses(both) == pytest.approx(losses(alone), rel=1e-3)
    assert [p.name for p in all_checkpoints(both)] == [p.name for p in all_checkpoints(alone)]
    ours, theirs = weights(both), weights(alone)
    assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in theirs.items()}
    gate = read_gate(both)
    assert gate is not None and gate.passed


@pytest.mark.full
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2)])
def test_another_number_of_processes_goes_on(
    root: Path, tmp_path: Path, how: str, first: int, then: int
) -> None:
    alone, moved = tmp_path / "alone", tmp_path / "moved"
    run_job(job_of(root, alone, *UNEVEN))
    sets = (*UNEVEN, f"train.parallel={how}")
    distributed(root, moved, *sets, processes=first)
    for path in (moved / "gate.json", all_checkpoints(moved)[-1]):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    distributed(root, moved, *sets, processes=then)
    assert losses(moved) == pytest.approx(losses(alone), rel=1e-3)


def test_a_sample_with_broken_states_ends_the_training_and_is_named(
    root: Path, tmp_path: Path
) -> None:
    samples = read_states(root)
    job = job_of(root, tmp_path / "train", samples=samples)
    number = job.split.train[-1]
    samples[number].aux[3] = float("nan")
    job = job_of(root, tmp_path / "train", samples=samples)
    with pytest.raises(TrainingError, match=rf"update \d+ .*no finite number; samples .*s{number}"):
        run_job(job)


def test_a_damaged_shard_ends_the_training_with_the_checkpoint_named(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(root, tmp_path / "train", "train.checkpoint_every=2")
    reads = 0
    original = MemoryStates.read

    def read(self: MemoryStates, index: int) -> SampleStates:
        nonlocal reads
        reads += index in job.split.train
        if reads > 60 and index in job.split.train:
            raise TrainingError("the shard states-3 is cut off")
        return original(self, index)

    monkeypatch.setattr(MemoryStates, "read", read)
    with pytest.raises(TrainingError, match=r"update \d+ \(epoch 2\): the shard.*kept: .*update-"):
        run_job(job)
    assert all_checkpoints(job.folder)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()], ids=["torch", "python"]
)
def test_out_of_memory_says_what_to_lower(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(loop.Loop, "_row", fails)
    with pytest.raises(TrainingError, match=r"update 1 .*out of memory.*train\.row_tokens"):
        run_job(job_of(root, tmp_path / "train"))


def test_states_without_the_final_norm_are_refused(root: Path, tmp_path: Path) -> None:
    norm = load_file(root / "target" / "model.safetensors")["model.norm.weight"]
    for name, spoil in (
        ("never", lambda s: s.last_normed / norm * 3),
        ("twice", lambda s: s.last_normed.roll(1, 0)),
    ):
        samples = changed(read_states(root), last_normed=spoil)
        with pytest.raises(GateFailed, match="final norm"):
            run_job(job_of(root, tmp_path / name, samples=samples))


def test_a_missing_optimizer_is_refused_or_begun_anew_on_request(
    root: Path, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "train"
    shutil.copytree(whole, out, symlinks=True)
    (out / "gate.json").unlink()
    shutil.rmtree(all_checkpoints(out)[-1])
    (all_checkpoints(out)[-1] / OPTIMIZER).unlink()
    with pytest.raises(UsageError, match=r"is missing.*--set train\.restart_optimizer=true"):
        run_job(job_of(root, out))
    run_job(job_of(root, out, "train.restart_optimizer=true"))
    assert len(all_checkpoints(out)) == 2 and not same_weights(whole, out)


def test_another_plan_is_refused_and_free_keys_are_not(
    root: Path, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "train"
    shutil.copytree(whole, out, symlinks=True)
    with pytest.raises(UsageError, match=r"train\.lr 0\.003 -> 0\.5; .*remove"):
        run_job(job_of(root, out, "train.lr=0.5"))
    gate = run_job(job_of(root, out, "train.keep_checkpoints=1", "train.parallel=ddp"))
    assert gate.passed


def test_validation_tells_where_it_failed(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(root, tmp_path / "train")

    def read(self: MemoryStates, index: int) -> SampleStates:
        if index in job.split.held_out and all_checkpoints(job.folder):
            raise TrainingError("the shard states-3 is cut off")
        return self.samples[index]

    monkeypatch.setattr(MemoryStates, "read", read)
    with pytest.raises(TrainingError, match=r"validation after update 5: the shard.*kept: .*00005"):
        run_job(job)


def test_a_drafter_that_the_engine_computes_otherwise_is_not_the_best(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_another_flag(drafter: Eagle3Drafter, path: Path) -> None:
        drafter.spec = msgspec.structs.replace(drafter.spec, norm_before_residual=True)
        save(drafter, path)
        drafter.spec = msgspec.structs.replace(drafter.spec, norm_before_residual=False)

    monkeypatch.setattr(checkpoints, "save", with_another_flag)
    out = tmp_path / "train"
    run_job(job_of(root, out, "train.epochs=3", "train.lr=1e-2", "train.serve_check=8"))
    last = all_checkpoints(out)[-1]
    found = read_examination(last)
    assert found is not None and found.held_out.acceptance_length is not None
    assert [check.name for check in found.checks if not check.passed] == ["served_as_expected"]
    best = best_of(out)  # an earlier one, of which too little was accepted to tell
    assert best is not None and best != last
    beaten = read_examination(best)
    assert beaten is not None and beaten.held_out.acceptance_length is not None
    assert found.held_out.acceptance_length > beaten.held_out.acceptance_length


def finetuned(whole: Path, out: Path, **spec: object) -> Path:
    drafter = load(best_of(whole) or whole)
    drafter.spec = msgspec.structs.replace(drafter.spec, **spec)
    save(drafter, out)
    return out


def test_a_finetuned_drafter_begins_where_it_was(root: Path, whole: Path, tmp_path: Path) -> None:
    path = finetuned(whole, tmp_path / "from")
    out = tmp_path / "train"
    run_job(job_of(root, out, f"drafter.finetune={path}", "train.epochs=1"))
    before = json.loads((out / "baseline.json").read_text())
    found = read_examination(best_of(whole) or whole)
    assert found is not None
    assert before["acceptance_length"] == found.held_out.acceptance_length
    gate = read_gate(out)
    assert gate is not None and gate.passed
    limit = next(c.limit for c in gate.checks if c.name == "held-out acceptance length")
    assert isinstance(limit, float) and limit < before["acceptance_length"]


def test_a_finetuned_drafter_must_fit_states_and_target(
    root: Path, whole: Path, tmp_path: Path
) -> None:
    layers = finetuned(whole, tmp_path / "layers", aux_layers=(1, 2, 3))
    with pytest.raises(UsageError, match=r"one off.*capture\.aux_layers=1,2,3"):
        run_job(job_of(root, tmp_path / "a", f"drafter.finetune={layers}"))
    tensors = weights(whole)
    random_ones = tmp_path / "random"
    shutil.copytree(best_of(whole) or whole, random_ones)
    generator = torch.Generator().manual_seed(0)
    tensors["embed_tokens.weight"] = torch.randn(800, 64, generator=generator)
    save_file(tensors, random_ones / "model.safetensors")
    with pytest.raises(UsageError, match="left random"):
        run_job(job_of(root, tmp_path / "b", f"drafter.finetune={random_ones}"))
    kept = torch.arange(*USED)
    with pytest.raises(UsageError, match="run vocab again"):
        job = job_of(root, tmp_path / "c", f"drafter.finetune={best_of(whole)}", vocabulary=kept)
        run_job(job)


def test_a_wrong_rope_base_of_a_finetuned_drafter_is_found_out(
    root: Path, whole: Path, tmp_path: Path
) -> None:
    path = finetuned(whole, tmp_path / "rope", rope=RopeSpec(theta=3.0))
    with pytest.raises(UsageError, match=r"rope theta 3, .* correct rope_theta"):
        run_job(job_of(root, tmp_path / "train", f"drafter.finetune={path}"))


def test_a_small_draft_vocabulary_counts_what_lies_outside(root: Path, tmp_path: Path) -> None:
    kept = torch.arange(USED[0], USED[1] - 10)
    job = job_of(root, tmp_path / "train", vocabulary=kept)
    run_job(job)
    drafter = load(best_of(job.folder) or job.folder)
    assert drafter.spec.draft_vocab_size == len(kept)
    assert drafter.t2d is not None
    assert torch.equal(drafter.t2d.nonzero().flatten(), kept)
    record = next(r for r in read_metrics(job.folder) if r["kind"] == "update")
    assert 0 < record["outside_share"] < 1


def test_noise_and_checkpointed_layers_go_on_exactly(root: Path, tmp_path: Path) -> None:
    sets = ("train.noise=0.1", "train.optimizer=muon", "train.gradient_checkpointing=true")
    one, other = tmp_path / "one", tmp_path / "other"
    run_job(job_of(root, one, *sets))
    run_job(job_of(root, other, *sets))
    (other / "gate.json").unlink()
    shutil.rmtree(all_checkpoints(other)[-1])
    run_job(job_of(root, other, *sets))
    assert same_weights(one, other)


def test_an_mla_head_takes_the_targets_ranks_and_yarn(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root", family="deepseek", count=16)
    job = job_of(root, tmp_path / "train", "drafter.kind=mla", "train.lr=1e-2")
    run_job(job)
    spec = load(best_of(job.folder) or job.folder).spec
    assert spec.mla is not None and spec.mla.kv_lora_rank == 32
    assert spec.rope.scaling is not None and spec.rope.scaling["rope_type"] == "yarn"
    found = read_examination(best_of(job.folder) or job.folder)
    assert found is not None and found.served is not None
    assert found.served.real == found.served.expected


def test_a_target_too_large_to_be_served_is_told_before_the_training(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.targets.free_memory", lambda: 1000)
    with pytest.raises(UsageError, match=r"train\.serve_check: .*train\.serve_check=0"):
        run_job(job_of(root, tmp_path / "train"))
    gate = run_job(job_of(root, tmp_path / "train", "train.serve_check=0"))
    assert gate.passed


def test_sampled_answers_are_held_against_the_engines_own(root: Path, tmp_path: Path) -> None:
    def sampled(sample: SampleStates) -> torch.Tensor:
        ids = sample.token_ids.clone()
        ids[sample.loss_from :: 4] = USED[0]  # not what the target would have said
        return ids

    samples = changed(read_states(root), token_ids=sampled)
    out = tmp_path / "train"
    with pytest.raises(GateFailed, match=r"only 0\.7.* are the target's own choice"):
        run_job(job_of(root, out, samples=samples))
    run_job(job_of(root, out, samples=samples, greedy=False))
    found = read_examination(best_of(out) or out)
    assert found is not None and found.served is not None
    assert found.served.reproduced == 0 and "own answers" in found.served.states
    assert found.served.real == found.served.expected


def test_starvation_ends_the_training_and_keeps_what_was_learnt(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop.Starvation, "add", lambda self, seconds, waited: ("stop", 0.95))
    job = job_of(root, tmp_path / "train")
    with pytest.raises(TrainingError, match=r"starved of data.* 95% of .*kept: .*update-00000001"):
        run_job(job)
    assert not read_state(all_checkpoints(job.folder)[-1]).scheduled


def test_checkpoints_of_other_layouts_are_gone_on_from(
    root: Path, whole: Path, tmp_path: Path
) -> None:
    """`midlayer.*` names and no embedding, as published heads for Kimi-K2 have them."""
    path = tmp_path / "from"
    shutil.copytree(best_of(whole) or whole, path)
    tensors = {n.replace("layers.0.", "midlayer."): t for n, t in weights(whole).items()}
    save_file({n: t.bfloat16() for n, t in tensors.items()}, path / "model.safetensors")
    out = tmp_path / "train"
    run_job(job_of(root, out, f"drafter.finetune={path}", "train.epochs=1"))
    tuned = weights(out)
    assert "layers.0.mlp.up_proj.weight" in tuned
    assert {t.dtype for t in tuned.values()} == {torch.float32}


def test_too_few_prompts_are_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="leaves none to train on"):
        job_of(root, tmp_path / "train", samples=read_states(root)[:2])


def test_a_second_signal_ends_at_once() -> None:
    told: list[str] = []
    stop = Stop(told.append)
    with stop.listening():
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.asked
        assert len(told) == 1 and told[0].startswith("train: SIGINT received: ")
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    assert len(told) == 1
