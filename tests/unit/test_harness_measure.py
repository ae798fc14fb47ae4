"""Metric definitions by hand-made records, counters around a window, the store on disk."""

from __future__ import annotations

import errno
import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from harness_records import MS, counters, failed, request, timeline
from hypothesis import given
from hypothesis import strategies as st

from engines.base import SpecCounters
from harness.errors import UsageError, VoidRun
from harness.findings import Metrics
from harness.measure import counters as counters_module
from harness.measure.counters import CounterReader, CounterWindow, difference
from harness.measure.environment import clock_anchor, environment, git_state, versions
from harness.measure.metrics import (
    DEFINITIONS,
    acceptance_length,
    acceptance_rate,
    cell_metrics,
    client_counts,
    distribution,
    e2el_s,
    from_histogram,
    icl_s,
    per_position,
    per_position_conditional,
    pool,
    tpot_s,
    ttft_s,
)
from harness.measure.parquet import read_requests, write_requests
from harness.measure.store import (
    RunFolder,
    to_json,
    write_atomic,
)
from harness.progress import PlainProgress
from harness.records import DraftCounts, EngineCounters
from harness.report.tables import render_text
from harness.run import resume, telling_how_to_go_on
from harness.stored import analyse


def test_latencies_of_one_request() -> None:
    r = [request()]
    assert ttft_s(r) == pytest.approx([0.100])
    assert e2el_s(r) == pytest.approx([0.210])
    assert tpot_s(r) == pytest.approx([(0.210 - 0.100) / (6 - 1)])
    assert icl_s(r) == pytest.approx([0.050, 0.060])


def test_each_request_has_its_own_latencies_and_those_without_have_none() -> None:
    records = [request(), failed(), request(sent_ns=50 * MS), request(chunk_ns=(300 * MS,))]
    assert ttft_s(records) == pytest.approx([0.1, math.nan, 0.05, 0.3], nan_ok=True)
    assert tpot_s(records) == pytest.approx([0.022, math.nan, 0.022, math.nan], nan_ok=True)
    assert icl_s(records) == pytest.approx([0.05, 0.06, 0.05, 0.06])


def test_tpot_takes_off_all_tokens_of_the_first_chunk() -> None:
    assert tpot_s([request(chunk_tokens=(3, 1, 2))]) == pytest.approx([0.110 / 3])


@pytest.mark.parametrize(
    "fields",
    [
        {"chunk_tokens": None},
        {"output_tokens": None},
        {"chunk_ns": (5,), "chunk_tokens": (6,)},
        {"chunk_ns": (), "chunk_tokens": ()},
        {"sent_ns": None},
    ],
)
def test_tpot_is_none_where_it_is_undefined(fields: dict[str, object]) -> None:
    assert np.isnan(tpot_s([request(**fields)])).all()


def test_itl_exists_only_where_every_chunk_is_one_token() -> None:
    ones = request(chunk_tokens=(1, 1, 1), output_tokens=3)
    assert cell_metrics([ones]).itl_s == cell_metrics([ones]).icl_s
    assert cell_metrics([ones, request()]).itl_s is None
    assert cell_metrics([request(chunk_tokens=None)]).itl_s is None


def test_throughput_is_over_first_sent_to_last_arrival_of_whole_answers() -> None:
    second = request(index=1, sent_ns=200 * MS, chunk_ns=(300 * MS, 500 * MS), chunk_tokens=(1, 5))
    m = cell_metrics([request(), second])
    assert m.duration_s == pytest.approx(0.5)
    assert m.output_tokens_per_s == pytest.approx(12 / 0.5)
    assert m.requests_per_s == pytest.approx(2 / 0.5)
    assert m.output_tokens == 12


def test_a_failed_request_counts_as_failed_and_not_as_zero() -> None:
    m = cell_metrics([request(), failed(index=1, sent_ns=MS)])
    assert (m.requests_ok, m.requests_failed, m.output_tokens) == (1, 1, 6)
    assert m.ttft_s.n == 1


def test_nothing_answered_gives_none_everywhere() -> None:
    m = cell_metrics([failed()])
    assert m.output_tokens_per_s is None
    assert m.ttft_s.mean is None
    assert m.output_tokens is None
    assert m.task_accuracy is None
    assert cell_metrics([]).duration_s is None


def test_an_uncounted_answer_leaves_the_throughput_out() -> None:
    m = cell_metrics([request(), request(index=1, output_tokens=None)])
    assert m.output_tokens is None
    assert m.output_tokens_per_s is None
    assert m.requests_per_s is not None


def test_open_loop_figures_count_from_the_due_time() -> None:
    late = request(due_ns=-40 * MS)
    m = cell_metrics([late, request(index=1, due_ns=0, sent_ns=500 * MS, chunk_ns=(600 * MS,))])
    assert m.send_lag_s is not None
    assert m.send_lag_s.mean == pytest.approx((0.040 + 0.500) / 2)
    assert m.ttft_from_due_s is not None
    assert m.ttft_from_due_s.mean == pytest.approx((0.140 + 0.600) / 2)
    assert m.request_rate_achieved == pytest.approx(1 / 0.5)
    closed = cell_metrics([request()])
    assert (closed.send_lag_s, closed.ttft_from_due_s, closed.request_rate_achieved) == (None,) * 3


def test_accuracy_is_over_prompts_with_an_answer() -> None:
    m = cell_metrics([request(correct=True), request(correct=False), request(correct=None)])
    assert (m.task_accuracy, m.task_n) == (0.5, 2)


def test_every_figure_of_the_records_is_defined() -> None:
    counts = {"requests_ok", "requests_failed", "prompt_tokens", "output_tokens"}
    for name in set(Metrics.__struct_fields__) - counts - {"duration_s", "task_n"}:
        assert DEFINITIONS[name].formula
        assert DEFINITIONS[name].undefined


@given(st.lists(st.one_of(st.none(), st.floats(0, 1e6)), max_size=50))
def test_distribution_orders_its_percentiles(values: list[float | None]) -> None:
    d = distribution(np.array(values, dtype=float))
    assert d.n == sum(v is not None for v in values)
    if d.n:
        assert d.p50 is not None
        assert d.p90 is not None
        assert d.p99 is not None
        assert d.p50 <= d.p90 <= d.p99
    else:
        assert (d.mean, d.p50, d.p90, d.p99) == (None,) * 4


HISTOGRAMS = st.lists(st.integers(0, 1000), min_size=1, max_size=9)


@given(HISTOGRAMS)
def test_acceptance_identities(histogram: list[int]) -> None:
    k, drafts = len(histogram) - 1, sum(histogram)
    counts = from_histogram(drafts, drafts * k, histogram)
    assert counts.accepted == sum(j * n for j, n in enumerate(histogram))
    if drafts == 0:
        assert acceptance_length(counts) is None
        assert per_position(counts) is None
        return
    length, positions = acceptance_length(counts), per_position(counts)
    assert length is not None
    assert positions is not None
    assert length - 1 == pytest.approx(sum(positions))
    assert list(positions) == sorted(positions, reverse=True)
    product, conditional = 1.0, per_position_conditional(counts) or ()
    for p, c in zip(positions, conditional, strict=True):
        if c is None:
            assert p == 0
            break
        product *= c
        assert p == pytest.approx(product)
    if k:
        rate = acceptance_rate(counts)
        assert rate is not None
        assert length == pytest.approx(1 + k * rate)


@given(st.lists(HISTOGRAMS, min_size=1, max_size=4))
def test_counts_are_pooled_and_ratios_are_not_averaged(parts: list[list[int]]) -> None:
    each = [from_histogram(sum(h), sum(h) * (len(h) - 1), h) for h in parts]
    longest = max(len(h) for h in parts)
    summed = [sum(h[j] for h in parts if j < len(h)) for j in range(longest)]
    assert pool(list(each)) == from_histogram(
        sum(summed), sum(c.drafted or 0 for c in each), summed
    )


def test_a_missing_part_makes_the_pool_unknown() -> None:
    whole = DraftCounts(drafts=2, drafted=6, accepted=3, per_position=(2, 1))
    assert pool([whole, None]) is None
    assert pool([]) is None
    blind = DraftCounts(drafts=1, accepted=1)
    assert pool([whole, blind]) == DraftCounts(drafts=3, accepted=4)


def test_the_client_counts_every_chunk_after_the_first_as_a_step() -> None:
    counts = client_counts([request(), request(index=1, chunk_tokens=(1, 1, 4)), failed()])
    assert counts == DraftCounts(drafts=4, accepted=2 + 1 + 0 + 3, per_position=(3, 2, 1))
    assert client_counts([request(chunk_tokens=None)]) is None


BEFORE = SpecCounters(
    drafts=10, drafted=30, accepted=12, accepted_per_position=(6, 4, 2), generation_tokens=100
)
AFTER = SpecCounters(
    drafts=15, drafted=45, accepted=20, accepted_per_position=(10, 7, 3), generation_tokens=150
)


def test_counters_are_differenced() -> None:
    found = difference(BEFORE, AFTER, settled=True)
    assert found.delta == DraftCounts(drafts=5, drafted=15, accepted=8, per_position=(4, 3, 1))
    assert (found.generation_tokens, found.settled, found.note) == (50, True, None)


def test_a_restart_in_the_window_is_seen() -> None:
    found = difference(AFTER, BEFORE, settled=True)
    assert found.delta is None
    assert "ran backwards" in (found.note or "")


def test_counters_that_appear_in_the_window_began_at_zero() -> None:
    assert difference(SpecCounters(), AFTER, settled=True).delta == DraftCounts(
        drafts=15, drafted=45, accepted=20, per_position=(10, 7, 3)
    )


def test_missing_and_unsettled_counters_say_so() -> None:
    assert "could not be read" in (difference(None, AFTER, settled=True).note or "")
    assert "still moving" in (difference(BEFORE, AFTER, settled=False).note or "")
    only_steps = SpecCounters(drafts=3)
    assert difference(SpecCounters(drafts=1), only_steps, settled=True).delta is None


def test_a_death_in_the_window_is_the_counters_note() -> None:
    found = difference(BEFORE, None, settled=False, cut_short="vllm died while serving: SIGKILL")
    assert found.delta is None and not found.settled
    assert (found.note or "").endswith("cut short: vllm died while serving: SIGKILL")
    assert "publishes no counters" not in (found.note or "")


class FakeAdapter:
    """Reads `drafts running` from the text."""

    metrics_path = "/metrics"

    def counters(self, text: str) -> SpecCounters:
        drafts, running = map(int, text.split())
        return SpecCounters(drafts=drafts, running=running)


def reader_of(answers: list[str], monkeypatch: pytest.MonkeyPatch) -> CounterReader:
    monkeypatch.setattr(counters_module, "POLL_S", 0.001)
    left = list(answers)

    def answer(request: httpx.Request) -> httpx.Response:
        text = left.pop(0) if len(left) > 1 else left[0]
        return httpx.Response(200, text=text)

    http = httpx.Client(transport=httpx.MockTransport(answer))
    return CounterReader(FakeAdapter(), "http://h", http)  # type: ignore[arg-type]


def test_counters_are_polled_until_they_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    found, settled = reader_of(["1 1", "3 1", "5 0", "5 0"], monkeypatch).settled()
    assert (found, settled) == (SpecCounters(drafts=5, running=0), True)


def test_a_reader_that_was_held_up_reads_on(monkeypatch: pytest.MonkeyPatch) -> None:
    hours = itertools.count(step=3600)
    clock = SimpleNamespace(monotonic=lambda: next(hours), sleep=lambda s: None)
    monkeypatch.setattr(counters_module, "time", clock)
    found, settled = reader_of(["1 1", "3 1", "5 0", "5 0"], monkeypatch).settled()
    assert (found, settled) == (SpecCounters(drafts=5, running=0), True)


def test_a_page_that_hangs_is_not_read_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, asked = failing_reader([httpx.ReadTimeout("slow")], monkeypatch)
    seconds = itertools.count(step=6)
    clock = SimpleNamespace(monotonic=lambda: next(seconds), sleep=lambda s: None)
    monkeypatch.setattr(counters_module, "time", clock)
    assert reader.settled() == (None, False)
    assert asked[0] == 2


def test_a_server_that_never_rests_is_unsettled(monkeypatch: pytest.MonkeyPatch) -> None:
    found, settled = reader_of(["1 1"], monkeypatch).settled(deadline_s=0.05)
    assert (found, settled) == (SpecCounters(drafts=1, running=1), False)


def test_unreadable_metrics_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reader_of(["nonsense"], monkeypatch).read() is None
    assert reader_of(["nonsense"], monkeypatch).settled() == (None, False)


def test_a_window_holds_both_drained_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    window = CounterWindow(reader_of(["1 1", "2 0", "2 0", "5 1", "7 0", "7 0"], monkeypatch))
    window.close()
    found = window.difference()
    assert found.before is not None and found.after is not None
    assert (found.before["drafts"], found.after["drafts"]) == (2, 7)
    assert (found.settled_before, found.settled, found.problem) == (True, True, None)


def test_a_window_whose_scrapes_fail_says_when_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = httpx.Response(200, text="5 0"), httpx.Response(500)
    reader, _ = failing_reader([good, good, bad], monkeypatch)
    window = CounterWindow(reader)
    window.close()
    found = window.difference()
    assert (found.problem, found.delta) == ("unread", None)
    assert "after the load (HTTP 500)" in (found.note or "")
    given_up = CounterWindow(failing_reader([good, good], monkeypatch)[0])
    assert given_up.difference(cut_short="it died").problem == "cut_short"


def failing_reader(
    answers: list[httpx.Response | Exception], monkeypatch: pytest.MonkeyPatch
) -> tuple[CounterReader, list[int]]:
    """A reader of these answers, the last of them for ever; and how often it was asked."""
    monkeypatch.setattr(counters_module, "POLL_S", 0.001)
    asked = [0]

    def answer(request: httpx.Request) -> httpx.Response:
        found = answers[min(asked[0], len(answers) - 1)]
        asked[0] += 1
        if isinstance(found, Exception):
            raise found
        return httpx.Response(found.status_code, text=found.text)

    http = httpx.Client(transport=httpx.MockTransport(answer))
    return CounterReader(FakeAdapter(), "http://h", http), asked  # type: ignore[arg-type]


def test_a_reading_that_fails_now_and_then_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = httpx.Response(200, text="5 0"), httpx.Response(503)
    answers = [bad, httpx.ReadTimeout("slow"), good, bad, good, good]
    reader, _ = failing_reader(answers, monkeypatch)
    assert reader.settled() == (SpecCounters(drafts=5, running=0), True)
    assert reader.failure is None


def test_a_page_that_always_fails_is_given_up_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good = httpx.Response(200, text="5 1")
    reader, asked = failing_reader([good, httpx.Response(500)], monkeypatch)
    assert reader.settled() == (None, False)
    assert reader.failure == "HTTP 500"
    assert asked[0] < 20
    reader, _ = failing_reader([httpx.ConnectError("refused")], monkeypatch)
    assert reader.settled() == (None, False) and reader.failure == "refused"


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_page_that_is_not_for_us_is_asked_for_once(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, asked = failing_reader([httpx.Response(status)], monkeypatch)
    assert reader.settled() == (None, False)
    assert (reader.failure, asked[0]) == (None, 1)


def test_records_survive_the_store(tmp_path: Path) -> None:
    acceptance = DraftCounts(
        drafts=2, drafted=6, accepted=3, per_position=(2, 1), past_end=1, steps=(2, 1)
    )
    records = [request(acceptance=acceptance, text="é\n\x00", correct=True), failed(index=1)]
    write_requests(tmp_path / "r.parquet", records)
    assert read_requests(tmp_path / "r.parquet") == records
    write_requests(tmp_path / "e.parquet", [])
    assert read_requests(tmp_path / "e.parquet") == []


def test_a_saved_cell_is_whole_and_replaces_an_interrupted_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    log = folder.new_launch("x") / "engine.log"
    log.write_text("started\n")
    folder.save_cell("a", [failed()], counters(), timeline(interrupted="died"), log)
    assert not folder.has_cell("a")
    assert folder.saved_cells(["a", "b"]) == ["a"]
    folder.save_cell("a", [request()], counters(), timeline(), log)
    assert folder.has_cell("a")
    assert folder.requests("a") == [request()]
    assert (folder.cell("a") / "engine.log").read_text() == "started\n"
    assert [p.name for p in (tmp_path / "cells").iterdir()] == ["a"]
    assert {p.name for p in folder.cell("a").iterdir()} == {
        "requests.parquet", "counters.json", "timeline.json", "engine.log",
    }  # fmt: skip


def test_cells_that_cannot_be_read_are_set_aside_and_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for name in ("whole", "torn", "bare"):
        folder.save_cell(name, [request()], counters(), timeline(), None)
    (folder.cell("torn") / "requests.parquet").write_bytes(b"PAR1")
    (folder.cell("bare") / "counters.json").unlink()
    assert folder.set_damaged_aside(["whole", "torn", "bare", "none"]) == ["torn", "bare"]
    assert folder.saved_cells(["whole", "torn", "bare"]) == ["whole"]
    (kept,) = (tmp_path / "cells").glob(".torn-damaged-*/requests.parquet")
    assert kept.read_bytes() == b"PAR1"
    folder.save_cell("torn", [request()], counters(), timeline(), None)
    assert folder.set_damaged_aside(["torn"]) == []


def test_a_second_try_of_a_launch_has_a_folder_of_its_own(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    names = [folder.new_launch("x").name for _ in range(11)]
    assert names[:2] == ["x", "x.2"]
    assert [p.name for p in folder.launch_dirs()] == names


def test_an_atomic_write_leaves_the_old_file_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f.json"
    write_atomic(path, b"old")

    def broken(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", broken)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_atomic_write_that_fails_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError) as failed:
        write_atomic(tmp_path / "f.json", b"new")
    assert failed.value.filename == str(tmp_path / "f.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["manifest.json", "summary.json"])
def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, name: str) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(UsageError, match=f"{name}: no such file"):
        folder.manifest() if name == "manifest.json" else folder.summary()
    (tmp_path / name).write_text("{}")
    with pytest.raises(UsageError, match="cannot be read"):
        folder.manifest() if name == "manifest.json" else folder.summary()


def test_summaries_of_earlier_versions_are_read(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "results" / "example" / "summary.json"
    now = json.loads(example.read_bytes())
    first = {k: v for k, v in now.items() if k not in ("splits", "estimates", "speed", "parity")}
    first["schema_version"] = "1.0"
    for comparison in first["comparisons"]:
        for name in ("corrected_low", "corrected_high", "corrected_confidence", "family"):
            del comparison[name]
    for told in (now, first):
        (tmp_path / "summary.json").write_text(json.dumps(told))
        summary = RunFolder(tmp_path).summary()
        assert summary.comparisons[0].ratio == now["comparisons"][0]["ratio"]
        assert "output tokens/s" in render_text(summary)


def test_counts_below_zero_are_no_counts(tmp_path: Path) -> None:
    place = tmp_path / "cells" / "c"
    place.mkdir(parents=True)
    counted = EngineCounters(
        before=None,
        after=None,
        delta=DraftCounts(drafts=-5, accepted=-7),
        generation_tokens=None,
        settled=True,
    )
    (place / "counters.json").write_bytes(to_json(counted))
    with pytest.raises(UsageError, match=r"counters\.json: cannot be read.*>= 0"):
        RunFolder(tmp_path).counters("c")
    write_requests(place / "requests.parquet", [request(acceptance=counted.delta)])
    for record in (
        request(acceptance=counted.delta),
        request(acceptance=DraftCounts(drafts=1, accepted=1, per_position=(-1,))),
        request(output_tokens=-1),
        request(chunk_tokens=(1, 2**62)),
    ):
        write_requests(place / "requests.parquet", [record])
        with pytest.raises(UsageError, match=r"requests\.parquet: cannot be read.*>= 0"):
            RunFolder(tmp_path).requests("c")


def test_the_environment_is_captured() -> None:
    found = environment()
    assert found["cores"] >= 1
    assert found["memory_bytes"] > 0
    assert isinstance(found["gpus"], list)
    assert versions()["msgspec"]
    assert clock_anchor()["perf_counter_ns"] > 0


def test_git_state_of_no_checkout_is_unknown(tmp_path: Path) -> None:
    assert git_state(tmp_path) == (None, None)


def a_manifest(tmp_path: Path, **more: Any) -> RunFolder:
    fields = {
        "schema_version": "1.0", "run_id": "r", "created": "", "command": [], "plan": {},
        "environment": {}, "versions": {}, "git_commit": None, "git_dirty": None,
        "clock_anchor": {}, "cells": [],
    }  # fmt: skip
    (tmp_path / "manifest.json").write_text(json.dumps({**fields, **more}))
    return RunFolder(tmp_path)


def test_a_run_of_another_major_version_is_refused(tmp_path: Path) -> None:
    assert a_manifest(tmp_path, schema_version="1.9").manifest().run_id == "r"
    with pytest.raises(UsageError, match=r"schema 7\.0"):
        a_manifest(tmp_path, schema_version="7.0").manifest()


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({}, "plan.engines cannot be read"),
        ({"engines": {"vllm": 7}}, "plan.engines cannot be read"),
        ({"engines": {"vllm": {"compare": {"confidence": 0}}}}, r"cannot be read \(Expected"),
        ({"engines": {}}, "c is of vllm, which has no plan"),
    ],
)
def test_a_manifest_whose_plans_are_damaged_is_not_analysed(
    tmp_path: Path, plan: Any, said: str
) -> None:
    one = {
        "cell_id": "c", "engine": "vllm", "variant": "baseline", "repeat": 0, "seed": 0,
        "load": {"mode": "closed"},
    }  # fmt: skip
    a_manifest(tmp_path, plan=plan, cells=[one])
    with pytest.raises(UsageError, match=said):
        analyse(tmp_path)


def test_two_harnesses_do_not_measure_into_one_folder(tmp_path: Path) -> None:
    folder = a_manifest(tmp_path)
    with folder.claimed(), pytest.raises(UsageError, match="another harness"), folder.claimed():
        pass
    with folder.claimed():
        pass


def test_a_stray_folder_among_the_starts_does_no_harm(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for name in ("a.2", "a", "a.10", "b.odd", "b.\N{SUPERSCRIPT TWO}"):
        (tmp_path / "launches" / name).mkdir(parents=True)
    assert [p.name for p in folder.launch_dirs()][:3] == ["a", "a.2", "a.10"]


@pytest.mark.parametrize("plan", [{}, {"request": 7}, {"request": {"engines": [1]}}])
def test_a_manifest_that_says_no_request_cannot_be_resumed(tmp_path: Path, plan: Any) -> None:
    a_manifest(tmp_path, plan=plan)
    with pytest.raises(UsageError, match=r"plan\.request cannot be read"):
        resume(tmp_path, PlainProgress())


def test_a_full_disk_is_one_line_that_says_how_to_go_on(tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match=r"No space left.*resume"),
        telling_how_to_go_on(RunFolder(tmp_path)),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_load_process_that_died_is_one_line_that_says_how_to_go_on(tmp_path: Path) -> None:
    with (
        pytest.raises(VoidRun, match=r"process 0 was killed.*resume"),
        telling_how_to_go_on(RunFolder(tmp_path)),
    ):
        raise VoidRun("load generating process 0 was killed")
