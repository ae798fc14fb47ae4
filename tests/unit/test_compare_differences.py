"""What is said to differ between two runs, what it may move, and what cannot be compared."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from compare_runs import SPEEDS, cells_of, group, stored
from report_run import C4

from harness.analyse.across.compare import compare_groups
from harness.analyse.across.differences import flags_of, flat, moves
from harness.analyse.across.records import Difference, Versus
from harness.analyse.across.rows import Wanted
from harness.errors import UsageError
from harness.findings import Gauge, GpuFigures, Telemetry
from harness.plan.schema import (
    ClientSection,
    EngineSection,
    Flag,
    Plan,
    SamplingSection,
    SpeculativeSection,
    WorkloadSection,
    as_dict,
)


def versus(b: Any, a: Any = None, **wanted: Any) -> Versus:
    across = compare_groups([group(a or stored()), group(b)], Wanted(**wanted))
    return across.comparisons[0]


def told(b: Any, a: Any = None) -> dict[str, Difference]:
    return {d.key: d for d in versus(b, a).differences}


def test_a_newer_package_is_told_with_what_it_may_move() -> None:
    found = told(stored("b", manifest={"versions": {"torch": "2.14.0"}}))
    assert set(found) == {"torch"}
    assert (found["torch"].reference, found["torch"].candidate) == ("2.13.0", "2.14.0")
    assert set(found["torch"].affects) == {"speed", "acceptance", "start-up", "output", "memory"}


@pytest.mark.parametrize(
    ("manifest", "key", "ends"),
    [
        ({"git_commit": "fedcba9876543210"}, "git commit", ("0123456789ab", "fedcba987654")),
        ({"git_dirty": True, "git_diff": "abc"}, "uncommitted changes", ("none", "yes (abc)")),
        ({"versions": {}}, "torch", ("2.13.0", None)),
        ({"changes": ("torch was 1",)}, "changed within the run", ("nothing", "torch was 1")),
        (
            {"environment": {"cpu": "Other", "cores_usable": 2, "gpus": [], "python": "3.11.7"}},
            "CPU",
            ("Example CPU", "Other"),
        ),
        (
            {
                "environment": {
                    "cpu": "Example CPU",
                    "cores_usable": 2,
                    "python": "3.11.7",
                    "gpus": 2 * [{"name": "X", "driver": "1"}],
                }
            },
            "GPUs",
            ("none", "2 x X (driver 1)"),
        ),
        (
            {"digests": {"reference": {"target": "t1", "drafter": "d2"}}},
            "drafter",
            ("m/drafter (d1)", "m/drafter (d2)"),
        ),
    ],
)
def test_what_the_manifest_holds(
    manifest: dict[str, Any], key: str, ends: tuple[str | None, str | None]
) -> None:
    found = told(stored("b", manifest=manifest))
    assert set(found) == {key}
    assert (found[key].reference, found[key].candidate) == ends
    assert "speed" in found[key].affects


def test_keys_of_the_plan_move_what_they_are_about() -> None:
    flag = {"attention-backend": Flag(value="a", why="because")}
    a = Plan(engine=EngineSection(flags=flag), description="one")
    b = Plan(
        engine=EngineSection(
            flags={"attention-backend": Flag(value="b", why="for other reasons")},
            startup_deadline_s=60,
        ),
        speculative=SpeculativeSection(k=5),
        description="another",
    )
    found = told(stored("b", plan=b), stored("a", plan=a))
    assert set(found) == {"engine.flags.attention-backend", "speculative.k"}
    assert found["speculative.k"].reference == "3"
    assert found["speculative.k"].affects == ("speed", "acceptance", "start-up", "memory")
    assert "output" in found["engine.flags.attention-backend"].affects


def test_every_key_of_the_plan_is_known_to_move_something_or_nothing() -> None:
    """A section that is added to the plan has to be given its place here."""
    without = {"compare", "expect"}
    keys = flat(as_dict(Plan()))
    for key in keys:
        assert bool(moves(key)) is (key.partition(".")[0] not in without), key


def test_a_reason_that_changed_is_no_difference() -> None:
    assert told(stored("b", plan=Plan(why={"seed": "new"}, name="other"))) == {}


def test_what_matters_stands_before_what_moves_nothing() -> None:
    plan = Plan(compare=Plan().compare.__class__(launches=5))
    b = stored("b", plan=plan, manifest={"versions": {"torch": "2.14.0"}})
    found = versus(b).differences
    assert [d.key for d in found] == ["torch", "compare.launches"]
    assert found[1].affects == ()


def test_commands_are_compared_without_ports_and_paths() -> None:
    argv = ("/venv/bin/python", "-m", "x", "--model", "/a/b", "--port", "1", "--seed=0", "--fast")
    assert flags_of((*argv, "--api-key", "x")) == {"--seed": "0", "--fast": "", "--api-key": "set"}
    other = (*argv[:5], "--port", "2", "--seed=0", "--block-size", "16")
    a = stored("a", argv={"reference baseline": argv})
    found = told(stored("b", argv={"reference baseline": other}), a)
    assert {key: (d.reference, d.candidate) for key, d in found.items()} == {
        "baseline --fast": ("set", None),
        "baseline --block-size": (None, "16"),
    }


def gpu(clock: float, capped: float) -> Telemetry:
    figures = GpuFigures(
        index="0",
        name="X",
        engine=True,
        energy_j=None,
        energy_by=None,
        gauges={"sm_clock_mhz": Gauge(mean=clock, least=clock, most=clock, n=9)},
        throttled={"power limit": capped},
    )
    return Telemetry(
        interval_s=1.0,
        missing={},
        engine={},
        preemptions=None,
        prefix_hit_rate=None,
        host={},
        host_totals={},
        gpus=(figures,),
        energy_j=None,
        energy_of=None,
        joules_per_output_token=None,
    )


def test_slower_clocks_and_a_busy_machine_are_causes_as_well() -> None:
    quiet = {"environment": {"cores_usable": 2, "load_average": [0.1, 0, 0]}}
    busy = {"environment": {"cores_usable": 2, "load_average": [3.5, 0, 0]}}
    a = stored("a", cells_of(SPEEDS, telemetry=gpu(1980, 0.0)), manifest=quiet)
    b = stored("b", cells_of(SPEEDS, telemetry=gpu(1755, 0.4)), manifest=busy)
    assert {d.key: (d.reference, d.candidate) for d in versus(b, a).differences} == {
        "load average at the beginning": ("0.1", "3.5"),
        "GPU clock, mean": ("1980 MHz", "1755 MHz"),
        "clocks held back by power limit": ("0%", "40%"),
    }
    assert versus(stored("b", cells_of(SPEEDS, telemetry=gpu(1975, 0.01)), manifest=quiet), a) == (
        msgspec.structs.replace(versus(a, a), candidate="b", run_ids=("id-b",))
    )


def test_an_unread_engine_environment_is_no_difference() -> None:
    a = stored("a", manifest={"engine_versions": {"reference": {"vllm": "1"}}})
    assert told(stored("b", manifest={"engine_versions": {"reference": {}}}), a) == {}
    b = stored("b", manifest={"engine_versions": {"reference": {"vllm": "2"}}})
    assert set(told(b, a)) == {"reference's vllm"}


@pytest.mark.parametrize(
    ("b", "said"),
    [
        (
            stored("b", manifest={"digests": {"reference": {"target": "t2", "drafter": "d1"}}}),
            "another target: m/target (t1) -> m/target (t2)",
        ),
        (
            stored("b", plan=Plan(workload=WorkloadSection(dataset="demo"))),
            "another workload.dataset: builtin -> demo",
        ),
        (
            stored("b", plan=Plan(sampling=SamplingSection(temperature=0.5))),
            "another sampling.temperature: 0.0 -> 0.5",
        ),
        (stored("b", cells_of(SPEEDS, load=C4)), "another load: concurrency 1 -> concurrency 4"),
        (stored("b", []), "another load: concurrency 1 -> nothing measured"),
    ],
)
def test_runs_that_cannot_be_compared_say_so_in_one_line(b: Any, said: str) -> None:
    with pytest.raises(UsageError) as error:
        versus(b)
    text = str(error.value)
    assert text.startswith("a and b cannot be compared: ")
    assert said in text
    assert "--anyway" in text
    assert "\n" not in text


def test_a_secret_is_told_to_differ_and_not_shown() -> None:
    def plan(value: str) -> Plan:
        return Plan(
            client=ClientSection(headers={"Authorization": f"Bearer {value}"}),
            engine=EngineSection(extra_env={"HF_TOKEN": value, "OMP_NUM_THREADS": value}),
        )

    found = told(stored("b", plan=plan("2")), stored("a", plan=plan("1")))
    assert {key: (d.reference, d.candidate) for key, d in found.items()} == {
        "client.headers.Authorization": ("one value", "another"),
        "engine.extra_env.HF_TOKEN": ("one value", "another"),
        "engine.extra_env.OMP_NUM_THREADS": ("1", "2"),
    }


def test_more_prompts_of_the_same_kind_can_be_compared() -> None:
    found = versus(stored("b", plan=Plan(workload=WorkloadSection(num_prompts=50))))
    assert [d.key for d in found.differences] == ["workload.num_prompts"]
    assert {row.unpaired for row in found.rows if row.load and row.area == "speed"} == {
        "workload.num_prompts is not the same"
    }


def test_anyway_compares_them_and_keeps_saying_why_not() -> None:
    found = versus(stored("b", cells_of(SPEEDS, load=C4)), anyway=True)
    assert found.hindrances == ("another load: concurrency 1 -> concurrency 4",)
    assert {row.load.concurrency for row in found.rows if row.load} == {1}
    assert found.rows[0].unpaired is None or "not the same" in found.rows[0].unpaired


def test_a_target_without_a_digest_is_told_by_its_folder() -> None:
    moved = {"engines": {"reference": as_dict(Plan())}}
    models = {"models": {"reference": {"target": "/elsewhere/m/target", "drafter": "/m/drafter"}}}
    a = stored("a", manifest={"digests": {}})
    b = stored("b", manifest={"digests": {}, "plan": {**moved, **models}})
    assert set(told(b, a)) == {"target's path"}
    models["models"]["reference"]["target"] = "/m/another"
    other = stored("b", manifest={"digests": {}, "plan": {**moved, **models}})
    with pytest.raises(UsageError, match="another target's path"):
        versus(other, a)


def test_two_engines_are_compared_where_each_run_has_one() -> None:
    found = versus(stored("b", cells_of(SPEEDS, engine="vllm")))
    assert next((d.key, d.reference, d.candidate) for d in found.differences) == (
        "engine",
        "reference",
        "vllm",
    )
    assert {row.engine for row in found.rows} == {"reference"}


def test_what_only_one_of_them_measured_is_named() -> None:
    a = stored("a", [*cells_of(SPEEDS), *cells_of(SPEEDS, load=C4)])
    b = stored("b", cells_of({"speculative": (60.0, 61.0, 62.0)}))
    found = versus(b, a)
    assert found.left_out == (
        "concurrency 4: only in the reference",
        "baseline: only in the reference",
    )
    assert {row.side for row in found.rows} == {"speculative"}
    without = cells_of(SPEEDS, acceptance=None)
    assert "acceptance_length of speculative: only in the reference" in (
        versus(stored("b", without)).left_out
    )
