"""The calibration: a client is held against the server's own record, and judged by it."""

from __future__ import annotations

import array
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness_records import request as make_request

from harness import calibrate as story
from harness import cli
from harness.calibrate import Calibration, calibrate, judged
from harness.errors import UsageError
from harness.load.scripted.bare import Noted
from harness.load.scripted.client_error import (
    ClientResult,
    Compared,
    Once,
    Spread,
    matched,
    pooled,
    well_counted,
)
from harness.load.scripted.script import Script, Served

SMALL = Calibration(
    streams=(5,),
    requests_per_stream=2,
    rounds=1,
    script=Script(first_ms=10, gap_ms=4, chunks=10, tokens=(1, 2, 3)),
)
MS = 1_000_000


def served(number: int, read_ms: float, *writes_ms: float, whole: bool = True) -> Served:
    stamps = array.array("q", [int(ms * MS) for ms in writes_ms])
    return Served(number, int(read_ms * MS), stamps.tobytes(), whole)


def noted(number: int, sent_ms: float, *chunks_ms: float) -> Noted:
    return Noted(
        number=number,
        sent_ns=int(sent_ms * MS),
        chunk_ns=tuple(int(ms * MS) for ms in chunks_ms),
    )


def once(notes: list[Noted], record: list[Served], asked: int) -> Once:
    return Once(
        noted=notes,
        served=record,
        asked=asked,
        cpu_s=0.001,
        server_cpu_s=0.002,
        wall_s=0.5,
    )


def test_a_small_calibration_is_whole_and_exact() -> None:
    told: list[str] = []
    report = calibrate(SMALL, told.append)
    assert told == ["5 streams, ours, round 1 of 1", "5 streams, bare, round 1 of 1"]
    assert [(r.client, r.requests, r.lost) for r in report.results] == [
        ("ours", 10, 0),
        ("bare", 10, 0),
    ]
    ours, bare = report.results
    assert (ours.miscounted, bare.miscounted) == (0, None)
    assert ours.chunks == bare.chunks == 100
    for result in report.results:
        assert result.cpu_us_per_chunk is not None and result.cpu_us_per_chunk > 0
        for figure in (result.ttft_s, result.e2el_s):
            assert figure.reported.mean is not None and figure.true.mean is not None
            assert figure.error.mean == pytest.approx(figure.reported.mean - figure.true.mean)
            # Sent before it is read, written before it arrives. The median's: between the last
            # byte's write and its stamp a busy machine may take a client from its core.
            assert figure.error.p50 is not None and figure.error.p50 > 0
        assert result.ttft_s.true.p50 is not None and result.ttft_s.true.p50 >= 0.010
        assert result.e2el_s.true.p50 is not None and result.e2el_s.true.p50 >= 0.046


def test_errors_are_taken_request_by_request_and_rounds_are_pooled() -> None:
    first = once(
        [noted(0, 0, 52, 63), noted(1, 1, 54, 60)],
        [served(1, 2, 53, 60), served(0, 1, 51, 61)],
        asked=2,
    )
    second = once([noted(0, 0, 50, 60)], [served(0, 0, 50, 60)], asked=1)
    result = pooled("ours", 2, [first, second])
    # TTFT: reported 52, 53, 50; true 50, 51, 50
    assert result.ttft_s.reported.mean == pytest.approx(0.155 / 3)
    assert result.ttft_s.error.mean == pytest.approx(0.004 / 3)
    assert result.ttft_s.error.p50 == pytest.approx(0.002)
    # gaps: reported 11, 6, 10; true 10, 7, 10
    assert result.icl_s.error.mean == pytest.approx(0.0, abs=1e-9)
    assert result.icl_s.true.mean == pytest.approx(0.009)
    # E2E: reported 63, 59, 60; true 60, 58, 60
    assert result.e2el_s.error.mean == pytest.approx(0.004 / 3)
    assert (result.requests, result.lost, result.chunks) == (3, 0, 6)
    assert result.chunks_per_s == pytest.approx(6.0)
    assert result.cpu_us_per_chunk == pytest.approx(2000 / 6)


def test_what_has_no_whole_counterpart_is_lost() -> None:
    record = [
        served(0, 0, 50, 60),
        served(1, 0, 50, whole=False),
        served(2, 0, 50, 60),
        Served(None, 0, b"", True),
    ]
    notes = [noted(0, 0, 50, 60), noted(1, 0, 50), noted(2, 0, 60), noted(9, 0, 50, 60)]
    assert [note.number for note, _ in matched(once(notes, record, 5))] == [0]
    result = pooled("ours", 1, [once(notes, record, 5)])
    assert result.lost == 4


def test_nothing_at_all_gives_no_numbers() -> None:
    result = pooled("bare", 1, [once([], [], 3)])
    assert result.lost == 3 and result.cpu_us_per_chunk is None
    assert result.ttft_s.error == Spread(mean=None, p50=None, p99=None)
    assert judged(result, result)[-1] == "no answer to judge the client by"


def outcome(**more: Any) -> ClientResult:
    none = Spread(mean=None, p50=None, p99=None)
    empty = Compared(reported=none, true=none, error=none)
    fields: dict[str, Any] = {
        "client": "ours",
        "streams": 50,
        "requests": 300,
        "lost": 0,
        "miscounted": 0,
        "chunks": 30_000,
        "chunks_per_s": 4700.0,
        "cpu_us_per_chunk": 10.0,
        "server_cpu_us_per_chunk": 6.0,
        "ttft_s": empty,
        "icl_s": empty,
        "e2el_s": empty,
    }
    off, gap = more.pop("off", 0.001), more.pop("gap", 0.011)
    at = Spread(mean=off, p50=off, p99=off)
    fields["ttft_s"] = Compared(reported=at, true=at, error=at)
    at = Spread(mean=gap, p50=gap, p99=gap)
    fields["icl_s"] = Compared(reported=at, true=at, error=at)
    return ClientResult(**{**fields, **more})


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        ({}, None),
        ({"off": 0.0017}, None),
        ({"off": 0.0019}, "mean TTFT is 1.90 ms off; 1.80 ms are allowed"),
        ({"gap": 0.0129}, None),
        ({"gap": 0.0131}, "p99 gap between chunks is 13.10 ms"),
        ({"lost": 2, "first_error": "reset"}, "2 of 300 requests lost, the first with: reset"),
        ({"miscounted": 1}, "the tokens of 1 answers are counted wrong"),
    ],
)
def test_the_bounds_are_those_stated(ours: dict[str, Any], said: str | None) -> None:
    lines = judged(outcome(**ours), outcome(client="bare", miscounted=None))
    assert [line.startswith(said or "") for line in lines] == ([True] if said else [])


def test_a_negative_yardstick_allows_the_floor_alone() -> None:
    lines = judged(outcome(off=0.0004), outcome(off=-0.01))
    assert lines and "0.30 ms are allowed" in lines[0]


def test_tokens_are_checked_chunk_by_chunk() -> None:
    script = Script(chunks=3, tokens=(1, 2))
    right = msgspec.structs.replace(make_request(), output_tokens=4, chunk_tokens=(1, 2, 1))
    assert well_counted(right, script)
    assert not well_counted(msgspec.structs.replace(right, output_tokens=5), script)
    assert not well_counted(msgspec.structs.replace(right, chunk_tokens=(1, 1, 2)), script)
    assert not well_counted(msgspec.structs.replace(right, chunk_tokens=None), script)


def test_more_streams_than_files_is_one_line() -> None:
    with pytest.raises(UsageError, match="--streams 90000000"):
        calibrate(msgspec.structs.replace(SMALL, streams=(90_000_000,)), lambda line: None)


def run_cli(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["harness", "calibrate", *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert isinstance(left.value.code, int)
    return left.value.code


@pytest.mark.parametrize("wrong", ["", "0", "5,x", "-1"])
def test_wrong_streams_are_a_mistake_of_the_user(
    wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(monkeypatch, f"--streams={wrong}") == 2
    assert capsys.readouterr().err.startswith("harness: --streams")


def test_the_command_tells_table_json_and_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    results = (outcome(), outcome(client="bare", miscounted=None, off=0.002))
    wide = {"streams": 19_900, "off": 1.2345, "gap": 12.345, "chunks_per_s": 123_456.0}
    results += (outcome(**wide), outcome(client="bare", **wide))
    report = story.Report(
        schema_version="1.0",
        calibration=SMALL,
        machine={"cpus": 2, "load_average_before": 0.1},
        results=results,
        failures=(),
    )
    monkeypatch.setattr(story, "calibrate", lambda asked, tell: report)
    file = tmp_path / "report.json"
    assert run_cli(monkeypatch, "--out", str(file)) == 0
    table = capsys.readouterr().out
    assert max(len(line) for line in table.splitlines()) <= 100
    assert "…" not in table and "1234 " in table and "12345" in table
    assert "TTFT error 0.50 x the bare protocol's" in table
    assert json.loads(file.read_bytes())["results"][0]["client"] == "ours"

    failed = msgspec.structs.replace(report, failures=("50 streams: 2 of 300 requests lost",))
    monkeypatch.setattr(story, "calibrate", lambda asked, tell: failed)
    assert run_cli(monkeypatch, "--json") == 4
    captured = capsys.readouterr()
    assert json.loads(captured.out)["failures"] == ["50 streams: 2 of 300 requests lost"]
    assert captured.err == "harness: the client is off: 50 streams: 2 of 300 requests lost\n"
