"""States that were spoiled before the drafter saw them: what they are, and where."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from diagnose_planted import prompts_of, serve, subject_of, target_engine
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engines.reference.engine import Engine
from engines.reference.model import rms_norm
from harness.diagnose.experiments.known import Knowledge, know
from harness.diagnose.experiments.shares import _active, _down, _least_squares
from harness.diagnose.experiments.states import FLOORS, compare_states
from harness.diagnose.records import SlotFit, States

TOKENS = 32
LAYERS = (2, 4, 5)
HIDDEN = 192


@pytest.fixture(scope="module")
def engine(demo_pair: Path) -> Engine:
    torch.set_num_threads(1)
    return target_engine(demo_pair)


@pytest.fixture(scope="module")
def knowledge(demo_pair: Path, engine: Engine) -> Knowledge:
    prompts = prompts_of(engine, demo_pair, 6)
    return know(subject_of(demo_pair), prompts, max_tokens=TOKENS, engine=engine)


Spoil = Callable[["Spoiled", Tensor, int], Tensor]


class Spoiled:
    """A proposer whose states are spoiled on their way in: prefill's, verify steps', or both."""

    def __init__(self, inner: Any, engine: Engine, spoil: Spoil, where: str) -> None:
        self.inner, self.engine, self.spoil, self.where = inner, engine, spoil, where
        self.k, self.aux_layers = inner.k, inner.aux_layers
        self.before: dict[int, Tensor] = {}
        self.rows: list[Tensor] = []

    def begin(self, slot: int, tokens: list[int], aux: Tensor) -> None:
        self.rows, self.prompt = [aux], tuple(tokens[:-1])
        spoiled = self.spoil(self, aux, slot) if self.where != "decode" else aux
        self.before[slot] = aux
        self.inner.begin(slot, tokens, spoiled)

    def record(self, starts: list[int], accepted: list[int], tokens: Tensor, aux: Tensor) -> None:
        self.rows = list(aux)
        spoiled = aux
        if self.where != "prefill":
            spoiled = torch.stack([self.spoil(self, aux[row], row) for row in range(len(starts))])
        for row, count in enumerate(accepted):
            self.before[row] = aux[row, : count + 1]
        self.inner.record(starts, accepted, tokens, spoiled)

    def move(self, source: int, target: int) -> None:
        self.before[target] = self.before[source]
        self.inner.move(source, target)

    def propose(self, *given: Any) -> Any:
        return self.inner.propose(*given)


def found(knowledge: Knowledge, engine: Engine, spoil: Spoil, where: str = "both") -> States:
    prompts = [text.prompt for text in knowledge.texts]
    trace = serve(
        engine,
        knowledge.drafter,
        prompts,
        around=lambda inner: Spoiled(inner, engine, spoil, where),
        max_tokens=TOKENS,
    )
    return compare_states(knowledge, trace)


def of(states: States, where: str) -> list[SlotFit]:
    """The slots' places with rows enough to be judged, in order of the slots."""
    return [s for s in states.slots if s.where == where and s.rows >= 20]


@pytest.mark.parametrize(("name", "dtype"), [("vllm", "bfloat16"), ("sglang", "float16")])
def test_rows_are_judged_by_the_type_that_an_engine_makes_of_auto(
    name: str, dtype: str, knowledge: Knowledge, engine: Engine
) -> None:
    """The demo pair is float32, and neither engine serves it so unless it is told to."""
    served = copy.copy(knowledge)
    served.subject = msgspec.structs.replace(knowledge.subject, engine=name, dtype="auto")
    assert found(served, engine, lambda spoiled, aux, slot: aux).floor == FLOORS[dtype]


def zero(spoiled: Spoiled, aux: Tensor, slot: int) -> Tensor:
    return torch.zeros_like(aux)


def scaled(spoiled: Spoiled, aux: Tensor, slot: int) -> Tensor:
    return aux * 2.827


def normed(spoiled: Spoiled, aux: Tensor, slot: int) -> Tensor:
    model = spoiled.engine.model
    parts = aux.chunk(3, dim=-1)
    eps = model.config.norm_eps
    return torch.cat([rms_norm(x, model.norm, eps) for x in parts], dim=-1)


def swapped(spoiled: Spoiled, aux: Tensor, slot: int) -> Tensor:
    one, two, three = aux.chunk(3, dim=-1)
    return torch.cat((two, one, three), dim=-1)


def moved(spoiled: Spoiled, aux: Tensor, slot: int) -> Tensor:
    before = spoiled.before.get(slot, aux)
    return torch.cat((before[-1:] if len(aux) == 4 else aux[:1], aux[:-1]))


def stale(spoiled: Spoiled, aux: Tensor, slot: int) -> Tensor:
    before = spoiled.before.get(slot, aux)
    return before[torch.arange(len(aux)).clamp_max(len(before) - 1)]


def other(spoiled: Spoiled, aux: Tensor, slot: int) -> Tensor:
    rows = spoiled.rows
    return rows[(slot + 1) % len(rows)]


def noisy(spoiled: Spoiled, aux: Tensor, slot: int) -> Tensor:
    noise = torch.randn(aux.shape, generator=torch.Generator().manual_seed(slot))
    size = aux.unflatten(-1, (3, -1)).square().mean(-1, keepdim=True).sqrt()
    return aux + (0.2 * noise.unflatten(-1, (3, -1)) * size).flatten(-2)


def test_a_healthy_engine_hands_over_the_declared_states(
    knowledge: Knowledge, engine: Engine
) -> None:
    states = found(knowledge, engine, lambda _, aux, slot: aux)
    for slot in states.slots:
        assert slot.declared == slot.best.candidate == f"hidden[{LAYERS[slot.slot]}]"
        assert slot.bad_share == slot.zero_share == 0
        assert slot.as_declared.cosine > 0.9999
    assert all(p.hits == 0 for p in states.bad_by_step.values())
    assert set(states.bad_by_step) >= {"prefill", "first decode", "later decode", "batched"}
    at = [states.matrix_columns.index(f"hidden[{layer}]") for layer in LAYERS]
    for row, values in zip(states.matrix_rows, states.matrix, strict=True):
        slot = int(row.split()[1].rstrip(","))
        assert values[at[slot]] == max(values)


@pytest.mark.parametrize(
    ("spoil", "best"),
    [
        (scaled, ("hidden[2]", "hidden[4]", "hidden[5]")),
        (normed, ("normed[2]", "normed[4]", "normed[5]")),
        (swapped, ("hidden[4]", "hidden[2]", "hidden[5]")),
        (moved, ("hidden[2]@-1", "hidden[4]@-1", "hidden[5]@-1")),
        (noisy, ("hidden[2]", "hidden[4]", "hidden[5]")),
    ],
)
def test_spoiled_states_are_named(
    knowledge: Knowledge, engine: Engine, spoil: Spoil, best: tuple[str, ...]
) -> None:
    states = found(knowledge, engine, spoil)
    for where in ("prefill", "decode"):
        slots = of(states, where)
        assert tuple(slot.best.candidate for slot in slots) == best, where
        for slot in slots:
            same = slot.best.candidate == slot.declared and spoil is swapped
            assert slot.bad_share == 0 if same else slot.bad_share > 0.8
            if spoil is not noisy:
                assert slot.best.cosine > states.floor
    if spoil is scaled:
        assert all(abs(s.best.scale - 2.827) < 0.01 for s in states.slots)
    if spoil is noisy:
        assert all(0.97 < s.as_declared.cosine < 0.99 for s in of(states, "decode"))


@pytest.mark.parametrize(
    ("spoil", "best"), [(stale, "previous step"), (other, "other request"), (zero, None)]
)
def test_rows_of_other_steps_and_requests_are_named_where_they_are(
    knowledge: Knowledge, engine: Engine, spoil: Spoil, best: str | None
) -> None:
    states = found(knowledge, engine, spoil, "decode")
    assert all(slot.bad_share == 0 for slot in of(states, "prefill"))
    for slot in of(states, "decode"):
        assert slot.bad_share > 0.6
        if best is None:
            assert slot.zero_share == slot.bad_share == 1
        else:
            assert slot.best.candidate == best
            assert slot.best.cosine > states.floor
    assert states.bad_by_step["prefill"].hits == 0
    assert (states.bad_by_step["later decode"].share or 0) > 0.6


@pytest.mark.parametrize("name", ["branch", "partial"])
def test_a_branch_and_a_part_of_one_are_told_apart(
    knowledge: Knowledge, engine: Engine, name: str
) -> None:
    states_of = {tuple(text.prompt): text.states for text in knowledge.texts}
    half = (torch.arange(HIDDEN) % 2).float()

    def spoil(spoiled: Spoiled, aux: Tensor, slot: int) -> Tensor:
        added = [states_of[spoiled.prompt].mlp[i - 1][: len(aux)] for i in LAYERS]
        if name == "branch":
            return torch.cat(added, dim=-1)
        return aux - torch.cat([x * half for x in added], dim=-1)

    states = found(knowledge, engine, spoil, "prefill")
    wanted = [f"{name}[{i - (name == 'branch')}]" for i in LAYERS]
    assert [slot.best.candidate for slot in of(states, "prefill")] == wanted


@pytest.mark.parametrize("stream", [0.0, 1.0])
def test_one_ranks_part_of_the_feed_forward_is_told_by_its_neurons(
    knowledge: Knowledge, engine: Engine, stream: float
) -> None:
    """Half of the neurons, side by side as ranks have them; the stream is there or on another."""
    tokens_of = {tuple(text.prompt): text for text in knowledge.texts}

    def spoil(spoiled: Spoiled, aux: Tensor, slot: int) -> Tensor:
        text = tokens_of[spoiled.prompt]
        parts = []
        for layer in LAYERS:
            matrix = _down(knowledge, layer - 1)
            assert matrix is not None
            active = _active(knowledge, text.tokens, layer - 1)[: len(aux)].clone()
            active[:, matrix.shape[0] // 2 :] = 0
            before = text.states.inputs[layer] - text.states.mlp[layer - 1]
            parts.append(stream * before[: len(aux)] + active @ matrix)
        return torch.cat(parts, dim=-1)

    states = found(knowledge, engine, spoil, "prefill")
    for slot, layer in zip(of(states, "prefill"), LAYERS, strict=True):
        assert slot.best.candidate == f"partial[{layer}]"
        assert slot.bad_share > 0.9
        if stream == 0:  # else a part as large as fits each row may explain nearly as much
            assert slot.best.cosine > states.floor


@given(st.integers(0, 2**31), st.integers(2, 20), st.booleans())
def test_least_squares_find_the_neurons_that_are_there(seed: int, count: int, there: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    active, matrix = (torch.randn(s, generator=generator) for s in ((60, count), (count, 24)))
    stream = torch.randn(60, 24, generator=generator)
    share = (torch.rand(count, generator=generator) < 0.5).float()
    wanted = float(there) * stream + (active * share) @ matrix
    found = _least_squares(active, stream, wanted, matrix)
    assert torch.allclose(found, torch.cat((torch.tensor([float(there)]), share)), atol=1e-3)


@given(st.integers(0, 2**31), st.floats(0.05, 20), st.sampled_from([0.0, 1e-5, 1e-4]))
def test_the_exact_candidate_wins_at_any_scale(seed: int, scale: float, noise: float) -> None:
    """Layers that are alike to 0.98 are told apart by what is left, whatever the scale."""
    from harness.diagnose.experiments.states import _ranked, _Tried

    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(40, 64, generator=generator)
    layers = [base + 0.2 * i * torch.randn(40, 64, generator=generator) for i in range(5)]
    handed = scale * layers[3] + noise * torch.randn(40, 64, generator=generator)

    def tried(i: int) -> _Tried:
        norms = layers[i].norm(dim=1)
        cosine = (handed * layers[i]).sum(1) / (handed.norm(dim=1) * norms)
        known = torch.ones(40, dtype=torch.bool)
        return _Tried(name=str(i), cosine=cosine, ratio=handed.norm(dim=1) / norms, known=known)

    ranked = _ranked([tried(1), *map(tried, (0, 2, 3, 4))], torch.ones(40, dtype=torch.bool))
    assert ranked[0].candidate == "3"
    assert abs(ranked[0].scale / scale - 1) < 0.01
