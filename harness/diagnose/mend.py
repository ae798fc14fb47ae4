"""`--fix`: the corrected checkpoint or plan for a cause in our power, and the proof that it is one.

What is written is diagnosed again. Where that names another cause in our power, of two faults at
once, it is mended too.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from drafters.convert import convert
from drafters.engines import Engine
from drafters.spec import DrafterError
from engines.base import EngineError
from harness.diagnose.causes import CAUSES, NONE, UNKNOWN
from harness.diagnose.experiments.work import Options
from harness.diagnose.folders import HOLDER, DiagnosisFolder
from harness.diagnose.records import Diagnosis, Dossier, Ranked, Subject
from harness.diagnose.restored import WITHIN
from harness.diagnose.story import Outcome, identity_of, run
from harness.errors import HarnessError, UsageError, one_line
from harness.measure.metrics import acceptance_rate
from harness.measure.store import read_json, to_json, write_atomic
from harness.plan.recorded import recorded_set
from harness.progress import Progress

if TYPE_CHECKING:
    from harness.diagnose.experiments.known import Knowledge

MOST = 3
"""Faults that are mended one after another."""
DRAFTER, RECORD, SETS = "drafter", "mended.json", "sets.txt"
BEGUN = "begun.json"
"""Names the diagnosis that is being mended, as long as it is."""
_METHOD = ("--speculative-config.method", "-sc.method", "--speculative-algorithm")


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One cause and what was changed for it. `sets`: items of `--set`."""

    cause: str
    changes: tuple[str, ...]
    sets: tuple[str, ...] = ()


class Mended(msgspec.Struct, frozen=True, kw_only=True):
    """What `--fix` did. Rates are accepted of drafted tokens; `proven`: see `WITHIN`.

    `drafter`: the corrected checkpoint, None where the plan alone is. `why_not`: what could not be
    mended, and why. `left`: the cause that is still called.
    """

    changes: tuple[Change, ...]
    drafter: str | None
    before: float | None
    expected: float | None
    after: float | None
    proven: bool
    left: str | None = None
    why_not: str | None = None


def mend(
    found: Outcome,
    prompts: Sequence[Sequence[int]],
    out: Path,
    *,
    progress: Progress,
    options: Options,
) -> Mended:
    """Mend what the diagnosis names, prove it, and write both into the new folder `out`.

    What an interrupted mending of the same diagnosis has proven is gone on with. Raises
    `UsageError` where `out` is in use, or nothing that is named is in our power.
    """
    check_new(out)
    out, partial = out.absolute(), _partial_of(out)
    partial.mkdir(parents=True, exist_ok=True)
    place = DiagnosisFolder(partial)
    with place.claimed():
        try:
            _go_on(partial, found.folder)
            mended = _mend(found, prompts, partial, progress, options)
            told = mended.drafter and str(out.resolve() / DRAFTER)
            mended = msgspec.structs.replace(mended, drafter=told)
            write_atomic(partial / RECORD, to_json(mended))
            (partial / BEGUN).unlink()
        except Exception:
            shutil.rmtree(partial, ignore_errors=True)  # an interruption keeps it
            raise
    if out.exists():
        out.rmdir()
    os.replace(partial, out)
    return mended


def begun(out: Path) -> Path | None:
    """The diagnosis that an interrupted `--fix out` was of; None where there is none.

    Raises `UsageError` where another process is writing it.
    """
    partial = _partial_of(out)
    if not partial.is_dir():
        return None
    by = DiagnosisFolder(partial).held_by()
    if by is not None:
        raise UsageError(f"--fix {out}: {by} is writing it; wait for its end")
    return _begun_in(partial)


def discard(out: Path) -> None:
    """Remove what an interrupted `--fix out` left, where nothing is left to mend."""
    partial = _partial_of(out)
    if partial.is_dir() and DiagnosisFolder(partial).held_by() is None:
        shutil.rmtree(partial, ignore_errors=True)


def _partial_of(out: Path) -> Path:
    """Where everything is written until it is whole; the lock on it tells who is alive."""
    return out.absolute().parent / f".{out.absolute().name}.partial"


def _begun_in(partial: Path) -> Path | None:
    try:
        return Path(read_json(partial / BEGUN, str))
    except UsageError:
        return None


def _go_on(partial: Path, diagnosis: Path) -> None:
    """Keep what an interrupted mending of this diagnosis left there, and nothing else's."""
    diagnosis = diagnosis.absolute()
    if _begun_in(partial) != diagnosis:
        for entry in partial.iterdir():
            if entry.name == HOLDER:
                continue
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    write_atomic(partial / BEGUN, to_json(str(diagnosis)))


def check_new(out: Path) -> None:
    """Raise `UsageError` where something is in the folder that `--fix` names, or it is a link."""
    if out.is_symlink():
        raise UsageError(f"--fix {out}: is a link; name a new folder")
    partial = _partial_of(out)
    if partial.is_symlink() or (partial.exists() and not partial.is_dir()):
        raise UsageError(f"--fix {out}: {partial} is in its way; remove it, or name another folder")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"--fix {out}: exists already; name a new folder")


def check_apart(out: Path, subject: Subject) -> None:
    """Raise `UsageError` where `--fix` would write into a checkpoint that is diagnosed."""
    place = out.resolve()
    for name, given in (("target", subject.target), ("drafter", subject.drafter)):
        folder = Path(given).resolve()
        if place == folder or folder in place.parents:
            raise UsageError(
                f"--fix {out}: lies in the {name}'s folder {folder}, which stays as it is; "
                "name a folder elsewhere"
            )


def try_to_mend(
    found: Outcome,
    prompts: Sequence[Sequence[int]],
    out: Path,
    *,
    progress: Progress,
    options: Options,
) -> Mended | str:
    """`mend`, or in one line why nothing could be: the diagnosis stands either way."""
    try:
        return mend(found, prompts, out, progress=progress, options=options)
    except (HarnessError, DrafterError, EngineError) as error:
        return str(error)
    except OSError as error:
        return f"--fix {out}: cannot be written: {(error.strerror or str(error)).lower()}"


def _mend(
    found: Outcome,
    prompts: Sequence[Sequence[int]],
    place: Path,
    progress: Progress,
    options: Options,
) -> Mended:
    subject, ended = found.dossier.subject, found
    changes: list[Change] = []
    why_not: str | None = None
    asked = [tuple(p) for p in prompts]
    for half_written in place.glob(f"{DRAFTER}*"):
        shutil.rmtree(half_written)
    for turn in range(1, MOST + 1):
        try:
            change, subject, asked, options = _once(
                ended, subject, asked, place / f"{DRAFTER}-{turn}", options
            )
        except (UsageError, DrafterError) as error:
            if not changes:
                raise
            why_not = str(error)
            break
        changes.append(change)
        progress.say(f"mended: {CAUSES[change.cause].title}: {'; '.join(change.changes)}")
        proof = _proof(place / f"proof-{turn}", subject, asked, options)
        ended = run(subject, asked, proof, progress=progress, options=options)
        if ended.diagnosis.cause == NONE or not ended.found:
            break
    drafter = _kept(place, subject, found.dossier.subject)
    _write_sets(place, changes)
    expected, after = _rates(ended.dossier)
    near = expected is not None and after is not None and abs(expected - after) <= WITHIN
    return Mended(
        changes=tuple(changes),
        drafter=None if drafter is None else str(drafter),
        before=_rates(found.dossier)[1],
        expected=expected,
        after=after,
        proven=near and not ended.found,
        left=ended.diagnosis.cause if ended.found else None,
        why_not=why_not,
    )


Asked = list[tuple[int, ...]]


def _proof(place: Path, subject: Subject, asked: Asked, options: Options) -> Path:
    """The folder of a proof; one that was begun with a checkpoint of other content is removed."""
    known = DiagnosisFolder(place).identity()
    if known is not None and known.differences(identity_of(subject, asked, options)):
        shutil.rmtree(place)
    return place


def _once(
    found: Outcome, subject: Subject, asked: Asked, place: Path, options: Options
) -> tuple[Change, Subject, Asked, Options]:
    """The first cause that can be mended; the subject, prompts and options that follow."""
    ranked = _fixable(found.diagnosis)
    if ranked.cause == "template":
        return _other_form(subject, asked, options)
    if ranked.cause == "wrong_method":
        return _right_method(subject, asked, options)
    changes = _written(found.dossier, ranked, subject, asked, place)
    change = Change(cause=ranked.cause, changes=changes)
    mended = msgspec.structs.replace(subject, drafter=str(place), run=None)
    return change, mended, asked, options


def _fixable(diagnosis: Diagnosis) -> Ranked:
    """The named cause, or the one ahead where none is: the proof tells whether it was it.

    Raises `UsageError` where it is not in our power.
    """
    named = [r for r in diagnosis.ranked if r.cause == diagnosis.cause]
    ahead = [r for r in diagnosis.ranked if r.score > 0 and diagnosis.cause == UNKNOWN]
    first = next(iter([*named, *ahead]), None)
    if first is None or diagnosis.cause == NONE:
        raise UsageError(f"--fix: no cause is named, so nothing is mended: {diagnosis.verdict}")
    if not CAUSES[first.cause].fixable:
        raise UsageError(
            f"--fix: {first.title}: no checkpoint and no plan mends that; {first.remedy}"
        )
    return first


def _written(
    dossier: Dossier, ranked: Ranked, subject: Subject, asked: Asked, place: Path
) -> tuple[str, ...]:
    """The corrected checkpoint in `place`; what was changed.

    Raises `UsageError`, `DrafterError`.
    """
    reading = ranked.details.get("reading")
    if ranked.details.get("channel") == "wanted" and reading is not None:
        from harness.diagnose.experiments.materialise import write_reading

        return write_reading(_known(subject, asked), reading, place)
    if subject.url is not None and ranked.cause.startswith("layers_"):
        return _converted(subject, place)
    raise UsageError(
        f"--fix: {ranked.title}: the checkpoint is right as it is, and {subject.engine} makes "
        f"something else of it; {ranked.remedy}"
    )


def _known(subject: Subject, asked: Asked) -> Knowledge:
    from harness.diagnose.experiments.known import know

    return know(subject, asked[:1], max_tokens=2)


def _converted(subject: Subject, place: Path) -> tuple[str, ...]:
    """A server that runs already was given the folder as it is: what it reads is written anew."""
    if subject.engine not in ("vllm", "sglang"):
        raise UsageError(f"--fix: name the engine that serves at {subject.url} with --engine")
    to: Engine = "vllm" if subject.engine == "vllm" else "sglang"
    told = convert(Path(subject.drafter), to, place, target_path=Path(subject.target))
    return (f"layer ids {told.source_ids} are written as {told.written_ids} for {to}", *told.notes)


def _other_form(
    subject: Subject, asked: Asked, options: Options
) -> tuple[Change, Subject, Asked, Options]:
    """The prompts in the form of the drafter's training: through the chat template, or raw."""
    if not options.other_form:
        raise UsageError(
            "--fix: the prompts have one form only (token ids, or no chat template): send them "
            "through the template of the drafter's training"
        )
    now = "raw" if options.form == "templated" else "templated"
    endpoint = "chat" if now == "templated" else "completions"
    change = Change(
        cause="template",
        changes=(f"prompts are sent {now}, where they were sent {options.form}",),
        sets=(f"workload.endpoint={endpoint}",),
    )
    turned = msgspec.structs.replace(options, form=now, other_form=tuple(asked), in_run=None)
    return change, subject, [tuple(p) for p in options.other_form], turned


def _right_method(
    subject: Subject, asked: Asked, options: Options
) -> tuple[Change, Subject, Asked, Options]:
    """Without the argument that asks for another algorithm, the harness asks for EAGLE-3."""
    kept: list[str] = []
    words = iter(subject.extra_args)
    for word in words:
        head, equals, _ = word.partition("=")
        if head.replace("_", "-") not in _METHOD:
            kept.append(word)
        elif not equals:
            next(words, None)
    if len(kept) == len(subject.extra_args):
        raise UsageError(
            "--fix: another algorithm than EAGLE-3 runs, and no argument asks for it: choose "
            "eagle3 (vLLM) or EAGLE3 (SGLang) where the server is started"
        )
    change = Change(
        cause="wrong_method",
        changes=("the argument that asks for another algorithm is left out",),
        sets=(recorded_set(f"engine.extra_args={msgspec.json.encode(kept).decode()}"),),
    )
    return change, msgspec.structs.replace(subject, extra_args=tuple(kept)), asked, options


def _kept(place: Path, mended: Subject, before: Subject) -> Path | None:
    """The last corrected checkpoint under its lasting name; those between are removed."""
    if mended.drafter == before.drafter:
        return None
    last = place / DRAFTER
    os.replace(mended.drafter, last)
    for other in place.glob(f"{DRAFTER}-*"):
        shutil.rmtree(other)
    return last


def _write_sets(place: Path, changes: Sequence[Change]) -> None:
    """The plan's changes as `--set` items, one a line, to be laid on the plan that was served."""
    items = [item for change in changes for item in change.sets]
    if items:
        write_atomic(place / SETS, ("\n".join(items) + "\n").encode())


def _rates(dossier: Dossier) -> tuple[float | None, float | None]:
    """Accepted of drafted tokens: expected, and observed."""
    expected, observed = dossier.expected, dossier.observed
    return (
        acceptance_rate(expected.acceptance.counts) if expected is not None else None,
        acceptance_rate(observed.acceptance.counts) if observed is not None else None,
    )


def told(mended: Mended) -> str:
    """The mending in lines, for people."""

    def percent(rate: float | None) -> str:
        return "unknown" if rate is None else f"{100 * rate:.1f}%"

    lines = [f"mended: {CAUSES[c.cause].title}: {'; '.join(c.changes)}" for c in mended.changes]
    lines += [f"  --set {item}" for change in mended.changes for item in change.sets]
    if mended.drafter is not None:
        lines.append(f"  --set drafter.path={mended.drafter}")
    proof = "proven" if mended.proven else "not proven"
    lines.append(
        f"{proof}: {percent(mended.before)} of the drafts were accepted, now "
        f"{percent(mended.after)}, where {percent(mended.expected)} is expected"
    )
    if mended.left is not None:
        lines.append(
            f"still called: {mended.left}" + (f": {mended.why_not}" if mended.why_not else "")
        )
    return "\n".join(one_line(line, 600) for line in lines)
