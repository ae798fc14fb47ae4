"""Which samples the gate looks at, and what it measures of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engines.capture.base import Capturer, RowStates
from engines.capture.reference import ReferenceCapturer
from training.capture import checks as measure
from training.capture.checks import Probe
from training.capture.choice import choice_check
from training.capture.inputs import Inputs, Row, reference_spec
from training.capture.norm_checks import norm_once_check, reference_norm_check
from training.gate import Check
from training.plan import TrainingPlan
from training.states import SampleStates
from training.targets import reference_refusal

if TYPE_CHECKING:
    from torch import Tensor

PROOF_SAMPLES = 64
PARITY_SAMPLES = 8
REFERENCE_SAMPLES = 4
FLOAT32_GROWTH = 2
"""Of weights that take two bytes a number as a rule."""
SUSPECTS = 4
"""Samples whose own proof is poor are looked at too, the worst of them."""

States = RowStates | SampleStates
GotStates = Callable[[Sequence[int]], list[States]]
"""Numbers of samples -> what was captured of them."""


def spread(count: int, most: int) -> list[int]:
    """At most `most` of the numbers below `count`, evenly spread, the first and last included."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def proof_samples(rows: Sequence[Row], most: int = PROOF_SAMPLES) -> list[int]:
    """The samples of the proof test: greedy ones where there are any."""
    greedy = [number for number, row in enumerate(rows) if row.greedy]
    chosen = greedy or list(range(len(rows)))
    return [chosen[i] for i in spread(len(chosen), most)]


def proof_checks(
    plan: TrainingPlan,
    inputs: Inputs,
    found: Sequence[tuple[Row, Tensor]],
    head: Tensor,
    *,
    rounded: bool,
) -> tuple[list[Check], measure.Proof]:
    """The proof test and the norm's, on last states [T, H]; `rounded`: stored in 8 bits."""
    norm = inputs.target.norm()
    normed = measure.final_norm_check(found, norm)
    once = norm_once_check(found, head, norm)
    check, measured = measure.proof_check(
        found, inputs.target, head, plan.capture.least_proof, rounded=rounded
    )
    return [check, normed, once], measured


def prove(plan: TrainingPlan, inputs: Inputs, capturer: Capturer, got: GotStates) -> list[Check]:
    """Everything that is measured on a few samples."""
    rows = inputs.rows
    chosen = proof_samples(rows)
    rounded = inputs.layout.dtype == "fp8" and not plan.capture.online
    proved = [(rows[i], states) for i, states in zip(chosen, got(chosen), strict=True)]
    checks, measured = _head_checks(plan, inputs, proved, rounded=rounded)
    poor = sorted(
        (i for i in chosen if measured.shares.get(rows[i].id, 1.0) < plan.capture.least_proof),
        key=lambda i: measured.shares[rows[i].id],
    )
    numbers = sorted({*spread(len(rows), PARITY_SAMPLES), *poor[:SUSPECTS]})
    probes = [
        Probe(
            row=rows[i],
            got=measure.stacked(states.aux, states.last_normed),
            alone=_alone(capturer, rows[i]),
        )
        for i, states in zip(numbers, got(numbers), strict=True)
    ]
    least = plan.capture.least_parity
    pairs = [(probe.row, probe.got, probe.alone) for probe in probes]
    checks.append(measure.own_sample_check(probes, least))
    checks.append(measure.parity_check("batch_parity", pairs, least))
    checks += _reference_checks(plan, inputs, probes)
    if rounded:
        checks += measure.fp8_check(probes, bytes_share(inputs))
    return checks


def _head_checks(
    plan: TrainingPlan, inputs: Inputs, proved: Sequence[tuple[Row, States]], *, rounded: bool
) -> tuple[list[Check], measure.Proof]:
    """All that needs the target's head: read once, and free again when the reference is loaded."""
    head = inputs.target.head()
    last = [(row, states.last_normed) for row, states in proved]
    checks, measured = proof_checks(plan, inputs, last, head, rounded=rounded)
    if inputs.layout.choice:
        told = [(row, states.last_normed, states.choice) for row, states in proved]
        checks.append(choice_check(told, head, plan.capture.least_proof, rounded=rounded))
    return checks, measured


def bytes_share(inputs: Inputs) -> float:
    """Bytes of the layout's tensors, of what bfloat16 would take."""
    tokens = sum(len(row.token_ids) for row in inputs.rows)
    layout = inputs.layout
    full = msgspec.structs.replace(layout, dtype="bfloat16")
    return layout.size(len(inputs.rows), tokens) / full.size(len(inputs.rows), tokens)


def _alone(capturer: Capturer, row: Row) -> Tensor:
    states = capturer.capture([row.token_ids.tolist()])[0]
    return measure.stacked(states.aux, states.last_normed)


def _reference_checks(plan: TrainingPlan, inputs: Inputs, probes: list[Probe]) -> list[Check]:
    """Parity with the reference engine, layer by layer, and whose layer each state is."""
    layers = (*inputs.layout.aux_layers, inputs.target.layers)
    refused = reference_refusal(inputs.target.folder, growth=FLOAT32_GROWTH)
    if refused is not None:
        reason = f"the reference engine cannot serve this target ({refused})"
        names = ("reference_parity", "layers", "reference_norm")
        return [Check(name=name, passed=True, value=None, reason=reason) for name in names]
    some = [probes[i] for i in spread(len(probes), REFERENCE_SAMPLES)]
    full = _with_reference(inputs, some)
    norm, eps = inputs.target.norm(), inputs.target.norm_eps
    found = [measure.layer_check(full, layers), reference_norm_check(full, norm, eps)]
    if plan.capture.engine == "reference":
        return found
    worst: Check | None = None
    for place, layer in enumerate(layers):
        pairs = [
            (p.row, p.got[:, place : place + 1], p.every[:, layer : layer + 1])
            for p in full
            if p.every is not None
        ]
        check = measure.parity_check("reference_parity", pairs, plan.capture.least_parity)
        if worst is None or (check.value or 0) < (worst.value or 0):  # type: ignore[operator]
            worst = _of_layer(check, layer)
    assert worst is not None
    return [*found, worst]


def _of_layer(check: Check, layer: int) -> Check:
    return Check(
        name=check.name,
        passed=check.passed,
        value=check.value,
        limit=check.limit,
        relation=check.relation,
        reason=f"the lowest, of hidden state {layer}: {check.reason}",
        advice="the engine computes another model than the reference engine: see the check layers",
    )


def _with_reference(inputs: Inputs, probes: list[Probe]) -> list[Probe]:
    """The probes with all hidden states of the reference engine, in float32."""
    every = tuple(range(inputs.target.layers + 1))
    reference = ReferenceCapturer(reference_spec(inputs, every, Path()))
    found = []
    for probe in probes:
        states = reference.capture([probe.row.token_ids.tolist()])[0]
        width = inputs.target.hidden_size
        found.append(
            Probe(
                row=probe.row,
                got=probe.got,
                alone=probe.alone,
                every=states.aux.unflatten(-1, (-1, width)),
            )
        )
    return found
