"""From the command line, or a stored run, to what is diagnosed: a subject and prompts in tokens."""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from harness.analyse.acceptance import estimates, pooled_acceptance
from harness.attach import prepare_all, served_by
from harness.diagnose.experiments.asking import TIMEOUT_S, Access
from harness.diagnose.experiments.work import Options
from harness.diagnose.folders import Identity, of_folder, unfinished
from harness.diagnose.records import Length, Subject
from harness.diagnose.story import identity_of
from harness.errors import UsageError
from harness.load.prompts.prompt import Prompt, said_texts
from harness.load.prompts.tokens import TargetTokenizer
from harness.load.streaming.origin import Origin
from harness.measure.store import RunFolder
from harness.measure.table import RequestTable
from harness.prepare import Prepared, Request, api_key, check_checkpoint, path_of
from harness.progress import Progress
from harness.run import request_in
from harness.stored import read_run
from training.samples import read_samples, samples_in

PROMPTS = 12
FEWEST_TOKENS = 8
"""Of an answer that still fits the context."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be diagnosed, and how. `said`: lines to be told before it begins."""

    subject: Subject
    prompts: tuple[tuple[int, ...], ...]
    options: Options
    out: Path
    said: tuple[str, ...] = ()


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The command line's own words, beside the plan's."""

    run: Path | None = None
    request: Request
    prompts: int = PROMPTS
    trained_target: Path | None = None
    trained_on: Path | None = None
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    thorough: bool = False


def case_of(asked: Asked) -> Case:
    """Everything that can be wrong beforehand is raised here: `UsageError`, `EngineUsageError`."""
    for option, path in (
        ("--trained-target", asked.trained_target),
        ("--trained-on", asked.trained_on),
    ):
        if path is not None and not path.is_dir():
            raise UsageError(f"{option} {path}: no such folder")
    if asked.trained_target is not None:
        check_checkpoint(asked.trained_target, "--trained-target")
    if asked.trained_on is not None:
        _check_samples(asked.trained_on)
    request, in_run, cost = asked.request, None, None
    said: list[str] = []
    if asked.run is not None:
        request, name = _request_of(asked.run, asked.request)
        in_run, cost = _measured(asked.run, name)
        said.append(f"run {asked.run}: {name}" + _told(in_run))
    if not request.engines:
        request, line = _recognised(request)
        said.append(line)
    prepared = prepare_all(request)[0]
    subject = _subject(prepared, asked)
    prompts, options = _prompts(prepared, subject, asked.prompts)
    subject = msgspec.structs.replace(subject, dataset=_dataset(prepared), prompts=len(prompts))
    options = msgspec.structs.replace(
        options,
        only=asked.only,
        skip=asked.skip,
        in_run=in_run,
        step_cost=cost,
        thorough=asked.thorough,
    )
    served = f"target {subject.target}, drafter {subject.drafter}, k = {subject.k}"
    said.insert(0, f"{prepared.name}: {prepared.why}; {served}, {subject.asked}")
    return Case(
        subject=subject, prompts=prompts, options=options, out=request.out, said=tuple(said)
    )


def _check_samples(folder: Path) -> None:
    """Raise `UsageError` for training samples of which one cannot be read, or none is kept."""
    try:
        first = next(read_samples(samples_in(folder)), None)  # every line is read before the first
    except UsageError as error:
        raise UsageError(f"--trained-on {folder}: {error}") from None
    if first is None:
        raise UsageError(
            f"--trained-on {folder}: holds no samples (samples-*.jsonl); give the "
            "folder that `python -m training generate` wrote them into"
        )


def folder_for(case: Case, progress: Progress, mending: Path | None = None) -> Path:
    """The folder of a diagnosis of this case that was cut short, else a new one.

    `mending`: a diagnosis whose mending was cut short. Raises `UsageError` where another process
    is making this very one.
    """
    root = case.out / "diagnose"
    wanted = identity_of(case.subject, case.prompts, case.options)
    for folder, known in (*of_folder(mending), *unfinished(root)):
        if not _same_question(known, wanted):
            continue
        changed, by = known.differences(wanted), folder.held_by()
        if by is not None and not changed:
            raise UsageError(f"{folder.path}: {by} is making this very diagnosis; wait for its end")
        if by is not None:
            progress.say(f"{folder.path} is of {by}, which still runs; {', '.join(changed)} differ")
            continue
        if not changed:
            progress.say(f"going on with {folder.path}")
            return folder.path
        progress.say(
            f"{folder.path} was cut short, but {', '.join(changed)} changed since: begun anew"
        )
        break
    now = datetime.now(UTC)
    return root / f"{now:%Y%m%d-%H%M%S}-{case.subject.engine}-{secrets.token_hex(2)}"


def _same_question(known: Identity, wanted: Identity) -> bool:
    """Whether a folder is of the same target, drafter and engine, whatever else is otherwise."""
    ours, theirs = wanted.subject, known.subject
    return (ours.engine, ours.target, ours.drafter, ours.url) == (
        *(theirs.engine, theirs.target, theirs.drafter, theirs.url),
    )


def _request_of(run: Path, given: Request) -> tuple[Request, str]:
    """The stored run's own request, of one engine; `--set` of now is laid on. And the engine."""
    folder = RunFolder(run.resolve())
    manifest = folder.manifest()
    stored = request_in(folder, manifest)
    engines = [c.engine for c in manifest.cells if c.variant == "speculative"]
    wanted = given.engines[0] if given.engines else None
    if not engines:
        raise UsageError(f"{run}: no speculative variant was measured in it: nothing was drafted")
    name = wanted or engines[0]
    if name not in engines:
        raise UsageError(
            f"--engine {name}: {run} has speculative cells of {', '.join(set(engines))}"
        )
    urls = given.urls or stored.urls
    return msgspec.structs.replace(
        stored,
        engines=(name,),
        urls={k: v for k, v in urls.items() if k != "baseline"},
        sets=(*stored.sets, *given.sets),
        variants=("speculative",),
        out=given.out,
        command=given.command,
    ), name


def _recognised(request: Request) -> tuple[Request, str]:
    """The request, of the engine that answers at its URL; and what is told of that."""
    url = Origin.several(next(iter(request.urls.values())))[0].root
    name = served_by(request, url)
    if name is not None:
        return msgspec.structs.replace(request, engines=(name,)), (
            f"--url {url}: it says that it is {name}; --engine names another"
        )
    return msgspec.structs.replace(request, engines=("openai",)), (
        f"--url {url}: does not say which engine it is, so that its layer ids and flags are not "
        "judged as an engine reads them; name it with --engine"
    )


def _measured(run: Path, engine: str) -> tuple[Length | None, float | None]:
    """The stored run's acceptance, and what a verify step costs in plain decode steps."""
    data = read_run(RunFolder(run.resolve()))
    cells = [c for c in data.select(engine, "speculative") if c.ok]
    if not cells:
        return None, None
    found = estimates(RequestTable.join([c.ok for c in cells]))
    pooled = pooled_acceptance(cells)
    if pooled is None:
        return None, None
    counts = pooled.sources[pooled.source]
    assert counts is not None
    length = Length(
        counts=msgspec.structs.replace(counts, steps=None),
        prompts=found.clusters if found is not None else 0,
        length=pooled.length,
        low=found.length.low if found is not None else None,
        high=found.length.high if found is not None else None,
    )
    return length, _step_cost(run, engine, pooled.length)


def _step_cost(run: Path, engine: str, length: float | None) -> float | None:
    """Acceptance length over speed-up, at the load with the fewest requests at once."""
    try:
        summary = RunFolder(run.resolve()).summary()
    except UsageError:
        return None
    ratios = [
        c.ratio
        for c in summary.comparisons
        if c.metric == "output_tokens_per_s" and engine in str(c.candidate) and c.ratio
    ]
    return length / ratios[0] if ratios and length else None


def _told(in_run: Length | None) -> str:
    if in_run is None or in_run.length is None:
        return ""
    return f", {in_run.length:.2f} tokens a verify step ({in_run.counts.drafts} steps)"


def _subject(prepared: Prepared, asked: Asked) -> Subject:
    plan = prepared.plan
    engine = plan.engine
    if engine.command_prefix:
        raise UsageError(
            "engine.command_prefix: a diagnosis reads the engine's own files; run it on the "
            "machine that serves"
        )
    target = prepared.target or _needed(plan.target.path, "target.path")
    drafter = prepared.drafter or _needed(plan.drafter.path, "drafter.path")
    spec = None if prepared.attached else prepared.spec("speculative")
    return Subject(
        engine=prepared.name,
        target=str(target),
        drafter=str(drafter),
        k=plan.speculative.k,
        dtype=engine.dtype,
        device=engine.device,
        max_model_len=engine.max_model_len or (spec.max_model_len if spec else None),
        max_num_seqs=engine.max_num_seqs or (spec.max_num_seqs if spec else None),
        temperature=plan.sampling.temperature,
        tensor_parallel=engine.tensor_parallel,
        extra_args=tuple(spec.extra_args) if spec else (),
        extra_env=dict(spec.extra_env) if spec else {},
        kv_cache_gib=engine.kv_cache_gib,
        threads=engine.threads,
        trust_remote_code=engine.trust_remote_code,
        startup_deadline_s=engine.startup_deadline_s,
        url=next(iter(prepared.urls.values())).partition(",")[0] if prepared.urls else None,
        run=str(asked.run.resolve()) if asked.run else None,
        trained_target=str(asked.trained_target.resolve()) if asked.trained_target else None,
        trained_on=str(asked.trained_on.resolve()) if asked.trained_on else None,
    )


def _needed(path: str | None, key: str) -> Path:
    """A folder that a diagnosis reads, though the server runs already."""
    if path is None:
        raise UsageError(
            f"{key}: not set; a server's checkpoint is held against what it computes: give "
            f"--set {key}=DIR"
        )
    folder = path_of(path)
    check_checkpoint(folder, key)
    return folder


def _dataset(prepared: Prepared) -> str:
    """Where the prompts come from: a trace may hold them, and the data set then says nothing."""
    plan = prepared.plan
    of_trace = plan.load.trace is not None and prepared.prompts[0].position is not None
    return str(plan.load.trace) if of_trace else plan.workload.dataset


Ids = tuple[tuple[int, ...], ...]


def _prompts(prepared: Prepared, subject: Subject, wanted: int) -> tuple[Ids, Options]:
    """So many of the plan's prompts as token ids, every category in turn; and the other form."""
    workload = prepared.plan.workload
    tokens = TargetTokenizer(Path(subject.target), trust_remote_code=subject.trust_remote_code)
    context = subject.max_model_len or 4096
    chat = workload.endpoint == "chat"
    ids: list[tuple[int, ...]] = []
    others: list[tuple[int, ...]] = []
    categories: list[str | None] = []
    for prompt in _in_turn(prepared.prompts):
        own, other = _both_forms(prompt, tokens, chat, workload.chat_template_kwargs)
        if not own or len(own) + FEWEST_TOKENS + subject.k > context:
            continue
        ids.append(own)
        others.append(other or own)
        categories.append(prompt.category)
        if len(ids) == wanted:
            break
    if not ids:
        raise UsageError(f"workload.dataset={workload.dataset}: no prompt fits {context} tokens")
    differ = all(a != b for a, b in zip(ids, others, strict=True))
    access = None
    if prepared.attached:
        access = Access(
            model=prepared.model or "", api_key=api_key(prepared.plan), client=prepared.plan.client
        )
    longest = max(map(len, ids))
    options = Options(
        categories=tuple(categories),
        form="templated" if chat else "raw",
        other_form=tuple(others) if differ else (),
        access=access,
        timeout_s=max(TIMEOUT_S, prepared.plan.load.timeout_s),
        max_tokens=max(FEWEST_TOKENS, min(Options().max_tokens, context - longest - subject.k - 1)),
    )
    return tuple(ids), options


def _in_turn(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Every category's first, then every category's second, and so on."""
    seen: dict[str | None, int] = defaultdict(int)
    ranked = []
    for at, prompt in enumerate(prompts):
        ranked.append((seen[prompt.category], at, prompt))
        seen[prompt.category] += 1
    return [prompt for _, _, prompt in sorted(ranked, key=lambda r: r[:2])]


def _both_forms(
    prompt: Prompt, tokens: TargetTokenizer, chat: bool, kwargs: dict[str, object]
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """A prompt's tokens as they are served; and raw where that is templated, or the reverse."""
    if prompt.token_ids is not None:
        return tuple(prompt.token_ids), None
    text = said_texts(prompt)
    messages = prompt.messages or ({"role": "user", "content": prompt.text},)
    raw = tuple(tokens.encode(text))
    try:
        templated: tuple[int, ...] | None = tuple(tokens.chat_ids(messages, kwargs))
    except UsageError:
        if chat:
            raise
        templated = None
    return (templated or (), raw) if chat else (raw, templated)
