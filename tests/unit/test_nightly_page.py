"""A night's page in a real headless Chromium: what a reader sees, sorts and can reach."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nightly_points as made
import pytest
from chromium import axe, browser, opened

from harness.nightly.folders import NightFolder
from harness.nightly.outputs import write_outputs
from harness.nightly.records import GateResult
from harness.nightly.series import Series, series_of

NIGHTS, LOST, UNMEASURED = 60, 57, (20, 21, 22)
FIGURES = ((made.SPEED, 100.0), ("acceptance_length", 2.4), ("ttft_s.mean", 0.08),
           ("tpot_s.mean", 0.012), ("e2el_s.mean", 1.9), ("startup_s", 41.0))  # fmt: skip
PHONE, DESK = 390, 1280
THEMES = ("light", "dark")


def measured(entry: str, loss: float) -> list[Series]:
    """Six figures over sixty nights; the first loses so much in the last three."""
    kept = [
        made.kept(
            i,
            [
                made.point(
                    level * (1 + 0.01 * ((7 * i + j) % 5 - 2))
                    * (1 - loss if i >= LOST and name == made.SPEED else 1),
                    name,
                )
                for j, (name, level) in enumerate(FIGURES)
            ],
            entry=entry,
        )
        for i in range(NIGHTS)
        if i not in UNMEASURED
    ]  # fmt: skip
    return list(series_of(entry, kept, "d").values())


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a night with one regression among twelve series."""
    series = [*measured("chat", 0.06), *measured("code", 0.0)]
    lost = series[0].name
    told = made.finding(
        series=lost,
        first_bad=made.night_name(LOST),
        found=made.night_name(NIGHTS - 1),
        last_good=made.night_name(LOST - 1),
        text=f"{lost} fell by 6.0%",
        changed=("vllm: 0.31.0 -> 0.32.0", f"git commit: {'a' * 40} -> {'b' * 40}"),
    )
    gates = tuple(
        GateResult(series=s.name, entry=s.entry, rule="acceptance_length >= 2", value=2.4,
                   bound=2.0, status="pass", text="kept")
        for s in series if s.metric == "acceptance_length"
    )  # fmt: skip
    entries = (made.state("chat"), made.state("code"))
    night = made.night(
        NIGHTS - 1, entries=entries, findings=(told,), gates=gates, notes=("a note",), exit_code=1
    )
    folder = NightFolder(tmp_path_factory.mktemp("nights") / night.night)
    folder.path.mkdir()
    baselines = {s.name: s.readings[0].value for s in series}
    write_outputs(folder, night, series, baselines, (made.SPEED, "startup_s"), {})
    return folder.index


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as running:
        yield running


@pytest.mark.parametrize("scheme", THEMES)
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_axe_finds_nothing_serious_and_nothing_sticks_out(
    chromium: Any, page: Path, scheme: str, width: int
) -> None:
    with opened(chromium, page, scheme=scheme, width=width) as reader:
        assert reader.complaints == []
        assert [url for url in reader.asked if not url.startswith("data:")] == [page.as_uri()]
        assert reader.look("document.documentElement.scrollWidth") <= width
        reader.look(axe() + "; undefined")
        found = reader.look("axe.run(document, {resultTypes: ['violations']})")
    told = [
        (rule["id"], rule["nodes"][0]["target"], rule["nodes"][0]["failureSummary"])
        for rule in found["violations"]
    ]
    assert told == []
    assert len(found["passes"]) > 15  # it did look


def test_the_series_sort_and_the_change_comes_first(chromium: Any, page: Path) -> None:
    with opened(chromium, page) as reader:
        heads = reader.look(
            "[...document.querySelectorAll('#series th')].map((th) => th.textContent)"
        )
        assert reader.page.locator("#series th button").count() == len(heads)
        reader.page.locator("#series th button").nth(heads.index("to baseline")).click()
        first = reader.page.locator("#series tbody tr").first.text_content()
    assert first is not None and first.startswith(f"chat/vllm/speculative/c8/{made.SPEED}")


def test_nights_that_were_not_measured_are_a_hole(chromium: Any, page: Path) -> None:
    with opened(chromium, page) as reader:
        lines = reader.look("document.querySelector('#series .spark').children.length")
        texts = reader.page.locator("#trends figure").first.text_content()
    assert lines == 3  # two lines and the dot of the last night
    assert texts is not None and f"n = {NIGHTS - len(UNMEASURED)}" in texts
