"""Questions to the engine that is diagnosed: started with a trace, or running already.

Prompts go as token ids to the completions endpoint, so that every engine sees the same tokens. A
request's id goes with it, and the trace names its steps by it.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from engines.base import Adapter, EngineFailed, ServeSpec
from engines.catalog import adapter as adapter_named
from engines.process import free_port
from harness.alive import Attached, Launched
from harness.diagnose.experiments.log_facts import log_facts
from harness.diagnose.experiments.starting import started
from harness.diagnose.records import Subject
from harness.errors import one_line
from harness.load.drive import Driven, drive
from harness.load.prompts.prompt import Prompt
from harness.load.slices import Tally
from harness.load.streaming.client import Asking
from harness.load.streaming.plain import plain_client
from harness.measure.counters import CounterReader, CounterWindow
from harness.measure.logprobs import LogprobReader
from harness.measure.told import read_acceptance_of
from harness.plan.schema import ClientSection, SamplingSection
from harness.records import DraftCounts, LoadPoint, RequestRecord

if TYPE_CHECKING:
    from engines.trace.base import TraceStep

SERVED = "target"
"""The target's name in an engine that is started here."""
LONGEST_CONTEXT = 4096
SEQUENCES = 16
TIMEOUT_S = 600.0
QUIET_SHARE = 0.1
"""Of a request's timeout: without a byte from any request for so long, the server hangs."""
COMPILING = 3.0
"""So many times as long where an engine was just started on a GPU: it may compile kernels."""
MORE_PATIENCE = "for a slower engine set load.timeout_s higher"
SLOWER = 4.0
"""A batch may be silent so many times as long as its requests would be one after another."""
_ID_FIELDS = {"reference": "request_id", "vllm": "request_id", "sglang": "rid"}
"""The request field that carries the client's own id."""


class Telling(Protocol):
    """What an experiment says while it works (`harness.progress.Progress` is one)."""

    def stage(self, text: str) -> None:
        """What is being done now."""

    def cell(self, title: str, total: int | None) -> None:
        """Requests begin."""

    def tally(self, tally: Tally) -> None:
        """How far they are."""


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """How a server that runs already is reached: the model's name there, and the way to it."""

    model: str = SERVED
    api_key: str | None = None
    client: ClientSection = ClientSection()


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt in tokens. `name` is the same for the same prompt, however often it is asked."""

    name: str
    token_ids: tuple[int, ...]
    category: str | None = None


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """How questions are asked: `name` says what for (alone, batched, repeated, sampled)."""

    name: str
    concurrency: int = 1
    temperature: float = 0.0
    max_tokens: int = 64
    timeout_s: float = TIMEOUT_S  # for a whole answer


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `request` is its id, `steps[i]` how many drafts verify step i accepted."""

    request: str
    question: str
    category: str | None = None
    prompt_tokens: int
    token_ids: tuple[int, ...] = ()
    counts: DraftCounts | None = None
    steps: tuple[int, ...] | None = None
    sent_ns: int | None = None
    error: str | None = None


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What one round of questions brought.

    `counters`: the server's own, differenced. `trace`: the folder of the trace, None where the
    engine wrote none.
    """

    way: Way
    answers: tuple[Answered, ...]
    counters: DraftCounts | None = None
    trace: str | None = None
    log_facts: dict[str, str] = {}

    @property
    def ok(self) -> tuple[Answered, ...]:
        """Those that were answered."""
        return tuple(a for a in self.answers if a.error is None)


class Server:
    """An engine that answers. `trace`: the folder it writes its steps into."""

    def __init__(
        self,
        adapter: Adapter,
        host: Launched | Attached,
        access: Access,
        *,
        trace: Path | None = None,
        compiles: bool = False,
    ) -> None:
        self.adapter, self.host, self.access, self.trace = adapter, host, access, trace
        self._hangs: str | None = None
        self._compiles, self._longest_s = compiles, 0.0

    def gone(self) -> str | None:
        """Why it is not to be asked any more; None while it lives, and does not hang."""
        return self._hangs or self.host.gone()

    def ask(self, questions: Sequence[Question], way: Way, progress: Telling) -> Asked:
        """Ask each question once, `way.concurrency` at a time.

        Raises `EngineFailed` where nothing was answered, and where the server did not live through
        the round: half of one would be taken for the whole.
        """
        ids = [f"{way.name}-{i:03d}-{secrets.token_hex(4)}" for i in range(len(questions))]
        client = plain_client(self.host.url, self.access.client, self.access.api_key)
        reader = CounterReader(self.adapter, self.host.url, client)
        try:
            window = CounterWindow(reader)
            driven = self._drive(questions, way, ids, progress)
            if driven.interrupted is None:  # else there is nothing to wait for
                window.close()
        finally:
            reader.close()
        failed = next((r.error for r in driven.records if r.status != "ok"), None)
        lost = driven.interrupted or (self.host.lost() if failed is not None else None)
        if lost is not None:
            if driven.interrupted is not None and not driven.given_up:
                self._hangs, lost = lost, f"{lost}; {MORE_PATIENCE}"
            raise self.host.failed(lost)
        self._longest_s = max([self._longest_s, *map(_longest_wait_s, driven.records)])
        asked = Asked(
            way=way,
            answers=tuple(answered(r, questions[r.index], ids[r.index]) for r in driven.records),
            counters=window.difference().delta,
            trace=None if self.trace is None else str(self.trace),
            log_facts=self.facts(),
        )
        if not asked.ok:
            raise self.host.failed(f"no prompt was answered: {failed or 'no answer'}")
        return asked

    def facts(self) -> dict[str, str]:
        """What the engine's log says; nothing of a server that was not started here."""
        log = self.host.log_path
        if log is None or not log.is_file():
            return {}
        return log_facts(log.read_text("utf-8", "replace"))

    @contextmanager
    def logprobs(self) -> Iterator[LogprobReader]:
        """Asks for log-probabilities."""
        with plain_client(self.host.url, self.access.client, self.access.api_key) as http:
            yield LogprobReader(http, self.host.url, self.access.model)

    def _drive(
        self, questions: Sequence[Question], way: Way, ids: Sequence[str], progress: Telling
    ) -> Driven:
        field = _ID_FIELDS.get(self.adapter.name)
        prompts = [
            Prompt(
                id=question.name,
                category=question.category,
                token_ids=question.token_ids,
                sampling={} if field is None else {field: request},
            )
            for question, request in zip(questions, ids, strict=True)
        ]
        concurrency = min(way.concurrency, len(prompts))
        progress.cell(f"asking {self.adapter.name}: {way.name}", len(prompts))
        return drive(
            self._asking(way, concurrency),
            prompts,
            LoadPoint(mode="closed", concurrency=concurrency, num_requests=len(prompts)),
            cell_id=way.name,
            seed=0,
            engine_gone=self.host.gone,
            on_tally=progress.tally,
            workers=1,
            read_acceptance=lambda payloads: read_acceptance_of(self.adapter, payloads),
        )

    def _asking(self, way: Way, concurrency: int) -> Asking:
        extra: dict[str, Any] = dict(
            self.adapter.request_fields(speculative=True, endpoint="completions")
        )
        # A seed, so that the same question asked again is answered the same at any temperature.
        seed = 0 if way.temperature > 0 else None
        return Asking(
            url=self.host.url,
            model=self.access.model,
            endpoint="completions",
            max_tokens=way.max_tokens,
            sampling=SamplingSection(temperature=way.temperature, seed=seed),
            timeout_s=way.timeout_s,
            quiet_s=self._quiet_s(way, concurrency),
            api_key=self.access.api_key,
            extra=extra,
            client=self.access.client,
        )

    def _quiet_s(self, way: Way, concurrency: int) -> float:
        """How long a server that lives may send nothing at all: longer the slower it was so far."""
        least = QUIET_SHARE * way.timeout_s * (COMPILING if self._compiles else 1.0)
        return min(way.timeout_s, max(least, SLOWER * concurrency * self._longest_s))


def answered(record: RequestRecord, question: Question, request: str) -> Answered:
    """A request's record, as far as the diagnosis needs it."""
    counts = record.acceptance
    steps = counts.steps if counts is not None else None
    return Answered(
        request=request,
        question=question.name,
        category=question.category,
        prompt_tokens=len(question.token_ids),
        token_ids=record.token_ids or (),
        counts=None if counts is None else msgspec.structs.replace(counts, steps=None),
        steps=steps if steps is not None else _chunks(record),
        sent_ns=record.sent_ns,
        error=record.error if record.status != "ok" else None,
    )


def _longest_wait_s(record: RequestRecord) -> float:
    """The longest that the server sent nothing of this answer; 0 where it sent none."""
    stamps = () if record.sent_ns is None else (record.sent_ns, *record.chunk_ns)
    return max((b - a for a, b in itertools.pairwise(stamps)), default=0) / 1e9


def _chunks(record: RequestRecord) -> tuple[int, ...] | None:
    """Accepted drafts a step by the chunks that came: every chunk after the first is a step.

    None where they do not add up to what the engine counted, as where it merged steps.
    """
    chunks, counts = record.chunk_tokens, record.acceptance
    if not chunks or any(tokens is None or tokens < 1 for tokens in chunks):
        return None
    steps = tuple(tokens - 1 for tokens in chunks[1:])
    if counts is not None and (len(steps), sum(steps)) != (counts.drafts, counts.accepted):
        return None
    return steps


@contextmanager
def serving(
    subject: Subject,
    folder: Path,
    *,
    traced: bool = True,
    access: Access | None = None,
    progress: Telling,
) -> Iterator[Server]:
    """The subject's engine; one that is started here is gone when the block ends.

    Its log, its trace and its small files go to a new folder in `folder`. Raises `EngineFailed`,
    `EngineUsageError`.
    """
    adapter = adapter_named(subject.engine)
    if subject.url is not None:
        access = access or Access()
        yield Server(adapter, Attached(subject.url, access.client), access)
        return
    place = _new_folder(folder)
    spec = spec_of(subject, free_port())
    trace: Path | None = None
    if traced and subject.engine in _ID_FIELDS:
        from engines.trace.launch import traced as with_trace

        trace = place / "trace"
        trace.mkdir()
        spec = with_trace(subject.engine, spec, trace)

    with started(adapter, spec, place, subject.startup_deadline_s, progress.stage) as process:
        process.wait_ready()
        if trace is not None:
            from engines.trace.launch import begin

            begin(subject.engine, process.base_url, trace)
        host = Launched(process)
        compiles = subject.device != "cpu"
        yield Server(adapter, host, Access(), trace=trace, compiles=compiles)
        host.check()


def spec_of(subject: Subject, port: int) -> ServeSpec:
    """What the subject asks its engine to serve."""
    return ServeSpec(
        target=Path(subject.target),
        served_name=SERVED,
        port=port,
        drafter=Path(subject.drafter),
        k=subject.k,
        dtype=subject.dtype,
        max_model_len=subject.max_model_len or context_of(Path(subject.target)),
        max_num_seqs=subject.max_num_seqs or SEQUENCES,
        kv_cache_gib=subject.kv_cache_gib,
        tensor_parallel=subject.tensor_parallel,
        device=subject.device,
        threads=subject.threads,
        trust_remote_code=subject.trust_remote_code,
        temperature=0.0,  # what it makes of one is to be seen: no adapter is to refuse it
        extra_args=subject.extra_args,
        extra_env=dict(subject.extra_env),
    )


def samples(subject: Subject) -> bool:
    """Whether the engine verifies at a temperature at all: SGLang on a CPU does not."""
    return not (subject.engine == "sglang" and subject.device == "cpu")


def context_of(target: Path) -> int:
    """The target's own context, at most `LONGEST_CONTEXT`."""
    from engines.capture.target import capture_target

    return min(LONGEST_CONTEXT, capture_target(target).max_positions)


def with_arguments(subject: Subject, *arguments: str, **env: str) -> Subject:
    """The same subject served with more arguments, behind its own."""
    return msgspec.structs.replace(
        subject,
        extra_args=(*subject.extra_args, *arguments),
        extra_env={**subject.extra_env, **env},
    )


def traces(
    rounds: Sequence[Asked], tell: Callable[[str], None] = lambda line: None
) -> dict[str, list[TraceStep]]:
    """The traced steps of these rounds' requests, by request; empty where nothing was traced.

    `tell` hears what of a trace cannot be read.
    """
    from engines.trace.read import read_trace

    wanted = {answer.request for asked in rounds for answer in asked.ok}
    found: dict[str, list[TraceStep]] = {}
    for folder in dict.fromkeys(asked.trace for asked in rounds if asked.trace is not None):
        told = read_trace(Path(folder), tell)
        found.update({request: steps for request, steps in told.items() if request in wanted})
    return found


def why_untraced(subject: Subject) -> str | None:
    """Why this engine writes no trace; None where it does."""
    if subject.url is not None:
        return "a server that runs already writes no trace: let the harness start the engine"
    if subject.engine not in _ID_FIELDS:
        return f"{one_line(subject.engine, 40)} writes no trace"
    return None


def _new_folder(folder: Path) -> Path:
    """A folder of this start's own below `folder`: a start that failed leaves its log."""
    for number in range(1, 10_000):
        place = folder / f"engine-{number}"
        try:
            place.mkdir(parents=True)
            return place.absolute()
        except FileExistsError:
            continue
    raise EngineFailed(f"{folder}: too many starts; remove the folder")
