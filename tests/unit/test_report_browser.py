"""The report in a real headless Chromium: what a reader sees, hears of, prints and cannot miss."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import report_run as made
from chromium import axe, browser, opened

from harness.records import LoadPoint
from harness.report.html import write_report
from harness.report.side import write_page

MOST_BYTES = 5_000_000
PHONE, DESK = 390, 1280
PRINTED, LANDSCAPE = 703, 1031
"""CSS pixels across an A4 page between its margins."""
THEMES = ("light", "dark")
FIRST_PAINT = """() => new Promise(done => new PerformanceObserver(list => {
    const found = list.getEntriesByName("first-contentful-paint");
    if (found.length) done(found[0].startTime);
}).observe({type: "paint", buffered: true}))"""
"""Milliseconds. A promise, for the page's policy allows no code of strings to wait by."""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory, repo: Path) -> Path:
    """The page of the published run, which is a real one."""
    folder = tmp_path_factory.mktemp("pages") / "example"
    shutil.copytree(repo / "results" / "example", folder)
    return write_report(folder)


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory, example: Path) -> Path:
    """The page of the published run and another."""
    other = tmp_path_factory.mktemp("pages") / "other"
    made.write_run(other, made.summary())
    write_report(other)
    return write_page([example.parent, other], tmp_path_factory.mktemp("pages") / "side")


@pytest.fixture(params=["example", "several"])
def page(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("scheme", THEMES)
def test_it_opens_without_a_complaint_and_asks_for_nothing(
    chromium: Any, page: Path, scheme: str
) -> None:
    with opened(chromium, page, scheme=scheme) as reader:
        reader.page.wait_for_load_state("networkidle")
        assert reader.complaints == []
        assert [url for url in reader.asked if not url.startswith("data:")] == [page.as_uri()]
    assert page.stat().st_size < MOST_BYTES


def test_every_figure_has_a_size_and_a_text(chromium: Any, page: Path) -> None:
    with opened(chromium, page) as reader:
        figures = reader.look(
            """[...document.querySelectorAll("figure")].map((figure) => {
                const box = figure.querySelector("svg").getBoundingClientRect();
                const image = figure.querySelector("[role=img]");
                const letters = [...figure.querySelectorAll("svg text")]
                    .map((text) => text.getBoundingClientRect().height).filter(Boolean);
                return {id: figure.id, width: box.width, height: box.height,
                        text: figure.querySelector("svg").textContent,
                        panels: figure.querySelectorAll("svg [id*='-axes_']").length,
                        alt: image.getAttribute("aria-label"), least: Math.min(...letters),
                        caption: figure.querySelector("figcaption").textContent};
            })"""
        )
    assert len(figures) >= 8
    for figure in figures:
        assert figure["width"] > 300 and figure["height"] > 120, figure
        assert figure["least"] > 8, figure  # the smallest letters can be read
        assert len(figure["alt"]) > 40 and re.search(r"\d", figure["alt"]), figure
        assert len(figure["caption"]) > 30
        told = len(re.findall(r"\bn = \d", figure["text"]))
        assert told >= figure["panels"] > 0, figure  # every axes say of how many they are


def column(reader: Any, table: str, number: int) -> list[str]:
    found: list[str] = reader.look(
        f"""[...document.querySelectorAll("{table} tbody tr")].filter((row) => !row.hidden)
            .map((row) => row.cells[{number}].textContent)"""
    )
    return found


def test_a_long_table_sorts(chromium: Any, example: Path) -> None:
    with opened(chromium, example) as reader:
        heads = reader.look(
            """[...document.querySelectorAll("#cells th")].map((th) => th.textContent)"""
        )
        number = heads.index("output tokens/s")
        button = reader.page.locator("#cells th button").nth(number)
        before = column(reader, "#cells", number)
        button.click()
        rising = column(reader, "#cells", number)
        assert rising != before
        assert [plain(v) for v in rising] == sorted(plain(v) for v in before)
        head = reader.page.locator("#cells th").nth(number)
        assert head.get_attribute("aria-sort") == "ascending"
        button.focus()
        reader.page.keyboard.press("Enter")
        assert column(reader, "#cells", number) == rising[::-1]
        assert head.get_attribute("aria-sort") == "descending"
        missing = heads.index("accepted")
        for _ in range(2):
            reader.page.locator("#cells th button").nth(missing).click()
            shown = column(reader, "#cells", missing)
            known = [text for text in shown if text != "\N{EN DASH}"]
            assert shown[: len(known)] == known and len(known) < len(shown)


def plain(text: str) -> float:
    return float(text.replace(",", ""))


def test_a_long_table_filters(chromium: Any, example: Path) -> None:
    with opened(chromium, example) as reader:
        every = column(reader, "#cells", 0)
        field = reader.page.get_by_label("Filter").last
        field.fill("SPECULATIVE c4")
        some = column(reader, "#cells", 0)
        assert some == [cell for cell in every if "speculative" in cell and "c4" in cell]
        assert 0 < len(some) < len(every)
        told = reader.page.locator("#cells output").text_content()
        assert told == f"{len(some)} of {len(every)} rows"
        field.fill("")
        assert column(reader, "#cells", 0) == every


def test_without_a_script_there_are_no_dead_controls(chromium: Any, example: Path) -> None:
    context = chromium.new_context(java_script_enabled=False)
    try:
        page = context.new_page()
        page.goto(example.as_uri())
        assert page.locator("button, input").count() == 0
        assert page.locator("#cells tbody tr").count() > 8
    finally:
        context.close()


def test_both_themes_are_drawn(chromium: Any, page: Path, tmp_path: Path) -> None:
    pictures, pages, inks = {}, {}, {}
    for scheme in THEMES:
        with opened(chromium, page, scheme=scheme) as reader:
            pictures[scheme] = reader.page.screenshot(path=tmp_path / f"{scheme}.png")
            pages[scheme] = brightness(
                reader.look("getComputedStyle(document.body).backgroundColor")
            )
            axis = "getComputedStyle(document.querySelector('figure svg text')).fill"
            inks[scheme] = brightness(reader.look(axis))
    assert pictures["light"] != pictures["dark"]
    assert pages["light"] > 0.9 and pages["dark"] < 0.15
    assert inks["light"] < 0.3 and inks["dark"] > 0.7  # figures follow the page


def brightness(colour: str) -> float:
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 765


def test_it_prints(chromium: Any, page: Path) -> None:
    with opened(chromium, page, scheme="dark", width=PRINTED) as reader:
        document = reader.page.pdf(prefer_css_page_size=True)
        assert document.startswith(b"%PDF")
        assert len(re.findall(rb"/Type\s*/Page\b", document)) > 3
        folded = reader.page.locator("details:not([open])").count()
        reader.page.emulate_media(media="print", color_scheme="dark")
        reader.look("dispatchEvent(new Event('beforeprint'))")
        assert reader.page.locator("details:not([open])").count() == 0
        assert not reader.page.locator("nav").first.is_visible()
        assert brightness(reader.look("getComputedStyle(document.body).backgroundColor")) > 0.9
        assert reader.look(cut_off(":not(.landscape *)")) == []
        reader.page.set_viewport_size({"width": LANDSCAPE, "height": 700})
        assert reader.look(cut_off(".landscape *")) == []
        reader.look("dispatchEvent(new Event('afterprint'))")
        assert reader.page.locator("details:not([open])").count() == folded


def cut_off(which: str) -> str:
    """A script that finds what is wider than its place, of the boxes that `which` selects."""
    return f"""[...document.querySelectorAll(".scroll, pre")]
        .filter((box) => box.matches("{which}") && box.scrollWidth > box.clientWidth + 1)
        .map((box) => [box.getAttribute("aria-label"), box.scrollWidth, box.clientWidth])"""


@pytest.mark.parametrize("width", [320, PHONE, 768])
def test_on_a_phone_nothing_sticks_out(chromium: Any, page: Path, width: int) -> None:
    with opened(chromium, page, width=width) as reader:
        assert reader.look("document.documentElement.scrollWidth") <= width
        reader.look("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
        assert reader.look("document.documentElement.scrollWidth") <= width
        small = reader.look(
            "parseFloat(getComputedStyle(document.querySelector('.verdict p')).fontSize)"
        )
        assert small >= 15


@pytest.mark.parametrize("scheme", THEMES)
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_axe_finds_nothing_serious(chromium: Any, page: Path, scheme: str, width: int) -> None:
    with opened(chromium, page, scheme=scheme, width=width) as reader:
        reader.look("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
        reader.look(axe() + "; undefined")
        found = reader.look("axe.run(document, {resultTypes: ['violations']})")
    told = [
        (rule["id"], rule["impact"], rule["nodes"][0]["target"], rule["nodes"][0]["failureSummary"])
        for rule in found["violations"]
        if rule["impact"] in ("serious", "critical")
    ]
    assert told == []
    assert len(found["passes"]) > 15  # it did look


def test_hostile_names_stay_text(chromium: Any, tmp_path: Path) -> None:
    bad = "<img src=x onerror=alert(1)>" + "W" * 200
    told = made.summary(title=bad, failures=(bad,))
    made.write_run(tmp_path, told)
    with opened(chromium, write_report(tmp_path), width=PHONE) as reader:
        assert reader.complaints == [] and len(reader.asked) == 1
        assert reader.page.locator("img").count() == 0
        assert reader.look("document.documentElement.scrollWidth") <= PHONE


def many_loads(folder: Path, loads: int = 8, repeats: int = 3) -> Path:
    """A run of two engines at many loads: as long a page as there is."""
    points = [LoadPoint(mode="closed", concurrency=2**i, num_requests=24) for i in range(loads)]
    cells, comparisons = [], []
    for engine in ("vllm", "sglang"):
        for load in points:
            cells += [
                made.cell(v, r, engine=engine, load=load)
                for r in range(repeats)
                for v in ("baseline", "speculative")
            ]
            comparisons += [
                made.comparison(engine=engine, load=load),
                made.comparison("ttft_s", 1.4, 1.1, 1.8, "worse", engine=engine, load=load),
            ]
    told = made.summary(cells=tuple(cells), comparisons=tuple(comparisons))
    made.write_run(folder, msgspec.structs.replace(told, cautions=()), n=12)
    return write_report(folder)


@pytest.mark.full
def test_the_longest_page_is_small_and_is_there_at_once(
    chromium: Any, example: Path, tmp_path: Path
) -> None:
    page = many_loads(tmp_path / "run")
    assert page.stat().st_size < MOST_BYTES
    painted = {}
    for path in (example, page):
        took = []
        for _ in range(5):
            with opened(chromium, path) as reader:
                took.append(reader.look(FIRST_PAINT))
        painted[path.parent.name] = min(took)
    print(f"\nfirst contentful paint, ms: {json.dumps(painted)}; {page.stat().st_size:,} bytes")
    assert max(painted.values()) < 1000
