"""What is measured, as versioned records that pass between the stages and lie in a run's folder.

`harness.findings` holds what the analysis makes of it.

Frozen and keyword-only. Times are `perf_counter_ns` integers of the measuring process, durations
are seconds (`_s`), rates are per second (`_per_s`). A missing value is None, never zero.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

SCHEMA_VERSION = "1.2"

Variant = Literal["baseline", "speculative"]
VARIANTS: tuple[Variant, ...] = ("baseline", "speculative")


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
    """One start-up phase: seconds since the launch; `end_s` None if it never ended.

    Every instant of a start belongs to one phase. `progress`: the last count of a progress bar in
    it, of all. `weight_bytes`: the size of the checkpoint loaded in it. The rest is what the
    engine's processes used, by samples: storage read and written, what read calls gave (page cache,
    pipes and sockets too), the whole machine's network without loopback, the most resident memory
    of all processes together, and of the GPUs the most above what was used at the launch.
    """

    phase: str
    start_s: float
    end_s: float | None
    progress: tuple[int, int] | None = None
    weight_bytes: int | None = None
    cpu_s: float | None = None
    read_bytes: int | None = None
    written_bytes: int | None = None
    read_call_bytes: int | None = None
    network_bytes: int | None = None
    rss_bytes: int | None = None
    gpu_bytes: int | None = None


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
    did. `given_up`: because nothing but failures came, though the server was there.
    """

    startup: tuple[Phase, ...]
    ready_s: float | None
    window_start_ns: int | None
    window_end_ns: int | None
    client_cpu_share: float | None = None
    interrupted: str | None = None
    client: tuple[ClientFigures, ...] = ()
    given_up: bool = False


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
    """Everything needed to know what was run, where, and to run it again.

    `engine_versions`: packages of each launched engine's own environment. `digests`: each engine's
    `target` and `drafter`, identified by samples of their files. `git_diff` identifies uncommitted
    changes. `changes`: what was not as at the beginning when the run was gone on with anyway.
    """

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
    git_diff: str | None = None
    engine_versions: dict[str, dict[str, str]] = {}
    digests: dict[str, dict[str, str | None]] = {}
    changes: tuple[str, ...] = ()


class LaunchRecord(Record, frozen=True, kw_only=True):
    """One start of an engine: the command it was given, its phases, and why it failed if it did.

    `label` says how an attached server's variant was found out; None for a launched engine.
    `variant_known`: whether it could be. `wall_s`: from the launch to readiness, or to the failure.
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
    variant_known: bool = True
    wall_s: float | None = None
