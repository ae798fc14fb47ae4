"""Validation, the examination of checkpoints, and which of them is the best."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import msgspec

from harness.errors import UsageError
from training.errors import TrainingError
from training.files import write_record
from training.gate import said
from training.states import SampleStates
from training.train import checkpoints as disk
from training.train.examine import Examination, examine, read_examination
from training.train.guard import SpikeRule
from training.train.job import BASELINE
from training.train.machine import Machine
from training.train.metrics import Metrics
from training.train.parallel import barrier, from_first
from training.train.stopping import Stop
from training.train.validation import HeldOut


class Judge:
    """Measures the drafter as it stands, and keeps checkpoints of it that pass."""

    def __init__(self, machine: Machine, metrics: Metrics | None, stop: Stop) -> None:
        self.machine, self.metrics, self.stop = machine, metrics, stop
        self.job, self.world, self.console = machine.job, machine.world, machine.console
        self.folder = self.job.folder

    def check_room(self) -> None:
        """Raises `UsageError` where the disk could not hold two more checkpoints."""
        if not self.world.first:
            return
        machine = self.machine
        drafter = machine.replica.drafter
        numbers = sum(p.numel() for _, p in drafter.named_parameters())
        numbers -= 0 if drafter.owns_embeddings else drafter.embed_tokens.weight.numel()
        trained = sum(p.numel() for _, p in machine.replica.named())
        moments = 1 if machine.section.optimizer == "muon" else 2
        size = 4 * (numbers + moments * trained)
        free = shutil.disk_usage(self.folder).free
        self.console.say(
            f"train: {trained / 1e6:,.1f} M trained parameters, {size / 1e9:,.2f} GB a checkpoint, "
            f"{free / 1e9:,.1f} GB free"
        )
        if free < 2 * size:
            raise UsageError(
                f"{self.folder}: {free / 1e6:,.0f} MB are free and a checkpoint takes "
                f"{size / 1e6:,.0f} MB; two must fit, make room"
            )

    def baseline(self) -> None:
        """The held-out figures before any update, measured once."""
        path = self.folder / BASELINE
        if self.machine.position.update or from_first(path.exists(), self.world):
            return
        figures = self.validate("validation before the first update")
        if self.world.first:
            write_record(path, figures)

    def validate(self, what: str = "validation") -> HeldOut:
        """Held-out figures of the drafter as it stands. KeyboardInterrupt where asked to stop."""
        samples = sum(len(row.indices) for row in self.machine.held_rows)
        self.console.doing(f"{what} on {samples} held-out samples")
        begun = time.perf_counter()
        try:
            tally = self.machine.held_out(self.stop)
        except TrainingError as error:
            update = self.machine.position.update
            raise TrainingError(
                f"validation after update {update}: {error}; {disk.kept(self.folder)}"
            ) from None
        figures = tally.figures(self.world)
        if self.stop.agreed(self.world):
            raise KeyboardInterrupt
        seconds = time.perf_counter() - begun
        self.console.say(f"train: {what}: {told(figures)} ({seconds:.1f} s)")
        if self.metrics is not None:
            values: dict[str, Any] = msgspec.to_builtins(figures)
            self.metrics.add("validation", self.machine.position.update, seconds=seconds, **values)
        return figures

    def save(self, spikes: SpikeRule, *, scheduled: bool) -> Path:
        """Write a checkpoint of this moment; every process takes part."""
        machine, position = self.machine, self.machine.position
        place = disk.folder_of(self.folder, position.update)
        self.console.doing(f"writing {place}")
        drafter, moments = machine.replica.whole(), machine.optimizer.state()
        if self.world.first:
            state = disk.TrainingState(
                update=position.update,
                epoch=position.epoch,
                in_epoch=position.in_epoch,
                scheduled=scheduled,
                tokens=position.tokens,
                losses=tuple(spikes.history),
            )
            schedule = {
                "schedule": machine.section.schedule,
                "update": position.update,
                "updates": machine.all_updates,
            }
            disk.write_checkpoint(self.folder, drafter, moments, schedule, state)
        barrier(self.world)
        return place

    def examine(self, checkpoint: Path) -> None:
        """Check a checkpoint of this moment, keep what was found, and see whether it is the best.

        A checkpoint that does not pass is said so and kept out of the choice.
        """
        figures = self.validate()
        whole = self.machine.replica.whole()
        if self.world.first:
            self.console.doing(f"examining {checkpoint}")
            found = examine(
                checkpoint,
                whole,
                figures,
                target=self.job.facts.folder,
                samples=self._samples_to_serve(),
                plan=self.job.plan,
            )
            disk.write_checks(checkpoint, found)
            self._tell(checkpoint, found)
            self.choose()
        barrier(self.world)

    def choose(self) -> None:
        """Point `best` to the passed checkpoint of the longest acceptance, and prune."""
        passed: list[tuple[float, Path]] = []
        for path in disk.all_checkpoints(self.folder):
            found = read_examination(path)
            if found is not None and found.passed and found.held_out.acceptance_length:
                passed.append((found.held_out.acceptance_length, path))
        if passed:
            best = max(passed, key=lambda each: (each[0], -int(each[1].name.split("-")[1])))[1]
            if best != disk.best_of(self.folder):
                disk.point_best(self.folder, best)
        disk.prune(self.folder, self.job.plan.train.keep_checkpoints)

    def _tell(self, checkpoint: Path, found: Examination) -> None:
        failed = [check for check in found.checks if not check.passed]
        if failed:
            self.console.say(f"train: {checkpoint} did not pass: {said(failed[0])}")
        elif found.served is not None:
            self.console.say(f"train: {checkpoint.name}: {said(found.checks[-1])}")
        if self.metrics is not None:
            served = found.served
            self.metrics.add(
                "checkpoint",
                found.update,
                passed=found.passed,
                held_out_acceptance_length=found.held_out.acceptance_length,
                served_acceptance_rate=served.real.acceptance_rate if served else None,
                expected_acceptance_rate=served.expected.acceptance_rate if served else None,
                failed=[check.name for check in failed],
            )

    def _samples_to_serve(self) -> list[SampleStates]:
        """The first held-out samples that can be served, those without sampling before others."""
        wanted = self.job.plan.train.serve_check
        source, found = self.job.source, list[SampleStates]()
        if not wanted:
            return found
        longest = self.machine.replica.drafter.spec.max_position_embeddings
        rows = [i for row in self.machine.held_rows for i in row.indices]
        fitting = sorted(i for i in rows if source.lengths[i] < longest)
        for index in sorted(fitting, key=lambda i: source.sample_ids[i] not in self.job.greedy):
            states = source.read(index)
            if 0 < states.loss_from < len(states.token_ids) - 1:
                found.append(states)
            if len(found) == wanted:
                break
        return found


def told(figures: HeldOut) -> str:
    """The held-out figures in one line."""
    accuracy = " ".join("none" if a is None else f"{a:.3f}" for a in figures.accuracy)
    conditional = " ".join("none" if c is None else f"{c:.3f}" for c in figures.conditional)
    length = figures.acceptance_length
    rate = figures.acceptance_rate
    if length is None or rate is None or figures.loss is None:
        return "nothing could be walked"
    return (
        f"loss {figures.loss:.3f}, accuracy by TTT step {accuracy}, conditional {conditional}, "
        f"expected acceptance length {length:.3f} and rate {rate:.3f} at k = {figures.k}"
    )
