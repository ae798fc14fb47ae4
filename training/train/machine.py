"""Everything in memory before the first update: proved states, drafter, optimizer, position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from drafters.checkpoint import load
from drafters.eagle3 import Eagle3Drafter
from drafters.spec import DrafterError
from harness.errors import UsageError
from training.train import checkpoints as disk
from training.train.build import build, rope_in_doubt, set_trained
from training.train.console import Console
from training.train.feed import Feed, to_device
from training.train.job import Job
from training.train.objective import Objective
from training.train.optimizer import Optimizer
from training.train.parallel import Replica, World
from training.train.proof import prove_rope, prove_states
from training.train.rows import Row, Update, pack_rows, plan_epoch
from training.train.stopping import Stop
from training.train.target import TargetTensors, read_tensors
from training.train.validation import HeldOut, Tally, measure


class Position(msgspec.Struct, kw_only=True):
    """Updates and tokens done, and the next update's place."""

    update: int = 0
    epoch: int = 0
    in_epoch: int = 0
    tokens: int = 0


class Machine:
    """The drafter with what moves it, in one process of a training."""

    def __init__(self, job: Job, world: World, console: Console) -> None:
        self.job, self.world, self.console = job, world, console
        self.section = job.plan.train
        self.position = Position()
        self.losses: tuple[float, ...] = ()
        members = long_enough(job, job.split.train, console, "train on")
        held = long_enough(job, job.split.held_out, console, "validate on")
        self.members = members
        self.held_rows = pack_rows(held, job.source.lengths, self.section.row_tokens)
        self.tensors = self._read_target()
        self.objective = Objective(self.section, self.tensors.lm_head, world.device)
        console.doing("counting the updates", tell=False)
        self.epoch_updates = [len(self.updates(epoch)) for epoch in range(self.section.epochs)]

    @property
    def all_updates(self) -> int:
        """Updates of the whole training."""
        return sum(self.epoch_updates)

    def updates(self, epoch: int) -> list[Update]:
        """The updates of one epoch, the same in every process."""
        return plan_epoch(
            self.members,
            self.job.source.lengths,
            seed=self.section.seed,
            epoch=epoch,
            row_tokens=self.section.row_tokens,
            batch_tokens=self.section.batch_tokens,
        )

    def set_up(self, latest: Path | None) -> None:
        """Make the drafter and its optimizer, from the checkpoint `latest` where there is one."""
        drafter = self._resumed(latest) if latest is not None else self._new()
        if self.objective.low and not drafter.owns_embeddings:
            drafter.share(embeddings=self.tensors.embedding)  # as stored: half the memory
        self.replica = Replica(drafter, self.world, self.section.parallel)
        self.optimizer = Optimizer(self.replica, self.section)
        if latest is not None:
            self._restore(latest)
        elif self.job.plan.drafter.finetune is not None:
            self._check_rope(drafter)

    def held_out(self, stop: Stop | None = None) -> Tally:
        """This process's counts over the held-out rows; nothing is learnt from them.

        Where `stop` was asked to the rest is left out.
        """
        mine = self.held_rows[self.world.rank :: self.world.size]
        tally = Tally(self.job.plan.evaluate.k, self.objective)
        self.replica.gather()
        feed = Feed(self.job.source, mine, self.job.facts.vocab_size, self.waiting)
        try:
            for row in feed:
                if stop is not None and stop.asked:
                    break
                captured = to_device(row.captured, self.world.device, self.objective.dtype)
                self.replica.look(measure(self.objective, tally, row, captured))
        finally:
            feed.close()
        return tally

    def waiting(self, seconds: float) -> None:
        """Tell of a long wait for data."""
        self.console.say(f"train: waiting for states, {seconds:.0f} s so far")

    def _read_target(self) -> TargetTensors:
        job, console = self.job, self.console
        console.doing(f"reading head, embedding and last norm of {job.facts.folder}")
        tensors = read_tensors(job.facts)
        console.doing(f"proving the states of {len(job.source.sample_ids)} samples")
        share = prove_states(
            job.source,
            self.members,
            job.greedy,
            tensors,
            least=job.plan.capture.least_proof,
            layers=len(job.source.aux_layers),
        )
        console.say(f"train: {share:.3f} of the answers' tokens are the states' own choice")
        return tensors

    def _new(self) -> Eagle3Drafter:
        job, section = self.job, self.job.plan.drafter
        made = f"going on from {section.finetune}" if section.finetune else f"a new {section.kind}"
        self.console.doing(f"making the drafter: {made}")
        return build(
            section,
            job.facts,
            self.tensors,
            aux_layers=job.source.aux_layers,
            kept=job.vocabulary,
            seed=self.section.seed,
        )

    def _resumed(self, checkpoint: Path) -> Eagle3Drafter:
        self.console.doing(f"going on from {checkpoint}")
        try:
            drafter = load(checkpoint, self.job.facts.folder)
        except (DrafterError, OSError, ValueError) as error:
            raise UsageError(
                f"{checkpoint}: damaged ({error}); remove it to go on from the one before"
            ) from None
        return set_trained(drafter, self.job.plan.drafter, self.tensors)

    def _restore(self, checkpoint: Path) -> None:
        """Optimizer, random states and position, so that the next update is the very next."""
        state = disk.read_state(checkpoint)
        saved = disk.read_optimizer(checkpoint, restart=self.section.restart_optimizer)
        if saved is None:
            self.console.say("train: the optimizer begins anew, as train.restart_optimizer says")
        else:
            disk.set_random_states(saved)
            try:
                self.optimizer.load(saved)
            except KeyError as error:
                raise UsageError(
                    f"{checkpoint / disk.OPTIMIZER}: holds nothing of {error}; "
                    f"remove {checkpoint} to go on from the checkpoint before it, or say "
                    "--set train.restart_optimizer=true to begin the optimizer anew"
                ) from None
        self.position = Position(
            update=state.update, epoch=state.epoch, in_epoch=state.in_epoch, tokens=state.tokens
        )
        self.losses = state.losses

    def _check_rope(self, drafter: Eagle3Drafter) -> None:
        """A finetuned drafter with a rope of its own must draft better with it."""
        wanted = rope_in_doubt(drafter, self.job.facts)
        if wanted is None:
            return
        self.console.doing("comparing the checkpoint's rope with the target's")

        def measured() -> HeldOut:
            drafter.to(self.world.device)
            return self.held_out().figures(self.world)

        self.console.say(f"train: {prove_rope(drafter, wanted, measured)}")


def long_enough(
    job: Job, members: Sequence[int], console: Console, purpose: str
) -> tuple[int, ...]:
    """The samples that a whole unroll fits in; the others are counted and left out."""
    least = max(job.plan.train.ttt_steps, job.plan.evaluate.k) + 3
    kept = tuple(i for i in members if job.source.lengths[i] >= least)
    if len(kept) < len(members):
        console.say(
            f"train: {len(members) - len(kept)} of {len(members)} samples to {purpose} are "
            f"shorter than {least} tokens and left out"
        )
    if not kept:
        raise UsageError(f"every sample to {purpose} is shorter than {least} tokens")
    return kept


def rows_of(updates: Sequence[Update], world: World) -> Iterator[Row]:
    """This process's rows of the updates, in order."""
    for update in updates:
        yield from update[world.rank :: world.size]
