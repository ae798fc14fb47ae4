"""Screenshots of a run's report, in a real Chromium: `python tests/recipes/screenshots.py RUN`.

Writes `docs/img/report-*.png`, or into the folder that --out names; of several runs the page that
shows them side by side as well. The runs' folders are left as they are. Needs the test extra and a
Chromium (`make browser`).
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.report.html import write_report
from harness.report.side import write_side_by_side

REPO = Path(__file__).resolve().parents[2]
MOST_BYTES = 300_000
DESK, PHONE = {"width": 1200, "height": 1150}, {"width": 390, "height": 844}


@contextmanager
def chromium() -> Iterator[Any]:
    """A running browser: the one that CHROMIUM names, or the system's."""
    from playwright.sync_api import sync_playwright

    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        sys.exit("no Chromium here: `make browser` installs it, or name one in CHROMIUM")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as play:
        running = play.chromium.launch(executable_path=path, args=arguments)
        yield running
        running.close()


def shot(
    running: Any, page: Path, *, dark: bool = False, phone: bool = False, at: str = ""
) -> bytes:
    """The window with the page scrolled to `at`, a selector; its top where there is none."""
    context = running.new_context(
        color_scheme="dark" if dark else "light",
        viewport=PHONE if phone else DESK,
        device_scale_factor=2 if phone else 1,
    )
    tab = context.new_page()
    tab.goto(page.as_uri())
    if at:
        tab.locator(at).first.evaluate("element => element.scrollIntoView()")
    if at == "#cells":
        tab.get_by_label("Filter").last.fill("speculative")
        tab.locator("#cells th button", has_text="output tokens/s").click()
    found: bytes = tab.screenshot()
    context.close()
    return found


def save(picture: bytes, path: Path) -> None:
    """As a PNG of at most 256 colours, which a page of text and lines does not miss."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.open(io.BytesIO(picture)).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    image.save(path, optimize=True)
    size = path.stat().st_size
    print(f"{path}: {image.width} x {image.height}, {size:,} bytes")
    if size >= MOST_BYTES:
        sys.exit(f"{path}: larger than {MOST_BYTES:,} bytes")


def main() -> None:
    """Take them all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, default=REPO / "docs" / "img", metavar="DIR")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as work, chromium() as running:
        copies = [Path(work) / run.resolve().name for run in asked.runs]
        for run, copy in zip(asked.runs, copies, strict=True):
            shutil.copytree(run, copy)
        page = write_report(copies[0])
        save(shot(running, page), asked.out / "report-light.png")
        save(shot(running, page, dark=True, at="#figures"), asked.out / "report-dark.png")
        save(shot(running, page, phone=True), asked.out / "report-phone.png")
        save(shot(running, page, at="#cells"), asked.out / "report-cells.png")
        if len(copies) > 1:
            several = write_side_by_side(copies, Path(work) / "side")
            save(shot(running, several), asked.out / "report-side-by-side.png")


if __name__ == "__main__":
    main()
