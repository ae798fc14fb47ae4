"""What a night leaves for people and machines: page, Markdown, JUnit XML, JSON, sparklines."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nightly_points import SPEED, finding, kept, night, night_name, point, state

from harness.nightly.folders import NightFolder
from harness.nightly.junit import to_junit
from harness.nightly.outputs import append_step_summary, message_of, write_outputs
from harness.nightly.records import Attempt, GateResult, Night
from harness.nightly.series import Series, series_of
from harness.nightly.spark import sparkline
from harness.nightly.view import view_of

NASTY = "<b>&\"'|`*_[x](y)\x00\x1b[31m\u2028é"


def gate(status: Any = "fail", **fields: Any) -> GateResult:
    values: dict[str, Any] = {
        "series": f"chat/vllm/speculative/c8/{SPEED}", "entry": "chat", "rule": "x >= 1",
        "value": 0.5, "bound": 1.0, "status": status, "text": "0.5 is below 1",
    }  # fmt: skip
    return GateResult(**{**values, **fields})


def whole() -> Night:
    """A night with everything that can be in one."""
    broken = Attempt(begun="2026-09-01T00:00:00+00:00", exit_code=3, seconds=5.0, error=NASTY)
    return night(
        9,
        entries=(
            state(),
            state("broken", status="failed", attempt=broken),
            state("late", status="left_out", attempt=None, why="2.0 min of the time budget left"),
        ),
        findings=(
            finding(text=f"it fell {NASTY}", changed=(f"vllm: {NASTY}",)),
            finding(series="chat/a", status="refuted"),
            finding(series="chat/b", status="unconfirmed", source="baseline"),
            finding(series="chat/c", status="known", reason="issue 1"),
            finding(series="chat/d", direction="better"),
            finding(series="chat/e", status="machine"),
        ),
        gates=(gate(), gate("pass"), gate("unknown", value=None, bound=None)),
        notes=("chat: pinned",),
        exit_code=1,
    )


def series(n: int = 12) -> list[Series]:
    nights = [kept(i, [point(100.0 + i), point(2.0, "acceptance_length")]) for i in range(n)]
    return list(series_of("chat", nights, "d").values())


class Page(HTMLParser):
    """Counts tags and collects ids, links and what would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        told = dict(attrs)
        if told.get("id"):
            self.ids.append(str(told["id"]))
        self.links += [str(told[k]) for k in ("href", "src") if told.get(k)]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    folder = NightFolder(tmp_path / night_name(9))
    folder.path.mkdir()
    run = tmp_path / "run-1"
    run.mkdir()
    (run / "report.html").write_text("x")
    base = {s.name: 100.0 for s in series()}
    write_outputs(folder, whole(), series(), base, [SPEED, "acceptance_length"], {"chat": run})
    return folder.path


def test_the_page_stands_by_itself(written: Path) -> None:
    text = (written / "index.html").read_text()
    page = Page()
    page.feed(text)
    assert len(page.ids) == len(set(page.ids))
    anchors = [link for link in page.links if link.startswith("#") and link[1:] in page.ids]
    assert len(anchors) >= 6
    outside = [x for x in page.links if not x.startswith(("#", "data:", "../run-1/report.html"))]
    assert outside == []
    assert "../run-1/report.html" in page.links
    assert "<b>&" not in text and "&lt;b&gt;&amp;" in text
    assert 'content="default-src' in text
    assert page.tags.count("figure") == 2
    assert text.count('class="spark"') == 2
    assert len(text.encode()) < 5_000_000


def test_every_figure_has_words(written: Path) -> None:
    text = (written / "index.html").read_text()
    labels = re.findall(r'class="scroll" role="img" aria-label="([^"]+)"', text)
    assert len(labels) == 2 and all("over 12 nights" in label for label in labels)
    assert sorted(p.suffix for p in (written / "plots").iterdir()) == [".svg", ".svg"]


def test_the_markdown_says_the_same(written: Path) -> None:
    text = (written / "night.md").read_text()
    assert text.startswith(f"# s, night of {night_name(9)}: regression\n")
    for heading in ("Regressions and gates", "In doubt", "Known", "Left out", "Entries", "Gates"):
        assert f"\n## {heading}\n" in text
    assert "<b>" not in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", r)) for r in rows if "---" in r}) <= 2


def test_the_findings_are_whole(written: Path) -> None:
    told = json.loads((written / "findings.json").read_text())
    assert told["exit_code"] == 1 and len(told["findings"]) == 6 and len(told["gates"]) == 3
    assert told["findings"][0]["changed"] == [f"vllm: {NASTY}"]


# What consumers of the format (Jenkins' junit-10.xsd and its like) allow.
ALLOWED = {
    "testsuites": {"name", "tests", "failures", "errors", "time", "disabled"},
    "testsuite": {
        *("name", "tests", "failures", "errors", "skipped", "time", "timestamp", "hostname"),
        *("id", "package", "disabled"),
    },
    "testcase": {"name", "classname", "time", "status", "assertions"},
    "failure": {"message", "type"},
    "error": {"message", "type"},
    "skipped": {"message"},
}  # fmt: skip
CHILDREN = {
    "testsuites": {"testsuite"},
    "testsuite": {"testcase"},
    "testcase": {"failure", "error", "skipped"},
    "failure": set(),
    "error": set(),
    "skipped": set(),
}


def check_junit(text: str) -> ElementTree.Element:
    """Assert the shape of JUnit XML, and that every count is the number of what is counted."""
    root = ElementTree.fromstring(text)
    assert root.tag == "testsuites"
    for element in root.iter():
        assert set(element.attrib) <= ALLOWED[element.tag], element.tag
        assert {child.tag for child in element} <= CHILDREN[element.tag], element.tag
        if element.tag in ("testsuite", "testcase"):
            assert element.get("name") and float(element.get("time", "0")) >= 0
        if element.tag == "testcase":
            assert element.get("classname") and len(element) <= 1
    for suite in root:
        assert int(suite.get("tests", "")) == len(suite.findall("testcase"))
        for key, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            assert int(suite.get(key, "")) == len(suite.findall(f"testcase/{tag}"))
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", suite.get("timestamp", ""))
    for key, below in (("failures", "/failure"), ("errors", "/error"), ("tests", "")):
        total = len(root.findall(f"testsuite/testcase{below}"))
        assert int(root.get(key, "")) == total
    return root


def test_junit_has_the_shape_that_is_read_everywhere() -> None:
    root = check_junit(to_junit(whole()))
    failures = root.findall("testsuite/testcase/failure")
    assert len(failures) == 2  # one regression, one gate
    assert len(root.findall("testsuite/testcase/error")) == 1
    assert "\x00" not in to_junit(whole())


@given(st.text(max_size=60), st.text(max_size=60))
def test_no_text_breaks_the_xml(one: str, other: str) -> None:
    broken = Attempt(begun="2026-09-01T00:00:00+00:00", exit_code=3, error=one)
    entries = (state(status="failed", attempt=broken),)
    check_junit(
        to_junit(night(1, entries=entries, findings=(finding(text=other, changed=(one,)),)))
    )


@given(st.lists(st.none() | st.floats(-1e9, 1e9), max_size=60))
def test_a_sparkline_is_a_picture_within_its_frame(values: list[float | None]) -> None:
    drawn = sparkline(values, 'a "b" <c>')
    if all(v is None for v in values):
        assert drawn == ""
        return
    root = ElementTree.fromstring(drawn)
    places = [
        float(number)
        for line in root.findall("polyline")
        for pair in line.get("points", "").split()
        for number in pair.split(",")
    ]
    assert all(0 <= place <= 96 for place in places)
    assert root.get("aria-label") == 'a "b" <c>'
    assert len(root.findall("circle")) == 1


def test_the_message_is_short_and_says_why() -> None:
    told = message_of(view_of(whole(), {}))
    assert told.splitlines()[0].startswith("s, night of")
    assert "1 regression confirmed on fresh blocks and 1 gate not kept." in told
    assert "vllm:" in told


def test_a_step_summary_that_cannot_be_written_is_a_line(tmp_path: Path) -> None:
    view = view_of(whole(), {})
    assert append_step_summary(view, {}) is None
    said = append_step_summary(view, {"GITHUB_STEP_SUMMARY": str(tmp_path)})
    assert said is not None and said.startswith("step summary: not written")


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4])
def test_every_end_has_a_name_and_a_colour(code: int) -> None:
    view = view_of(night(1, exit_code=code), {})
    assert view.badge and view.standing
