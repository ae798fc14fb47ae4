"""The diagnosis held against faults that were planted: case by case, and what was called what.

The faults lie in the checkout's tests (`tests/faults`), not in the installed package. Each case is
planted, diagnosed as anyone's serving would be, judged, and kept; what was judged by the same code
is not done again, and where only the rules changed a kept case is judged anew by them alone.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from drafters.spec import DrafterError
from engines.base import EngineError
from harness.diagnose.causes import CAUSES, NONE, UNKNOWN
from harness.diagnose.experiments.work import Options
from harness.diagnose.matrix import CaseResult, Matrix, matrix_of, to_markdown
from harness.diagnose.planted import CHECKOUT, Case, Wanted, cases_of
from harness.diagnose.records import Diagnosis, Dossier, Subject
from harness.errors import HarnessError, one_line
from harness.measure.store import to_json, write_atomic

if TYPE_CHECKING:
    from engines.reference.engine import Engine
    from harness.diagnose.story import Outcome
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
    code, begun = code_digest(), time.monotonic()
    results: list[CaseResult] = []
    engines = Targets()
    for number, case in enumerate(cases, 1):
        kept = _kept(wanted.out, case, code)
        if kept is None:
            if _over(begun, wanted.limit_minutes):
                left = len(cases) - number + 1
                progress.say(
                    f"time is up with {left} of {len(cases)} cases left; the same command goes on"
                )
                break
            progress.say(f"{number}/{len(cases)} {case.name}")
            kept = _diagnosed(wanted, case, code, engines, progress)
            _write(wanted.out / CASES / f"{case.name}.json", kept)
            progress.say(f"{case.name}: {verdict_line(kept)}")
        results.append(kept)
    matrix = matrix_of(wanted.engine, results, planned=len(cases))
    _write(wanted.out / "matrix.json", matrix)
    text = to_markdown(matrix)
    write_atomic(wanted.out / "matrix.md", text.encode())
    if wanted.write:
        whole = _whole(wanted, code)
        _write_docs(wanted.engine, whole, to_markdown(whole))
    return matrix


def _whole(wanted: Wanted, code: str) -> Matrix:
    """Of every case that is kept, whatever was asked for this time."""
    every = cases_of(msgspec.structs.replace(wanted, only=("*",)))
    kept = [_kept(wanted.out, case, code) for case in every]
    return matrix_of(wanted.engine, [k for k in kept if k is not None], planned=len(every))


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


def _diagnosed(
    wanted: Wanted, case: Case, code: str, engines: Targets, progress: Progress
) -> CaseResult:
    """Plant, diagnose and judge one case; one that was interrupted goes on where it was.

    What it was planted in is removed at the end. An engine or a checkpoint that does not serve is
    told in the result, and no cause is called.
    """
    from harness.diagnose.story import run

    begun = time.perf_counter()
    # evidence of other code is no evidence
    work = (wanted.out / WORK / f"{case.name}-{code.split('-')[0]}").absolute()
    find_pair = importlib.import_module("faults.pair").find_pair
    planted = case.plant(find_pair(case.pair), work / "planted", case.seed, case.severity)
    subject = subject_of(planted, wanted.engine)
    options = Options(
        max_tokens=planted.max_tokens,
        concurrency=planted.concurrency,
        form=planted.form,
        other_form=planted.other_form,
    )
    try:
        ended = run(
            subject,
            planted.prompts,
            work / "diagnosis",
            progress=progress,
            options=options,
            target=engines.engine(subject.target),
            pages=False,
        )
        dossier, diagnosis = ended.dossier, ended.diagnosis
        then = _after_mending(case, ended, planted.prompts, work / "fix", progress, options)
    except (EngineError, HarnessError, DrafterError) as error:
        dossier = Dossier(subject=subject, skipped={"all": one_line(str(error))})
        diagnosis, then = _nothing(one_line(str(error))), None
    _write(wanted.out / DOSSIERS / f"{case.name}.json", dossier)
    shutil.rmtree(work, ignore_errors=True)
    took = time.perf_counter() - begun
    return judged(case, wanted.engine, dossier, diagnosis, code, took, then)


def _after_mending(
    case: Case,
    ended: Outcome,
    prompts: Sequence[Sequence[int]],
    place: Path,
    progress: Progress,
    options: Options,
) -> str | None:
    """Of two faults at once: what is called once `--fix` has mended the one that was called.

    "none" where nothing is left to call. None: the one that was called is not in our power.
    """
    from harness.diagnose.mend import try_to_mend

    called = ended.diagnosis.cause
    if case.kind != "compound" or called not in CAUSES or not CAUSES[called].fixable:
        return None
    mended = try_to_mend(ended, prompts, place, progress=progress, options=options)
    if isinstance(mended, str):
        progress.say(mended)
        return None
    others = [change.cause for change in mended.changes[1:]]
    return others[0] if others else mended.left or NONE


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


def judged(
    case: Case,
    engine: str,
    dossier: Dossier,
    diagnosis: Diagnosis,
    code: str,
    took_s: float,
    then: str | None = None,
) -> CaseResult:
    """Whether the right cause was called, and where it was ranked.

    `then`: of two faults at once, what was called once the first was mended.
    """
    ranked = tuple(each.cause for each in diagnosis.ranked if each.strength != "excluded")
    expected = dossier.expected.acceptance.length if dossier.expected is not None else None
    observed = dossier.observed.acceptance.length if dossier.observed is not None else None
    return CaseResult(
        name=case.name,
        kind=case.kind,
        what=case.what,
        engine=engine,
        seed=case.seed,
        severity=case.severity,
        cause=case.cause,
        right=case.right,
        called=diagnosis.cause,
        collapse=diagnosis.collapse,
        ranked=ranked[:5],
        first=diagnosis.cause in case.right,
        among_three=bool(set(ranked[:3]) & set(case.right)) or diagnosis.cause in case.right,
        expected=expected,
        observed=observed,
        experiments=tuple(sorted(dossier.took_s)),
        skipped=dossier.skipped,
        took_s=took_s,
        code=code,
        emulated=case.emulated,
        then=then,
        both=None if then is None else _both(case.parts, diagnosis.cause, then),
    )


def _both(parts: Sequence[Sequence[str]], first: str, then: str) -> bool:
    """Whether one name is of one fault, and the other of the other."""
    return any(first in one and then in other for one, other in itertools.permutations(parts, 2))


def _kept(out: Path, case: Case, code: str) -> CaseResult | None:
    """A case that was judged before; by today's rules, if only these have changed since."""
    found = _read(out / CASES / f"{case.name}.json", CaseResult)
    if found is None or found.code.split("-")[0] != code.split("-")[0]:
        return None
    if found.code == code:
        return found
    dossier = _read(out / DOSSIERS / f"{case.name}.json", Dossier)
    if dossier is None:
        return None
    from harness.diagnose.verdict import conclude

    told = conclude(dossier)
    then = found.then if told.cause == found.called else None  # else another one was mended
    result = judged(case, found.engine, dossier, told, code, found.took_s, then)
    _write(out / CASES / f"{case.name}.json", result)
    return result


def _read(path: Path, kind: Any) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None


def code_digest() -> str:
    """`experiments-rules`: what finds the evidence and plants, and what judges it."""
    package, faults = Path(__file__).parent, CHECKOUT / "tests" / "faults"
    rules = [
        *sorted(package.glob("rules/**/*.py")),
        package / "verdict.py",
        package / "causes.toml",
    ]
    evidence = [
        *sorted(package.glob("experiments/*.py")),
        *(f for f in sorted(faults.rglob("*.py")) if f.name != "library.py"),  # which only lists
        package / "readings.py",
        package / "records.py",
    ]
    return "-".join(_digest(files) for files in (evidence, rules))


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes() if file.is_file() else b"")
    return digest.hexdigest()[:12]


def verdict_line(result: CaseResult) -> str:
    """One line of what was called, and whether that is right."""
    called = result.called if result.called != result.cause else "right"
    mark = "ok" if result.first else ("among three" if result.among_three else "WRONG")
    lengths = f"{_number(result.expected)} -> {_number(result.observed)}"
    return one_line(f"{mark}: {called} (acceptance length {lengths}, {result.took_s:.0f} s)")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _over(begun: float, limit_minutes: float | None) -> bool:
    return limit_minutes is not None and time.monotonic() - begun > 60 * limit_minutes


def _write(path: Path, record: msgspec.Struct) -> None:
    write_atomic(path, to_json(record))


def _write_docs(engine: str, matrix: Matrix, text: str) -> None:
    """Keep the matrix of this engine beside those of others in docs/."""
    suffix = "" if engine == "reference" else f"-{engine}"
    write_atomic(DOCS / f"diagnosis-matrix{suffix}.md", text.encode())
    _write(DOCS / f"diagnosis-matrix{suffix}.json", matrix)
