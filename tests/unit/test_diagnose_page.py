"""The page of a diagnosis and its Markdown: whole, escaped, small; and in a real Chromium."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diagnose_cases as made
import msgspec
import pytest
from chromium import axe, browser, opened
from diagnose_any import DOSSIERS
from hypothesis import HealthCheck, given, settings

from harness.diagnose.causes import CAUSES
from harness.diagnose.page.figures import waterfall
from harness.diagnose.page.markdown import to_markdown
from harness.diagnose.page.page import render_page
from harness.diagnose.records import Diagnosis, Dossier, Share
from harness.diagnose.rules.gap import TITLES, losses
from harness.diagnose.story import Outcome, with_mending
from harness.diagnose.verdict import WITH_FIX, conclude
from harness.diagnose.view import view_of
from harness.progress import PlainProgress

PHONE, DESK = 390, 1280
THEMES = ("light", "dark")
SHOWN = ("layers_shifted", "states_moved", "norm_output", "drafter_cache")
BAD = "<script>alert(1)</script>|`*_[x](y)" + "W" * 200


def told(dossier: Dossier) -> tuple[str, str]:
    diagnosis = conclude(dossier)
    return render_page(dossier, diagnosis), to_markdown(dossier, diagnosis)


@pytest.mark.parametrize("cause", ["none", *SHOWN])
def test_both_say_the_verdict_the_remedy_and_the_evidence(cause: str) -> None:
    dossier = made.healthy() if cause == "none" else made.CASES[cause]()
    dossier = made.times(dossier, took_s={"states": 12.34}, skipped={"toggles": "no such switch"})
    found = conclude(dossier)
    page, text = told(dossier)
    plain = re.sub(r"\\(.)", r"\1", text)
    assert len(page.encode()) < 1_000_000
    for share in found.waterfall:
        assert share.name in page and share.name in plain
    for both in (page.replace("&#39;", "'").replace("&#34;", '"'), plain):
        assert found.verdict in both.replace("&lt;", "<").replace("&amp;", "&")
        assert "12.3" in both and "no such switch" in both
        if cause != "none" and found.ranked:
            assert found.ranked[0].remedy in both
            assert found.ranked[0].evidence_for[0] in both
    assert set(re.findall(r"https?://[\w.]+", page)) <= {"http://www.w3.org"}


def test_what_is_excluded_is_counted_and_listed_by_stage() -> None:
    dossier = made.CASES["layers_shifted"]()
    page, text = told(dossier)
    out = [r for r in conclude(dossier).ranked if r.strength == "excluded"]
    assert len(out) > 20
    assert f"Excluded: {len(out)} causes." in text
    listed = text.partition(" causes.")[2].partition("##")[0].replace("\\", "").split("\n")
    names = {line.partition(":")[0]: line.partition(": ")[2].split(", ") for line in listed}
    assert sorted(names["- states"]) == sorted(
        r.cause for r in out if CAUSES[r.cause].stage == "states"
    )
    assert {r.cause for r in out} == {name for own in names.values() for name in own} - {""}
    assert not any(r.title in "".join(listed) for r in out)
    folded = page.partition(f"<summary>Excluded: {len(out)} causes</summary>")[2]
    folded = folded.partition("</details>")[0].replace("&#39;", "'")
    assert all(r.title in folded for r in out) and folded.count("<li>") == len(out) + len(names) - 1


def test_causes_that_nothing_speaks_for_are_folded_and_named_beside_the_excluded() -> None:
    """Evidence that could not tell is no rival of a cause that is shown."""
    found = conclude(made.CASES["layers_shifted"]())
    unsure = found.ranked[-1]
    changed = msgspec.structs.replace(
        unsure, strength="possible", evidence_against=(), undecided=("two rows: that cannot tell",)
    )
    diagnosis = made.times(found, ranked=(*found.ranked[:-1], changed))
    dossier = made.CASES["layers_shifted"]()
    text = to_markdown(dossier, diagnosis).replace("\\", "")
    assert f"Not excluded, with nothing for it: {unsure.cause}." in text
    assert f"### {unsure.title}" not in text
    page = render_page(dossier, diagnosis)
    table, _, folded = page.partition(
        "<summary>Not excluded, with nothing for it: 1 cause</summary>"
    )
    assert "two rows" not in table
    assert "two rows: that cannot tell" in folded.partition("</details>")[0]


def test_answers_without_a_whole_trace_are_told() -> None:
    healthy = made.healthy()
    odd = made.times(healthy, observed=made.times(healthy.observed, untraced=3))
    assert all("the trace of 3 answers is missing or ends early" in form for form in told(odd))
    assert all("ends early" not in form for form in told(healthy))


def test_every_figure_is_there_and_says_what_it_shows() -> None:
    page, _ = told(made.handed(made.bad("hidden[{1}]")))
    labels = dict(re.findall(r'id="fig-([a-z-]+)">\s*<div[^>]*aria-label="([^"]*)"', page))
    assert set(labels) == {"waterfall", "acceptance", "match-matrix"}
    assert "observed 1.44" in labels["waterfall"]
    assert "slot 0 is nearest to hidden[3]" in labels["match-matrix"]
    assert all(re.search(r"\d", label) for label in labels.values())


def test_a_figure_hatches_no_loss_that_it_writes_as_none() -> None:
    diagnosis = conclude(made.healthy())
    for amount, hatched in ((0.004, False), (0.006, True)):
        steps = (
            Share(name="expected", length=2.0, lost=None),
            Share(name="observed", length=2.0 - amount, lost=amount),
        )
        drawn = waterfall(made.healthy(), made.times(diagnosis, waterfall=steps))
        assert drawn is not None
        assert ("<pattern" in drawn.svg) is hatched


def test_a_figure_says_how_many_steps_each_of_its_lines_is_of() -> None:
    dossier = made.healthy()
    assert dossier.observed is not None and dossier.expected is not None
    page, _ = told(dossier)
    for name, found in (("expected", dossier.expected), ("observed", dossier.observed)):
        assert f"{name}, {found.acceptance.counts.drafts:,d} steps" in page
    assert f"(n = {dossier.observed.acceptance.counts.drafts:,d} steps observed)" in page


def test_what_fix_did_is_told_and_it_is_not_asked_for_again(tmp_path: Path) -> None:
    dossier = made.CASES["layers_shifted"]()
    found = conclude(dossier)
    assert WITH_FIX in found.next_experiments
    assert all("write the corrected copy" in form for form in told(dossier))
    ended = Outcome(folder=tmp_path, dossier=dossier, diagnosis=found)
    after = with_mending(ended, ["mended: the layer ids", "proven: 20%, now 62%"], PlainProgress())
    assert after.diagnosis.cause == found.cause and not after.diagnosis.next_experiments
    stored = msgspec.json.decode((tmp_path / "diagnosis.json").read_bytes(), type=Diagnosis)
    assert stored == after.diagnosis
    for name in ("diagnosis.html", "diagnosis.md"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert "mended: the layer ids" in text and "proven: 20%, now 62%" in text
        assert "write the corrected copy" not in text


def test_a_loss_within_its_error_is_told_as_one() -> None:
    steps = (
        Share(name="expected", length=2.10, lost=None, steps=1200),
        Share(name="states", length=2.08, lost=0.02, error=0.05, steps=480),
        Share(name="observed", length=1.50, lost=0.58, error=0.05, steps=90),
    )
    diagnosis = made.times(conclude(made.healthy()), waterfall=steps)
    rows = view_of(made.healthy(), diagnosis).waterfall
    assert [row[3:] for row in rows] == [
        ("", "1,200"),
        ("0.02, within its error", "480"),
        ("0.58", "90"),
    ]
    drawn = waterfall(made.healthy(), diagnosis)
    assert drawn is not None
    assert all(f"{n} steps" in drawn.svg for n in ("1,200", "480", "90"))
    assert "(-0.58)" in drawn.svg and "(-0.02)" not in drawn.svg


def test_what_is_surely_lost_is_never_within_its_error() -> None:
    seen = set()
    for case in made.CASES.values():
        dossier = case()
        sure = {TITLES[name] for name in losses(dossier)}
        told_sure = {share.name for share in conclude(dossier).waterfall if share.sure}
        assert sure <= told_sure
        seen |= sure
    assert len(seen) > 1  # of losses in more than one place


def test_foreign_text_is_escaped() -> None:
    dossier = made.audited(made.healthy(), "rope")
    subject = made.times(dossier.subject, target=BAD, drafter=BAD)
    dossier = made.times(dossier, subject=subject, skipped={"sampling": BAD})
    page, text = told(dossier)
    assert "<script>alert" not in page and "<script>alert" not in text
    assert all("|`" not in line for line in text.splitlines())


def test_what_is_missing_is_no_error() -> None:
    empty = Dossier(subject=made.healthy().subject)
    page, text = told(empty)
    assert "No fault was found" in page and "No fault was found" in text
    bare = Diagnosis(
        verdict="A verdict.",
        cause="unknown",
        stage="somewhere",
        collapse=True,
        ranked=(),
        waterfall=(Share(name="expected", length=2.0, lost=None),),
    )
    assert "A verdict." in render_page(empty, bare) and "A verdict." in to_markdown(empty, bare)


def test_a_length_that_no_step_brings_is_none() -> None:
    healthy = made.healthy()
    assert healthy.observed is not None
    acceptance = made.times(healthy.observed.acceptance, length=1.7e308)
    odd = made.times(healthy, observed=made.times(healthy.observed, acceptance=acceptance))
    assert "observed" not in {share.name for share in conclude(odd).waterfall}
    assert all("Where it is lost" in form for form in told(odd))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(DOSSIERS)
def test_any_dossier_is_told(dossier: Dossier) -> None:
    page, text = told(dossier)
    assert page.rstrip().endswith("</html>") and text.startswith("# Diagnosis")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as running:
        yield running


@pytest.fixture(scope="module", params=["layers_shifted", "states_moved"])
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    dossier = made.audited(made.CASES[request.param](), "rope", "warning")
    folder = tmp_path_factory.mktemp("pages")
    path = folder / "diagnosis.html"
    path.write_text(told(dossier)[0], encoding="utf-8")
    return path


@pytest.mark.parametrize("scheme", THEMES)
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_axe_finds_nothing_and_nothing_sticks_out(
    chromium: Any, page: Path, scheme: str, width: int
) -> None:
    with opened(chromium, page, scheme=scheme, width=width) as reader:
        reader.page.wait_for_load_state("networkidle")
        assert reader.complaints == []
        assert [url for url in reader.asked if not url.startswith("data:")] == [page.as_uri()]
        reader.look("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
        assert reader.look("document.documentElement.scrollWidth") <= width
        reader.look(axe() + "; undefined")
        found = reader.look("axe.run(document, {resultTypes: ['violations']})")
    said = [
        (rule["id"], rule["nodes"][0]["target"], rule["nodes"][0]["failureSummary"])
        for rule in found["violations"]
    ]
    assert said == []
    assert len(found["passes"]) > 15  # it did look


def test_the_verdict_comes_first_and_figures_have_a_size(chromium: Any, page: Path) -> None:
    with opened(chromium, page, width=DESK) as reader:
        top = reader.look("document.querySelector('.verdict').getBoundingClientRect().top")
        boxes = reader.look(
            """[...document.querySelectorAll("figure svg")].map((svg) => {
                const box = svg.getBoundingClientRect(); return [box.width, box.height]; })"""
        )
        heads = reader.look(
            """[...document.querySelectorAll("h1, .verdict, h2")].map((e) => e.tagName)"""
        )
    assert top < 300 and heads[:2] == ["H1", "DIV"]
    assert len(boxes) == 3 and all(w > 300 and h > 100 for w, h in boxes)


def test_the_table_stands_beside_the_waterfall_with_room_around_it(
    chromium: Any, page: Path
) -> None:
    with opened(chromium, page, width=DESK) as reader:
        found = reader.look(
            """["#fig-waterfall", "#lost table", "#fig-acceptance"].map((name) => {
                const box = document.querySelector(name).getBoundingClientRect();
                return [box.top, box.bottom]; })"""
        )
    fall, table, profile = found
    assert fall[1] + 16 <= table[0] and table[1] + 16 <= profile[0]


def test_no_word_of_a_figure_is_cut(chromium: Any, tmp_path: Path) -> None:
    dossier = made.handed(made.bad("hidden[{1}]"))
    for name in ("expected", "observed"):
        found = getattr(dossier, name)
        counts = found.acceptance.counts
        many = made.times(
            counts,
            **{f: 10_000 * getattr(counts, f) for f in ("drafts", "drafted", "accepted")},
            per_position=tuple(10_000 * n for n in counts.per_position),
        )
        acceptance = made.times(found.acceptance, counts=many)
        dossier = made.times(dossier, **{name: made.times(found, acceptance=acceptance)})
    path = tmp_path / "diagnosis.html"
    path.write_text(told(dossier)[0], encoding="utf-8")
    with opened(chromium, path, width=DESK) as reader:
        texts = reader.look(
            """[...document.querySelectorAll("figure svg text")].map((text) => {
                const own = text.getBoundingClientRect();
                const all = text.closest("svg").getBoundingClientRect();
                return [text.textContent.trim(), Math.min(own.left - all.left,
                    all.right - own.right, own.top - all.top, all.bottom - own.bottom)]; })"""
        )
        heights = reader.look(
            """[...document.querySelectorAll("#fig-acceptance svg text")]
                .filter((text) => text.textContent.includes("n = "))
                .map((text) => text.getBoundingClientRect().height)"""
        )
        whole = reader.look(
            "document.querySelector('#fig-acceptance svg').getBoundingClientRect().height"
        )
    assert len(texts) > 40 and [name for name, room in texts if room < 0] == []
    # An axis is a little more than two thirds of the figure's height, a label no longer.
    assert len(heights) == 2 and max(heights) < 0.75 * whole
