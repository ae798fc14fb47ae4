"""How a report says numbers, loads and names: one place, so that every output says the same.

A missing value (None or NaN) is an en dash, never zero.
"""

from __future__ import annotations

import math
import re

from harness.analyse.words import DASH as DASH
from harness.analyse.words import load_words as load_words
from harness.errors import one_line as one_line


def missing(value: float | None) -> bool:
    """True for None, NaN and the infinities: nothing that could be shown as a number."""
    return value is None or not math.isfinite(value)


def number(value: float | None, digits: int = 3) -> str:
    """`digits` significant digits and no exponent: 0.01234 -> 0.0123, 1234.5 -> 1,234."""
    if value is None or missing(value):
        return DASH
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    decimals = min(max(digits - 1 - magnitude, 0), 9)
    return f"{value:,.{decimals}f}"


def count(value: int | None) -> str:
    """A whole number with thousands separated: 12345 -> 12,345."""
    return DASH if value is None else f"{value:,d}"


def fixed(value: float | None, decimals: int = 2) -> str:
    """A number with a fixed number of decimals: 1.2 -> 1.20."""
    return DASH if value is None or missing(value) else f"{value:,.{decimals}f}"


def milliseconds(seconds: float | None) -> str:
    """Seconds as milliseconds, without the unit: 0.01234 -> 12.3."""
    return DASH if seconds is None or missing(seconds) else number(seconds * 1e3)


def percent(fraction: float | None, decimals: int = 1) -> str:
    """A fraction as a percentage: 0.412 -> 41.2%."""
    if fraction is None or missing(fraction):
        return DASH
    return f"{fraction * 100:.{decimals}f}%"


def interval(low: float | None, high: float | None) -> str:
    """The ends of an interval, joined by an en dash; empty where there is no interval.

    An end beyond 100 says nothing but "very wide", and is cut.
    """
    if low is None or high is None or missing(low) or missing(high):
        return ""
    return DASH.join("100+" if end > 100 else f"{end:.2f}" for end in (low, high))


def ratio(value: float | None, low: float | None, high: float | None) -> str:
    """A ratio with its interval: 1.24x (1.15–1.33)."""
    if value is None or missing(value):
        return DASH
    ends = interval(low, high)
    return f"{value:.2f}x ({ends})" if ends else f"{value:.2f}x"


def share(part: int, whole: int) -> str:
    """Counts side by side: 47 of 48; an en dash where nothing was counted."""
    return f"{part:,d} of {whole:,d}" if whole else DASH


def plural(n: int, one: str, many: str | None = None) -> str:
    """A count and its noun: 1 block, 3 blocks."""
    return f"{n:,d} {one if n == 1 else many or one + 's'}"


def slug(*parts: str) -> str:
    """A file name's stem of lower-case letters, digits and hyphens, at most 60 long."""
    text = re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")
    return text[:60].strip("-") or "unnamed"
