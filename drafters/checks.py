"""A drafter's config against itself, its target and the engines. Headers only, no weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from drafters.engines import ENGINES, LABELS, Engine, Reading, gaps, label, readings
from drafters.findings import Finding, Severity
from drafters.flat import FLAGS, IDS, KNOWN_ROPES, eagle_config, one_id, rope_of
from drafters.reading import FORMAT_NAMES, Checkpoint, Target, describe_ids

Engines = tuple[Engine, ...]


def check_quick(checkpoint: Checkpoint, target: Target) -> Iterator[Finding]:
    """What makes a drafter unfit for a target whatever engine serves it; asked before each run."""
    yield from _sizes(checkpoint, target)
    yield from _spec_itself(checkpoint)
    yield from check_ids(checkpoint, target)


def check_config(
    checkpoint: Checkpoint, target: Target | None, engines: Engines = ENGINES
) -> Iterator[Finding]:
    """Everything that `check_quick` leaves out: flags, rope, heads, and each engine's reading."""
    yield from _notes(checkpoint)
    yield from _ids_assumed(checkpoint)
    yield from _flags(checkpoint, engines)
    if target is not None:
        yield from _rope(checkpoint, target)
        yield from _heads(checkpoint, target)
    for reading in readings(checkpoint, target):
        if reading.engine in engines:
            yield from _reading(checkpoint, reading)
    for engine in engines:
        severity: Severity = "error" if engines == (engine,) else "warning"
        for gap in gaps(checkpoint, engine, target):
            yield _finding(
                checkpoint,
                severity,
                gap.code,
                gap.what,
                f"{LABELS[engine]} cannot serve it",
                gap.remedy,
            )


def _finding(
    checkpoint: Checkpoint,
    severity: Severity,
    code: str,
    what: str,
    why: str = "",
    remedy: str = "",
) -> Finding:
    where = str(checkpoint.path / "config.json")
    return Finding(severity=severity, code=code, where=where, what=what, why=why, remedy=remedy)


def _sizes(checkpoint: Checkpoint, target: Target) -> Iterator[Finding]:
    spec = checkpoint.spec
    for key, have in (("hidden_size", spec.target_hidden_size), ("vocab_size", spec.vocab_size)):
        want = target.config.get(key)
        if want is not None and have != want:
            yield _finding(
                checkpoint,
                "error",
                "target_size",
                f"the drafter was made for a target of {key} {have}, but {target.path} has {want}",
                remedy="choose the drafter trained for this target",
            )
    layers = target.layers
    if layers is not None and not all(0 <= index <= layers for index in spec.aux_layers):
        yield _finding(
            checkpoint,
            "error",
            "layers_out_of_range",
            f"aux layers {list(spec.aux_layers)} are not all within the {layers} layers of "
            f"{target.path}",
            remedy="it was trained for another target, or its ids are counted otherwise (--ids)",
        )


def _spec_itself(checkpoint: Checkpoint) -> Iterator[Finding]:
    spec = checkpoint.spec
    if spec.norm_before_fc and spec.fc_norm:
        yield _finding(
            checkpoint,
            "error",
            "norms_exclusive",
            "norm_before_fc and fc_norm are both set",
            "a drafter has one or the other",
            "keep the one it was trained with",
        )
    if spec.draft_vocab_size > spec.vocab_size:
        yield _finding(
            checkpoint,
            "error",
            "draft_vocab",
            f"draft_vocab_size {spec.draft_vocab_size} is larger than vocab_size {spec.vocab_size}",
            remedy="correct the config",
        )
    if spec.kind == "llama" and spec.num_attention_heads % spec.num_key_value_heads:
        yield _finding(
            checkpoint,
            "error",
            "heads",
            f"{spec.num_attention_heads} heads cannot share {spec.num_key_value_heads} key-value "
            "heads",
            "each key-value head serves as many heads",
            "correct the config",
        )
    rotated = spec.mla.qk_rope_head_dim if spec.mla else spec.head_dim
    if rotated % 2:
        yield _finding(
            checkpoint,
            "error",
            "heads",
            f"{rotated} rotated dimensions a head",
            "rotary embedding turns pairs",
            "correct the config",
        )


def check_ids(checkpoint: Checkpoint, target: Target | None) -> Iterator[Finding]:
    """Whether layer ids are there and number what fc takes."""
    if checkpoint.ids is None:
        default = ""
        if target is not None and target.layers is not None:
            layers = target.layers
            default = f" (vLLM and SGLang: {[2, layers // 2, layers - 3]})"
        yield _finding(
            checkpoint,
            "error",
            "ids_missing",
            "no eagle_aux_hidden_state_layer_ids, so each engine would guess the layers" + default,
            remedy="add the ids the drafter was trained on, or give them with --layer-ids",
        )
        return
    top, inner = checkpoint.flat.get(IDS), eagle_config(checkpoint.flat).get(IDS)
    if top and inner and top != inner:
        yield _finding(
            checkpoint,
            "error",
            "ids_conflict",
            f"the layer ids are {top} at the top level and {inner} in eagle_config",
            "vLLM takes the first, SGLang the second",
            "keep those that the drafter was trained on",
        )
    fed = len(checkpoint.spec.aux_layers)
    if fed != checkpoint.num_aux:
        yield _finding(
            checkpoint,
            "error",
            "ids_number",
            f"{fed} layer ids, but fc takes {checkpoint.num_aux} states of the target",
            remedy="state the ids it was trained on",
        )
    said = checkpoint.flat.get("num_aux_hidden_states")
    if said is not None and said != checkpoint.num_aux:
        yield _finding(
            checkpoint,
            "error",
            "ids_number",
            f"num_aux_hidden_states is {said}, but fc takes {checkpoint.num_aux} states",
            "vLLM takes fc's width from it",
            "correct the config",
        )


def _notes(checkpoint: Checkpoint) -> Iterator[Finding]:
    for note in checkpoint.notes:
        yield _finding(
            checkpoint,
            "warning",
            "flag_default",
            note,
            "the trainer and the engine would compute differently",
            "convert the folder, which writes it out, or add it to the config",
        )


def _ids_assumed(checkpoint: Checkpoint) -> Iterator[Finding]:
    if checkpoint.ids is None or checkpoint.certain:
        return
    looks = checkpoint.ids[0] == 1 and checkpoint.convention == "vllm"
    yield _finding(
        checkpoint,
        "warning" if looks else "note",
        "ids_assumed",
        f"layer ids {describe_ids(checkpoint)}",
        "a list that begins with 1 looks like SpecForge's, which counts outputs: then these are "
        f"{[i + 1 for i in checkpoint.ids]}"
        if looks
        else "the folder does not say how its ids are counted",
        "state it: --ids hf, vllm, sglang, speculators-0.3 or specforge",
    )


def _flags(checkpoint: Checkpoint, engines: Engines) -> Iterator[Finding]:
    flat = checkpoint.flat
    inner = eagle_config(flat)
    for flag in FLAGS:
        if flag == "norm_before_fc" or flag not in inner:
            continue
        if bool(inner[flag]) != bool(flat.get(flag)):
            yield _finding(
                checkpoint,
                "warning",
                "flag_ignored",
                f"{flag} is {inner[flag]!r} inside eagle_config, where no engine looks for it",
                "engines read it at the top level alone",
                "move it to the top level if the drafter was trained so",
            )
    if flat.get("use_aux_norm") and "vllm" in engines:
        yield _finding(
            checkpoint,
            "warning",
            "flag_ignored",
            "use_aux_norm is SGLang's older name of fc_norm",
            "vLLM does not read it",
            "convert the folder, which writes fc_norm",
        )
    older = [name for name in checkpoint.stored.values() if "aux_norm_" in name]
    if older and ("vllm" in engines or checkpoint.spec.kind == "mla"):
        yield _finding(
            checkpoint,
            "warning",
            "names_older",
            f"tensors have the older name {older[0]}",
            "vLLM and SGLang's MLA drafter do not know it",
            "convert the folder",
        )
    if checkpoint.spec.norm_output and checkpoint.format == "flat-midlayer":
        yield _finding(
            checkpoint,
            "warning",
            "norm_output_meaning",
            "norm_output is true in a folder with midlayer.* names",
            "SpecForge's switch of this name is a norm before lm_head, the engines' feeds the "
            "normed state back: wrong, it spoils every draft but the first",
            "if SpecForge trained it, say --ids specforge or set it to false",
        )


def _rope(checkpoint: Checkpoint, target: Target) -> Iterator[Finding]:
    spec = checkpoint.spec
    kind = (spec.rope.scaling or {}).get("rope_type", "default")
    if kind not in KNOWN_ROPES:
        yield _finding(
            checkpoint,
            "error",
            "rope_unknown",
            f"rope_type is {kind!r}",
            f"known are {', '.join(KNOWN_ROPES)}",
            "correct the config",
        )
    theirs = rope_of(target.config)
    said = any(k in checkpoint.flat for k in ("rope_theta", "rope_parameters"))
    if spec.rope.theta != theirs.theta:
        yield _finding(
            checkpoint,
            "warning",
            "rope_base",
            f"the rope base is {spec.rope.theta:g}"
            + ("" if said else " (none is written, so the default)")
            + f", the target's {theirs.theta:g}",
            "a base other than the trained one costs more the longer the context",
            "check it against what the drafter was trained with, and write rope_theta",
        )
    ours_scaled, theirs_scaled = _essence(spec.rope.scaling), _essence(theirs.scaling)
    if ours_scaled != theirs_scaled:
        yield _finding(
            checkpoint,
            "warning" if spec.kind == "mla" else "note",
            "rope_scaling",
            f"the rope scaling is {ours_scaled or 'none'}, the target's {theirs_scaled or 'none'}",
            "right only if the drafter was trained so",
            "check it against what the drafter was trained with",
        )


def _essence(scaling: dict[str, Any] | None) -> dict[str, Any]:
    """A scaling without its older name and with equal numbers alike."""
    known = {k: v for k, v in (scaling or {}).items() if k != "type" and v is not None}
    return {k: float(v) if isinstance(v, int | float) else v for k, v in sorted(known.items())}


def _heads(checkpoint: Checkpoint, target: Target) -> Iterator[Finding]:
    spec, theirs = checkpoint.spec, target.config
    heads = one_id(theirs.get("num_attention_heads"))
    if heads is not None and heads != spec.num_attention_heads:
        yield _finding(
            checkpoint,
            "note",
            "heads",
            f"{spec.num_attention_heads} attention heads, the target has {heads}",
            "allowed; with tensor parallelism both must divide",
        )
    latent = theirs.get("kv_lora_rank") is not None
    if latent and spec.kind == "llama":
        yield _finding(
            checkpoint,
            "note",
            "head_kind",
            "a Llama head beside a target with latent attention",
            "its cache takes pages of another size, and on a CPU vLLM serves the pair without MLA",
        )
    if spec.mla is not None and latent:
        differ = [
            f"{key} {getattr(spec.mla, key)} for {theirs[key]}"
            for key in ("kv_lora_rank", "qk_rope_head_dim")
            if theirs.get(key) is not None and theirs[key] != getattr(spec.mla, key)
        ]
        if differ:
            yield _finding(
                checkpoint,
                "warning",
                "latent_width",
                f"the head has {', '.join(differ)}",
                "engines keep the caches of both in pages of one size",
                "serve it with an engine that has been tried with this pair",
            )


def _reading(checkpoint: Checkpoint, reading: Reading) -> Iterator[Finding]:
    """What an engine would make of the folder as it is."""
    name, trained = label(reading), list(checkpoint.spec.aux_layers)
    repair = f"python -m drafters convert {checkpoint.path} --to {reading.engine} --out DIR"
    if reading.problem is not None:
        yield _finding(
            checkpoint,
            "warning",
            "format_unread",
            reading.problem,
            f"the folder is {FORMAT_NAMES[checkpoint.format]}",
            repair,
        )
        return
    if reading.right is True or not trained or (reading.right is None and reading.runner is None):
        return
    given = "no ids, so its default" if reading.ids is None else f"the ids {reading.ids}"
    fed = "depends on the target" if reading.captured is None else str(reading.captured)
    kinds = {"deepseek": " of a DeepSeek-type target", "llama": " of a Llama-type target"}
    kind = kinds.get(reading.family, "") if checkpoint.family is None else ""
    yield _finding(
        checkpoint,
        "warning",
        "ids_misread",
        f"given this folder as it is, {name} reads {given}, and captures {fed}{kind}; the drafter "
        f"was trained on {trained}",
        "one layer off costs most of the acceptance, and no log says so",
        f"{repair} (a harness run does it by itself)",
    )
