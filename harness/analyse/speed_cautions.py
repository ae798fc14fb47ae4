"""What a reader of the speed must know: forced acceptance, steps that do not pay, other batches."""

from __future__ import annotations

from collections.abc import Iterable

from harness.analyse.data import RunData, pairs
from harness.analyse.speed import forced_length
from harness.analyse.words import load_words
from harness.findings import Caution, Speed


def speed_cautions(run: RunData, speeds: Iterable[Speed]) -> tuple[Caution, ...]:
    """Everything odd about why a run is as fast as it is."""
    found: list[Caution | None] = [_forced(run, engine) for engine in run.engines()]
    for speed in speeds:
        forced = forced_length(run.plan(speed.engine)) is not None
        # A forced length is asked for, not reached: that it does not pay is no drafter's fault.
        found += [None if forced else _below_break_even(run, speed), _other_batch(speed)]
    return tuple(c for c in found if c is not None)


def _forced(run: RunData, engine: str) -> Caution | None:
    length = forced_length(run.plan(engine))
    if length is None or not run.select(engine, "speculative"):
        return None
    return Caution(
        code="forced_acceptance",
        text=(
            f"{engine}: verify steps were made to yield {length:g} tokens on average "
            "(speculative.forced_length): the output is wrong by design, is not compared, and no "
            "verdict is drawn"
        ),
        advice="Read what a verify step costs; say nothing of the drafter from this run.",
    )


def _below_break_even(run: RunData, speed: Speed) -> Caution | None:
    if speed.decode.value >= 1:
        return None
    # One start of each variant, or an interval that holds 1: it may be so, and may not.
    starts = {both[0].cell.repeat for both in pairs(run.select(speed.engine, load=speed.load))}
    sure = len(starts) > 1 and speed.decode.ci_high is not None and speed.decode.ci_high < 1
    cost = speed.relative_step_cost
    told = f"{cost.value:.2f}"
    if cost.ci_low is not None and cost.ci_high is not None:
        told += f" ({cost.ci_low:.2f}\N{EN DASH}{cost.ci_high:.2f})"
    return Caution(
        code="below_break_even",
        text=(
            f"{speed.engine} at {load_words(speed.load)}: {speed.tokens_per_step.value:.2f} tokens "
            + ("a step do not pay" if sure else "a step may not pay, which is undecided,")
            + f" for verify steps that cost {told} baseline tokens"
        ),
        advice=("Lower" if sure else "Measure more before you believe a loss; if it is one, lower")
        + " speculative.k or the load, or train a better drafter.",
    )


def _other_batch(speed: Speed) -> Caution | None:
    if speed.equal_batch:
        return None
    base, spec = speed.running_batch
    return Caution(
        code="batches_differ",
        text=(
            f"{speed.engine} at {load_words(speed.load)}: the running batch was {base:.1f} "
            f"requests without the drafter and {spec:.1f} with it, so that the cost of a verify "
            "step is that of another batch"
        ),
        advice="Compare step costs in a closed loop; throughput and latency stand as they are.",
    )
