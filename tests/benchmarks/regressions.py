"""The watch over nightly series where the truth is known; the tables go into docs/regressions.md.

    python tests/benchmarks/regressions.py [--runs 5] [--series 200] [--seed 0] [--processes 2]
        [--write]

Prints what `python -m harness.analyse.series` prints, and with `--write` puts it into the page.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from pages import put

from harness.analyse.series.table import missed, simulate, text_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "regressions.md"
BEGIN = "<!-- regressions: begin -->"
END = "<!-- regressions: end -->"


def main() -> int:
    """Simulate, print, write; 1 where what was asked of the watch is not reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--series", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="put it into docs/regressions.md")
    given = parser.parse_args()
    begun = time.perf_counter()
    tallies = simulate(
        seed=given.seed, runs=given.runs, series=given.series, processes=given.processes
    )
    took = time.perf_counter() - begun
    text = text_of(tallies)
    print(text, end="")
    print(f"{took:.0f} s with {given.processes} processes", file=sys.stderr)
    if given.write:
        drawn = (
            f"Each line of {given.runs} x {given.series} series over 120 nights, seed "
            f"{given.seed}; in brackets 95% intervals (Wilson)."
        )
        put(PAGE, BEGIN, END, f"{drawn}\n\n{text}")
    return 1 if missed(tallies) else 0


if __name__ == "__main__":
    sys.exit(main())
