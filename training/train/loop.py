"""The training loop: updates, checkpoints, and how it ends.

Everything that decides the weights is a function of plan, data and position, so that a training
that was stopped, or killed, ends with the same weights.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec
import torch
from torch import Tensor

from drafters.eagle3 import Eagle3Drafter
from training.counts import StepCounts
from training.errors import TrainingError
from training.progress import clock
from training.train import checkpoints as disk
from training.train.console import Console
from training.train.examine import read_examination
from training.train.feed import Feed, LoadedRow, to_device
from training.train.guard import SpikeRule, Starvation, not_finite
from training.train.job import Job
from training.train.judge import Judge
from training.train.machine import Machine, rows_of
from training.train.metrics import Metrics, peak_memory
from training.train.optimizer import rate
from training.train.parallel import World, from_first, total
from training.train.rows import Update
from training.train.stopping import Stop
from training.train.validation import outside_share

SHOWN_IDS = 8
SLOW_TOLD_S = 60.0


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What one update showed, over all processes; `outside`: share of undraftable choices."""

    loss: float
    accuracy: tuple[float | None, ...]
    tokens: int
    outside: float | None
    row_losses: tuple[float, ...]


def train(job: Job, world: World, console: Console, stop: Stop) -> None:
    """Train from the last checkpoint, or from the beginning, to the end of the plan.

    Raises `TrainingError` (with what was kept) where it cannot go on, KeyboardInterrupt after the
    checkpoint that a signal asked for.
    """
    found = disk.all_checkpoints(job.folder) if world.first else []
    latest = from_first(found[-1] if found else None, world)
    machine = Machine(job, world, console)
    machine.set_up(latest)
    due = latest is not None and _due(latest, world)
    done = machine.position.update
    metrics = Metrics(job.folder, resumed_at=done, again=due) if world.first else None
    try:
        with stop.listening():
            loop = Loop(machine, metrics, stop)
            loop.judge.check_room()
            loop.judge.baseline()
            if latest is not None and due:
                loop.judge.examine(latest)
            loop.run()
    finally:
        if metrics is not None:
            metrics.close()


def _due(checkpoint: Path, world: World) -> bool:
    """Whether a checkpoint should have been examined and was not: the run was killed over it."""
    due = False
    if world.first:
        due = disk.read_state(checkpoint).scheduled and read_examination(checkpoint) is None
    return from_first(due, world)


class Loop:
    """The updates of one process."""

    def __init__(self, machine: Machine, metrics: Metrics | None, stop: Stop) -> None:
        self.machine, self.metrics, self.stop = machine, metrics, stop
        self.job, self.world, self.console = machine.job, machine.world, machine.console
        self.section, self.position = machine.section, machine.position
        self.judge = Judge(machine, metrics, stop)
        self.spikes = SpikeRule(machine.losses)
        self.starved = Starvation()
        self.begun, self.first = time.perf_counter(), self.position.update
        self._slow_told = 0.0

    def run(self) -> None:
        """All epochs from where the training stands."""
        while self.position.epoch < self.section.epochs:
            updates = self.machine.updates(self.position.epoch)[self.position.in_epoch :]
            rows = list(rows_of(updates, self.world))
            name = f"epoch {self.position.epoch + 1}/{self.section.epochs}"
            self.console.doing(f"{name}: {len(updates)} updates, the first is under way")
            vocabulary = self.job.facts.vocab_size
            feed = Feed(self.job.source, rows, vocabulary, self.machine.waiting)
            try:
                self._epoch(updates, feed)
            finally:
                feed.close()

    def _epoch(self, updates: Sequence[Update], feed: Feed) -> None:
        rows = iter(feed)
        for update in updates:
            begun, waited = time.perf_counter(), feed.waited
            figures = self._guarded(update, rows)
            factor = rate(self.position.update, self.machine.all_updates, self.section)
            norm = self._check(update, figures)
            lr = self.machine.optimizer.step(factor)
            self._advance(figures)
            seconds = time.perf_counter() - begun
            self._record(figures, norm, lr, seconds, feed.waited - waited)
            starving = self._starving(seconds, feed.waited - waited)
            self._between(update, starving)

    # -- one update --------------------------------------------------------------------------

    def _guarded(self, update: Update, rows: Iterator[LoadedRow]) -> Figures:
        """The update's gradients; what goes wrong is told with update, samples and checkpoint."""
        try:
            return self._gradients(update, rows)
        except TrainingError as error:
            self._fail(str(error), update, symmetric=False)
        except (torch.OutOfMemoryError, MemoryError) as error:
            self._fail(self._memory(update, error), update, symmetric=False)
        except RuntimeError as error:
            if "allocate memory" not in str(error):
                raise
            self._fail(self._memory(update, error), update, symmetric=False)

    def _memory(self, update: Update, error: BaseException) -> str:
        longest = max(row.tokens for row in update)
        return (
            f"out of memory on a row of up to {longest} tokens ({type(error).__name__}): lower "
            "train.row_tokens or capture.max_length, or set train.gradient_checkpointing"
        )

    def _gradients(self, update: Update, rows: Iterator[LoadedRow]) -> Figures:
        """Sum the loss's gradients over the update's rows, then divide by all slots' weight."""
        objective, world = self.machine.objective, self.world
        mine = len(update[world.rank :: world.size])
        counts, tokens = objective.no_counts(), 0
        losses = [0.0] * len(update)
        for i in range(mine):
            row = next(rows)
            found = self._row(row, last=i == mine - 1)
            counts, tokens = counts + found, tokens + row.row.tokens
            weight = objective.weight(found)
            mean = sum(found.get("loss_sum")) / weight if weight else 0.0
            losses[world.rank + i * world.size] = mean
        if not mine:
            self.machine.replica.run(_nothing, last=True).backward()
        values = total([tokens, *counts.table.flatten().tolist(), *losses], world)
        cells = counts.table.numel()
        counts = objective.counts_of(values[1 : 1 + cells])
        # DDP and FSDP give the mean of the processes' sums
        factor = world.size / max(objective.weight(counts), 1e-6)
        self.machine.optimizer.scale_gradients(factor)
        loss = counts.loss(objective.decay)
        return Figures(
            loss=0.0 if loss is None else loss,
            accuracy=tuple(counts.accuracy),
            tokens=int(values[0]),
            outside=outside_share(counts.get("outside"), counts.get("judged")),
            row_losses=tuple(values[1 + cells :]),
        )

    def _row(self, row: LoadedRow, *, last: bool) -> StepCounts:
        """Add a row's gradients; what was counted on the way."""
        objective = self.machine.objective
        captured = to_device(row.captured, self.world.device, objective.dtype)
        place = (self.section.seed, self.position.epoch, row.row.number)

        def work(drafter: Eagle3Drafter) -> tuple[Tensor, Tensor]:
            found = objective.loss(drafter, captured, place)
            return found.total, found.counts.table

        loss, table = self.machine.replica.run(work, last=last)
        loss.backward()
        return StepCounts(table=table.detach().cpu())

    def _check(self, update: Update, figures: Figures) -> float:
        """The norm of the gradients, clipped; ends the training where something is no number."""
        norm = self.machine.optimizer.clip()
        bad = not_finite(figures.row_losses, norm)
        if bad is not None:
            what = "the loss" if bad else "the gradient"
            rows = tuple(update[i] for i in bad) or update
            self._fail(f"{what} is no finite number", rows, symmetric=True)
        if self.spikes.add(figures.loss):
            self._fail(
                f"the loss jumped to {figures.loss:.4g} for three updates, far above the last "
                f"{len(self.spikes.history)} (limit {self.spikes.limit():.4g}); lower train.lr or "
                "look at these samples",
                update,
                symmetric=True,
            )
        return norm

    def _fail(self, reason: str, rows: Update, *, symmetric: bool) -> NoReturn:
        """End with one line; where all processes know, the first alone tells."""
        if symmetric and not self.world.first:
            raise SystemExit(TrainingError.exit_code)
        ids = [self.job.source.sample_ids[i] for row in rows for i in row.indices]
        more = f" and {len(ids) - SHOWN_IDS} more" if len(ids) > SHOWN_IDS else ""
        raise TrainingError(
            f"update {self.position.update + 1} (epoch {self.position.epoch + 1}): {reason}; "
            f"samples {', '.join(ids[:SHOWN_IDS])}{more}; {disk.kept(self.job.folder)}"
        )

    # -- between updates ---------------------------------------------------------------------

    def _advance(self, figures: Figures) -> None:
        position = self.position
        position.update += 1
        position.in_epoch += 1
        position.tokens += figures.tokens
        if position.in_epoch == self.machine.epoch_updates[position.epoch]:
            position.epoch, position.in_epoch = position.epoch + 1, 0

    def _between(self, update: Update, starving: float | None) -> None:
        """Checkpoints and validations that are due, and the wish to stop."""
        done = self.position.update
        asked, starved = total([float(self.stop.asked), float(starving is not None)], self.world)
        every = self.section.checkpoint_every
        if self.position.in_epoch == 0 or (every and done % every == 0):
            checkpoint = self.judge.save(self.spikes, scheduled=True)
            if asked:
                raise KeyboardInterrupt
            self.judge.examine(checkpoint)
        elif asked or starved:
            self.judge.save(self.spikes, scheduled=False)
            if asked:
                raise KeyboardInterrupt
        elif self.section.validate_every and done % self.section.validate_every == 0:
            self._validate()
        if starved:
            share = "" if starving is None else f" {starving:.0%} of"
            self._fail(
                f"starved of data: updates waited for states{share} the last minutes; put the "
                "states on a faster disk, or give the engine that streams them more",
                update,
                symmetric=True,
            )

    def _validate(self) -> None:
        """Held-out figures between two checkpoints; a wish to stop keeps what was learnt."""
        try:
            self.judge.validate()
        except KeyboardInterrupt:
            self.judge.save(self.spikes, scheduled=False)
            raise

    def _starving(self, seconds: float, waited: float) -> float | None:
        verdict = self.starved.add(seconds, waited)
        if verdict is None:
            return None
        kind, share = verdict
        if kind == "stop":
            return share
        if time.perf_counter() - self._slow_told > SLOW_TOLD_S:
            self._slow_told = time.perf_counter()
            self.console.say(f"train: {share:.0%} of the time is spent waiting for states")
        return None

    def _record(
        self, figures: Figures, norm: float, lr: float, seconds: float, waited: float
    ) -> None:
        if self.metrics is None:
            return
        done, everything = self.position.update, self.machine.all_updates
        memory = peak_memory(self.world.device)
        speed = figures.tokens / max(seconds, 1e-9)
        self.metrics.add(
            "update",
            done,
            epoch=self.position.epoch if self.position.in_epoch else self.position.epoch - 1,
            loss=figures.loss,
            accuracy=figures.accuracy,
            lr=lr,
            grad_norm=norm,
            tokens=figures.tokens,
            tokens_per_s=speed,
            seconds=seconds,
            data_wait_s=waited,
            outside_share=figures.outside,
            memory_bytes=memory,
        )
        left = (time.perf_counter() - self.begun) / (done - self.first) * (everything - done)
        shown = {
            "loss": f"{figures.loss:.4f}",
            "accuracy": " ".join("none" if a is None else f"{a:.3f}" for a in figures.accuracy),
            "lr": f"{lr:.3g}",
            "grad norm": f"{norm:.3g}",
            "tokens/s": f"{speed:,.0f}",
            "data wait": f"{waited / max(seconds, 1e-9):.0%}",
            "memory": f"{memory / 2**30:.2f} GiB",
            "left": clock(left),
        }
        self.console.figures(f"update {done}/{everything}", shown, last=done == everything)


def _nothing(drafter: Eagle3Drafter) -> Tensor:
    """A loss of 0 that every trained parameter takes part in."""
    parts = [(p * 0).sum() for p in drafter.parameters() if p.requires_grad]
    return torch.stack(parts).sum()
