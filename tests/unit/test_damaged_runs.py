"""A run's manifest or summary damaged in any place: one clear line from every reader of runs."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from harness import compare, stored
from harness.analyse.across.rows import Wanted
from harness.errors import HarnessError, UsageError
from harness.exchange import exporting
from harness.history.query import Query
from harness.history.store import open_history
from harness.measure.store import RunFolder
from harness.nightly import measuring
from harness.report.html import render_html
from harness.report.markdown import render_markdown
from harness.report.page import make_page
from harness.report.run_data import read_run
from harness.resume import Made, differences
from harness.run import request_in

RUN = Path(__file__).resolve().parents[2] / "results" / "example"
FILES = ("manifest.json", "summary.json")
WHOLE = {name: json.loads((RUN / name).read_bytes()) for name in FILES}
GONE = "gone"
VALUES = [
    *(None, True, 0, 5, -1, 1.5, 10**30, "", "x", GONE, [], [1], ["x"], {}),
    *({"a": 1}, {"a": {"b": 1}}),
]
Place = tuple[str, tuple[str | int, ...]]


def places(found: Any, above: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every place in a JSON value; of a list's items the first two."""
    if above:
        yield above
    items = found.items() if isinstance(found, dict) else []
    if isinstance(found, list):
        items = list(enumerate(found[:2]))
    for key, inside in items:
        yield from places(inside, (*above, key))


PLACES: list[Place] = [(name, place) for name in FILES for place in places(WHOLE[name])]


def damaged(at: Place, value: Any) -> dict[str, Any]:
    """Both files' contents, with `value` at the place; `GONE` takes it away."""
    told = copy.deepcopy(WHOLE)
    inside: Any = told[at[0]]
    for key in at[1][:-1]:
        inside = inside[key]
    if value == GONE:
        del inside[at[1][-1]]
    else:
        inside[at[1][-1]] = value
    return told


def history(run: Path) -> None:
    shutil.rmtree(run.parent / ".history", ignore_errors=True)
    open_history(run.parent).query(Query())


def export(run: Path) -> None:
    chosen = exporting.of_folders([run])
    for form in exporting.FORMATS:
        exporting.export_text(chosen, form)


def nightly(run: Path) -> None:
    measuring.figures(run, "s")
    measuring.blocks("a", run)


def page(run: Path) -> None:
    made = make_page(read_run(run), [], None)
    assert render_markdown(made) and render_html(made)


def resume(run: Path) -> None:
    folder = RunFolder(run)
    request_in(folder, folder.manifest())
    now = Made(
        environment={"gpus": [], "cores_usable": 2},
        versions={},
        git_commit=None,
        git_dirty=None,
        git_diff=None,
        engine_versions={"reference": {"torch": "1"}},
        digests={},
    )
    differences(folder.manifest(), now)


READERS: list[Callable[[Path], object]] = [
    lambda run: compare.compare([str(RUN), str(run)], Wanted(anyway=True)),
    lambda run: compare.compare([str(run), str(RUN)], Wanted()),
    history,
    export,
    nightly,
    page,
    resume,
    stored.analyse,  # the last: it makes the summary anew
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results") / "20260101-000000-reference-abcd"
    folder.mkdir()
    return folder


def check(run: Path, at: Place, value: Any) -> None:
    for name, told in damaged(at, value).items():
        (run / name).write_text(json.dumps(told))
    for read in READERS:
        with contextlib.suppress(HarnessError):
            read(run)


LONG = settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
PLAN = ("plan", "engines", "reference")


@LONG
@example(at=("manifest.json", ("plan", "models")), value=[])
@example(at=("manifest.json", ("plan", "request", "command")), value=[{"a": 1}])
@example(at=("manifest.json", (*PLAN, "compare")), value=GONE)
@example(at=("manifest.json", ("environment", "memory_bytes")), value=[1])
@example(at=("manifest.json", ("environment", "cores_usable")), value="x")
@example(at=("manifest.json", ("environment", "load_average")), value=["x"])
@given(at=st.sampled_from(PLACES), value=st.sampled_from(VALUES))
def test_no_damage_is_an_internal_error(run: Path, at: Place, value: Any) -> None:
    check(run, at, value)


@pytest.mark.full
@settings(LONG, max_examples=400)
@given(at=st.sampled_from(PLACES), value=st.sampled_from(VALUES))
def test_no_damage_of_many_is_an_internal_error(run: Path, at: Place, value: Any) -> None:
    check(run, at, value)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("plan", "models"), [], "plan.models cannot be read (an object is wanted, not a list)"),
        (("plan", "request", "urls"), 5, "plan.request.urls cannot be read"),
        (("environment", "cores_usable"), "two", "environment.cores_usable cannot be read"),
    ],
)
def test_the_place_is_named(run: Path, place: tuple[str, ...], value: Any, said: str) -> None:
    for name, told in damaged(("manifest.json", place), value).items():
        (run / name).write_text(json.dumps(told))
    with pytest.raises(UsageError) as error:
        compare.compare([str(RUN), str(run)], Wanted())
    assert said in str(error.value) and "manifest.json" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_in_a_run_s_place_is_told_in_words(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("x", encoding="utf-8")
    (tmp_path / "odd" / "summary.json").mkdir(parents=True)
    for read, said in (
        (
            lambda: compare.read_stored(tmp_path / "notes", "A"),
            "notes: not a folder; give the folder of a run",
        ),
        (RunFolder(tmp_path / "notes").manifest, "notes: not a folder; give the folder of a run"),
        (RunFolder(tmp_path / "gone").summary, "summary.json: no such file"),
        (RunFolder(tmp_path / "odd").summary, "summary.json: cannot be read: is a directory"),
    ):
        with pytest.raises(UsageError) as error:
            read()
        assert said in str(error.value) and "Errno" not in str(error.value)
