"""From the plan's load table to load points: what each key brings, and what cannot be."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.plan.load import build, read_profile
from harness.plan.points import DEFAULT_REQUESTS, load_label, load_points
from harness.plan.schema import LoadSection, RateSegment
from harness.records import LoadPoint

SCHEDULE = (RateSegment(seconds=10.0, rate=2.0), RateSegment(seconds=5.0, rate=2.0, to=8.0))


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0}\n')
    return str(path)


def said(load: LoadPoint) -> dict[str, Any]:
    return {k: v for k, v in msgspec.structs.asdict(load).items() if v is not None}


def test_defaults_are_left_out_of_the_point() -> None:
    assert [said(p) for p in load_points(LoadSection())] == [
        {"mode": "closed", "concurrency": 1, "num_requests": DEFAULT_REQUESTS}
    ]
    assert [said(p) for p in load_points(LoadSection(request_rate=(2.0,), duration_s=3.0))] == [
        {"mode": "open", "request_rate": 2.0, "duration_s": 3.0}
    ]


def test_every_kind_in_order_with_what_belongs_to_it(trace: str) -> None:
    load = LoadSection(
        concurrency=(4,),
        request_rate=(2.0, 3.0),
        schedule=SCHEDULE,
        trace=trace,
        time_scale=0.5,
        arrival="gamma",
        burstiness=0.25,
        think_time_s=1.0,
        think_time="exponential",
        max_request_rate=9.0,
        max_concurrency=7,
    )
    think = {"think_time_s": 1.0, "think_time": "exponential"}
    gamma = {"arrival": "gamma", "burstiness": 0.25, "num_requests": DEFAULT_REQUESTS}
    opened = {"mode": "open", "max_concurrency": 7, **think}
    points = load_points(load)
    assert [said(p) for p in points] == [
        {
            "mode": "closed",
            "concurrency": 4,
            "max_request_rate": 9.0,
            **think,
            "num_requests": DEFAULT_REQUESTS,
        },
        {**opened, **gamma, "request_rate": 2.0},
        {**opened, **gamma, "request_rate": 3.0},
        {
            **opened,
            "arrival": "schedule",
            "schedule": ((10.0, 2.0, 2.0), (5.0, 2.0, 8.0)),
        },
        {**opened, "arrival": "trace", "trace": trace, "time_scale": 0.5},
    ]
    labels = ["c4", "q2-gamma0.25", "q3-gamma0.25", "schedule", "trace"]
    assert [load_label(p) for p in points] == labels


def test_a_burst_is_a_point_of_its_own() -> None:
    (point,) = load_points(LoadSection(arrival="burst", num_requests=64))
    assert said(point) == {"mode": "open", "arrival": "burst", "num_requests": 64}
    assert load_label(point) == "burst64"


def test_tokens_may_end_a_cell() -> None:
    (point,) = load_points(LoadSection(num_output_tokens=1000))
    assert said(point) == {"mode": "closed", "concurrency": 1, "num_output_tokens": 1000}


def test_constant_arrivals_are_told_in_the_label() -> None:
    (point,) = load_points(LoadSection(arrival="constant", request_rate=(2.5,)))
    assert load_label(point) == "q2.5-constant"


def test_a_schedule_can_be_set_on_the_command_line() -> None:
    sets = [
        "load.concurrency=none",
        "load.num_requests=none",
        "load.schedule=[{seconds=10, rate=2}, {seconds=5, rate=2, to=8}]",
    ]
    plan = build(read_profile("attach"), "openai", sets)
    (point,) = load_points(plan.load)
    assert point.schedule == ((10.0, 2.0, 2.0), (5.0, 2.0, 8.0))


DOCS = Path(__file__).parents[2] / "docs" / "load.md"
COMMANDS = [line for line in DOCS.read_text().splitlines() if line.startswith("python -m harness")]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_documented_commands_give_load_points(command: str, tmp_path: Path) -> None:
    words = shlex.split(command)
    sets = [b for a, b in itertools.pairwise(words) if a == "--set"]
    (tmp_path / "trace.jsonl").write_text("")
    sets = [s.replace("trace.jsonl", str(tmp_path / "trace.jsonl")) for s in sets]
    assert load_points(build(read_profile("attach"), "openai", sets).load)


def test_every_key_that_makes_load_points_is_documented() -> None:
    keys = set(LoadPoint.__struct_fields__) - {"mode"}
    assert keys <= set(re.findall(r"load\.([a-z_]+)=", "\n".join(COMMANDS)))


@given(
    st.lists(st.integers(1, 9999), unique=True, max_size=5),
    st.lists(st.sampled_from([1e-6, 0.5, 2.5, 1e6]), unique=True, max_size=4),
    st.sampled_from(["constant", "poisson", "gamma"]),
)
def test_labels_are_unique_names_of_folders(
    concurrency: list[int], rates: list[float], arrival: Any
) -> None:
    load = LoadSection(
        concurrency=tuple(concurrency),
        request_rate=(7.0, *rates),
        schedule=SCHEDULE,
        arrival=arrival,
    )
    labels = [load_label(p) for p in load_points(load)]
    assert len(set(labels)) == len(labels)
    assert all(re.fullmatch(r"[A-Za-z0-9.+-]+", label) for label in labels)


@pytest.mark.parametrize(
    ("keys", "needle"),
    [
        ({"num_requests": 3, "duration_s": 1.0}, "num_requests or duration_s, not both"),
        (
            {"num_requests": 3, "num_output_tokens": 9},
            "num_requests or num_output_tokens, not both",
        ),
        ({"duration_s": 3.0, "num_output_tokens": 9}, "duration_s or num_output_tokens, not both"),
        ({"arrival": "gamma", "concurrency": (4,)}, "load.arrival=gamma: only with"),
        ({"arrival": "constant", "schedule": SCHEDULE}, "load.arrival=constant: only with"),
        ({"burstiness": 0.5, "request_rate": (1.0,)}, "load.burstiness=0.5: only with"),
        ({"arrival": "burst", "request_rate": (1.0,)}, "burst with load.request_rate"),
        ({"arrival": "burst", "duration_s": 1.0}, "give load.num_requests"),
        ({"arrival": "burst", "num_output_tokens": 5}, "give load.num_requests"),
        ({"time_scale": 2.0, "request_rate": (1.0,)}, "load.time_scale=2: only with load.trace"),
        ({"think_time": "exponential"}, "give its mean, load.think_time_s"),
        ({"max_request_rate": 5.0, "request_rate": (1.0,)}, "caps a closed loop"),
        ({"max_concurrency": 5, "concurrency": (4,)}, "a closed loop's limit is load.concurrency"),
        ({"schedule": ()}, "load.schedule: no request is ever due"),
        ({"schedule": (RateSegment(seconds=5.0, rate=0.0),)}, "no request is ever due"),
        ({"schedule": (RateSegment(seconds=1e6, rate=9.0),)}, "about 9000000 requests"),
        ({"trace": "no/such.jsonl"}, "load.trace=no/such.jsonl: no such file"),
        ({"trace": "a\0b"}, "no such file"),
        ({"concurrency": ()}, "no load point"),
        ({"request_rate": (2.0, 2.0), "arrival": "constant"}, "request_rate: 2 is given twice"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(keys: dict[str, Any], needle: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_points(LoadSection(**keys))
    assert needle in str(caught.value)
    assert "\n" not in str(caught.value)
