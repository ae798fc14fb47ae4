"""Where the report's templates are, and how they are filled in."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.report.style import Plot, standalone

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parent / "templates"


def templates(*, autoescape: bool) -> Environment:
    """The report's templates; a name the page lacks is an error, not an empty string."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=autoescape,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )


def page_templates() -> Environment:
    """Those of HTML pages, which bring their own style and ask nothing of the network."""
    from markupsafe import Markup

    environment = templates(autoescape=True)
    environment.filters["svg"] = Markup
    environment.globals["css"] = Markup((TEMPLATES / "report.css").read_text("utf-8"))
    environment.globals["js"] = Markup((TEMPLATES / "sort.js").read_text("utf-8"))
    return environment


def write_plots(folder: Path, plots: Sequence[Plot]) -> None:
    """Write each figure by itself, as SVG and as PNG; those of an earlier report go."""
    folder.mkdir(exist_ok=True)
    for old in (*folder.glob("*.svg"), *folder.glob("*.png")):
        old.unlink()
    for plot in plots:
        write_whole(folder / f"{plot.name}.svg", standalone(plot.svg, plot.alt))
        if plot.png:
            write_whole(folder / f"{plot.name}.png", plot.png)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write whole or not at all, so that a reader never sees half a page."""
    data = content if isinstance(content, bytes) else content.encode("utf-8", "replace")
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
