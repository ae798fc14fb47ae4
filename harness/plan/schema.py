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


class EngineSection(Section, frozen=True, kw_only=True):
    """How the engine is served; `extra_args` and `extra_env` are passed on as they are."""

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
    api_key_env: str | None = None
    extra_args: tuple[str, ...] = ()
    extra_env: dict[str, str] = {}


class TargetSection(Section, frozen=True, kw_only=True):
    """The model that answers. `path` None: the demo pair's target."""

    path: str | None = None
    served_name: str | None = None


class DrafterSection(Section, frozen=True, kw_only=True):
    """The draft model. `path` None: the demo pair's drafter (beside a given target: none)."""

    path: str | None = None


class SpeculativeSection(Section, frozen=True, kw_only=True):
    """`k`: draft tokens a verify step."""

    k: Annotated[int, msgspec.Meta(ge=1, le=64)] = 3


class DemoSection(Section, frozen=True, kw_only=True):
    """Which demo pair is made or found where the plan names no target."""

    target: Literal["mla", "llama"] = "mla"
    drafter: Literal["mla", "llama"] = "mla"


class LoadSection(Section, frozen=True, kw_only=True):
    """Load points. `concurrency`: closed loop; `request_rate`: open loop, Poisson, per second.

    Neither said: closed loop at 1. Both said: the closed points first, then the open ones.
    A cell ends after `num_requests` or, where that is None, `duration_s`.
    """

    concurrency: tuple[Positive, ...] | None = None
    request_rate: tuple[Rate, ...] | None = None
    num_requests: Positive | None = None
    duration_s: PositiveFloat | None = None
    warmup_requests: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 4
    timeout_s: PositiveFloat = 600.0


class WorkloadSection(Section, frozen=True, kw_only=True):
    """`dataset`: builtin, demo, or the path of a JSONL file. `output_tokens`: the most allowed."""

    dataset: str = "builtin"
    output_tokens: Positive = 256
    endpoint: Literal["chat", "completions"] = "chat"


class SamplingSection(Section, frozen=True, kw_only=True):
    """Temperature 0 is greedy. `seed` goes with every request, its index added."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=1000)] = 0.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    seed: Seed | None = None


class CompareSection(Section, frozen=True, kw_only=True):
    """`launches` starts of each variant, in the order ABBA; `blocks` measurements in each.

    `min_effect`: the smallest relative difference worth acting on (the verdicts' delta).
    """

    launches: Turns = 3
    blocks: Turns = 1
    min_effect: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.03
    confidence: Annotated[float, msgspec.Meta(gt=0.5, lt=1)] = 0.95


class Plan(Section, frozen=True, kw_only=True):
    """What to run, complete but for the choice of engines and variants."""

    name: str = "plan"
    description: str = ""
    seed: Seed = 0
    engine: EngineSection = EngineSection()
    target: TargetSection = TargetSection()
    drafter: DrafterSection = DrafterSection()
    demo: DemoSection = DemoSection()
    speculative: SpeculativeSection = SpeculativeSection()
    load: LoadSection = LoadSection()
    workload: WorkloadSection = WorkloadSection()
    sampling: SamplingSection = SamplingSection()
    compare: CompareSection = CompareSection()


def as_dict(plan: Plan) -> dict[str, Any]:
    """The plan as plain built-in types, for the manifest."""
    out: dict[str, Any] = msgspec.to_builtins(plan)
    return out
