"""Intervals, columns, past-end tokens, merged chunks: a cell's acceptance from its requests."""

from __future__ import annotations

import math

import numpy as np
import pytest
from harness_records import cell, counters, failed, request
from hypothesis import given
from hypothesis import strategies as st

from harness.analyse.acceptance import cell_acceptance, estimates, merged_chunks, sources_of
from harness.analyse.ratio import ratio, share
from harness.analyse.requests import columns, cut_tokens, own_counts, past_end
from harness.measure.columns import Drafts, Ints
from harness.measure.metrics import client_counts, from_histogram
from harness.records import DraftCounts, RequestRecord

K = 3


def made_of(
    steps: list[int],
    cut: int = 0,
    *,
    index: int = 0,
    k: int = K,
    merge: bool = False,
    **more: object,
) -> RequestRecord:
    """A request of these verify steps, its last one cut by `cut` tokens, as the engine tells it."""
    sizes = [1, *(a + 1 for a in steps)]
    sizes[-1] -= cut
    assert min(sizes) > 0
    if merge:
        sizes = [sizes[0], sum(sizes[1:])]
    histogram = [steps.count(j) for j in range(k + 1)]
    counts = from_histogram(len(steps), k * len(steps), histogram)
    fields: dict[str, object] = {
        "index": index,
        "prompt_id": f"p{index}",
        "chunk_tokens": tuple(sizes),
        "chunk_ns": tuple(range(10, 10 + len(sizes))),
        "output_tokens": sum(sizes),
        "token_ids": None,
        "acceptance": counts,
    }
    return request(**{**fields, **more})


def counted(r: RequestRecord) -> tuple[Drafts, Ints]:
    """A request's own counts and its output tokens, as columns."""
    return own_counts([r]), Ints.of([r.output_tokens])


STEPS = st.lists(st.integers(0, K), min_size=1, max_size=30)


@given(STEPS, st.integers(0, K))
def test_what_is_cut_and_what_stood_behind_the_end_are_found_from_the_counts(
    steps: list[int], cut: int
) -> None:
    cut = min(cut, steps[-1])  # at least one token of a step comes out
    r = made_of(steps, cut)
    assert cut_tokens(*counted(r)).python() == [cut]
    assert past_end(*counted(r)).python() == [max(0, cut - 1)]
    # The client sees of a cut run what came, less one for the step's own token.
    seen = client_counts([r])
    assert seen is not None and r.acceptance is not None
    assert (seen.drafts, seen.accepted) == (len(steps), r.acceptance.accepted - cut)


@pytest.mark.parametrize(
    "fields",
    [
        {"output_tokens": None},
        {"output_tokens": 40},  # steps without a draft gave more than the drafts can have
        {"output_tokens": 2},  # and here the engine went on past the end
        {"acceptance": None},
    ],
)
def test_where_the_counts_do_not_come_out_nothing_is_corrected(fields: dict[str, object]) -> None:
    assert past_end(*counted(made_of([3, 3, 3], **fields))).python() == [None]


def test_an_engine_that_tells_what_stood_behind_the_end_is_believed() -> None:
    counts = DraftCounts(drafts=1, drafted=3, accepted=3, per_position=(1, 1, 1), past_end=2)
    assert past_end(*counted(request(acceptance=counts, output_tokens=2))).python() == [2]


def test_an_answer_of_one_token_has_no_steps_and_hides_no_others() -> None:
    one = request(index=1, output_tokens=1, chunk_tokens=(1,), chunk_ns=(5,), acceptance=None)
    data = cell("speculative", 0, [made_of([2, 1]), one])
    told = sources_of(data)["per_request"]
    assert told is not None and (told.drafts, told.accepted) == (2, 3)
    assert sources_of(cell("speculative", 0, [one]))["per_request"] is None


def test_figures_by_hand() -> None:
    found = estimates([made_of([3, 1]), made_of([0, 0, 0, 0], index=1)])
    assert found is not None
    assert (found.source, found.requests, found.clusters) == ("per_request", 2, 2)
    assert found.length.value == pytest.approx(1 + 4 / 6)
    assert found.length_request_mean.value == pytest.approx((3 + 1) / 2)
    assert found.rate.value == pytest.approx(4 / 18)
    assert found.rate_request_mean.value == pytest.approx((4 / 6 + 0) / 2)
    assert [e.value for e in found.per_position] == pytest.approx([2 / 6, 1 / 6, 1 / 6])
    assert [e.value for e in found.per_position_conditional] == pytest.approx([1 / 3, 1 / 2, 1])
    # Without the first 1 + 0/4, without the second 1 + 4/2, about 1 + 2/3:
    deviation = math.sqrt(1 / 2 * ((2 / 3) ** 2 + (4 / 3) ** 2))
    free = ratio(np.array([4, 0, 0]), np.array([2, 4, 0]), offset=1)
    assert free.high == pytest.approx(1 + 2 / 3 + 12.706205 * deviation)
    # A step gives at least its own token, and at most k more.
    assert (found.length.low, found.length.high) == (1.0, 4.0)


def test_requests_of_one_prompt_are_one_cluster() -> None:
    records = [made_of([3, 1]), made_of([3, 1], index=1), made_of([0, 0], index=2)]
    again = [*records, *(made_of([2], index=i, prompt_id="p0") for i in range(3, 6))]
    found = estimates(again)
    assert found is not None
    assert (found.requests, found.clusters) == (6, 3)


def test_without_the_engines_figures_the_clients_are_taken() -> None:
    found = estimates([made_of([3, 1], acceptance=None), made_of([0], index=1)])
    assert found is not None and found.source == "client"
    assert found.length.value == pytest.approx(1 + 4 / 3)
    assert (found.rate.value, found.past_end) == (None, None)
    assert estimates([made_of([1], acceptance=None, chunk_tokens=None)]) is None
    assert estimates([]) is None


def test_one_request_gives_no_interval() -> None:
    found = estimates([made_of([3, 1])])
    assert found is not None
    assert (found.length.value, found.length.low, found.length.high) == (3.0, None, None)
    assert (found.per_position[0].low, found.rate.high) == (None, None)


def test_the_length_in_the_output_leaves_out_what_stood_behind_the_end() -> None:
    found = estimates([made_of([1, 3], 3), made_of([2, 2], index=1)])
    assert found is not None
    assert (found.past_end, found.uncorrected) == (2, 0)
    assert found.length_output.value == pytest.approx(1 + (8 - 2) / 4)
    unknown = estimates([made_of([1, 3], 3), made_of([2], index=1, output_tokens=50)])
    assert unknown is not None
    assert (unknown.past_end, unknown.uncorrected) == (2, 1)
    assert unknown.length_output.value == pytest.approx(1 + 2 / 2)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=40))
def test_shares_stay_shares_and_hold_their_value(pairs: list[tuple[int, int]]) -> None:
    x = np.array([max(a, b) for a, b in pairs])
    y = np.array([min(a, b) for a, b in pairs])
    found = share(y, x)
    if x.sum() == 0:
        assert found.value is None
        return
    assert found.value == pytest.approx(y.sum() / x.sum())
    if found.low is not None and found.high is not None:
        assert 0 <= found.low <= found.value <= found.high <= 1
        if found.value in (0, 1):
            assert found.high - found.low > 0.01  # that all went one way is not certainty


@pytest.mark.parametrize("clusters", [5, 10, 40])
def test_intervals_hold_the_truth_at_about_their_rate(clusters: int) -> None:
    """Requests differ in acceptance and in length: an interval over steps would hold it half as
    often."""
    rng = np.random.default_rng(clusters)
    held = held_share = 0
    runs = 2000
    for _ in range(runs):
        p = rng.beta(4, 2, clusters)  # mean 2/3
        x = np.maximum(1, rng.lognormal(3.2, 0.8, clusters)).astype(int)
        y = rng.binomial(x, p)
        length, rate = ratio(y, x, offset=1), share(y, x)
        held += length.low <= 1 + 2 / 3 <= length.high  # type: ignore[operator]
        held_share += rate.low <= 2 / 3 <= rate.high  # type: ignore[operator]
    for times in (held, held_share):
        assert 0.93 < times / runs < 0.99


def test_merged_steps_are_counted_against_the_engines_steps() -> None:
    data = cell("speculative", 0, [made_of([1, 2]), made_of([0, 1, 1], index=1, merge=True)])
    found = merged_chunks([data])
    assert found is not None
    assert (found.chunks, found.steps, found.merged, found.by) == (3, 5, 2, "per_request")
    assert found.share == pytest.approx(2 / 5)


def test_merged_steps_against_the_counters_and_by_size_alone() -> None:
    records = [made_of([1, 2], acceptance=None), made_of([3, 3], acceptance=None, merge=True)]
    counted = counters(DraftCounts(drafts=4, drafted=12, accepted=9))
    found = merged_chunks([cell("speculative", 0, records, counted=counted)])
    assert found is not None
    assert (found.steps, found.merged, found.by) == (4, 1, "counters")
    found = merged_chunks([cell("speculative", 0, records)], k=3)
    assert found is not None
    assert (found.chunks, found.merged, found.by) == (3, 1, "chunk_size")
    assert merged_chunks([cell("speculative", 0, records)]) is None
    # Counters that also hold a failed request's steps are of no use for it.
    mixed = cell("speculative", 0, [*records, failed(index=9)], counted=counted)
    found = merged_chunks([mixed])
    assert found is not None and found.by == "chunk_size"


def test_a_cells_acceptance_holds_it_all() -> None:
    found = cell_acceptance(cell("speculative", 0, [made_of([1, 2]), made_of([3], index=1)]))
    assert found is not None and found.estimates is not None and found.merged is not None
    assert found.source == "per_request"
    assert found.merged.share == 0.0
    assert found.estimates.length.value == found.length


@given(st.lists(STEPS, min_size=1, max_size=8))
def test_the_clients_columns_are_the_engines_where_nothing_is_cut_or_merged(
    requests: list[list[int]],
) -> None:
    records = [made_of(steps, index=i) for i, steps in enumerate(requests)]
    engine = columns(records)
    client = columns([made_of(s, index=i, acceptance=None) for i, s in enumerate(requests)])
    assert engine is not None and client is not None
    assert (engine.source, client.source) == ("per_request", "client")
    assert engine.drafts.tolist() == client.drafts.tolist()
    assert engine.accepted.tolist() == client.accepted.tolist()
    assert engine.positions is not None and client.positions is not None
    longest = client.positions.shape[1]
    assert engine.positions[:, :longest].tolist() == client.positions.tolist()
