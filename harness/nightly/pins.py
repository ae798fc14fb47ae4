"""What a series is held to."""

from __future__ import annotations

import msgspec


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """A value in the metric's unit, and the night that measured it."""

    value: float
    night: str
