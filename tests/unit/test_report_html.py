# ruff: noqa: RUF001 (an en dash is what the report shows)
"""The page, its Markdown and its figures, from whole, partial, odd and hostile run folders."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import report_run as made

from harness.errors import UsageError
from harness.findings import Caution, Summary
from harness.records import LaunchRecord, LoadPoint, Phase, Variant
from harness.report.html import write_report
from harness.report.markdown import escape, fence
from harness.report.run_data import read_run
from harness.report.templating import write_whole

VOID_TAGS = {"meta", "link", "br", "img", "input", "hr"}
HOSTILE = '<script>alert("1")</script> $\\frac{1}$ | `x` & \x07'


class Reader(HTMLParser):
    """Tags with their attributes, text by the innermost tag, and whether all tags close."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID_TAGS:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open[-1] if self.open else "", " ".join(data.split())))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]

    def text(self, *tags: str) -> str:
        return " ".join(text for tag, text in self.texts if not tags or tag in tags)


def report(folder: Path, told: Summary | None = None, **options: Any) -> tuple[str, Reader]:
    made.write_run(folder, told or made.summary(), **options)
    page = write_report(folder).read_text("utf-8")
    return page, Reader(page)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Reader]:
    folder = tmp_path_factory.mktemp("run") / "whole"
    page, reader = report(folder)
    return folder, page, reader


def test_page_is_well_formed_and_says_the_verdict(whole: tuple[Path, str, Reader]) -> None:
    _, page, reader = whole
    assert reader.open == []
    assert page.startswith("<!DOCTYPE html>")
    assert reader.text("h1") == "demo pair on reference"
    assert "With this drafter, reference is 1.24x (1.15–1.33)" in reader.text("p")
    ids = re.findall(r'\sid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_numbers_stand_in_the_table(whole: tuple[Path, str, Reader]) -> None:
    _, _, reader = whole
    cells = reader.text("td", "th", "span")
    for said in ("62.6", "1.24x (1.15–1.33)", "0.80x (0.74–0.86)", "54.7%", "2.64", "48 of 48"):
        assert said in cells
    assert "0.78 / 0.48 / 0.38" in cells and "87.5% (n = 48)" in cells
    assert "undecided" in reader.text("span")
    assert not re.search(r"\b(nan|None|inf)\b", reader.text("td", "th", "p", "dd", "li"))


def test_everything_needed_to_repeat_it(whole: tuple[Path, str, Reader]) -> None:
    _, _, reader = whole
    code = reader.text("code")
    assert "python -m harness run --set load.concurrency=1" in code
    assert '"temperature": 0.0' in code
    facts = reader.text("dd")
    assert "0123456789abcdef0123456789abcdef01234567" in facts
    assert "Example CPU" in facts and "2.13.0" in facts


def test_figures_have_a_text_alternative_with_numbers(whole: tuple[Path, str, Reader]) -> None:
    _, _, reader = whole
    names = [f["id"] for f in reader.all("figure")]
    assert names == [
        "fig-effects",
        "fig-throughput",
        "fig-latency-reference-concurrency-1",
        "fig-gaps-reference-concurrency-1",
        "fig-acceptance",
        "fig-tokens-per-step",
        "fig-startup",
    ]
    alts = [d["aria-label"] or "" for d in reader.all("div") if d.get("role") == "img"]
    assert len(alts) == len(names) and all(len(alt) > 40 for alt in alts)
    assert "output tokens/s, reference, concurrency 1: 1.24x (1.15–1.33), better" in alts[0]
    assert "ratio 1.24x (1.15–1.33)" in alts[1]
    assert "TTFT baseline median" in alts[2] and "(n = 48)" in alts[2]
    assert "baseline median over time from" in alts[3]
    assert "marginal 78.0%, 48.0%, 38.0%" in alts[4]
    assert "1 22.0%, 2 30.0%, 3 10.0%, 4 38.0%; mean 2.64" in alts[5]
    assert "load drafter 1.10 s" in alts[6]
    assert len(reader.all("figcaption")) == len(reader.all("svg")) == len(names)


def test_draft_positions_count_from_0(whole: tuple[Path, str, Reader]) -> None:
    folder, _, _ = whole
    text = (folder / "plots" / "acceptance.svg").read_text("utf-8")
    ticks = re.findall(r'id="acceptance-xtick_\d+".*?>([^<>]+)</text>', text, re.DOTALL)
    assert ticks == ["0", "1", "2"] * 2


def test_axes_name_their_units(whole: tuple[Path, str, Reader]) -> None:
    _, _, reader = whole
    drawn = reader.text("text")
    for label in (
        "output tokens/s",
        "TTFT, ms",
        "TPOT, ms",
        "E2E latency, ms",
        "gap between chunks, ms (logarithmic)",
        "seconds since the engine was started",
        "% of drafts (n = 2,000)",
        "Output throughput (n = 2 blocks a variant)",
    ):
        assert label in drawn


def test_page_asks_nothing_of_the_network(whole: tuple[Path, str, Reader]) -> None:
    _, page, reader = whole
    for tag, attrs in reader.tags:
        for name in ("src", "href", "xlink:href", "action", "srcset", "data", "poster"):
            value = attrs.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, name, value)
    assert "@import" not in page and "@font-face" not in page
    assert "url(http" not in page and "fetch(" not in page
    policy = [m["content"] for m in reader.all("meta") if m.get("http-equiv")]
    assert policy and (policy[0] or "").startswith("default-src 'none'")
    assert len(page) < 1_000_000


def test_page_follows_the_colour_scheme(whole: tuple[Path, str, Reader]) -> None:
    folder, page, reader = whole
    assert "prefers-color-scheme: dark" in page and "@media print" in page
    assert any(m.get("name") == "viewport" for m in reader.all("meta"))
    svgs = sorted((folder / "plots").glob("*.svg"))
    assert [p.stem for p in svgs] == sorted(
        str(f["id"]).removeprefix("fig-") for f in reader.all("figure")
    )
    for path in svgs:
        text = path.read_text("utf-8")
        root = ET.fromstring(text)
        assert root.tag.endswith("svg") and root.get("width", "").endswith("pt")
        assert "currentColor" in text and "prefers-color-scheme:dark" in text
        assert "#0a0b0c" not in text and "<metadata" not in text


def test_cells_table_sorts_by_plain_numbers(whole: tuple[Path, str, Reader]) -> None:
    _, page, reader = whole
    assert any("data-sortable" in table for table in reader.all("table"))
    keys = [td["data-value"] for td in reader.all("td") if "data-value" in td]
    assert "62.0" in keys
    assert "cell engine variant load repeat, block status" in reader.text("th")
    assert len(re.findall(r"<tr><td data-value=", page)) == 4


def test_no_cell_of_the_results_is_empty(whole: tuple[Path, str, Reader]) -> None:
    _, page, _ = whole
    assert "<td></td>" not in page and "| |" not in (whole[0] / "report.md").read_text("utf-8")


def test_markdown_has_the_same_numbers(whole: tuple[Path, str, Reader]) -> None:
    folder, _, _ = whole
    text = (folder / "report.md").read_text("utf-8")
    assert text.startswith("# demo pair on reference\n\n**With this drafter, reference is 1.24x")
    row = "| output tokens/s | 50.5 | 62.6 | 1.24x (1.15–1.33) | better |"
    assert row in text.splitlines()
    assert "| acceptance rate | – | 54.7% |" in text.splitlines()
    pictures = re.findall(r"\]\((plots/[^)]+)\)", text)
    assert len(pictures) == 7 and all((folder / p).is_file() for p in pictures)
    assert "```\npython -m harness run --set load.concurrency=1\n```" in text


def test_figures_stand_with_their_intervals_and_the_corrected_ones(tmp_path: Path) -> None:
    told = made.summary(estimates=made.estimates())
    corrected = msgspec.structs.replace(
        told.comparisons[0], family=2, corrected_low=1.11, corrected_high=1.39
    )
    _, page = report(tmp_path, msgspec.structs.replace(told, comparisons=(corrected,)))
    text = (tmp_path / "report.md").read_text()
    speed = next(line for line in text.splitlines() if line.startswith("| output tokens/s"))
    assert speed == (
        "| output tokens/s | 50.5 (48.1–53.0) | 62.6 (60.2–65.1) | 1.24x (1.15–1.33) | 1.11–1.39 "
        "| better |"
    )
    assert "| acceptance length | – | 2.64 (2.51–2.77) |" in text
    assert "in brackets: over 2 starts, 95.0% t interval" in text
    assert "corrected interval" in page.text("th")
    assert "50.5 (48.1–53.0) 62.6 (60.2–65.1) 1.24x (1.15–1.33) 1.11–1.39" in page.text("td")


def test_an_interval_of_other_cells_does_not_stand_beside_a_figure(tmp_path: Path) -> None:
    other = msgspec.structs.replace(made.estimates()[0], value=49.0)
    report(tmp_path, made.summary(estimates=(other,)))
    text = (tmp_path / "report.md").read_text()
    assert "| output tokens/s | 50.5 | 62.6 | 1.24x (1.15–1.33) | better |" in text


@pytest.mark.parametrize(
    ("one", "absent"), [("baseline", "speculative"), ("speculative", "baseline")]
)
def test_a_variant_that_was_not_measured_has_no_columns_in_the_page(
    one: Variant, absent: Variant, tmp_path: Path
) -> None:
    cells = tuple(made.cell(one, load=load, integrity=None) for load in (made.C1, made.C4))
    made.write_run(tmp_path, made.summary(cells=cells, comparisons=()))
    reader = Reader(write_report(tmp_path).read_text("utf-8"))
    heads = f"{reader.text('th')} {reader.text('button')}"
    assert one in heads
    assert not any(word in heads for word in (absent, "ratio", "verdict", "identical"))
    assert ("accepted" in heads) == (one == "speculative")
    results = (tmp_path / "report.md").read_text("utf-8").split("## Figures")[0]
    assert f"| metric | {one} |\n|---|---:|\n| output tokens/s | " in results
    tables = [part.split("\n\n")[0] for part in results.split("| metric |")[1:]]
    assert len(tables) == 2 and not any("| – |" in table for table in tables)


def test_title_and_workload_say_what_was_asked(tmp_path: Path) -> None:
    trace = LoadPoint(mode="open", arrival="trace", trace="/data/calls.jsonl")
    cells = (
        made.cell("baseline", load=trace, workload="builtin"),
        made.cell("baseline", load=made.C1, workload="demo"),
    )
    made.write_run(tmp_path, made.summary(title="/target on openai", cells=cells, comparisons=()))
    reader = Reader(write_report(tmp_path).read_text("utf-8"))
    assert reader.text("h1") == "target on openai"
    said = "workload trace calls.jsonl (if it has no prompts: builtin), demo"
    assert said in reader.text("p")


def test_every_row_and_column_is_defined(whole: tuple[Path, str, Reader]) -> None:
    _, _, reader = whole
    terms = reader.text("dt")
    for term in ("identical outputs", "task accuracy", "given the one before", "repeat", "block"):
        assert term in terms
    assert "paired" in terms and "first thinking / answer" in terms


def test_starts_without_cells_show_their_phases_and_commands(tmp_path: Path) -> None:
    told = made.summary(cells=(made.cell("baseline"),), comparisons=())
    made.write_run(tmp_path, told)
    launch = LaunchRecord(
        name="vllm-speculative-r0",
        engine="vllm",
        variant="speculative",
        repeat=0,
        argv=("python", "-m", "server", "--k", "3"),
        phases=(Phase(phase="load weights", start_s=0.0, end_s=None),),
        ready_s=None,
        failure="out of memory",
    )
    place = tmp_path / "launches" / launch.name
    place.mkdir(parents=True)
    (place / "launch.json").write_bytes(msgspec.json.encode(launch))
    reader = Reader(write_report(tmp_path).read_text("utf-8"))
    alts = [d["aria-label"] or "" for d in reader.all("div") if d.get("role") == "img"]
    assert "vllm, speculative: load weights did not end" in alts[-1]
    assert "python -m server --k 3" in reader.text("code")


def test_writing_again_leaves_no_old_figure(tmp_path: Path) -> None:
    made.write_run(tmp_path, made.summary())
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "old.svg").write_text("<svg/>")
    first = write_report(tmp_path).read_text("utf-8")
    assert not (tmp_path / "plots" / "old.svg").exists()
    assert write_report(tmp_path).read_text("utf-8") == first
    assert not list(tmp_path.rglob("*.part"))


def test_hostile_strings_are_only_text(tmp_path: Path) -> None:
    cells = tuple(
        made.cell(v, engine=HOSTILE, workload=HOSTILE, cell_id=f"c-{v}")
        for v in ("baseline", "speculative")
    )
    told = made.summary(
        title=HOSTILE,
        run_id=HOSTILE,
        cells=cells,
        comparisons=(made.comparison(engine=HOSTILE),),
        failures=(HOSTILE,),
        cautions=(Caution(code=HOSTILE, text=HOSTILE, advice=HOSTILE),),
    )
    made.write_run(tmp_path, told)
    bad = made.manifest(
        told,
        command=("python", HOSTILE),
        plan={HOSTILE: HOSTILE},
        environment={HOSTILE: [HOSTILE, {"x": HOSTILE}]},
        versions={HOSTILE: None},
    )
    (tmp_path / "manifest.json").write_bytes(msgspec.json.encode(bad))
    page = write_report(tmp_path).read_text("utf-8")
    reader = Reader(page)
    assert reader.open == []
    assert len(reader.all("script")) == 1
    assert "alert" not in reader.text("script")
    assert "alert" in reader.text("h1") and "alert" in reader.text("text")
    assert "\x07" not in page
    for path in (tmp_path / "plots").glob("*.svg"):
        assert "script" not in {e.tag.rpartition("}")[2] for e in ET.parse(path).iter()}
    assert "<script" not in (tmp_path / "report.md").read_text("utf-8").split("```")[0]


def test_a_cell_id_cannot_lead_out_of_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    made.write_run(run, made.summary())
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "requests.parquet").write_bytes(b"never read")
    told = made.summary(cells=(made.cell("baseline", cell_id="../../outside"),), comparisons=())
    (run / "summary.json").write_bytes(msgspec.json.encode(told))
    page = write_report(run).read_text("utf-8")
    assert "could not be read" not in page and "no readable requests.parquet" in page


def test_a_run_copied_without_its_requests_has_one_caution_that_says_so(tmp_path: Path) -> None:
    told = made.summary()
    made.write_run(tmp_path, told)
    for path in (tmp_path / "cells").glob("*/requests.parquet"):
        path.unlink()
    notes = [note for note in read_run(tmp_path).notes if note.code == "no-requests"]
    assert len(told.cells) > 1 and len(notes) == 1
    assert notes[0].text.startswith(f"{len(told.cells)} of {len(told.cells)} cells have no ")
    assert "resume" not in notes[0].advice and "cells/" in notes[0].advice


def test_a_failed_variant_is_a_report_with_a_failure(tmp_path: Path) -> None:
    stuck = (*made.STARTUP[:2], Phase(phase="load drafter", start_s=9.9, end_s=None))
    told = made.summary(
        cells=(
            made.cell("baseline"),
            made.cell(
                "speculative",
                status="failed",
                metrics=None,
                acceptance=None,
                integrity=None,
                startup=stuck,
            ),
        ),
        comparisons=(),
        failures=("reference: died while it loaded the drafter (log: engine.log)",),
    )
    made.write_run(tmp_path, told)
    (tmp_path / "cells" / told.cells[1].cell_id / "requests.parquet").unlink()
    reader = Reader(write_report(tmp_path).read_text("utf-8"))
    assert "reference: no verdict, 50.0 output tokens/s without speculation" in reader.text("p")
    assert "died while it loaded the drafter" in reader.text("li")
    assert "no readable requests.parquet" in reader.text("li")
    names = [str(f["id"]) for f in reader.all("figure")]
    assert "fig-acceptance" not in names and "fig-throughput" in names
    alts = [d["aria-label"] or "" for d in reader.all("div") if d.get("role") == "img"]
    assert "load drafter did not end" in alts[-1]


def test_failed_requests_are_counted_by_message(tmp_path: Path) -> None:
    told = made.summary(
        cells=(made.cell("baseline", status="partial"), made.cell("speculative")), comparisons=()
    )
    _, reader = report(tmp_path, told)
    assert "5 requests of 48 failed: connection closed" in reader.text("li")


@pytest.mark.parametrize("name", ["summary.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["gone", "cut", "foreign", "empty"])
def test_a_damaged_file_is_a_caution(tmp_path: Path, name: str, damage: str) -> None:
    made.write_run(tmp_path, made.summary())
    path = tmp_path / name
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:100])
    elif damage == "foreign":
        path.write_text('{"something": [1, 2]}')
    else:
        path.write_text("")
    reader = Reader(write_report(tmp_path).read_text("utf-8"))
    said = f"{name} is missing" if damage == "gone" else f"{name} could not be read"
    assert said in reader.text("li")
    assert "fig-gaps-reference-concurrency-1" in [f["id"] for f in reader.all("figure")] or (
        name == "summary.json"
    )
    if name == "manifest.json":
        assert "1.24x" in reader.text("p") and "manifest is missing" in reader.text("p")


def test_damaged_cells_are_cautions(tmp_path: Path) -> None:
    told = made.summary()
    made.write_run(tmp_path, told)
    folders = [tmp_path / "cells" / c.cell_id for c in told.cells]
    (folders[0] / "requests.parquet").write_bytes(b"PAR1 not really")
    pq.write_table(pa.table({"status": ["ok"]}), folders[1] / "requests.parquet")
    (folders[2] / "timeline.json").write_text("[]")
    (folders[3] / "counters.json").unlink()
    reader = Reader(write_report(tmp_path).read_text("utf-8"))
    notes = reader.text("li")
    assert f"{folders[0].name}/requests.parquet could not be read" in notes
    assert f"{folders[1].name}/requests.parquet could not be read: " in notes
    assert f"{folders[2].name}/timeline.json could not be read" in notes


def test_nan_and_nothing_are_dashes(tmp_path: Path) -> None:
    told = made.summary(
        cells=(made.cell("baseline", figures=made.metrics(None, ttft=None, tpot=None)),),
        comparisons=(made.comparison("output_tokens_per_s", None, None, None, "undecided"),),
    )
    made.write_run(tmp_path, told)
    plain = json.loads((tmp_path / "summary.json").read_text("utf-8"))
    plain["cells"][0]["metrics"]["output_tokens_per_s"] = math.nan
    plain["comparisons"][0]["ci_low"] = math.inf
    (tmp_path / "summary.json").write_text(json.dumps(plain))
    reader = Reader(write_report(tmp_path).read_text("utf-8"))
    cells = [text for tag, text in reader.texts if tag == "td"]
    assert "–" in cells
    assert not {"nan", "None", "inf", "0.00x"} & set(cells)
    assert "no verdict" in reader.text("p")


def test_an_empty_run_is_a_page_that_says_so(tmp_path: Path) -> None:
    _, reader = report(tmp_path, made.summary(cells=(), comparisons=(), cautions=()))
    assert "Nothing was measured" in reader.text("p")
    assert reader.all("figure") == []


def test_a_folder_that_is_no_run_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a run's folder"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_markdown_escapes() -> None:
    assert escape("a|b\n<c> *d* [e](f) `g` & #") == (
        "a\\|b &lt;c&gt; \\*d\\* \\[e\\](f) \\`g\\` &amp; \\#"
    )
    assert fence("x ``` y") == "````\nx ``` y\n````"


def test_a_page_that_cannot_be_written_leaves_no_half_of_it(tmp_path: Path) -> None:
    (tmp_path / "report.html" / "in the way").mkdir(parents=True)
    with pytest.raises(OSError):
        write_whole(tmp_path / "report.html", "page")
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
