"""Every row of states that a drafter was handed, with where it came from and whose it could be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.diagnose.experiments.traced import Traced

COMMON = 8
"""Tokens that two prompts have in common from their beginning, from which on one is a reused one:
chat templates begin all alike."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """R rows of valid tokens, all steps of all requests; the reference's rows beside them.

    `handed` [R, A]. `request`, `position` [R]; `at` [R]: the token's place among all requests'
    tokens side by side, `base` [requests] where each begins. `decode`, `batched`, `first` (of a
    first verify step), `reused` (of a prompt's part that an earlier prompt had), bool [R]; `call`
    [R] and `place` [R]: the engine's call, and which row of its step this is. `before` [R, 2]: the
    tokens of the same request's step before that stood in the same row, or last; -1: none.
    """

    requests: tuple[Traced, ...]
    handed: Tensor
    request: Tensor
    position: Tensor
    base: Tensor
    decode: Tensor
    batched: Tensor
    first: Tensor
    reused: Tensor
    call: Tensor
    place: Tensor
    before: Tensor

    @property
    def at(self) -> Tensor:
        return self.base[self.request] + self.position

    def of_layer(self, layer: int) -> Tensor:
        """The reference's states at an index of `inputs` for all requests' tokens, [N, H]."""
        return torch.cat([one.states.inputs[layer] for one in self.requests])

    def moved(self, by: int) -> Tensor:
        """The places [R] of the tokens `by` further on in the same text; -1 beyond its ends."""
        sizes = torch.tensor([len(one.tokens) for one in self.requests])[self.request]
        to = self.position + by
        return torch.where((to >= 0) & (to < sizes), self.at + by, -1)

    def others(self) -> list[Tensor]:
        """Places [R] of other requests' tokens that could stand in a row's stead; -1: none.

        Those in the same row of the same call, and those at the same position of the text.
        """
        found = []
        for other, one in enumerate(self.requests):
            mine = self.request == other
            same = torch.where(
                self.position < len(one.tokens), self.base[other] + self.position, -1
            )
            rows = {
                (step.call, row): position
                for step in one.steps
                for row, position in enumerate(step.positions[: step.valid].tolist())
            }
            pairs = zip(self.call.tolist(), self.place.tolist(), strict=True)
            beside = torch.tensor([rows.get(pair, -1) for pair in pairs])
            beside = torch.where(beside >= 0, self.base[other] + beside, -1)
            found += [torch.where(mine, -1, at) for at in (beside, same)]
        return found


def rows_of(requests: Sequence[Traced]) -> Rows:
    """All valid rows of the trace."""
    sizes = [len(one.tokens) for one in requests]
    base = torch.tensor([0, *sizes]).cumsum(0)[:-1]
    common = _reused(requests)
    handed, before = [], []
    facts: dict[str, list[int]] = {name: [] for name in _FACTS}
    for number, one in enumerate(requests):
        last: list[int] = []
        verified, begin = 0, int(base[number])
        for step in one.steps:
            verified += step.kind == "decode"
            positions = step.positions[: step.valid].tolist()
            handed.append(step.aux[: step.valid].float())
            for row, position in enumerate(positions):
                before.append(
                    [begin + last[min(row, len(last) - 1)], begin + last[-1]] if last else [-1, -1]
                )
                prefill = step.kind == "prefill"
                told = (
                    *(number, position, not prefill, step.batch > 1, verified == 1),
                    *(prefill and (one.reused or position < common[number]), step.call, row),
                )
                for name, value in zip(_FACTS, told, strict=True):
                    facts[name].append(int(value))
            last = positions
    told_of = {name: torch.tensor(values) for name, values in facts.items()}
    flags = {name: told_of.pop(name).bool() for name in ("decode", "batched", "first", "reused")}
    return Rows(
        requests=tuple(requests),
        handed=torch.cat(handed),
        base=base,
        before=torch.tensor(before),
        **told_of,
        **flags,
    )


_FACTS = ("request", "position", "decode", "batched", "first", "reused", "call", "place")


def _reused(requests: Sequence[Traced]) -> list[int]:
    """How much of each prompt an earlier one began with; 0 where it is only a template."""
    order = sorted(range(len(requests)), key=lambda i: requests[i].steps[0].call)
    found = [0] * len(requests)
    for at, number in enumerate(order):
        one = requests[number]
        for earlier in (requests[i] for i in order[:at]):
            most = min(one.begin, earlier.begin)
            pairs = enumerate(zip(one.tokens[:most], earlier.tokens[:most], strict=True))
            same = next((i for i, (a, b) in pairs if a != b), most)
            found[number] = max(found[number], same)
    return [same if same >= COMMON else 0 for same in found]
