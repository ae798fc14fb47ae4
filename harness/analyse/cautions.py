"""What a reader must know before believing a number. Each check looks at one thing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from harness.analyse.cut import answers_cut, trace_cut
from harness.analyse.data import MOST_FAILED, CellData, RunData, pairs
from harness.analyse.expected import expected_caution
from harness.analyse.fairness import fairness_cautions
from harness.analyse.fidelity import client_cautions
from harness.analyse.integrity import matched_rows, total
from harness.analyse.reconcile import acceptance_cautions
from harness.analyse.statistics import sign_test
from harness.analyse.words import load_words
from harness.errors import one_line
from harness.findings import Acceptance, Caution, Comparison, Integrity, Metrics
from harness.measure.columns import Names
from harness.records import VARIANTS, LoadPoint

LATE_S = 0.05
FEW_REQUESTS = 20
FEW_REPEATS = 3
ERRORS_TOLD = 3
"""Messages of failed requests that a caution names, the commonest first."""


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
        *acceptance_cautions(data, acceptance),
    )
    return tuple(c for c in checks if c is not None)


def _failed(data: CellData) -> Caution | None:
    lost = data.records.where(~data.records.answered & ~data.records.dropped)
    errors = Counter(lost.names("error").or_else(lost.names("status")).python())
    if not errors:
        return None
    told = [f"{n} with: {one_line(error, 160)}" for error, n in errors.most_common(ERRORS_TOLD)]
    rest = errors.total() - sum(n for _, n in errors.most_common(ERRORS_TOLD))
    if rest:
        told.append(f"{rest} otherwise")
    return Caution(
        code="failed_requests",
        text=f"{errors.total()} of {len(data.records)} requests failed, {'; '.join(told)}",
        advice=f"Figures are of the whole answers alone; {_failure_advice(data, errors)}.",
    )


def _failure_advice(data: CellData, errors: Counter[str]) -> str:
    if any("context length" in error.lower() for error in errors):
        return (
            "leave prompts that are too long out: workload.max_input_tokens, and target.path if "
            "the server runs already"
        )
    # A server that was not started here has no start-up time, and no log in the run's folder.
    return "see the server's own log" if data.timeline.ready_s is None else "see the engine's log"


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
    again = int((data.records.ints("tries").values > 1).sum())
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
    without = int((~data.ok.ints("output_tokens").known).sum())
    if not without:
        return None
    return Caution(
        code="token_counts_missing",
        text=f"the server told no token count for {without} of {len(data.ok)} answers",
        advice="Tokens per second and time per token are left out rather than guessed.",
    )


def run_cautions(
    run: RunData,
    integrity: dict[str, Integrity | None],
    comparisons: Sequence[Comparison],
    metrics: dict[str, Metrics],
) -> tuple[Caution, ...]:
    """Everything odd about the run as a whole, engine by engine."""
    found: list[Caution | None] = []
    for engine in run.engines():
        found.append(_cells_missing(run, engine))
        found.append(_few_repeats(run, engine))
        found.append(_few_requests(run, engine))
        found.append(_repeated_prompts(run, engine))
        found.append(_made_prompts(run, engine))
        found.append(answers_cut(run, engine))
        found.append(_diverged(run, engine, integrity))
        found.append(_accuracy(run, engine))
        found.append(expected_caution(run, engine))
        for load in run.loads(engine):
            found.append(_many_failed(run, engine, load))
        found.extend(fairness_cautions(run, engine, comparisons, metrics))
    found.extend(_labels(run))
    found.append(_changed(run))
    return tuple(c for c in found if c is not None)


def _changed(run: RunData) -> Caution | None:
    """Whether it was gone on with although what its figures depend on had changed."""
    changes = run.manifest.changes
    if not changes:
        return None
    return Caution(
        code="environment_changed",
        text=f"it was gone on with although {'; '.join(changes)}",
        advice="Cells from before and after must not be compared: start a new run for a verdict.",
    )


def _cells_missing(run: RunData, engine: str) -> Caution | None:
    """Whether cells that were planned are not there, and nothing tells why."""
    told = any(launch.failure is not None for launch in run.launches if launch.engine == engine)
    saved = {c.cell.cell_id for c in run.select(engine)}
    planned = [c.cell_id for c in run.manifest.cells if c.engine == engine]
    missing = [cell_id for cell_id in planned if cell_id not in saved]
    if not saved or not missing or told or run.searching:
        return None  # a failure is told by itself; a search leaves loads out that it need not try
    return Caution(
        code="cells_missing",
        text=f"{engine}: {len(missing)} of {len(planned)} planned cells are not there, first "
        f"{missing[0]}",
        advice=(
            "Measure them with `python -m harness resume`. If they were removed, all figures are "
            "of a choice of the cells."
        ),
    )


def _few_repeats(run: RunData, engine: str) -> Caution | None:
    repeats = len({both[0].cell.repeat for both in pairs(run.select(engine))})
    if repeats == 0 or repeats >= FEW_REPEATS:
        return None
    times = "once" if repeats == 1 else f"{repeats} times"
    done, apart, key = ("started", "start to start", "launches")
    if run.attached:  # nothing is started; the blocks are spread over time
        done, apart, key = ("measured", "time to time", "blocks")
    return Caution(
        code="few_launches",
        text=(
            f"{engine}: each variant was {done} {times}, so "
            + (
                f"what differs from {apart} is not seen and no verdict is drawn"
                if repeats == 1
                else "intervals are six times as wide as with many"
            )
        ),
        advice=f"Use --set compare.{key}={FEW_REPEATS} or more for a decision that costs money.",
    )


def _few_requests(run: RunData, engine: str) -> Caution | None:
    counts = {
        (load, variant): sum(len(c.ok) for c in run.select(engine, variant, load))
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
        text=f"{engine}: only {n} whole answers for {variant} at {load_words(load)}",
        advice=f"Percentiles of so few are near the extremes; {_more_requests(load)}.",
    )


def _more_requests(load: LoadPoint) -> str:
    """How to have more of them: what ends a cell differs."""
    if load.arrival in ("trace", "schedule"):  # it ends by itself
        cut = ", or raise load.num_requests where it cuts it" if load.num_requests else ""
        return f"raise compare.blocks, or give a longer {load.arrival}{cut}"
    for key in ("duration_s", "num_output_tokens"):
        if getattr(load, key) is not None:
            return f"raise load.{key} or compare.blocks"
    return "raise load.num_requests"


def _many_failed(run: RunData, engine: str, load: LoadPoint) -> Caution | None:
    whole = [c for c in run.select(engine, load=load) if c.to_its_end]
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
        asked = Names.join(
            [
                # The turns of a conversation share its id: it came again where its first turn did.
                c.records.where(c.records.ints("turn").values == 0).names("prompt_id")
                for c in run.select(engine, turn[0])
                if c.cell.repeat == turn[1]
            ]
        )
        if np.bincount(asked.codes).max(initial=0) > 1:
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
    ties = "" if whole.near_tie is None else f"; {whole.near_tie} are known to be near-ties"
    return Caution(
        code="outputs_diverged",
        text=(
            f"{engine}: {whole.diverged} of {whole.compared} greedy outputs differ from the "
            f"baseline's, first at {first['unit']} {first['position']} of prompt "
            f"{first['prompt_id']}{ties}"
        ),
        advice=_about_divergences(whole, exact=exact),
    )


def _about_divergences(whole: Integrity, *, exact: bool) -> str:
    if whole.errors:
        return "Some lie beyond what rounding explains: look at those with the largest gap."
    if whole.near_tie == whole.diverged:
        return "Rounding makes near-ties fall either way; the engine is not to blame."
    if exact:
        return (
            "In float32 a lossless engine gives the same tokens but for exact ties: look for a "
            "defect of the engine."
        )
    return (
        "Low precision makes near-ties fall either way: compare with --set engine.dtype=float32 "
        "before blaming the engine."
    )


def _accuracy(run: RunData, engine: str) -> Caution | None:
    gained = lost = 0
    for base, cand in pairs(run.select(engine)):
        theirs, ours = matched_rows(base.ok, cand.ok)
        was = base.ok.ints("correct").take(theirs)
        now = cand.ok.ints("correct").take(ours)
        known = was.known & now.known
        gained += int((known & (now.values > was.values)).sum())
        lost += int((known & (was.values > now.values)).sum())
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


def _labels(run: RunData) -> list[Caution]:
    return [
        Caution(
            code="variant_unknown",
            text=f"{launch.engine}: {launch.label}",
            advice="Say which it is with --variants baseline or --variants speculative.",
        )
        for launch in run.launches
        if not launch.variant_known
    ]
