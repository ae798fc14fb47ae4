"""Strict reading of plan tables: an unknown key is named with its file, path and nearest key."""

from __future__ import annotations

import difflib
import re
import types
import typing
from typing import Any

import msgspec

from harness.errors import UsageError, one_line, plain_words
from harness.plan.schema import Plan, Section

S = typing.TypeVar("S", bound=Section)
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
LIST_HINT = "give one value, or several with commas between"
TABLES_HINT = "a list of tables is wanted, such as [{seconds=30, rate=2}, {seconds=10, rate=5}]"


def _members(kind: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself; `Annotated` stripped."""
    if typing.get_origin(kind) is typing.Annotated:
        return _members(typing.get_args(kind)[0])
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return tuple(m for part in typing.get_args(kind) for m in _members(part))
    return (kind,)


def _fields(section: type[Section]) -> dict[str, Any]:
    hints = typing.get_type_hints(section, include_extras=True)
    return {f.name: hints[f.name] for f in msgspec.structs.fields(section)}


def _section_of(kind: Any) -> type[Section] | None:
    for member in _members(kind):
        if isinstance(member, type) and issubclass(member, Section):
            return member
    return None


def _takes_a_value(kind: Any) -> bool:
    """Whether the key may hold a single value too, not a table alone."""
    return any(
        not (isinstance(m, type) and issubclass(m, Section)) and m is not type(None)
        for m in _members(kind)
    )


def known_keys(section: type[Section] = Plan, prefix: str = "") -> dict[str, Any]:
    """Every settable key with its dots, and its type."""
    keys: dict[str, Any] = {}
    for name, kind in _fields(section).items():
        inner = _section_of(kind)
        if inner is None or _takes_a_value(kind):
            keys[prefix + name] = kind
        if inner is not None:
            keys.update(known_keys(inner, f"{prefix}{name}."))
    return keys


def nearest(word: str, words: typing.Iterable[str]) -> str | None:
    """The known word most like `word`, or None where nothing comes near."""
    found = difflib.get_close_matches(word, list(words), n=1, cutoff=0.5)
    return found[0] if found else None


def unknown_key(where: str, path: str, root: type[Section] = Plan) -> UsageError:
    """The error for a key that does not exist, with the nearest one that does."""
    keys = known_keys(root)
    sections = {k.rpartition(".")[0] for k in keys if "." in k}
    leaf = path.rpartition(".")[2]
    same_leaf = [k for k in keys if k.rpartition(".")[2] == leaf]
    near = same_leaf[0] if same_leaf else nearest(path, [*keys, *sections])
    hint = f"; did you mean '{near}'?" if near else f"; known tables: {', '.join(sorted(sections))}"
    return UsageError(f"{where}: unknown key '{path}'{hint}")


def check_keys(
    table: dict[str, Any],
    where: str,
    section: type[Section] = Plan,
    at: str = "",
    root: type[Section] | None = None,
) -> None:
    """Raise `UsageError` at the first key of `table` that the schema does not know.

    `at` is where `section` lies within `root` (None: it is the root).
    """
    root = root or section
    fields = _fields(section)
    for name, value in table.items():
        path = at + name
        if name not in fields:
            raise unknown_key(where, path, root)
        inner = _section_of(fields[name])
        if inner is None:
            continue
        if not isinstance(value, dict):
            if _takes_a_value(fields[name]):
                continue
            raise UsageError(f"{where}: '{path}' is a table, not {value!r}; set a key of it")
        check_keys(value, where, inner, f"{path}.", root)


def _lift(table: dict[str, Any], section: type[Section] = Plan) -> dict[str, Any]:
    """Write a single value where the schema wants a list of them as a list of one."""
    out: dict[str, Any] = {}
    for name, value in table.items():
        kind = _fields(section).get(name)
        inner = _section_of(kind) if kind is not None else None
        if inner is not None and isinstance(value, dict):
            out[name] = _lift(value, inner)
        elif is_list(kind) and isinstance(value, (int, float, str)):
            out[name] = [value]
        else:
            out[name] = value
    return out


def is_list(kind: Any) -> bool:
    """Whether the schema wants a list of values for this key."""
    return any(typing.get_origin(m) in (tuple, list) for m in _members(kind))


def is_text(kind: Any) -> bool:
    """Whether the schema wants text (or one of a few words) for this key."""
    return any(m is str or typing.get_origin(m) is typing.Literal for m in _members(kind))


def allows_none(kind: Any) -> bool:
    """Whether the key may be unset."""
    return type(None) in _members(kind)


def words_of(kind: Any) -> tuple[str, ...]:
    """The words a key may be set to; empty where it takes any text."""
    return tuple(
        word
        for member in _members(kind)
        if typing.get_origin(member) is typing.Literal
        for word in typing.get_args(member)
    )


def complaint(error: msgspec.ValidationError, kind: Any) -> str:
    """What is wrong with a value, in words."""
    text = str(error).partition(" - at ")[0]
    if "enum value" in text:
        return f"one of {', '.join(words_of(kind))} is wanted"
    return plain_words(text, object_is="a table such as {key=value}")


def takes_tables(kind: Any) -> bool:
    """Whether the key's value is a table, or a list of tables."""
    return any(
        typing.get_origin(member) is dict
        or any(isinstance(m, type) and issubclass(m, Section) for m in (member, *inner))
        for member in _members(kind)
        for inner in [typing.get_args(member)]
    )


def _check_texts(table: dict[str, Any], where: str, at: str = "") -> None:
    """Raise `UsageError` at a text with a NUL: no path, argument or environment can hold it."""
    for name, value in table.items():
        if isinstance(value, dict):
            _check_texts(value, where, f"{at}{name}.")
            continue
        for text in (name, *(value if isinstance(value, list) else (value,))):
            if isinstance(text, str) and "\0" in text:
                raise UsageError(f"{where}: '{at}{name}': holds a NUL character".replace("\0", ""))


def decode(table: dict[str, Any], where: str, root: type[S]) -> S:
    """A table as its schema's type; raises `UsageError` with the key's path on a wrong value."""
    check_keys(table, where, root)
    _check_texts(table, where)
    try:
        return msgspec.convert(_lift(table, root), root)
    except msgspec.ValidationError as error:
        path = str(error).partition(" - at `$.")[2]
        key = path.rstrip("`").removesuffix("[...]") or "plan"
        said = complaint(error, known_keys(root).get(key))
        raise UsageError(f"{where}: '{key}': {said}") from None


def to_plan(table: dict[str, Any], where: str) -> Plan:
    """Decode a run's plan; raises `UsageError` with the key's path on a wrong value."""
    plan = decode(table, where, Plan)
    for name, value in plan.client.headers.items():
        if not HEADER_NAME.fullmatch(name) or not (value.isascii() and value.isprintable()):
            raise UsageError(f"{where}: client.headers: {one_line(name, 80)}: no header of HTTP")
    return plan
