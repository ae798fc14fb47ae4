"""What intervals and verdicts do where the truth is known: `python -m harness.analyse.simulate`.

Every block's value is drawn with the noise that real machines show, and handed to the functions
that judge real runs. Values are logarithms; noise is relative to what differs from start to start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from harness.analyse.bootstrap import FEWEST_STARTS, Floats, PairSums, hierarchical
from harness.analyse.statistics import holm, log_mean, t_quantile, verdict
from harness.analyse.stopping import stopped_confidence

CONFIDENCE = 0.95
FIRST, MOST = 3, 20
PRECISION = math.log(1.03)
QUIET, NOISY = 0.005, 0.03
"""Of what differs from pair to pair: the range of noise that early stopping is tried over."""

SURE = 0.95
"""The share of runs in which the fixed design has to be precise enough."""


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """What moves a block, in units of what differs from start to start (normal, deviation 1).

    `slow`: what passes slowly over neighbouring starts, an AR(1) process of a deviation up to so
    much and a correlation up to `correlation`; `drift`: deviation of the change from the first
    start to the last; `outliers`: the share of starts that are 3 to 8 deviations slower.
    """

    slow: float = 1.0
    correlation: float = 0.8
    drift: float = 1.0
    outliers: float = 0.02


REALISTIC = Noise()
PLAIN = Noise(slow=0, correlation=0, drift=0, outliers=0)


class Row(msgspec.Struct, frozen=True, kw_only=True):
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


def differences(rng: np.random.Generator, runs: int, pairs: int, noise: Noise) -> Floats:
    """[run, pair]: log ratios of runs in which speculation changes nothing, starts in order ABBA.

    Divided by the square root of 2: without further noise their deviation is 1.
    """
    starts = 2 * pairs
    value = rng.standard_normal((runs, starts))
    if noise.slow:
        size = noise.slow * rng.random((runs, 1))
        near = noise.correlation * rng.random(runs)
        shocks = rng.standard_normal((runs, starts))
        for k in range(1, starts):
            shocks[:, k] = near * shocks[:, k - 1] + np.sqrt(1 - near**2) * shocks[:, k]
        value += size * shocks
    if noise.drift:
        value += noise.drift * rng.standard_normal((runs, 1)) * np.linspace(-0.5, 0.5, starts)
    if noise.outliers:
        hit = rng.random((runs, starts)) < noise.outliers
        value -= hit * rng.uniform(3, 8, (runs, starts))
    first, second = value[:, 0::2], value[:, 1::2]
    turn = np.where(np.arange(pairs) % 2 == 0, 1.0, -1.0)
    return turn * (second - first) / math.sqrt(2)


def same_against_same(rng: np.random.Generator, runs: int, pairs: int, noise: Noise) -> int:
    """How many of `runs` without any difference are called better or worse, whatever the size."""
    called = 0
    for logs in differences(rng, runs, pairs, noise):
        found = log_mean(logs.tolist())
        low, high = found.interval(CONFIDENCE) or (None, None)
        ratio = math.exp(found.mean)
        called += verdict(ratio, low, high, better="higher", min_effect=1e-9) in ("better", "worse")
    return called


def apart(logs: Floats) -> int:
    """How many runs' t intervals leave zero out; many at once, by the same formula."""
    pairs = logs.shape[1]
    quantile = t_quantile(0.5 + CONFIDENCE / 2, pairs - 1)
    half = quantile * logs.std(axis=1, ddof=1) / math.sqrt(pairs)
    return int((np.abs(logs.mean(axis=1)) > half).sum())


def percentile_misses(rng: np.random.Generator, runs: int, pairs: int, noise: Noise) -> int:
    """How often the plain bootstrap's percentiles over pairs leave the truth out."""
    missed = 0
    for logs in differences(rng, runs, pairs, noise):
        means = logs[rng.integers(0, pairs, (400, pairs))].mean(axis=1)
        low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
        missed += not low <= 0 <= high
    return missed


def hierarchical_misses(
    rng: np.random.Generator, runs: int, pairs: int, requests: float, resamples: int = 399
) -> int:
    """How often the hierarchical bootstrap-t leaves the truth out.

    `requests`: deviation of a block's value that its 20 batches of requests bring, in units of
    what differs from start to start, here 1%.
    """
    scale, batches = 0.01, 20
    missed = 0
    for run, logs in enumerate(differences(rng, runs, pairs, REALISTIC)):
        sums = np.exp(
            rng.standard_normal((pairs, batches, 4)) * scale * requests * math.sqrt(batches)
        )
        sums[:, :, 1::2] = 1.0
        of = np.log(sums.sum(axis=1))
        blocks = scale * math.sqrt(2) * logs + of[:, 0] - of[:, 2]
        starts = [
            [PairSums(log_ratio=float(value), batches=own)]
            for value, own in zip(blocks, sums, strict=True)
        ]
        low, high = hierarchical(starts, name=str(run), resamples=resamples).interval(
            CONFIDENCE
        ) or (0.0, math.inf)
        missed += not low <= 1 <= high
    return missed


def any_called(
    rng: np.random.Generator, runs: int, loads: int, effects: int, *, corrected: bool
) -> int:
    """In how many runs at least one of the loads without a difference is called.

    Three pairs; half of the noise is common to all loads. `effects` of the loads are 20% better.
    """
    truth = np.zeros(loads)
    truth[:effects] = math.log(1.2)
    wrong = 0
    common = differences(rng, runs, 3, REALISTIC)
    own = [differences(rng, runs, 3, REALISTIC) for _ in range(loads)]
    for run in range(runs):
        found = [
            log_mean((0.01 * (common[run] + own[k][run]) + truth[k]).tolist()) for k in range(loads)
        ]
        alphas = [1 - CONFIDENCE] * loads
        levels = holm([f.p_value() or 0.0 for f in found], alphas) if corrected else alphas
        called = [(f.p_value() or 0.0) <= level for f, level in zip(found, levels, strict=True)]
        wrong += any(called[effects:])
    return wrong


def power(
    rng: np.random.Generator, runs: int, pairs: int, noise: float, min_effect: float
) -> tuple[int, int]:
    """How many runs with 3% more are found to differ, and how many are called better."""
    logs = noise * rng.standard_normal((runs, pairs)) + math.log(1.03)
    mean = logs.mean(axis=1)
    half = t_quantile(0.5 + CONFIDENCE / 2, pairs - 1) * logs.std(axis=1, ddof=1) / math.sqrt(pairs)
    seen = mean - half > 0
    return int(seen.sum()), int((seen & (np.exp(mean) >= 1 + min_effect)).sum())


class Stopped(msgspec.Struct, frozen=True, kw_only=True):
    """Runs that stopped as soon as they were precise: where, and whether the interval held."""

    pairs: Floats
    covered: Floats
    narrow: Floats


def stop_early(logs: Floats, *, confidence: float, limit: int = MOST) -> Stopped:
    """Stop each run (a row, in units of the wanted half-width) at its first narrow interval."""
    runs, most = logs.shape
    n = np.arange(1, most + 1)
    mean = np.cumsum(logs, axis=1) / n
    variance = (np.cumsum(logs**2, axis=1) - n * mean**2) / np.maximum(n - 1, 1)
    quantile = np.array([math.inf, *(t_quantile(0.5 + confidence / 2, k) for k in range(1, most))])
    half = quantile * np.sqrt(np.maximum(variance, 1e-12) / n)
    ends = half <= 1
    ends[:, : FIRST - 1] = False
    ends[:, limit - 1 :] = True
    at, rows = ends.argmax(axis=1), np.arange(runs)
    return Stopped(
        pairs=at + 1.0,
        covered=(np.abs(mean[rows, at]) <= half[rows, at]) * 1.0,
        narrow=(half[rows, at] <= 1) * 1.0,
    )


def fixed_pairs(noise: float, share: float) -> int:
    """The fewest pairs whose interval is narrow enough in such a share of runs.

    `noise` in units of the wanted half-width. By the chi-squared distribution of the variance.
    """
    from scipy.special import chdtr

    n = 2
    while True:
        most = math.sqrt(n) / (t_quantile(0.5 + CONFIDENCE / 2, n - 1) * noise)
        if chdtr(n - 1, (n - 1) * most**2) >= share:
            return n
        n += 1


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
        rows.append(_row("A/A, all noise", f"{pairs} starts", "called", called, runs, 0.05, note))
    for name, noise in kinds.items():
        called = same_against_same(rng, runs, 4, noise)
        rows.append(_row("A/A, 4 starts", name, "called", called, runs, 0.05))
    for pairs in (3, 4, 6, 10):
        missed = percentile_misses(rng, runs // 2, pairs, REALISTIC)
        setting = f"{pairs} starts"
        rows.append(_row("percentile bootstrap", setting, "covered", runs // 2 - missed, runs // 2))
    return rows


def bootstrap_table(rng: np.random.Generator, runs: int) -> list[Row]:
    """The hierarchical bootstrap-t: below `FEWEST_STARTS`, where it is not used, and from there."""
    rows: list[Row] = []
    for pairs, requests in ((10, 0.3), (FEWEST_STARTS, 0.3), (FEWEST_STARTS, 1.0)):
        missed = hierarchical_misses(rng, runs, pairs, requests)
        setting = f"{pairs} starts, requests {requests:g}"
        nominal = None if pairs < FEWEST_STARTS else CONFIDENCE
        rows.append(_row("hierarchical", setting, "covered", runs - missed, runs, nominal))
    return rows


def family_table(rng: np.random.Generator, runs: int) -> list[Row]:
    """Several loads at once: runs with any wrong call, plain and corrected."""
    rows: list[Row] = []
    for loads, effects in ((4, 0), (8, 0), (8, 4)):
        for corrected in (False, True):
            wrong = any_called(rng, runs, loads, effects, corrected=corrected)
            kind = "Holm" if corrected else "plain"
            setting = f"{loads} loads, {effects} differ, {kind}"
            rows.append(_row("any wrong call", setting, "runs", wrong, runs))
    return rows


def power_table(rng: np.random.Generator, runs: int) -> list[Row]:
    """A true difference of 3%."""
    rows: list[Row] = []
    for noise in (0.005, 0.01, 0.02, 0.03):
        for pairs in (3, 4, 6, 10):
            seen, better = power(rng, runs, pairs, noise, 0.03)
            setting = f"pairs differ by {noise:.1%}, {pairs} starts"
            note = f"verdict `better` at min_effect 3%: {better / runs:.0%}"
            rows.append(_row("3% is found", setting, "found", seen, runs, note=note))
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
        return _row("stopped early", name, "covered", int(found.covered.sum()), runs, note=note)

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


def _row(
    table: str,
    setting: str,
    what: str,
    hits: int,
    trials: int,
    nominal: float | None = None,
    note: str = "",
) -> Row:
    return Row(
        table=table,
        setting=setting,
        what=what,
        hits=hits,
        trials=trials,
        nominal=nominal,
        note=note,
    )


TABLES: dict[str, tuple[Callable[[np.random.Generator, int], list[Row]], int]] = {
    "calls": (calls_table, 2000),
    "bootstrap": (bootstrap_table, 2000),
    "family": (family_table, 2000),
    "power": (power_table, 20_000),
    "stopping": (stopping_table, 20_000),
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
