"""What a reader must know before believing a number. Each check looks at one thing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from harness.analyse.acceptance import disagreements, pooled_acceptance
from harness.analyse.compare import load_words
from harness.analyse.cut import answers_cut, trace_cut
from harness.analyse.data import MOST_FAILED, CellData, RunData, pairs
from harness.analyse.fidelity import client_cautions
from harness.analyse.integrity import total
from harness.analyse.statistics import sign_test
from harness.measure.metrics import dropped
from harness.records import (
    VARIANTS,
    Acceptance,
    Caution,
    Comparison,
    Integrity,
    LoadPoint,
    Metrics,
)

LATE_S = 0.05
FEW_REQUESTS = 20
FEW_REPEATS = 3
OTHER_TRAFFIC = 0.02


def cell_cautions(
    data: CellData, metrics: Metrics, acceptance: Acceptance | None
) -> tuple[Caution, ...]:
    """Everything odd about one cell."""
    checks = (
        _failed(data),
        _dropped(data, metrics),
        _retried(data),
        trace_cut(data),
        _not_steady(metrics),
        _late(metrics),
        *client_cautions(data, metrics),
        _uncounted(data),
        _counters(data),
        _other_traffic(data, metrics),
        _sources(data, acceptance),
    )
    return tuple(c for c in checks if c is not None)


def _failed(data: CellData) -> Caution | None:
    errors = Counter(
        r.error or r.status for r in data.records if r.status != "ok" and not dropped(r)
    )
    if not errors:
        return None
    error, count = errors.most_common(1)[0]
    return Caution(
        code="failed_requests",
        text=(
            f"{errors.total()} of {len(data.records)} requests failed, "
            f"{count} of them with: {error}"
        ),
        advice="Figures are of the whole answers alone; see the engine's log.",
    )


def _dropped(data: CellData, metrics: Metrics) -> Caution | None:
    if not metrics.requests_dropped:
        return None
    return Caution(
        code="requests_dropped",
        text=(
            f"{metrics.requests_dropped} of {len(data.records)} requests were not sent: as many "
            "were under way as load.max_concurrency allows"
        ),
        advice="The rate was not reached, and latencies are of the requests that were let in.",
    )


def _retried(data: CellData) -> Caution | None:
    again = sum(r.tries > 1 for r in data.records)
    if not again:
        return None
    return Caution(
        code="requests_retried",
        text=f"{again} of {len(data.records)} requests were asked more than once (load.retries)",
        advice="Their latencies are of the last try; the waiting in between is in none.",
    )


def _not_steady(metrics: Metrics) -> Caution | None:
    if metrics.steady is None or not metrics.steady.growing:
        return None
    return Caution(
        code="not_steady",
        text="requests under way grew through the whole window: there is no steady state",
        advice=(
            "The server cannot keep up with this rate, so that latencies grow with the length of "
            "the measurement; lower load.request_rate, or see `python -m harness capacity`."
        ),
    )


def _late(metrics: Metrics) -> Caution | None:
    lag = metrics.send_lag_s
    if lag is None or lag.p99 is None or lag.p99 < LATE_S:
        return None
    return Caution(
        code="send_lag",
        text=f"requests were sent late: p99 of {1000 * lag.p99:.0f} ms after they were due",
        advice="Read the latencies counted from the due time; lower the rate or free the client.",
    )


def _uncounted(data: CellData) -> Caution | None:
    without = sum(r.output_tokens is None for r in data.ok)
    if not without:
        return None
    return Caution(
        code="token_counts_missing",
        text=f"the server told no token count for {without} of {len(data.ok)} answers",
        advice="Tokens per second and time per token are left out rather than guessed.",
    )


def _counters(data: CellData) -> Caution | None:
    note = data.counters.note
    # A baseline needs no counters, and the readers of an attached server know that it has none.
    if note is None or data.cell.variant == "baseline":
        return None
    return Caution(
        code="counters",
        text=f"the server's counters are of no use here: {note}",
        advice="Acceptance comes from the next best source, which is named beside it.",
    )


def _other_traffic(data: CellData, metrics: Metrics) -> Caution | None:
    theirs, ours = data.counters.generation_tokens, metrics.output_tokens
    if theirs is None or not ours or metrics.requests_failed:
        return None
    if abs(theirs / ours - 1) <= OTHER_TRAFFIC:
        return None
    return Caution(
        code="other_traffic",
        text=f"the server counted {theirs} output tokens in the window, this client {ours}",
        advice="Another client may have used the server: its drafts are in the counters too.",
    )


def _sources(data: CellData, acceptance: Acceptance | None) -> Caution | None:
    if data.cell.variant == "baseline":
        return None
    if acceptance is None:
        return Caution(
            code="acceptance_unknown",
            text="no source tells how many draft tokens were accepted",
            advice="Switch on the engine's metrics, or its per-request figures.",
        )
    odd = disagreements(acceptance)
    if not odd:
        return None
    return Caution(
        code="acceptance_sources_disagree",
        text=(
            f"acceptance length by {acceptance.source} is {acceptance.length:.3f}, "
            f"but by {', by '.join(odd)}"
        ),
        advice=(
            "The client sees steps merged into one chunk and runs cut at a stop; counters also "
            "count failed requests and other clients."
        ),
    )


def run_cautions(
    run: RunData,
    integrity: dict[str, Integrity | None],
    comparisons: Sequence[Comparison],
) -> tuple[Caution, ...]:
    """Everything odd about the run as a whole, engine by engine."""
    found: list[Caution | None] = []
    for engine in run.engines():
        found.append(_few_repeats(run, engine))
        found.append(_few_requests(run, engine))
        found.append(_repeated_prompts(run, engine))
        found.append(_made_prompts(run, engine))
        found.append(answers_cut(run, engine))
        found.append(_diverged(run, engine, integrity))
        found.append(_accuracy(run, engine))
        for load in run.loads(engine):
            found.append(_many_failed(run, engine, load))
            found.append(_below_break_even(run, engine, load, comparisons))
    found.extend(_labels(run))
    return tuple(c for c in found if c is not None)


def _few_repeats(run: RunData, engine: str) -> Caution | None:
    repeats = len({both[0].cell.repeat for both in pairs(run.select(engine))})
    if repeats == 0 or repeats >= FEW_REPEATS:
        return None
    times = "once" if repeats == 1 else f"{repeats} times"
    running = bool(run.manifest.plan.get("request", {}).get("urls"))
    done, apart, key = ("started", "start to start", "launches")
    if running:  # nothing is started; the blocks are spread over time
        done, apart, key = ("measured", "time to time", "blocks")
    return Caution(
        code="few_launches",
        text=(
            f"{engine}: each variant was {done} {times}, so what differs from {apart} is "
            + ("not seen and no verdict is drawn" if repeats == 1 else "barely in the intervals")
        ),
        advice=f"Use --set compare.{key}={FEW_REPEATS} or more for a decision that costs money.",
    )


def _few_requests(run: RunData, engine: str) -> Caution | None:
    counts = {
        (load_words(load), variant): sum(len(c.ok) for c in run.select(engine, variant, load))
        for load in run.loads(engine)
        for variant in VARIANTS
        if run.select(engine, variant, load)
    }
    few = {key: n for key, n in counts.items() if n < FEW_REQUESTS}
    if not few:
        return None
    (load, variant), n = min(few.items(), key=lambda item: item[1])
    return Caution(
        code="few_samples",
        text=f"{engine}: only {n} whole answers for {variant} at {load}",
        advice="Percentiles of so few are near the extremes; raise load.num_requests.",
    )


def _many_failed(run: RunData, engine: str, load: LoadPoint) -> Caution | None:
    whole = [c for c in run.select(engine, load=load) if c.timeline.interrupted is None]
    cells = [c for both in pairs(whole) for c in both if c.many_failed]
    if not cells:
        return None
    worst = max(cells, key=lambda c: c.failed_share[0] / c.failed_share[1])
    failed, ended = worst.failed_share
    return Caution(
        code="verdict_withheld",
        text=(
            f"{engine} at {load_words(load)}: {failed} of {ended} requests of "
            f"{worst.cell.cell_id} failed, and no verdict is drawn where more than "
            f"{MOST_FAILED:.0%} of a cell's do"
        ),
        advice="What was answered is another load than the other variant's; mend the failures.",
    )


def _repeated_prompts(run: RunData, engine: str) -> Caution | None:
    for turn in {(c.cell.variant, c.cell.repeat) for c in run.select(engine)}:
        asked: Counter[str] = Counter()
        for data in run.select(engine, turn[0]):
            if data.cell.repeat == turn[1]:
                # The turns of a conversation share its id: it came again where its first turn did.
                asked.update(r.prompt_id for r in data.records if r.turn == 0)
        if asked and max(asked.values()) > 1:
            return Caution(
                code="prompts_repeat",
                text=f"{engine}: the data set is too small, prompts came again within one start",
                advice="A prefix cache answers them faster; give more prompts or fewer requests.",
            )
    return None


def _made_prompts(run: RunData, engine: str) -> Caution | None:
    dataset = run.plan(engine)["workload"]["dataset"]
    if dataset not in ("random", "synthetic") or not run.select(engine, "speculative"):
        return None
    what = "random tokens" if dataset == "random" else "words in no order"
    return Caution(
        code=f"{dataset}_prompts",
        text=f"{engine}: the prompts are {what}, and acceptance on such prompts means nothing",
        advice="They show what load does; judge a drafter, and its speed, on prompts like yours.",
    )


def _diverged(run: RunData, engine: str, integrity: dict[str, Integrity | None]) -> Caution | None:
    whole = total([integrity.get(c.cell.cell_id) for c in run.select(engine, "speculative")])
    if whole is None or whole.diverged == 0:
        return None
    exact = run.plan(engine)["engine"]["dtype"] == "float32"
    first = whole.first_divergence[0]
    return Caution(
        code="outputs_diverged",
        text=(
            f"{engine}: {whole.diverged} of {whole.compared} greedy outputs differ from the "
            f"baseline's, first at {first['unit']} {first['position']} of prompt "
            f"{first['prompt_id']}"
        ),
        advice=(
            "In float32 a lossless engine gives the same tokens but for exact ties: look for a "
            "defect of the engine."
            if exact
            else "Low precision makes near-ties fall either way: compare with "
            "--set engine.dtype=float32 before blaming the engine."
        ),
    )


def _accuracy(run: RunData, engine: str) -> Caution | None:
    gained = lost = 0
    for base, cand in pairs(run.select(engine)):
        right = {(r.index, r.prompt_id): r.correct for r in base.ok}
        for r in cand.ok:
            was = right.get((r.index, r.prompt_id))
            if was is None or r.correct is None:
                continue
            gained += r.correct and not was
            lost += was and not r.correct
    p = sign_test(gained, lost)
    if p >= 0.05:
        return None
    return Caution(
        code="accuracy_differs",
        text=(
            f"{engine}: with speculation {gained} answers became right and {lost} wrong "
            f"(exact sign test, p = {p:.2g})"
        ),
        advice="Speculation must not change what is answered; look at the outputs that differ.",
    )


def _below_break_even(
    run: RunData, engine: str, load: LoadPoint, comparisons: Sequence[Comparison]
) -> Caution | None:
    speed = next(
        (
            c
            for c in comparisons
            if (c.engine, c.load, c.metric) == (engine, load, "output_tokens_per_s")
        ),
        None,
    )
    if speed is None or speed.ratio is None or speed.ratio >= 1:
        return None
    pooled = pooled_acceptance(run.select(engine, "speculative", load))
    if pooled is None or pooled.length is None:
        return None
    # Speed-up = acceptance length / relative cost of a verify step, so that cost is break-even.
    return Caution(
        code="below_break_even",
        text=(
            f"{engine} at {load_words(load)}: an acceptance length of {pooled.length:.2f} does not "
            f"pay for verify steps that cost {pooled.length / speed.ratio:.2f} plain ones"
        ),
        advice="Lower speculative.k or the load, or train a better drafter.",
    )


def _labels(run: RunData) -> list[Caution]:
    return [
        Caution(
            code="variant_unknown",
            text=f"{launch.engine}: {launch.label}",
            advice="Say which it is with --variants baseline or --variants speculative.",
        )
        for launch in run.launches
        if launch.label is not None and "cannot be told" in launch.label
    ]
