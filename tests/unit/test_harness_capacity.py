"""A capacity search without a server: its options, its answer from cells, its words and figures."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness_records import C1, cell, failed, request, run_of, timeline
from harness_simulated import open_loop

from harness.analyse.bracket import Look, Search, bracket, next_value
from harness.analyse.data import CellData, RunData
from harness.analyse.frontier import Capacity, alone, capacity_of, look_of, tau_of
from harness.analyse.summary import summarise
from harness.capacity import Wanted, is_capacity, search_of, sent_in_a_look
from harness.errors import UsageError
from harness.measure.slo import Slo
from harness.plan.schema import Plan, SloSection
from harness.records import LoadPoint, Variant
from harness.report import frontier
from harness.report.html import write_report

SEARCH = Search(requests=57)


def at(rate: float, variant: Variant, met: int, of: int, block: int = 0) -> CellData:
    """An open-loop cell, `met` of its requests quick enough; all due at once."""
    load = LoadPoint(mode="open", request_rate=rate, num_requests=of)
    records = [request(index=i, due_ns=0 if i < met else -(10**9)) for i in range(of)]
    data = cell(variant, 0, records, load=load, block=block)
    name = f"{data.cell.cell_id}-{rate:g}"
    return msgspec.structs.replace(data, cell=msgspec.structs.replace(data.cell, cell_id=name))


def a_run(**speculative: Any) -> RunData:
    cells = [
        at(1.0, "baseline", 57, 57),
        at(2.0, "baseline", 20, 57),
        at(1.0, "speculative", 57, 57),
        at(2.0, "speculative", 50, 57),
        at(2.0, "speculative", 57, 57, block=1),
        at(4.0, "speculative", 0, 57),
    ]
    return run_of(cells, plan=Plan(slo=SloSection(ttft_s=0.2)))


def test_the_answer_comes_from_the_cells_alone() -> None:
    found = capacity_of(a_run(), SEARCH)
    base, spec = found.variants
    assert (base.variant, base.highest_met, base.lowest_missed) == ("baseline", 1.0, 2.0)
    assert (spec.highest_met, spec.lowest_missed, spec.undecided) == (1.0, 4.0, (2.0,))
    pooled = spec.probes[1]
    assert (pooled.met, pooled.requests, len(pooled.cells)) == (107, 114, 2)
    assert pooled.low < 0.9 < pooled.high
    assert base.probes[0].figures.tokens_per_s_user == pytest.approx(5 / 0.11)
    assert base.probes[0].figures.ttft_mean_s == pytest.approx(0.1)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Capacity) == found


def test_an_answer_in_words() -> None:
    text = frontier.render_text(capacity_of(a_run(), SEARCH))
    assert "90% of the requests meet ttft <= 200 ms, with 95% confidence" in text
    assert "reference baseline: held up to 1 requests/s (missed at 2)" in text
    assert "reference speculative: held up to 1 requests/s (missed at 4; undecided at 2)" in text
    assert "multiplies the load that is held by 0.50 to 4.00" in text
    assert max(map(len, text.splitlines())) <= 100


def test_no_load_held_and_no_load_missed_are_said() -> None:
    plan = Plan(slo=SloSection(ttft_s=0.2))
    search = msgspec.structs.replace(SEARCH, lowest=1.0, highest=1.0)
    none = capacity_of(run_of([at(1.0, "baseline", 0, 57)], plan=plan), search)
    assert "held at no load" in frontier.render_text(none)
    most = capacity_of(run_of([at(1.0, "baseline", 57, 57)], plan=plan), search)
    assert "held up to 1 requests/s, the highest tried" in frontier.render_text(most)
    some = capacity_of(
        run_of([at(1.0, "baseline", 50, 57, b) for b in range(4)], plan=plan), search
    )
    assert "shown to hold at no load that was tried (undecided at 1)" in frontier.render_text(some)
    for found in (none, most, some):
        assert found.variants[0].finished
        assert "cut short" not in frontier.render_text(found)


def test_a_search_that_was_cut_short_says_so() -> None:
    plan = Plan(slo=SloSection(ttft_s=0.2))
    run = run_of([at(1.0, "baseline", 50, 57)], plan=plan)
    told = {**run.manifest.plan, "searched": {"reference": ["baseline", "speculative"]}}
    run = msgspec.structs.replace(run, manifest=msgspec.structs.replace(run.manifest, plan=told))
    found = capacity_of(run, SEARCH)
    base, spec = found.variants
    assert (base.finished, base.next_load) == (False, 1.0)
    assert (spec.finished, spec.probes) == (False, ())
    text = frontier.render_text(found)
    assert "shown to hold at no load before the search was cut short (undecided at 1)" in text
    assert "reference speculative: no load was looked at yet" in text
    assert "harness resume RUN` goes on with it" in text
    nothing = capacity_of(run_of([], plan=plan), SEARCH)
    assert "No load was looked at yet." in frontier.render_text(nothing)
    one = capacity_of(run_of([at(1.0, "baseline", 57, 57)], plan=plan), SEARCH)
    assert "the highest tried, before the search was cut short" in frontier.render_text(one)


def test_requests_that_failed_are_told_beside_the_answer() -> None:
    data = cell("baseline", 0, [request(), failed(index=1)], load=C1)
    found = capacity_of(run_of([data]), Search(by="concurrency"))
    assert found.variants[0].probes[0].failed == 1
    assert "1 request failed; a failed request is not within" in frontier.render_text(found)


def test_the_report_begins_with_the_answer_and_the_probes(tmp_path: Path) -> None:
    run = a_run()
    (tmp_path / "manifest.json").write_bytes(msgspec.json.encode(run.manifest))
    (tmp_path / "summary.json").write_bytes(msgspec.json.encode(summarise(run)))
    (tmp_path / "capacity.json").write_bytes(msgspec.json.encode(capacity_of(run, SEARCH)))
    page = write_report(tmp_path).read_text()
    marked = (tmp_path / "report.md").read_text()
    marks = ('id="probes"', 'id="results"'), ("## Probes", "## Results")
    for text, (probes, results) in zip((page, marked), marks, strict=True):
        answer = text.index("reference baseline: held up to 1 requests/s (missed at 2)")
        assert answer < text.index(probes) < text.index(results)
    assert "| 2 | 107 of 114 |" in marked
    assert "<td>107 of 114</td>" in page
    assert "before the search was cut short. reference speculative: held" in marked


def test_an_overload_is_told_by_its_growth_and_by_refusals() -> None:
    load = LoadPoint(mode="open", request_rate=80.0, num_requests=200)
    growing = cell("baseline", 0, open_loop(80.0, 200, seed=1), load=load)
    assert look_of(growing, Slo(ttft_s=100.0), SEARCH).overloaded
    calm = cell("baseline", 0, open_loop(8.0, 200, seed=1), load=load)
    look = look_of(calm, Slo(ttft_s=100.0), SEARCH)
    assert not look.overloaded
    assert look.met == look.of < 200
    for given_up in (True, False):
        ended = timeline(interrupted="its words decide nothing", given_up=given_up)
        data = cell("baseline", 0, [failed(due_ns=0)], load=load, time=ended)
        assert look_of(data, Slo(), SEARCH).overloaded is given_up


def test_an_idle_server_that_misses_is_told_from_one_with_a_queue() -> None:
    load = LoadPoint(mode="open", request_rate=8.0, num_requests=200)
    calm = cell("baseline", 0, open_loop(8.0, 200, seed=1), load=load)
    crowded = cell("baseline", 0, open_loop(80.0, 200, seed=1), load=load)
    assert look_of(calm, Slo(ttft_s=1e-6), SEARCH).hopeless
    assert not look_of(calm, Slo(ttft_s=100.0), SEARCH).hopeless
    assert not look_of(crowded, Slo(ttft_s=1e-6), SEARCH).hopeless


def test_a_request_is_alone_where_no_other_overlaps_it() -> None:
    spans = [(0, 10), (10, 20), (30, 60), (40, 45), (50, 70), (80, 90)]
    records = [request(index=i, due_ns=a, end_ns=b) for i, (a, b) in enumerate(spans)]
    assert [
        r.index for r in alone([*records[::-1], request(due_ns=85, end_ns=None, chunk_ns=())])
    ] == [0, 1, 5]


def test_a_concurrency_is_looked_at_by_its_steady_requests() -> None:
    search = Search(by="concurrency")
    look = look_of(cell("baseline", 0, [request(), failed(index=1)], load=C1), Slo(), search)
    assert (look.value, look.met, look.of) == (1.0, 1, 2)
    assert sent_in_a_look(search, 8) == 57 + 16
    assert sent_in_a_look(search, 400) == 1001
    assert sent_in_a_look(SEARCH, 1.0) == math.ceil(57 * 1.25)
    assert sent_in_a_look(SEARCH, 200.0) == 2000


def test_the_capacity_of_a_server_with_a_queue_is_bracketed() -> None:
    # 90% of 20,000 requests wait less than 90 ms up to 30.1 requests/s, of 40 at most.
    slo, right = Slo(ttft_s=0.1), 0
    for seed in range(30):
        looks: list[Look] = []
        search = Search(start=8.0)
        while (value := next_value(looks, search)) is not None:
            n = sent_in_a_look(search, value)
            load = LoadPoint(mode="open", request_rate=value, num_requests=n)
            records = open_loop(value, n, seed=1000 * seed + len(looks))
            looks.append(look_of(cell("baseline", 0, records, load=load), slo, search))
        found = bracket(looks, search)
        assert found.highest_met is not None
        assert found.lowest_missed is not None
        assert 20 < found.highest_met < found.lowest_missed < 45
        right += found.highest_met <= 30.1 <= found.lowest_missed
    assert right >= 28  # with a confidence of 0.95, 28.5 of 30


def test_strains_of_a_queue_are_alike_and_those_of_an_idle_server_are_not() -> None:
    slo = Slo(ttft_s=0.1)
    assert tau_of(open_loop(38.0, 400, seed=2), slo) > 5
    assert tau_of(open_loop(4.0, 400, seed=2), slo) < 2


def test_figures_are_drawn_for_every_probe(tmp_path: Path) -> None:
    found = capacity_of(a_run(), SEARCH)
    drawn = {plot.name: plot for plot in frontier.plots(found)}
    assert set(drawn) == {"frontier", "attainment"}
    assert "output tokens/s a server" in drawn["frontier"].svg
    assert "93.9% at 2" in drawn["attainment"].alt
    assert frontier.read(tmp_path) is None
    (tmp_path / "capacity.json").write_bytes(msgspec.json.encode(found))
    assert frontier.read(tmp_path) == found


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (Wanted(attain=1.0), "--attain"),
        (Wanted(attain=0.2), "--attain"),
        (Wanted(confidence=float("nan")), "--confidence"),
        (Wanted(resolution=0.0), "--resolution"),
        (Wanted(start=0.0), "--start"),
        (Wanted(seconds=float("nan")), "--seconds"),
        (Wanted(start=float("inf")), "--start"),
        (Wanted(start=4.0, most=2.0), "--most"),
        (Wanted(requests=3), "--requests 3: 4 looks of it are too few"),
        (Wanted(by="concurrency", start=0.4, most=0.9), "--most"),
    ],
)
def test_a_search_that_cannot_be_is_one_line(wanted: Wanted, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        search_of(wanted)


def test_a_search_has_whole_concurrencies_and_enough_requests() -> None:
    search = search_of(Wanted(by="concurrency", start=2.4, most=99.9))
    assert (search.start, search.lowest, search.highest) == (2.0, 1.0, 99.0)
    assert search_of(Wanted()).requests == 57
    assert search_of(Wanted(attain=0.99)).requests > 500


def test_a_search_is_not_void_for_the_load_that_was_refused() -> None:
    run = run_of([cell("baseline", 0, [request(due_ns=0), *(failed(index=i) for i in (1, 2, 3))])])
    assert summarise(run).void is not None
    plan = {**run.manifest.plan, "capacity": {}}
    manifest = msgspec.structs.replace(run.manifest, plan=plan)
    assert summarise(msgspec.structs.replace(run, manifest=manifest)).void is None


def test_a_folder_that_is_no_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        is_capacity(tmp_path)
