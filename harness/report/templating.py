"""Where the report's templates are, and how they are filled in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

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


def write_whole(path: Path, text: str) -> None:
    """Write whole or not at all, so that a reader never sees half a page."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, "utf-8", errors="replace")
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
