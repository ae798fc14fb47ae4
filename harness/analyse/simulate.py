"""What intervals and verdicts do where the truth is known: `python -m harness.analyse.simulate`.

Every block's value is drawn with the noise that real machines show, and handed to the functions
that judge real runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from harness.analyse.bootstrap import BOOTSTRAP_STARTS, Floats
from harness.analyse.simulated import (
    CONFIDENCE,
    FIRST,
    MOST,
    NOISY,
    PLAIN,
    PRECISION,
    QUIET,
    REALISTIC,
    SURE,
    acceptance_misses,
    any_wrong,
    apart,
    differences,
    fixed_pairs,
    hierarchical_misses,
    percentile_misses,
    power,
    same_against_same,
    stop_early,
)
from harness.analyse.stopping import stopped_confidence


class Row(msgspec.Struct, frozen=True):
    """One line of a table: a share of `hits` in `trials`, and what it should be, if anything."""

    table: str
    setting: str
    what: str
    hits: int
    trials: int
    nominal: float | None = None
    note: str = ""

    @property
    def share(self) -> float:
        """The share that was seen."""
        return self.hits / self.trials

    def p_value(self) -> float | None:
        """Binomial, two-sided, of the nominal share."""
        if self.nominal is None:
            return None
        from scipy.stats import binomtest

        return float(binomtest(self.hits, self.trials, self.nominal).pvalue)


def calls_table(rng: np.random.Generator, runs: int) -> list[Row]:
    """A/A runs: the share that is called, all kinds of noise together and one by one."""
    rows: list[Row] = []
    kinds = {
        "start to start alone": PLAIN,
        "and drift": msgspec.structs.replace(PLAIN, drift=1.0),
        "and slow (AR(1))": msgspec.structs.replace(PLAIN, slow=1.0, correlation=0.8),
        "and outliers": msgspec.structs.replace(PLAIN, outliers=0.02),
    }
    for pairs in (2, 3, 4, 6):
        called = same_against_same(rng, runs, pairs, REALISTIC)
        many = 20 * runs
        exact = apart(differences(rng, many, pairs, REALISTIC)) / many
        note = f"of {many}: {exact:.2%}"
        rows.append(Row("A/A, all noise", f"{pairs} starts", "called", called, runs, 0.05, note))
    for name, noise in kinds.items():
        called = same_against_same(rng, runs, 4, noise)
        rows.append(Row("A/A, 4 starts", name, "called", called, runs, 0.05))
    for pairs in (3, 4, 6, 10):
        missed = percentile_misses(rng, runs // 2, pairs, REALISTIC)
        setting = f"{pairs} starts"
        rows.append(Row("percentile bootstrap", setting, "covered", runs // 2 - missed, runs // 2))
    return rows


def bootstrap_table(rng: np.random.Generator, runs: int) -> list[Row]:
    """The hierarchical bootstrap-t, below the starts that it is used from, and from there."""
    rows: list[Row] = []
    for pairs, requests in ((10, 0.3), (BOOTSTRAP_STARTS, 0.3), (BOOTSTRAP_STARTS, 1.0)):
        missed = hierarchical_misses(rng, runs, pairs, requests)
        setting = f"{pairs} starts, requests {requests:g}"
        nominal = None if pairs < BOOTSTRAP_STARTS else CONFIDENCE
        rows.append(Row("hierarchical", setting, "covered", runs - missed, runs, nominal))
    return rows


def acceptance_table(rng: np.random.Generator, runs: int) -> list[Row]:
    """The acceptance length's interval over starts, and over the requests of a single start."""
    rows: list[Row] = []
    for units, name, sizes, between, nominal in (
        (3, "3 starts", 0.1, 0.02, CONFIDENCE),
        (6, "6 starts", 0.1, 0.02, CONFIDENCE),
        (6, "6 starts of very unequal size", 0.5, 0.05, None),
        (50, "50 requests of one start", 0.5, 0.1, CONFIDENCE),
    ):
        missed = acceptance_misses(rng, runs, units, sizes=sizes, between=between)
        rows.append(Row("acceptance length", name, "covered", runs - missed, runs, nominal))
    return rows


def family_table(rng: np.random.Generator, runs: int) -> list[Row]:
    """Several loads at once: runs with any wrong verdict, uncorrected and corrected."""
    rows: list[Row] = []
    edge, fast = math.log(1.03), math.log(1.2)
    for name, truth, min_effect in (
        ("4 loads the same", [0.0] * 4, 1e-9),
        ("8 loads the same", [0.0] * 8, 1e-9),
        ("8 loads, 4 of them +20%", [0.0] * 4 + [fast] * 4, 1e-9),
        ("8 loads +3% (min_effect)", [edge] * 8, 0.03),
        ("8 loads, 2 of them +3%, 6 +20%", [edge] * 2 + [fast] * 6, 0.03),
    ):
        for corrected in (False, True):
            wrong = any_wrong(rng, runs, truth, min_effect, corrected=corrected)
            setting = f"{name}, {'corrected' if corrected else 'each alone'}"
            rows.append(Row("any wrong verdict", setting, "runs", wrong, runs))
    return rows


def power_table(rng: np.random.Generator, runs: int) -> list[Row]:
    """A true difference of 3%."""
    rows: list[Row] = []
    for noise in (0.005, 0.01, 0.02, 0.03):
        for pairs in (3, 4, 6, 10):
            seen, better = power(rng, runs, pairs, noise, 0.03)
            setting = f"pairs differ by {noise:.1%}, {pairs} starts"
            note = f"verdict `better` at min_effect 3%: {better / runs:.0%}"
            rows.append(Row("3% is found", setting, "found", seen, runs, note=note))
    return rows


def stopping_table(rng: np.random.Generator, runs: int) -> list[Row]:
    """`--precision 3%`: coverage and pairs, against the fixed design as precise."""
    rows: list[Row] = []
    confidence = stopped_confidence(CONFIDENCE, FIRST, MOST)
    sure = fixed_pairs(NOISY / PRECISION, SURE)

    def tried(name: str, logs: Floats, level: float, fixed: int, limit: int = MOST) -> Row:
        found = stop_early(logs / PRECISION, confidence=level, limit=limit)
        mean = float(found.pairs.mean())
        note = (
            f"{mean:.1f} pairs, fixed {fixed}: saves {1 - mean / fixed:.0%}; "
            f"narrow in {float(found.narrow.mean()):.1%}"
        )
        return Row("stopped early", name, "covered", int(found.covered.sum()), runs, note=note)

    for noise in (0.005, 0.01, 0.02, 0.03, 0.06):
        logs = noise * rng.standard_normal((runs, MOST))
        fixed = fixed_pairs(noise / PRECISION, SURE)
        rows.append(tried(f"noise {noise:.1%}, known before", logs, confidence, fixed))
    worst = 0.05 * rng.standard_normal((runs, MOST))
    fixed = fixed_pairs(0.05 / PRECISION, SURE)
    rows.append(tried("noise 5.0%, known before, not made up for", worst, CONFIDENCE, fixed))
    spread = QUIET * (NOISY / QUIET) ** rng.random((runs, 1))
    logs = spread * rng.standard_normal((runs, MOST))
    unknown = f"noise {QUIET:.1%} to {NOISY:.0%}, not known"
    rows.append(tried(unknown, logs, confidence, sure))
    rows.append(tried(f"{unknown}, not made up for", logs, CONFIDENCE, sure))
    rows.append(tried(f"{unknown}, 5 pairs at most", logs, confidence, sure, 5))
    logs = spread * differences(rng, runs, MOST, REALISTIC)
    rows.append(tried(f"{unknown}, all kinds", logs, confidence, sure))
    return rows


TABLES: dict[str, tuple[Callable[[np.random.Generator, int], list[Row]], int]] = {
    "calls": (calls_table, 2000),
    "bootstrap": (bootstrap_table, 2000),
    "family": (family_table, 2000),
    "power": (power_table, 20_000),
    "stopping": (stopping_table, 20_000),
    "acceptance": (acceptance_table, 2000),
}
"""Each table, and how many runs are simulated for each of its lines."""


def simulate(*, seed: int = 0, share: float = 1.0) -> list[Row]:
    """All tables, each from a seed of its own; `share` of the runs."""
    rows: list[Row] = []
    for index, (table, runs) in enumerate(TABLES.values()):
        rows += table(np.random.default_rng([seed, index]), max(100, round(share * runs)))
    return rows


def text_of(rows: Sequence[Row]) -> str:
    """The rows as a table of plain text."""
    lines = []
    for row in rows:
        p = row.p_value()
        wanted = "" if p is None else f"nominal {row.nominal:.0%}, p = {p:.3f}"
        share = f"{row.share:6.1%} of {row.trials}"
        said = "  ".join(part for part in (wanted, row.note) if part)
        lines.append(f"{row.table:<21} {row.setting:<46} {row.what:<8} {share:<16} {said}".rstrip())
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the table; `--seed` and `--share` (of the runs) as options."""
    import argparse

    parser = argparse.ArgumentParser(prog="python -m harness.analyse.simulate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="of the runs to simulate")
    given = parser.parse_args()
    print(text_of(simulate(seed=given.seed, share=given.share)), end="")


if __name__ == "__main__":
    main()
