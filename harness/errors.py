"""What can go wrong in the harness, and the exit code each kind ends with.

    HarnessError
    ├── GateFailed        exit 1  a regression, or a gate that was not passed
    ├── UsageError        exit 2  a mistake of the user: bad plan, unknown key, missing file
    ├── EngineFailure     exit 3  what an engine needs could not be made, such as the demo pair
    └── VoidRun           exit 4  measured, but the numbers prove nothing

`engines.base` has its own small tree (engines never import the harness); the command line maps
`engines.base.EngineUsageError` to 2 and `engines.base.EngineFailed`, which carries phase, cause
and log, to 3. A void run that was summed up is no error: `run.Outcome` holds its exit code.

Every message is one line: what is wrong, where, and what to do about it.
"""

from __future__ import annotations

import re


class HarnessError(Exception):
    """Base of every error the harness raises on purpose."""

    exit_code = 1


class GateFailed(HarnessError):
    """A gate or a regression check said no."""

    exit_code = 1


class UsageError(HarnessError):
    """The user asked for something that cannot be: what, where, what to do."""

    exit_code = 2


class EngineFailure(HarnessError):
    """Something an engine cannot do without could not be made."""

    exit_code = 3


class VoidRun(HarnessError):
    """The run ended, its numbers are kept, and no verdict may be drawn from them."""

    exit_code = 4


def printable(text: str) -> str:
    """`text` on one line, without the characters that would steer a terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def one_line(text: str, limit: int = 300) -> str:
    """The same of at most `limit` characters; of a text far longer only the beginning is read."""
    flat = printable(text[: 4 * limit])
    return flat if len(flat) <= limit else f"{flat[: limit - 1]}…"


_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "array": "a list",
    "object": "an object",
    "null": "nothing",
}


def plain_words(said: str, *, object_is: str = "an object") -> str:
    """What a decoder says of a value that does not fit, in a reader's words.

    `object_is`: what the reader's format calls an object. Unknown sentences stay as they are.
    """
    text, _, path = said.partition(" - at `")
    names = {**_KINDS, "object": object_is}

    def name(kinds: str) -> str:
        # Nobody has to be told that a value may be left out.
        wanted = [k for k in kinds.split(" | ") if k != "null" or kinds == "null"]
        return " or ".join(names.get(kind, kind) for kind in wanted)

    if wrong := re.fullmatch(r"Expected `([^`]+)`, got `([^`]+)`", text):
        text = f"{name(wrong[1])} is wanted, not {name(wrong[2])}"
    elif bound := re.fullmatch(r"Expected `([^`]+)` (>=?|<=?) (\S+)", text):
        text = f"{name(bound[1])} {bound[2]} {bound[3]} is wanted"
    elif missing := re.fullmatch(r"Object missing required field `([^`]+)`", text):
        text = f"'{missing[1]}' is missing"
    elif unknown := re.fullmatch(r"Object contains unknown field `([^`]+)`", text):
        text = f"there is no key '{unknown[1]}'"
    where = path.rstrip("`").removeprefix("$").removeprefix(".").replace("[...]", "")
    return f"'{where}': {text}" if where else text
