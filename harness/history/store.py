"""The history: the points of every run below a results' root, found quickly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.history.records import Point, SeriesKey


class History:
    """The runs below `root`. `problems`: folders that could not be read, each with the reason."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.problems: list[tuple[Path, str]] = []

    def query(self, **filters: Any) -> list[Point]:
        """The points that every filter holds for, by time; see `harness.history.query.Query`."""
        raise NotImplementedError

    def series(self, **filters: Any) -> dict[SeriesKey, list[Point]]:
        """The same without void runs, as series: each one's points by time."""
        raise NotImplementedError


def open_history(root: Path) -> History:
    """Read what is below `root`; from the index what has not changed since it was written."""
    return History(root)
