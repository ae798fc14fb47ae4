"""What the drafter was handed: right, or whose, and which cause hands over such rows."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from harness.diagnose.records import Dossier, Point, Proportion, SlotFit, States
from harness.diagnose.rules import naming, power, target
from harness.diagnose.rules.measures import (
    above,
    counted,
    finite,
    known,
    length,
    number,
    percent,
    pooled,
    rate,
    surely_above,
)
from harness.diagnose.rules.naming import candidate_of
from harness.diagnose.rules.weights import DECISIVE, GOOD, STRONG, WEAK, of_stage, point

BAD_ROWS = 0.05
"""So many rows outside the floor are honest arithmetic's; more are a fault's."""
FEWEST_ROWS = 8
SCALE = 0.05
NAME = "states"

Kind = Literal[
    "zero", "scaled", "moved", "other request", "previous step", "normed", "branch", "layer",
    "partial", "noisy", "some rows", "unexplained",
]  # fmt: skip
CAUSE_OF_KIND: dict[Kind, str] = {
    "zero": "states_zero",
    "scaled": "states_scaled",
    "moved": "states_moved",
    "other request": "states_other_request",
    "previous step": "states_stale",
    "normed": "states_normed",
    "branch": "states_without_residual",
    "partial": "states_partial_sums",
    "noisy": "states_noisy",
}

LIVES_IN = {"prefix_reuse": "reused prefix", "states_other_request": "batched"}
"""Causes that show in rows of one place alone."""
PLACES = {"reused prefix": "prompts in the prefix cache", "batched": "batches"}


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """A slot whose rows are not what they should be, and what they seem to be."""

    fit: SlotFit
    kind: Kind
    sure: bool
    """Whether the rows are this within the floor of honest arithmetic."""


def is_bad(slot: SlotFit, floor: float) -> bool:
    """Whether more of the slot's rows than chance allows are not the declared state."""
    share = finite(slot.bad_share)
    if slot.rows < FEWEST_ROWS:
        return False
    if share is None:
        cosine, scale = finite(slot.as_declared.cosine), finite(slot.as_declared.scale)
        return cosine is None or cosine < floor or scale is None or abs(scale - 1) > SCALE
    hits = round(min(1.0, max(0.0, share)) * slot.rows)
    return surely_above(Proportion(hits=hits, of=max(slot.rows, 20)), BAD_ROWS)


def bad_slots(states: States) -> list[Slot]:
    """The slots that are not what they should be, in an order of their own."""
    bad = [_explained(s, states.floor) for s in states.slots if is_bad(s, states.floor)]
    return sorted(bad, key=lambda s: (s.fit.slot, s.fit.where, s.fit.batched, s.fit.rows))


def is_clean(states: States | None) -> bool | None:
    """True: every slot that could be judged holds what it should; None: none could be judged."""
    if states is None or not any(s.rows >= FEWEST_ROWS for s in states.slots):
        return None
    return not bad_slots(states) and not _bad_places(states)


def _explained(slot: SlotFit, floor: float) -> Slot:
    best, declared = candidate_of(slot.best.candidate), candidate_of(slot.declared)
    cosine = finite(slot.best.cosine) or 0.0
    own = finite(slot.as_declared.cosine) or 0.0
    sure = cosine >= floor - 0.01
    kind: Kind
    if (finite(slot.zero_share) or 0.0) >= 0.5 * (finite(slot.bad_share) or 1.0):
        return Slot(fit=slot, kind="zero", sure=True)
    if slot.best.candidate == slot.declared or best == declared:
        return Slot(fit=slot, kind=_as_declared(slot, own, floor), sure=own >= floor)
    if not sure and (1 - cosine) > 0.5 * (1 - own):
        return Slot(fit=slot, kind="unexplained", sure=False)
    if best.kind in ("other request", "previous step"):
        kind = best.kind
    elif best.moved:
        kind = "moved"
    elif best.kind in ("normed", "branch", "partial"):
        kind = best.kind
    elif declared.kind == "normed" and best.layer == declared.layer:
        kind = "normed"  # the reverse: the last layer's output without the last norm
    else:
        kind = "layer" if best.kind in ("hidden", "embedding") else "unexplained"
    return Slot(fit=slot, kind=kind, sure=sure)


def _as_declared(slot: SlotFit, cosine: float, floor: float) -> Kind:
    """What is wrong with rows that the declared state explains best of all."""
    scale = finite(slot.as_declared.scale) or 1.0
    if cosine >= floor:
        return "scaled" if abs(scale - 1) > SCALE else "some rows"
    if cosine < 0.8:
        return "unexplained"
    return "partial" if scale < 0.95 else "noisy"


def _bad_places(states: States) -> dict[str, Proportion]:
    """Where more rows than chance allows are bad."""
    return {
        name: found
        for name, found in sorted(states.bad_by_step.items())
        if surely_above(found, BAD_ROWS)
    }


def state_points(dossier: Dossier) -> list[Point]:
    """What the rows that the drafter was handed say of every cause that could have made them."""
    states = dossier.states
    clean = is_clean(states)
    if states is None or clean is None:
        return []
    if clean:
        return [p for cause in of_stage("states") for p in _unseen(cause, states)]
    bad = bad_slots(states)
    method = _by_method(dossier)
    if method:
        return method
    return [*_by_kind(dossier, bad), *_by_layers(dossier, bad), *_by_place(states, bad)]


def _by_method(dossier: Dossier) -> list[Point]:
    """One state a token where the head takes several: what it is follows from the algorithm.

    EAGLE hands its drafter the target's last normed state; over an EAGLE-3 head, engines then leave
    out the layer that joins several.
    """
    audit = dossier.audit
    declared = None if audit is None else audit.aux_layers or audit.engine_layers
    slots = () if dossier.states is None else dossier.states.slots
    handed = {slot.slot for slot in slots if slot.rows >= FEWEST_ROWS}
    if declared is None or len(declared) < 2 or len(handed) != 1:
        return []
    best = max(slots, key=lambda slot: slot.rows).best
    says = f"the drafter is handed one state a token, {best.candidate} (cosine "
    says += f"{number(finite(best.cosine), 3)}), where the checkpoint asks for {len(declared)}"
    return [point("wrong_method", DECISIVE, says, NAME)]


def _unseen(cause: str, states: States) -> list[Point]:
    """Against a cause none of whose rows were seen, if enough were looked at where it lives."""
    rows = sum(s.rows for s in states.slots)
    says = f"all {rows:,d} rows handed to the drafter are the declared states of their tokens"
    hits = round(sum(s.rows * min(1.0, max(0.0, finite(s.bad_share) or 0.0)) for s in states.slots))
    able = power.rarely(Proportion(hits=min(hits, rows), of=rows), 2 * BAD_ROWS)
    place = LIVES_IN.get(cause)
    if place is not None:
        of_place = states.bad_by_step.get(place)
        seen = f"{of_place.of:,d}" if of_place is not None else "none"
        says += f"; {seen} of {PLACES[place]}"
        able = able and power.rarely(of_place, 2 * BAD_ROWS)
    return power.against([cause], STRONG, says, NAME, able=able)


def _by_kind(dossier: Dossier, bad: list[Slot]) -> list[Point]:
    """One point for each kind of row that was found, heavier the more of the bad slots it holds."""
    of_kind: dict[Kind, list[Slot]] = defaultdict(list)
    for slot in bad:
        of_kind[slot.kind].append(slot)
    reused = _only_reused(dossier.states)
    found = []
    for kind, slots in of_kind.items():
        cause = CAUSE_OF_KIND.get(kind)
        if cause is None:
            continue
        most = 2 * len(slots) > len(bad)
        weight = DECISIVE if most and all(s.sure for s in slots) else STRONG if most else GOOD
        plain = slots[0].fit.best.candidate.startswith("partial")
        if kind == "noisy" or (kind == "partial" and not plain) or reused:
            weight = min(weight, GOOD)  # such rows follow from much else as well
        if kind == "normed" and _costs_nothing(dossier) and _all_unnormed(slots):
            weight = min(weight, GOOD)  # that is how engines hand over the last layer's output
        says = _says(kind, slots[0])
        found.append(point(cause, weight, says, NAME))
        found += _kin(kind, slots, says, dossier)
    return found


def _all_unnormed(slots: Sequence[Slot]) -> bool:
    """Whether these slots are of the last layer, and its output came without the last norm."""
    return all(candidate_of(s.fit.best.candidate).kind == "hidden" for s in slots)


def _costs_nothing(dossier: Dossier) -> bool:
    """Whether no fewer drafts are accepted than the checkpoint's states would bring."""
    if dossier.expected is None or dossier.observed is None:
        return False
    wanted, seen = length(dossier.expected.acceptance), length(dossier.observed.acceptance)
    return wanted is not None and seen is not None and seen >= wanted


def _kin(kind: Kind, slots: list[Slot], says: str, dossier: Dossier) -> list[Point]:
    """Causes beside a kind's own that hand over such rows."""
    if kind == "partial" and dossier.subject.tensor_parallel > 1:
        ranks = dossier.subject.tensor_parallel
        return [point("states_partial_sums", STRONG, f"{says}; served on {ranks} ranks", NAME)]
    if kind == "noisy" and target.is_right(dossier.target) is True:
        return [point("states_noisy", GOOD, f"{says}; the target itself is computed right", NAME)]
    share = max((finite(s.fit.bad_share) or 0.0) for s in slots)
    if kind in ("zero", "previous step") and share < 0.9:
        some = f"{says}: some steps or requests may be left out"
        return [point("states_skipped", GOOD, some, NAME)]
    if kind == "moved" and all(s.fit.where == "decode" for s in slots):
        return [point("states_stale", GOOD, f"{says}, in decode steps alone", NAME)]
    return []


def _says(kind: Kind, slot: Slot) -> str:
    fit = slot.fit
    place = f"slot {fit.slot} in {fit.where}{', batched' if fit.batched else ''}"
    best, own = number(finite(fit.best.cosine), 3), number(finite(fit.as_declared.cosine), 3)
    if kind == "zero":
        return f"{percent(fit.zero_share)} of {fit.rows:,d} rows of {place} are zeros"
    if kind == "scaled":
        factor = number(finite(fit.as_declared.scale), 3)
        return f"{place} holds {fit.declared} times {factor} (cosine {own})"
    if kind in ("noisy", "partial"):
        factor = number(finite(fit.as_declared.scale), 3)
        return f"{place} is near {fit.declared} and not it: cosine {own}, norm times {factor}"
    return f"{place} holds {fit.best.candidate} (cosine {best}), not {fit.declared} ({own})"


def served_layers(dossier: Dossier) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Declared layers, and those whose states were really handed over, where that was found."""
    states = dossier.states
    if states is None:
        return None
    wanted: dict[int, int] = {}
    got: dict[int, set[int]] = defaultdict(set)
    for fit in states.slots:
        declared, best = candidate_of(fit.declared), candidate_of(fit.best.candidate)
        if fit.rows < FEWEST_ROWS or declared.layer is None:
            continue
        wanted[fit.slot] = declared.layer
        bad = is_bad(fit, states.floor)
        if bad and (best.kind not in ("hidden", "embedding") or best.moved or best.layer is None):
            return None
        got[fit.slot].add(best.layer if bad and best.layer is not None else declared.layer)
    if not wanted or any(len(layers) != 1 for layers in got.values()):
        return None
    slots = sorted(wanted)
    return tuple(wanted[s] for s in slots), tuple(next(iter(got[s])) for s in slots)


def _by_layers(dossier: Dossier, bad: list[Slot]) -> list[Point]:
    """Which of the causes of other layers it is, where whole slots hold another layer's states."""
    if not any(slot.kind == "layer" for slot in bad):
        return []
    layers = served_layers(dossier)
    slot = next(s for s in bad if s.kind == "layer")
    if layers is None:
        return [point("layers_other", GOOD, _says("layer", slot), NAME)]
    wanted, got = layers
    cause = naming.layers_cause(
        wanted, got, default=_default(dossier), named=names_layers(dossier, wanted)
    )
    says = (
        f"the drafter is handed the states of layers {_list(got)}, and its checkpoint "
        f"asks for {_list(wanted)} ({_says('layer', slot)})"
    )
    sure = all(s.sure for s in bad if s.kind == "layer")
    weight = DECISIVE if sure else STRONG
    others = [c for c in naming.LAYERS if c != cause]
    return [
        point(cause, weight, says, NAME),
        *(point(other, WEAK, says, NAME) for other in others),
    ]


def names_layers(dossier: Dossier, layers: Sequence[int] | None) -> bool:
    """Whether the checkpoint names its layers. Unread, it does not if they are the default's."""
    audit = dossier.audit
    if audit is None:
        return layers is None or tuple(layers) != _default(dossier)
    return audit.aux_layers is not None and not any(
        f.cause == "layers_default" for f in audit.findings
    )


def layer_count(dossier: Dossier) -> int | None:
    """How many layers the target has, from the states that were compared."""
    states = dossier.states
    if states is None:
        return None
    names: Iterable[str] = (
        *states.matrix_columns,
        *(fit.candidate for slot in states.slots for fit in slot.fits),
    )
    indices = [int(n) for name in names for n in re.findall(r"hidden\[(\d{1,4})\]", name)]
    return max(indices, default=None)


def _default(dossier: Dossier) -> tuple[int, ...] | None:
    layers = layer_count(dossier)
    return None if layers is None else naming.default_layers(layers)


def _list(layers: Iterable[int]) -> str:
    return ", ".join(map(str, layers))


def _only_reused(states: States | None) -> bool:
    """Whether the bad rows are those of prompts that were in the prefix cache, and no others."""
    if states is None:
        return False
    reused = states.bad_by_step.get("reused prefix")
    if not surely_above(reused, BAD_ROWS):
        return False
    fresh = [states.bad_by_step.get(name) for name in ("first decode", "later decode", "prefill")]
    known_fresh = [p for p in fresh if known(p)]
    return bool(known_fresh) and all(above(reused, p, margin=0.1) for p in known_fresh)


def _by_place(states: States, bad: list[Slot]) -> list[Point]:
    """Which cause lives where the bad rows are: what the rows hold may be unknown."""
    places = states.bad_by_step
    if _only_reused(states):
        says = (
            f"{counted(places['reused prefix'])} rows of prompts in the prefix cache are bad, and "
            f"{counted(pooled(p for n, p in places.items() if n != 'reused prefix'))} others"
        )
        return [point("prefix_reuse", DECISIVE, says, NAME)]
    odd = not bad or all(s.kind in ("unexplained", "some rows") for s in bad)
    found: list[Point] = []
    alone, batched = places.get("batch 1"), places.get("batched")
    if above(batched, alone, margin=0.1):
        says = f"{counted(batched)} batched rows are bad, and {counted(alone)} at batch size 1"
        weight = GOOD if odd else WEAK
        found.append(point("states_other_request", weight, says, NAME))
    prefill = places.get("prefill")
    decode = pooled((places.get("first decode"), places.get("later decode")))
    if above(decode, prefill, margin=0.1):
        says = f"{counted(decode)} rows of decode steps are bad, and {counted(prefill)} of prefill"
        found.append(point("states_stale", GOOD if odd else WEAK, says, NAME))
    early, late = places.get("early"), places.get("late")
    if above(late, early, margin=0.1):
        says = f"{counted(late)} late rows are bad, and {counted(early)} early ones"
        found.append(point("target_computed_wrong", WEAK, says, NAME))
        found.append(point("prefix_reuse", WEAK, says, NAME))
    return found


def where_bad(states: States) -> str:
    """The places of the bad rows, for a verdict that names the stage alone."""
    places = _bad_places(states)
    if places:
        return ", ".join(f"{name} ({percent(rate(p))} bad)" for name, p in places.items())
    seen = sorted({f"{s.fit.where} of slot {s.fit.slot}" for s in bad_slots(states)})
    return ", ".join(seen)
