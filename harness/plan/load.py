"""From profiles, files and `--set` to one typed plan. Later sources win over earlier ones."""

from __future__ import annotations

import copy
import re
import tomllib
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from harness.errors import UsageError
from harness.plan.schema import Plan, Section
from harness.plan.secret import filled
from harness.plan.strict import (
    LIST_HINT,
    TABLES_HINT,
    allows_none,
    check_keys,
    complaint,
    is_list,
    is_text,
    known_keys,
    nearest,
    takes_tables,
    to_plan,
    unknown_key,
    words_of,
)

PROFILES = Path(__file__).resolve().parents[2] / "engines" / "profiles"
INHERITS = "inherits"
"""A profile's key that names one profile, or a list of them, which it is laid on."""
FOR_ENGINE = "for"
"""A profile's table `[for.<engine>.…]` holds the keys that differ for that engine."""
FLAG_NAME = re.compile(r"--?[A-Za-z][\w.+-]*")
VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""What a shell can export."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A profile as it was read: its name, where it lies, and its raw table."""

    name: str
    where: str
    table: dict[str, Any]


def profile_names() -> list[str]:
    """The profiles that come with the harness."""
    return names_in(PROFILES)


def read_profile(name: str) -> Source:
    """A built-in profile by name, or a TOML file by path. Raises `UsageError`."""
    path = Path(name) if is_path(name) else named(PROFILES, name, "profile")
    try:
        table = read_inherited(path, f"--profile {name}")
    except RecursionError:
        raise UsageError(f"{path}: nested too deep, or inherited through too many files") from None
    return Source(name=path.stem, where=str(path), table=table)


def read_inherited(
    path: Path,
    asked: str,
    above: tuple[Path, ...] = (),
    known: dict[Path, dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """A profile's table laid on those that it inherits, the first named lowest.

    `above`: the profiles that led here. `known`: what was read already: of profiles that inherit
    one another by two ways each, the ways double with every level. Raises `UsageError`, also where
    they go round in a circle.
    """
    known = {} if known is None else known
    own = read_toml(path, asked)  # first: only what is a file can be resolved
    # By folder and name: by way of a link the same file inherits from where the link lies.
    key = path.parent.resolve() / path.name
    if key in known:
        return known[key]
    place = path.resolve()
    if place in above:
        circle = " -> ".join(p.stem for p in (*above[above.index(place) :], place))
        raise UsageError(f"{above[-1]}: '{INHERITS}' goes round in a circle: {circle}")
    names = own.pop(INHERITS, [])
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"{path}: '{INHERITS}' is the name of a profile, or a list of names")
    if above:
        check_table(own, str(path))  # a mistake is told with the file that it stands in
    table: dict[str, Any] = {}
    for name in names:
        parent = parent_path(name, path)
        inherited = read_inherited(parent, f"{path}: {INHERITS}", (*above, place), known)
        table = merge(table, inherited)
    known[key] = merge(table, own)
    return known[key]


def parent_path(name: str, child: Path) -> Path:
    """A built-in profile by name, one of `parts/` too; a TOML file seen from the child's folder."""
    if name.endswith(".toml"):
        return child.parent / name
    path = PROFILES / f"{name}.toml"
    if not path.is_file():
        names = [str(p.relative_to(PROFILES).with_suffix("")) for p in PROFILES.rglob("*.toml")]
        near = nearest(name, sorted(names))
        hint = f"did you mean '{near}'?" if near else "a TOML file's path works too"
        raise UsageError(f"{child}: '{INHERITS}': no profile '{name}'; {hint}")
    return path


def is_path(name: str) -> bool:
    """Whether a profile or plan is given by its file, not by name."""
    return name.endswith(".toml") or "/" in name


def named(folder: Path, name: str, kind: str) -> Path:
    """The TOML file of a `kind` ("profile", "plan") that comes with the package, by name.

    Raises `UsageError` where there is none, with the nearest one that there is.
    """
    path = folder / f"{name}.toml"
    if not path.is_file():
        names = names_in(folder)
        near = nearest(name, names)
        hint = f"did you mean '{near}'?" if near else f"there are {', '.join(names)}."
        raise UsageError(f"--{kind} {name}: no such {kind}; {hint} A TOML file's path works too")
    return path


def names_in(folder: Path) -> list[str]:
    """The names of the TOML files in a folder, in order."""
    return sorted(path.stem for path in folder.glob("*.toml"))


def read_toml(path: Path, asked: str) -> dict[str, Any]:
    """A TOML file's table; `asked` is how the user asked for it. Raises `UsageError`."""
    try:
        if not path.is_file():
            what = "no such file" if not path.exists() else "not a file; give a TOML file"
            raise UsageError(f"{asked}: {what}")
        text = path.read_text(encoding="utf-8")
        if text.startswith("\ufeff"):
            raise UsageError(f"{path}: begins with a byte order mark; save it as UTF-8 without one")
        return tomllib.loads(text)
    except OSError as error:
        raise UsageError(f"{asked}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from None
    except RecursionError:
        raise UsageError(f"{path}: not valid TOML: nested too deep") from None


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`, table by table; neither is changed.

    A table that says why (a flag) is replaced whole: another value's reason is no reason.
    """
    out = copy.deepcopy(base)
    for key, value in over.items():
        tables = [t for t in (value, out.get(key)) if isinstance(t, dict)]
        if len(tables) == 2 and not any(isinstance(t.get("why"), str) for t in tables):
            out[key] = merge(out[key], value)
        else:
            out[key] = copy.deepcopy(value)
    return out


def parse_set(item: str, root: type[Section] = Plan) -> tuple[str, Any]:
    """One `--set key=value`, the value in the key's own type. Raises `UsageError`."""
    key, equals, raw = item.partition("=")
    key, raw = key.strip(), raw.strip()
    if not equals or not key:
        raise UsageError(f"--set {item}: write it as key=value, for example load.concurrency=1,4")
    kinds = known_keys(root)
    if key not in kinds:
        parent, _, leaf = key.rpartition(".")
        if parent in kinds and not is_text(kinds[parent]) and not is_list(kinds[parent]):
            if not leaf:
                raise UsageError(f"--set {item}: a name is wanted after '{parent}.'")
            return key, _free_value(raw, kinds[parent])  # such as engine.extra_env.NAME
        if any(known.startswith(f"{key}.") for known in kinds):
            raise UsageError(f"--set {item}: '{key}' is a table; set a key of it")
        raise unknown_key(f"--set {item}", key, root)
    return key, _coerce(raw, kinds[key], item)


def _free_value(raw: str, kind: Any) -> Any:
    """An entry of a free table: text where the table holds texts, else as TOML reads it."""
    if typing.get_args(kind)[1:] == (str,):
        return raw
    try:
        return tomllib.loads(f"x = {raw}")["x"]
    except tomllib.TOMLDecodeError:
        return raw


def _coerce(raw: str, kind: Any, item: str) -> Any:
    if raw.lower() in ("none", "null", "") and allows_none(kind):
        return None
    text = f"[{raw}]" if is_list(kind) and not raw.startswith("[") else raw
    if takes_tables(kind) and "{" in raw:
        value: Any = _tables(text, item)
    elif is_list(kind):
        try:
            value = tomllib.loads(f"x = {text}")["x"]
        except tomllib.TOMLDecodeError:
            value = [part.strip() for part in raw.strip("[]").split(",")]
    elif is_text(kind):
        words = words_of(kind)
        if words and raw not in words:
            raise UsageError(f"--set {item}: one of {', '.join(words)} is wanted")
        return raw
    else:
        try:
            value = tomllib.loads(f"x = {raw}")["x"]
        except tomllib.TOMLDecodeError:
            value = raw
    try:
        typed = msgspec.to_builtins(msgspec.convert(value, kind, strict=False))
        return list(typed) if isinstance(typed, tuple) else typed
    except msgspec.ValidationError as error:
        hint = f" ({TABLES_HINT if takes_tables(kind) else LIST_HINT})" if is_list(kind) else ""
        raise UsageError(f"--set {item}: {complaint(error, kind)}{hint}") from None


def _tables(raw: str, item: str) -> Any:
    """A value with tables in braces. Raises `UsageError` where TOML cannot read it."""
    try:
        return tomllib.loads(f"x = {raw}")["x"]
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(
            f"--set {item}: not valid TOML: {error}; in braces a text stands in quotes, such as "
            'dist="normal", and each bracket is closed'
        ) from None


def put(table: dict[str, Any], key: str, value: Any) -> None:
    """Set the dotted `key` in a nested table."""
    *parents, leaf = key.split(".")
    for parent in parents:
        if not isinstance(table.get(parent), dict):
            table[parent] = {}
        table = table[parent]
    table[leaf] = value


def build(source: Source, engine: str, sets: list[str]) -> Plan:
    """The plan of one engine: the profile, its part for that engine, then every `--set`.

    What a record has left out of them is taken from the environment.
    """
    check_table(source.table, source.where)
    table = {k: v for k, v in source.table.items() if k != FOR_ENGINE}
    plan = merge(table, source.table.get(FOR_ENGINE, {}).get(engine, {}))
    plan.setdefault("name", source.name)
    to_plan(plan, source.where)  # blame the file for its own mistakes before --set is laid on
    for item in sets:
        put(plan, *parse_set(item))
    built = filled(to_plan(plan, "--set" if sets else source.where))
    check_named(built, engine, source.where)
    load = built.load
    others = (load.concurrency, load.request_rate, load.schedule, load.trace)
    some = load.arrival == "burst" or any(other is not None for other in others)
    if set_to_none(sets, "load.concurrency") and not some:
        raise UsageError(
            "--set load.concurrency=none: no load is left; give load.request_rate, load.schedule "
            "or load.trace as well, or a concurrency"
        )
    return built


def check_table(table: dict[str, Any], where: str) -> None:
    """Raise `UsageError` at a key that no plan has, in the table or in its parts for engines."""
    per_engine = table.get(FOR_ENGINE, {})
    if not isinstance(per_engine, dict):
        raise UsageError(f"{where}: '{FOR_ENGINE}' holds one table an engine")
    for name, part in per_engine.items():
        if not isinstance(part, dict):
            raise UsageError(f"{where}: '{FOR_ENGINE}.{name}' is a table")
        check_keys(part, f"{where}, [{FOR_ENGINE}.{name}]")
    check_keys({k: v for k, v in table.items() if k != FOR_ENGINE}, where)


def check_named(plan: Plan, engine: str, where: str) -> None:
    """Raise `UsageError` for an engine that the profile is not for, and for names that are none."""
    if plan.engines and engine not in plan.engines:
        raise UsageError(f"{where}: this profile is for {' and '.join(plan.engines)}, not {engine}")
    for name in plan.engine.flags:
        if not FLAG_NAME.fullmatch(name):
            raise UsageError(f"{where}: engine.flags: '{name}' is no flag; write it as '--name'")
    for key, names in (("env", plan.engine.env), ("extra_env", plan.engine.extra_env)):
        for name in names:
            if not VARIABLE_NAME.fullmatch(name):
                raise UsageError(f"{where}: engine.{key}: '{name}' is no variable's name")
    for name, variable in plan.engine.env.items():
        if variable.value is True:
            raise UsageError(f"{where}: engine.env.{name}: give its value as a text")
    keys = known_keys()
    for key in plan.why:
        if key not in keys:
            raise unknown_key(f"{where}, [why]", key)


def set_to_none(sets: Sequence[str], key: str) -> bool:
    """Whether the last `--set` of `key` sets it to none."""
    said = [value for name, value in map(parse_set, sets) if name == key]
    return bool(said) and said[-1] is None
