"""The diagnosis held against faults that were planted: case by case, and what was called what.

The faults lie in the checkout's tests (`tests/faults`), not in the installed package. Each case is
planted, diagnosed as anyone's serving would be, judged, and kept; what was judged by the same code
is not done again, and where only the rules changed a kept case is judged anew by them alone. Where
what is called is in our power the case is mended too, as `--fix` does, and what is accepted then
is held against the same case without its fault; that is kept by itself.
"""

from __future__ import annotations

import importlib
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from drafters.spec import DrafterError
from engines.base import EngineError
from harness.diagnose.causes import NONE, UNKNOWN
from harness.diagnose.digests import code_digest, mending_digest
from harness.diagnose.experiments.work import Options
from harness.diagnose.judging import details, judged, mending_line, verdict_line, with_fix
from harness.diagnose.matrix import CaseResult, Matrix, matrix_of, to_markdown
from harness.diagnose.planted import CHECKOUT, Case, Wanted, cases_of
from harness.diagnose.records import Diagnosis, Dossier, Subject
from harness.diagnose.restored import Fixed, Restored, promised, restored, served
from harness.errors import HarnessError, one_line
from harness.measure.metrics import acceptance_rate
from harness.measure.store import locked, to_json, write_atomic

if TYPE_CHECKING:
    from engines.reference.engine import Engine
    from harness.diagnose.mend import Mended
    from harness.progress import Progress

DOCS = CHECKOUT / "docs"
CASES, DOSSIERS, WORK = "cases", "dossiers", "work"
LONGEST = 1536
"""Positions of the reference's target that all cases share."""
SLOTS = 8


def run(wanted: Wanted, progress: Progress) -> Matrix:
    """Diagnose every case that is asked for and not yet done; the matrix of all that are done.

    Raises `UsageError` where there are no faults to plant, or none of that name.
    """
    cases = cases_of(wanted)
    for name in (CASES, DOSSIERS, WORK):
        (wanted.out / name).mkdir(parents=True, exist_ok=True)
    begun, left = time.monotonic(), 0
    results: list[CaseResult] = []
    making = Making(wanted, progress)
    for number, case in enumerate(cases, 1):
        kept = _kept(wanted.out, case, code_digest(case))
        if kept is None or _unmended(kept):
            if _over(begun, wanted.limit_minutes):
                left += 1
            else:
                progress.say(f"{number}/{len(cases)} {case.name}")
                kept = making.made(case, kept)
        if kept is not None:
            results.append(kept)
    if left:
        progress.say(f"time is up with {left} of {len(cases)} cases left; the same command goes on")
    matrix = _matrix(wanted, results, len(cases))
    _write(wanted.out / "matrix.json", matrix)
    write_atomic(wanted.out / "matrix.md", to_markdown(matrix).encode())
    if wanted.write:
        _write_docs(_whole(wanted))
    return matrix


def _whole(wanted: Wanted) -> Matrix:
    """Of every case that is kept, whatever was asked for this time."""
    every = cases_of(msgspec.structs.replace(wanted, only=("*",)))
    kept = [_kept(wanted.out, case, code_digest(case)) for case in every]
    return _matrix(wanted, [k for k in kept if k is not None], len(every))


def _matrix(wanted: Wanted, results: Sequence[CaseResult], planned: int) -> Matrix:
    return matrix_of(wanted.engine, results, planned=planned, first_seed=wanted.first_seed)


class Targets:
    """The reference's own targets, loaded once for all cases: the last one that was asked for."""

    def __init__(self) -> None:
        self._loaded: dict[str, Engine] = {}

    def engine(self, target: str) -> Engine:
        """An idle engine in float32 with this target and no drafter."""
        if target not in self._loaded:
            from engines.reference.config import read_config
            from engines.reference.loading import load_engine

            self._loaded.clear()
            length = min(LONGEST, read_config(Path(target)).max_positions)
            self._loaded[target] = load_engine(
                Path(target), dtype="float32", max_len=length, slots=SLOTS, threads=1
            )
        return self._loaded[target]


class Making:
    """Makes cases: each is planted in a place of its own, which is removed at the end."""

    def __init__(self, wanted: Wanted, progress: Progress) -> None:
        self.wanted, self.progress, self.targets = wanted, progress, Targets()

    def made(self, case: Case, kept: CaseResult | None) -> CaseResult | None:
        """What is not kept of a case yet; one that was interrupted goes on where it was.

        What another process is at is left to it: what is kept of it so far.
        """
        code = code_digest(case)
        # evidence of other code is no evidence
        evidence = code.split("-")[0]
        work = (self.wanted.out / WORK / f"{case.name}-{evidence}").absolute()
        work.mkdir(exist_ok=True)
        handle = os.open(work, os.O_RDONLY)
        try:
            if not locked(handle):
                self.progress.say(f"{case.name}: another process is at it; left to it")
                return kept
            return self._made_in(work, case, kept, code)
        finally:
            os.close(handle)

    def _made_in(self, work: Path, case: Case, kept: CaseResult | None, code: str) -> CaseResult:
        """What is missing of a case, in a folder that is ours."""
        find_pair = importlib.import_module("faults.pair").find_pair
        planted = case.plant(find_pair(case.pair), work / "planted", case.seed, case.severity)
        dossier = None if kept is None else self._dossier(case)
        if kept is None or dossier is None:
            kept, dossier = self._diagnosed(case, planted, work / "diagnosis", code)
            self._keep(kept)
            self.progress.say(f"{case.name}: {verdict_line(kept)}")
        if _unmended(kept):
            kept = self._mended(case, kept, dossier, planted, work)
            self._keep(kept)
            self.progress.say(f"{case.name}: {mending_line(kept)}")
        shutil.rmtree(work, ignore_errors=True)
        return kept

    def _keep(self, result: CaseResult) -> None:
        _write(self.wanted.out / CASES / f"{result.name}.json", result)

    def _dossier(self, case: Case) -> Dossier | None:
        found: Dossier | None = _read(self.wanted.out / DOSSIERS / f"{case.name}.json", Dossier)
        return found

    def _diagnosed(
        self, case: Case, planted: Any, folder: Path, code: str
    ) -> tuple[CaseResult, Dossier]:
        """Diagnose and judge a case.

        An engine or a checkpoint that does not serve is told in the result, and no cause is called.
        """
        from harness.diagnose.story import run

        begun = time.perf_counter()
        subject = subject_of(planted, self.wanted.engine)
        try:
            ended = run(
                subject,
                planted.prompts,
                folder,
                progress=self.progress,
                options=options_of(planted),
                target=self.targets.engine(subject.target),
                pages=False,
            )
            dossier, diagnosis = ended.dossier, ended.diagnosis
        except (EngineError, HarnessError, DrafterError) as error:
            dossier = Dossier(subject=subject, skipped={"all": one_line(str(error))})
            diagnosis = _nothing(one_line(str(error)))
        _write(self.wanted.out / DOSSIERS / f"{case.name}.json", dossier)
        took = time.perf_counter() - begun
        return judged(case, self.wanted.engine, dossier, diagnosis, code, took), dossier

    def _mended(
        self, case: Case, result: CaseResult, dossier: Dossier, planted: Any, work: Path
    ) -> CaseResult:
        """The result with what `--fix` did, from the evidence that was kept."""
        from harness.diagnose.mend import try_to_mend
        from harness.diagnose.story import Outcome
        from harness.diagnose.verdict import conclude

        begun, place = time.perf_counter(), work / "fix"
        shutil.rmtree(place, ignore_errors=True)  # one that was ended, its result not kept
        told = msgspec.structs.replace(dossier, subject=subject_of(planted, result.engine))
        ended = Outcome(folder=work / "diagnosis", dossier=told, diagnosis=conclude(told))
        done = try_to_mend(
            ended, planted.prompts, place, progress=self.progress, options=options_of(planted)
        )
        fixed = Fixed(
            code=mending_digest(),
            took_s=time.perf_counter() - begun,
            of=details(ended.diagnosis),
            before=_before(dossier),
        )
        if isinstance(done, str):
            fixed = msgspec.structs.replace(fixed, why_not=one_line(done))
            return with_fix(result, case, fixed)
        fixed = msgspec.structs.replace(
            fixed,
            changes=tuple(f"{c.cause}: {'; '.join(c.changes)}" for c in done.changes),
            why_not=done.why_not,
            left=done.left,
            held=self._held(planted, place / f"proof-{len(done.changes)}", case.kind),
        )
        return with_fix(result, case, fixed, _then(done) if case.kind == "compound" else None)

    def _held(self, planted: Any, proof: Path, kind: str) -> Restored | None:
        """What was accepted in the proof, beside the same case without its fault."""
        if kind != "fault":
            return None
        right = planted if planted.unharmed is None else planted.unharmed
        subject = subject_of(right, self.wanted.engine)
        engine = self.targets.engine(subject.target)
        expected = promised(subject, right.prompts, right.max_tokens, engine)
        return restored(served(proof), expected, subject.k)


def options_of(planted: Any) -> Options:
    """How a planted case is asked."""
    return Options(
        max_tokens=planted.max_tokens,
        concurrency=planted.concurrency,
        form=planted.form,
        other_form=planted.other_form,
    )


def _unmended(result: CaseResult) -> bool:
    """Whether `--fix` is still to be tried: never was, or was made otherwise."""
    if not result.to_fix:
        return False
    if result.fixed is None:
        return result.then is None  # kept before what was changed was kept too
    return result.fixed.code != mending_digest()


def _then(done: Mended) -> str:
    """What is called of two faults once the first one is mended; "none" where nothing is left."""
    others = [change.cause for change in done.changes[1:]]
    return others[0] if others else done.left or NONE


def _before(dossier: Dossier) -> float | None:
    seen = dossier.observed
    return None if seen is None else acceptance_rate(seen.acceptance.counts)


def _nothing(why: str) -> Diagnosis:
    return Diagnosis(
        verdict=why, cause=UNKNOWN, stage=None, collapse=False, ranked=(), waterfall=()
    )


def subject_of(planted: Any, engine: str) -> Subject:
    """The planted case as what is diagnosed; the plugin goes the engine's own way."""
    args, env = list(planted.extra_args), dict(planted.extra_env)
    if planted.plugin is not None and engine == "reference":
        args += ["--plugin", planted.plugin]
    elif planted.plugin is not None:
        env["SPEC_HARNESS_ENGINE_PLUGIN"] = planted.plugin
    return Subject(
        engine=engine,
        target=str(planted.target),
        drafter=str(planted.drafter),
        k=planted.k,
        dtype=planted.dtype,
        max_model_len=planted.max_model_len,
        temperature=planted.temperature,
        extra_args=tuple(args),
        extra_env=env,
        threads=1 if engine == "reference" else None,
        trained_target=None if planted.trained_target is None else str(planted.trained_target),
        trained_on=None if planted.trained_on is None else str(planted.trained_on),
    )


def _kept(out: Path, case: Case, code: str) -> CaseResult | None:
    """A case that was judged before; by today's rules, if only these have changed since."""
    found: CaseResult | None = _read(out / CASES / f"{case.name}.json", CaseResult)
    if found is None or found.code.split("-")[0] != code.split("-")[0]:
        return None
    found = msgspec.structs.replace(found, mends=case.mends, mendable=case.mendable)
    if found.code == code:
        return found
    dossier = _read(out / DOSSIERS / f"{case.name}.json", Dossier)
    if dossier is None:
        return None
    from harness.diagnose.verdict import conclude

    told = conclude(dossier)
    result = judged(case, found.engine, dossier, told, code, found.took_s)
    fixed = found.fixed
    if told.cause == found.called and (fixed is None or fixed.of == details(told)):
        result = with_fix(result, case, fixed, found.then)  # else another one was mended
    _write(out / CASES / f"{case.name}.json", result)
    return result


def _read(path: Path, kind: Any) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None


def _over(begun: float, limit_minutes: float | None) -> bool:
    return limit_minutes is not None and time.monotonic() - begun > 60 * limit_minutes


def _write(path: Path, record: msgspec.Struct) -> None:
    write_atomic(path, to_json(record))


def _write_docs(matrix: Matrix) -> None:
    """Keep the matrix of this engine and these seeds beside the others in docs/."""
    suffix = "" if matrix.engine == "reference" else f"-{matrix.engine}"
    suffix += f"-from-seed-{matrix.first_seed}" if matrix.first_seed else ""
    write_atomic(DOCS / f"diagnosis-matrix{suffix}.md", to_markdown(matrix).encode())
    _write(DOCS / f"diagnosis-matrix{suffix}.json", matrix)
