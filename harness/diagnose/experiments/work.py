"""What the experiments of one diagnosis share, and how each is made from it.

The engine is started once, the target is computed once, and every round of questions is asked once
and kept: a diagnosis that goes on takes them from its folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import msgspec

from drafters.spec import DrafterError
from engines.base import EngineError, EngineFailed
from harness.diagnose.experiments.asking import (
    TIMEOUT_S,
    Access,
    Asked,
    Question,
    Server,
    Telling,
    Way,
    samples,
    serving,
    traces,
    why_untraced,
)
from harness.diagnose.folders import DiagnosisFolder
from harness.diagnose.records import (
    Audit,
    Controls,
    Dossier,
    Expected,
    Length,
    Observed,
    Replay,
    Sampling,
    States,
    Subject,
    TargetParity,
    Toggle,
    Wanted,
)
from harness.diagnose.rules.hints import AT_ONCE
from harness.errors import HarnessError, one_line

if TYPE_CHECKING:
    from engines.reference.engine import Engine
    from engines.trace.base import TraceStep
    from harness.diagnose.experiments.known import Knowledge
    from harness.diagnose.experiments.toggles import Switch

MAX_TOKENS = 64
CONCURRENCY = 8
AGAIN = 3
"""So many questions are asked once more, one at a time: what a prefix cache holds is seen there."""
GREEDY = ("alone", "batched", "repeated")
"""The rounds whose traces are looked at."""
ROUNDS = "asked"


class Skipped(Exception):
    """An experiment that cannot be made here; the message says why."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How a diagnosis is made.

    `categories`: the prompts' own. `other_form`: the same prompts without the chat template, or
    with it, whichever is not served (`form` says what is). `in_run`, `step_cost`: of a stored run.
    `access`: how a server that runs already is reached.
    `timeout_s`: for a whole answer.
    """

    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    max_tokens: int = MAX_TOKENS
    concurrency: int = CONCURRENCY
    categories: tuple[str | None, ...] = ()
    form: str = "templated"
    other_form: tuple[tuple[int, ...], ...] = ()
    in_run: Length | None = None
    step_cost: float | None = None
    access: Access | None = None
    timeout_s: float = TIMEOUT_S
    thorough: bool = False
    """Every experiment, though the verdict be certain before."""


class Work:
    """The experiments of one subject; `dossier` is kept up to date by whoever makes them."""

    def __init__(
        self,
        subject: Subject,
        prompts: Sequence[Sequence[int]],
        folder: DiagnosisFolder,
        progress: Telling,
        options: Options,
        stack: ExitStack,
        target: Engine | None,
    ) -> None:
        self.subject, self.folder, self.progress, self.options = subject, folder, progress, options
        self.prompts = [tuple(p) for p in prompts]
        names = [*options.categories, *(None for _ in prompts)]
        self.questions = [
            Question(name=f"{i:03d}", token_ids=ids, category=names[i])
            for i, ids in enumerate(self.prompts)
        ]
        self.dossier = Dossier(subject=subject)
        self._stack, self._target = stack, target
        self._server: Server | None = None
        self._server_stack = stack.enter_context(ExitStack())
        self._no_server: str | None = None
        self._known: Knowledge | None = None
        self._unknown: str | None = None
        self._traced: dict[str, list[TraceStep]] | None = None
        before = folder.found(ROUNDS, dict[str, Asked])
        self._rounds = {} if before is None else before[0]
        self.failure: EngineFailed | None = None
        """Why the engine did not start, or what it died of."""

    # -- the story's side --------------------------------------------------------------------

    def make(self, name: str) -> Any:
        """One experiment's record. Raises `Skipped`, and whatever goes wrong in it."""
        return getattr(self, f"make_{name}")()

    def take(self, name: str, found: Any, took: float) -> None:
        """What an experiment found belongs to the dossier from now on."""
        took_s = {**self.dossier.took_s, name: took}
        self.dossier = msgspec.structs.replace(self.dossier, took_s=took_s, **{name: found})

    def leave_out(self, name: str, why: str, *, needless: bool = False) -> None:
        """Why an experiment was not made; `needless`: it could have changed nothing."""
        known = self.dossier
        self.dossier = msgspec.structs.replace(
            known,
            skipped={**known.skipped, name: why},
            needless=(*known.needless, name) if needless else known.needless,
        )

    def whole(self, name: str) -> bool:
        """Whether what was found is all: controls are made without an engine that failed."""
        return name != "controls" or self.failure is None

    def end(self) -> None:
        """End the engine. One that has died meanwhile is told by `failure`, never raised."""
        if self._server is not None and self.subject.url is None:
            self.progress.stage("ending the engine")
        self._server = None
        try:
            self._server_stack.close()
        except EngineFailed as error:
            self.failure = self.failure or error

    # -- what they share ---------------------------------------------------------------------

    def known(self) -> Knowledge:
        """The target's own text and states. Raises `Skipped` where it cannot be computed here."""
        if self._unknown is not None:
            raise Skipped(self._unknown)
        if self._known is None:
            from harness.diagnose.experiments.known import know

            try:
                self._known = know(
                    self.subject,
                    self.prompts,
                    max_tokens=self.options.max_tokens,
                    engine=self._target,
                )
            except (EngineError, HarnessError, DrafterError) as error:
                self._unknown = one_line(str(error))
                raise Skipped(self._unknown) from None
        return self._known

    def server(self) -> Server:
        """The subject's engine, started once. Raises `Skipped` where it does not start."""
        if self._no_server is not None:
            raise Skipped(self._no_server)
        if self._server is None or self._server.gone() is not None:
            try:
                self._server_stack.close()
                self._server = self._server_stack.enter_context(
                    serving(
                        self.subject,
                        self.folder.work,
                        access=self.options.access,
                        progress=self.progress,
                    )
                )
            except EngineError as error:
                self._no_server = one_line(str(error))
                self.failure = error if isinstance(error, EngineFailed) else None
                raise Skipped(self._no_server) from None
        return self._server

    def round(self, way: Way, questions: Sequence[Question]) -> Asked:
        """Questions asked in one way; what was asked before is taken from the folder."""
        if way.name not in self._rounds:
            server = self.server()
            try:
                self._ask(server, way, questions)
            except EngineFailed as error:
                if server.gone() is not None:  # it would die, or hang, again
                    self.failure, self._no_server = error, one_line(str(error))
                elif not self._rounds:  # one that ran already: it has never answered anything
                    self.failure = error
                raise
            self._traced = None
        return self._rounds[way.name]

    def _ask(self, server: Server, way: Way, questions: Sequence[Question]) -> None:
        """Ask, and keep what was answered."""
        self._rounds[way.name] = server.ask(questions, way, self.progress)
        self.folder.keep(ROUNDS, self._rounds, 0.0)

    def traced(self) -> dict[str, list[TraceStep]]:
        """Every traced step of the greedy rounds by request. Raises `Skipped` without any."""
        why = why_untraced(self.subject)
        if why is not None:
            raise Skipped(why)
        if self._traced is None:
            greedy = [a for a in self._rounds.values() if a.way.name in GREEDY]
            if not greedy:
                raise Skipped(self.dossier.skipped.get("observed", "nothing was asked"))
            self._traced = traces(greedy, self.progress.stage)
        if not self._traced:
            raise Skipped("the engine wrote no trace of these requests")
        return self._traced

    def _trace_if_any(self) -> dict[str, list[TraceStep]]:
        try:
            return self.traced()
        except (Skipped, EngineError):
            return {}

    def _way(self, name: str, **changes: Any) -> Way:
        most, timeout_s = self.options.max_tokens, self.options.timeout_s
        return Way(name=name, max_tokens=most, timeout_s=timeout_s, **changes)

    @property
    def _at_once(self) -> int:
        most = self.subject.max_num_seqs or self.options.concurrency
        return max(1, min(self.options.concurrency, most, len(self.questions)))

    def _greedy_rounds(self) -> list[Asked]:
        """Alone, then together: the second sees what the first left in a prefix cache."""
        rounds = [self.round(self._way("alone"), self.questions)]
        if self._at_once > 1:
            together = self._way("batched", concurrency=self._at_once)
            rounds.append(self.round(together, self.questions))
        self.round(self._way("repeated"), self.questions[:AGAIN])
        return rounds

    # -- the experiments ---------------------------------------------------------------------

    def make_audit(self) -> Audit:
        from harness.diagnose.experiments.audit import audit

        return audit(self.subject)

    def make_expected(self) -> Expected:
        from harness.diagnose.experiments.expected import expect

        return expect(self.known(), step_cost=self.options.step_cost)

    def make_observed(self) -> Observed:
        from harness.diagnose.experiments.observed import observe

        rounds = self._greedy_rounds()
        own: Mapping[str, Sequence[int]] | None = None
        if self._known is not None:
            texts = self._known.texts
            own = {q.name: t.answer for q, t in zip(self.questions, texts, strict=True)}
        self._log(rounds)
        found = observe(rounds, k=self.subject.k, own=own, traces=self._trace_if_any())
        return msgspec.structs.replace(found, in_run=self.options.in_run)

    def _log(self, rounds: Sequence[Asked]) -> None:
        """What the engine's log says belongs to the audit."""
        from harness.diagnose.experiments.audit import with_log

        facts = next((a.log_facts for a in rounds if a.log_facts), {})
        if self.dossier.audit is not None and facts:
            known = with_log(self.dossier.audit, self.subject, facts)
            self.folder.keep("audit", known, self.dossier.took_s.get("audit", 0.0))
            self.dossier = msgspec.structs.replace(self.dossier, audit=known)

    def make_states(self) -> States:
        from harness.diagnose.experiments.states import compare_states

        return compare_states(self.known(), self.traced())

    def make_replay(self) -> Replay:
        from harness.diagnose.experiments.replay import replay

        return replay(self.known(), self.traced())

    def make_wanted(self) -> Wanted:
        from harness.diagnose.experiments.wanted import want

        return want(self.known())

    def make_target(self) -> TargetParity:
        from harness.diagnose.experiments.target import parity

        known = self.known()
        first = self._rounds.get("alone")
        questions = {q.name: q for q in self.questions}
        answers = [(questions[a.question], a) for a in first.ok] if first is not None else []
        with self.server().logprobs() as reader:
            return parity(known, reader, answers)

    def make_sampling(self) -> Sampling:
        from harness.diagnose.experiments.sampling import sampled

        temperature = self.subject.temperature
        if temperature <= 0:
            raise Skipped("the subject is served greedily (sampling.temperature is 0)")
        if not samples(self.subject):
            raise Skipped("SGLang verifies greedily on a CPU, whatever the temperature")
        known = self.known()
        way = self._way("sampled", concurrency=self._at_once, temperature=temperature)
        asked = self.round(way, self.questions)
        steps = traces([asked], self.progress.stage) if asked.trace is not None else {}
        prompts = {q.name: q.token_ids for q in self.questions}
        found = sampled(known, asked, prompts, steps)
        if found is None:
            raise Skipped("no sampled answer holds a whole verify step")
        return found

    def make_toggles(self) -> tuple[Toggle, ...]:
        from harness.diagnose.experiments.toggles import compared, switches, why_none

        found: list[Toggle] = []
        k, rounds = self.subject.k, self._rounds
        if "alone" not in rounds:
            raise Skipped(self.dossier.skipped.get("observed", "nothing was asked"))
        if {"alone", "batched"} <= set(rounds):
            pair = (rounds["alone"], rounds["batched"])
            names = ("1", str(rounds["batched"].way.concurrency))
            cause = "states_other_request"
            found.append(compared(AT_ONCE, names, pair, k=k, cause=cause))
        if self.options.other_form:
            other = "raw" if self.options.form == "templated" else "templated"
            asked = self.round(self._way("other form"), self._other_form())
            pair = (rounds["alone"], asked)
            names = (self.options.form, other)
            found.append(compared("chat template", names, pair, k=k, cause="template"))
        for switch in switches(self.subject):
            self.progress.stage(f"toggles: {switch.what} {switch.b}")
            found.append(self._switched(switch, rounds["alone"]))
        if not found:
            raise Skipped(why_none(self.subject))
        return tuple(found)

    def _other_form(self) -> list[Question]:
        return [
            msgspec.structs.replace(q, token_ids=ids)
            for q, ids in zip(self.questions, self.options.other_form, strict=True)
        ]

    def _switched(self, switch: Switch, first: Asked) -> Toggle:
        """The questions asked of an engine that is started otherwise; the other one is ended."""
        from harness.diagnose.experiments.toggles import compared

        self.end()
        way = self._way(f"{switch.what} {switch.b}", temperature=first.way.temperature)
        if way.name not in self._rounds:
            with serving(
                switch.subject, self.folder.work, traced=False, progress=self.progress
            ) as server:
                self._ask(server, way, self.questions)
        pair = (first, self._rounds[way.name])
        names = (switch.a, switch.b)
        return compared(switch.what, names, pair, k=self.subject.k, cause=switch.cause)

    def make_controls(self) -> Controls:
        from harness.diagnose.experiments.controls import controls, repeated_questions

        known = self.known()
        texts = zip(self.questions, known.texts, strict=True)
        again = repeated_questions(self.questions, {q.name: t.answer for q, t in texts})
        return controls(known, self._server_for_controls() if again else None, again, self.progress)

    def _server_for_controls(self) -> Server | None:
        """The server; none where it was ended for a toggle: another start is more than it tells."""
        if self._server is None and any(t.what != AT_ONCE for t in self.dossier.toggles):
            return None
        try:
            return self.server()
        except Skipped:
            return None
