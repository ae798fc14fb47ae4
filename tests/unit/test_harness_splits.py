"""Acceptance split, and the profile that others' tools read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness_records import cell, run_of
from hypothesis import given
from hypothesis import strategies as st
from test_harness_acceptance import made_of

from harness.analyse.data import CellData
from harness.analyse.profile import profiles
from harness.analyse.splits import client_steps, engine_steps, split_acceptance
from harness.analyse.summary import summarise
from harness.findings import Split, SplitPart
from harness.measure.store import RunFolder, to_json
from harness.measure.table import RequestTable
from harness.plan.schema import Plan, SpeculativeSection
from harness.records import RequestRecord


def of(cells: list[CellData]) -> dict[str, Split]:
    (found,) = split_acceptance(run_of(cells))
    return {s.by: s for s in found.splits}


def figures(split: Split) -> dict[str, tuple[int, int]]:
    return {p.name: (p.drafts, p.accepted) for p in split.parts}


def with_steps(steps: list[int], **more: object) -> RequestRecord:
    import msgspec

    r = made_of(steps, **more)  # type: ignore[arg-type]
    assert r.acceptance is not None
    told = msgspec.structs.replace(r.acceptance, steps=tuple(steps))
    return msgspec.structs.replace(r, acceptance=told)


def test_of_a_forced_acceptance_there_is_no_profile() -> None:
    cells = [cell("speculative", 0, [made_of([3] * 8)])]
    assert set(profiles(run_of(cells))) == {"reference"}
    forced = Plan(speculative=SpeculativeSection(k=3, forced_length=4.0))
    assert profiles(run_of(cells, plan=forced)) == {}


def test_by_category_and_by_request() -> None:
    records = [
        made_of([3] * 8, index=0, category="code"),
        made_of([1] * 10, index=1, category="code"),
        made_of([0] * 9, index=2, category="chat"),
        made_of([0, 0, 0], index=3),  # too few steps to be the worst
    ]
    found = of([cell("speculative", 0, records)])
    assert figures(found["category"]) == {
        "code": (18, 34), "chat": (9, 0), "no category": (3, 0),
    }  # fmt: skip
    code = found["category"].parts[1]
    assert code.requests == 2
    assert code.length.low is not None and code.length.low < 1 + 34 / 18 < code.length.high  # type: ignore[operator]
    assert [p.name for p in found["request"].parts] == ["p2", "p0"]
    assert found["request"].source == "per_request"


def test_by_place_in_the_output() -> None:
    # 1 + 4 * 8 = 33 tokens: steps before tokens 1, 5, 9, 13 | 17, 21, 25, 29.
    records = [made_of([3] * 8), made_of([3, 3, 3, 3, 1, 1, 1, 1], index=1)]
    found = of([cell("speculative", 0, records)])
    by_tokens = figures(found["output_tokens"])
    assert by_tokens == {"tokens 0 to 15": (8, 24), "tokens 16 to 63": (8, 12 + 4)}
    assert sum(p.drafts for p in found["output_quarter"].parts) == 16
    quarters = found["output_quarter"].parts
    assert quarters[0].name == "first quarter" and quarters[0].length.value == 4.0
    assert quarters[-1].length.value is not None and quarters[-1].length.value < 4.0


def test_inside_and_after_the_thinking() -> None:
    # Chunks arrive at 10, 11, …; the answer proper begins with the fourth, 1 + 2 + 2 tokens on.
    thinking = made_of([1, 1, 3, 3], first_reasoning_ns=10, first_answer_ns=13)
    other = made_of([0, 0], index=1)
    found = of([cell("speculative", 0, [thinking, other])])
    assert figures(found["thinking"]) == {"inside the thinking": (2, 2), "after it": (2, 6)}
    assert "thinking" not in of([cell("speculative", 0, [other, made_of([1], index=2)])])


def test_over_the_run_each_cell_is_its_own_phase() -> None:
    slow = tuple(10**9 + i * 10**8 for i in range(9))
    records = [made_of([3, 3, 2, 2, 1, 1, 0, 0], sent_ns=10**9, chunk_ns=slow)]
    later = [made_of([3, 3, 2, 2, 1, 1, 0, 0], index=1, sent_ns=7 * 10**9,
                     chunk_ns=tuple(t + 6 * 10**9 for t in slow))]  # fmt: skip
    found = of([cell("speculative", 0, records), cell("speculative", 1, later)])
    lengths = [p.length.value for p in found["run_time"].parts]
    assert len(lengths) == 4
    assert lengths == sorted(lengths, reverse=True)  # type: ignore[type-var]
    assert found["run_time"].source == "client"


def test_the_engines_own_steps_are_taken_though_chunks_were_merged() -> None:
    merged = [with_steps([3, 0, 3, 0], index=i, merge=True) for i in range(2)]
    steps = engine_steps(RequestTable.of(merged))
    assert steps.token.tolist() == [1, 5, 6, 10] * 2
    assert figures(of([cell("speculative", 0, merged)])["output_quarter"]) == {
        "first quarter": (2, 6), "second quarter": (2, 0), "third quarter": (2, 6),
        "last quarter": (2, 0),
    }  # fmt: skip
    assert of([cell("speculative", 0, merged)])["output_quarter"].source == "per_request"


def test_of_the_engines_last_step_what_stood_behind_the_end_is_left_out() -> None:
    cut = with_steps([1, 3], cut=3)
    steps = engine_steps(RequestTable.of([cut]))
    assert steps.accepted.tolist() == [1, 1]  # 3 accepted, 2 of them behind the end


@given(st.lists(st.lists(st.integers(0, 3), max_size=12), min_size=1, max_size=6))
def test_the_parts_of_each_split_add_up_to_all_steps(requests: list[list[int]]) -> None:
    records = [made_of(s, index=i) for i, s in enumerate(requests) if s]
    if not records:
        return
    steps = client_steps(RequestTable.of(records))
    assert len(steps.row) == sum(map(len, requests))
    token = [1 + sum(a + 1 for a in s[:j]) for s in requests for j in range(len(s))]
    assert steps.token.tolist() == token
    drafts, accepted = len(token), sum(map(sum, requests))
    (found,) = split_acceptance(run_of([cell("speculative", 0, records)]))
    for split in found.splits:
        if split.by in ("category", "output_tokens", "output_quarter", "run_time"):
            assert sum(p.drafts for p in split.parts) == drafts
            assert sum(p.accepted for p in split.parts) == accepted


def test_a_baseline_and_a_silent_server_have_no_splits() -> None:
    silent = [made_of([1], acceptance=None, chunk_tokens=None)]
    cells = [cell("baseline", 0, [made_of([1])]), cell("speculative", 0, silent)]
    assert split_acceptance(run_of(cells)) == ()
    assert profiles(run_of(cells)) == {}


def test_the_same_records_give_the_same_bytes_with_splits() -> None:
    cells = [cell("speculative", i, [made_of([3, 1, 0], index=i)]) for i in range(3)]
    first = to_json(summarise(run_of(cells)))
    assert first == to_json(summarise(run_of(cells)))
    assert json.loads(first)["splits"][0]["estimates"]["requests"] == 3


LAYOUT = {
    "schema_version": str, "measured": bool, "method": (str, type(None)),
    "draft_checkpoint": (dict, type(None)), "target_model": (dict, type(None)),
    "num_speculative_tokens": int, "block_size": type(None), "max_supported_k": int,
    "verification_method": str, "conditional_accept_rates": list, "marginal_accept_rates": list,
    "mean_accept_length": float, "mean_accept_length_per_request": float,
    "accept_length_model": str, "accept_length_by_k": dict, "acceptance_length_histogram": dict,
    "per_category": (dict, type(None)), "measurement_conditions": dict, "validation": dict,
}  # fmt: skip
"""Every key of version 1.0 of the layout, in its order, with the kinds a reader expects."""


def profile_of(records: list[RequestRecord]) -> dict[str, object]:
    found = profiles(run_of([cell("speculative", 0, records)]))["reference"]
    read: dict[str, object] = json.loads(to_json(found))
    return read


def test_the_profile_has_the_layout_that_its_readers_expect() -> None:
    # 100 steps: 40 gave one token, 30 two, 30 three; none four, though k is 3.
    steps = [0] * 40 + [1] * 30 + [2] * 30
    found = profile_of([made_of(steps[i::4], index=i, category="chat") for i in range(4)])
    assert list(found) == list(LAYOUT)
    for key, kind in LAYOUT.items():
        assert isinstance(found[key], kind), key  # type: ignore[arg-type]
    assert found["schema_version"] == "1.0" and found["measured"] is True
    assert found["num_speculative_tokens"] == 3
    assert found["marginal_accept_rates"] == [0.6, 0.3, 0.0]
    assert found["conditional_accept_rates"] == [0.6, 0.5, 0.0]
    assert found["mean_accept_length"] == 1.9
    assert found["accept_length_by_k"] == {"3": 1.9}
    # By length: the tokens of a step, its own among them.
    assert found["acceptance_length_histogram"] == {"1": 40, "2": 30, "3": 30}
    assert (found["method"], found["accept_length_model"]) == ("eagle3", "chain_analytic")
    assert found["verification_method"] == "longest_prefix"
    assert found["per_category"]["chat"]["mean_accept_length"] == 1.9  # type: ignore[index]
    assert found["target_model"] == {"id": "m/target"}


def test_the_profile_checks_itself() -> None:
    validation = profile_of([made_of([3, 0]), made_of([1], index=1)])["validation"]
    assert validation["mean_consistency"] == {  # type: ignore[index]
        "implied_mean_accept_length": pytest.approx(1 + 4 / 3, abs=1e-6),
        "reported_mean_accept_length": pytest.approx(1 + 4 / 3, abs=1e-6),
        "abs_delta": 0.0, "tolerance": 0.02, "passed": True,
    }  # fmt: skip
    assert validation["marginal_monotonicity"] == {  # type: ignore[index]
        "passed": True, "violations": [],
    }  # fmt: skip


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), min_size=1, max_size=5))
def test_the_profiles_vectors_give_its_mean(requests: list[list[int]]) -> None:
    found = profile_of([made_of(s, index=i) for i, s in enumerate(requests)])
    marginal, conditional = found["marginal_accept_rates"], found["conditional_accept_rates"]
    assert isinstance(marginal, list) and isinstance(conditional, list)
    assert len(marginal) == len(conditional) == 3
    assert found["mean_accept_length"] == pytest.approx(1 + sum(marginal), abs=1e-5)
    product = 1.0
    for p, c in zip(marginal, conditional, strict=True):
        product *= c
        assert p == pytest.approx(product, abs=1e-4)
    histogram = found["acceptance_length_histogram"]
    assert isinstance(histogram, dict)
    assert sum(histogram.values()) == sum(map(len, requests))
    each = [1 + sum(s) / len(s) for s in requests]
    mean = found["mean_accept_length_per_request"]
    assert mean == pytest.approx(sum(each) / len(each), abs=1e-5)


def test_profiles_of_several_engines_have_their_names_and_old_ones_go(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_profiles({"vllm": {"a": 1}, "sglang": {"b": 2}})
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"speculation_profile.json", "speculation_profile-sglang.json"}
    assert json.loads((tmp_path / "speculation_profile.json").read_text()) == {"a": 1}
    folder.write_profiles({})
    assert list(tmp_path.iterdir()) == []


def test_a_part_without_steps_is_left_out() -> None:
    found = of([cell("speculative", 0, [made_of([1, 1]), made_of([2, 2], index=1)])])
    assert all(isinstance(p, SplitPart) and p.drafts for s in found.values() for p in s.parts)
