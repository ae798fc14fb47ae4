"""The story of the doctor: what would fail on this machine, told before a GPU minute is spent."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from drafters.checkpoint import load_spec
from drafters.formats import text_config
from drafters.spec import DrafterError
from engines.arguments import check_arguments
from engines.base import EngineUsageError, ServeSpec
from engines.catalog import adapter as adapter_named
from engines.checkpoint import read_json
from engines.hardware import Gpu, Gpus, gpus_here
from engines.secret import command_without_secrets
from engines.vllm import CPU_KV_CACHE_GIB
from harness.doctoring import software
from harness.doctoring.checkpoint import (
    CheckpointFacts,
    check_sums,
    check_target,
    check_whole,
    read_checkpoint,
)
from harness.doctoring.finding import Finding, fail, gib, ok, ordered, unknown
from harness.doctoring.gpus import check_gpus
from harness.doctoring.machine import MachineFacts, check_machine, read_machine
from harness.doctoring.memory import (
    Model,
    Need,
    check_free,
    check_memory,
    drafter_config,
    need_of,
    parallel_of,
    usable_bytes,
)
from harness.doctoring.storage import RUN_BYTES, Room, check_read, check_room, read_speed, room
from harness.doctoring.telling import Tell, throttled
from harness.doctoring.text import text_of
from harness.errors import UsageError, one_line
from harness.plan.expand import load_points
from harness.plan.load import build
from harness.plan.schema import Plan
from harness.plan.serve import flag_arguments
from harness.prepare import (
    Prepared,
    Request,
    check_asked,
    choose_profile,
    environment_of,
    own_tokenizer,
    path_of,
    understanding,
)
from harness.prepare import check_tokenizer as has_tokenizer
from harness.records import VARIANTS, Variant

UNMADE_BYTES = 2**30
"""Room for the demo pair and the caches that an engine compiles into."""


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """What is looked at. `target` None: the demo pair, which is still to be made."""

    engine: str
    why: str
    plan: Plan
    target: Path | None
    drafter: Path | None
    out: Path


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All findings, worst first. `needs`: one device's memory, term by term, where known."""

    engine: str
    profile: str
    fails: bool
    findings: tuple[Finding, ...]
    needs: tuple[Need, ...]
    gpus: Gpus
    machine: MachineFacts

    def text(self) -> str:
        """The report as plain lines."""
        return text_of(f"doctor: {self.profile}, engine {self.engine}", self.findings, self.needs)


def doctor(request: Request, tell: Tell, *, checksums: bool = False) -> Report:
    """Look at the machine and at what the request's first engine would be asked to serve.

    `checksums`: read every byte whose checksum is known. Raises `UsageError` at a mistake of the
    user's: an unknown profile, a key that is none, a target that nobody named.
    """
    subject = subject_of(request)
    plan = subject.plan
    tell("reading the machine")
    machine = read_machine(Path(__file__))
    gpus, visible = gpus_here()
    target = None
    findings: list[Finding] = []
    if subject.target is not None:
        target = read_checkpoint(subject.target, throttled(tell))
        findings += check_target(target, checksums, tell)
        findings += check_disk(target, plan, machine, tell)
    if subject.drafter is not None and subject.drafter.is_dir():
        drafter = read_checkpoint(subject.drafter)
        findings += check_whole(drafter, "drafter.path")
        findings += check_sums(drafter, checksums, tell) if drafter.sums else ()
    wanted = _devices(subject)
    ranks = max(1, wanted)
    connections = most_under_way(plan) or 1024
    files = len(target.shards) if target else 0
    findings += _elsewhere(plan)
    findings += check_machine(machine, ranks=ranks, connections=connections, files=files)
    findings += check_gpus(gpus, visible, wanted)
    needs, fitting = check_fitting(subject, target, machine, visible)
    findings += fitting
    findings += check_room(rooms(subject))
    findings += check_engine(subject, gpus, visible, tell)
    findings += check_models(subject, tell)
    serving = plan.engine
    findings.append(software.check_ports(serving.host, serving.port, serving.reach))
    return Report(
        engine=subject.engine,
        profile=subject.why,
        fails=any(f.severity == "fail" for f in findings),
        findings=tuple(ordered(findings)),
        needs=needs,
        gpus=gpus,
        machine=machine,
    )


def subject_of(request: Request) -> Subject:
    """The plan, and where its models lie; nothing is made for it. Raises `UsageError`."""
    engine = request.engines[0]
    adapter_named(engine)
    if engine == "openai":
        raise UsageError("--engine openai: a server that runs already is not started from here; "
                         "ask the doctor on its machine for vllm or sglang")  # fmt: skip
    source, why = choose_profile(request, engine)
    plan = build(source, engine, list(request.sets))
    if plan.name == "attach":
        raise UsageError("--profile attach: servers that run already are not started from here; "
                         "ask the doctor on their machine for another profile")  # fmt: skip
    target, drafter = plan.target.path, plan.drafter.path
    pair = None
    if target is None:
        check_asked(request, plan, request.variants or VARIANTS)
        pair = _demo_pair(plan)
    return Subject(
        engine=engine,
        why=why,
        plan=plan,
        target=path_of(target) if target else pair / "target" if pair else None,
        drafter=path_of(drafter)
        if drafter
        else pair / f"drafter-{plan.demo.drafter}"
        if pair
        else None,
        out=request.out,
    )


def _demo_pair(plan: Plan) -> Path | None:
    """The demo pair's folder where it is made already; making it takes minutes, and is not ours."""
    from training.demo.pair import configs, find

    return find(*configs(plan.demo.target, plan.demo.drafter))


def spec_of(subject: Subject, variant: Variant | None = None) -> ServeSpec:
    """What the engine would be asked to serve; of the variants by default the one that needs more.

    Raises `UsageError` or `EngineUsageError`.
    """
    prepared = Prepared(
        name=subject.engine,
        adapter=adapter_named(subject.engine),
        plan=subject.plan,
        why=subject.why,
        target=subject.target,
        drafter=subject.drafter,
        urls={},
        prompts=[],
        cells=[],
    )
    return prepared.spec(variant or variants_of(subject)[-1])


def variants_of(subject: Subject) -> tuple[Variant, ...]:
    """Those that would be started."""
    return VARIANTS if subject.drafter else ("baseline",)


def _elsewhere(plan: Plan) -> Iterator[Finding]:
    """What is looked at is this machine, wherever the plan starts its engine."""
    if plan.engine.command_prefix:
        shown = command_without_secrets(plan.engine.command_prefix)
        program = one_line(shlex.join(shown), 120)
        yield unknown("host", "elsewhere", "engine.command_prefix", f"the engine is started by "
                      f"`{program}`; what is told here is of this machine and environment",
                      "where that is another one, run the doctor there")  # fmt: skip


def _devices(subject: Subject) -> int:
    """How many GPUs of this machine serve together; 0 for a CPU's plan."""
    engine = subject.plan.engine
    if engine.device == "cpu":
        return 0
    if subject.target is None:
        return engine.tensor_parallel
    try:
        parallel = parallel_of(spec_of(subject))
    except (UsageError, EngineUsageError):
        return engine.tensor_parallel
    nodes: int = engine.nodes  # a plan of several machines has its share here
    return max(1, parallel.tensor * parallel.pipeline // nodes)


def most_under_way(plan: Plan) -> int | None:
    """The most requests at once; None for an open loop, of which nobody knows it."""
    points = load_points(plan.load)
    if any(point.mode == "open" for point in points):
        return plan.load.max_concurrency
    return max(point.concurrency or 1 for point in points)


def check_disk(
    facts: CheckpointFacts, plan: Plan, machine: MachineFacts, tell: Tell
) -> Iterator[Finding]:
    """How fast the target is read, by the largest of its files."""
    largest = max(facts.shards, key=lambda shard: shard.size or 0, default=None)
    speed = None
    if largest is not None and largest.size:
        tell(f"reading from {facts.folder / largest.name}, at most 256 MiB or 2 s")
        speed = read_speed(facts.folder / largest.name)
    total = max(facts.bytes, facts.total or 0)
    deadline = plan.engine.startup_deadline_s
    yield from check_read(speed, total, deadline, machine.memory_usable)


def rooms(subject: Subject) -> list[Room]:
    """The folders that a run writes to."""
    import tempfile

    from training.demo.pair import cache_root

    return [
        room(subject.out, "the run's folder", RUN_BYTES),
        room(cache_root(), "the demo pair and caches", UNMADE_BYTES),
        room(Path(tempfile.gettempdir()), "temporary files", UNMADE_BYTES, least=10 * 2**20),
    ]


def check_fitting(
    subject: Subject,
    target: CheckpointFacts | None,
    machine: MachineFacts,
    visible: tuple[Gpu, ...],
) -> tuple[tuple[Need, ...], list[Finding]]:
    """What one device must hold, and whether each that is used can."""
    if target is None:
        return (), [unknown("memory", "fits", "memory", "the demo pair is still to be made",
                            "run `python -m training demo`, or a run makes it")]  # fmt: skip
    try:
        spec = spec_of(subject)
        if subject.engine == "vllm" and spec.device == "cpu" and spec.kv_cache_gib is None:
            spec = replace(spec, kv_cache_gib=CPU_KV_CACHE_GIB)  # as its adapter asks
        need = need_of(spec, *_models(subject, target), most_under_way(subject.plan))
    except (UsageError, EngineUsageError, DrafterError) as error:
        return (), [unknown("memory", "fits", str(target.folder), str(error))]
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        return (), [unknown("memory", "fits", str(target.folder / "config.json"),
                            f"the model's sizes cannot be read: {error!r}")]  # fmt: skip
    if not target.tensors and not target.total and not target.bytes:
        return (), [unknown("memory", "fits", str(target.folder), "the weights' size is not known")]
    if spec.device == "cpu":
        usable = machine.memory_usable
        return (need,), [check_memory(need, "host memory", usable, "may be taken")]
    return (need,), list(_on_gpus(subject.engine, spec, need, visible))


def _on_gpus(
    engine: str, spec: ServeSpec, need: Need, visible: tuple[Gpu, ...]
) -> Iterator[Finding]:
    parallel = parallel_of(spec)
    used = visible[: parallel.tensor * parallel.pipeline]
    if not used:
        yield check_memory(need, "GPU", None, "")
    for gpu in used:
        where = f"GPU {gpu.index}"
        if gpu.free_bytes is None or gpu.memory_bytes is None:
            yield check_memory(need, where, None, "")
            continue
        usable, rule = usable_bytes(engine, spec, gpu.free_bytes, gpu.memory_bytes)
        yield from check_free(engine, where, usable, gpu.free_bytes)
        yield check_memory(need, where, usable, rule)


def _models(subject: Subject, target: CheckpointFacts) -> tuple[Model, Model | None]:
    """The target and the drafter as far as their memory goes. Raises `DrafterError`."""
    config: dict[str, Any] = read_json(target.folder / "config.json")
    text = text_config(config)
    model = Model(
        config=text,
        tensors=target.tensors if target.whole else {},
        total=target.total or target.bytes,
        quantized="quantization_config" in config or "quantization_config" in text,
    )
    if subject.drafter is None:
        return model, None
    spec = load_spec(subject.drafter, target.folder)
    facts = read_checkpoint(subject.drafter)
    return model, Model(config=drafter_config(spec), tensors=facts.tensors, total=facts.bytes)


def check_engine(
    subject: Subject, gpus: Gpus, visible: tuple[Gpu, ...], tell: Tell
) -> Iterator[Finding]:
    """The engine's environment, its kernels for the GPUs at hand, and what it says itself."""
    device = subject.plan.engine.device
    name = environment_of(adapter_named(subject.engine), subject.plan)
    found = None
    if name is None:
        yield ok("engine", "environment", subject.engine, "embedded: it runs in this environment")
    else:
        tell(f"looking at the environment {name}")
        found = software.read_environment(name)
        yield from software.check_environment(found, gpus, on_gpus=device != "cpu")
    others = software.other_environments(name)
    for other in others:
        told = ", ".join(f"{n} {v}" for n, v in other.versions.items()) or other.problem or "there"
        yield ok("engine", "others", f"environment {other.name}", f"not needed here: {told}")
    for looked in [found] if found is not None else others:
        yield from software.check_kernels(looked, visible, tell)
    if found is not None and found.problem is not None:
        yield from _flags(subject)
    elif subject.target is not None:
        yield from _engine_says(subject)


def _flags(subject: Subject) -> Iterator[Finding]:
    """The plan's arguments held against the list that the tested engine gave, without it here."""
    engine = subject.plan.engine
    arguments = [a for variant in VARIANTS for a in flag_arguments(engine.flags, variant)]
    arguments += engine.extra_args
    try:
        check_arguments(subject.engine, arguments, None)
    except EngineUsageError as error:
        yield fail("engine", "plan", subject.engine, str(error))
    else:
        yield unknown("engine", "plan", subject.engine, "of the plan its arguments alone were "
                      "looked at: the engine knows each of them")  # fmt: skip


def _engine_says(subject: Subject) -> Iterator[Finding]:
    """What the engine's own adapter has against the plan, said once for both variants."""
    assert subject.target is not None
    said: dict[str, None] = {}
    for variant in variants_of(subject):
        try:
            with understanding(subject.target):
                adapter_named(subject.engine).check(spec_of(subject, variant))
        except (UsageError, EngineUsageError) as error:
            said[str(error)] = None
    for text in said:
        yield fail("engine", "plan", subject.engine, text)
    if not said:
        yield ok("engine", "plan", subject.engine, "it can be asked to serve this plan")


def check_tokenizer(subject: Subject, target: Path) -> Iterator[Finding]:
    """The target's tokenizer and chat template, unless the plan takes one from elsewhere."""
    plan = subject.plan
    given = own_tokenizer(plan.engine, variants_of(subject))
    if given is not None:
        yield unknown("models", "tokenizer", given, "the engine is given one of its own, which was "
                      "not looked at")  # fmt: skip
        return
    try:
        has_tokenizer(target)
    except UsageError as error:
        yield fail("models", "tokenizer", str(target), str(error))
        return
    chat = plan.workload.endpoint == "chat"
    yield from software.check_tokenizer(target, plan.engine.trust_remote_code, chat)


def check_models(subject: Subject, tell: Tell) -> Iterator[Finding]:
    """The tokenizer, the chat template, and the drafter."""
    target, plan = subject.target, subject.plan
    if target is None:
        yield unknown(
            "models",
            "demo_pair",
            f"demo-{plan.demo.target}",
            "it is still to be made: the first run does it, in minutes",
            "run `python -m training demo`",
        )
        return
    if (target / "config.json").is_file():
        tell("loading the tokenizer")
        yield from check_tokenizer(subject, target)
    if subject.drafter is None:
        yield unknown(
            "models",
            "drafter",
            "drafter.path",
            "not set: nothing speculative was looked at",
            "set drafter.path, or run with --variants baseline",
        )
        return
    if not (target / "config.json").is_file():
        yield unknown("models", "drafter", str(subject.drafter), "not held against the target, "
                      "which has no config.json")  # fmt: skip
        return
    tell(f"validating the drafter {subject.drafter}")
    watched = throttled(tell)
    try:
        with understanding(subject.drafter, target):
            yield from software.check_drafter(
                subject.drafter,
                target,
                subject.engine,
                lambda name, size: watched(f"drafter: {name} ({gib(size)})"),
            )
    except UsageError as error:
        yield fail("models", "drafter", str(subject.drafter), str(error))
