"""Values of the command line's options, read strictly."""

from __future__ import annotations

from typing import Any

from harness.errors import UsageError


def check_text(arguments: list[str]) -> None:
    """Raise `UsageError` at an argument that is not UTF-8: no record could hold it."""
    for argument in arguments:
        shown = argument.encode("utf-8", "replace").decode()
        if shown != argument:
            raise UsageError(f"{shown}: not UTF-8 text; rename the file, or write it in UTF-8")


def parse_variants(text: str | None) -> tuple[Any, ...] | None:
    """`--variants` as a tuple, in the given order. Raises `UsageError`."""
    if text is None:
        return None
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    wrong = [word for word in words if word not in ("baseline", "speculative")]
    if wrong or not words:
        raise UsageError(f"--variants {text}: give baseline, speculative, or both with a comma")
    return words


def parse_counts(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers above 0 with commas between them. Raises `UsageError`."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(w.isdecimal() and 0 < int(w) <= 100_000 for w in words):
        raise UsageError(f"{option} {text}: give whole numbers from 1 on, such as 50,200")
    return tuple(int(word) for word in words)


def parse_precision(text: str | None) -> list[str]:
    """`--precision`, 3% or 0.03, as items of `--set`. Raises `UsageError`."""
    if text is None:
        return []
    share = share_of(text)
    if not 0.001 <= share < 1:
        raise UsageError(f"--precision {text}: give a share from 0.1% to below 100%, such as 3%")
    return [f"compare.precision={share:.6g}"]


def share_of(text: str) -> float:
    """3% or 0.03 as a number; NaN where it is neither."""
    number, percent, rest = text.strip().partition("%")
    try:
        return float("nan") if rest.strip() else float(number) / (100 if percent else 1)
    except ValueError:
        return float("nan")


def parse_tolerances(items: list[str]) -> dict[str, float]:
    """`--tolerance` options, 3% or METRIC=3%, by metric; "": of all others. Raises `UsageError`."""
    found: dict[str, float] = {}
    for item in (part.strip() for text in items for part in text.split(",")):
        name, equals, value = item.rpartition("=")
        share = share_of(value)
        if (equals and not name.strip()) or not 0 < share < 1:
            raise UsageError(
                f"--tolerance {item}: give a share above 0% and below 100%, such as 3%, or of one "
                "metric, such as output_tokens_per_s=2%"
            )
        if name.strip() in found:
            what = name.strip() or "all metrics"
            raise UsageError(f"--tolerance {item}: {what} has two tolerances; give one")
        found[name.strip()] = share
    return found


def parse_urls(items: list[str]) -> dict[str, str]:
    """`--url` options by variant; the key "" is a server without a label. Raises `UsageError`."""
    urls: dict[str, str] = {}
    for item in items:
        label, equals, rest = item.partition("=")
        labelled = bool(equals) and label in ("baseline", "speculative")
        if equals and not labelled and "://" not in label:
            raise UsageError(f"--url {item}: the label is baseline or speculative")
        key, value = (label, rest) if labelled else ("", item)
        if key in urls:
            raise UsageError(
                f"--url {item}: several servers; write baseline=URL and speculative=URL"
            )
        urls[key] = value
    if "" in urls and len(urls) > 1:
        raise UsageError("--url: label both servers: baseline=URL and speculative=URL")
    return urls
