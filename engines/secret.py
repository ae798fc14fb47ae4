"""What a record leaves out: keys and passwords have no business in a folder that is passed on.

A secret is known by its name: a variable's, an option's. Each function walks over one form in
which secrets are written and lets a `Swap` say what stands in a value's place, so that hiding,
filling in again and collecting find the very same places.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

HIDDEN = "(not written down)"
Swap = Callable[[str, str], str]
"""From the variable that a secret is asked back by, and its value, to what stands in its place."""
LEAST_GIVEN, LEAST_FOUND = 4, 8
"""Characters of a value, given with the command or found in the environment, that a log hides."""
_SECRET = re.compile(r"(^|[^A-Z])(API)?(KEYS?|TOKEN|SECRETS?|PASSWORD|PASSWD|CREDENTIALS?|AUTH)$")
_SETTING = re.compile(r"(?P<before>(?:--[\w-]+=)?(?:-(?:\w(?=\w))?)?)(?P<name>\w+)=", re.ASCII)
"""`HF_TOKEN=x`, and as docker and srun take it: `--env=HF_TOKEN=x`, `-eHF_TOKEN=x`."""
_REFERENCE = re.compile(r"\$(\w+|\{\w+\})")
_RAW_WORD = re.compile(r"""(?:[^\s'"\\]|\\.|'[^']*'|"(?:\\.|[^"\\])*")+""", re.S)
_ONE_MORE = re.compile(r"[^-<>|&;\s][^<>|&;\s]*")
"""A further value of an option: neither an option nor what a shell takes for its own."""
_NO_SECRETS = ("true", "false", "none", "null")
_SHELLS = ("ssh", "sh", "bash", "dash", "ksh", "zsh")
"""Programs after which a word is read as a shell reads it."""
_SSHPASS = "SSHPASS"
"""What `sshpass -e` itself takes the password from."""


def is_secret(name: str) -> bool:
    """Whether a variable or an option of this name holds a secret: `HF_TOKEN`, `--api-key`."""
    return _SECRET.search(name.upper().replace("-", "_")) is not None


def variable_of(option: str) -> str:
    """The variable that an option's value is asked back by: `API_KEY` for `--api-key`."""
    return re.sub(r"\W", "_", option.lstrip("-")).upper()


def hide(name: str, value: str) -> str:
    """The `Swap` of records."""
    return HIDDEN


def in_variables(variables: Mapping[str, str], swap: Swap) -> dict[str, str]:
    """The variables, the values of secrets swapped; one that is empty holds none."""
    return {
        name: swap(name, value) if value and is_secret(name) else value
        for name, value in variables.items()
    }


def in_args(args: Sequence[str], swap: Swap) -> list[str]:
    """Command line arguments, the value of `--api-key VALUE` and `--api-key=VALUE` swapped."""
    told = _options(args, swap)
    return [arg if new is None else new for arg, new in zip(args, told, strict=True)]


def _options(args: Sequence[str], swap: Swap) -> Iterator[str | None]:
    """What stands for each argument that holds an option's secret; None for the others.

    vLLM's `--api-key` takes several values; the second is asked back by `API_KEY_2`, and so on.
    """
    option, values = "", 0
    for arg in args:
        name, equals, value = arg.partition("=")
        more = option == "--api-key" and (arg == HIDDEN or _ONE_MORE.fullmatch(arg))
        if option and not arg.startswith("--") and (values == 0 or more):
            values += 1
            suffix = f"_{values}" if values > 1 else ""
            yield _swapped(variable_of(option) + suffix, arg, swap)
            continue
        secret = arg.startswith("--") and is_secret(name)
        with_value = secret and equals
        yield f"{name}={_swapped(variable_of(name), value, swap)}" if with_value else None
        option, values = (name, 0) if secret and not equals else ("", 0)


def in_command(words: Sequence[str], swap: Swap) -> tuple[str, ...]:
    """A whole command: its arguments' secrets swapped, and those of `NAME=VALUE` (`env`, `-e`).

    So too inside a word that is itself a command, as ssh and `sh -c` are given one, and the
    password of `sshpass -p`. What refers to a variable (`$NAME`) is no secret.
    """
    password = _password_at(words)
    found: list[str] = []
    by_shell = False
    for i, (word, option) in enumerate(zip(words, _options(words, swap), strict=True)):
        if option is not None:
            found.append(option)
        elif i == password:
            before = "-p" if words[i - 1] != "-p" else ""
            found.append(before + _swapped(_SSHPASS, word.removeprefix(before), swap))
        else:
            found.append(_in_word(word, swap, by_shell=by_shell))
        by_shell = by_shell or word.rpartition("/")[2] in _SHELLS
    return tuple(found)


def _password_at(words: Sequence[str]) -> int | None:
    """Where sshpass is given its password: `-p PASSWORD` or `-pPASSWORD`; None: it is not."""
    names = [word.rpartition("/")[2] for word in words]
    at = names.index("sshpass") + 1 if "sshpass" in names else len(words)
    while at < len(words) and words[at].startswith("-"):
        if words[at].startswith("-p"):
            place = at + 1 if words[at] == "-p" else at
            return place if place < len(words) else None
        at += 2 if words[at] in ("-f", "-d", "-P") else 1  # these have a word of their own
    return None


def _in_word(word: str, swap: Swap, *, by_shell: bool) -> str:
    """`by_shell`: a shell reads it, to which a `NAME=VALUE` ends at a space."""
    setting = None if by_shell and " " in word else _SETTING.match(word)
    if setting and (is_secret(setting["name"]) or is_secret(setting[0].rstrip("="))):
        return setting[0] + _swapped(setting["name"], word[setting.end() :], swap)
    try:
        inner = shlex.split(word)
    except ValueError:  # no command: a text with an apostrophe, say
        return word
    raw = list(_RAW_WORD.finditer(word))
    if len(inner) != len(raw) or inner == [word]:
        return word
    told, end = "", 0
    for here, was, new in zip(raw, inner, in_command(inner, swap), strict=True):
        # What is no secret stays as it is written: quoted anew, `>` or `$HOME` would be mere text.
        told += word[end : here.start()] + (here[0] if new == was else _quoted(new))
        end = here.end()
    return told + word[end:]


def _quoted(word: str) -> str:
    """For a shell; the name of a `NAME=VALUE` stays bare, or it would set nothing."""
    setting = _SETTING.match(word)
    return setting[0] + shlex.quote(word[setting.end() :]) if setting else shlex.quote(word)


def _swapped(name: str, value: str, swap: Swap) -> str:
    return value if not value or _REFERENCE.fullmatch(value) else swap(name, value)


def command_without_secrets(words: Sequence[str]) -> tuple[str, ...]:
    """A whole command, the values of secrets hidden."""
    return in_command(words, hide)


def known_secrets(
    command: Sequence[str], variables: Mapping[str, str], given: Iterable[str] = ()
) -> list[str]:
    """What an engine's log must not show: `given`, what it is started with, and the environment's.

    Values so short, or so common, that they stand for much else are left out.
    """
    told: list[str] = list(given)

    def collect(name: str, value: str) -> str:
        told.append(value)
        return value

    in_command(command, collect)
    in_variables(variables, collect)
    found = {value for value in told if _telling(value, LEAST_GIVEN)}
    told.clear()
    in_variables(os.environ, collect)
    return sorted(found | {value for value in told if _telling(value, LEAST_FOUND)})


def without_values(text: str, values: Iterable[str]) -> str:
    """A text of somebody else's, a server's answer say, each of the values in it hidden."""
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, HIDDEN) if _telling(value, LEAST_GIVEN) else text
    return text


def _telling(value: str, least: int) -> bool:
    common = value == HIDDEN or value.lower() in _NO_SECRETS
    is_path = os.path.isabs(value) and os.path.exists(value)
    return len(value) >= least and not common and not is_path


def as_written(values: Iterable[str]) -> list[str]:
    """The values, and what `repr` and JSON make of those that they write in another way."""
    return list(
        dict.fromkeys(
            form for value in values for form in (value, repr(value)[1:-1], json.dumps(value)[1:-1])
        )
    )
