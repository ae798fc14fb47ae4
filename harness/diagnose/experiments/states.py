"""What the drafter was handed, beside the reference's states of the same tokens.

Each row is held against every layer's states of its own token, moved ones, other requests' and the
previous step's. Layers next to each other are alike (a cosine of 0.98 in small models), so that
candidates are ranked by exactness: what is left of a row when the candidate is taken away, at the
scale that the rows have in common.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.reference.model import rms_norm
from engines.trace.base import TraceStep
from harness.diagnose.experiments.figures import by_group
from harness.diagnose.experiments.known import Knowledge
from harness.diagnose.experiments.rows import Rows, rows_of
from harness.diagnose.experiments.shares import shared_out
from harness.diagnose.experiments.target import dtype_of
from harness.diagnose.experiments.traced import put_together
from harness.diagnose.records import Fit, Proportion, SlotFit, States, Where
from harness.errors import UsageError

FLOORS = {"float32": 0.9995, "float16": 0.998, "bfloat16": 0.99}
"""Cosine of a row with the same state in float32 that a type's honest arithmetic reaches."""
NORMS = {"float32": 0.01, "float16": 0.03, "bfloat16": 0.05}
"""How far a row's norm may be off, as a share."""
SOME = 0.02
"""From so large a share of bad rows on a slot is judged by these alone."""
SHOWN = 8
EXACT = 0.02
"""Of a row, what may be left of it beside what it holds."""
MOVES = (-2, -1, 1, 2)
PARTIAL = 0.4
"""Cosine of what a row lacks with the branch that it would lack a part of."""
WIDE = 16
"""Layers of a target up to which the matrix holds normed states and branches too."""


@dataclass(frozen=True, kw_only=True)
class _Tried:
    """One candidate beside all R rows of a slot.

    `cosine` and `ratio` (|row| / |candidate|) [R]; `known` [R]: where there is a candidate.
    """

    name: str
    cosine: Tensor
    ratio: Tensor
    known: Tensor

    def error(self, chosen: Tensor) -> Tensor:
        """What is left of the chosen rows without the candidate at its common scale; shares."""
        rows = chosen & self.known
        ratio = self.ratio[rows]
        share = ratio.median() / ratio.clamp_min(1e-12)
        return (1 - 2 * share * self.cosine[rows] + share.square()).clamp_min(0).sqrt()

    def fit(self, chosen: Tensor) -> Fit:
        rows = chosen & self.known
        if not rows.any():
            return Fit(candidate=self.name, cosine=0.0, scale=0.0)
        cosine, scale = self.cosine[rows].median().item(), self.ratio[rows].median().item()
        return Fit(candidate=self.name, cosine=cosine, scale=scale)


def compare_states(knowledge: Knowledge, trace: Mapping[str, Sequence[TraceStep]]) -> States:
    """Every aux slot's rows beside all layers' states of the reference engine.

    Of a slot with bad rows, `best`, `as_declared` and `fits` are of these alone. Beside the names
    that `Fit` lists there is `partial[i]`: hidden[i] with a part of its last addition.
    Raises `UsageError` where the trace holds no request whose text is whole.
    """
    requests = put_together(knowledge, trace)
    if not requests:
        raise UsageError("the trace holds no call of the drafter whose text is whole")
    rows = rows_of(requests)
    kind = dtype_of(knowledge.subject)
    hidden = knowledge.engine.model.config.hidden_size
    slots: list[SlotFit] = []
    bad = torch.zeros(len(rows.handed), dtype=torch.bool)
    names: list[str] = []
    matrix: list[tuple[float, ...]] = []
    columns: list[str] = []
    for slot, layer in enumerate(knowledge.aux_layers):
        handed = rows.handed[:, slot * hidden : (slot + 1) * hidden]
        if handed.shape[1] < hidden:
            break  # the drafter was handed fewer layers than it asks for
        tried = list(_candidates(knowledge, rows, handed, layer, FLOORS[kind]))
        own = tried[0]
        wrong = _wrong(own, kind)
        bad |= wrong
        zero = handed.norm(dim=1) <= 1e-6 * rows.of_layer(layer)[rows.at].norm(dim=1)
        odd = wrong & ~zero
        if 0 < layer < knowledge.layers and odd.sum() > SOME * len(odd) and not _known(tried, odd):
            made = shared_out(knowledge, rows, handed, layer, odd)
            if made is not None:
                tried.append(_Beside(rows, handed).rows_of(f"partial[{layer}]", made))
        for where, batched, group in _groups(rows):
            slots.append(_slot_fit((slot, where, batched), group, tried, wrong, zero))
        shown = [one for one in tried if _in_matrix(one.name, knowledge.layers)]
        columns = sorted({one.name for one in shown}, key=_column)
        by_name = {one.name: one for one in shown}
        for where, group in (("prefill", ~rows.decode), ("decode", rows.decode)):
            if group.any():
                names.append(f"slot {slot}, {where}")
                matrix.append(tuple(by_name[name].fit(group).cosine for name in columns))
    return States(
        slots=tuple(slots),
        matrix_rows=tuple(names),
        matrix_columns=tuple(columns),
        matrix=tuple(matrix),
        bad_by_step=_by_step(rows, bad),
        floor=FLOORS[kind],
    )


def state_name(layer: int, depth: int) -> str:
    """The candidate's name of transformers' index `layer`: the last one is normed."""
    if layer == depth:
        return f"normed[{layer}]"
    return f"hidden[{layer}]" if layer else "embedding"


def _known(tried: Sequence[_Tried], chosen: Tensor) -> bool:
    """Whether one candidate is what most of these rows hold, all but exactly."""
    return any(
        (chosen & one.known).sum() > chosen.sum() / 2 and one.error(chosen).median() < EXACT
        for one in tried
    )


def _wrong(own: _Tried, kind: str) -> Tensor:
    off = (own.ratio - 1).abs() > NORMS[kind]
    return (own.cosine < FLOORS[kind]) | off


def _groups(rows: Rows) -> Iterator[tuple[Where, bool, Tensor]]:
    """The places that are judged apart, those that have rows."""
    places: tuple[tuple[Where, Tensor], ...] = (("prefill", ~rows.decode), ("decode", rows.decode))
    for where, chosen in places:
        for batched in (False, True):
            group = chosen & (rows.batched == batched)
            if group.any():
                yield where, batched, group


def _slot_fit(
    place: tuple[int, Where, bool],
    group: Tensor,
    tried: Sequence[_Tried],
    wrong: Tensor,
    zero: Tensor,
) -> SlotFit:
    """`tried[0]` is the declared state."""
    count = int(group.sum())
    bad = group & wrong
    chosen = bad if bad.sum() > SOME * count else group
    if (chosen & ~zero).any():
        chosen = chosen & ~zero
    declared = tried[0]
    ranked = _ranked(tried, chosen)
    return SlotFit(
        slot=place[0],
        where=place[1],
        batched=place[2],
        rows=count,
        declared=declared.name,
        best=ranked[0],
        as_declared=declared.fit(chosen),
        zero_share=int((group & zero).sum()) / count,
        bad_share=int(bad.sum()) / count,
        fits=tuple(ranked[:SHOWN]),
    )


def _ranked(tried: Sequence[_Tried], chosen: Tensor) -> list[Fit]:
    """Fits, the most exact first; the declared state before what is hardly more exact.

    A candidate that is known for less than a third of the rows is not ranked. A part of a branch
    explains anything a little: it has to explain much.
    """
    least = max(1.0, chosen.sum().item() / 3)
    scored = []
    for order, one in enumerate(tried):
        rows = chosen & one.known
        if order and rows.sum() < least:
            continue
        error = one.error(chosen).median().item() if rows.any() else 1.0
        if one.name.startswith("partial"):
            error *= 1.1
        scored.append((error if order else 0.95 * error - 1e-4, order, one))
    best: dict[str, Fit] = {}
    for _, _, one in sorted(scored, key=lambda x: x[:2]):
        best.setdefault(one.name, one.fit(chosen))
    return list(best.values())


def _by_step(rows: Rows, bad: Tensor) -> dict[str, Proportion]:
    """Bad rows by where they lie; what was never there is left out."""
    call = rows.call
    middle = (int(call.min()) + int(call.max())) / 2
    prefill = ~rows.decode
    places = {
        "prefill": prefill & ~rows.reused,
        "reused prefix": prefill & rows.reused,
        "first decode": rows.decode & rows.first,
        "later decode": rows.decode & ~rows.first,
        "batch 1": rows.decode & ~rows.batched,
        "batched": rows.decode & rows.batched,
        "early": call <= middle,
        "late": call > middle,
    }
    groups = torch.tensor([one.group for one in rows.requests])[rows.request]
    found = {
        name: by_group(bad.numpy(), groups.numpy(), chosen.numpy())
        for name, chosen in places.items()
    }
    return {name: told for name, told in found.items() if told is not None}


# -- candidates ---------------------------------------------------------------------------------


def _candidates(
    knowledge: Knowledge, rows: Rows, handed: Tensor, layer: int, floor: float
) -> Iterator[_Tried]:
    """The declared state first, then all others; names may come twice, the better one counts."""
    depth = knowledge.layers
    norm = knowledge.engine.model.norm
    eps = knowledge.engine.model.config.norm_eps
    beside = _Beside(rows, handed)
    yield beside.tried(state_name(layer, depth), _declared(rows, layer, depth), rows.at)
    for index in range(depth + 1):
        states = rows.of_layer(index)
        if index != layer or index == depth:
            name = f"hidden[{index}]" if index else "embedding"
            yield beside.tried(name, states, rows.at)
        if not index == layer == depth:
            yield beside.tried(f"normed[{index}]", rms_norm(states, norm, eps), rows.at)
        if index < depth:
            weight = knowledge.engine.model.layers[index].attention_norm
            yield beside.tried(f"normed[{index}]", rms_norm(states, weight, eps), rows.at)
            yield beside.tried(f"branch[{index}]", rows.of_layer(index + 1) - states, rows.at)
            yield beside.tried(f"branch[{index}]", _mlp(rows, index), rows.at)
    for index in sorted({layer, *knowledge.aux_layers}):
        states = _declared(rows, index, depth)
        for by in MOVES:
            yield beside.tried(f"{state_name(index, depth)}@{by:+d}", states, rows.moved(by))
    own = _declared(rows, layer, depth)
    before = [rows.before[:, column] for column in range(rows.before.shape[1])]
    near = 2 * (2 * (1 - floor)) ** 0.5
    yield beside.nearest("previous step", own, before, near)
    yield beside.nearest("other request", own, rows.others(), near)
    if 0 < layer < depth:
        yield beside.partial(f"partial[{layer}]", own, _mlp(rows, layer - 1))


def _declared(rows: Rows, layer: int, depth: int) -> Tensor:
    if layer == depth:
        return torch.cat([one.states.normed for one in rows.requests])
    return rows.of_layer(layer)


def _mlp(rows: Rows, layer: int) -> Tensor:
    return torch.cat([one.states.mlp[layer] for one in rows.requests])


class _Beside:
    """The rows [R, H] that were handed over, and what they are held against."""

    def __init__(self, rows: Rows, handed: Tensor) -> None:
        self.rows, self.handed = rows, handed
        self.norms = handed.norm(dim=1)

    def tried(self, name: str, states: Tensor, at: Tensor) -> _Tried:
        """Candidate rows states[at] of all tokens' [N, H]; at -1 there is none."""
        return self._tried(name, states[at.clamp_min(0)], at >= 0)

    def _tried(self, name: str, candidate: Tensor, known: Tensor) -> _Tried:
        norms = candidate.norm(dim=1)
        dots = (self.handed * candidate).sum(1)
        cosine = dots / (self.norms * norms).clamp_min(1e-12)
        return _Tried(
            name=name, cosine=cosine, ratio=self.norms / norms.clamp_min(1e-12), known=known
        )

    def rows_of(self, name: str, candidate: Tensor) -> _Tried:
        """Candidate rows [R, H]."""
        return self._tried(name, candidate, torch.ones_like(self.rows.decode))

    def nearest(self, name: str, states: Tensor, places: Sequence[Tensor], most: float) -> _Tried:
        """For each row the nearest of several candidates; known where it is off by `most` at most.

        Which of them it would be is not known (rejected drafts' states are in no text), and of many
        one is always the nearest: only what is that row itself counts.
        """
        best = torch.full_like(self.rows.position, -1)
        least = torch.full_like(self.norms, torch.inf)
        for at in places:
            off = (self.handed - states[at.clamp_min(0)]).norm(dim=1)
            nearer = (at >= 0) & (off < least)
            best, least = torch.where(nearer, at, best), torch.where(nearer, off, least)
        exact = least <= most * self.norms
        return self.tried(name, states, torch.where(exact, best, -1))

    def partial(self, name: str, states: Tensor, addition: Tensor) -> _Tried:
        """The state without a part of its last addition, as large a part as fits each row.

        Known only where what the row lacks points along that addition.
        """
        whole, part = states[self.rows.at], addition[self.rows.at]
        lacks = whole - self.handed
        dots = (lacks * part).sum(1)
        share = (dots / part.square().sum(1).clamp_min(1e-12)).clamp(0, 1)
        cosine = dots / (lacks.norm(dim=1) * part.norm(dim=1)).clamp_min(1e-12)
        known = (cosine > PARTIAL) & (share > 0.05)
        return self._tried(name, whole - share[:, None] * part, known)


def _in_matrix(name: str, depth: int) -> bool:
    kinds = ("hidden[", "embedding", "normed[", "branch[") if depth <= WIDE else ("hidden[", "emb")
    return name.startswith(kinds) and "@" not in name


def _column(name: str) -> tuple[int, int]:
    kind = name.partition("[")[0]
    index = name.partition("[")[2].rstrip("]")
    return ("embedding", "hidden", "normed", "branch").index(kind), int(index or 0)
