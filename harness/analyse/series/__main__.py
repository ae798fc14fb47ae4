"""The watch over series where the truth is known: `python -m harness.analyse.series`."""

from __future__ import annotations

import sys


def main() -> int:
    """Print the tables; 1 where what was asked of the watch is not reached."""
    import argparse

    parser = argparse.ArgumentParser(prog="python -m harness.analyse.series", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="other draws")
    parser.add_argument("--runs", type=int, default=5, help="histories of each kind (5)")
    parser.add_argument("--series", type=int, default=200, help="series of each history (200)")
    parser.add_argument("--processes", type=int, default=2, help="at once (2)")
    given = parser.parse_args()
    if min(given.runs, given.series, given.processes) < 1 or given.seed < 0:
        parser.error("--runs, --series and --processes take 1 or more, --seed 0 or more")
    from harness.analyse.series.table import missed, simulate, text_of

    tallies = simulate(
        seed=given.seed, runs=given.runs, series=given.series, processes=given.processes
    )
    print(text_of(tallies), end="")
    return 1 if missed(tallies) else 0


if __name__ == "__main__":
    sys.exit(main())
