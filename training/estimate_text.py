"""The estimate of a plan as text or JSON, beside the original run's figures."""

from __future__ import annotations

from typing import Any

import msgspec

from training.estimate import ORIGINAL, Estimate
from training.files import record_bytes
from training.original_run import WHAT, Compared, Reading

SECTIONS = {
    "drafter": "the drafter",
    "data": "data",
    "memory": "memory of one training process",
    "disk": "disk",
    "time": "time, at the rates assumed",
}


def estimate_text(found: Estimate, original: tuple[Compared, ...]) -> str:
    """Every figure with its formula, section by section; what is compared with is said first."""
    lines = [f"{found.plan}: estimated, nothing was started"]
    if original or any(ORIGINAL in figure.how for figure in found.figures):
        lines.append(WHAT)
    for section, title in SECTIONS.items():
        figures = [f for f in found.figures if f.section == section]
        width = max(len(f.name) for f in figures)
        lines += ["", title]
        lines += [
            f"  {f.name.ljust(width)}  {amount(f.value, f.unit).rjust(11)}  {f.how}".rstrip()
            for f in figures
        ]
    if original:
        lines += ["", "the original run, by the same formulas"]
        for each in original:
            lines += _compared(each)
    return "\n".join(lines) + "\n"


def _compared(each: Compared) -> list[str]:
    verdict = "agrees" if each.agrees else f"{each.computed / each.reported - 1:+.0%}: open"
    lines = [
        f"  {each.name}: reported {amount(each.reported, each.unit)}, computed "
        f"{amount(each.computed, each.unit)}: {verdict}",
        f"      {each.how}",
    ]
    return lines + [f"      - {_reading(reading)}" for reading in each.readings]


def _reading(reading: Reading) -> str:
    return f"{reading.assumption}: {amount(reading.value, reading.unit)}"


def estimate_json(found: Estimate, original: tuple[Compared, ...]) -> bytes:
    """The same as one JSON object."""
    compared: list[dict[str, Any]] = [
        {**msgspec.to_builtins(each), "agrees": each.agrees} for each in original
    ]
    whole = {**msgspec.to_builtins(found), "original_run": compared}
    return record_bytes(whole)


def amount(value: float, unit: str) -> str:
    """A value in a reader's unit: GB, h or min, M or B of parameters."""
    if unit == "seconds":
        return duration(value)
    if unit == "updates":
        return f"{value:,.0f}"
    suffix = {
        "bytes": "B",
        "parameters": "",
        "tokens": "",
        "samples": "",
        "operations a second": "",
    }
    word = suffix.get(unit, "")
    for power, letter in ((1e12, "T"), (1e9, "G" if word else "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= power:
            return f"{value / power:,.4g} {letter}{word}"
    return f"{value:,.0f} {word}".rstrip()


def duration(seconds: float) -> str:
    """Hours, minutes or seconds."""
    if seconds >= 3600:
        return f"{seconds / 3600:.2f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"
