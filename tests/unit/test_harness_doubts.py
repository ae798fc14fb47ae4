"""Counters that lie, each in its own way, and sources that disagree: each has its own caution."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from harness_records import cell, failed, request, run_of
from hypothesis import given
from hypothesis import strategies as st
from test_harness_acceptance import made_of

from engines.base import RankCounters, SpecCounters
from harness.analyse.acceptance import cell_acceptance
from harness.analyse.data import CellData
from harness.analyse.reconcile import acceptance_cautions
from harness.analyse.summary import summarise
from harness.measure.counters import difference
from harness.records import EngineCounters, RequestRecord, Variant

PLAIN = [made_of([2, 1, 3, 0], index=i) for i in range(5)]
"""5 requests of 4 steps and 6 accepted tokens each, 11 tokens with the first."""
START = SpecCounters(
    drafts=40, drafted=120, accepted=60, accepted_per_position=(30, 20, 10), generation_tokens=110,
    requests_finished=10, process_start_s=1000.0,
)  # fmt: skip


def grown(**changes: Any) -> SpecCounters:
    """`START` after `PLAIN`, counted right but for the changes."""
    values: dict[str, Any] = {
        "drafts": 60, "drafted": 180, "accepted": 90, "accepted_per_position": (45, 30, 15),
        "generation_tokens": 165, "requests_finished": 15, "process_start_s": 1000.0,
    }  # fmt: skip
    return SpecCounters(**{**values, **changes})


def two_ranks(drafts: int, tokens: int, **more: Any) -> tuple[RankCounters, ...]:
    return tuple(
        RankCounters(rank=f"engine={i}", drafts=drafts, generation_tokens=tokens, **more)
        for i in range(2)
    )


def told(
    after: SpecCounters | None = None,
    before: SpecCounters | None = START,
    *,
    records: list[RequestRecord] | None = None,
    variant: Variant = "speculative",
    counted: EngineCounters | None = None,
    **more: Any,
) -> dict[str, Any]:
    """The cautions by code, and the cell's acceptance under `acceptance`."""
    whole = counted or difference(before, after, more.pop("settled", True), **more)
    data = cell(variant, 0, PLAIN if records is None else records, counted=whole)
    acceptance = cell_acceptance(data) if variant == "speculative" else None
    cautions = {c.code: c for c in acceptance_cautions(data, acceptance)}
    return {**cautions, "acceptance": acceptance}


def test_counters_that_are_right_raise_nothing() -> None:
    found = told(grown())
    assert set(found) == {"acceptance"}
    assert found["acceptance"].source == "counters"
    assert found["acceptance"].sources["counters"] == found["acceptance"].sources["per_request"]


def test_a_rank_missing_after_the_load() -> None:
    before = SpecCounters(**{**fields_of(START), "ranks": two_ranks(20, 55)})
    found = told(grown(drafts=30, accepted=45, ranks=two_ranks(30, 82)[:1]), before)
    assert set(found) == {"counters_rank_missing", "acceptance"}
    assert "1 of 2 ranks" in found["counters_rank_missing"].text
    assert "engine=1" in found["counters_rank_missing"].text
    assert found["acceptance"].source == "per_request"


def test_a_rank_missing_before_the_load_brings_its_past_into_the_difference() -> None:
    before = SpecCounters(**{**fields_of(START), "drafts": 20, "ranks": two_ranks(20, 55)[:1]})
    before = SpecCounters(**{**fields_of(before), "generation_tokens": 55, "accepted": 30})
    found = told(grown(ranks=two_ranks(30, 82)), before)
    assert "counters_rank_missing" in found and "other_traffic" not in found
    assert "110 output tokens, this client 55" in found["counters_rank_missing"].text
    assert found["acceptance"].source == "per_request"


def test_a_rank_that_did_begin_in_the_window_is_no_lie() -> None:
    before = SpecCounters(**{**fields_of(START), "ranks": two_ranks(40, 110)[:1]})
    assert set(told(grown(ranks=two_ranks(40, 110)), before)) == {"acceptance"}


def test_a_rank_that_is_never_read_shows_in_the_tokens() -> None:
    found = told(grown(generation_tokens=137, drafts=50, accepted=75, requests_finished=12))
    assert {"counters_short", "acceptance"} <= set(found)
    assert "27 output tokens" in found["counters_short"].text
    assert "55 came here" in found["counters_short"].text
    assert found["acceptance"].source == "per_request"


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (grown(accepted=10), "accepted from 60 to 10"),
        (grown(process_start_s=1500.0), "process began +500 s"),
        (grown(drafts=None), "drafts from 40 to None"),
        (grown(accepted_per_position=(45, 12, 15)), "accepted at position 1 from 20 to 12"),
    ],
)
def test_a_reset(after: SpecCounters, said: str) -> None:
    found = told(after)
    assert set(found) == {"counters_reset", "acceptance"}
    assert said in found["counters_reset"].text
    assert found["acceptance"].source == "per_request"
    baseline = told(after, variant="baseline")
    assert "counters_reset" in baseline  # a restart spoils its latencies too


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (two_ranks(20, 55), (*two_ranks(40, 99)[:1], RankCounters(rank="engine=1", drafts=3)), "3"),
        (two_ranks(20, 55, created_s=5.0), two_ranks(30, 82, created_s=99.0), "made anew"),
    ],
)
def test_a_reset_of_one_rank_shows_though_the_sum_has_grown(
    old: tuple[RankCounters, ...], new: tuple[RankCounters, ...], said: str
) -> None:
    found = told(grown(ranks=new), SpecCounters(**{**fields_of(START), "ranks": old}))
    assert set(found) == {"counters_reset", "acceptance"}
    assert said in found["counters_reset"].text


def test_a_reset_that_the_counters_have_outgrown_shows_in_the_tokens() -> None:
    few = SpecCounters(drafts=4, drafted=12, accepted=6, generation_tokens=11, requests_finished=1)
    after = grown(drafts=12, drafted=36, accepted=18, generation_tokens=33, requests_finished=3)
    found = told(after, few)
    assert {"counters_short", "acceptance"} <= set(found)


def test_another_clients_traffic() -> None:
    found = told(grown(generation_tokens=220, requests_finished=20, drafts=80, accepted=150))
    assert {"other_traffic", "acceptance"} <= set(found)
    assert "110 output tokens in the window, this client 55" in found["other_traffic"].text
    assert "10 finished requests, this client sent 5" in found["other_traffic"].text
    assert found["acceptance"].source == "per_request"
    assert "other_traffic" in told(grown(requests_finished=16))  # one request of few tokens
    assert "other_traffic" in told(grown(generation_tokens=220), variant="baseline")


def test_failed_requests_are_no_other_clients() -> None:
    lost = failed(index=9, sent_ns=5)
    found = told(grown(generation_tokens=220, requests_finished=16), records=[*PLAIN, lost])
    assert "other_traffic" not in found
    retried = request(index=8, tries=2, output_tokens=1, chunk_tokens=(1,), chunk_ns=(5,))
    after = grown(generation_tokens=166, requests_finished=17)
    assert "other_traffic" not in told(after, records=[*PLAIN, retried])


def test_the_bonus_token_counted_as_accepted() -> None:
    # 4 drafts a request are more than the 3 tokens that could be cut: the sum alone shows it.
    no_own = [made_of([2, 1, 3, 0], index=i, acceptance=None) for i in range(5)]
    found = told(grown(accepted=110, accepted_per_position=(50, 35, 25)), records=no_own)
    assert {"counters_count_bonus", "acceptance"} <= set(found)
    assert "50 draft tokens are told as accepted in 20 drafts" in found["counters_count_bonus"].text
    assert "only 50 tokens came" in found["counters_count_bonus"].text
    assert found["acceptance"].source == "client"


@pytest.mark.parametrize(
    "changes",
    [
        {"accepted": 60 + 61, "drafted": 120 + 60},  # more than were drafted
        {"accepted_per_position": (30 + 21, 30, 15)},  # more than there were drafts
        {"accepted": 60 + 30 + 20},  # one a draft more than the requests say
    ],
)
def test_other_signs_of_the_bonus_token(changes: dict[str, Any]) -> None:
    found = told(grown(**changes))
    assert "counters_count_bonus" in found
    assert found["acceptance"].source == "per_request"


def test_tokens_cut_at_the_end_of_short_answers_are_no_bonus() -> None:
    # One step a request, all accepted, all but one token cut.
    short = [made_of([3], 3, index=i, acceptance=None) for i in range(5)]
    after = grown(
        drafts=45, drafted=135, accepted=75, accepted_per_position=(35, 25, 15),
        generation_tokens=120,
    )  # fmt: skip
    assert "counters_count_bonus" not in told(after, records=short)


def test_figures_of_requests_that_count_the_bonus_are_not_believed() -> None:
    wrong = [
        made_of([2, 1, 3, 0], index=i, acceptance=counts_of(drafts=4, drafted=12, accepted=13))
        for i in range(5)
    ]
    found = told(grown(), records=wrong)
    assert "per_request_count_bonus" in found
    assert "acceptance_sources_disagree" in found
    assert found["acceptance"].source == "counters"


def test_scrapes_that_fail_before_and_after() -> None:
    found = told(grown(), None, unread=("HTTP 500", None))
    assert set(found) == {"counters_unread", "acceptance"}
    assert "before the load (HTTP 500)" in found["counters_unread"].text
    found = told(None, START, unread=(None, "no whole answer within 5 s"))
    assert "after the load (no whole answer within 5 s)" in found["counters_unread"].text
    assert found["acceptance"].source == "per_request"
    assert set(told(None, None)) == {"counters", "acceptance"}
    assert set(told(None, None, unread=("HTTP 503", "HTTP 503"))) == {
        "counters_unread", "acceptance",
    }  # fmt: skip
    assert set(told(None, START, unread=(None, "x"), variant="baseline")) == {"acceptance"}


def test_counters_that_were_moving() -> None:
    assert "after the load" in told(grown(), settled=False)["counters_unsettled"].text
    assert "began" in told(grown(), settled_before=False)["counters_unsettled"].text
    steps = SpecCounters(drafts=60, generation_tokens=165)
    alone = told(steps, SpecCounters(drafts=40, generation_tokens=110), settled=False)
    assert set(alone) == {"counters_unsettled", "acceptance"}


def test_verify_calls_are_compared_where_the_counters_tell_no_more() -> None:
    before = SpecCounters(drafts=40, generation_tokens=110, requests_finished=10)
    right = SpecCounters(drafts=60, generation_tokens=165, requests_finished=15)
    assert set(told(right, before)) == {"acceptance"}
    wrong = SpecCounters(drafts=63, generation_tokens=165, requests_finished=15)
    found = told(wrong, before)
    assert set(found) == {"acceptance_sources_disagree", "acceptance"}
    assert "the counters tell 23 verify steps" in found["acceptance_sources_disagree"].text


@pytest.mark.parametrize(
    ("positions", "said"),
    [
        ((45, 25, 30), "40 in all; these should only fall"),
        ((45, 30), "accepted tokens, and by position 15, 10, 25 in all"),
        ((42, 35, 13), "30 in all; these should only fall"),
    ],
)
def test_positions_that_are_not_of_the_accepted_tokens(
    positions: tuple[int, ...], said: str
) -> None:
    found = told(grown(accepted_per_position=positions))
    assert set(found) == {"positions_disagree", "acceptance"}
    assert said in found["positions_disagree"].text


def test_a_drafter_that_never_drafts_is_told() -> None:
    none = replace(START, generation_tokens=165, requests_finished=15)
    silent = [msgspec.structs.replace(r, acceptance=None, chunk_tokens=None) for r in PLAIN]
    found = told(none, records=silent)
    assert set(found) == {"nothing_drafted", "acceptance"}
    assert "in 5 answers of several tokens" in found["nothing_drafted"].text


@pytest.mark.parametrize("drafts", [("x", 60), (40, "x"), (60, 40), (None, 60.5)])
def test_readings_that_are_no_counts_are_not_compared(drafts: tuple[Any, Any]) -> None:
    before, after = ({"drafts": n} for n in drafts)
    counted = EngineCounters(
        before=before, after=after, delta=None, generation_tokens=55, settled=True
    )
    assert set(told(counted=counted)) == {"acceptance"}


def test_a_disagreement_names_all_three_and_a_reason() -> None:
    found = told(grown(accepted=95, accepted_per_position=None))["acceptance_sources_disagree"]
    for said in ("counters 2.750 (35 accepted in 20 drafts)", "per_request 2.500", "client 2.500"):
        assert said in found.text
    assert "Likely reason" in found.advice
    unended = [*PLAIN, failed(index=9)]
    # Steps of a request that did not end are the counters' alone: more of them is no riddle.
    few_more = grown(drafts=63, drafted=189, accepted=96, accepted_per_position=(48, 32, 16))
    assert set(told(few_more, records=unended)) == {"acceptance"}
    lost = told(grown(accepted=99), records=unended)
    assert "requests that failed" in lost["acceptance_sources_disagree"].advice


def test_merged_chunks_are_their_own_caution_and_no_disagreement() -> None:
    merged = [made_of([2, 1, 3, 0], index=i, merge=True) for i in range(5)]
    found = told(grown(), records=merged)
    assert set(found) == {"chunks_merged", "acceptance"}
    assert "15 of 20 verify steps" in found["chunks_merged"].text


def test_what_is_cut_at_the_end_explains_a_clients_difference() -> None:
    short = [made_of([0, 3], 3, index=i) for i in range(5)]
    assert set(told(counted=none_counted(), records=short)) == {"counters", "acceptance"}
    silent = [made_of([0, 3], 3, index=i, acceptance=None) for i in range(5)]
    after = grown(
        drafts=50, drafted=150, accepted=75, accepted_per_position=(35, 25, 15),
        generation_tokens=125,
    )  # fmt: skip
    assert set(told(after, records=silent)) == {"acceptance"}


def test_figures_of_a_part_of_the_requests_are_told() -> None:
    silent = made_of([1, 1], index=9, acceptance=None)
    found = told(counted=none_counted(), records=[*PLAIN, silent])
    assert "1 of 6 answers" in found["per_request_incomplete"].text
    assert found["acceptance"].source == "client"


@st.composite
def honest(
    draw: st.DrawFn, merging: bool = False
) -> tuple[list[RequestRecord], SpecCounters, SpecCounters]:
    """Requests of an engine that counts right, cut where they end, and its counters around them."""
    k = draw(st.integers(1, 5))
    told_by_request = draw(st.booleans())
    requests = draw(st.lists(st.lists(st.integers(0, k), max_size=12), min_size=1, max_size=12))
    records = []
    for i, steps in enumerate(requests):
        cut = draw(st.integers(0, steps[-1])) if steps else 0
        merge = draw(st.booleans()) if merging and len(steps) > 1 else False
        r = made_of(steps, cut, index=i, k=k, merge=merge)
        records.append(r if told_by_request else msgspec.structs.replace(r, acceptance=None))
    every = [a for steps in requests for a in steps]
    past = draw(st.integers(0, 1000))
    drafts, accepted = past + len(every), past + sum(every)
    tokens = past + sum(r.output_tokens or 0 for r in records)
    before = SpecCounters(
        drafts=past, drafted=past * k, accepted=past, accepted_per_position=(past,) * k,
        generation_tokens=past, requests_finished=past,
    )  # fmt: skip
    after = SpecCounters(
        drafts=drafts, drafted=drafts * k, accepted=accepted,
        accepted_per_position=tuple(past + sum(a > j for a in every) for j in range(k)),
        generation_tokens=tokens, requests_finished=past + len(records),
    )  # fmt: skip
    return records, before, after


@given(honest())
def test_an_engine_that_counts_right_is_never_doubted(
    found: tuple[list[RequestRecord], SpecCounters, SpecCounters],
) -> None:
    records, before, after = found
    assert set(told(after, before, records=records)) == {"acceptance"}


@given(honest(merging=True))
def test_merged_chunks_are_told_as_such_and_as_nothing_else(
    found: tuple[list[RequestRecord], SpecCounters, SpecCounters],
) -> None:
    records, before, after = found
    cautions = told(after, before, records=records)
    merged = cautions["acceptance"].merged
    steps = (after.drafts or 0) - (before.drafts or 0)
    assert merged is None or merged.merged == steps - merged.chunks
    much = merged is not None and (merged.share or 0) > 0.05
    assert set(cautions) == {"acceptance", *(["chunks_merged"] if much else [])}


@given(honest(), st.integers(1, 3))
def test_one_more_request_of_another_client_is_always_seen(
    found: tuple[list[RequestRecord], SpecCounters, SpecCounters], others: int
) -> None:
    records, before, after = found
    finished = (after.requests_finished or 0) + others
    busy = SpecCounters(**{**fields_of(after), "requests_finished": finished})
    assert "other_traffic" in told(busy, before, records=records)


def test_the_summary_carries_them() -> None:
    data: CellData = cell("speculative", 0, PLAIN, counted=difference(START, None, False))
    codes = {c.code for c in summarise(run_of([data])).cells[0].cautions}
    assert "counters_unread" in codes


def fields_of(counters: SpecCounters) -> dict[str, Any]:
    return {name: getattr(counters, name) for name in counters.__dataclass_fields__}


def counts_of(**counts: Any) -> Any:
    from harness.records import DraftCounts

    return DraftCounts(**counts)


def none_counted() -> EngineCounters:
    return difference(None, None, False)
