"""Stage vocab: the draft vocabulary, by frequency over the tokens that loss is taken on.

The folder: `vocab.safetensors` (d2t int64 offsets [D], t2d bool [V]; not there for the target's
whole vocabulary), `coverage.json`, and `gate.json`, written last.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from drafters.headers import read_headers
from harness.errors import UsageError
from training.files import locked, read_record, write_record, write_whole
from training.folders import VOCAB_FILE, Stage, stage_folder
from training.gate import Check, Gate, read_gate, require, write_gate
from training.generate.text import TargetText, read_text, vocab_size
from training.kept import differences, refuse_changed
from training.plan import TrainingPlan
from training.progress import note
from training.samples import Sample
from training.targets import target_digest, target_folder, target_identity
from training.unchanged import unchanged_samples

if TYPE_CHECKING:
    from numpy.typing import NDArray

STAGE: Stage = "vocab"
COVERAGE = "coverage.json"
SHOWN = 20


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """How often each of V tokens is a loss token: int64 [V], in all and by category."""

    all: Any
    by_category: dict[str, Any]


class MadeFrom(msgspec.Struct, frozen=True, kw_only=True):
    """What the vocabulary depends on; `finetune`: the digest of that drafter's d2t."""

    size: int | None
    finetune: str | None
    samples: str
    target_vocab_size: int


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """`coverage.json`. Shares are of loss tokens, in all and by category; None: there are none.

    `outside`: the commonest tokens that the draft vocabulary lacks, as (id, text, count).
    """

    made_from: MadeFrom
    draft_vocab_size: int
    source: str
    tokens: int
    distinct: int
    coverage: float | None
    categories: dict[str, float | None]
    outside: tuple[tuple[int, str, int], ...]


def choose_vocabulary(
    counts: Sequence[int], size: int, always: Iterable[int] = ()
) -> tuple[int, ...]:
    """The `size` most frequent ids of `counts` (one count an id), ascending; ties go by id.

    Those of `always` are in it whatever their count. Raises `UsageError` where `size` is larger
    than the vocabulary or smaller than `always`, `ValueError` for an id that does not exist.
    """
    import numpy as np

    frequency = np.asarray(counts, dtype=np.int64)  # [V]
    kept = np.unique(np.fromiter(always, dtype=np.int64))
    if kept.size and not (kept[0] >= 0 and kept[-1] < frequency.size):
        raise ValueError(f"ids to keep lie outside the vocabulary of {frequency.size}")
    if size > frequency.size:
        raise UsageError(f"vocab.size={size}: the target has {frequency.size} tokens in all")
    if size < kept.size:
        raise UsageError(
            f"vocab.size={size}: the {kept.size} end and think tokens alone do not fit; raise it"
        )
    order = np.argsort(-frequency, kind="stable")  # [V]: by count, ties by id
    others = order[~np.isin(order, kept)][: size - kept.size]
    return tuple(np.sort(np.concatenate([kept, others])).tolist())


def count_tokens(samples: Iterable[Sample], vocabulary: int, where: Path) -> Counts:
    """Count the loss tokens of samples (of the folder `where`).

    Raises `UsageError` for an id beyond the vocabulary.
    """
    import numpy as np

    by_category: dict[str, Any] = {}
    for sample in samples:
        name = sample.category or "none"
        counted = by_category.setdefault(name, np.zeros(vocabulary, dtype=np.int64))  # [V]
        ids = np.asarray(sample.answer_ids, dtype=np.int64)
        if ids.size and int(ids.max()) >= vocabulary:
            raise UsageError(
                f"{where}: sample {sample.id!r} holds token {int(ids.max())}, and the target has "
                f"{vocabulary}; are the samples another target's?"
            )
        counted += np.bincount(ids, minlength=vocabulary)
    whole = sum(by_category.values(), start=np.zeros(vocabulary, dtype=np.int64))
    return Counts(all=whole, by_category=dict(sorted(by_category.items())))


def run(plan: TrainingPlan, work: Path) -> Gate:
    """Choose the draft vocabulary and say what it covers.

    Raises `GateFailed` where it covers too little or the samples did not pass their gate, and
    `UsageError` where the folder holds what was made from something else.
    """
    source = stage_folder(work, "generate")
    gate, samples = unchanged_samples(work)
    target = target_folder(plan)
    if gate.inputs.get("target") != target_digest(target_identity(target)):
        raise UsageError(f"{source}: its samples are not of the target {target}; see target.path")
    text = read_text(target, trust_remote_code=plan.engine.trust_remote_code)
    vocabulary = vocab_size(target)
    own = drafter_vocabulary(plan, vocabulary)
    counts = count_tokens(samples, vocabulary, source)  # also where nothing is left to do: it reads
    made = MadeFrom(
        size=plan.vocab.size,
        finetune=None if plan.drafter.finetune is None else digest_of(own),
        samples=gate.output,
        target_vocab_size=vocabulary,
    )
    folder = stage_folder(work, STAGE)
    with locked(folder):
        before = read_gate(folder)
        _check_same(folder, made)
        if before is not None and before.passed and _limit(before) == plan.vocab.least_coverage:
            note(f"vocab: nothing to do, {folder} is finished and passed its gate")
            return before
        return _write(folder, plan, _Job(text=text, counts=counts, own=own, made=made))


class _Job(msgspec.Struct, frozen=True, kw_only=True):
    text: TargetText
    counts: Counts
    own: tuple[int, ...] | None
    made: MadeFrom


def _write(folder: Path, plan: TrainingPlan, job: _Job) -> Gate:
    vocabulary = job.made.target_vocab_size
    if plan.drafter.finetune is not None:
        kept, source = job.own, "the drafter's own"
    elif plan.vocab.size is None:
        kept, source = None, "the target's"
    else:
        always = always_kept(job.text, job.counts.all.tolist(), vocabulary)
        kept = choose_vocabulary(job.counts.all, plan.vocab.size, always)
        source = "the most frequent"
    if kept is not None and len(kept) == vocabulary:
        kept = None
    coverage = covered(job, kept, source)
    path = folder / VOCAB_FILE
    if kept is None:
        path.unlink(missing_ok=True)
        note(f"vocab: the draft vocabulary is the target's whole one of {vocabulary:,}: no file")
    else:
        write_whole(path, vocabulary_file(kept, vocabulary))
    write_record(folder / COVERAGE, coverage)
    gate = Gate.of(
        STAGE,
        _checks(coverage, job, kept, plan.vocab.least_coverage),
        output=digest_of(kept),
        inputs={"generate": job.made.samples},
    )
    write_gate(folder, gate)
    _tell(coverage)
    return require(gate, folder)


def always_kept(text: TargetText, counts: Sequence[int], vocabulary: int) -> list[int]:
    """The target's end tokens, and those of its think tokens that occur."""
    thinking = [i for i in text.think_ids if i is not None and i < vocabulary and counts[i]]
    return sorted({*(i for i in text.end_ids if i < vocabulary), *thinking})


def covered(job: _Job, kept: Sequence[int] | None, source: str) -> Coverage:
    """What a vocabulary (None: the whole one) covers of the loss tokens."""
    import numpy as np

    counts = job.counts.all
    inside = np.ones(counts.size, dtype=bool)  # [V]
    if kept is not None:
        inside[:] = False
        inside[list(kept)] = True
    outside = np.where(inside, 0, counts)
    order = np.argsort(-outside, kind="stable")[:SHOWN]
    return Coverage(
        made_from=job.made,
        draft_vocab_size=int(inside.sum()),
        source=source,
        tokens=int(counts.sum()),
        distinct=int((counts > 0).sum()),
        coverage=_share(counts, inside),
        categories={name: _share(one, inside) for name, one in job.counts.by_category.items()},
        outside=tuple(
            (int(i), job.text.decode([int(i)]), int(outside[i])) for i in order if outside[i]
        ),
    )


def _share(counts: NDArray[Any], inside: NDArray[Any]) -> float | None:
    whole = int(counts.sum())
    return int(counts[inside].sum()) / whole if whole else None


def _checks(
    coverage: Coverage, job: _Job, kept: Sequence[int] | None, least: float
) -> tuple[Check, ...]:
    ends = [i for i in sorted(job.text.end_ids) if job.counts.all[i : i + 1].any()]
    missing = [i for i in ends if kept is not None and i not in set(kept)]
    return (
        Check(
            name="coverage",
            passed=coverage.coverage is not None and coverage.coverage >= least,
            value=coverage.coverage,
            limit=least,
            relation=">=",
            reason=f"of {coverage.tokens:,} loss tokens" if coverage.tokens else "no loss tokens",
            advice="raise vocab.size, or allow less with vocab.least_coverage",
        ),
        Check(
            name="end tokens left out",
            passed=not missing,
            value=len(missing),
            limit=0,
            relation="==",
            reason=", ".join(map(str, missing)),
            advice="the drafter can never draft an answer's end: train one from scratch",
        ),
    )


def vocabulary_file(kept: Sequence[int], vocabulary: int) -> bytes:
    """The safetensors file of a draft vocabulary: d2t int64 offsets [D] and t2d bool [V]."""
    import numpy as np
    from safetensors.numpy import save

    ids = np.asarray(kept, dtype=np.int64)  # [D], ascending
    t2d = np.zeros(vocabulary, dtype=bool)  # [V]
    t2d[ids] = True
    return save({"d2t": ids - np.arange(ids.size, dtype=np.int64), "t2d": t2d})


def kept_ids(offsets: NDArray[Any], vocabulary: int) -> NDArray[Any] | None:
    """The target ids int64 [D] of a d2t table; None where it is no table of ascending ids."""
    import numpy as np

    ids = offsets + np.arange(offsets.size)
    ascending = bool(ids.size) and bool((np.diff(ids) > 0).all())
    return ids if ascending and 0 <= ids[0] <= ids[-1] < vocabulary else None


def drafter_vocabulary(plan: TrainingPlan, vocabulary: int) -> tuple[int, ...] | None:
    """The target ids that the drafter to finetune drafts; None: all of them, or there is none.

    Raises `UsageError` where its table is no table of offsets, or the plan wants another size.
    """
    import numpy as np
    from safetensors import safe_open

    if plan.drafter.finetune is None:
        return None
    folder = Path(plan.drafter.finetune).expanduser().resolve()
    headers = read_headers(folder)
    name = next((n for n in headers if n.split(".")[-1] == "d2t"), None)
    kept: tuple[int, ...] | None = None
    if name is not None:
        with safe_open(headers[name].file, framework="np") as file:
            offsets = file.get_tensor(name).astype(np.int64)  # [D]
        ids = kept_ids(offsets, vocabulary)
        if ids is None:
            raise UsageError(
                f"{folder}: d2t is no table of offsets into {vocabulary} tokens (draft id i is "
                "target id i + d2t[i], ascending); see `python -m drafters validate`"
            )
        kept = tuple(ids.tolist())
    size = vocabulary if kept is None else len(kept)
    if plan.vocab.size not in (None, size):
        raise UsageError(
            f"vocab.size={plan.vocab.size}: the drafter to finetune drafts {size} tokens, and "
            "keeps them; leave vocab.size out"
        )
    return kept


def digest_of(kept: Sequence[int] | None) -> str:
    """Of a draft vocabulary's target ids; None: the target's whole one."""
    said = "full" if kept is None else ",".join(map(str, kept))
    return hashlib.sha256(said.encode()).hexdigest()


def _limit(gate: Gate) -> float | int | str | None:
    return next((check.limit for check in gate.checks if check.name == "coverage"), None)


def _check_same(folder: Path, made: MadeFrom) -> None:
    """Raise `UsageError` where the folder holds what was made from something else."""
    before = read_record(folder / COVERAGE, Coverage, "remove that folder")
    if before is None:
        return
    old, new = (_words(msgspec.to_builtins(one)) for one in (before.made_from, made))
    refuse_changed(folder, list(differences(old, new)))


def _words(made: Mapping[str, Any]) -> dict[str, Any]:
    """Under names that a reader knows; digests short."""
    names = {"size": "vocab.size", "finetune": "the d2t of drafter.finetune"}
    names |= {"samples": "the samples", "target_vocab_size": "the target's vocab_size"}
    return {
        names[key]: value[:12] if isinstance(value, str) else value for key, value in made.items()
    }


def _tell(coverage: Coverage) -> None:
    share = "none" if coverage.coverage is None else f"{coverage.coverage:.2%}"
    note(
        f"vocab: {coverage.draft_vocab_size:,} tokens ({coverage.source}) cover {share} of "
        f"{coverage.tokens:,} loss tokens, {coverage.distinct:,} of them distinct"
    )
    for name, one in coverage.categories.items():
        if one is not None and one < 1:
            note(f"vocab:   {name} {one:.2%}")
