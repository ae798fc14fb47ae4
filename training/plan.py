"""The typed plan of a drafter's training: one file for every stage, from prompts to exports.

`None` means "not said": what a stage derives from the target, or the engine's own default. Lengths
are tokens. The stages and their folders are told in `docs/training.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from harness.plan.load import is_path, merge, named, names_in, parse_set, put, read_toml
from harness.plan.schema import (
    ClientSection,
    DemoSection,
    EngineSection,
    Positive,
    PositiveFloat,
    SamplingSection,
    Section,
    Seed,
    WorkloadSection,
)
from harness.plan.strict import decode

PLANS = Path(__file__).with_name("plans")
EngineName = Literal["reference", "vllm", "sglang", "openai"]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Beta = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Layer = Annotated[int, msgspec.Meta(ge=0, le=1000)]
Depth = Annotated[int, msgspec.Meta(ge=1, le=16)]


class TargetSection(Section, frozen=True, kw_only=True):
    """The target model's folder; `path` None: the demo pair's target, of `demo.target`.

    `sizes`: a file with the sizes of a target that is not at hand, in the form of its config.json,
    by path or beside the plans that come with the package. It serves the dry run alone.
    """

    path: str | None = None
    served_name: str | None = None
    sizes: str | None = None


class GenerateSection(Section, frozen=True, kw_only=True):
    """Samples: the target's own answers to the workload's prompts.

    `engine` is started here unless `url` names a running server. `samples`: how many to ask for
    (None: every prompt once); more than there are prompts asks them again with other seeds, which
    needs a temperature. `max_tokens` an answer. The `most_*` shares are the gate's limits; what
    they count is filtered out where the gate passes. `most_misplaced`: with end or think tokens
    where none belong. `least_round_trip`: of samples whose tokens give what the server sent.
    `least_samples`: kept ones. `keep_truncated`: an answer that was cut is counted, but kept, if
    it has a token: as far as it goes it is the target's own.
    """

    engine: EngineName = "reference"
    url: str | None = None
    samples: Positive | None = None
    max_tokens: Positive = 1024
    concurrency: Positive = 8
    timeout_s: PositiveFloat = 600.0
    shard_samples: Positive = 1000
    most_truncated: Share = 0.2
    most_empty: Share = 0.02
    most_degenerate: Share = 0.05
    most_duplicate: Share = 0.2
    most_failed: Share = 0.05
    most_misplaced: Share = 0.02
    least_round_trip: Share = 0.95
    least_samples: Positive = 1
    keep_truncated: bool = False


class CaptureSection(Section, frozen=True, kw_only=True):
    """Hidden states of the samples.

    `aux_layers`: transformers' hidden-state indices (0: the embeddings, i: the input of layer i),
    in the order of the concatenation; None: of a finetuned drafter its own, else (2, L/2, L - 3).
    `dtype`: how states are stored; fp8 has one scale a row. `online`: nothing is stored, training
    is fed through a buffer of `buffer_samples`. `max_length`: longer samples are cut at the end.
    """

    engine: Literal["reference", "vllm", "sglang", "transformers"] = "reference"
    aux_layers: tuple[Layer, ...] | None = None
    dtype: Literal["float32", "bfloat16", "fp8"] = "bfloat16"
    max_length: Positive = 4096
    batch: Positive = 8
    shard_tokens: Positive = 200_000
    online: bool = False
    buffer_samples: Positive = 64
    least_proof: Share = 0.98
    least_parity: Share = 0.99


class VocabSection(Section, frozen=True, kw_only=True):
    """The draft vocabulary: the `size` most frequent tokens of the answers; None: the target's."""

    size: Positive | None = None
    least_coverage: Share = 0.95


class HeadSection(Section, frozen=True, kw_only=True):
    """The drafter. `finetune`: a checkpoint's folder to go on from; the rest then comes from it.

    Sizes that are None are the target's own. `mla` heads need an MLA target or all its ranks.
    """

    kind: Literal["llama", "mla"] = "llama"
    finetune: str | None = None
    intermediate_size: Positive | None = None
    num_attention_heads: Positive | None = None
    num_key_value_heads: Positive | None = None
    head_dim: Positive | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    train_embeddings: bool = False
    train_lm_head: bool = True


class TrainSection(Section, frozen=True, kw_only=True):
    """How the drafter is trained.

    TTT step i weighs `step_decay` ** i. `tokens`: what later steps are fed, the text's own tokens
    (`teacher`) or the drafter's (`own`). `noise`: half-width of the uniform noise on aux states, in
    units of the states' root mean square. `batch_tokens`: packed tokens an update, over all ranks;
    `row_tokens`: of one packed row. `warmup`: share of all updates. `validate_every` updates (None:
    once an epoch), `checkpoint_every` likewise. `serve_check`: prompts that each checkpoint must
    answer in the reference engine before it counts as good (0: not asked). `restart_optimizer`:
    go on from a checkpoint whose optimizer state is missing, with moments of zero.
    """

    epochs: Positive = 5
    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: PositiveFloat = 1e-4
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    weight_decay: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: Share = 0.015
    clip_norm: PositiveFloat = 0.5
    ttt_steps: Annotated[int, msgspec.Meta(ge=1, le=8)] = 3
    step_decay: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.8
    loss: Literal["soft_cross_entropy", "kl", "hard"] = "soft_cross_entropy"
    tokens: Literal["teacher", "own"] = "teacher"
    noise: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.0
    batch_tokens: Positive = 8192
    row_tokens: Positive = 2048
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    gradient_checkpointing: bool = False
    parallel: Literal["ddp", "fsdp"] = "fsdp"
    held_out: Share = 0.05
    validate_every: Positive | None = None
    checkpoint_every: Positive | None = None
    keep_checkpoints: Positive = 5
    serve_check: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 8
    restart_optimizer: bool = False
    seed: Seed = 0


class EvaluateSection(Section, frozen=True, kw_only=True):
    """Acceptance, offline and in the named engines, on the same held-out prompts.

    `offline`: where the expectation comes from. `engine`: greedy answers and states of the
    reference engine, now; `states`: the held-out samples and their captured states; `auto`: the
    engine where it can load the target, else the states. `largest_gap`: the most that an engine's
    acceptance rate may lie below the offline one, or above it.
    """

    k: Depth = 3
    engines: tuple[EngineName, ...] = ("reference",)
    prompts: Positive = 64
    offline: Literal["auto", "engine", "states"] = "auto"
    largest_gap: Share = 0.03


class ExportSection(Section, frozen=True, kw_only=True):
    """The formats to write, each validated, and loaded where its engine is installed."""

    formats: tuple[Literal["vllm", "sglang", "speculators"], ...] = ("vllm", "sglang")
    load: bool = True


class EstimateSection(Section, frozen=True, kw_only=True):
    """What a dry run cannot know: rates (tokens per second) and lengths, each an assumption.

    The defaults are the original run's, on 8 RTX PRO 6000 (generation, capture) and on one of them
    (training): 17.3 M tokens of 10,000 samples, generated in 5.3 h, captured at 3,165 tokens/s,
    trained at 25.5 min an epoch and validated in 5.5 min. `train_tokens_per_s` is that of its own
    drafter at 3 TTT steps; a plan's own is scaled by its arithmetic per token. `source` names where
    other rates come from. `prompts`: how many there are, where `generate.samples` is not said.
    `processes`: ranks of the training. `device_gb`: memory of one, to be compared with.
    """

    tokens_per_sample: PositiveFloat = 1730.0
    prompts: Positive = 10_000
    generate_tokens_per_s: PositiveFloat = 907.0
    capture_tokens_per_s: PositiveFloat = 3165.0
    train_tokens_per_s: PositiveFloat = 11_300.0
    validate_share: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.216
    source: str = "the original run"
    processes: Positive = 1
    device_gb: PositiveFloat | None = None


class TrainingPlan(Section, frozen=True, kw_only=True):
    """Everything that the stages of one training need to know."""

    name: str = "training"
    description: str = ""
    seed: Seed = 0
    target: TargetSection = TargetSection()
    demo: DemoSection = DemoSection()
    engine: EngineSection = EngineSection()
    workload: WorkloadSection = WorkloadSection(dataset="demo")
    client: ClientSection = ClientSection()
    sampling: SamplingSection = SamplingSection()
    generate: GenerateSection = GenerateSection()
    capture: CaptureSection = CaptureSection()
    vocab: VocabSection = VocabSection()
    drafter: HeadSection = HeadSection()
    train: TrainSection = TrainSection()
    evaluate: EvaluateSection = EvaluateSection()
    export: ExportSection = ExportSection()
    estimate: EstimateSection = EstimateSection()


def plan_names() -> list[str]:
    """The plans that come with the package."""
    return names_in(PLANS)


def read_plan(name: str, sets: Sequence[str] = ()) -> TrainingPlan:
    """A plan by name or by path, every `--set key=value` laid on it. Raises `UsageError`."""
    path = Path(name) if is_path(name) else named(PLANS, name, "plan")
    table = read_toml(path, f"--plan {name}")
    table.setdefault("name", path.stem)
    decode(table, str(path), TrainingPlan)  # blame the file for its own mistakes first
    laid: dict[str, Any] = merge(table, {})
    for item in sets:
        put(laid, *parse_set(item, TrainingPlan))
    return decode(laid, "--set" if sets else str(path), TrainingPlan)
