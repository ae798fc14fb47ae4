"""The figures' colours: told apart by every reader, on both pages, never the only difference."""

from __future__ import annotations

import re
from itertools import combinations

import numpy as np
import pytest

from harness.report import style
from harness.report.templating import TEMPLATES

PAGES = ("#ffffff", "#13161a")
# G. M. Machado, M. M. Oliveira, L. A. F. Fernandes, IEEE TVCG 15 (2009), severity 1
READERS = {
    "all colours": np.eye(3),
    "no red": np.array([
        [0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998]]),
    "no green": np.array([
        [0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881]]),
    "no blue": np.array([
        [1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900]]),
}  # fmt: skip
TO_XYZ = np.array([
    [0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750],
    [0.0193339, 0.1191920, 0.9503041]])  # fmt: skip
WHITE = np.array([0.95047, 1.0, 1.08883])
APART = 15.0
"""CIE 1976 colour difference; 2.3 is a just noticeable one, side by side."""


def linear(colour: str) -> np.ndarray:
    c = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    xyz = TO_XYZ @ np.clip(rgb, 0, 1) / WHITE
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(one: str, other: str) -> float:
    low, high = sorted(float(TO_XYZ[1] @ linear(c)) for c in (one, other))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("colours", [tuple(style.COLOUR.values()), style.SERIES])
def test_every_reader_tells_the_colours_apart(reader: str, colours: tuple[str, ...]) -> None:
    seen = {c: lab(READERS[reader] @ linear(c)) for c in colours}
    for one, other in combinations(colours, 2):
        assert np.linalg.norm(seen[one] - seen[other]) > APART, (one, other)


def test_every_colour_shows_on_both_pages() -> None:
    css = (TEMPLATES / "report.css").read_text("utf-8")
    assert all(f"--page: {page};" in css for page in PAGES)
    for colour in {*style.COLOUR.values(), *style.SERIES, *style.VERDICT.values()}:
        for page in PAGES:
            assert contrast(colour, page) >= 3, (colour, page)


def test_colour_is_never_the_only_difference() -> None:
    assert len({str(style.DASHES[v]) for v in style.COLOUR}) == len(style.COLOUR)
    for looks in (style.MARKER, style.VERDICT_MARKERS):
        assert len(set(looks.values())) == len(looks)
    assert len(set(style.SERIES_MARKERS)) == len(style.SERIES_MARKERS) >= len(style.SERIES)
    assert style.VERDICT.keys() == style.VERDICT_MARKERS.keys()


def test_a_figure_is_written_as_svg_and_as_png() -> None:
    with style.drawing():
        figure, (ax,) = style.new_figure(1, 1, (4.0, 3.0))
        ax.plot([0, 1], [0, 1], color=style.COLOUR["baseline"])
        plot = style.finished(
            figure, "line", "speed", title="A line", alt="It rises.", caption="One line."
        )
    assert plot.png.startswith(b"\x89PNG\r\n") and len(plot.png) > 1000
    width, height = (int.from_bytes(plot.png[at : at + 4]) for at in (16, 20))
    assert (width, height) == (4 * style.PNG_DPI, 3 * style.PNG_DPI)
    assert "currentColor" in plot.svg and style.INK not in plot.svg
    assert re.search(r'viewBox="0 0 288 216"', plot.svg)
