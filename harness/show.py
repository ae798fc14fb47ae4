"""The story of `engines show`: the exact command a profile makes, with the reason of each word."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from engines.arguments import SUPPORTED, check_arguments, flag_name
from engines.base import Adapter, EngineUsageError, Launch, ServeSpec
from engines.catalog import adapter as adapter_named
from engines.install import engine_python, environments_root
from engines.reasons import REASONS
from engines.vllm import SPECULATIVE_CONFIG
from harness.choose import check_engine_parts
from harness.errors import UsageError, one_line
from harness.plan.load import build, read_profile
from harness.plan.schema import ExpectSection, Plan
from harness.plan.serve import chosen, most_sequences, serve_spec
from harness.plan.strict import known_keys
from harness.prepare import LONGEST_CONTEXT, context_of, path_of
from harness.records import VARIANTS, Variant

PORT = 8000
WIDTH = 100
NOWHERE = Path("/path/to")
"""Stands for the folder of a checkpoint that nobody named."""


class Words(msgspec.Struct, frozen=True, kw_only=True):
    """One argument with its value, or one variable; and why it is there."""

    words: tuple[str, ...]
    why: str
    source: str | None = None


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """What starts one variant on one machine. `program`: the words before the first argument."""

    variant: Variant
    node: int
    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str | None
    program: tuple[str, ...]
    arguments: tuple[Words, ...]
    variables: tuple[Words, ...]


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """What `engines show --json` prints. `versions`: those of the engine that are tested."""

    profile: str
    description: str
    engine: str
    versions: tuple[str, ...]
    environment: str | None
    notes: tuple[str, ...]
    commands: tuple[Command, ...]
    expect: ExpectSection
    plan: Plan


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where the models lie. `there`: they can be read here, and the drafter translated."""

    target: Path
    drafter: Path
    there: bool
    notes: tuple[str, ...]


def show(
    profile: str,
    engine: str,
    sets: Sequence[str],
    variants: tuple[Variant, ...] = VARIANTS,
    node: int | None = None,
) -> Shown:
    """The commands of a profile, for each variant and machine. Raises `UsageError`."""
    adapter = adapter_named(engine)
    plan = plan_of(profile, engine, sets)
    place = place_of(plan, engine)
    nodes = range(plan.engine.nodes) if node is None else (node,)
    if any(n >= plan.engine.nodes for n in nodes):
        raise UsageError(f"--node {node}: the machines are numbered 0 to {plan.engine.nodes - 1}")
    specs = [(v, n, _spec(plan, v, n, place)) for v in variants for n in nodes]
    environment = adapter.environment(specs[0][2])
    python, missing = _python(environment)
    for _, _, spec in specs if engine in SUPPORTED else ():
        check_arguments(engine, spec.extra_args, python)
    commands = [
        _command(plan, adapter, v, dataclasses.replace(spec, python=python)) for v, n, spec in specs
    ]
    return Shown(
        profile=plan.name,
        description=plan.description,
        engine=engine,
        versions=SUPPORTED.get(engine, ()),
        environment=environment,
        notes=(*place.notes, *([missing] if missing else [])),
        commands=tuple(commands),
        expect=plan.expect,
        plan=plan,
    )


def plan_of(profile: str, engine: str, sets: Sequence[str]) -> Plan:
    """The profile's plan for an engine, as a run would read it. Raises `UsageError`."""
    source = read_profile(profile)
    check_engine_parts(source)
    return build(source, engine, list(sets))


def place_of(plan: Plan, engine: str) -> Place:
    """Where the plan's models lie; a public model that nobody has named a folder for: nowhere."""
    if engine == "openai" or plan.name == "attach":
        raise UsageError(
            "nothing is started: the servers run already; `--plan` shows the profile's plan"
        )
    if plan.target.path is None and plan.target.model is None:
        return _demo(plan)
    notes: list[str] = []
    target = _folder(plan.target.path, plan.target.model, "target", notes)
    drafter = _folder(plan.drafter.path, plan.drafter.model, "drafter", notes)
    there = all((folder / "config.json").is_file() for folder in (target, drafter))
    if not there and not notes:
        notes.append("the checkpoints are not on this machine: they are not looked at")
    if not there:
        notes.append(
            "at a run the drafter is written as the engine reads it; by hand: python -m drafters "
            "convert"
        )
    return Place(target=target, drafter=drafter, there=there, notes=tuple(notes))


def _demo(plan: Plan) -> Place:
    from training.demo.pair import configs, find

    if plan.name == "model":
        raise UsageError(
            "profile model: target.path is not set; give --set target.path=DIR and "
            "--set drafter.path=DIR"
        )
    pair = find(*configs(plan.demo.target, plan.demo.drafter))
    if pair is None:
        raise UsageError(
            f"the demo pair is still to be made: run `python -m training demo --target "
            f"{plan.demo.target} --drafter {plan.demo.drafter}`; `--plan` shows the plan as it is"
        )
    drafter = pair / f"drafter-{plan.demo.drafter}"
    if plan.drafter.path is not None:
        drafter = path_of(plan.drafter.path)
    return Place(target=pair / "target", drafter=drafter, there=True, notes=())


def _folder(path: str | None, model: str | None, part: str, notes: list[str]) -> Path:
    if path is not None:
        return path_of(path)
    of = f"of {model}" if model else "of a drafter trained for this target"
    notes.append(f"{part}.path is not set: give --set {part}.path=DIR, the folder {of}")
    return NOWHERE / (model.rpartition("/")[2] if model else f"eagle3-{part}")


def _spec(plan: Plan, variant: Variant, node: int, place: Place) -> ServeSpec:
    length = plan.engine.max_model_len
    if length is None:
        length = context_of(place.target) if place.there else LONGEST_CONTEXT
    spec = serve_spec(
        plan,
        variant,
        target=place.target,
        drafter=place.drafter,
        port=plan.engine.port or PORT,
        max_model_len=length,
        max_num_seqs=most_sequences(plan),
    )
    return dataclasses.replace(spec, node_rank=node, as_given=not place.there)


def _python(environment: str | None) -> tuple[Path | None, str | None]:
    """The environment's Python, or where it would be and what to do for it."""
    if environment is None:
        return None, None
    try:
        return engine_python(environment), None
    except EngineUsageError as error:
        return environments_root() / ".venvs" / environment / "bin" / "python", str(error)


def _command(plan: Plan, adapter: Adapter, variant: Variant, spec: ServeSpec) -> Command:
    launch = adapter.launch(spec, _workdir(adapter.name, spec))
    program = next((i for i, w in enumerate(launch.argv) if w.startswith("--")), len(launch.argv))
    return Command(
        variant=variant,
        node=spec.node_rank,
        argv=launch.argv,
        env=dict(launch.env),
        cwd=None if launch.cwd is None else str(launch.cwd),
        program=launch.argv[:program],
        arguments=tuple(_arguments(plan, adapter.name, variant, launch.argv[program:])),
        variables=tuple(_variables(plan, adapter.name, variant, launch)),
    )


def _workdir(engine: str, spec: ServeSpec) -> Path:
    """Where the drafter is written as the engine reads it: the same place for the same pair."""
    from training.demo.pair import cache_root

    key = hashlib.sha256(f"{engine}\0{spec.target}\0{spec.drafter}".encode()).hexdigest()[:12]
    folder = cache_root() / "shown" / key
    if spec.drafter is not None and not spec.as_given:
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _arguments(plan: Plan, engine: str, variant: Variant, argv: Sequence[str]) -> Iterator[Words]:
    groups: list[list[str]] = []
    for word in argv:
        if flag_name(word) is not None or not groups:
            groups.append([])
        groups[-1].append(word)
    names = [flag_name(group[0]) or group[0] for group in groups]
    theirs = {flag_name(word) for word in plan.engine.extra_args}
    flags = chosen(plan.engine.flags, variant)
    for place, (name, group) in enumerate(zip(names, groups, strict=True)):
        if name in names[place + 1 :]:
            why, source = "the same further down wins", None
        elif name in theirs:
            why, source = "asked for in engine.extra_args", None
        elif name in flags:
            why, source = flags[name].why, flags[name].source
        else:
            why, source = _own(plan, engine, name), None
            if name in SPECULATIVE_CONFIG:
                parts = [(n, f) for n, f in flags.items() if n.partition(".")[0] == name]
                why = "; ".join([why, *(f"{n.partition('.')[2]}: {f.why}" for n, f in parts)])
                source = "; ".join(f.source for _, f in parts if f.source) or None
        yield Words(words=tuple(group), why=why, source=source)


def _variables(plan: Plan, engine: str, variant: Variant, launch: Launch) -> Iterator[Words]:
    env = chosen(plan.engine.env, variant)
    for name, value in launch.env.items():
        if name in plan.engine.extra_env:
            why, source = "asked for in engine.extra_env", None
        elif name in env:
            why, source = env[name].why, env[name].source
        else:
            why, source = _own(plan, engine, name), None
        yield Words(words=(name, value), why=why, source=source)


def _own(plan: Plan, engine: str, name: str) -> str:
    """The reason of what the adapter writes by itself; the profile's, where it has one."""
    reason = REASONS[engine].get(name)
    if reason is None:
        return ""
    return plan.why.get(reason.key or "", reason.text)


def render_text(shown: Shown) -> str:
    """The commands as text that a shell (bash) runs as it stands."""
    head = f"{shown.profile} on {shown.engine} {', '.join(shown.versions)}".rstrip()
    lines = [*_comment(f"{head}: {shown.description}"), *_comments(shown.notes)]
    for command in shown.commands:
        lines += ["", *_script(command, of=shown.plan.engine.nodes)]
    return "\n".join([*lines, *_rest(shown)]) + "\n"


def _script(command: Command, of: int) -> Iterator[str]:
    where = f", machine {command.node} of {of}" if of > 1 else ""
    yield f"# {command.variant}{where}"
    yield "("
    if command.cwd is not None:
        yield f"  cd {shlex.quote(command.cwd)}"
    for variable in command.variables:
        name, value = variable.words
        yield from _line(f"  export {name}={shlex.quote(value)}", variable)
    yield "  command=("
    yield f"    {shlex.join(command.program)}"
    for argument in command.arguments:
        yield from _line(f"    {shlex.join(argument.words)}", argument)
    yield "  )"
    yield '  exec "${command[@]}"'
    yield ")"


def _line(code: str, words: Words) -> Iterator[str]:
    """The code with its reason behind it, or above it where the line would be too long."""
    reason = one_line(words.why, 1000) + (f" [{one_line(words.source)}]" if words.source else "")
    if not reason:
        yield code
    elif len(code) + len(reason) + 4 <= WIDTH and "\n" not in code:
        yield f"{code}  # {reason}"
    else:
        indent = code[: len(code) - len(code.lstrip())]
        yield from _comment(reason, indent)
        yield code


def _rest(shown: Shown) -> Iterator[str]:
    """What is no word of a command: acceptance to expect, and keys with a reason of their own."""
    if shown.expect.acceptance:
        yield ""
        yield "# acceptance length to expect, tokens a verify step:"
        for f in shown.expect.acceptance:
            yield from _comment(f"{f.dataset}, k = {f.k}: {f.length:g} ({f.source})", hang="    ")
    used = {r.key for r in REASONS.get(shown.engine, {}).values()}
    plain = msgspec.to_builtins(shown.plan)
    other = {key: why for key, why in shown.plan.why.items() if key not in used}
    if other:
        yield ""
        yield "# other keys of the plan:"
    for key, why in other.items():
        yield from _comment(f"{key} = {json.dumps(_value(plain, key))}: {why}", hang="    ")


def _value(plain: Mapping[str, object], key: str) -> object:
    assert key in known_keys()
    value: object = plain
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _comments(texts: Sequence[str]) -> Iterator[str]:
    for text in texts:
        yield from _comment(text)


def _comment(text: str, indent: str = "", hang: str = "") -> list[str]:
    return textwrap.wrap(
        one_line(text, 2000),
        WIDTH,
        initial_indent=f"{indent}# ",
        subsequent_indent=f"{indent}# {hang}",
        break_long_words=False,
        break_on_hyphens=False,
    )
