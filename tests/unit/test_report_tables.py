# ruff: noqa: RUF001 (an en dash is what the report shows)
"""The table on the terminal: its content, its width, and nothing but text where it is piped."""

from __future__ import annotations

import io
import re

import msgspec
import pytest
import report_run as made
from rich.console import Console

from harness.findings import Caution, Summary
from harness.records import Variant
from harness.report import tables
from harness.report.width import output_width


def lines_of(told: Summary, width: int = 100) -> list[str]:
    return tables.render_text(told, width).splitlines()


def line_with(lines: list[str], start: str) -> str:
    return next(line for line in lines if line.strip().startswith(start))


def figures(lines: list[str], start: str) -> list[str]:
    """The cells of a row behind its label, which two spaces or more part."""
    return re.split(r"\s{2,}", line_with(lines, start).strip())[1:]


def test_every_figure_is_there() -> None:
    lines = lines_of(made.summary())
    assert lines[0].startswith("With this drafter, reference is 1.24x (1.15–1.33)")
    speed = line_with(lines, "output tokens/s").split()
    assert speed == ["output", "tokens/s", "50.5", "62.6", "1.24x", "(1.15–1.33)", "better"]
    assert line_with(lines, "TTFT, mean, ms").split()[3:] == [
        "50.3", "51.3", "1.02x", "(0.96–1.08)", "undecided"
    ]  # fmt: skip
    assert "20.1" in line_with(lines, "TPOT, mean, ms")
    assert "2,060" in line_with(lines, "E2E latency, mean, ms")
    assert line_with(lines, "TTFT/TPOT/E2E, p50, ms").count("50.3 / 20.1 / 2,060") == 2
    assert line_with(lines, "TTFT/TPOT/E2E, p99, ms").count("106 / 42.2 / 4,327") == 2
    assert figures(lines, "acceptance rate") == ["–", "54.7%"]
    assert figures(lines, "acceptance length") == ["–", "2.64"]
    assert figures(lines, "accepted, by position") == ["–", "0.78 / 0.48 / 0.38"]
    assert figures(lines, "given the one before") == ["–", "0.78 / 0.62 / 0.79"]
    assert figures(lines, "identical outputs") == ["–", "48 of 48"]
    assert line_with(lines, "task accuracy").count("87.5% (n = 48)") == 2
    assert "few-blocks: 2 paired blocks: the interval is wide" in "\n".join(lines)
    assert "Do: Give more repeats, e.g. --set repeats=5." in "\n".join(lines)


@pytest.mark.parametrize("width", [100, 80])
def test_nothing_is_wider_than_asked(width: int) -> None:
    engine = "reference with a very long name indeed that goes on and on"
    told = made.summary(
        cells=tuple(made.cell(v, engine=engine) for v in ("baseline", "speculative"))
        + made.summary().cells,
        comparisons=(made.comparison(engine=engine), made.comparison()),
        failures=("x" * 500,),
        cautions=(Caution(code="c", text="long words " * 30, advice="more words " * 30),),
    )
    lines = lines_of(told, width)
    assert max(map(len, lines)) <= width
    assert any("1.24x (1.15–1.33)" in line for line in lines)


def test_80_columns_split_no_word_and_no_figure() -> None:
    categories = {name: made.category() for name in ("arithmetic", "long-context")}
    cells = tuple(
        msgspec.structs.replace(made.cell(v, engine=e, load=load), categories=categories)
        for e in ("reference", "vllm")
        for load in (made.C1, made.C4)
        for v in ("baseline", "speculative")
    )
    wide, narrow = (tables.render_text(made.summary(cells=cells), width) for width in (100, 80))
    assert max(map(len, narrow.splitlines())) <= 80
    known = {
        *wide.replace(",", "").split(),
        *wide.split(),
        "base",
        "spec.",
        "ok",
        "(TPOT",
        "in",
        "ms)",
    }
    assert {word for word in narrow.split() if word.strip("─") and word not in known} == set()
    lines = narrow.splitlines()
    assert figures(lines, "TTFT/TPOT/E2E, p99, ms") == ["106 / 42.2 / 4,327"] * 2
    assert figures(lines, "task accuracy") == ["87.5% (n = 24)"] * 2
    assert figures(lines, "arithmetic")[0] == "22 of 24"


@pytest.mark.parametrize(
    ("one", "absent"), [("baseline", "speculative"), ("speculative", "baseline")]
)
@pytest.mark.parametrize("width", [100, 80])
def test_a_variant_that_was_not_measured_has_no_column(
    one: Variant, absent: Variant, width: int
) -> None:
    cells = tuple(made.cell(one, load=load, integrity=None) for load in (made.C1, made.C4))
    lines = lines_of(made.summary(cells=cells, comparisons=(), cautions=()), width)
    assert any(one in line.split() for line in lines)
    body = "\n".join(lines[2:])
    assert not any(word in body for word in (absent, "ratio", "verdict", "identical", " –"))
    assert ("acceptance rate" in body) == (one == "speculative")


def test_missing_values_are_en_dashes() -> None:
    told = made.summary(
        cells=(
            made.cell("baseline", figures=made.metrics(None, ttft=None, tpot=None, accuracy=None)),
            made.cell(
                "speculative", status="failed", metrics=None, acceptance=None, integrity=None
            ),
        ),
        comparisons=(),
    )
    lines = lines_of(told)
    for start in ("output tokens/s", "TTFT,", "TPOT,", "E2E latency"):
        assert line_with(lines, start).split()[-4:] == ["–"] * 4
    for start in ("acceptance rate", "acceptance length", "accepted, by position", "identical"):
        assert line_with(lines, start).split()[-2:] == ["–"] * 2
    assert not any("nan" in line.lower() or "None" in line for line in lines)


def test_a_void_run_shows_numbers_and_withholds_verdicts() -> None:
    lines = lines_of(made.summary(void="client-bound"))
    row = line_with(lines, "output tokens/s")
    assert row.endswith("withheld") and "62.6" in row
    assert "better" not in "\n".join(lines)


def test_failed_requests_and_failures_are_shown() -> None:
    told = made.summary(
        cells=(
            made.cell("baseline", figures=made.metrics(failed=3)),
            made.cell("speculative", figures=made.metrics()),
        ),
        failures=("reference: died while serving (log: engine.log)",),
    )
    lines = lines_of(told)
    assert line_with(lines, "failed requests").split() == [
        "failed",
        "requests",
        "3",
        "of",
        "24",
        "0",
        "of",
        "24",
    ]
    assert "  reference: died while serving (log: engine.log)" in lines


def test_several_groups_begin_with_one_row_each() -> None:
    engines = ("reference", "vllm")
    cells = tuple(made.cell(v, engine=e) for e in engines for v in ("baseline", "speculative"))
    told = made.summary(
        cells=cells,
        comparisons=(made.comparison(), made.comparison(ratio=0.8, engine="vllm", verdict="worse")),
    )
    lines = lines_of(told)
    overview = line_with(lines, "vllm, concurrency 1  ")
    assert "0.80x" in overview and "54.7%" in overview and "24 of 24" in overview


def test_markup_in_names_and_messages_is_text() -> None:
    engine = "[red]x[/red]"
    told = made.summary(
        cells=(made.cell("baseline", engine=engine),),
        comparisons=(),
        failures=("[bold]not markup[/bold] [/]",),
    )
    text = tables.render_text(told)
    assert "[red]x[/red], concurrency 1" in text
    assert "[bold]not markup[/bold] [/]" in text


def test_piped_output_has_no_control_codes(capsys: pytest.CaptureFixture[str]) -> None:
    tables.print_summary(made.summary())
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert out.startswith("With this drafter")


@pytest.mark.parametrize(
    ("columns", "width"),
    [(None, 100), ("80", 80), ("140", 140), ("1", 40), ("0", 100), ("wide", 100), ("-5", 100)],
)
def test_a_pipe_is_as_wide_as_it_is_asked_to_be(
    columns: str | None, width: int, monkeypatch: pytest.MonkeyPatch, capsys: object
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    assert output_width() == width


def test_piped_tables_honour_the_columns_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    tables.print_summary(made.summary())
    assert capsys.readouterr().out == tables.render_text(made.summary(), 80)


def test_a_terminal_gets_colour() -> None:
    sink = io.StringIO()
    console = Console(file=sink, force_terminal=True, width=120, color_system="standard")
    tables.print_summary(made.summary(), console)
    assert "\x1b[32mbetter" in sink.getvalue()


def test_an_empty_summary_is_one_sentence() -> None:
    told = made.summary(cells=(), comparisons=(), cautions=())
    assert tables.render_text(told).strip() == "Nothing was measured: no cell ran."
