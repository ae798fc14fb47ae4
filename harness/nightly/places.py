"""A series on the calendar: a place for every night, one left empty for each day without any."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date

import msgspec

from harness.nightly.folders import night_order
from harness.nightly.series import Series

LONGEST_GAP = 60
"""Days without a night that are kept as empty places; a longer pause tells no more."""


class Places(msgspec.Struct, frozen=True, kw_only=True):
    """`values` and `errors` by place; `nights` names each, None for a day without a night."""

    values: tuple[float | None, ...]
    errors: tuple[float | None, ...]
    nights: tuple[str | None, ...]
    at: Mapping[str, int]

    def from_night(self, night: str) -> int | None:
        """The place of `night`, or of the first one after it; None where there is none."""
        wanted = night_order(night)
        later = [i for n, i in self.at.items() if night_order(n) >= wanted]
        return min(later, default=None)

    def known_before(self, place: int) -> str | None:
        """The last night before `place` that has a value."""
        for i in range(min(place, len(self.values)) - 1, -1, -1):
            if self.values[i] is not None:
                return self.nights[i]
        return None

    def known_from(self, place: int) -> str | None:
        """The first night from `place` on that has a value."""
        for i in range(max(place, 0), len(self.values)):
            if self.values[i] is not None:
                return self.nights[i]
        return None


def places_of(series: Series) -> Places:
    """The series' readings in their places. Several nights of one day have a place each."""
    values: list[float | None] = []
    errors: list[float | None] = []
    nights: list[str | None] = []
    before: date | None = None
    for reading in series.readings:
        day = date.fromisoformat(reading.night[:10])
        gap = 0 if before is None else min((day - before).days - 1, LONGEST_GAP)
        for _ in range(gap):
            values.append(None)
            errors.append(None)
            nights.append(None)
        values.append(reading.value)
        errors.append(reading.error)
        nights.append(reading.night)
        before = day
    at = {name: i for i, name in enumerate(nights) if name is not None}
    return Places(values=tuple(values), errors=tuple(errors), nights=tuple(nights), at=at)
