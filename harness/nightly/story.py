"""The story of a night: order, run, look for suspects, confirm them on fresh blocks, judge, tell.

Everything is written as it happens: `night.json` says what is done, a run's own folder keeps its
cells. A night that is killed at any moment goes on where it stopped.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from engines import catalog
from harness.errors import UsageError
from harness.load.interrupt import signal_of
from harness.nightly import folders, judge, measuring
from harness.nightly.accepted import read_accepted
from harness.nightly.changed import with_causes
from harness.nightly.folders import NightFolder
from harness.nightly.measuring import CUT_SHORT, Launch
from harness.nightly.outputs import append_step_summary, findings_of, message_of, write_outputs
from harness.nightly.pinning import pin_first
from harness.nightly.planning import kept_of, planned
from harness.nightly.records import (
    ENDED,
    Attempt,
    EntryPoints,
    EntryState,
    Finding,
    GateResult,
    Night,
    Status,
)
from harness.nightly.series import Series, series_of
from harness.nightly.steps import Kind, Step, control_of, joined
from harness.nightly.suite import Loaded, arguments_of, check_plans, digest_of
from harness.nightly.view import View
from harness.nightly.webhook import send
from harness.progress import Progress
from harness.run import check_out

USER_MISTAKE = UsageError.exit_code
MOST_FRESH = 12
"""Fresh runs of one entry in one night, at most."""
STATUS: dict[int, Status] = {0: "done", 4: "void"}


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """How a night ended. `view` None: it was interrupted before it could be judged."""

    folder: Path
    exit_code: int
    view: View | None = None
    stopped_by: int | None = None


def nightly(loaded: Loaded, progress: Progress, *, anew: bool = False) -> Told:
    """Do a night of the suite, or what is left of it. Mistakes of the user are raised first."""
    check_plans(loaded, catalog.names())
    check_out(loaded.results)
    read_accepted(loaded.accepted)
    results = loaded.results.resolve()
    suite = loaded.suite.name
    with folders.claimed(results, suite), folders.running(results, suite, progress.say) as hold:
        work = _begin(loaded, results, progress, anew=anew)
        work.hold = hold
        try:
            work.measure_all()
            work.confirm_all()
        except KeyboardInterrupt as stop:
            number = signal_of(stop)
            progress.say(f"interrupted; the same command goes on with {work.folder.path}")
            return Told(folder=work.folder.path, exit_code=128 + number, stopped_by=number)
        return work.conclude()


def _begin(loaded: Loaded, results: Path, progress: Progress, *, anew: bool) -> Work:
    """Go on with tonight's interrupted night, or begin one."""
    now = datetime.now(UTC)
    nights = folders.nights_of(results, loaded.suite.name)
    old = None if anew else folders.unfinished(nights, now)
    if old is not None:
        night = old.read()
        earlier = [n for n in nights if n.path != old.path]
        wanted = {e.name: digest_of(loaded, e) for e in loaded.suite.entries}
        if {e.name: e.digest for e in night.entries} == wanted:
            done = sum(e.status in ENDED for e in night.entries)
            progress.say(
                f"going on with the night of {night.night}: {done} of {len(night.entries)} "
                "entries are done"
            )
            return Work(loaded, results, old, night, earlier, progress)
        progress.say(f"{old.path}: the suite has changed since; a new night is begun")
    folder = folders.new_night(results, loaded.suite.name, now)
    night = planned(loaded, folder.name, now, nights)
    folder.write(night)
    return Work(loaded, results, folder, night, nights, progress)


class Work:
    """A night at work: its state in memory, written out after every step."""

    def __init__(
        self,
        loaded: Loaded,
        results: Path,
        folder: NightFolder,
        night: Night,
        earlier: Sequence[NightFolder],
        progress: Progress,
    ) -> None:
        self.loaded = loaded
        self.results = results
        self.folder = folder
        self.night = night
        self.earlier = list(earlier)[-loaded.suite.keep_nights :]
        self.earlier_nights, self._skipped = folders.read_nights(self.earlier)
        self._kept: dict[str, list[EntryPoints]] = {}
        self.progress = progress
        self.control = control_of(loaded)
        self.hold: int | None = None
        self._spent_before = night.spent_s
        self._begun = time.monotonic()

    @property
    def spent_s(self) -> float:
        """What all sessions took so far."""
        return self._spent_before + time.monotonic() - self._begun

    def left_s(self, *, reserve: bool) -> float | None:
        """Seconds left of the budget; with `reserve` what confirmations need is not counted."""
        if self.night.budget_s is None:
            return None
        share = 1 - self.loaded.suite.confirm_reserve if reserve else 1.0
        return share * self.night.budget_s - self.spent_s

    def save(self, **changes: object) -> None:
        """Write the night as it is now."""
        self.night = msgspec.structs.replace(self.night, spent_s=self.spent_s, **changes)
        self.folder.write(self.night)

    def state(self, name: str) -> EntryState:
        """An entry's state as it is now."""
        return next(e for e in self.night.entries if e.name == name)

    def put(self, state: EntryState) -> None:
        """Replace an entry's state."""
        self.save(entries=tuple(state if e.name == state.name else e for e in self.night.entries))

    def measure_all(self) -> None:
        """Every entry that is not done, in order, as long as the budget lets it."""
        self.progress.expect(len(self.night.entries))
        for state in self.night.entries:
            if state.status in ENDED:
                self.progress.skip()
                continue
            if not self._fits(state):
                self.progress.skip()
                continue
            self.progress.say(f"{state.name}: {state.why}")
            self._measure(state)
            self.progress.cell_done()

    def _fits(self, state: EntryState) -> bool:
        """Whether there is time for the entry; if not, that is written down."""
        left = self.left_s(reserve=True)
        if left is None or (left > 0 and (state.expected_s is None or state.expected_s <= left)):
            return True
        need = "" if state.expected_s is None else f", {state.expected_s / 60:.1f} min expected"
        why = f"{max(left, 0) / 60:.1f} min of the time budget left{need}"
        self.progress.say(f"{state.name}: left out, {why}")
        self.put(msgspec.structs.replace(state, status="left_out", why=why))
        return False

    def _measure(self, state: EntryState) -> None:
        entry = self.loaded.entry(state.name)
        attempt = self._run(Step(entry=entry, kind="first", number=0), state.attempt)
        code = attempt.exit_code
        status: Status = STATUS.get(-1 if code is None else code, "failed")
        if attempt.error == CUT_SHORT:
            status = "cut_short"
        elif status in ("done", "void") and attempt.run is None:
            status = "failed"
        done = msgspec.structs.replace(state, status=status, attempt=attempt)
        if status != "done":
            self.progress.say(f"{state.name}: {status}: {attempt.error}")
        elif not self._keep(done):
            done = msgspec.structs.replace(done, status="failed")
        self.put(done)

    def _run(self, step: Step, before: Attempt | None) -> Attempt:
        """One run of an entry, or the rest of one that was killed."""
        arguments = ("run", *arguments_of(self.loaded, step.entry), "--out", str(self.results))
        attempt = before or measuring.begin(arguments)
        run = attempt.run or measuring.found(self.results, attempt)
        call: tuple[str, ...] = attempt.arguments
        if before is not None and run is not None:
            call = ("resume", str(self.results / run))
        elif before is not None:
            attempt = measuring.begin(arguments)  # it was killed before it made a folder
            call = arguments
        self._note(step, attempt)
        limit = self.left_s(reserve=False)
        launch = self.control if step.kind == "control" else Launch()
        done = measuring.measure(
            call,
            attempt,
            out=self.results,
            log=self.folder.log(step.name),
            say=lambda line: self.progress.say(f"  {step.name} {line}"),
            launch=msgspec.structs.replace(launch, hold=self.hold),
            limit_s=None if limit is None else max(limit, 1.0),
        )
        if call[0] == "resume" and done.exit_code == USER_MISTAKE:
            self.progress.say(f"{step.name}: {done.error}; it is measured anew")
            return self._run(step, None)
        if done.run is None:
            done = msgspec.structs.replace(done, run=run)
        if done.run is not None and step.kind != "control":  # that one is of another version
            measuring.label(self.results / done.run, self.loaded.suite.name)
        return done

    def _note(self, step: Step, attempt: Attempt) -> None:
        """Write down that a run is under way, so that a killed night finds it."""
        state = self.state(step.entry.name)
        if step.kind == "first":
            state = msgspec.structs.replace(state, status="running", attempt=attempt)
        self.put(step.with_attempt(state, attempt))

    def _keep(self, state: EntryState) -> bool:
        """Keep an entry's figures in the night's folder; False where its run has none."""
        assert state.attempt is not None and state.attempt.run is not None
        try:
            points = measuring.figures(self.results / state.attempt.run, self.loaded.suite.name)
            fresh, control = (
                joined(
                    measuring.blocks(state.name, self.results / a.run)
                    for a in attempts
                    if a.exit_code == 0 and a.run is not None
                )
                for attempts in (state.fresh, state.control)
            )
        except UsageError as error:
            self.progress.say(f"{state.name}: {error}")
            return False
        self.folder.write_points(
            EntryPoints(
                entry=state.name,
                digest=state.digest,
                night=self.folder.name,
                run=state.attempt.run,
                points=points,
                fresh=fresh,
                control=control,
            )
        )
        return True

    def confirm_all(self) -> None:
        """Measure every entry with a suspect again, on fresh blocks, while time is left."""
        for name in [e.name for e in self.night.entries if e.status == "done"]:
            for _ in range(MOST_FRESH):
                wanted = judge.wanted(self._case(self.state(name)))
                if wanted <= 0 or not self._fits_again(self.state(name), wanted):
                    break
                if not self._again(name):
                    break

    def _fits_again(self, state: EntryState, wanted: int) -> bool:
        left, took = self.left_s(reserve=False), state.attempt.seconds if state.attempt else 0.0
        need = took if self.loaded.suite.control is None else 2 * took
        if left is None or need <= left:
            return True
        self.progress.say(
            f"{state.name}: a suspect is not confirmed: {wanted} fresh blocks are wanted, a run "
            f"takes {took / 60:.1f} min, {max(left, 0) / 60:.1f} min are left"
        )
        return False

    def _again(self, name: str) -> bool:
        """Fresh runs of a suspect, and of the good version in turn with it; whether they ended."""
        kinds: tuple[Kind, ...] = ("fresh",)
        if self.loaded.suite.control is not None:
            kinds = ("fresh", "control")
        entry, done = self.loaded.entry(name), True
        for kind in kinds:
            state = self.state(name)
            ran = state.fresh if kind == "fresh" else state.control
            killed = ran[-1] if ran and ran[-1].exit_code is None else None
            number = len(ran) + (killed is None)
            if killed is None and kind == "control" and len(ran) >= len(state.fresh):
                continue  # it was measured before the night was interrupted
            step = Step(entry=entry, kind=kind, number=number)
            self.progress.say(f"{name}: suspect; {kind} run {number}")
            attempt = self._run(step, killed)
            self.put(step.with_attempt(self.state(name), attempt))
            if attempt.exit_code != 0:
                self.progress.say(f"{step.name}: it gave nothing: {attempt.error}")
                done = False
        self._keep(self.state(name))
        return done

    def _case(self, state: EntryState) -> judge.Case:
        """Everything that an entry is judged by."""
        entry = self.loaded.entry(state.name)
        return judge.Case(
            entry=entry.name,
            night=self.folder.name,
            gates=self.loaded.gates(entry),
            series=self._series(state),
            baseline=folders.read_baseline(self.results, self.loaded.suite.name, entry.name),
            accepted=read_accepted(self.loaded.accepted),
            nights=tuple(self.earlier_nights),
            digest=state.digest,
            suite=self.loaded.suite,
        )

    def _series(self, state: EntryState) -> dict[str, Series]:
        if state.name not in self._kept:  # tonight's changes as the night goes on, others do not
            self._kept[state.name] = kept_of(self.earlier, state.name)
        kept = [*self._kept[state.name], *kept_of([self.folder], state.name)]
        return series_of(state.name, kept, state.digest)

    def conclude(self) -> Told:
        """Judge every entry, pin first baselines, write everything, tell it."""
        gates: list[GateResult] = []
        findings: list[Finding] = []
        for state in self.night.entries:
            if state.status == "done":
                case = self._case(state)
                found = judge.judge(case)
                gates += found.gates
                findings += with_causes(found.findings, case, self.results)
        ended = datetime.now(UTC).isoformat(timespec="seconds")
        night = msgspec.structs.replace(
            self.night, gates=tuple(gates), findings=tuple(findings), spent_s=self.spent_s
        )
        notes = (*self._skipped, *pin_first(self.loaded, self.results, self.folder, night))
        self.night = msgspec.structs.replace(
            night, notes=notes, ended=ended, exit_code=exit_code_of(night)
        )
        told = self._tell()
        self.save()  # the last thing: a night that is killed before it is told is told again
        return told

    def _tell(self) -> Told:
        series = [s for e in self.night.entries for s in self._series(e).values()]
        baselines = judge.baseline_values(self.loaded, self.results)
        view = write_outputs(
            self.folder, self.night, series, baselines, self.loaded.suite.watch, self._runs()
        )
        for line in (append_step_summary(view), self._webhook(view)):
            if line is not None:
                self.progress.say(line)
        return Told(folder=self.folder.path, exit_code=self.night.exit_code or 0, view=view)

    def _runs(self) -> Mapping[str, Path]:
        return {
            e.name: self.results / e.attempt.run
            for e in self.night.entries
            if e.attempt is not None and e.attempt.run is not None
        }

    def _webhook(self, view: View) -> str | None:
        hook = self.loaded.suite.webhook
        if hook is None or (hook.when == "failure" and not self.night.exit_code):
            return None
        return send(hook, findings_of(self.night, view), message_of(view))


def exit_code_of(night: Night) -> int:
    """1 a regression or a failed gate; 3 an engine failed; 2 a mistake; 4 a void run; else 0."""
    bad = any(f.status == "confirmed" and f.direction == "worse" for f in night.findings)
    if bad or any(g.status == "fail" for g in night.gates):
        return 1
    codes = [e.attempt.exit_code for e in night.entries if e.attempt and e.status == "failed"]
    if any(code not in (0, 2, 4) for code in codes):
        return 3
    if codes:
        return 2 if 2 in codes else 3
    return 4 if any(e.status == "void" for e in night.entries) else 0
