"""The typed plan: every key a profile or `--set` may name, with its default.

`None` means "not said": the engine's own default, or what `plan.expand` derives.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

# The upper bounds are beyond any use: they turn a slip of the keyboard, or an infinity, into one
# line of complaint instead of a machine out of memory.
Positive = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
Rate = Annotated[float, msgspec.Meta(ge=1e-6, le=1e6)]
Turns = Annotated[int, msgspec.Meta(ge=1, le=1000)]
Seed = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the plan's tables: frozen, by keyword, an unknown key is an error."""


class Flag(Section, frozen=True, kw_only=True):
    """One argument of the engine, or one variable of its environment, and why it is there.

    `value`: true for a switch, which has none; false: it is left out, such as one that was
    inherited. `variant`: the one that it is for; None: both. `source`: where the reason can be
    looked up.
    """

    value: str | int | float | bool = True
    why: Annotated[str, msgspec.Meta(min_length=1)]
    source: str | None = None
    variant: Literal["baseline", "speculative"] | None = None


class EngineSection(Section, frozen=True, kw_only=True):
    """How the engine is served.

    `flags` and `env` hold what a profile adds, each with its reason, by name; `extra_args` and
    `extra_env` come after them and are passed on as they are. `nodes` machines serve together and
    meet at `head` (host:port of the first).

    `command_prefix`: the program that starts it elsewhere, such as `ssh HOST`; `host`: where it
    listens; `reach`: the name by which it is reached from here, None: by `host` (docs/deploy.md).

    `stall_patience` multiplies how long nothing may happen in a start before it is dissected and
    ended; 0 waits for `startup_deadline_s` alone.
    """

    port: Port | None = None
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    device: str = "cpu"
    max_model_len: Positive | None = None
    max_num_seqs: Positive | None = None
    kv_cache_gib: PositiveFloat | None = None
    tensor_parallel: Positive = 1
    threads: Positive | None = None
    trust_remote_code: bool = False
    reasoning_parser: str | None = None
    startup_deadline_s: PositiveFloat = 600.0
    stall_patience: Annotated[float, msgspec.Meta(ge=0, le=1000)] = 1.0
    api_key_env: str | None = None
    command_prefix: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    reach: str | None = None
    nodes: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1
    head: str | None = None
    flags: dict[str, Flag] = {}
    env: dict[str, Flag] = {}
    extra_args: tuple[str, ...] = ()
    extra_env: dict[str, str] = {}


class TargetSection(Section, frozen=True, kw_only=True):
    """The model that answers. `path` None: the demo pair's target.

    `model`: the public name of the checkpoint that a profile is for; `path` is the folder it lies
    in. `parity`: a file with the log-probabilities that servers are held to. `ask_logprobs` False:
    servers are asked nothing but the load. See `docs/integrity.md` for both.
    """

    path: str | None = None
    model: str | None = None
    served_name: str | None = None
    parity: str | None = None
    ask_logprobs: bool = True


class DrafterSection(Section, frozen=True, kw_only=True):
    """The draft model. `path` None: the demo pair's drafter (beside a given target: none).

    `model`: the public name of the checkpoint that a profile is for.
    """

    path: str | None = None
    model: str | None = None


class SpeculativeSection(Section, frozen=True, kw_only=True):
    """`k`: draft tokens a verify step.

    `forced_length`: the mean number of tokens that a verify step is made to yield, whatever the
    target says. The output is wrong by design: it is for measuring what a step costs.
    """

    k: Annotated[int, msgspec.Meta(ge=1, le=64)] = 3
    forced_length: Annotated[float, msgspec.Meta(ge=1, le=65)] | None = None


class DemoSection(Section, frozen=True, kw_only=True):
    """Which demo pair is made or found where the plan names no target."""

    target: Literal["mla", "llama"] = "mla"
    drafter: Literal["mla", "llama"] = "mla"


class RateSegment(Section, frozen=True, kw_only=True):
    """A stretch of `seconds` at `rate` requests per second, or on a straight line to `to`."""

    seconds: Annotated[float, msgspec.Meta(gt=0, le=1e6)]
    rate: Annotated[float, msgspec.Meta(ge=0, le=1e6)]
    to: Annotated[float, msgspec.Meta(ge=0, le=1e6)] | None = None


class LoadSection(Section, frozen=True, kw_only=True):
    """Load points, and how each is driven.

    `concurrency`: closed loop; `request_rate`: open loop, per second; `schedule` (rate segments)
    and `trace` (a JSONL file with timestamps): one open-loop point each. None of them said: closed
    loop at 1. Several said: in that order. A cell ends after `num_requests`, `duration_s` or
    `num_output_tokens`, whichever is said.

    `arrival` draws the open loop's due times: `constant`, `poisson`, `gamma` with shape
    `burstiness` (1 is Poisson, less is burstier), or `burst`: all at once. `think_time_s` (closed
    loop) passes between an answer and the sender's next request; `max_request_rate` caps a closed
    loop's sending. `max_concurrency` (open loop): an arrival that finds as many under way is
    dropped and counted. `retries`: of requests answered 429 or 503, after the answer's Retry-After.
    `new_connections`: each request has a connection of its own, whose set-up counts in its TTFT.
    `workers`: load generating processes; None: as many as the load needs and the machine has.
    `allow_client_bound`: take the figures although the load generator was the bottleneck.
    """

    concurrency: tuple[Positive, ...] | None = None
    request_rate: tuple[Rate, ...] | None = None
    schedule: tuple[RateSegment, ...] | None = None
    trace: str | None = None
    time_scale: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = 1.0
    arrival: Literal["constant", "poisson", "gamma", "burst"] = "poisson"
    burstiness: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = 1.0
    think_time_s: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0
    think_time: Literal["constant", "exponential"] = "constant"
    max_request_rate: Rate | None = None
    max_concurrency: Positive | None = None
    num_requests: Positive | None = None
    duration_s: PositiveFloat | None = None
    num_output_tokens: Annotated[int, msgspec.Meta(ge=1, le=10**12)] | None = None
    warmup_requests: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 4
    timeout_s: PositiveFloat = 600.0
    retries: Annotated[int, msgspec.Meta(ge=0, le=100)] = 0
    new_connections: bool = False
    workers: Annotated[int, msgspec.Meta(ge=1, le=256)] | None = None
    allow_client_bound: bool = False


class Length(Section, frozen=True, kw_only=True):
    """A distribution of lengths in tokens.

    `spread` is the standard deviation (normal, lognormal) or the half-width (uniform).
    """

    dist: Literal["constant", "uniform", "normal", "lognormal"] = "constant"
    mean: Annotated[float, msgspec.Meta(ge=1, le=10_000_000)]
    spread: Annotated[float, msgspec.Meta(ge=0, le=10_000_000)] = 0.0
    min: Positive = 1
    max: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] | None = None


class WorkloadSection(Section, frozen=True, kw_only=True):
    """What is asked.

    `dataset`: builtin, demo, synthetic, random, a known data set's name, or a file's path.
    `output_tokens`: the most allowed, or a distribution of it (synthetic). `input_tokens`, the
    `prefix_*` keys: synthetic and random prompts, exact in the target's tokens; a share
    `prefix_reuse` of them begins with one of `prefix_groups` common prefixes of `prefix_tokens`.
    `column`, `subset`, `split`: where the prompts lie in a table or on a hub.
    `multi_turn`: whether a conversation's later turns are asked too; None: those of question files
    (MT-Bench and the like) are, those of ShareGPT are not.
    `chat_template`: applied by the server, or here (completions only).
    """

    dataset: str = "builtin"
    column: str | None = None
    subset: str | None = None
    split: str | None = None
    endpoint: Literal["chat", "completions"] = "chat"
    input_tokens: Positive | Length | None = None
    output_tokens: Positive | Length = 256
    ignore_eos: bool = False
    prefix_tokens: Annotated[int, msgspec.Meta(ge=0, le=10_000_000)] = 0
    prefix_reuse: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    prefix_groups: Positive = 1
    num_prompts: Positive | None = None
    min_input_tokens: Positive | None = None
    max_input_tokens: Positive | None = None
    categories: tuple[str, ...] | None = None
    multi_turn: bool | None = None
    chat_template: Literal["server", "client"] = "server"
    chat_template_kwargs: dict[str, Any] = {}


class ClientSection(Section, frozen=True, kw_only=True):
    """How servers are reached. `proxy` None: as the environment says (HTTP_PROXY and the like)."""

    headers: dict[str, str] = {}
    verify_tls: bool = True
    ca_file: str | None = None
    proxy: str | None = None
    connect_timeout_s: PositiveFloat = 10.0


class TelemetrySection(Section, frozen=True, kw_only=True):
    """How often GPUs, host and engine are sampled, in seconds; 0: not at all."""

    interval_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 1.0


class SloSection(Section, frozen=True, kw_only=True):
    """Service levels a request must meet to count in the goodput; None: no such level."""

    ttft_s: PositiveFloat | None = None
    tpot_s: PositiveFloat | None = None
    e2el_s: PositiveFloat | None = None


class SamplingSection(Section, frozen=True, kw_only=True):
    """Temperature 0 is greedy. `seed` goes with every request, its index added."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=1000)] = 0.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    seed: Seed | None = None


class CompareSection(Section, frozen=True, kw_only=True):
    """`launches` starts of each variant, in the order ABBA; `blocks` measurements in each.

    `min_effect`: the smallest relative difference worth acting on (the verdicts' delta).
    `metric`: the question of the run, corrected for the loads alone; the others are beside it.

    `precision`: starts are added, a pair at a time, until the interval on the ratio of `metric` is
    no wider than this to either side at every load, or `max_launches` or `time_limit_s` (of each
    engine's measuring) is reached.
    """

    launches: Turns = 3
    blocks: Turns = 1
    min_effect: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.03
    confidence: Annotated[float, msgspec.Meta(gt=0.5, lt=1)] = 0.95
    metric: Literal["output_tokens_per_s", "ttft_s", "tpot_s", "e2el_s"] = "output_tokens_per_s"
    precision: Annotated[float, msgspec.Meta(ge=0.001, lt=1)] | None = None
    max_launches: Annotated[int, msgspec.Meta(ge=3, le=200)] = 20
    time_limit_s: PositiveFloat | None = None


class Expected(Section, frozen=True, kw_only=True):
    """A published acceptance length: tokens a verify step, the bonus token among them, at `k`."""

    dataset: str
    length: Annotated[float, msgspec.Meta(ge=1, le=65)]
    k: Annotated[int, msgspec.Meta(ge=1, le=64)] = 3
    source: Annotated[str, msgspec.Meta(min_length=1)]


class ExpectSection(Section, frozen=True, kw_only=True):
    """What is known of the drafter that a profile is for.

    A run whose acceptance length is further off than `tolerance`, relatively, gets a caution.
    """

    tolerance: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.15
    acceptance: tuple[Expected, ...] = ()


class Plan(Section, frozen=True, kw_only=True):
    """What to run, complete but for the choice of engines and variants.

    `engines`: those that a profile is for; empty: any. `why`: the reason for a key's value, by the
    key's whole name.
    """

    name: str = "plan"
    description: str = ""
    engines: tuple[str, ...] = ()
    why: dict[str, str] = {}
    seed: Seed = 0
    engine: EngineSection = EngineSection()
    target: TargetSection = TargetSection()
    drafter: DrafterSection = DrafterSection()
    demo: DemoSection = DemoSection()
    speculative: SpeculativeSection = SpeculativeSection()
    load: LoadSection = LoadSection()
    workload: WorkloadSection = WorkloadSection()
    client: ClientSection = ClientSection()
    slo: SloSection = SloSection()
    telemetry: TelemetrySection = TelemetrySection()
    sampling: SamplingSection = SamplingSection()
    compare: CompareSection = CompareSection()
    expect: ExpectSection = ExpectSection()


def as_dict(plan: Plan) -> dict[str, Any]:
    """The plan as plain built-in types, for the manifest."""
    out: dict[str, Any] = msgspec.to_builtins(plan)
    return out
