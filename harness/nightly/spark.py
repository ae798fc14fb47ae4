"""A series as a line as small as a word (E. R. Tufte, Beautiful Evidence, 2006), as inline SVG."""

from __future__ import annotations

from collections.abc import Sequence

WIDTH, HEIGHT, MARGIN = 96.0, 22.0, 2.5


def sparkline(values: Sequence[float | None], label: str) -> str:
    """An SVG element in the ink of its surroundings; gaps where nothing was measured.

    The last value has a dot. `label` is its text alternative. Empty where there is nothing.
    """
    known = [(i, v) for i, v in enumerate(values) if v is not None]
    if not known:
        return ""
    low, high = min(v for _, v in known), max(v for _, v in known)
    span, steps = high - low, max(len(values) - 1, 1)

    def place(index: int, value: float) -> tuple[float, float]:
        share = (value - low) / span if span > 0 else 0.5
        across = index / steps if len(values) > 1 else 0.5
        return (
            round(MARGIN + across * (WIDTH - 2 * MARGIN), 1),
            round(HEIGHT - MARGIN - share * (HEIGHT - 2 * MARGIN), 1),
        )

    lines = "".join(
        f'<polyline points="{" ".join(f"{x},{y}" for x, y in (place(i, v) for i, v in run))}"/>'
        for run in _runs(known)
        if len(run) > 1
    )
    x, y = place(*known[-1])
    return (
        f'<svg class="spark" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" '
        f'aria-label="{_quoted(label)}" fill="none" stroke="currentColor" stroke-width="1.3">'
        f'{lines}<circle cx="{x}" cy="{y}" r="2" fill="currentColor" stroke="none"/></svg>'
    )


def _runs(known: Sequence[tuple[int, float]]) -> list[list[tuple[int, float]]]:
    """Neighbouring nights together."""
    runs: list[list[tuple[int, float]]] = []
    for index, value in known:
        if runs and index == runs[-1][-1][0] + 1:
            runs[-1].append((index, value))
        else:
            runs.append([(index, value)])
    return runs


def _quoted(text: str) -> str:
    for char, name in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;")):
        text = text.replace(char, name)
    return "".join(c if c.isprintable() else " " for c in text)
