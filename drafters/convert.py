"""`python -m drafters convert`: a drafter's folder written anew for an engine or a library.

The new folder appears whole or not at all, and is read back before it does: what is read must be
the drafter that was given.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec

from drafters.check_weights import Vocabulary
from drafters.engines import readings
from drafters.findings import Finding
from drafters.flat import FLAGS
from drafters.formats import Destination, translate, write_config
from drafters.headers import read_headers
from drafters.reading import Checkpoint, Stated, Target, describe_ids, read_folder, read_target
from drafters.shapes import check_headers
from drafters.spec import DrafterError, DrafterSpec
from drafters.store import Plan, write_weights
from drafters.weights import FLOATS, likeness


class Converted(msgspec.Struct, frozen=True, kw_only=True):
    """What a conversion did, for people and for JSON."""

    out: str
    to: Destination
    spec: DrafterSpec
    source_ids: str
    written_ids: list[int]
    weights: str
    notes: list[str]


def convert(
    path: Path,
    to: Destination,
    out: Path,
    *,
    target_path: Path | None = None,
    stated: Stated | None = None,
) -> Converted:
    """Write the drafter in `path` to the new folder `out`, in the form that `to` reads.

    Tensors keep their bytes. Raises DrafterError where `out` is in use, or where the result would
    compute something else than the drafter does.
    """
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise DrafterError(f"{out} exists already: name a folder that does not")
    target = None if target_path is None else read_target(target_path)
    checkpoint = read_folder(path, target, stated)
    _check_tables(checkpoint)
    if to == "sglang":
        _check_embedding(checkpoint, target)
    config, plan = translate(checkpoint, to, target)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.parent / f".{out.name}.partial-{os.getpid()}"
    _clear_up(out)
    try:
        partial.mkdir()
        write_weights(checkpoint, plan, partial, link="hard")
        write_config(config, partial)
        again = _prove(checkpoint, partial, target, to)
        os.replace(partial, out)
    except OSError as error:
        raise DrafterError(f"{out} cannot be written: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Converted(
        out=str(out),
        to=to,
        spec=again.spec,
        source_ids=describe_ids(checkpoint),
        written_ids=list(again.ids or ()),
        weights=_what_happened(plan),
        notes=_notes(checkpoint, config, plan, target),
    )


def _clear_up(out: Path) -> None:
    """Remove what a conversion that was killed left beside `out`."""
    for stale in out.parent.glob(f".{out.name}.partial-*"):
        number = stale.name.rpartition("-")[2]
        if not number.isdigit():
            continue
        try:
            os.kill(int(number), 0)
        except ProcessLookupError:
            shutil.rmtree(stale, ignore_errors=True)
        except (PermissionError, OverflowError):
            continue


def _check_tables(checkpoint: Checkpoint) -> None:
    """A draft vocabulary that is broken stays broken in every format."""
    problems: list[Finding] = [f for f in check_headers(checkpoint) if f.severity == "error"]
    problems += [f for f in Vocabulary(checkpoint).findings if f.severity == "error"]
    for found in problems:
        raise DrafterError(found.line())


def _check_embedding(checkpoint: Checkpoint, target: Target | None) -> None:
    """SGLang puts the target's embedding in place of a drafter's own, unless their widths differ.

    Looked at where the target's folder is given and holds weights.
    """
    ours = checkpoint.tensors.get("embed_tokens.weight")
    spec = checkpoint.spec
    if ours is None or target is None or spec.target_hidden_size != spec.hidden_size:
        return
    if not any(target.path.glob("*.safetensors")):
        return
    named = [
        (n, h) for n, h in read_headers(target.path).items() if n.endswith("embed_tokens.weight")
    ]
    theirs = min(named, key=lambda item: len(item[0]))[1] if named else None
    if theirs is None or theirs.shape != ours.shape or theirs.dtype not in FLOATS:
        return
    if not likeness(ours, theirs).equal:
        raise DrafterError(
            f"{ours.file}: embed_tokens is not the target's, and SGLang puts the target's in its "
            "place, so this drafter would compute something else; convert it to vllm, or train it "
            "with the target's embedding"
        )


def _prove(
    checkpoint: Checkpoint, folder: Path, target: Target | None, to: Destination
) -> Checkpoint:
    """Read the new folder and compare. Raises DrafterError where it is another drafter."""
    again = read_folder(folder, target)
    for reading in readings(again, target):
        if reading.engine == to and reading.right is False:
            raise DrafterError(
                f"{checkpoint.path}: {to} would capture {reading.captured} for "
                f"{list(checkpoint.spec.aux_layers)}; name the target with --target"
            )
    if again.spec != checkpoint.spec:
        fields = msgspec.structs.fields(DrafterSpec)
        names = [f.name for f in fields]
        differ = [n for n in names if getattr(again.spec, n) != getattr(checkpoint.spec, n)]
        raise DrafterError(
            f"{checkpoint.path}: the format cannot hold {', '.join(differ)} of this drafter"
        )
    kept = {n for n in checkpoint.tensors if not n.startswith("verifier_")}
    lost = sorted(kept - set(again.tensors))
    if lost:
        raise DrafterError(f"{checkpoint.path}: tensor {lost[0]} was lost; that is our mistake")
    return again


def _what_happened(plan: Plan) -> str:
    if not plan.changed:
        return "linked: no tensor's name changes"
    parts = [f"{len(plan.renamed)} tensors renamed"] if plan.renamed else []
    parts += [f"left out {', '.join(plan.dropped[:4])}"] if plan.dropped else []
    parts += [f"added {', '.join(plan.added)}"] if plan.added else []
    return f"written anew: {'; '.join(parts)}"


def _notes(
    checkpoint: Checkpoint, config: dict[str, object], plan: Plan, target: Target | None
) -> list[str]:
    """What did not come along, and what had to be assumed."""
    notes = list(checkpoint.notes)
    if not checkpoint.certain:
        notes.append(
            f"layer ids {describe_ids(checkpoint)}: state them with --ids if that is wrong"
        )
    written = {*config, *_nested(config)}
    lost = sorted(set(checkpoint.flat) - written - _CARRIED)
    if lost:
        notes.append(f"left out of the config, it has no place for them: {', '.join(lost[:12])}")
    files = {file.name for file in plan.files}
    rest = sorted(
        p.name for p in checkpoint.path.iterdir() if p.name not in files and p.name not in _CONFIGS
    )
    if rest:
        notes.append(f"not carried over: {', '.join(rest[:12])}")
    if target is None and checkpoint.has("embed_tokens.weight"):
        notes.append("its embedding was not compared with the target's (--target)")
    return notes


def _nested(config: dict[str, object]) -> set[str]:
    inner = config.get("transformer_layer_config")
    return set(inner) if isinstance(inner, dict) else set()


_CONFIGS = ("config.json", "model.safetensors.index.json")
# said by another key, or by none because it is the one value that can be held
_CARRIED = {
    *("eagle_config", "eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states", "torch_dtype"),
    *("rope_theta", "rope_scaling", "rope_parameters", "use_aux_norm", "transformers_version"),
    *("model_type", "dtype", "attention_bias", "mlp_bias", "num_hidden_layers", *FLAGS),
    *("first_k_dense_replace", "moe_layer_freq", "auto_map", "drafter_format"),
}
