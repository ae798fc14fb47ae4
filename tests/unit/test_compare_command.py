"""`python -m harness compare`: what it prints, what it writes, and how it ends."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from compare_runs import SPEEDS, Values, cells_of, group, stored
from report_run import C1, C4, category, metrics

from harness import cli
from harness.analyse.across.compare import compare_groups
from harness.analyse.across.records import Row, Stored
from harness.analyse.across.rows import Wanted
from harness.compare import labels
from harness.errors import UsageError
from harness.options import parse_tolerances
from harness.plan.schema import CompareSection, Plan
from harness.report.across import render_markdown, render_text

SLOWER: Values = {v: [0.9 * s for s in speeds] for v, speeds in SPEEDS.items()}
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Calls `compare`; gives its exit code, standard output and standard error."""

    def run(*words: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["harness", "compare", *map(str, words)])
        before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)}
        try:
            with pytest.raises(SystemExit) as left:
                cli.main()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        told = capsys.readouterr()
        return int(left.value.code or 0), told.out, told.err

    return run


def write(folder: Path, run: Stored) -> Path:
    """A run's manifest and summary on disk."""
    folder.mkdir()
    (folder / "manifest.json").write_bytes(msgspec.json.encode(run.run.manifest))
    (folder / "summary.json").write_bytes(msgspec.json.encode(run.summary))
    return folder


def rows_of(b: Stored, a: Stored | None = None, **wanted: Any) -> tuple[Row, ...]:
    across = compare_groups([group(a or stored()), group(b)], Wanted(**wanted))
    return across.comparisons[0].rows


def row(rows: tuple[Row, ...], metric: str, side: str = "speculative", **fields: Any) -> Row:
    (found,) = [
        r
        for r in rows
        if (r.metric, r.side, r.category) == (metric, side, fields.get("category"))
        and ("load" not in fields or r.load == fields["load"])
    ]
    return found


def test_a_run_that_is_slower_ends_with_one_and_says_where(call: Call, tmp_path: Path) -> None:
    a = write(tmp_path / "monday", stored())
    b = write(tmp_path / "tuesday", stored("b", cells_of(SLOWER)))
    code, out, err = call(a, b)
    assert (code, err) == (1, "")
    assert out.index("Differences: none that is recorded.") < out.index("output tokens/s")
    flat = " ".join(out.split())
    assert "Worse than monday: output tokens/s (baseline, concurrency 1) 0.900x" in flat
    assert "Nothing that is recorded differs and moves speed: look at the machine." in flat
    assert "concurrency 1: 3 paired starts" in flat
    assert "Both variants moved alike" in flat
    assert call(b, a)[0] == 0
    assert call(a, a)[0] == 0


def test_json_is_the_whole_comparison(call: Call, tmp_path: Path) -> None:
    a = write(tmp_path / "a", stored())
    newer = {"versions": {"torch": "2.14.0"}}
    b = write(tmp_path / "b", stored("b", cells_of(SLOWER), manifest=newer))
    code, out, _ = call(a, b, "--json", "--tolerance", "15%")
    told = json.loads(out)
    assert code == 0
    assert told["reference"] == "a"
    (versus,) = told["comparisons"]
    assert versus["differences"][0]["key"] == "torch"
    question = [r for r in versus["rows"] if r["kind"] == "question"]
    assert {r["side"] for r in question} == {"baseline", "speculative", "ratio"}
    assert {(r["verdict"], r["tolerance"]) for r in question} == {("same", 0.15)}
    assert all(set(r) == set(Row.__struct_fields__) for r in versus["rows"])


def test_markdown_is_written_beside_the_table(call: Call, tmp_path: Path) -> None:
    a = write(tmp_path / "a", stored())
    b = write(tmp_path / "b", stored("b|c", cells_of(SLOWER)))
    page = tmp_path / "page.md"
    code, _, _ = call(a, b, "--markdown", page)
    text = page.read_text()
    assert code == 1
    assert text.startswith("## b against a\n")
    assert "| output tokens/s | baseline | 51.0 | 45.9 | 0.900x" in text
    assert "**worse**" in text
    assert call(a, b, "--markdown", tmp_path / "no" / "page.md")[0] == 2


def test_a_void_run_ends_with_four_and_has_no_verdict(call: Call, tmp_path: Path) -> None:
    a = write(tmp_path / "a", stored())
    b = write(tmp_path / "b", stored("b", cells_of(SLOWER), void="output broken"))
    code, out, _ = call(a, b)
    assert code == 4
    assert "No verdict is drawn: b is void: output broken." in " ".join(out.split())
    assert "worse" not in out
    assert "0.900x" in out


def test_a_void_run_that_measured_nothing_ends_with_four_too(call: Call, tmp_path: Path) -> None:
    a = write(tmp_path / "a", stored())
    lost = [msgspec.structs.replace(c, status="failed") for c in cells_of(SPEEDS)]
    b = write(tmp_path / "b", stored("b", lost, void="too few requests succeeded: 0 of 24"))
    code, out, err = call(a, b)
    assert (code, out) == (4, "")
    assert err == (
        "harness: a and b cannot be compared: b is void: too few requests succeeded: 0 of 24\n"
    )


def test_of_three_runs_the_first_is_the_reference(call: Call, tmp_path: Path) -> None:
    runs = [
        write(tmp_path / name, stored(name, cells))
        for name, cells in (("a", None), ("b", None), ("c", cells_of(SLOWER)))
    ]
    code, out, _ = call(*runs, "--json")
    told = json.loads(out)
    assert code == 1
    assert [c["candidate"] for c in told["comparisons"]] == ["b", "c"]
    worse = [{r["verdict"] for r in c["rows"]} for c in told["comparisons"]]
    assert "worse" not in worse[0]
    assert "worse" in worse[1]
    family = {
        r["family"] for c in told["comparisons"] for r in c["rows"] if r["kind"] == "question"
    }
    assert family == {6}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a"], "give two runs or more"),
        (["a", "nowhere"], "nowhere/summary.json: no such file"),
        (["a", "b", "--tolerance", "3"], "--tolerance 3: give a share"),
        (["a", "b", "--tolerance", "=3%"], "--tolerance =3%: give a share"),
        (["a", "b", "--tolerance", "3%,4%"], "all metrics has two tolerances"),
        (["a", "b", "--tolerance", "outputtokens=3%"], "did you mean output_tokens_per_s?"),
        (["a", "b", "--metric", "zzz"], "no such metric; known are output_tokens_per_s"),
        (["a", "b", "--metric", ""], "no such metric; known are output_tokens_per_s"),
        (["a", "b", "--where", ""], "--where : give KEY=VALUE"),
        (["b", "--where", "engine"], "--where engine: give KEY=VALUE"),
        (["a", "b", "--markdown", "sweep"], "sweep: is a folder"),
        (["a", "b", "--metric", "goodput_per_s"], "no figure that both have"),
        (["a", "damaged"], "summary.json: cannot be read"),
        (["a", "later"], "written with schema 9.0"),
        (["a", "unsummed"], "it was not summed up"),
        (["a", "sweep"], "the folder of a sweep"),
    ],
)
def test_a_mistake_is_one_line(call: Call, tmp_path: Path, words: list[str], said: str) -> None:
    write(tmp_path / "a", stored())
    write(tmp_path / "b", stored("b"))
    damaged = write(tmp_path / "damaged", stored("d"))
    (damaged / "summary.json").write_text("{")
    later = write(tmp_path / "later", stored("l"))
    text = (later / "summary.json").read_text().replace('"1.2"', '"9.0"')
    (later / "summary.json").write_text(text)
    unsummed = write(tmp_path / "unsummed", stored("u"))
    (unsummed / "summary.json").unlink()
    (unsummed / "cells").mkdir()
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.json").write_text("{}")
    names = {path.name for path in tmp_path.iterdir()} | {"nowhere"}
    code, out, err = call(*(tmp_path / word if word in names else word for word in words))
    assert (code, out) == (2, "")
    assert err.startswith("harness: ")
    assert err.count("\n") == 1
    assert said in err


def test_tolerances_are_shares_of_all_or_of_one_metric() -> None:
    assert parse_tolerances(["3%", "ttft_s=0.1,tpot_s.p99=20%"]) == {
        "": 0.03,
        "ttft_s": 0.1,
        "tpot_s.p99": 0.2,
    }
    for wrong in ("", "0", "100%", "nan", "-1%", "ttft_s=", "3% of", "inf"):
        with pytest.raises(UsageError, match="--tolerance"):
            parse_tolerances([wrong])


def test_the_longest_name_that_was_given_decides() -> None:
    tolerances = {"": 0.04, "ttft_s": 0.1, "ttft_s.p50": 0.2}
    rows = rows_of(stored("b"), tolerances=tolerances)
    told = {r.metric: r.tolerance for r in rows}
    assert (told["ttft_s.mean"], told["ttft_s.p50"], told["tpot_s.p50"]) == (0.1, 0.2, 0.04)


def test_without_a_tolerance_the_reference_plan_says_what_matters() -> None:
    plan = Plan(compare=CompareSection(min_effect=0.2))
    slower = stored("b", cells_of(SLOWER))
    assert row(rows_of(slower), "output_tokens_per_s").verdict == "worse"
    told = row(rows_of(slower, stored(plan=plan)), "output_tokens_per_s")
    assert (told.verdict, told.tolerance) == ("same", 0.2)


def test_the_question_of_the_plan_is_a_family_of_its_own() -> None:
    plan = Plan(compare=CompareSection(metric="ttft_s"))
    rows = rows_of(stored("b", plan=plan), stored(plan=plan))
    assert {r.metric for r in rows if r.kind == "question"} == {"ttft_s.mean"}
    assert row(rows, "output_tokens_per_s").kind == "figure"
    assert {r.family for r in rows if r.kind == "question"} == {3}


def test_each_variant_has_its_own_counterpart_and_so_has_the_speed_up() -> None:
    """The baseline alone got faster: the speed-up fell, though serving did not get worse."""
    faster = {**SPEEDS, "baseline": [1.2 * s for s in SPEEDS["baseline"]]}
    rows = rows_of(stored("b", cells_of(faster)))
    verdicts = {
        side: row(rows, "output_tokens_per_s", side).verdict
        for side in ("baseline", "speculative", "ratio")
    }
    assert verdicts == {"baseline": "better", "speculative": "same", "ratio": "worse"}
    across = compare_groups([group(stored()), group(stored("b", cells_of(faster)))], Wanted())
    assert "Both variants moved alike" not in " ".join(render_text(across).split())
    told = row(rows, "output_tokens_per_s", "ratio")
    assert told.ratio == pytest.approx(1 / 1.2)
    assert told.reference == pytest.approx((60 * 62 * 64 / (50 * 51 * 52)) ** (1 / 3))
    assert row(rows, "ttft_s.mean", "baseline").verdict == "better"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"seed": 7}, "the seeds are not the same"),
        (
            {"cells": cells_of({v: [*s, s[0]] for v, s in SPEEDS.items()})},
            "not the same blocks were planned",
        ),
        ({"plan": Plan(load=Plan().load.__class__(warmup_requests=9))}, "load.warmup_requests is"),
    ],
)
def test_blocks_that_do_not_pair_are_compared_apart_and_it_says_why(
    changes: dict[str, Any], why: str
) -> None:
    paired = row(rows_of(stored("b")), "output_tokens_per_s")
    assert paired.paired
    assert paired.method == "3 paired starts, 95% t interval on the log scale"
    told = row(rows_of(stored(), stored("b", **changes)), "output_tokens_per_s")
    assert not told.paired
    assert (told.unpaired or "").startswith(why.removesuffix(" is"))
    assert "unpaired, 95% t interval" in told.method
    assert told.ci_low is not None
    assert paired.ci_low is not None
    assert told.ci_low < paired.ci_low


def test_a_block_that_one_of_them_lacks_is_not_paired() -> None:
    """A start that measured one block of two had other prompts on the whole."""
    blocks = [
        msgspec.structs.replace(c, block=i, cell_id=f"{c.cell_id}-b{i}")
        for c in cells_of(SPEEDS)
        for i in (0, 1)
    ]
    lost = [
        msgspec.structs.replace(c, status="failed") if c.cell_id.endswith("ve-c1-r1-b1") else c
        for c in blocks
    ]
    rows = rows_of(stored("b", lost), stored("a", blocks))
    told = row(rows, "output_tokens_per_s")
    assert (told.paired, told.unpaired) == (False, "not the same blocks were measured")
    assert told.units == (3, 3)
    assert row(rows, "output_tokens_per_s", "baseline").paired


def test_one_start_alone_bears_no_verdict() -> None:
    one = {v: s[:1] for v, s in SPEEDS.items()}
    slow = {v: s[:1] for v, s in SLOWER.items()}
    rows = rows_of(stored("b", cells_of(slow)), stored("a", cells_of(one)))
    told = row(rows, "output_tokens_per_s")
    assert told.ratio == pytest.approx(0.9)
    assert (told.verdict, told.ci_low) == ("undecided", None)
    assert told.note == "one start alone bears no verdict"
    blocks = [
        msgspec.structs.replace(c, block=i, cell_id=f"{c.cell_id}-b{i}")
        for c in cells_of(slow)
        for i in (0, 1)
    ]
    both = rows_of(stored("b", blocks), stored("a", blocks))
    again = row(both, "output_tokens_per_s")
    assert (again.units, again.verdict) == ((2, 2), "undecided")
    assert again.method.startswith("2 paired blocks of one start")


def test_a_ratio_that_no_number_holds_is_none_and_says_why() -> None:
    tiny, huge = ({"speculative": [value, value]} for value in (1e-200, 1e200))
    rows = rows_of(stored("b", cells_of(huge)), stored("a", cells_of(tiny)))
    told = row(rows, "output_tokens_per_s")
    assert (told.ratio, told.verdict) == (None, "undecided")
    assert (told.note or "").startswith("so far apart")


def test_blocks_where_many_requests_failed_have_no_verdict() -> None:
    bad = cells_of(SLOWER)
    bad[0] = msgspec.structs.replace(bad[0], metrics=metrics(45.0, failed=4), status="partial")
    rows = rows_of(stored("b", bad))
    told = row(rows, "output_tokens_per_s", "baseline")
    assert told.verdict == "undecided"
    assert told.note == "more than 5% of the requests of a block failed"
    assert row(rows, "output_tokens_per_s", "ratio").verdict == "undecided"
    assert row(rows, "output_tokens_per_s").verdict == "worse"
    assert row(rows, "startup_s", "baseline").verdict == "same"


def test_a_forced_acceptance_has_no_verdict_and_leaves_the_baseline_its_own() -> None:
    plan = Plan(speculative=Plan().speculative.__class__(forced_length=2.0))
    rows = rows_of(stored("b", cells_of(SLOWER), plan=plan))
    told = row(rows, "output_tokens_per_s")
    assert (told.verdict, told.note) == (
        "undecided",
        "an acceptance that was forced says nothing",
    )
    assert row(rows, "output_tokens_per_s", "baseline").verdict == "worse"


def test_p99_needs_enough_requests_and_positions_stop_where_one_has_no_more() -> None:
    names = {r.metric for r in rows_of(stored("b"))}
    assert "ttft_s.p50" in names
    assert "ttft_s.p99" not in names
    assert {"per_position.0", "per_position.2"} <= names
    assert {"startup_s", "acceptance_length", "acceptance_rate", "task_accuracy"} <= names
    many = [
        msgspec.structs.replace(
            c,
            metrics=msgspec.structs.replace(
                c.metrics, ttft_s=msgspec.structs.replace(c.metrics.ttft_s, n=100)
            ),
        )
        for c in cells_of(SPEEDS)
        if c.metrics is not None
    ]
    assert "ttft_s.p99" in {r.metric for r in rows_of(stored("b", many), stored("a", many))}


def test_categories_are_compared_and_the_terminal_shows_the_changed_ones() -> None:
    def with_categories(speeds: Values, factor: float) -> list[Any]:
        math = category()
        slow = msgspec.structs.replace(math, tpot_s=0.02 * factor)
        return cells_of(speeds, categories={"math": math, "code": slow})

    a, b = stored("a", with_categories(SPEEDS, 1)), stored("b", with_categories(SPEEDS, 1.3))
    across = compare_groups([group(a), group(b)], Wanted())
    rows = across.comparisons[0].rows
    code = row(rows, "tpot_s.mean", category="code")
    assert (code.verdict, code.kind) == ("worse", "detail")
    assert row(rows, "tpot_s.mean", category="math").verdict == "same"
    text = render_text(across)
    assert "code: TPOT mean, ms" in text
    assert "math: TPOT mean, ms" not in text
    assert "(--categories)" in text
    assert "math: TPOT mean, ms" in render_text(across, categories=True)
    assert "math: TPOT mean, ms" in render_markdown(across)


def test_likely_causes_stand_beside_what_got_worse() -> None:
    newer = stored("b", cells_of(SLOWER), manifest={"versions": {"torch": "2.14.0"}})
    across = compare_groups([group(stored()), group(newer)], Wanted())
    text = " ".join(render_text(across).split())
    assert "! torch: 2.13.0 -> 2.14.0 [any figure]" in text
    assert "What may have moved speed: torch: 2.13.0 -> 2.14.0." in text
    assert text.index("! torch") < text.index("output tokens/s")


def test_lines_are_no_wider_than_asked() -> None:
    across = compare_groups([group(stored()), group(stored("b"))], Wanted())
    for width in (60, 100):
        assert max(map(len, render_text(across, width).splitlines())) <= width


def test_several_runs_stand_for_one_with_runs_as_units() -> None:
    def nights(label: str, factors: list[float]) -> list[Stored]:
        return [
            stored(f"{label}{i}", cells_of({v: [f * s for s in own] for v, own in SPEEDS.items()}))
            for i, f in enumerate(factors)
        ]

    usual = group(*nights("a", [1.0, 1.01, 0.99, 1.005]), label="last 4")
    bad = group(*nights("b", [0.9, 0.91, 0.89]), label="new")
    across = compare_groups([usual, bad], Wanted())
    told = row(across.comparisons[0].rows, "output_tokens_per_s")
    assert (told.units, told.paired, told.verdict) == ((4, 3), False, "worse")
    assert told.method.startswith("4 runs against 3 runs, unpaired")
    single = compare_groups([usual, group(*nights("c", [0.9]))], Wanted())
    told = row(single.comparisons[0].rows, "output_tokens_per_s")
    assert (told.units, told.verdict) == ((4, 1), "worse")
    assert "last 4 (4 runs" in render_text(single)
    within = compare_groups([usual, group(*nights("d", [0.985]))], Wanted())
    assert row(within.comparisons[0].rows, "output_tokens_per_s").verdict != "worse"


def test_runs_of_two_kinds_do_not_stand_for_each_other() -> None:
    mixed = group(stored("a"), stored("b", cells_of(SPEEDS, load=C4)), label="last 2")
    with pytest.raises(UsageError, match="last 2: a and b cannot stand for each other"):
        compare_groups([mixed, group(stored("c"))], Wanted())


def test_a_side_says_in_what_its_runs_are_not_alike() -> None:
    newer = stored("b", manifest={"versions": {"torch": "2.14.0"}})
    across = compare_groups([group(stored("a"), newer, label="last 2"), group(newer)], Wanted())
    (versus,) = across.comparisons
    assert versus.differences == ()
    assert versus.mixed == ("the runs of last 2 are not alike in: torch",)
    assert versus.mixed[0] in render_text(across)
    assert versus.mixed[0] in render_markdown(across)


def test_loads_are_matched_without_how_long_they_were_driven() -> None:
    longer = msgspec.structs.replace(C1, num_requests=240)
    rows = rows_of(stored("b", cells_of(SPEEDS, load=longer)))
    assert {r.load.num_requests for r in rows if r.load is not None} == {None}


def history(root: Path, speeds: list[float]) -> Path:
    """A results folder with a run for each night; the last one is named `new`."""
    root.mkdir()
    for i, factor in enumerate(speeds):
        name = "new" if i == len(speeds) - 1 else f"night{i}"
        cells = cells_of({v: [factor * s for s in own] for v, own in SPEEDS.items()})
        created = {"created": f"2026-01-{i + 1:02d}T00:00:00+00:00"}
        write(root / name, stored(name, cells, manifest=created))
    return root


def test_a_selection_of_the_history_is_a_side(call: Call, tmp_path: Path) -> None:
    root = history(tmp_path / "results", [2.0, 1.0, 1.01, 0.99, 1.005, 0.8])
    chosen = ("--results", root, "--json")
    code, out, err = call("--where", "engine=reference", "--last", "4", root / "new", *chosen)
    told = json.loads(out)
    assert (code, err) == (1, "")
    assert told["reference"] == "engine=reference,last=4"
    assert told["run_ids"] == ["id-night1", "id-night2", "id-night3", "id-night4"]
    speed = [r for r in told["comparisons"][0]["rows"] if r["kind"] == "question"]
    assert {r["side"]: r["verdict"] for r in speed} == {
        "baseline": "worse",
        "speculative": "worse",
        "ratio": "same",
    }
    code, out, _ = call("until=2026-01-03,last=2", "since=2026-01-03,last=3", *chosen)
    told = json.loads(out)
    assert told["run_ids"] == ["id-night0", "id-night1"]
    assert told["comparisons"][0]["run_ids"] == ["id-night3", "id-night4", "id-new"]


@pytest.mark.parametrize(
    ("selection", "said"),
    [
        ("engine=vllm", "engine=vllm: no run in"),
        ("motor=vllm", "motor=vllm: motor=vllm selects nothing; give KEY=VALUE with engine,"),
        ("last=0", "last=0: give a number of runs from 1 on"),
        ("engine=", "engine= selects nothing"),
        ("since=yesterday,last=2", "since yesterday: give a date"),
    ],
)
def test_a_selection_that_chooses_nothing_is_one_line(
    call: Call, tmp_path: Path, selection: str, said: str
) -> None:
    root = history(tmp_path / "results", [1.0, 1.0])
    code, out, err = call(selection, root / "new", "--results", root)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_folders_of_one_name_are_told_apart() -> None:
    assert labels(["x/a", "y/b/"]) == ["a", "b"]
    assert labels(["x/a", "y/a"]) == ["x/a", "y/a"]
