"""What the analysis finds in a run's records: figures, intervals, verdicts and cautions.

`summary.json` is a `Summary`. Units and missing values are those of `harness.records`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from harness.records import DraftCounts, LoadPoint, Phase, Record, Variant

Verdict = Literal["better", "worse", "same", "undecided"]
StepSource = Literal["per_request", "client"]
"""Who tells the verify steps of one request; the counters know them only in all."""
Source = Literal["counters", StepSource]


class Distribution(Record, frozen=True, kw_only=True):
    """Of one quantity over `n` requests or gaps; all None where n is 0."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    n: int


class Steady(Record, frozen=True, kw_only=True):
    """The window that latencies are taken from, in seconds since the first request was sent.

    `growing`: requests under way grew through all of it, so that no steady state exists.
    """

    begin_s: float
    end_s: float
    level: Literal["steady", "started", "whole"]
    rule: str
    requests: int
    growing: bool = False


class Metrics(Record, frozen=True, kw_only=True):
    """One cell's figures; `measure.definitions` holds each one's formula and unit.

    `requests_failed` counts no dropped request: one that was never sent.
    """

    ttft_s: Distribution
    tpot_s: Distribution
    icl_s: Distribution
    itl_s: Distribution | None
    e2el_s: Distribution
    send_lag_s: Distribution | None
    ttft_from_due_s: Distribution | None
    e2el_from_due_s: Distribution | None
    requests_ok: int
    requests_failed: int
    prompt_tokens: int | None
    output_tokens: int | None
    output_tokens_per_s: float | None
    requests_per_s: float | None
    request_rate_achieved: float | None
    duration_s: float | None
    task_accuracy: float | None
    task_n: int
    steady: Steady | None = None
    connect_s: Distribution | None = None
    time_to_first_answer_s: Distribution | None = None
    time_to_first_reasoning_s: Distribution | None = None
    requests_dropped: int = 0
    requests_late: int | None = None
    goodput_per_s: float | None = None
    goodput_share: float | None = None


class CategoryFigures(Record, frozen=True, kw_only=True):
    """One category's share of a cell, over the whole phase. `acceptance`: per-request counts."""

    requests: int
    ok: int
    output_tokens: int | None
    ttft_s: float | None
    tpot_s: float | None
    acceptance: DraftCounts | None
    acceptance_length: float | None
    task_accuracy: float | None
    task_n: int


class Estimate(Record, frozen=True, kw_only=True):
    """A figure with its interval; `low` and `high` are None with fewer than two requests."""

    value: float | None
    low: float | None = None
    high: float | None = None


class AcceptanceEstimates(Record, frozen=True, kw_only=True):
    """Acceptance with intervals, the requests being the sample (`docs/acceptance.md`).

    `length` is pooled over verify steps, `length_request_mean` the mean of the requests' own, and
    so for `rate`. `length_output` leaves out accepted tokens behind an answer's end; `past_end` is
    how many they were, `uncorrected` of how many requests that is not known.
    """

    source: StepSource
    requests: int
    clusters: int
    confidence: float
    length: Estimate
    length_request_mean: Estimate
    rate: Estimate
    rate_request_mean: Estimate
    per_position: tuple[Estimate, ...]
    per_position_conditional: tuple[Estimate, ...]
    length_output: Estimate
    past_end: int | None
    uncorrected: int


class MergedChunks(Record, frozen=True, kw_only=True):
    """How many verify steps reached the client joined to another in one chunk.

    `by` says how it was found out: from the engine's count of steps (`steps` against `chunks`,
    exact), or from chunks of more than k + 1 tokens alone (a least value).
    """

    chunks: int
    steps: int | None
    merged: int
    share: float | None
    by: Literal["per_request", "counters", "chunk_size"]


class Acceptance(Record, frozen=True, kw_only=True):
    """Acceptance of one speculative cell. `sources` holds each source's own counts."""

    rate: float | None
    length: float | None
    drafts: int
    drafted: int | None
    accepted: int
    per_position: tuple[float, ...] | None
    per_position_conditional: tuple[float | None, ...] | None
    source: Source
    sources: dict[str, DraftCounts | None]
    estimates: AcceptanceEstimates | None = None
    merged: MergedChunks | None = None


class SplitPart(Record, frozen=True, kw_only=True):
    """One part of a split: its verify steps, pooled. `requests` had at least one step in it."""

    name: str
    requests: int
    drafts: int
    accepted: int
    length: Estimate


class Split(Record, frozen=True, kw_only=True):
    """Acceptance parted by one thing; `source` says whose steps were taken."""

    by: Literal["category", "output_tokens", "output_quarter", "thinking", "request", "run_time"]
    source: StepSource
    parts: tuple[SplitPart, ...]


class AcceptanceSplits(Record, frozen=True, kw_only=True):
    """One engine's speculative cells at one load, pooled: figures with intervals, and splits."""

    engine: str
    load: LoadPoint
    k: int | None
    estimates: AcceptanceEstimates | None
    merged: MergedChunks | None
    splits: tuple[Split, ...]


class Integrity(Record, frozen=True, kw_only=True):
    """Greedy outputs of a speculative cell against its paired baseline, token by token.

    `near_tie` and `errors` count the divergences whose log-probabilities a server was asked for;
    `worst_gap`: the largest difference found, in nats. All None where none could be asked.
    """

    compared: int
    identical: int
    near_tie: int | None
    diverged: int
    first_divergence: tuple[dict[str, Any], ...] = ()
    errors: int | None = None
    worst_gap: float | None = None


class Degenerate(Record, frozen=True, kw_only=True):
    """Answers of a cell that go round in circles, of those `judged`; acceptance told apart.

    `tokens` and `degenerate_tokens`: output tokens of all answers looked at, and of those.
    """

    judged: int
    degenerate: int
    tokens: int
    degenerate_tokens: int
    acceptance_degenerate: DraftCounts | None
    acceptance_healthy: DraftCounts | None
    examples: tuple[str, ...] = ()


class ParityFinding(Record, frozen=True, kw_only=True):
    """One server against the one it is held to: mean difference in nats over `tokens`."""

    engine: str
    variant: Variant
    repeat: int
    against: str
    difference: float | None
    largest: float | None
    tokens: int
    bound: float
    differs: bool


class EngineIntegrity(Record, frozen=True, kw_only=True):
    """One engine's output over the run; each prompt counts once.

    `floor_*`: baseline against baseline, `floor_loads_*`: across loads as well. `p_value`: exact,
    one-sided, that divergences are no more than the floor's. `sampling_p`: temperature above 0.
    """

    engine: str
    compared: int = 0
    diverged: int = 0
    near_tie: int | None = None
    errors: int | None = None
    floor_compared: int = 0
    floor_diverged: int = 0
    floor_loads_compared: int = 0
    floor_loads_diverged: int = 0
    p_value: float | None = None
    broken: str | None = None
    sampling_p: float | None = None
    sampling_prompts: int = 0


class Caution(Record, frozen=True, kw_only=True):
    """Something the reader must know before believing a number, and what to do about it."""

    code: str
    text: str
    advice: str


class Gauge(Record, frozen=True, kw_only=True):
    """One figure over the samples of a window; `n` is their number."""

    mean: float
    least: float
    most: float
    n: int


class GpuFigures(Record, frozen=True, kw_only=True):
    """One GPU over a cell's window. `engine`: whether the engine's processes were seen on it.

    `energy_by`: the GPU's own counter, or its power over time. `throttled`: for each reason the
    share of samples in which it held the clocks back.
    """

    index: str
    name: str | None
    engine: bool | None
    energy_j: float | None
    energy_by: Literal["counter", "power"] | None
    gauges: dict[str, Gauge]
    throttled: dict[str, float] | None


class Telemetry(Record, frozen=True, kw_only=True):
    """What was sampled through a cell's window, from the first request sent to the last arrival.

    `missing`: why a source said nothing, in whole or in part. `preemptions` and
    `prefix_hit_rate` are of the window, `kv_usage` in `engine` the share of the cache in use.
    `energy_j` is of the GPUs that `energy_of` names, `joules_per_output_token` of those and all
    output tokens of the window.
    """

    interval_s: float | None
    missing: dict[str, str]
    engine: dict[str, Gauge]
    preemptions: int | None
    prefix_hit_rate: float | None
    host: dict[str, Gauge]
    host_totals: dict[str, float]
    gpus: tuple[GpuFigures, ...]
    energy_j: float | None
    energy_of: str | None
    joules_per_output_token: float | None


class CellSummary(Record, frozen=True, kw_only=True):
    """One cell as `summary.json` tells it. A baseline has no acceptance and no integrity."""

    cell_id: str
    engine: str
    variant: Variant
    load: LoadPoint
    workload: str
    repeat: int
    status: Literal["ok", "partial", "failed"]
    metrics: Metrics | None
    acceptance: Acceptance | None
    integrity: Integrity | None
    startup: tuple[Phase, ...] = ()
    cautions: tuple[Caution, ...] = ()
    block: int = 0
    categories: dict[str, CategoryFigures] = msgspec.field(default_factory=dict)
    degenerate: Degenerate | None = None
    telemetry: Telemetry | None = None


class Comparison(Record, frozen=True, kw_only=True):
    """Candidate over baseline for one metric at one load, over `pairs` paired blocks.

    `ratio` > 1 means more of the metric; `verdict` says whether that is better. It is drawn from
    the corrected interval, at `corrected_confidence`: `family` comparisons were made at once.
    `p_value`: of no difference, uncorrected.
    """

    metric: str
    engine: str
    load: LoadPoint
    baseline: float | None
    candidate: float | None
    ratio: float | None
    ci_low: float | None
    ci_high: float | None
    pairs: int
    method: str
    verdict: Verdict
    confidence: float | None = None
    p_value: float | None = None
    family: int = 1
    corrected_low: float | None = None
    corrected_high: float | None = None
    corrected_confidence: float | None = None


class VariantEstimate(Record, frozen=True, kw_only=True):
    """One variant's figure at one load with its interval; None where nothing gives one.

    `units`: over how many starts (or requests, or blocks: `method` says) it is taken.
    """

    metric: str
    engine: str
    variant: Variant
    load: LoadPoint
    value: float
    ci_low: float | None
    ci_high: float | None
    units: int
    method: str


class Interval(Record, frozen=True, kw_only=True):
    """One figure over paired blocks; the interval is None with fewer than two units."""

    value: float
    ci_low: float | None = None
    ci_high: float | None = None


class Prediction(Record, frozen=True, kw_only=True):
    """What the decode phase would gain at another `k`, from measured figures.

    `low` and `high` hold the bounds where a part is not known, and the interval over blocks.
    `speedup` is None where only bounds are known; `basis` says what was assumed.
    """

    k: int
    acceptance_length: float | None
    relative_step_cost: float | None
    speedup: float | None
    low: float | None
    high: float | None
    basis: str


class Speed(Record, frozen=True, kw_only=True):
    """Why speculation is as fast as it is, for one engine and load (`docs/speed.md`).

    throughput = decode x first_token x batch x residual, and
    decode = tokens_per_step / relative_step_cost. `relative_step_cost`, a verify step in baseline
    tokens, is the break-even acceptance length as well. `chunks_per_step`: chunks the client saw
    by verify steps the engine counted; None where it counted none. `first_token_share` is the
    share of a request's time before its first token, `under_way` the requests in flight on
    average, `running_batch` those past their first chunk as a step saw them: baseline, then
    speculative. `equal_batch`: whether it was alike, so that step costs are of one batch.
    """

    engine: str
    load: LoadPoint
    k: int | None
    step_basis: Literal["chunks", "acceptance"]
    chunks_per_step: float | None
    baseline_token_s: float
    step_s: float
    acceptance_length: float | None
    tokens_per_step: Interval
    relative_step_cost: Interval
    decode: Interval
    first_token: Interval
    batch: Interval
    throughput: Interval | None
    residual: Interval | None
    first_token_share: tuple[float, float]
    under_way: tuple[float, float]
    running_batch: tuple[float, float]
    pairs: int
    equal_batch: bool
    predictions: tuple[Prediction, ...] = ()


class Summary(Record, frozen=True, kw_only=True):
    """`summary.json`: the run's answer. `void` None: the numbers may be believed.

    `verdict` holds one sentence an engine, for a reader who reads nothing else.
    """

    schema_version: str
    run_id: str
    title: str
    cells: tuple[CellSummary, ...]
    comparisons: tuple[Comparison, ...]
    cautions: tuple[Caution, ...] = ()
    failures: tuple[str, ...] = ()
    void: str | None = None
    verdict: tuple[str, ...] = ()
    splits: tuple[AcceptanceSplits, ...] = ()
    estimates: tuple[VariantEstimate, ...] = ()
    speed: tuple[Speed, ...] = ()
    integrity: tuple[EngineIntegrity, ...] = ()
    parity: tuple[ParityFinding, ...] = ()
