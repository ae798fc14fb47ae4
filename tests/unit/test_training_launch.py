"""What training starts of a plan's `[engine]`: all that a run would start."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from harness.errors import UsageError
from harness.plan.schema import EngineSection, Flag
from training.launch import serve_spec
from training.plan import TrainingPlan

TARGET = Path("/models/target")


def plan(**engine: object) -> TrainingPlan:
    return TrainingPlan(engine=msgspec.convert(engine, EngineSection))


def test_flags_variables_and_where_it_runs_are_passed_on() -> None:
    flags = {
        "--both": Flag(why="x"),
        "--one": Flag(value=3, why="x", variant="speculative"),
        "--off": Flag(value=False, why="x"),
    }
    section = EngineSection(
        flags=flags,
        env={"A": Flag(value="1", why="x"), "B": Flag(value="2", why="x")},
        extra_args=("--last",),
        extra_env={"B": "3"},
        host="0.0.0.0",
        reach="node7",
        command_prefix=("ssh", "node7"),
        port=8123,
    )
    target = serve_spec(TrainingPlan(engine=section), TARGET, 512)
    assert target.extra_args == ("--both", "--last")
    assert target.extra_env == {"A": "1", "B": "3"}
    assert (target.host, target.reach, target.command_prefix) == (
        *("0.0.0.0", "node7", ("ssh", "node7")),
    )
    assert (target.port, target.max_model_len, target.served_name) == (8123, 512, "target")
    drafted = serve_spec(TrainingPlan(engine=section), TARGET, 512, "speculative")
    assert drafted.extra_args == ("--both", "--one", "3", "--last")


def test_as_many_requests_as_are_asked_at_once_unless_the_plan_says() -> None:
    own = TrainingPlan()
    assert serve_spec(own, TARGET, 512).max_num_seqs == own.generate.concurrency
    assert serve_spec(plan(max_num_seqs=3), TARGET, 512).max_num_seqs == 3


def test_several_machines_are_refused() -> None:
    with pytest.raises(UsageError, match=r"engine\.nodes = 2: several machines"):
        serve_spec(plan(nodes=2, head="a:1"), TARGET, 512)
