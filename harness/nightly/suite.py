"""The suite file of the nightly guard: what is measured each night, and what it is held to."""

from __future__ import annotations

import hashlib
import math
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from harness.errors import UsageError, one_line
from harness.plan.load import build, is_path, read_profile, read_toml
from harness.plan.schema import Section
from harness.plan.strict import decode, nearest
from harness.records import VARIANTS

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
"""Of a suite and of an entry: it becomes a folder's name and a part of a series' name."""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

WATCHED = (
    *("output_tokens_per_s", "acceptance_length", "ttft_s.mean", "tpot_s.mean", "e2el_s.mean"),
    "startup_s",
)

Minutes = Annotated[float, msgspec.Meta(gt=0, le=100_000)]
Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]


class Gate(Section, frozen=True, kw_only=True):
    """What one figure of an entry must keep.

    `metric`: a name of the history, such as `output_tokens_per_s`, `ttft_s.p50`,
    `acceptance_length`, `startup_s`. `min` and `max` are absolute, in the metric's own unit;
    `tolerance` is relative to the pinned baseline: by how much it may be worse. `variant` and
    `load` (such as "c8") narrow it; None: wherever the figure exists.
    """

    metric: str
    variant: Literal["baseline", "speculative", "ratio"] | None = None
    load: str | None = None
    min: float | None = None
    max: float | None = None
    tolerance: Share | None = None


class Entry(Section, frozen=True, kw_only=True):
    """One run of the suite, as `python -m harness run` takes it.

    `profile`: a name, or a TOML file seen from the suite's folder. `workload` is short for
    `workload.dataset` in `set`. `url`: servers that run already. `minutes`: how long it is
    expected to take; None: as long as it took before. `priority`: one step is worth ten points of
    the order.
    """

    name: str
    engine: str | None = None
    profile: str | None = None
    workload: str | None = None
    set: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    url: tuple[str, ...] = ()
    gates: tuple[Gate, ...] = ()
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] = 0
    minutes: Minutes | None = None


class Webhook(Section, frozen=True, kw_only=True):
    """Who is told. The address and the secret are read from the named variables only.

    `format`: `generic` posts the findings as JSON, `slack` posts {"text": …}. `when`: `always`, or
    only when the night ended otherwise than well.
    """

    url_env: str
    secret_env: str | None = None
    format: Literal["generic", "slack"] = "generic"
    when: Literal["always", "failure"] = "failure"
    retries: Annotated[int, msgspec.Meta(ge=0, le=20)] = 3
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=300)] = 10.0


class Control(Section, frozen=True, kw_only=True):
    """A version that is known to be good, measured in turn with a suspect on the same night.

    `root`: a checkout of the harness, seen from the suite's folder; None: this one. `env`:
    variables of its environment, such as SPEC_HARNESS_PYTHON_VLLM for another vLLM.
    """

    root: str | None = None
    env: dict[str, str] = msgspec.field(default_factory=dict)


class Suite(Section, frozen=True, kw_only=True):
    """A whole suite. `gates` hold for every entry, before its own.

    `results`: the results root, seen from the folder that the command is given in. `watch`: the
    metrics whose series are watched for changes. `confirm_blocks`: how many fresh blocks (starts of
    the engine) a suspect is measured by before it is looked at again; `confirm_reserve`: the share
    of the time budget that is kept for them. `min_effect`: a change smaller than this is no news.
    `suspect`: a night whose p-value is below is measured again. `learn`: nights that a series
    needs before its own history judges it. None of these: as `analyse.series` has it.
    `keep_nights`: how many nights back it is looked at.
    """

    name: str = ""
    description: str = ""
    results: str = "results"
    time_budget_min: Minutes | None = None
    watch: tuple[str, ...] = WATCHED
    confirm_blocks: Annotated[int, msgspec.Meta(ge=2, le=100)] | None = None
    confirm_reserve: Annotated[float, msgspec.Meta(ge=0, le=0.9)] = 0.2
    min_effect: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None
    suspect: Annotated[float, msgspec.Meta(gt=0, le=0.5)] | None = None
    learn: Annotated[int, msgspec.Meta(ge=3, le=365)] | None = None
    keep_nights: Annotated[int, msgspec.Meta(ge=5, le=3650)] = 180
    gates: tuple[Gate, ...] = ()
    webhook: Webhook | None = None
    control: Control | None = None
    entries: tuple[Entry, ...] = ()


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """A suite and the file that it was read from."""

    suite: Suite
    path: Path

    @property
    def results(self) -> Path:
        """The results root."""
        return Path(self.suite.results)

    @property
    def accepted(self) -> Path:
        """Where accepted changes are recorded: beside the suite file, to be committed with it."""
        return self.path.with_suffix(".accepted.toml")

    def entry(self, name: str) -> Entry:
        """The entry of that name. Raises `UsageError`."""
        for entry in self.suite.entries:
            if entry.name == name:
                return entry
        names = [e.name for e in self.suite.entries]
        raise UsageError(f"{self.path}: no entry '{name}'{hint(name, names)}")

    def gates(self, entry: Entry) -> tuple[Gate, ...]:
        """What the entry is held to."""
        return (*self.suite.gates, *entry.gates)


def read_suite(path: Path) -> Loaded:
    """Read a suite file. Raises `UsageError`: one line with the file, the key, the nearest one."""
    table = read_toml(path, f"--suite {path}")
    entries = _tables(table, "entries", str(path))
    gates = _tables(table, "gates", str(path))
    check_keys(table, Suite, str(path))
    for name, section in (("webhook", Webhook), ("control", Control)):
        if isinstance(table.get(name), dict):
            check_keys(table[name], section, f"{path}, [{name}]")
    plain = {k: v for k, v in table.items() if k not in ("entries", "gates")}
    suite = msgspec.structs.replace(
        decode(plain, str(path), Suite),
        entries=tuple(
            _entry(e, f"{path}, [[entries]] {_called(e, i)}") for i, e in enumerate(entries)
        ),
        gates=tuple(_gate(g, f"{path}, [[gates]] {i + 1}") for i, g in enumerate(gates)),
    )
    if not suite.name:
        suite = msgspec.structs.replace(suite, name=path.stem)
    loaded = Loaded(suite=suite, path=path)
    _check_names(loaded)
    _check_metrics(loaded)
    return loaded


def check_plans(loaded: Loaded, engines: list[str]) -> None:
    """Raise `UsageError` at the first entry whose engine, profile or `set` cannot be.

    `engines`: the names that there are.
    """
    _check_control(loaded)
    for entry in loaded.suite.entries:
        where = f"{loaded.path}, entry '{entry.name}'"
        if entry.engine is not None and entry.engine not in engines:
            near = hint(entry.engine, engines)
            raise UsageError(f"{where}: no engine '{one_line(entry.engine, 40)}'{near}")
        try:
            profile = profile_of(loaded, entry)
            if profile is not None:
                build(
                    read_profile(profile), entry.engine or "reference", list(sets_of(loaded, entry))
                )
            elif entry.set or entry.workload:
                demo = read_profile("demo")
                build(demo, "reference", list(sets_of(loaded, entry)))
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None


def control_root(loaded: Loaded, control: Control) -> Path | None:
    """The checkout that the good version is run from; None: this one."""
    return None if control.root is None else (loaded.path.parent / control.root).resolve()


def _check_control(loaded: Loaded) -> None:
    """A good version that cannot be called would be noticed at the first suspect, hours later."""
    control = loaded.suite.control
    if control is None:
        return
    root = control_root(loaded, control)
    if root is not None and not (root / "harness" / "__main__.py").is_file():
        raise UsageError(f"{loaded.path}, [control]: root: {root} is no checkout of the harness")
    for name in control.env:
        if not VARIABLE.fullmatch(name):
            raise UsageError(
                f"{loaded.path}, [control]: env: '{one_line(name, 40)}' is no name of a variable"
            )


def profile_of(loaded: Loaded, entry: Entry) -> str | None:
    """The entry's profile as `--profile` takes it: a file is seen from the suite's folder."""
    if entry.profile is None or not is_path(entry.profile):
        return entry.profile
    return str((loaded.path.parent / entry.profile).resolve())


def sets_of(loaded: Loaded, entry: Entry) -> tuple[str, ...]:
    """The entry's overrides as `--set` items; a workload's file is seen from the suite's folder."""
    if entry.workload is None:
        return entry.set
    file = loaded.path.parent / entry.workload
    workload = str(file.resolve()) if os.path.isfile(file) else entry.workload
    return (f"workload.dataset={workload}", *entry.set)


def arguments_of(loaded: Loaded, entry: Entry) -> tuple[str, ...]:
    """What `python -m harness run` is given for the entry, but for `--out`."""
    told: list[str] = []
    profile = profile_of(loaded, entry)
    for option, value in (("--engine", entry.engine), ("--profile", profile)):
        if value is not None:
            told += [option, value]
    for url in entry.url:
        told += ["--url", url]
    for item in sets_of(loaded, entry):
        told += ["--set", item]
    if entry.variants:
        told += ["--variants", ",".join(entry.variants)]
    return tuple(told)


def digest_of(loaded: Loaded, entry: Entry) -> str:
    """Identifies what the entry measures: its command, and its profile's text where it is a file.

    What does not change the measurement (gates, priority, minutes) is left out.
    """
    told = hashlib.sha256(msgspec.json.encode(arguments_of(loaded, entry)))
    profile = profile_of(loaded, entry)
    if profile is not None and is_path(profile):
        told.update(Path(profile).read_bytes())
    return told.hexdigest()[:16]


def hint(word: str, words: list[str]) -> str:
    """`; did you mean 'x'?`, or the known words where nothing comes near."""
    near = nearest(word, words)
    if near is not None:
        return f"; did you mean '{near}'?"
    return f"; known: {', '.join(sorted(words))}" if words else ""


def check_keys(table: dict[str, Any], section: type[Section], where: str) -> None:
    """Raise `UsageError` at the first key that the section does not have."""
    known = [f.name for f in msgspec.structs.fields(section)]
    for key in table:
        if key not in known:
            raise UsageError(f"{where}: unknown key '{one_line(key, 80)}'{hint(key, known)}")


def _tables(table: dict[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    found = table.get(key, [])
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise UsageError(f"{where}: '{key}': write each as a table of its own, [[{key}]]")
    return found


def _called(table: dict[str, Any], index: int) -> str:
    name = table.get("name")
    return f"'{one_line(name, 80)}'" if isinstance(name, str) and name else str(index + 1)


def _entry(table: dict[str, Any], where: str) -> Entry:
    check_keys(table, Entry, where)
    gates = _tables(table, "gates", where)
    plain = {k: v for k, v in table.items() if k != "gates"}
    if "name" not in plain:
        raise UsageError(f"{where}: 'name' is missing")
    entry = decode(plain, where, Entry)
    for word in entry.variants:
        if word not in VARIANTS:
            near = hint(word, list(VARIANTS))
            raise UsageError(f"{where}: variants: '{one_line(word, 40)}'{near}")
    return msgspec.structs.replace(
        entry,
        gates=tuple(_gate(g, f"{where}, gate {i + 1}") for i, g in enumerate(gates)),
    )


def _gate(table: dict[str, Any], where: str) -> Gate:
    check_keys(table, Gate, where)
    if "metric" not in table:
        raise UsageError(f"{where}: 'metric' is missing")
    gate = decode(table, where, Gate)
    where = f"{where} ({one_line(gate.metric, 60)})"
    if gate.min is None and gate.max is None and gate.tolerance is None:
        raise UsageError(f"{where}: it asks for nothing; give min, max or tolerance")
    for key, bound in (("min", gate.min), ("max", gate.max)):
        if bound is not None and not math.isfinite(bound):
            raise UsageError(f"{where}: {key}: {bound} is no bound; give a number")
    if gate.min is not None and gate.max is not None and gate.min > gate.max:
        raise UsageError(f"{where}: min {gate.min:g} is above max {gate.max:g}")
    return gate


def _check_metrics(loaded: Loaded) -> None:
    """A figure that no run can have would be in doubt every night, and fail none."""
    from harness.history.metrics import EXAMPLES, can_be

    suite = loaded.suite
    gates = [(f"[[gates]] {i}", gate.metric) for i, gate in enumerate(suite.gates, 1)]
    gates += [
        (f"[[entries]] '{entry.name}', gate {i}", gate.metric)
        for entry in suite.entries
        for i, gate in enumerate(entry.gates, 1)
    ]
    for where, metric in (*gates, *(("watch", metric) for metric in suite.watch)):
        if not can_be(metric, patterns=where != "watch"):
            near = nearest(metric, EXAMPLES)
            raise UsageError(
                f"{loaded.path}, {where}: no figure is called '{one_line(metric, 60)}'; "
                + (f"did you mean '{near}'?" if near else "docs/history.md names them")
            )


def _check_names(loaded: Loaded) -> None:
    suite, path = loaded.suite, loaded.path
    if not suite.entries:
        raise UsageError(f"{path}: no [[entries]]: the suite measures nothing")
    for what, name in (("name", suite.name), *(("entries", e.name) for e in suite.entries)):
        if not NAME.fullmatch(name):
            raise UsageError(
                f"{path}: {what}: '{one_line(name, 80)}': lower-case letters, digits and . _ - "
                "are wanted, a letter or digit first"
            )
    names = [e.name for e in suite.entries]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise UsageError(f"{path}: two entries are called '{twice[0]}'")
    hook = suite.webhook
    variables = () if hook is None else (("url_env", hook.url_env), ("secret_env", hook.secret_env))
    for key, variable in variables:
        if variable is not None and not VARIABLE.fullmatch(variable):
            raise UsageError(
                f"{path}, [webhook]: {key}: name a variable of the environment, not its value"
            )
