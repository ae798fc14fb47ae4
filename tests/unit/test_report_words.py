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


def test_load_names() -> None:
    assert words.load_name(LoadPoint(mode="closed", concurrency=8)) == "concurrency 8"
    assert words.load_name(LoadPoint(mode="open", request_rate=2.5)) == "2.5 requests/s"
    assert words.load_name(LoadPoint(mode="closed")) == "concurrency –"


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
