"""States that are never stored: an engine computes them as training takes them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from engines.capture.base import Capturer, open_capturer
from training.capture.ahead import Ahead
from training.capture.choice import WithChoice
from training.capture.inputs import Row, capture_spec, read_inputs
from training.folders import stage_folder
from training.plan import TrainingPlan
from training.states import SampleStates


class OnlineStates:
    """The states of `rows` from an engine that is opened at the first use.

    `batch` samples are computed at a time, in the order asked for, and wait in a buffer of
    `buffer` samples: all that memory ever holds beside the batch in work. `waited_s` says how long
    training stood waiting for states (seconds, over all streams), `waits` how often, and `served`
    how many samples it took. The states have the engine's own precision.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        aux_layers: tuple[int, ...],
        opened: Callable[[], Capturer],
        *,
        batch: int,
        buffer: int,
    ) -> None:
        self.aux_layers = aux_layers
        self.rows = list(rows)
        self.lengths: Sequence[int] = [len(row.token_ids) for row in rows]
        self.sample_ids: Sequence[str] = [row.id for row in rows]
        self.served = 0
        self._opened, self._batch, self._buffer = opened, batch, buffer
        self._capturer: Capturer | None = None
        self._using = threading.Lock()
        self._streams: list[Ahead[SampleStates]] = []

    @property
    def waited_s(self) -> float:
        """Seconds that training waited for states."""
        return sum(stream.waited_s for stream in self._streams)

    @property
    def waits(self) -> int:
        """How often training waited for states."""
        return sum(stream.waits for stream in self._streams)

    def read(self, index: int) -> SampleStates:
        """The states of sample `index`, computed now."""
        return self._compute([index])[0]

    def stream(self, order: Sequence[int]) -> Iterator[SampleStates]:
        """The states of the samples in `order`, computed ahead as far as the buffer allows."""
        order = list(order)

        def make() -> Iterator[SampleStates]:
            for begin in range(0, len(order), self._batch):
                yield from self._compute(order[begin : begin + self._batch])

        ahead = Ahead(make, self._buffer)
        self._streams.append(ahead)
        for states in ahead:
            self.served += 1
            yield states

    def close(self) -> None:
        """End the engine; a later use opens it again."""
        with self._using:
            if self._capturer is not None:
                self._capturer.close()
                self._capturer = None

    def _compute(self, indices: Sequence[int]) -> list[SampleStates]:
        with self._using:
            if self._capturer is None:
                self._capturer = self._opened()
            rows = [self.rows[index] for index in indices]
            captured = self._capturer.capture([row.token_ids.tolist() for row in rows])
        return [
            SampleStates(
                sample_id=row.id,
                category=row.category,
                token_ids=states.token_ids,
                loss_from=row.loss_from,
                aux=states.aux,
                last_normed=states.last_normed,
                choice=states.choice,
            )
            for row, states in zip(rows, captured, strict=True)
        ]


def open_online(plan: TrainingPlan, work: Path) -> OnlineStates:
    """The states of the training's samples from the plan's engine, nothing stored.

    Raises `UsageError`, and `GateFailed` where the samples' gate did not pass.
    """
    inputs = read_inputs(plan, work)
    spec = capture_spec(plan, inputs, stage_folder(work, "capture") / "engine")
    return OnlineStates(
        inputs.rows,
        inputs.layout.aux_layers,
        lambda: WithChoice(open_capturer(plan.capture.engine, spec), inputs.target, spec.device),
        batch=plan.capture.batch,
        buffer=plan.capture.buffer_samples,
    )
