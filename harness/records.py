"""The versioned records that pass between the stages and lie in a run's folder.

Frozen and keyword-only. Times are `perf_counter_ns` integers of the measuring process, durations
are seconds (`_s`), rates are per second (`_per_s`). A missing value is None, never zero.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

SCHEMA_VERSION = "1.2"

Variant = Literal["baseline", "speculative"]
VARIANTS: tuple[Variant, ...] = ("baseline", "speculative")
Verdict = Literal["better", "worse", "same", "undecided"]


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all records: frozen, by keyword, and strict when it is read back."""


class LoadPoint(Record, frozen=True, kw_only=True):
    """One load: closed loop by `concurrency`, or open loop.

    An open loop's arrivals: at `request_rate` per second, or by a `schedule` of rate segments
    (seconds, first rate, last rate), or as a `trace` says. See `plan.schema.LoadSection`.
    """

    mode: Literal["closed", "open"]
    concurrency: int | None = None
    request_rate: float | None = None
    num_requests: int | None = None
    duration_s: float | None = None
    num_output_tokens: int | None = None
    arrival: Literal["constant", "poisson", "gamma", "burst", "schedule", "trace"] | None = None
    burstiness: float | None = None
    schedule: tuple[tuple[float, float, float], ...] | None = None
    trace: str | None = None
    time_scale: float | None = None
    think_time_s: float | None = None
    think_time: Literal["constant", "exponential"] | None = None
    max_request_rate: float | None = None
    max_concurrency: int | None = None


class Cell(Record, frozen=True, kw_only=True):
    """One measurement of the plan: an engine's variant under one load, in one repeat.

    Cells of equal (`engine`, `variant`, `repeat`) share one start of the engine; `block` numbers
    the measurements of one load within it. Cells that differ in `variant` alone are a pair.
    """

    cell_id: str
    engine: str
    variant: Variant
    repeat: int
    load: LoadPoint
    seed: int
    block: int = 0


Count = Annotated[int, msgspec.Meta(ge=0)]


class DraftCounts(Record, frozen=True, kw_only=True):
    """Pooled counts of draft tokens. `per_position[i]`: drafts accepted at least to position i.

    `past_end`: of the accepted, those behind an answer's end, which are no output. `steps[i]`: how
    many tokens step i accepted; of one request alone, never of a pool.
    """

    drafts: Count
    drafted: Count | None = None
    accepted: Count
    per_position: tuple[Count, ...] | None = None
    past_end: Count | None = None
    steps: tuple[Count, ...] | None = None


class RequestRecord(Record, frozen=True, kw_only=True):
    """One request as the client saw it.

    `chunk_ns[i]` is the arrival of chunk i and `chunk_tokens[i]` its number of tokens (None where
    the server did not say). `output_tokens` comes from `token_source`, never from counting chunks.
    `due_ns` None: closed loop, no due time. `correct` None: the prompt has no right answer.
    `first_reasoning_ns`, `first_answer_ns`: the first chunk with thinking, and with anything else.
    `connect_ns`: how long setting its connection up took, before it was sent; None where the
    connection was there already. `conversation`, `turn` (from 0): of a multi-turn conversation.
    `tries`: how often it was sent, more than once only where the plan allows retries.
    """

    cell_id: str
    index: int
    prompt_id: str
    category: str | None
    due_ns: int | None
    sent_ns: int | None
    chunk_ns: tuple[int, ...]
    chunk_tokens: tuple[int, ...] | None
    end_ns: int | None
    status: Literal["ok", "failed", "cancelled"]
    error: str | None
    http_status: int | None
    prompt_tokens: Count | None
    output_tokens: Count | None
    token_source: Literal["token_ids", "usage"] | None
    token_ids: tuple[int, ...] | None
    text: str | None
    reasoning: str | None
    finish_reason: str | None
    acceptance: DraftCounts | None
    correct: bool | None
    first_reasoning_ns: int | None = None
    first_answer_ns: int | None = None
    connect_ns: int | None = None
    conversation: str | None = None
    turn: int = 0
    worker: int = 0
    tries: int = 1


CounterProblem = Literal["unpublished", "unread", "reset", "rank_missing", "cut_short"]


class EngineCounters(Record, frozen=True, kw_only=True):
    """The server's counters differenced over the measured window, drain included.

    `problem` says of what kind the reason in `note` is that there is no difference. `settled` and
    `settled_before`: whether the counters had come to rest when they were read, after and before.
    """

    before: dict[str, Any] | None
    after: dict[str, Any] | None
    delta: DraftCounts | None
    generation_tokens: int | None
    settled: bool
    note: str | None = None
    problem: CounterProblem | None = None
    settled_before: bool = True
    requests_finished: int | None = None


class Phase(Record, frozen=True, kw_only=True):
    """One start-up phase: seconds since the launch; `end_s` None if it never ended."""

    phase: str
    start_s: float
    end_s: float | None


class ClientFigures(Record, frozen=True, kw_only=True):
    """How one load generating process fared: whether it measured the server or itself.

    `cpu_share` is its CPU time over the wall time (1.0: one core). Loop lag is how much later than
    asked its event loop came back from a sleep, sampled through the whole load; None: no sample.
    """

    worker: int
    cpu_share: float
    cpu_s: float
    loop_lag_p50_s: float | None
    loop_lag_p99_s: float | None
    loop_lag_max_s: float | None


class Timeline(Record, frozen=True, kw_only=True):
    """What happened around a cell: start-up phases of its engine, and the measured window.

    `client` holds the figures of each load generating process, `client_cpu_share` the largest
    `cpu_share` among them. `interrupted` tells why the cell did not run to its end; None where it
    did.
    """

    startup: tuple[Phase, ...]
    ready_s: float | None
    window_start_ns: int | None
    window_end_ns: int | None
    client_cpu_share: float | None = None
    interrupted: str | None = None
    client: tuple[ClientFigures, ...] = ()


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

    source: Literal["per_request", "client"]
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
    source: Literal["counters", "per_request", "client"]
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
    source: Literal["per_request", "client"]
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


class Tie(Record, frozen=True, kw_only=True):
    """What a server said of one divergence: how far the lesser token lies below the best one.

    `gap` in nats, of the worse of the two tokens; None where the server could not tell.
    """

    cell_id: str
    index: int
    prompt_id: str
    position: int
    gap: float | None
    asked: Variant


class Ties(Record, frozen=True, kw_only=True):
    """An engine's divergences that servers were asked about. `cells`: speculative cells done."""

    engine: str
    dtype: str | None
    cells: tuple[str, ...] = ()
    ties: tuple[Tie, ...] = ()


class ParityAnswer(Record, frozen=True, kw_only=True):
    """A fixed prompt's greedy tokens, their log-probabilities, and each position's best tokens."""

    prompt: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    top: tuple[dict[str, float], ...]


class ParityRecord(Record, frozen=True, kw_only=True):
    """What one server computes: its answers to the fixed prompts; a golden file is the same.

    `weights` identifies the checkpoint's weights and tokenizer, whatever its config says.
    """

    engine: str
    variant: Variant
    repeat: int
    target: str | None
    weights: str | None
    dtype: str | None
    answers: tuple[ParityAnswer, ...]
    note: str | None = None


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
    categories: dict[str, CategoryFigures] = {}
    degenerate: Degenerate | None = None


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


class Axis(Record, frozen=True, kw_only=True):
    """A key of the plan and the values it takes."""

    key: str
    values: tuple[str, ...]


class Setting(Record, frozen=True, kw_only=True):
    """One choice of values, as `--set` items; `run` is its folder, below the sweep's.

    `baseline` names the setting whose folder the baseline was measured into.
    """

    name: str
    choice: tuple[str, ...]
    condition: tuple[str, ...]
    run: str
    baseline: str

    @property
    def sets(self) -> tuple[str, ...]:
        """All its items."""
        return (*self.condition, *self.choice)


class Manifest(Record, frozen=True, kw_only=True):
    """Everything needed to know what was run, where, and to run it again."""

    schema_version: str
    run_id: str
    created: str
    command: tuple[str, ...]
    plan: dict[str, Any]
    environment: dict[str, Any]
    versions: dict[str, str | None]
    git_commit: str | None
    git_dirty: bool | None
    clock_anchor: dict[str, Any]
    cells: tuple[Cell, ...]


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


class LaunchRecord(Record, frozen=True, kw_only=True):
    """One start of an engine: the command it was given, its phases, and why it failed if it did.

    `label` says how an attached server's variant was found out; None for a launched engine.
    """

    name: str
    engine: str
    variant: Variant
    repeat: int
    argv: tuple[str, ...]
    phases: tuple[Phase, ...]
    ready_s: float | None
    failure: str | None = None
    label: str | None = None
