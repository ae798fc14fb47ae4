"""The target's own choice after each token, taken once where its states are captured.

Training asks of every slot whether the target's choice can be drafted at all. That is a product
with the target's whole head, the same in every epoch and whatever the drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engines.capture.base import Capturer, RowStates
from engines.capture.target import CaptureTarget
from training.gate import Check
from training.norm_count import HEAD_ROWS, ranks
from training.progress import note

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from training.capture.inputs import Row


class WithChoice:
    """A source of hidden states whose rows bring the target's choice along.

    It is the argmax of the head over the whole vocabulary, on the states as the engine gave them:
    8 bits of storage cannot turn it over. States and head are multiplied in bfloat16 where both
    are stored so, which rounds neither; else in float32.
    """

    def __init__(self, inner: Capturer, target: CaptureTarget, device: str) -> None:
        import torch

        self._inner, self._target = inner, target
        self._device = device if torch.cuda.is_available() else "cpu"
        self._head: Tensor | None = None  # read at the first batch
        self.name = inner.name

    def capture(self, rows: Sequence[Sequence[int]]) -> list[RowStates]:
        """The states of each row, with `choice`. Raises what the engine raises."""
        import torch

        found = self._inner.capture(rows)
        last = torch.cat([states.last_normed for states in found])  # [sum of T, H]
        choice = self._choose(last if last.dtype == torch.bfloat16 else last.float())
        lengths = [len(states.last_normed) for states in found]
        return [
            RowStates(
                token_ids=states.token_ids,
                aux=states.aux,
                last_normed=states.last_normed,
                choice=part.clone(),
            )
            for states, part in zip(found, choice.split(lengths), strict=True)
        ]

    def close(self) -> None:
        """End the engine, and free the head: an engine may be started in its place."""
        import torch

        self._head = None
        self._inner.close()
        if self._device != "cpu":
            torch.cuda.empty_cache()

    def _choose(self, last: Tensor) -> Tensor:
        """The choices int32 [N] after states [N, H], on the engine's device where there is room."""
        import torch

        from training.loss import target_choice

        if self._head is None:
            self._head = self._read(last.dtype)
        last = last if last.dtype == self._head.dtype else last.float()
        try:
            self._head = self._head.to(self._device)
            found = target_choice(last.to(self._device), self._head)
        except torch.cuda.OutOfMemoryError:
            note("capture: no room for the target's head beside the engine; it goes to the CPU")
            self._device, self._head = "cpu", self._head.cpu()
            found = target_choice(last.cpu(), self._head)
        return found.to("cpu", torch.int32)

    def _read(self, dtype: torch.dtype) -> Tensor:
        """The head [V, H]: bfloat16 for such states where that rounds nothing, else float32."""
        import torch

        head = self._target.head()
        if dtype != torch.bfloat16:
            return head.float()
        # Some rows at a time: of a large target's head a copy more is gigabytes.
        exact = head.dtype == torch.bfloat16 or all(
            torch.equal(rows.bfloat16().float(), rows.float()) for rows in head.split(HEAD_ROWS)
        )
        return head.bfloat16() if exact else head.float()


def choice_check(
    found: Sequence[tuple[Row, Tensor, Tensor | None]],
    head: Tensor,
    least: float,
    *,
    rounded: bool,
) -> Check:
    """Where training looks, a row's choice must be what its last state ranks first.

    `found`: samples, their last states [T, H] and choices [T]. Greedy or sampled makes no
    difference. `rounded`: the states were stored in 8 bits, the choices were not: then the second
    place will do.
    """
    missing = [row.id for row, _, choice in found if choice is None]
    hits = of = 0
    for row, last, choice in found:
        if choice is None:
            continue
        begin = max(row.loss_from - 1, 0)
        tokens = choice[begin:].long()
        known = tokens.clamp(0, len(head) - 1)
        good = (ranks(last[begin:], head, known) < (2 if rounded else 1)) & (tokens == known)
        hits, of = hits + int(good.sum()), of + len(tokens)
    share = hits / of if of else None
    without = f"; {len(missing)} samples have none" if missing else ""
    return Check(
        name="choice",
        passed=not missing and share is not None and share >= least,
        value=share,
        limit=least,
        relation=">=",
        reason=f"of {of} choices are the likeliest token after the state beside them{without}",
        advice="the choices are of other rows than the states: remove the states and capture anew",
    )
