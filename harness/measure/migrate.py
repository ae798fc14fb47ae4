"""Summaries and manifests of earlier schema versions, turned into the newest form in memory.

A file on disk is never changed. Every step is from one version to the next, and says what had
another meaning before: a field that only came later needs none, its default says "not known".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from harness.errors import UsageError, one_line, plain_words
from harness.records import SCHEMA_VERSION

T = TypeVar("T")
Stored = dict[str, Any]
WHOLE_PHASE = "the whole phase: this version knew no steady window"


class _Versioned(msgspec.Struct):
    """What tells whether a file is one of ours at all."""

    schema_version: str


def _objects(stored: Stored, key: str) -> list[Stored]:
    """The objects of a list; what is none is left for the strict reading to name."""
    told = stored.get(key)
    return [one for one in told if isinstance(one, dict)] if isinstance(told, list) else []


def _arrivals_named(stored: Stored) -> None:
    """1.0 knew Poisson arrivals alone, and did not say so."""
    for one in (*_objects(stored, "cells"), *_objects(stored, "comparisons")):
        load = one.get("load")
        if isinstance(load, dict) and load.get("mode") == "open" and not load.get("arrival"):
            load["arrival"] = "poisson"


def _window_named(stored: Stored) -> None:
    """Until a cell told its steady window, latencies were of the whole phase."""
    for cell in _objects(stored, "cells"):
        metrics = cell.get("metrics")
        if not isinstance(metrics, dict) or metrics.get("steady") is not None:
            continue
        length, ok = metrics.get("duration_s"), metrics.get("requests_ok")
        if isinstance(length, int | float) and isinstance(ok, int):
            metrics["steady"] = {
                "begin_s": 0.0,
                "end_s": float(length),
                "level": "whole",
                "rule": WHOLE_PHASE,
                "requests": ok,
            }


def _verdicts_corrected(stored: Stored) -> None:
    """Until 1.2 a verdict could be drawn from the plain interval: that is the one it stands by."""
    for comparison in _objects(stored, "comparisons"):
        if comparison.get("corrected_low") is None and comparison.get("corrected_high") is None:
            comparison["corrected_low"] = comparison.get("ci_low")
            comparison["corrected_high"] = comparison.get("ci_high")
            comparison["corrected_confidence"] = comparison.get("confidence")


def _to_1_1(stored: Stored) -> None:
    _arrivals_named(stored)


def _to_1_2(stored: Stored) -> None:
    _window_named(stored)
    _verdicts_corrected(stored)


STEPS: dict[str, tuple[str, Callable[[Stored], None]]] = {
    "1.0": ("1.1", _to_1_1),
    "1.1": ("1.2", _to_1_2),
}
"""From a version to the next. A new `SCHEMA_VERSION` needs a step here, and an example in tests."""


def migrated(stored: Stored) -> Stored:
    """A stored file's JSON in the newest form; `stored` itself is changed."""
    while (step := STEPS.get(str(stored.get("schema_version")))) is not None:
        version, change = step
        change(stored)
        stored["schema_version"] = version
    return stored


def read_stored(data: bytes, kind: type[T]) -> T:
    """A stored `Summary` or `Manifest` in the newest form. Raises `UsageError` with the reason.

    The version decides before the content does, so that what a later harness wrote is told as
    such, and not by the first field that is not known here.
    """
    version = _version_of(data)
    if version == SCHEMA_VERSION:
        return _strictly(lambda: msgspec.json.decode(data, type=kind), version)
    theirs, ours = version.partition(".")[0], SCHEMA_VERSION.partition(".")[0]
    if theirs != ours:
        age = "a later" if theirs.isdecimal() and int(theirs) > int(ours) else "another"
        raise UsageError(
            f"written with schema {one_line(version, 20)}, of {age} harness; "
            f"this one reads {SCHEMA_VERSION}"
        )
    return _strictly(lambda: msgspec.convert(migrated(msgspec.json.decode(data)), kind), version)


def _version_of(data: bytes) -> str:
    if not data.strip():
        raise UsageError("empty")
    try:
        return msgspec.json.decode(data, type=_Versioned).schema_version
    except msgspec.ValidationError as error:
        raise UsageError(f"not this harness's: {plain_words(str(error))}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"no JSON: {one_line(str(error), 120)}") from None


def _strictly(read: Callable[[], T], version: str) -> T:
    try:
        return read()
    except msgspec.ValidationError as error:
        later = "" if version in (*STEPS, SCHEMA_VERSION) else f"schema {one_line(version, 20)}: "
        raise UsageError(one_line(f"{later}{plain_words(str(error))}")) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"no JSON: {one_line(str(error), 120)}") from None
