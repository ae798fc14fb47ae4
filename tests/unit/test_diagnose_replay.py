"""A planted fault of the drafter's execution is the reading that replays the engine's proposals."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from diagnose_planted import (
    PLANTED,
    drafter_of,
    prompts_of,
    serve,
    subject_of,
    target_engine,
)
from torch import Tensor, nn

from drafters.eagle3 import Eagle3Drafter
from drafters.spec import RopeSpec
from engines.reference.engine import Engine
from harness.diagnose.experiments.expected import expect
from harness.diagnose.experiments.known import Knowledge, know
from harness.diagnose.experiments.replay import _may_explain, replay
from harness.diagnose.readings import AS_DECLARED, reading_of
from harness.diagnose.records import ReadingFit, Replay

FULL = pytest.mark.full
TOKENS = 32
PROMPTS = 6


@pytest.fixture(scope="module")
def engine(demo_pair: Path) -> Engine:
    torch.set_num_threads(1)
    return target_engine(demo_pair)


@pytest.fixture(scope="module")
def knowledge(demo_pair: Path, engine: Engine) -> Knowledge:
    prompts = prompts_of(engine, demo_pair, PROMPTS)
    return know(subject_of(demo_pair), prompts, max_tokens=TOKENS, engine=engine)


def prompts(knowledge: Knowledge) -> list[list[int]]:
    return [text.prompt for text in knowledge.texts]


def share(fit: ReadingFit) -> float:
    assert fit.agreement is not None and fit.agreement.share is not None
    return fit.agreement.share


def assert_found(found: Replay, name: str, least: float = 0.99) -> None:
    """`name` comes first, fits nearly all, and explains what the declared reading does not."""
    own = next(fit for fit in found.readings if fit.reading == AS_DECLARED)
    first = found.readings[0]
    assert first.reading == name, [(f.reading, share(f)) for f in found.readings[:4]]
    assert share(first) >= least
    assert share(own) < share(first)
    assert first.explains is not None and first.explains.share is not None
    assert first.explains.share >= least


def test_a_healthy_engine_proposes_as_declared_and_is_accepted_as_expected(
    knowledge: Knowledge, engine: Engine
) -> None:
    trace = serve(engine, knowledge.drafter, prompts(knowledge), max_tokens=TOKENS)
    found = replay(knowledge, trace)
    assert found.readings[0].reading == AS_DECLARED
    assert share(found.readings[0]) >= 0.995
    assert len(found.readings) == 1  # nothing is left for another reading to explain
    expected = expect(knowledge).acceptance.counts
    assert found.on_engine_states.counts == expected
    assert found.proposals.counts == expected
    assert found.verified is not None and found.verified.share == 1
    for part in (found.first_call, found.later_calls, found.batched, *found.by_position):
        assert part is None or part.share == 1


EVERY_DAY = (
    *("positions frozen in drafting", "tokens not shifted", "cache not overwritten"),
    *("another request's proposals", "norm_output toggled", "target's lm_head"),
)


def cases(names: Iterable[str]) -> list[Any]:
    """Each of these seconds long: a few every day, the others in `make test-full`."""
    return [name if name in EVERY_DAY else pytest.param(name, marks=FULL) for name in names]


@pytest.mark.parametrize("name", cases(PLANTED))
def test_a_planted_execution_is_named(knowledge: Knowledge, engine: Engine, name: str) -> None:
    trace = serve(
        engine, knowledge.drafter, prompts(knowledge), kind=PLANTED[name], max_tokens=TOKENS
    )
    # before a request's first call the buffer holds another's; alone, nothing can be swapped
    least = {"states of the previous call": 0.75, "another request's proposals": 0.97}
    assert_found(replay(knowledge, trace), name, least.get(name, 0.99))


Change = Callable[[Eagle3Drafter, Engine], None]


def _flag(name: str) -> Change:
    def change(drafter: Eagle3Drafter, _: Engine) -> None:
        drafter.spec = msgspec.structs.replace(drafter.spec, **{name: True})

    return change


def _head(drafter: Eagle3Drafter, engine: Engine) -> None:
    drafter.lm_head.weight = nn.Parameter(engine.model.head.weight.t().contiguous(), False)


def _scaling(drafter: Eagle3Drafter, _: Engine) -> None:
    drafter.spec = msgspec.structs.replace(drafter.spec, rope=RopeSpec(theta=10000.0))
    drafter.reset_rope()


def _theta(drafter: Eagle3Drafter, _: Engine) -> None:
    rope = msgspec.structs.replace(drafter.spec.rope, theta=500000.0)
    drafter.spec = msgspec.structs.replace(drafter.spec, rope=rope)
    drafter.reset_rope()


def _norm(drafter: Eagle3Drafter, _: Engine) -> None:
    nn.init.ones_(drafter.norm.weight)


def _residual(drafter: Eagle3Drafter, _: Engine) -> None:
    whole = drafter.finish

    def finish(attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return whole(attended, torch.zeros_like(residual))

    drafter.finish = finish  # type: ignore[method-assign]


CHANGED: dict[str, Change] = {
    "norm_output toggled": _flag("norm_output"),
    "norm_before_residual toggled": _flag("norm_before_residual"),
    "target's lm_head": _head,
    "rope scaling dropped": _scaling,
    "rope theta 500000": _theta,
    "final norm of ones": _norm,
    "attention without residual": _residual,
}


@pytest.mark.parametrize("name", cases(CHANGED))
def test_a_drafter_read_otherwise_is_named(
    knowledge: Knowledge, engine: Engine, demo_pair: Path, name: str
) -> None:
    drafter = drafter_of(demo_pair, engine)
    CHANGED[name](drafter, engine)
    trace = serve(engine, drafter, prompts(knowledge), max_tokens=TOKENS)
    assert_found(replay(knowledge, trace), name)


@pytest.mark.parametrize(
    ("odd", "given", "followed"), [(20, 4, True), (20, 3, False), (7, 0, True), (0, 0, True)]
)
def test_a_first_look_drops_no_reading_that_may_be_behind_some_calls(
    odd: int, given: int, followed: bool
) -> None:
    """What goes wrong now and then is given by a reading that is wrong everywhere else."""
    own = torch.ones(48, 3, dtype=torch.bool)
    own[:odd, 1] = False
    glimpse = torch.zeros(48, 3, dtype=torch.bool)
    glimpse[:given] = True
    assert _may_explain(glimpse, own) is followed


def test_names_of_readings_come_back_as_they_are() -> None:
    from harness.diagnose.causes import CAUSES
    from harness.diagnose.readings import READINGS, layers_reading

    for reading in (*READINGS.values(), layers_reading("layers off by +1", (3, 5, 6))):
        assert reading_of(reading.name) == reading
        assert reading.cause is None or reading.cause in CAUSES
    assert copy.copy(reading_of("other layers (0, 12, 3)").layers) == (0, 12, 3)
