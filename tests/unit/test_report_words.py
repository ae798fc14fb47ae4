# ruff: noqa: RUF001 (an en dash is what the report shows)
"""Numbers, loads and names as the report says them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.records import LoadPoint
from harness.report import words


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.012345, "0.0123"),
        (1.2, "1.20"),
        (62.04, "62.0"),
        (1234.6, "1,235"),
        (0.0, "0"),
        (-3.14159, "-3.14"),
        (None, "–"),
        (math.nan, "–"),
        (math.inf, "–"),
    ],
)
def test_number_has_three_significant_digits(value: float | None, said: str) -> None:
    assert words.number(value) == said


@given(st.floats(min_value=1e-4, max_value=1e9))
def test_number_keeps_the_value_to_half_a_percent_without_exponent(value: float) -> None:
    said = words.number(value)
    assert "e" not in said
    assert float(said.replace(",", "")) == pytest.approx(value, rel=0.0051)


def test_missing_values_are_dashes_everywhere() -> None:
    assert words.percent(None) == words.milliseconds(None) == words.count(None) == "–"
    assert words.ratio(None, 1.0, 2.0) == words.fixed(math.nan) == words.share(0, 0) == "–"
    assert words.interval(1.0, None) == words.interval(math.nan, 2.0) == ""


def test_ratio_with_and_without_interval() -> None:
    assert words.ratio(1.2399, 1.1501, 1.334) == "1.24x (1.15–1.33)"
    assert words.ratio(0.66, None, None) == "0.66x"
    assert words.ratio(0.3, 0.00001, 41994.59) == "0.30x (0.00–100+)"


def test_units() -> None:
    assert words.milliseconds(0.0503) == "50.3"
    assert words.percent(0.41249) == "41.2%"
    assert words.percent(0.41, 0) == "41%"
    assert words.plural(1, "block") == "1 block"
    assert words.plural(3, "of them a near tie", "of them near ties") == "3 of them near ties"


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (LoadPoint(mode="closed", concurrency=8), "concurrency 8"),
        (LoadPoint(mode="closed"), "concurrency –"),
        (
            LoadPoint(mode="closed", concurrency=8, think_time_s=2.0, max_request_rate=5.0),
            "concurrency 8, think time 2 s, at most 5 requests/s",
        ),
        (
            LoadPoint(mode="closed", concurrency=8, think_time_s=2.0, think_time="exponential"),
            "concurrency 8, think time about 2 s",
        ),
        (LoadPoint(mode="open", request_rate=2.5), "2.5 requests/s"),
        (LoadPoint(mode="open"), "– requests/s"),
        (LoadPoint(mode="open", request_rate=2.5, arrival="poisson"), "2.5 requests/s"),
        (
            LoadPoint(mode="open", request_rate=2.5, arrival="constant", max_concurrency=9),
            "2.5 requests/s evenly spaced, at most 9 under way",
        ),
        (
            LoadPoint(mode="open", request_rate=2.5, arrival="gamma", burstiness=0.5),
            "2.5 requests/s of burstiness 0.5",
        ),
        (LoadPoint(mode="open", arrival="burst", num_requests=64), "64 requests at once"),
        (
            LoadPoint(
                mode="open", arrival="schedule", schedule=((30.0, 2.0, 2.0), (15.0, 2.0, 8.0))
            ),
            "2, 8 requests/s over 45 s",
        ),
        (
            LoadPoint(
                mode="open",
                arrival="schedule",
                schedule=tuple((1.0, float(i), float(i)) for i in range(1, 10)),
            ),
            "1, 2, 3, …, 8, 9 requests/s over 9 s",
        ),
        (LoadPoint(mode="open", arrival="trace", trace="/a/b/t.jsonl"), "trace t.jsonl"),
        (
            LoadPoint(mode="open", arrival="trace", trace="t.jsonl", time_scale=0.5),
            "trace t.jsonl, time scale 0.5",
        ),
    ],
)
def test_load_names(load: LoadPoint, said: str) -> None:
    assert words.load_words(load) == said


@given(st.text(), st.text())
def test_slug_is_a_safe_file_name(left: str, right: str) -> None:
    name = words.slug(left, right)
    assert name and len(name) <= 60
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


@given(st.text(max_size=900))
def test_one_line_is_one_printable_line(text: str) -> None:
    line = words.one_line(text, 100)
    assert len(line) <= 100
    assert all(c.isprintable() for c in line)
