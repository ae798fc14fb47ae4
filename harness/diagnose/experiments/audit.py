"""The static audit: checkpoint, arguments and log, read without running anything."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from drafters.engines import ENGINES, Engine, gaps, readings
from drafters.findings import Finding
from drafters.flat import IDS, MARK, marked_indices, written_ids
from drafters.headers import TensorHeader, read_headers
from drafters.ids import to_index
from drafters.reading import Checkpoint, Target, read_folder, read_target
from drafters.spec import DrafterError
from drafters.validate import validate
from drafters.weights import FLOATS, rows_of, sample
from harness.diagnose.records import Audit, AuditFinding, Subject

_CAUSES: dict[str, str] = {
    "ids_missing": "layers_default",
    "ids_conflict": "layers_shifted",
    "ids_misread": "layers_shifted",
    "ids_number": "layers_other",
    "layers_out_of_range": "layers_other",
    "layers_not_captured": "layers_other",
    "d2t_absolute": "vocabulary_map",
    "d2t_order": "vocabulary_map",
    "d2t_range": "vocabulary_map",
    "t2d_disagrees": "vocabulary_map",
    "table_unread": "vocabulary_map",
    "draft_vocab": "vocabulary_map",
    "head_absent": "lm_head_replaced",
    "embedding_random": "embeddings_replaced",
    "embedding_absent": "embeddings_replaced",
    "norm_output_meaning": "norm_output",
    "rope_unknown": "rope",
    "rope_base": "rope",
    "rope_scaling": "rope",
    "norms_exclusive": "input_norm",
    "not_finite": "tensors_damaged",
    "all_zero": "tensors_damaged",
    "constant": "tensors_damaged",
    "norm_out_of_range": "tensors_damaged",
    "norm_partly_one": "tensors_damaged",
    "unreadable": "tensors_damaged",
    "target_size": "other_target",
}
"""The codes of `drafters.validate` that point to a cause of acceptance lost."""
_TRANSLATED = ("ids_misread", "format_unread", "no_q_lora", "names_older")
"""What vLLM or SGLang make of a folder that was not translated for them."""
_FLAGS: tuple[tuple[str, str], ...] = (
    ("norm_before_residual", "norm_before_residual"),
    ("norm_before_fc", "input_norm"),
    ("fc_norm", "input_norm"),
    ("use_aux_norm", "input_norm"),
    ("norm_output", "norm_output"),
)
FLOAT16 = ("float16", "half")
_FINAL_NORM = re.compile(r"\b(?:tensor|norm) norm\.weight\b")


def audit(subject: Subject, log_facts: Mapping[str, str] | None = None) -> Audit:
    """Everything that can be said of the subject before it runs, and what its engine's log said.

    Raises `DrafterError` where the drafter's folder or the target's config cannot be used at all.
    """
    path, target_path = Path(subject.drafter), Path(subject.target)
    engine = _engine(subject)
    found = [_told(f) for f in validate(path, target_path, engine=engine) if _concerns(f, subject)]
    target = read_target(target_path)
    found += _arguments(subject, target)
    try:
        checkpoint: Checkpoint | None = read_folder(path, target)
    except DrafterError:
        checkpoint = None  # told by `validate`
    facts = dict(log_facts or {})
    if checkpoint is not None:
        found += _of_mark(checkpoint, target)
        found += _of_log(checkpoint, facts)
    return Audit(
        findings=tuple(found),
        log_facts=facts,
        owns_embeddings=None if checkpoint is None else checkpoint.has("embed_tokens.weight"),
        owns_lm_head=None if checkpoint is None else checkpoint.has("lm_head.weight"),
        embeddings_like_target=None if checkpoint is None else _likeness(checkpoint, target),
        aux_layers=(checkpoint.spec.aux_layers or None) if checkpoint is not None else None,
        engine_layers=None if checkpoint is None else engine_layers(checkpoint, target, subject),
    )


def with_log(known: Audit, subject: Subject, log_facts: Mapping[str, str]) -> Audit:
    """The same audit, with what the engine's log said since."""
    if not log_facts or dict(log_facts) == known.log_facts:
        return known
    try:
        checkpoint = read_folder(Path(subject.drafter), read_target(Path(subject.target)))
    except DrafterError:
        return msgspec.structs.replace(known, log_facts=dict(log_facts))
    kept = tuple(f for f in known.findings if f.where != LOG)
    found = (*kept, *_of_log(checkpoint, dict(log_facts)))
    layers = _logged_layers(log_facts) or known.engine_layers
    return msgspec.structs.replace(
        known, findings=found, log_facts=dict(log_facts), engine_layers=layers
    )


LOG = "the engine's log"


def _engine(subject: Subject) -> Engine | None:
    return next((name for name in ENGINES if name == subject.engine), None)


def _concerns(found: Finding, subject: Subject) -> bool:
    """Whether a finding is about this engine, and not about what the harness translates for it.

    An engine that is started here gets a folder that was translated for it: there the ids are
    read right, and older names are written anew.
    """
    if found.code in _TRANSLATED:
        return subject.engine in ENGINES and subject.url is not None
    if found.code == "layers_not_captured":  # no translation makes an engine capture them
        return subject.engine in ENGINES
    if subject.engine not in ENGINES and found.code == "flag_ignored":
        return "eagle_config" in found.what
    return found.code not in ("state_missing", "no_target")


def _told(found: Finding) -> AuditFinding:
    return AuditFinding(
        severity=found.severity,
        code=found.code,
        what=found.what,
        why=found.why,
        remedy=found.remedy,
        where=found.where,
        cause=cause_of(found),
    )


def cause_of(found: Finding) -> str | None:
    """The cause that a finding points to; None for one that loses no acceptance by itself."""
    if found.code in ("flag_ignored", "flag_default"):
        return next((cause for flag, cause in _FLAGS if flag in found.what), None)
    cause = _CAUSES.get(found.code)
    if cause == "tensors_damaged" and _FINAL_NORM.search(found.what):
        return "final_norm"
    if cause == "tensors_damaged" and "embed_tokens" in found.what:
        return "embeddings_replaced"
    return cause


def engine_layers(
    checkpoint: Checkpoint, target: Target, subject: Subject
) -> tuple[int, ...] | None:
    """The layers, in transformers' index, that the subject's engine feeds to this drafter.

    A server that runs already was given the folder as it is; one that is started here gets the
    harness's translation, and where there is none the folder as it is as well.
    """
    engine = _engine(subject)
    indices = checkpoint.spec.aux_layers
    if engine is None:
        return indices or None
    as_given = subject.url is not None or not indices
    if as_given or any(
        gap.code == "layers_not_captured" for gap in gaps(checkpoint, engine, target)
    ):
        told = [r for r in readings(checkpoint, target) if r.engine == engine and r.captured]
        return tuple(told[0].captured or ()) if told else None
    return indices


def _likeness(checkpoint: Checkpoint, target: Target) -> float | None:
    """Median cosine of the drafter's own embedding rows with the target's; None: it has none."""
    import numpy as np

    ours = checkpoint.tensors.get("embed_tokens.weight")
    theirs = _embedding_of(target)
    if ours is None or theirs is None or ours.shape != theirs.shape or ours.dtype not in FLOATS:
        return None
    which = sample(ours.shape[0])
    a, b = rows_of(ours, which), rows_of(theirs, which)
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    useful = np.isfinite(norms) & (norms > 0)
    if not useful.any():
        return None
    return float(np.median((a[useful] * b[useful]).sum(-1) / norms[useful]))


def _embedding_of(target: Target) -> TensorHeader | None:
    try:
        tensors = read_headers(target.path)
    except DrafterError:
        return None
    named = sorted((n for n in tensors if n.endswith("embed_tokens.weight")), key=len)
    return tensors[named[0]] if named and tensors[named[0]].dtype in FLOATS else None


def _argument(subject: Subject, *names: str) -> str | None:
    """The value of the last of these arguments; "" for a switch; None where it is not given."""
    found: str | None = None
    words = list(subject.extra_args)
    for i, word in enumerate(words):
        head, equals, value = word.partition("=")
        if head.replace("_", "-") in names:
            after = words[i + 1] if i + 1 < len(words) else ""
            found = value if equals else ("" if after.startswith("-") else after)
    return found


def _finding(severity: str, code: str, what: str, cause: str, remedy: str = "") -> AuditFinding:
    return AuditFinding(
        severity=severity,  # type: ignore[arg-type]
        code=code,
        what=what,
        remedy=remedy,
        where="engine arguments",
        cause=cause,
    )


def _arguments(subject: Subject, target: Target) -> Iterator[AuditFinding]:
    """What the arguments ask for that is known to cost acceptance."""
    yield from _method(subject)
    if subject.temperature > 0:
        yield from _sampled(subject)
    routed = target.config.get("routed_scaling_factor")
    if subject.dtype in FLOAT16 and routed not in (None, 1, 1.0):
        yield _finding(
            "warning",
            "float16_scaled",
            f"float16 on a target with routed_scaling_factor {routed}: vLLM scales its residual "
            "stream, and so the states",
            "states_scaled",
            "serve in bfloat16",
        )
    if subject.tensor_parallel > 1 and _argument(subject, "--enable-flashinfer-allreduce-fusion"):
        yield _finding(
            "warning",
            "allreduce_fused",
            f"all-reduce fusion with tensor parallelism {subject.tensor_parallel}",
            "states_partial_sums",
            "leave --enable-flashinfer-allreduce-fusion out to prove it",
        )
    if _argument(subject, "--enable-two-batch-overlap") is not None:
        yield _finding(
            "warning",
            "two_batch_overlap",
            "two-batch overlap: SGLang captures no states of batches that it splits",
            "states_skipped",
            "leave --enable-two-batch-overlap out",
        )
    cache = _argument(subject, "--kv-cache-dtype")
    if cache is not None and cache.startswith("fp8"):
        yield _finding(
            "note",
            "cache_fp8",
            f"the key-value cache is {cache}: states are further from the trainer's",
            "states_noisy",
            "serve once with --kv-cache-dtype auto to see what it costs",
        )


def _method(subject: Subject) -> Iterator[AuditFinding]:
    named = _argument(
        subject, "--speculative-config.method", "--speculative-algorithm", "-sc.method"
    )
    if named and named.lower() != "eagle3":
        yield _finding(
            "error",
            "method",
            f"the method is {named}, the checkpoint is an EAGLE-3 head",
            "wrong_method",
            "choose eagle3 (vLLM) or EAGLE3 (SGLang)",
        )


def _sampled(subject: Subject) -> Iterator[AuditFinding]:
    if subject.engine != "vllm":
        return
    how = _argument(subject, "--speculative-config.draft-sample-method", "-sc.draft-sample-method")
    if how in (None, "greedy"):
        yield _finding(
            "note",
            "draft_sample_greedy",
            f"temperature {subject.temperature:g} with greedy drafts"
            + ("" if how else ", vLLM's default"),
            "greedy_drafts_sampled",
            "--speculative-config.draft_sample_method probabilistic",
        )


def _of_mark(checkpoint: Checkpoint, target: Target) -> Iterator[AuditFinding]:
    """Layer ids that are not those that the folder itself says it was written with."""
    ids, written = checkpoint.ids, _marked_ids(checkpoint)
    if ids is None or written is None:
        return
    meant = marked_indices(checkpoint.flat, ids)
    if written != ids:
        what = f"the layer ids are {list(ids)}, and {MARK} was written for {list(written)}"
        differ = (ids, written)
    elif meant is not None and checkpoint.family is not None:
        read = to_index(checkpoint.convention, ids, checkpoint.family, target.layers)
        what = f"the layer ids {list(ids)} mean the layers {list(read)}, {MARK} says {list(meant)}"
        differ = (read, meant)
    else:
        return
    if differ[0] != differ[1]:
        yield AuditFinding(
            severity="warning",
            code="ids_unlike_format",
            what=what,
            why="one of the two was edited; engines read the ids, and the reference engine what "
            f"{MARK} says as long as it is of the same ids",
            remedy=f"write the ids that it was trained on, and leave {MARK} out",
            where="config.json",
            cause="layers_shifted" if _shifted(*differ) else "layers_other",
        )


def _marked_ids(checkpoint: Checkpoint) -> tuple[int, ...] | None:
    """The layer ids that the folder's own mark is of; None where it has none."""
    told = checkpoint.flat.get(MARK)
    try:
        return written_ids({IDS: told.get("layer_ids")}) if isinstance(told, dict) else None
    except DrafterError:
        return None


def _of_log(checkpoint: Checkpoint, facts: Mapping[str, str]) -> Iterator[AuditFinding]:
    """What the engine said it did, where that is not what the checkpoint asks for."""

    def told(severity: str, code: str, what: str, cause: str) -> AuditFinding:
        found = _finding(severity, code, what, cause)
        return msgspec.structs.replace(found, where=LOG)

    layers, declared = _logged_layers(facts), checkpoint.spec.aux_layers
    if layers and declared and layers != declared:
        yield told(
            "error",
            "log_layers",
            f"the engine captures {list(layers)}, the drafter was trained on {list(declared)}",
            "layers_shifted" if _shifted(layers, declared) else "layers_other",
        )
    for fact, tensor, cause in (
        ("embeddings", "embed_tokens.weight", "embeddings_replaced"),
        ("lm_head", "lm_head.weight", "lm_head_replaced"),
    ):
        said = facts.get(fact, "")
        if " | " in said:
            yield told("error", f"log_{fact}", f"ranks disagree on {fact}: {said}", cause)
        elif said.startswith("shared: the drafter has none") and checkpoint.has(tensor):
            yield told(
                "error", f"log_{fact}", f"the engine did not see the drafter's {tensor}", cause
            )
    method = facts.get("method")
    if method is not None and method.lower() != "eagle3":
        yield told("error", "log_method", f"the engine's method is {method}", "wrong_method")
    if "unknown_weights" in facts:
        yield told(
            "warning", "log_weights", f"weights were left out: {facts['unknown_weights']}",
            "tensors_damaged",
        )  # fmt: skip


def _logged_layers(facts: Mapping[str, str]) -> tuple[int, ...] | None:
    """vLLM's own line; its ids are transformers' indices."""
    numbers = re.findall(r"\d+", facts.get("layers", "").partition("|")[0])
    return tuple(map(int, numbers)) or None


def _shifted(got: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    steps = {a - b for a, b in zip(got, wanted, strict=False)}
    return len(got) == len(wanted) and len(steps) == 1 and abs(next(iter(steps))) == 1
