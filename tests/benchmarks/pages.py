"""Tables that a benchmark's command puts into a page of the docs."""

from __future__ import annotations

import sys
from pathlib import Path


def put(page: Path, begin: str, end: str, text: str) -> None:
    """Put `text` between the lines `begin` and `end` of the page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        sys.exit(f"{page}: the lines {begin} and {end} are missing")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")
