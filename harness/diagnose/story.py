"""The story of a diagnosis: experiments in the order that decides soonest, then the verdict.

Each experiment's evidence is kept as soon as it is there, so that a diagnosis that was interrupted
goes on behind it. One that fails costs itself and a line. The rest is left out once the verdict is
certain.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from drafters.spec import DrafterError
from engines.base import EngineError, EngineFailed
from engines.secret import hide, in_args, in_variables
from harness.diagnose.catalogue import EXPERIMENTS
from harness.diagnose.causes import NONE, UNKNOWN
from harness.diagnose.experiments.work import Options, Skipped, Work
from harness.diagnose.folders import (
    MARKDOWN,
    PAGE,
    DiagnosisFolder,
    Identity,
    prompts_digest,
)
from harness.diagnose.records import Diagnosis, Dossier, Subject
from harness.errors import HarnessError, UsageError, one_line
from harness.measure.logprobs import NoLogprobs
from harness.plan.strict import nearest
from harness.progress import Progress
from harness.resume import checkpoint_digest
from harness.run import NOT_WRITABLE

if TYPE_CHECKING:
    from engines.reference.engine import Engine

KEPT = "what was found is kept; the same command goes on behind it"
NEEDED = ("expected", "observed")
"""Before these nothing is certain: without them nobody knows whether anything is lost."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a diagnosis ended. `failure`: why the engine did not start, or died."""

    folder: Path
    dossier: Dossier
    diagnosis: Diagnosis
    failure: EngineFailed | None = None

    @property
    def void(self) -> str | None:
        """Why nothing can be said; None where something can."""
        why = void_reason(self.dossier)
        if why is None and self.diagnosis.cause == UNKNOWN and not self.found:
            return self.diagnosis.verdict
        return why

    @property
    def found(self) -> bool:
        """Whether acceptance is lost, the cause named or its place."""
        told = self.diagnosis
        return told.collapse or told.stage is not None or told.cause not in (NONE, UNKNOWN)

    @property
    def exit_code(self) -> int:
        """0 nothing wrong, 1 a collapse, 3 the engine failed, 4 nothing can be said."""
        if self.found:
            return 1
        if self.failure is not None:
            return 3
        return 4 if self.void is not None else 0


def run(
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    folder: Path,
    *,
    progress: Progress,
    options: Options | None = None,
    target: Engine | None = None,
    pages: bool = True,
) -> Outcome:
    """Make every experiment that the verdict needs, and draw it; all of it lies in `folder`.

    `prompts` are token ids. `target`: the reference engine with the subject's target, where it was
    loaded before. `pages`: write the report too. Raises `UsageError` where the folder is of another
    subject. An engine that does not start is told in `Dossier.skipped`, never raised.
    """
    options = options or Options()
    where = DiagnosisFolder(folder.absolute())
    where.path.mkdir(parents=True, exist_ok=True)
    with where.claimed():
        where.begin(identity_of(subject, prompts, options))
        with ExitStack() as stack:
            work = Work(subject, prompts, where, progress, options, stack, target)
            with telling_what_is_kept(progress):  # at once, before the engine is waited for
                for name in EXPERIMENTS:
                    _experiment(work, name, options, progress)
            work.end()
            dossier, failure = work.dossier, work.failure
        progress.stage("concluding")
        diagnosis = _conclude(dossier)
        told = msgspec.structs.replace(dossier, subject=recorded(subject))
        written = _pages(told, diagnosis, progress) if pages else {}
        where.finish(told, diagnosis, written, None if failure is None else one_line(str(failure)))
    return Outcome(folder=where.path, dossier=dossier, diagnosis=diagnosis, failure=failure)


@contextmanager
def telling_what_is_kept(progress: Progress) -> Iterator[None]:
    """An interruption loses nothing, which is said once."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        if KEPT not in getattr(stopped, "__notes__", ()):
            progress.say(KEPT)
            stopped.add_note(KEPT)
        raise


def _experiment(work: Work, name: str, options: Options, progress: Progress) -> None:
    """Make it, or take what was found before, or say why it is left out."""
    before = work.folder.found(name, EXPERIMENTS[name].record)
    if before is not None:
        work.take(name, *before)
        progress.say(f"{name}: found before")
        return
    why = _unwanted(name, options)
    if why is not None:
        work.leave_out(name, why)
        return
    if not options.thorough and _decided(work.dossier):
        work.leave_out(name, "not needed: the verdict is certain without it", needless=True)
        return
    begun = time.perf_counter()
    progress.stage(f"{name}: {EXPERIMENTS[name].looks_at}")
    try:
        found = work.make(name)
    except (Skipped, EngineError, HarnessError, DrafterError) as reason:
        why = one_line(str(reason))
    except NoLogprobs as reason:
        why = one_line(f"the server tells no log-probabilities: {reason}")
    except Exception as error:
        if isinstance(error, OSError) and error.errno in NOT_WRITABLE:
            raise  # a full disk ends the diagnosis; what is kept stays
        why = one_line(f"it failed ({type(error).__name__}: {error})")
    if why is not None:
        # Told, and not kept: when the diagnosis is gone on with it is tried again.
        work.leave_out(name, why)
        progress.say(f"{name}: left out: {why}")
        return
    took = time.perf_counter() - begun
    if work.whole(name):
        work.folder.keep(name, found, took)
    work.take(name, found, took)
    progress.say(f"{name}: done in {took:.1f} s")


def _unwanted(name: str, options: Options) -> str | None:
    if options.only and name not in options.only:
        return "left out (--only)"
    if name in options.skip:
        return "left out (--skip)"
    return None


def _decided(dossier: Dossier) -> bool:
    """Whether the verdict is certain, and it is known how much was lost."""
    from harness.diagnose.verdict import decided

    known = all(getattr(dossier, n) is not None or n in dossier.skipped for n in NEEDED)
    return known and decided(dossier)


def void_reason(dossier: Dossier) -> str | None:
    """Why nothing can be said; None where something can."""
    from harness.diagnose.rules.measures import FEWEST_STEPS

    counted = [
        found.acceptance.counts.drafts
        for found in (dossier.observed, dossier.expected)
        if found is not None
    ]
    if not counted:
        why = dossier.skipped.get("observed") or dossier.skipped.get("expected") or "not asked for"
        return f"neither what is expected nor what is accepted could be had: {why}"
    if max(counted) < FEWEST_STEPS:
        return (
            f"only {max(counted)} verify steps were seen, {FEWEST_STEPS} are the least; ask more "
            "prompts (--prompts), or such as are answered at length"
        )
    return None


def identity_of(subject: Subject, prompts: Sequence[Sequence[int]], options: Options) -> Identity:
    """What the evidence depends on."""
    folders = {"target": subject.target, "drafter": subject.drafter}
    return Identity(
        subject=recorded(subject),
        digests={name: checkpoint_digest(Path(path)) for name, path in folders.items()},
        prompts=prompts_digest(prompts),
        settings={
            "max_tokens": str(options.max_tokens),
            "concurrency": str(options.concurrency),
            "form": options.form,
        },
    )


def recorded(subject: Subject) -> Subject:
    """A subject as it is written down: without the keys and passwords that it is served with."""
    return msgspec.structs.replace(
        subject,
        extra_args=tuple(in_args(subject.extra_args, hide)),
        extra_env=in_variables(subject.extra_env, hide),
    )


def _conclude(dossier: Dossier) -> Diagnosis:
    from harness.diagnose.verdict import conclude

    return conclude(dossier)


def _pages(dossier: Dossier, diagnosis: Diagnosis, progress: Progress) -> dict[str, str]:
    """The report in both forms; a page that fails must not cost a diagnosis that was made."""
    from harness.diagnose.page.markdown import to_markdown
    from harness.diagnose.page.page import render_page

    pages: dict[str, str] = {}
    progress.stage("drawing the page")
    for name, render in ((MARKDOWN, to_markdown), (PAGE, render_page)):
        try:
            pages[name] = render(dossier, diagnosis)
        except Exception as error:
            said = one_line(f"{type(error).__name__}: {error}")
            progress.say(f"{name} could not be written ({said}); all is in dossier.json")
    return pages


def with_mending(ended: Outcome, lines: Sequence[str], progress: Progress) -> Outcome:
    """The same diagnosis, which now says what `--fix` did; in its folder too."""
    from harness.diagnose.verdict import WITH_FIX

    still = tuple(n for n in ended.diagnosis.next_experiments if n != WITH_FIX)
    diagnosis = msgspec.structs.replace(
        ended.diagnosis, mending=tuple(lines), next_experiments=still
    )
    told = msgspec.structs.replace(ended.dossier, subject=recorded(ended.dossier.subject))
    DiagnosisFolder(ended.folder).tell(diagnosis, _pages(told, diagnosis, progress))
    return msgspec.structs.replace(ended, diagnosis=diagnosis)


def check_names(names: Collection[str], option: str) -> None:
    """Raise `UsageError` for an experiment that there is not."""
    for name in names:
        if name not in EXPERIMENTS:
            near = nearest(name, list(EXPERIMENTS))
            hint = f"did you mean '{near}'?" if near else f"there are {', '.join(EXPERIMENTS)}"
            raise UsageError(f"{option} {name}: no such experiment; {hint}")
