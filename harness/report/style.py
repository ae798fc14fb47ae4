"""One look for all figures, and their SVG made fit for a light and a dark page.

Axes, ticks and text are drawn in one ink that is written as `currentColor`; the page (or, in a
file of its own, a style rule that knows the reader's colour scheme) decides what it is. The two
series colours keep a contrast of 3:1 against white and against near-black, differ for the
colour-blind, and are never the only difference: markers and dashes differ too.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from harness.records import Variant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#0a0b0c"
"""A colour nothing else uses: written as `currentColor` in the SVG."""

COLOUR = {"baseline": "#3d86c6", "speculative": "#d96a0b"}
DASHES: dict[str, Any] = {"baseline": (0, (4, 1.6)), "speculative": "solid"}
MARKER = {"baseline": "o", "speculative": "D"}
SERIES = ("#d96a0b", "#3d86c6", "#846054", "#9c6cfc", "#789c60", "#900cfc")
"""For lines that are not the two variants, such as engines. Chosen by a search for those furthest
apart to readers of normal vision and of the three kinds of colour-blindness (the simulation of
Machado et al., 2009), among colours with a contrast of 3:1 against both pages."""
SERIES_MARKERS = ("D", "o", "s", "^", "v", "P")
SERIES_DASHES: tuple[Any, ...] = ("solid", (0, (4, 1.6)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))
VERDICT = {"better": "#0f9373", "worse": "#d2403a", "same": "#3d86c6", "undecided": "#868686"}
VERDICT_MARKERS = {"better": "^", "worse": "v", "same": "s", "undecided": "o"}

RC: dict[Any, Any] = {
    "axes.edgecolor": INK,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": INK,
    "axes.labelsize": 9.5,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.axisbelow": True,
    "figure.constrained_layout.use": True,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "grid.alpha": 0.18,
    "grid.color": INK,
    "grid.linewidth": 0.7,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.9,
    "svg.fonttype": "none",
    "svg.hashsalt": "spec-harness",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
}

PIXELS_PER_INCH = 106
"""How large a figure may grow on a page, so that letters are alike in all of them."""

Theme = Literal["speed", "latency", "acceptance", "time", "start"]
THEMES: dict[Theme, str] = {
    "speed": "Speed and load",
    "latency": "Latency",
    "acceptance": "Acceptance",
    "time": "While it ran",
    "start": "Start-up",
}
"""The parts that a page's figures are put into, in reading order."""

PNG_DPI = 144

FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One figure: its file's stem, inline SVG, text alternative, caption, and its width.

    `png`: the same as a bitmap on white, for what shows no SVG. `theme`: the part of the page that
    it stands in, one of `THEMES`.
    """

    name: str
    title: str
    svg: str
    alt: str
    caption: str
    wide: bool = False
    png: bytes = b""
    theme: Theme = "speed"


@contextmanager
def drawing() -> Iterator[None]:
    """Draw in the house style, leaving the process's settings alone.

    Figures are made without pyplot, so that no display and no backend is ever asked for.
    """
    import matplotlib

    with matplotlib.rc_context(RC):
        yield


def new_figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    """A figure of `size` inches with its axes in reading order; must be drawn in `drawing()`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size)
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, list(axes.flat)


def plain(text: str) -> str:
    """Any text as a label: no line breaks and no control characters, at most 48 long."""
    flat = "".join(c if c.isprintable() else " " for c in text)
    return flat if len(flat) <= 48 else flat[:47] + "\N{HORIZONTAL ELLIPSIS}"


def name_variants(figure: Figure, variants: Sequence[Variant], *, markers: bool = False) -> None:
    """A legend below the figure: each variant's colour, and its dashes or marker."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D(
            [],
            [],
            color=COLOUR[v],
            marker=MARKER[v] if markers else None,
            linestyle="none" if markers else DASHES[v],
            label=v,
        )
        for v in variants
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)


def finished(
    figure: Figure,
    name: str,
    theme: Theme,
    *,
    title: str,
    alt: str,
    caption: str,
    wide: bool = False,
) -> Plot:
    """The drawn figure as a `Plot`; `name` is a slug, the stem of its files."""
    svg = to_svg(figure, name)
    _keep_layout(figure)
    return Plot(
        name=name,
        title=title,
        svg=svg,
        png=_to_png(figure),
        alt=alt,
        caption=caption,
        wide=wide,
        theme=theme,
    )


def _keep_layout(figure: Figure) -> None:
    """No more layout of a figure that has one: it would cost two more drawings, and change none.

    ("none" would leave a layout of its own kind there, for which it is drawn twice as well.)
    """
    import matplotlib

    with matplotlib.rc_context({"figure.constrained_layout.use": False}):
        figure.set_layout_engine(None)


def _to_png(figure: Figure) -> bytes:
    sink = io.BytesIO()
    figure.savefig(sink, format="png", dpi=PNG_DPI, facecolor="white", metadata={"Software": None})
    return sink.getvalue()


def to_svg(figure: Figure, name: str) -> str:
    """The figure as an SVG element for inlining: ids of its own, no fixed size, no document type.

    `name` is a slug; it prefixes every id, since a page holds several figures.
    """
    sink = io.StringIO()
    silent = {"Date": None, "Creator": None, "Format": None, "Type": None}
    figure.savefig(sink, format="svg", metadata=silent, transparent=True)
    text = sink.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"\n *", " ", text)  # a twentieth of its size
    text = text.replace(INK, "currentColor")
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'="#([^"]+)"', rf'="#{name}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", text)
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", text)
    text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
    widest = figure.get_figwidth() * PIXELS_PER_INCH
    return text.replace("<svg", f'<svg style="max-width:{widest:.0f}px"', 1)


def standalone(svg: str, alt: str) -> str:
    """The same figure as a file of its own: sized, titled, legible on light and dark pages."""
    from xml.sax.saxutils import escape

    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    size = f' width="{box[1]}pt" height="{box[2]}pt" role="img"' if box else ' role="img"'
    head, _, body = svg.partition(">")
    rules = (
        f"svg{{color:#1f2328;font-family:{FONTS}}}"
        "@media (prefers-color-scheme:dark){svg{color:#dfe3e8}}"
    )
    return (
        '<?xml version="1.0" encoding="utf-8"?>\n'
        f"{head}{size}><title>{escape(alt)}</title><style>{rules}</style>{body}"
    )
