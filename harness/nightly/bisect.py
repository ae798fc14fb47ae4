"""The story of a bisection: which version or commit lost what a series lost.

Both ends are measured first, in turn: what cannot be shown again cannot be found. Then the middle
of what is left, each beside the good end on the same machine at the same time, judged as a
suspect of the night is. What cannot be made or decided is passed over, and named at the end.
"""

from __future__ import annotations

import hashlib
import math
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, stdev

import msgspec

from engines.base import EngineError
from harness.analyse.series.confirm import confirm
from harness.analyse.series.records import Change, Config, Confirmation
from harness.errors import HarnessError, UsageError
from harness.findings import Interval
from harness.load.interrupt import signal_of
from harness.measure.metrics import Better
from harness.measure.store import read_json, write_atomic
from harness.nightly import candidates, folders, measuring
from harness.nightly.candidates import Choice
from harness.nightly.judge import config_of
from harness.nightly.measuring import Launch
from harness.nightly.planning import known_series, no_such
from harness.nightly.records import NIGHT_SCHEMA, Attempt, Hunt, Probe
from harness.nightly.search import Label, Span, span
from harness.nightly.series import name_of
from harness.nightly.suite import Loaded, arguments_of, digest_of
from harness.progress import Progress
from harness.report import words

HUNT = "bisect.json"
ROUNDS = 6
"""Runs of one candidate, at most: more than a night has time for, as each passed over costs one."""


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How a bisection ended: its answer in words, and the exit code."""

    folder: Path
    text: str
    exit_code: int


def bisect(
    loaded: Loaded, series: str, choice: Choice, progress: Progress, *, anew: bool = False
) -> Ended:
    """Find the first bad candidate, or go on with a search that was interrupted."""
    entry = loaded.entry(series.partition("/")[0])
    results = loaded.results.resolve()
    known = known_series([entry.name], folders.nights_of(results, loaded.suite.name))
    if known and series not in known:  # told now, not by the first run
        raise no_such(series, known)
    named = hashlib.sha256(
        msgspec.json.encode([series, choice.names, choice.pins, digest_of(loaded, entry)])
    ).hexdigest()[:8]
    folder = folders.suite_folder(results, loaded.suite.name) / "bisect" / f"{entry.name}-{named}"
    suite = loaded.suite.name
    with folders.claimed(results, suite), folders.running(results, suite, progress.say) as hold:
        hunt = None if anew or not (folder / HUNT).exists() else read_json(folder / HUNT, Hunt)
        if hunt is None:
            hunt = Hunt(
                schema_version=NIGHT_SCHEMA,
                suite=suite,
                entry=entry.name,
                series=series,
                names=choice.names,
                begun=datetime.now(UTC).isoformat(timespec="seconds"),
            )
        search = Search(loaded, choice, folder, hunt, progress)
        search.hold = hold
        try:
            return search.run()
        except KeyboardInterrupt as stop:
            told = f"interrupted; the same command goes on with {folder}"
            return Ended(folder=folder, text=told, exit_code=128 + signal_of(stop))


class Search:
    """A bisection at work; its state is written out after every run."""

    def __init__(
        self, loaded: Loaded, choice: Choice, folder: Path, hunt: Hunt, progress: Progress
    ) -> None:
        self.loaded = loaded
        self.choice = choice
        self.folder = folder
        self.hunt = hunt
        self.progress = progress
        self.config: Config = msgspec.structs.replace(config_of(loaded.suite), looks=ROUNDS)
        self.hold: int | None = None
        self._ready: dict[str, Launch] = {}

    def run(self) -> Ended:
        """To its end; everything that is measured already is not measured again."""
        good, bad = self.choice.names[0], self.choice.names[-1]
        change = self._ends(good, bad)
        if change is None:
            return self._end(
                f"{self.hunt.series}: {self._named(bad)} is not shown to be worse than "
                f"{self._named(good)} here, so that there is nothing to search for: "
                f"{self._probe(bad).why}",
                4,
            )
        while (at := span(self.choice.names, self._labels())).next is not None:
            name = self.choice.names[at.next]
            self.progress.say(
                f"between {self._named(self.choice.names[at.good])} and "
                f"{self._named(self.choice.names[at.bad])}, about {at.left} to go: "
                f"{self._named(name)}"
            )
            self._judge(name, change)
        return self._end(self._answer(at), 0)

    def _named(self, name: str) -> str:
        return candidates.short(self.choice, name)

    def _probe(self, name: str) -> Probe:
        return self.hunt.probes.get(name) or Probe(name=name)

    def _put(self, probe: Probe) -> None:
        probes = {**self.hunt.probes, probe.name: probe}
        self._save(msgspec.structs.replace(self.hunt, probes=probes))

    def _save(self, hunt: Hunt) -> None:
        self.hunt = hunt
        data = msgspec.json.format(msgspec.json.encode(hunt), indent=2)
        write_atomic(self.folder / HUNT, data)

    def _labels(self) -> dict[str, Label]:
        return {p.name: p.label for p in self.hunt.probes.values() if p.label is not None}

    def _ends(self, good: str, bad: str) -> Change | None:
        """The change between the two ends; None where it cannot be shown again."""
        for _ in range(ROUNDS):
            self._round(bad, beside=good)
            probe = self._probe(bad)
            if probe.label == "skip":
                raise UsageError(f"{self._named(bad)}: it cannot be measured: {probe.why}")
            found = self._between(bad)
            if found is None:
                continue
            said = self._said(found, probe)
            more = said.verdict == "undecided" and said.more > 0
            label: Label = "bad" if said.verdict == "confirmed" else "good"
            decided = None if more else label
            self._put(msgspec.structs.replace(probe, label=decided, why=said.why))
            if said.verdict == "confirmed":
                self.progress.say(f"{self._named(bad)}: {said.why}")
                return found
            if not more:
                break
        return None

    def _said(self, change: Change, probe: Probe) -> Confirmation:
        """What the candidate's blocks beside the good end's say of the change."""
        return confirm(
            change,
            probe.blocks,
            reference=probe.beside,
            better=self._better,
            config=self.config,
        )

    def _judge(self, name: str, change: Change) -> None:
        """Measure one candidate beside the good end until it is decided."""
        for _ in range(ROUNDS):
            self._round(name, beside=self.choice.names[0])
            probe = self._probe(name)
            if probe.label == "skip":
                break
            said = self._said(change, probe)
            if said.verdict != "undecided":
                label: Label = "bad" if said.verdict == "confirmed" else "good"
                self._put(msgspec.structs.replace(probe, label=label, why=said.why))
                break
            if not said.more:
                self._put(msgspec.structs.replace(probe, label="skip", why=said.why))
                break
        else:
            probe = self._probe(name)
            self._put(msgspec.structs.replace(probe, label="skip", why="it stayed undecided"))
        probe = self._probe(name)
        self.progress.say(f"{self._named(name)}: {probe.label}: {probe.why}")

    def _round(self, name: str, *, beside: str) -> None:
        """One run of the candidate and one of the good end; blocks that are wanted still.

        A candidate that cannot be made or measured is labelled `skip`.
        """
        probe = self._probe(name)
        if probe.label is not None and probe.blocks:
            return  # decided before an interruption
        if probe.label is not None:  # an end that could not be measured then is tried again
            self._put(Probe(name=name))
            probe = self._probe(name)
        sides = ((name, "own"), (beside, "good"))
        for which, kind in sides if len(probe.beside) % 2 == 0 else sides[::-1]:
            try:
                launch = self._launch(which)
                self._run(name, kind, launch)
            except (EngineError, HarnessError) as error:
                if kind == "good":
                    raise UsageError(
                        f"{self._named(beside)}: the good end cannot be measured: {error}"
                    ) from None
                self._put(msgspec.structs.replace(self._probe(name), label="skip", why=str(error)))
                return

    def _launch(self, name: str) -> Launch:
        if name not in self._ready:
            self.progress.say(f"making {self._named(name)} ready")
            self._ready[name] = candidates.ready(self.choice, name, self.folder / "trees")
        return self._ready[name]

    def _run(self, name: str, kind: str, launch: Launch) -> None:
        """One run, its blocks kept in the probe. Raises `HarnessError` where it gave none."""
        entry, out = self.loaded.entry(self.hunt.entry), self.folder / "runs"
        out.mkdir(parents=True, exist_ok=True)
        arguments = ("run", *arguments_of(self.loaded, entry), "--out", str(out))
        attempt = measuring.begin(arguments)
        done = measuring.measure(
            arguments,
            attempt,
            out=out,
            log=self.folder / f"{name[:12]}.log",
            say=lambda line: self.progress.say(f"  {name[:12]} {line}"),
            launch=msgspec.structs.replace(launch, hold=self.hold),
        )
        blocks = self._blocks(done)
        probe = self._probe(name)
        if kind == "own":
            probe = msgspec.structs.replace(probe, blocks=(*probe.blocks, *blocks))
        else:
            probe = msgspec.structs.replace(probe, beside=(*probe.beside, *blocks))
        self._put(probe)

    def _blocks(self, done: Attempt) -> tuple[float, ...]:
        """The series' value in every start of a run. Raises `UsageError` where there is none."""
        if done.run is None or done.exit_code != 0:
            raise UsageError(done.error or "the run gave nothing")
        run = self.folder / "runs" / done.run
        points = measuring.figures(run, self.loaded.suite.name)
        better = {name_of(self.hunt.entry, p): p.better for p in points}.get(self.hunt.series)
        found = measuring.blocks(self.hunt.entry, run).get(self.hunt.series)
        if not found:
            raise UsageError(f"{run}: it has no {self.hunt.series}")
        self._save(msgspec.structs.replace(self.hunt, better=better))
        return found

    @property
    def _better(self) -> Better | None:
        return self.hunt.better

    def _between(self, bad: str) -> Change | None:
        """The change that the ends show, as a suspicion; None with under two blocks of each."""
        probe = self._probe(bad)
        if min(len(probe.blocks), len(probe.beside)) < 2 or min(*probe.blocks, *probe.beside) <= 0:
            return None
        new, old = ([math.log(v) for v in side] for side in (probe.blocks, probe.beside))
        loss = fmean(new) - fmean(old)
        worse = loss < 0 if self._better == "higher" else loss > 0
        return Change(
            at=1,
            found=1,
            good=0,
            kind="step",
            direction="worse" if worse else "better",
            before=Interval(value=math.exp(fmean(old))),
            after=Interval(value=math.exp(fmean(new))),
            difference=math.exp(fmean(new)) - math.exp(fmean(old)),
            effect=Interval(value=math.exp(loss)),
            noise=max(stdev(new), stdev(old)),
            p_value=self.config.suspect,
            certain=False,
        )

    def _answer(self, at: Span) -> str:
        names = self.choice.names
        bad, good = self._named(names[at.bad]), self._named(names[at.good])
        why = self._probe(names[at.bad]).why
        if not at.skipped:
            return f"{self.hunt.series}: the first bad one is {bad} ({why}); {good} is good."
        passed = ", ".join(self._named(names[i]) for i in at.skipped)
        return (
            f"{self.hunt.series}: the first bad one is one of {passed}, {bad}: "
            f"{words.plural(len(at.skipped), 'candidate')} could not be decided; {good} is good."
        )

    def _end(self, text: str, code: int) -> Ended:
        ended = datetime.now(UTC).isoformat(timespec="seconds")
        self._save(msgspec.structs.replace(self.hunt, text=text, exit_code=code, ended=ended))
        return Ended(folder=self.folder, text=text, exit_code=code)
