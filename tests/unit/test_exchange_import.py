"""Other tools' files become folders of the history, once and whole."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from exchange_files import (
    SPECULATED,
    aiperf,
    aiperf_record,
    guidellm,
    pytest_benchmark,
    sglang,
    vllm,
    write,
)
from exchange_points import point

from harness.errors import UsageError
from harness.exchange import importing
from harness.exchange.importing import Outcome, import_paths
from harness.exchange.records import Given, Import
from harness.exchange.tables import to_csv, to_parquet, to_points_json
from harness.history.store import open_history

NOTHING = Given()


def imported(path: Path, root: Path, given: Given = NOTHING) -> Import:
    """One file's `import.json`, as it lies there."""
    (one,) = import_paths([path], root, given).done
    assert not one.known
    return msgspec.json.decode((one.folder / "import.json").read_bytes(), type=Import)


def test_an_import_is_a_folder_with_its_origin_and_a_copy(tmp_path: Path) -> None:
    file = write(tmp_path / "in" / "night.jsonl", vllm(**SPECULATED))
    record = imported(file, tmp_path / "results")
    (folder,) = (tmp_path / "results" / "imported").iterdir()
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert folder.name.endswith(f"-vllm-bench-{digest[:12]}")
    assert (record.sha256, record.size, record.file) == (
        *(digest, file.stat().st_size, "night.jsonl"),
    )
    assert record.original == "original.jsonl"
    assert (folder / "original.jsonl").read_bytes() == file.read_bytes()
    assert (record.tool, record.created_from) == ("vllm-bench", "content")
    assert {p.run_id for p in record.points} == {folder.name}
    assert {p.source for p in record.points} == {"import:vllm-bench"}


def test_the_history_holds_what_was_imported(tmp_path: Path) -> None:
    root = tmp_path / "results"
    for document in (vllm(**SPECULATED), sglang(), guidellm(), aiperf(), pytest_benchmark()):
        write(tmp_path / "in" / f"{len(json.dumps(document))}.json", document)
    import_paths([tmp_path / "in"], root, NOTHING)
    history = open_history(root)
    assert history.problems == []
    sources = {p.source.partition(":")[2] for p in history.query()}
    assert sources == {"vllm-bench", "sglang-bench", "guidellm", "aiperf", "pytest-benchmark"}
    (length,) = history.query(metric="acceptance_length")
    assert (length.value, length.engine, length.profile) == (2.5, "openai", "small-target")
    assert len(history.series(metric="ttft_s.mean")) == 4, "each tool's is a series of its own"


def test_the_same_file_twice_does_nothing_whatever_its_name(tmp_path: Path) -> None:
    root = tmp_path / "results"
    first = write(tmp_path / "a.json", vllm())
    before = imported(first, root)
    again = write(tmp_path / "b.json", vllm())
    (one,) = import_paths([again], root, Given(engine="vllm")).done
    assert one.known and one.record == before
    assert len(list((root / "imported").iterdir())) == 1


def test_several_results_in_a_file_are_several_runs(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", vllm(date="20261103-000000"), vllm(date="20261102-000000"))
    record = imported(file, tmp_path / "results")
    assert record.created.startswith("2026-11-0")
    runs = {p.run_id.rpartition(".")[2]: p.created for p in record.points}
    assert set(runs) == {"1", "2"} and runs["1"] > runs["2"] == record.created


def test_a_file_that_tells_no_date_has_that_of_its_last_change(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", sglang())
    os.utime(file, (1793613600, 1793613600))
    record = imported(file, tmp_path / "results")
    assert (record.created, record.created_from) == ("2026-11-02T10:00:00+00:00", "file")
    assert any("--date" in note for note in record.notes)
    told = Given(created="2026-10-01T00:00:00+00:00")
    by_user = imported(file, tmp_path / "other", told)
    assert (by_user.created, by_user.created_from) == (told.created, "user")
    assert by_user.notes == ()


def test_what_a_file_does_not_say_the_user_may(tmp_path: Path) -> None:
    file = write(tmp_path / "a.json", vllm())
    plain = imported(file, tmp_path / "results")
    assert {p.variant for p in plain.points} == {"baseline"}
    assert len(plain.notes) == 2, "neither the variant nor the engine is told"
    given = Given(
        engine="trt", variant="speculative", workload="chat", profile="kimi", engine_version="1.2"
    )
    record = imported(file, tmp_path / "other", given)
    first = record.points[0]
    assert (first.engine, first.variant, first.workload) == ("trt", "speculative", "chat")
    assert (first.profile, first.engine_version) == ("kimi", "1.2")
    assert first.target_name == "small-target" and record.notes == ()


def test_a_large_file_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "KEPT_BYTES", 100)
    record = imported(write(tmp_path / "a.json", vllm()), tmp_path / "results")
    assert record.original is None
    (folder,) = (tmp_path / "results" / "imported").iterdir()
    assert [p.name for p in folder.iterdir()] == ["import.json"]


def test_a_file_name_cannot_leave_the_folder_or_break_a_line(tmp_path: Path) -> None:
    file = write(tmp_path / "a\nb.js$(x)on", vllm())
    record = imported(file, tmp_path / "results")
    assert record.file == "a b.js$(x)on" and record.original == "original.jsxon"


@pytest.mark.parametrize("write_points", [to_csv, to_parquet, to_points_json])
def test_points_that_were_exported_keep_their_source(tmp_path: Path, write_points: Any) -> None:
    points = [point(folder="somewhere/else"), point("tpot_s.p50")]
    file = tmp_path / "points.bin"
    file.write_bytes(write_points(points))
    record = imported(file, tmp_path / "results")
    assert record.tool == "points" and record.created == points[0].created
    assert list(record.points) == [point(), point("tpot_s.p50")]
    assert [p.source for p in open_history(tmp_path / "results").query()] == ["run", "run"]


def folder_of_everything(path: Path) -> Path:
    """Results, and what may lie beside them."""
    write(path / "vllm" / "a.json", vllm())
    write(path / "vllm" / "foreign.json", {"alpha": 1})
    (path / "vllm" / "cut.json").write_text(json.dumps(vllm())[:-10])
    (path / "vllm" / "log.txt").write_text("Serving benchmark\n")
    (path / "vllm" / "empty.json").touch()
    write(path / "aiperf" / "profile_export.jsonl", aiperf_record(40.0), aiperf_record(60.0))
    write(path / "aiperf" / "profile_export_aiperf.json", aiperf())
    write(path / "records" / "profile_export.jsonl", aiperf_record(40.0))
    write(path / ".hidden" / "a.json", vllm(duration=9.0))
    (path / "sweep").mkdir()
    (path / "sweep" / "summary.json").write_text(json.dumps([vllm(run_number=i) for i in (0, 1)]))
    write(path / "run" / "manifest.json", {"schema_version": "1.2"})
    write(path / "run" / "cells" / "x.json", vllm(duration=7.0))
    return path


def reasons(outcome: Outcome) -> dict[str, str]:
    """Why each was skipped, by its name."""
    return {one.file.name: one.reason for one in outcome.skipped}


def test_a_folder_gives_what_it_can_and_names_the_rest(tmp_path: Path) -> None:
    outcome = import_paths([folder_of_everything(tmp_path / "in")], tmp_path / "results", NOTHING)
    kept = {"/".join(one.file.parts[-2:]) for one in outcome.done}
    assert kept == {
        *("vllm/a.json", "aiperf/profile_export_aiperf.json", "records/profile_export.jsonl"),
        "sweep/summary.json",
    }
    told = reasons(outcome)
    assert set(told) == {
        *("foreign.json", "cut.json", "log.txt", "empty.json", "profile_export.jsonl", "run"),
    }
    assert "alpha" in told["foreign.json"] and "line 1: not JSON" in told["cut.json"]
    assert "begins with 'Serving benchmark'" in told["log.txt"]
    assert "summary beside it" in told["profile_export.jsonl"]
    again = import_paths([tmp_path / "in"], tmp_path / "results", NOTHING)
    assert all(one.known for one in again.done) and len(again.done) == 4


def test_a_sweeps_summary_gives_only_what_no_file_beside_it_has(tmp_path: Path) -> None:
    runs = [vllm(run_number=i, duration=2.0 + i) for i in range(3)]
    sweep = tmp_path / "sweep"
    write(sweep / "run=0.json", runs[0])
    write(sweep / "run=1.json", runs[1])
    (sweep / "summary.json").write_text(json.dumps(runs[:2], indent=4))
    (sweep / "summary-more.json").write_text(json.dumps(runs, indent=4))
    outcome = import_paths([sweep], tmp_path / "results", NOTHING)
    told = {one.file.name: len({p.run_id for p in one.record.points}) for one in outcome.done}
    assert told == {"run=0.json": 1, "run=1.json": 1, "summary-more.json": 1}
    assert "files before it" in reasons(outcome)["summary.json"]
    history = open_history(tmp_path / "results")
    assert sorted(p.value or 0 for p in history.query(metric="duration_s")) == [2, 3, 4]


def test_the_results_folder_itself_gives_nothing_twice(tmp_path: Path) -> None:
    root = tmp_path / "results"
    imported(write(tmp_path / "a.json", vllm()), root)
    with pytest.raises(UsageError, match=r"nothing in it could be .* its history"):
        import_paths([root], root, NOTHING)


@pytest.mark.parametrize("made", [guidellm(), pytest_benchmark(benchmarks=[])])
def test_a_result_without_a_figure_is_refused(tmp_path: Path, made: dict[str, Any]) -> None:
    if "metadata" in made:
        made["benchmarks"][0]["metrics"] = {"request_latency": {}}
        del made["benchmarks"][0]["duration"]
    with pytest.raises(UsageError, match="no figure in it"):
        import_paths([write(tmp_path / "a.json", made)], tmp_path / "results", NOTHING)
    assert not (tmp_path / "results").exists()


def test_an_import_that_fails_half_way_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        import_paths([write(tmp_path / "a.json", vllm())], tmp_path / "results", NOTHING)
    assert list((tmp_path / "results" / "imported").iterdir()) == []


def test_a_date_of_exported_points_that_is_none_is_told(tmp_path: Path) -> None:
    file = tmp_path / "points.csv"
    file.write_bytes(to_csv([point(created="yesterday")]))
    with pytest.raises(UsageError, match=r"points\.csv: created: 'yesterday' is no date"):
        import_paths([file], tmp_path / "results", NOTHING)


def test_what_one_call_has_imported_it_knows(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{name}.json", vllm()) for name in "ab"]
    first, second = import_paths(files, tmp_path / "results", NOTHING).done
    assert (first.known, second.known) == (False, True)
    assert second.folder == first.folder and second.record == first.record


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({"n": 10**30}, "ttft_s.p50: n=1000.* is no count"),
        ({"n": -1}, "n=-1 is no count"),
        ({"profile": "half \ud800"}, "JSON is malformed"),
        ({"value": float("nan")}, "Out of range"),
    ],
)
def test_points_that_no_file_could_hold_are_refused(
    tmp_path: Path, changed: dict[str, Any], wanted: str
) -> None:
    told = {**msgspec.to_builtins(point("ttft_s.p50")), **changed}
    file = write(tmp_path / "a.json", {"schema_version": "1.0", "points": [told]})
    with pytest.raises(UsageError, match=rf"a\.json: .*{wanted}"):
        import_paths([file], tmp_path / "results", NOTHING)
    assert not (tmp_path / "results").exists()


def test_a_count_that_is_too_large_is_not_known(tmp_path: Path) -> None:
    file = write(tmp_path / "a.json", vllm(completed=2e19, failed=2e19))
    points = imported(file, tmp_path / "results").points
    assert {p.n for p in points} == {None}
    assert to_parquet(points)


@pytest.mark.parametrize("depth", range(950, 1000, 2))
def test_no_depth_of_nesting_is_too_much(tmp_path: Path, depth: int) -> None:
    (tmp_path / "a.json").write_text(
        '{"x": ' + "[" * depth + "]" * depth + "," + json.dumps(vllm())[1:]
    )
    try:
        import_paths([tmp_path / "a.json"], tmp_path / "results", NOTHING)
    except UsageError as error:
        assert "nested too deeply" in str(error)


def test_a_pipe_is_refused_before_it_is_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="pipe: not a plain file"):
        import_paths([tmp_path / "pipe"], tmp_path / "results", NOTHING)
