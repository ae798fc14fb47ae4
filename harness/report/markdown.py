"""The report as Markdown, for a pull request: the same content as the page."""

from __future__ import annotations

import re

from harness.report import words
from harness.report.page import Page
from harness.report.templating import templates


def render_markdown(page: Page) -> str:
    """The page as Markdown that GitHub shows with tables and figures; foreign text is escaped."""
    environment = templates(autoescape=False)
    environment.filters.update(md=escape, fence=fence)
    text = environment.get_template("report.md.j2").render(page=page, dash=words.DASH)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def escape(text: str) -> str:
    """Any text as one line of Markdown that shows as itself, in a table's cell too."""
    flat = " ".join(text.split())
    entities = flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|#$~])", r"\\\1", entities)


def fence(text: str) -> str:
    """Any text as a code block, fenced by more backticks than it holds."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    bar = "`" * max(3, longest + 1)
    return f"{bar}\n{text}\n{bar}"
