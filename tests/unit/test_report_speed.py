# ruff: noqa: RUF001 (an en dash is what the report shows)
"""How a run's and a sweep's report say why it is as fast as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import report_run as made

from harness.analyse.sweep import Best, Outlook, Point, Sweep
from harness.errors import UsageError
from harness.findings import Interval, Prediction, Speed
from harness.records import SCHEMA_VERSION, Axis, Setting
from harness.report import html, speed, sweep, tables
from harness.report.markdown import render_markdown
from harness.report.page import make_page
from harness.report.run_data import read_run


def around(value: float) -> Interval:
    return Interval(value=value, ci_low=value * 0.9, ci_high=value * 1.1)


PREDICTIONS = (
    Prediction(
        k=2, acceptance_length=2.0, relative_step_cost=None, speedup=None, low=1.2, high=1.6,
        basis="bounded",
    ),
    Prediction(
        k=3, acceptance_length=2.5, relative_step_cost=1.6, speedup=1.5625, low=1.4, high=1.7,
        basis="measured",
    ),
)  # fmt: skip


def a_speed(**changes: Any) -> Speed:
    fields: dict[str, Any] = {
        "engine": "reference", "load": made.C1, "k": 3, "step_basis": "chunks",
        "chunks_per_step": 1.0, "baseline_token_s": 0.02, "step_s": 0.032,
        "acceptance_length": 2.51, "tokens_per_step": around(2.5),
        "relative_step_cost": around(1.6), "decode": around(1.5625), "first_token": around(0.9),
        "batch": around(1.0), "throughput": around(1.4), "residual": around(0.9956),
        "first_token_share": (0.1, 0.16), "under_way": (1.0, 1.0), "running_batch": (1.0, 1.0),
        "pairs": 3, "equal_batch": True, "predictions": PREDICTIONS,
    }  # fmt: skip
    return Speed(**{**fields, **changes})


def test_the_sentence_is_the_product_and_names_the_break_even() -> None:
    told = speed.sentence(a_speed())
    assert "2.50 tokens a step at the cost of 1.60 baseline tokens a step give 1.56x" in told
    assert "break-even: 1.60" in told
    assert told.endswith(
        "times 0.90 for the first token, 1.00 for the requests in flight and 1.00 for the rest: "
        "1.40x output tokens/s."
    )
    assert speed.sentence(a_speed(throughput=None, residual=None)).endswith("tokens a step).")


def test_unknown_figures_are_a_dash_and_bounds_have_no_value() -> None:
    rows = {row[0]: row for row in speed.factor_rows(a_speed(throughput=None, residual=None))}
    assert rows["rest"][3] == "–"
    assert rows["time of a step, ms"] == ["time of a step, ms", "20.0", "32.0", "1.60x (1.44–1.76)"]
    bounds, known = speed.prediction_rows(PREDICTIONS)
    assert bounds == ["2", "2.00", "–", "1.20–1.60", "bounded"]
    assert known[3] == "1.56x (1.40–1.70)"


def test_the_notes_say_how_steps_were_timed() -> None:
    assert "Every chunk is one verify step" in speed.notes(a_speed())
    merged = a_speed(step_basis="acceptance", chunks_per_step=0.5, equal_batch=False)
    assert "0.50 chunks a verify step" in speed.notes(merged)
    assert "another batch" in speed.notes(merged)
    assert "counted no verify steps" in speed.notes(a_speed(chunks_per_step=None))


def test_it_stands_on_the_terminal_and_on_the_pages(tmp_path: Path) -> None:
    told = made.summary(speed=(a_speed(),))
    assert "Why: 2.50 tokens a step" in tables.render_text(told)
    assert "Why:" not in tables.render_text(made.summary())
    page = make_page(read_run(made.write_run(tmp_path / "run", told)), [])
    for text in (html.render_html(page), render_markdown(page)):
        assert "Why: 2.50 tokens a step" in text
        assert "running batch of a step" in text
        assert "1.20–1.60" in text


def a_sweep(**changes: Any) -> Sweep:
    ks = (1, 3)
    points = [
        Point(
            engine="reference", setting=f"k={k}", condition=(), load=load,
            speedup=around(1.1 + 0.2 * k), output_tokens_per_s=50.0 * k,
            acceptance_length=1 + k / 2, relative_step_cost=around(1.0 + k / 10),
            decode=around(1.2), pairs=3,
        )
        for load in (made.C1, made.C4)
        for k in ks
    ]  # fmt: skip
    best = Best(
        engine="reference", condition=("sampling.temperature=0",), load=made.C1, leader="k=3",
        named="k=3", undecided=(), speedup=around(1.7), lead=around(1.3), compared=3,
        confidence=0.95, each=0.9833, starts=3,
    )  # fmt: skip
    fields: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "sweep_id": "sweep-1",
        "request": {},
        "axes": (Axis(key="speculative.k", values=("1", "3")),),
        "settings": tuple(
            Setting(
                name=f"k={k}",
                choice=(f"speculative.k={k}",),
                condition=(),
                run=f"runs/k{k}",
                baseline="k=1",
            )
            for k in ks
        ),
        "points": tuple(points),
        "best": (best,),
        "outlooks": (Outlook(engine="reference", same=(), load=made.C1, predictions=PREDICTIONS),),
    }
    return Sweep(**{**fields, **changes})


def test_a_winner_is_named_and_a_draw_is_told_as_one() -> None:
    (best,) = a_sweep().best
    assert sweep.best_sentence(best) == (
        "reference, temperature=0, concurrency 1: best is k=3, 1.70x (1.53–1.87) the baseline, "
        "1.30x (1.17–1.43) over the next (3 candidates, each pair compared at 98.3% over 3 starts)."
    )
    draw = msgspec.structs.replace(best, named=None, undecided=("k=3", "k=1"))
    assert "undecided between k=3, k=1 (3 candidates" in sweep.best_sentence(draw)
    several = msgspec.structs.replace(draw, undecided=("k=3, forced_length=none", "k=1"))
    assert "undecided between k=3, forced_length=none; k=1 (3" in sweep.best_sentence(several)
    none = msgspec.structs.replace(best, named="no drafter", leader="no drafter", speedup=None)
    assert "fastest without a drafter, by 1.30x" in sweep.best_sentence(none)


def test_a_k_that_was_not_measured_is_told_where_it_promises_more() -> None:
    (outlook,) = a_sweep().outlooks
    assert sweep.outlook_sentence(outlook) is None  # the measured one is the best that is known
    better = Prediction(
        k=4, acceptance_length=3.0, relative_step_cost=1.7, speedup=1.7647, low=1.5, high=2.0,
        basis="a line",
    )  # fmt: skip
    more = msgspec.structs.replace(outlook, predictions=(*PREDICTIONS, better))
    told = sweep.outlook_sentence(more)
    assert told is not None
    assert "k = 4 may be faster still, predicted 1.76x (1.50–2.00) in the decode phase" in told


def test_the_sweeps_text_is_no_wider_than_asked_and_says_what_is_void() -> None:
    points = a_sweep().points
    void = msgspec.structs.replace(points[0], void="broken")
    forced = msgspec.structs.replace(points[1], forced_length=2.5)
    found = a_sweep(points=(void, forced), void="k=1: broken", failures=("k=3: it died",))
    text = sweep.render_text(found)
    assert max(map(len, text.splitlines())) <= 100
    assert "Void, and not among the best: k=1: broken" in text
    assert "Failed: k=3: it died" in text
    assert "2.50 (forced)" in text
    assert "Nothing was measured" in sweep.render_text(a_sweep(points=(), best=()))


@pytest.mark.parametrize("width", [100, 80])
def test_no_part_of_a_settings_name_is_broken(width: int) -> None:
    points = tuple(
        msgspec.structs.replace(p, setting=f"{p.setting}, forced_length=none", engine="vllm")
        for p in a_sweep().points
    )
    other = msgspec.structs.replace(points[0], engine="reference")  # then the column names both
    text = sweep.render_text(a_sweep(points=(*points, other), best=()), width)
    assert text.count("forced_length=none") == len(points) + 1
    assert max(map(len, text.splitlines())) <= width


def test_the_figure_has_a_line_for_each_load_and_none_where_nothing_is_known() -> None:
    (plot,) = sweep.plots(a_sweep())
    assert "concurrency 1: k=1 1.30x (1.17–1.43); k=3 1.70x (1.53–1.87)." in plot.alt
    assert "concurrency 4:" in plot.alt
    assert "draft tokens a verify step" in plot.svg
    assert sweep.plots(a_sweep(points=())) == []
    drafters = tuple(
        msgspec.structs.replace(s, choice=(f"drafter.path={s.name}",)) for s in a_sweep().settings
    )
    (by_name,) = sweep.plots(a_sweep(settings=drafters))
    assert "draft tokens a verify step" not in by_name.svg


def test_the_page_is_written_and_links_every_setting(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_bytes(msgspec.json.encode(a_sweep()))
    page = sweep.write_report(tmp_path).read_text("utf-8")
    assert 'href="runs/k3/report.html"' in page
    assert "best is k=3" in page
    assert "The decode phase at other k" in page
    assert sorted(p.name for p in (tmp_path / "plots").iterdir()) == [
        "sweep-reference.png",
        "sweep-reference.svg",
    ]
    with pytest.raises(UsageError, match="cannot be read"):
        sweep.write_report(tmp_path / "plots")
