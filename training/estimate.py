"""Memory, disk and time of a plan from first principles, without starting anything.

Sizes come from the target's config and the plan; rates and lengths that nobody can know beforehand
are the plan's `[estimate]`, each with its source. Every figure carries the formula it came from.
Bytes are bytes: GB is 10^9.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec

from drafters.engines import ENGINES
from drafters.ids import default_layers
from drafters.spec import DrafterSpec
from harness.errors import UsageError
from training.evaluation.records import SERVED
from training.heads import (
    TargetFacts,
    facts_in,
    groups,
    read_facts,
    scratch_spec,
    work_per_token,
)
from training.original_run import DRAFTER, VOCAB
from training.plan import PLANS, EstimateSection, TrainingPlan

STATE_BYTES = {"float32": 4, "bfloat16": 2, "fp8": 1}
SCALE_BYTES = 4
"""Of fp8: one float32 scale a row and state."""
ID_BYTES = 8
CHOICE_BYTES = 4
"""The target's own choice after a token."""
SAMPLE_BYTES = 12
"""A token in a sample's line: about 7 bytes of id and 5 of text."""
MASTER, MOMENT, LOW = 4, 4, 2
"""Bytes of a float32 weight or gradient, of a moment, and of a bfloat16."""
ORIGINAL = EstimateSection().source
OFFLINE = {
    "auto": "the reference engine where it loads the target, else the captured states",
    "engine": "the reference engine",
    "states": "the captured states",
}
CHUNK_BYTES = 6 * 16_000_000
"""Head and loss go over the positions in pieces of 4 M logits; about six such tensors live."""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One line: `value` in `unit` (bytes, seconds, parameters, tokens, updates), and `how`."""

    section: str
    name: str
    value: float
    unit: str
    how: str = ""


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """What the formulas are fed: the drafter's shape and the amounts of data."""

    spec: DrafterSpec
    facts: TargetFacts
    samples: int
    tokens: float
    trainable: int
    frozen: int


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of a plan, by section in the order they are shown."""

    plan: str
    figures: tuple[Figure, ...]

    def value(self, name: str) -> float:
        """The figure of that name. Raises KeyError."""
        for figure in self.figures:
            if figure.name == name:
                return figure.value
        raise KeyError(name)


def estimate(plan: TrainingPlan) -> Estimate:
    """The plan's figures. Raises `UsageError` where the target's sizes are not to be had."""
    sizes = sizes_of(plan)
    figures = (
        *_drafter(sizes),
        *_data(plan, sizes),
        *_memory(plan, sizes),
        *_disk(plan, sizes),
        *_time(plan, sizes),
    )
    return Estimate(plan=plan.name, figures=figures)


def sizes_of(plan: TrainingPlan) -> Sizes:
    """The drafter's spec and the amounts of data that the plan makes."""
    facts = target_sizes(plan)
    spec = spec_of(plan, facts)
    samples = plan.generate.samples or plan.workload.num_prompts or plan.estimate.prompts
    trainable, frozen = parameters(spec, plan)
    return Sizes(
        spec=spec,
        facts=facts,
        samples=samples,
        tokens=samples * plan.estimate.tokens_per_sample,
        trainable=trainable,
        frozen=frozen,
    )


def target_sizes(plan: TrainingPlan) -> TargetFacts:
    """From the target's folder, else from the plan's `target.sizes`, else of the demo target."""
    if plan.target.path is not None:
        return read_facts(Path(plan.target.path).expanduser())
    if plan.target.sizes is not None:
        named = Path(plan.target.sizes).expanduser()
        return facts_in(named if named.exists() else PLANS / named)
    from training.demo import pair

    folder = pair.pair_folder(pair.configs(plan.demo.target, plan.demo.drafter)[0]) / "target"
    if not (folder / "config.json").is_file():
        raise UsageError(
            "target.path: not set, and the demo target is still to be made: run "
            "`python -m training demo`, or give target.path or target.sizes"
        )
    return read_facts(folder)


def spec_of(plan: TrainingPlan, facts: TargetFacts) -> DrafterSpec:
    """The drafter as `train` would make it; of a finetuned one its own."""
    if plan.drafter.finetune is not None:
        from drafters.checkpoint import load_spec

        return load_spec(Path(plan.drafter.finetune).expanduser())
    layers = plan.capture.aux_layers or default_layers(facts.layers)
    vocab = min(plan.vocab.size or facts.vocab_size, facts.vocab_size)
    return scratch_spec(plan.drafter, facts, layers, vocab)


def parameters(spec: DrafterSpec, plan: TrainingPlan) -> tuple[int, int]:
    """Trained parameters and those that are not."""
    parts = groups(spec)
    frozen = 0 if plan.drafter.train_embeddings else parts["embed_tokens"]
    frozen += 0 if plan.drafter.train_lm_head else parts["lm_head"]
    return sum(parts.values()) - frozen, frozen


def state_bytes(plan: TrainingPlan, spec: DrafterSpec) -> float:
    """Stored bytes of one token: aux states and the last one, id, choice, fp8's scales."""
    states = len(spec.aux_layers) + 1
    kind = plan.capture.dtype
    scales = SCALE_BYTES * states if kind == "fp8" else 0
    return states * spec.target_hidden_size * STATE_BYTES[kind] + scales + ID_BYTES + CHOICE_BYTES


def _drafter(sizes: Sizes) -> Iterator[Figure]:
    spec = sizes.spec
    for name, count in groups(spec).items():
        yield Figure(section="drafter", name=name, value=count, unit="parameters")
    kind = f"{spec.kind} head, hidden {spec.hidden_size:,}, {spec.num_attention_heads} heads"
    if spec.mla is None:
        kind += f" of {spec.head_dim}, {spec.num_key_value_heads} of keys"
    yield Figure(
        section="drafter", name="trained", value=sizes.trainable, unit="parameters", how=kind
    )
    yield Figure(section="drafter", name="not trained", value=sizes.frozen, unit="parameters")


def _data(plan: TrainingPlan, sizes: Sizes) -> Iterator[Figure]:
    given, each = plan.estimate, state_bytes(plan, sizes.spec)
    states = len(sizes.spec.aux_layers) + 1
    yield Figure(
        section="data",
        name="tokens",
        value=sizes.tokens,
        unit="tokens",
        how=f"{sizes.samples:,} samples x {given.tokens_per_sample:,.0f} (assumed: {given.source})",
    )
    yield Figure(
        section="data",
        name="states of a token",
        value=each,
        unit="bytes",
        how=f"{states} states x {sizes.spec.target_hidden_size:,} in {plan.capture.dtype}, "
        "an id and a choice",
    )
    trained = sizes.tokens * (1 - plan.train.held_out) * plan.train.epochs
    yield Figure(
        section="data",
        name="updates",
        value=math.ceil(trained / plan.train.batch_tokens),
        unit="updates",
        how=f"{plan.train.epochs} epochs, {plan.train.batch_tokens:,} tokens each, full rows",
    )


def _memory(plan: TrainingPlan, sizes: Sizes) -> Iterator[Figure]:
    """Of one process, at its peak; on GPUs in bfloat16 unless the plan says float32."""
    ranks = plan.estimate.processes
    fsdp = plan.train.parallel == "fsdp" and ranks > 1
    share = ranks if fsdp else 1
    by = f" / {ranks} processes (FSDP)" if fsdp else ""
    low = plan.train.precision != "float32"
    n, hidden = sizes.trainable, sizes.spec.hidden_size
    whole, drafted = sizes.facts.vocab_size, sizes.spec.draft_vocab_size
    b = LOW if low else MASTER
    moments = _moments(plan, sizes)
    parts = {
        "weights": (n * MASTER / share, f"{n:,} x {MASTER} B{by}"),
        "gradients": (n * MASTER / share, f"{n:,} x {MASTER} B{by}"),
        "moments": (moments / share, f"{plan.train.optimizer}, float32{by}"),
        "weights in bfloat16": (n * LOW if low else 0.0, "what autocast multiplies with"),
        "frozen weights": (sizes.frozen * MASTER, f"{sizes.frozen:,} x {MASTER} B, float32"),
        "the target's head": (
            whole * hidden * b,
            f"{whole:,} x {hidden:,}, for the targets of the loss",
        ),
        "its drafted rows": (
            drafted * hidden * b if drafted < whole else 0.0,
            f"{drafted:,} x {hidden:,}, taken out once for the run",
        ),
    }
    if ranks > 1 and not fsdp:
        parts["gradient buckets"] = (n * MASTER, "DDP's own copy")
    parts["activations"] = activations(plan, sizes.spec)
    parts["head and loss"] = _loss_bytes(plan, sizes.spec)
    for name, (value, how) in parts.items():
        if value:
            yield Figure(section="memory", name=name, value=value, unit="bytes", how=how)
    total = sum(value for value, _ in parts.values())
    how = "of one process"
    if plan.estimate.device_gb is not None:
        room = plan.estimate.device_gb * 1e9
        how += f"; {'fits' if total < 0.95 * room else 'DOES NOT FIT'} {room / 1e9:g} GB"
    yield Figure(section="memory", name="peak of the training", value=total, unit="bytes", how=how)


def _moments(plan: TrainingPlan, sizes: Sizes) -> float:
    """AdamW has two moments a parameter; Muon one on the layer's matrices and fc."""
    if plan.train.optimizer == "adamw":
        return sizes.trainable * 2 * MOMENT
    parts = groups(sizes.spec)
    inner = parts["fc"] + parts["attention"] + parts["mlp"]
    return (sizes.trainable - inner) * 2 * MOMENT + inner * MOMENT


def activations(plan: TrainingPlan, spec: DrafterSpec) -> tuple[float, str]:
    """Bytes kept for the backward pass of one row, over its TTT steps, and how they are counted.

    Kept of a slot in a step (b bytes an element): four norms' inputs in float32 and their outputs,
    the wide input 2H, q, k, v and the attention's output, four tensors of the feed-forward; of the
    first step also fc's input. With checkpointing a step keeps its ends (hidden state, residual, q,
    k, v), and one step at a time is computed again.
    """
    b = LOW if plan.train.precision != "float32" else MASTER
    rows, steps = plan.train.row_tokens, plan.train.ttt_steps
    q, k, v, out = _attention_width(spec)
    h = spec.hidden_size
    whole = 4 * (MASTER + b) * h + b * (2 * h + q + k + v + out + 4 * spec.intermediate_size)
    fused = b * (len(spec.aux_layers) * spec.target_hidden_size + h)
    states = b * (len(spec.aux_layers) + 1) * spec.target_hidden_size  # the row's own input
    if plan.train.gradient_checkpointing:
        ends = b * (2 * h + q + k + v)
        kept, how = steps * ends + whole, f"{steps} steps x {ends:,} B + one step of {whole:,} B"
    else:
        kept, how = steps * whole, f"{steps} steps x {whole:,} B"
    each = kept + fused + states
    return float(rows * each), f"{rows:,} slots x ({how} + fc and states {fused + states:,} B)"


def _attention_width(spec: DrafterSpec) -> tuple[int, int, int, int]:
    """Elements of q, k, v and the output of a slot; the latents of MLA count with q and k."""
    heads = spec.num_attention_heads
    if spec.mla is None:
        q, kv = heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
        return q, kv, kv, q
    dims = spec.mla
    qk = heads * (dims.qk_nope_head_dim + dims.qk_rope_head_dim)
    latent = 2 * (dims.kv_lora_rank + dims.qk_rope_head_dim) + 2 * (dims.q_lora_rank or 0)
    return qk + latent, qk, heads * dims.v_head_dim, heads * dims.v_head_dim


def _loss_bytes(plan: TrainingPlan, spec: DrafterSpec) -> tuple[float, str]:
    """States and their gradients of all steps; logits live a piece at a time."""
    b = LOW if plan.train.precision != "float32" else MASTER
    states = 2 * b * plan.train.ttt_steps * plan.train.row_tokens * spec.hidden_size
    head = MASTER * spec.draft_vocab_size * spec.hidden_size
    return float(states + head + CHUNK_BYTES), "states of all steps, the head's gradient, pieces"


def _disk(plan: TrainingPlan, sizes: Sizes) -> Iterator[Figure]:
    samples = sizes.tokens * SAMPLE_BYTES
    stored = 0.0 if plan.capture.online else sizes.tokens * state_bytes(plan, sizes.spec)
    model = sizes.trainable * MASTER + _owned(plan, sizes) * MASTER
    each = model + _moments(plan, sizes)
    kept = min(plan.train.keep_checkpoints, _checkpoints(plan))
    told = {
        "samples": (samples, f"{SAMPLE_BYTES} B a token"),
        "states": (stored, "not stored: online" if plan.capture.online else "tokens x states"),
        "a checkpoint": (each, f"weights {model / 1e9:.2f} GB in float32, and the moments"),
        "checkpoints": (each * (kept + 1), f"{kept} kept, and one while it is written"),
        "exports": (model * len(plan.export.formats), "links where the disk allows them"),
    }
    for name, (value, how) in told.items():
        yield Figure(section="disk", name=name, value=value, unit="bytes", how=how)
    total = sum(value for name, (value, _) in told.items() if name != "a checkpoint")
    yield Figure(section="disk", name="disk in all", value=total, unit="bytes")


def _owned(plan: TrainingPlan, sizes: Sizes) -> int:
    """Frozen parameters that a checkpoint holds: those a finetuned drafter brought along."""
    return sizes.frozen if plan.drafter.finetune is not None else 0


def _checkpoints(plan: TrainingPlan) -> int:
    return plan.train.epochs if plan.train.checkpoint_every is None else 1_000_000


def _time(plan: TrainingPlan, sizes: Sizes) -> Iterator[Figure]:
    given = plan.estimate
    stages = {
        "generate": (sizes.tokens, given.generate_tokens_per_s, "tokens"),
        "capture": (sizes.tokens, given.capture_tokens_per_s, "tokens"),
    }
    total = 0.0
    for name, (tokens, rate, what) in stages.items():
        how = f"{tokens / 1e6:.2f} M {what} at {rate:,.0f}/s ({given.source})"
        yield Figure(section="time", name=name, value=tokens / rate, unit="seconds", how=how)
        total += tokens / rate
    rate = given.train_tokens_per_s / relative_work(plan, sizes) * given.processes
    epoch = sizes.tokens * (1 - plan.train.held_out) / rate
    yield Figure(
        section="time",
        name="an epoch",
        value=epoch,
        unit="seconds",
        how=f"at {rate:,.0f} tokens/s: {given.train_tokens_per_s:,.0f} ({given.source})"
        + _scaled(plan),
    )
    train = plan.train.epochs * epoch * (1 + given.validate_share)
    how = f"{plan.train.epochs} epochs and their validation ({given.validate_share:.0%} of each)"
    yield Figure(section="time", name="train", value=train, unit="seconds", how=how)
    ends = list(_ends(plan, sizes, rate))
    yield from ends
    total += train + sum(figure.value for figure in ends)
    yield Figure(section="time", name="time in all", value=total, unit="seconds")


def _ends(plan: TrainingPlan, sizes: Sizes, rate: float) -> Iterator[Figure]:
    """Evaluation and export; `rate`: of training, which the offline walk is at least as fast as."""
    given, section = plan.estimate, plan.evaluate
    prompts = min(section.prompts, max(1, round(plan.train.held_out * sizes.samples)))
    tokens = prompts * given.tokens_per_sample
    answers = len(section.engines) + (section.offline == "engine")
    asked, walked = tokens / given.generate_tokens_per_s, tokens / rate
    how = f"{prompts:,} prompts: offline from {OFFLINE[section.offline]}, then asked in "
    how += f"{', '.join(section.engines) or 'no engine'}; starts are not counted"
    value = answers * asked + walked
    yield Figure(section="time", name="evaluate", value=value, unit="seconds", how=how)
    served = [name for name in plan.export.formats if name in ENGINES and plan.export.load]
    value = len(served) * min(prompts, SERVED) * given.tokens_per_sample
    how = f"{', '.join(plan.export.formats)}; {SERVED} prompts in each engine that is installed"
    yield Figure(
        section="time",
        name="export",
        value=value / given.generate_tokens_per_s,
        unit="seconds",
        how=how if served else f"{', '.join(plan.export.formats)}; none is loaded",
    )


def _scaled(plan: TrainingPlan) -> str:
    scaled = ["the arithmetic of a token"] if plan.estimate.source == ORIGINAL else []
    scaled += [f"{plan.estimate.processes} processes"] if plan.estimate.processes > 1 else []
    return f", scaled by {' and '.join(scaled)}" if scaled else ""


def relative_work(plan: TrainingPlan, sizes: Sizes) -> float:
    """The plan's arithmetic a token over that of the drafter its rate was measured with."""
    if plan.estimate.source != ORIGINAL:
        return 1.0  # a rate measured on the plan's own drafter
    own = work_per_token(sizes.spec, plan.train.ttt_steps, sizes.facts.vocab_size)
    if plan.train.gradient_checkpointing:
        own *= 4 / 3  # the forward pass once more
    return own / work_per_token(DRAFTER, 3, VOCAB)
