"""What a drafter's folder is, from its config and the headers of its weights.

No weights are read but the table d2t, which is small beside them.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec

from drafters.check_weights import Vocabulary
from drafters.engines import Reading, label, readings
from drafters.findings import plain
from drafters.flat import FLAGS
from drafters.ids import FAMILY_NAMES, Convention, Family
from drafters.reading import (
    FORMAT_NAMES,
    Checkpoint,
    Format,
    Stated,
    describe_ids,
    read_folder,
    read_target,
)
from drafters.spec import DrafterSpec

_HEADS = {"llama": "Llama (grouped-query attention)", "mla": "MLA (latent attention)"}


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """A drafter's folder in figures. Sizes in bytes, parameters without d2t and t2d.

    `aux_layers`: transformers' hidden-state indices, None where the folder names none. `coverage`:
    share of the target's vocabulary that can be drafted. `d2t`: `offsets`, `broken`, or None where
    there is no table. `engines`: what each would make of the folder as it is.
    """

    path: str
    format: Format
    format_name: str
    spec: DrafterSpec
    parameters: int
    trainable: int
    bytes: int
    files: int
    dtypes: dict[str, int]
    own_embedding: bool
    own_head: bool
    coverage: float
    d2t: str | None
    num_aux: int
    aux_layers: list[int] | None
    ids: list[int] | None
    convention: Convention
    ids_said: str
    ids_certain: bool
    target_family: Family | None
    engines: list[Reading]
    notes: list[str]
    beside: list[str]


def inspect(
    path: Path, target_path: Path | None = None, stated: Stated | None = None
) -> Inspection:
    """Look at the drafter in `path`. Raises DrafterError, one line."""
    target = None if target_path is None else read_target(target_path)
    checkpoint = read_folder(path, target, stated)
    spec = checkpoint.spec
    weights = {n: h for n, h in checkpoint.tensors.items() if n not in ("d2t", "t2d")}
    vocabulary = Vocabulary(checkpoint)
    table = None
    if checkpoint.has("d2t"):
        table = "broken" if vocabulary.findings or vocabulary.kept is None else "offsets"
    embedding = weights.get("embed_tokens.weight")
    parameters = sum(header.elements for header in weights.values())
    return Inspection(
        path=str(path),
        format=checkpoint.format,
        format_name=FORMAT_NAMES[checkpoint.format],
        spec=spec,
        parameters=parameters,
        trainable=parameters - (embedding.elements if embedding else 0),
        bytes=sum(h.end - h.begin for h in checkpoint.tensors.values()),
        files=len({h.file for h in checkpoint.tensors.values()}),
        dtypes=dict(Counter(h.dtype for h in checkpoint.tensors.values())),
        own_embedding=embedding is not None,
        own_head="lm_head.weight" in weights,
        coverage=spec.draft_vocab_size / spec.vocab_size,
        d2t=table,
        num_aux=checkpoint.num_aux,
        aux_layers=list(spec.aux_layers) if checkpoint.ids else None,
        ids=list(checkpoint.ids) if checkpoint.ids else None,
        convention=checkpoint.convention,
        ids_said=describe_ids(checkpoint),
        ids_certain=checkpoint.certain,
        target_family=checkpoint.family,
        engines=readings(checkpoint, target),
        notes=[*checkpoint.notes, *(f.what for f in vocabulary.findings)],
        beside=_beside(checkpoint),
    )


def _beside(checkpoint: Checkpoint) -> list[str]:
    files = {header.file.name for header in checkpoint.tensors.values()}
    names = (p.name for p in checkpoint.path.iterdir())
    return sorted(n for n in names if n not in files and n != "config.json")[:20]


def lines(found: Inspection) -> list[str]:
    """The inspection for a terminal, without control characters."""
    spec = found.spec
    shape = f"hidden {spec.hidden_size}"
    if spec.target_hidden_size != spec.hidden_size:
        shape += f" (target {spec.target_hidden_size})"
    shape += f", feed-forward {spec.intermediate_size}, {spec.num_attention_heads} heads"
    if spec.mla is None:
        shape += f" of {spec.head_dim}, {spec.num_key_value_heads} for keys and values"
    else:
        shape += f", latent {spec.mla.kv_lora_rank}"
    scaling = spec.rope.scaling
    flags = [flag for flag in FLAGS if getattr(spec, flag)]
    rows = [
        ("format", found.format_name),
        ("head", _HEADS[spec.kind]),
        ("parameters", f"{found.parameters:,}, {found.trainable:,} without the embedding"),
        ("sizes", shape),
        ("weights", f"{_size(found.bytes)} in {found.files} file{'s' * (found.files > 1)}, "
         + ", ".join(f"{n} x {d}" for d, n in sorted(found.dtypes.items()))),
        ("vocabulary", _vocabulary(found)),
        ("embedding", "its own" if found.own_embedding else "none: the target's is shared"),
        ("lm_head", "its own" if found.own_head else "none: the target's is shared"),
        ("rope", f"base {spec.rope.theta:g}, " + (f"{scaling}" if scaling else "no scaling")),
        ("norm flags", ", ".join(flags) or "none"),
        ("bos, eos", f"{_or_none(spec.bos_token_id)}, {_or_none(spec.eos_token_id)}"),
        ("aux layers", f"{found.aux_layers} as transformers' hidden_states index"
         if found.aux_layers else f"not named ({found.num_aux} by the width of fc): state them "
         "with --layer-ids"),
        ("layer ids", found.ids_said),
    ]  # fmt: skip
    text = [f"{label + ':':13} {value}" for label, value in rows]
    text += [f"{'note:':13} {note}" for note in found.notes]
    if found.beside:
        text.append(f"{'beside:':13} {', '.join(found.beside)}")
    return [plain(found.path), *(f"  {plain_keeping(t)}" for t in [*text, *_table(found)])]


def plain_keeping(text: str) -> str:
    """Printable characters only, runs of blanks kept."""
    return "".join(c if c.isprintable() else " " for c in text).rstrip()


def _vocabulary(found: Inspection) -> str:
    spec = found.spec
    if spec.draft_vocab_size == spec.vocab_size:
        return f"{spec.vocab_size:,}, all of the target's"
    table = {"offsets": "d2t holds offsets", "broken": "d2t is broken", None: "no d2t"}[found.d2t]
    return (
        f"{spec.draft_vocab_size:,} of {spec.vocab_size:,} ({100 * found.coverage:.1f} %), {table}"
    )


def _table(found: Inspection) -> list[str]:
    """What each engine would capture, given this folder as it is."""
    rows = [("engine", "on a target like", "reads", "captures", "")]
    for reading in found.engines:
        verdict = {True: "as trained", False: "NOT as trained", None: ""}[reading.right]
        if reading.problem is not None:
            reads, fed, verdict = "-", "-", reading.problem
        else:
            reads = "its default" if reading.ids is None else str(reading.ids)
            fed = "depends on the target" if reading.captured is None else str(reading.captured)
        known = found.target_family is not None
        family = FAMILY_NAMES[reading.family]
        if reading.engine == "vllm" and not known:
            family = "any"
        rows.append((label(reading), family, reads, fed, verdict))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    text = ["given this folder as it is:"]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        text.append("  " + "  ".join([*cells, row[4]]).rstrip())
    return text


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


def _or_none(value: int | None) -> str:
    return "none" if value is None else str(value)
