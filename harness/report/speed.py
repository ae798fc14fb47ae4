"""How a report says why speculation is as fast as it is: one sentence, and two small tables."""

from __future__ import annotations

from collections.abc import Sequence

from harness.findings import Interval, Prediction, Speed, Summary
from harness.records import LoadPoint
from harness.report import words

FACTOR_COLUMNS = ("factor", "baseline", "speculative", "ratio (interval)")
PREDICTION_COLUMNS = ("k", "tokens a step", "step cost", "decode speed-up", "stands on")


def of_group(summary: Summary, engine: str, load: LoadPoint) -> Speed | None:
    """The speed of one engine and load, or None."""
    return next((s for s in summary.speed if (s.engine, s.load) == (engine, load)), None)


def ratio(found: Interval | None) -> str:
    """An estimate with its interval: 1.24x (1.15–1.33)."""
    return words.DASH if found is None else words.ratio(found.value, found.ci_low, found.ci_high)


def sentence(speed: Speed) -> str:
    """The decomposition as a product, and the break-even length."""
    cost = words.fixed(speed.relative_step_cost.value)
    told = (
        f"Why: {words.fixed(speed.tokens_per_step.value)} tokens a step at the cost of {cost} "
        f"baseline tokens a step give {words.fixed(speed.decode.value)}x in the decode phase "
        f"(break-even: {cost} tokens a step)"
    )
    if speed.throughput is None or speed.residual is None:
        return f"{told}."
    return (
        f"{told}; times {words.fixed(speed.first_token.value)} for the first token, "
        f"{words.fixed(speed.batch.value)} for the requests in flight and "
        f"{words.fixed(speed.residual.value)} for the rest: "
        f"{words.fixed(speed.throughput.value)}x output tokens/s."
    )


def factor_rows(speed: Speed) -> list[list[str]]:
    """One row a factor, by `FACTOR_COLUMNS`."""
    shares = [words.percent(share) for share in speed.first_token_share]
    flying = [words.fixed(n) for n in speed.under_way]
    running = [words.fixed(n) for n in speed.running_batch]
    return [
        ["tokens a step", "1.00", words.fixed(speed.tokens_per_step.value),
         ratio(speed.tokens_per_step)],
        ["time of a step, ms", words.milliseconds(speed.baseline_token_s),
         words.milliseconds(speed.step_s), ratio(speed.relative_step_cost)],
        ["decode phase: the first by the second", words.DASH, words.DASH, ratio(speed.decode)],
        ["time before the first token, share", *shares, ratio(speed.first_token)],
        ["requests in flight", *flying, ratio(speed.batch)],
        ["running batch of a step", *running, words.DASH],
        ["rest", words.DASH, words.DASH, ratio(speed.residual)],
        ["output tokens/s: decode x first token x in flight x rest", words.DASH, words.DASH,
         ratio(speed.throughput)],
    ]  # fmt: skip


def notes(speed: Speed) -> str:
    """What the reader must know of how the steps were timed."""
    if speed.step_basis == "acceptance":
        told = (
            f"The client saw {words.fixed(speed.chunks_per_step)} chunks a verify step, so that a "
            "step's time is the time a token by the acceptance length."
        )
    elif speed.chunks_per_step is None:
        told = "The engine counted no verify steps: every chunk is taken for one."
    else:
        told = "Every chunk is one verify step; its time is the gap before it."
    told += " The step's cost in baseline tokens is the break-even acceptance length."
    if not speed.equal_batch:
        told += " The running batches differ, so that the step's cost is that of another batch."
    return told


def prediction_rows(predictions: Sequence[Prediction]) -> list[list[str]]:
    """One row a number of draft tokens, by `PREDICTION_COLUMNS`; bounds where they are all."""
    rows = []
    for p in predictions:
        gain = words.interval(p.low, p.high)
        rows.append(
            [
                str(p.k),
                words.fixed(p.acceptance_length),
                words.fixed(p.relative_step_cost),
                words.ratio(p.speedup, p.low, p.high) if p.speedup is not None else gain,
                words.one_line(p.basis, 200),
            ]
        )
    return rows
