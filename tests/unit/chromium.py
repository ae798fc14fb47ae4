"""A headless Chromium for the tests of the pages, where one is installed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WAIT_MS = 300_000
"""For a start from a cold disk, and for a page, beside whatever else this machine does."""
ABSENT = "no Chromium here: `make browser` installs it, or name one in CHROMIUM"


def executable() -> str | None:
    """The browser's path: what CHROMIUM names, else the first of its usual names."""
    named = os.environ.get("CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def browser() -> Iterator[Any]:
    """A running browser; the test is skipped where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright: pip install .[test]")
    path = executable()
    if path is None:
        pytest.skip(ABSENT)
    # Root has no sandbox to run in; the pages are our own.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with api.sync_playwright() as play:
        running = play.chromium.launch(executable_path=path, args=arguments, timeout=WAIT_MS)
        try:
            yield running
        finally:
            running.close()


def axe() -> str:
    """The script of axe-core."""
    package = pytest.importorskip("axe_playwright_python", reason="pip install .[test]")
    return (Path(package.__file__).parent / "axe.min.js").read_text("utf-8")


class Opened:
    """One page as a reader opens it from a file, and all that it said and asked for meanwhile."""

    def __init__(self, running: Any, path: Path, *, scheme: str = "light", width: int = 1280):
        size = {"width": width, "height": 900}
        self.context = running.new_context(color_scheme=scheme, viewport=size, offline=True)
        self.context.set_default_timeout(WAIT_MS)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def look(self, script: str) -> Any:
        """What a piece of script says of the page."""
        return self.page.evaluate(script)


@contextmanager
def opened(running: Any, path: Path, **options: Any) -> Iterator[Opened]:
    """Open a page, and close it behind the test."""
    found = Opened(running, path, **options)
    try:
        yield found
    finally:
        found.context.close()
