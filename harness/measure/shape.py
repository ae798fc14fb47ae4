"""What a manifest's free tables have to look like: those of its parts that figures are made with.

Its `plan` and `environment` hold whatever a version of the harness writes there. One that was
edited or damaged is told here, by the place, and not wherever it is read.
"""

from __future__ import annotations

from typing import Any

import msgspec

from harness.errors import one_line, plain_words
from harness.records import Manifest


class ShapeError(ValueError):
    """What is not as it has to be, without the file's name."""


class _Request(msgspec.Struct, frozen=True):
    profile: str | None = None
    urls: dict[str, str] = {}
    sets: tuple[str, ...] = ()
    command: tuple[str, ...] = ()


class _Plan(msgspec.Struct, frozen=True):
    engines: dict[str, Any] = {}
    models: dict[str, dict[str, str | None]] = {}
    request: _Request | None = None
    searched: dict[str, tuple[str, ...]] = {}


class _Environment(msgspec.Struct, frozen=True):
    cores_usable: float | None = None
    load_average: tuple[float, ...] | None = None
    gpus: tuple[dict[str, Any], ...] | None = None


class _Shape(msgspec.Struct, frozen=True):
    plan: _Plan
    environment: _Environment


def checked(manifest: Manifest) -> Manifest:
    """The manifest. Raises `ShapeError` naming the place that is of another kind than wanted."""
    try:
        msgspec.convert({"plan": manifest.plan, "environment": manifest.environment}, _Shape)
    except msgspec.ValidationError as error:
        said, _, place = str(error).partition(" - at `$.")
        where = one_line(place.rstrip("`"), 120)
        raise ShapeError(f"{where} cannot be read ({plain_words(said)})") from None
    return manifest
