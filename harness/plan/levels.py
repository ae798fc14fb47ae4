"""Service levels as the command line says them: `--slo ttft=0.2,tpot=50ms`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from harness.errors import UsageError

NAMES = ("ttft", "tpot", "e2el")
EXAMPLE = "write it as ttft=0.2,tpot=50ms (seconds, or with ms)"
_NUMBER = re.compile(r"(\d+\.?\d*|\.\d+)(e-?\d{1,3})?\s*(ms|s)?", re.IGNORECASE)


def slo_sets(items: Sequence[str]) -> list[str]:
    """The `--set` items that `--slo` options stand for. Raises `UsageError`."""
    found: dict[str, str] = {}
    for item in items:
        for part in item.split(","):
            name, equals, raw = part.partition("=")
            name = name.strip().lower().removesuffix("_s")
            if not equals:
                raise UsageError(f"--slo {item}: {EXAMPLE}")
            if name not in NAMES:
                raise UsageError(f"--slo {item}: no level '{name}'; there are {', '.join(NAMES)}")
            if name in found:
                raise UsageError(f"--slo {item}: {name} is given twice")
            found[name] = f"slo.{name}_s={_seconds(raw.strip(), item)!r}"
    return list(found.values())


def _seconds(raw: str, item: str) -> float:
    match = _NUMBER.fullmatch(raw)
    value = float(f"{match[1]}{match[2] or ''}") if match else 0.0
    if match is None or not 0 < value < 1e9:
        raise UsageError(f"--slo {item}: '{raw}' is no time above 0; {EXAMPLE}")
    return value / 1000 if (match[3] or "").lower() == "ms" else value
