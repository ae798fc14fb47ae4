"""What a record leaves out: keys and passwords have no business in a folder that is passed on."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

HIDDEN = "(not written down)"
_SECRET = re.compile(r"(^|[^A-Z])(API)?(KEYS?|TOKEN|SECRETS?|PASSWORD|PASSWD|CREDENTIALS?|AUTH)$")
_SETTING = re.compile(r"((?:--[\w-]+=)?-?\w+)=")
"""`HF_TOKEN=x`, and as docker and srun take it: `--env=HF_TOKEN=x`, `-eHF_TOKEN=x`."""


def is_secret(name: str) -> bool:
    """Whether a variable or an option of this name holds a secret: `HF_TOKEN`, `--api-key`."""
    return _SECRET.search(name.upper().replace("-", "_")) is not None


def without_secrets(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables, the values of secrets hidden: another key makes no other samples."""
    return {name: HIDDEN if is_secret(name) else value for name, value in variables.items()}


def args_without_secrets(args: Sequence[str]) -> list[str]:
    """Command line arguments, `--api-key VALUE` and `--api-key=VALUE` without the value."""
    found: list[str] = []
    hide = False
    for arg in args:
        option, equals, _ = arg.partition("=")
        secret = arg.startswith("--") and is_secret(option)
        if hide and not arg.startswith("--"):
            found.append(HIDDEN)
        else:
            found.append(f"{option}={HIDDEN}" if secret and equals else arg)
        hide = secret and not equals
    return found


def command_without_secrets(words: Sequence[str]) -> tuple[str, ...]:
    """A whole command: its arguments' secrets hidden, and those of `NAME=VALUE` (`env`, `-e`).

    So too inside a word that is itself a command, as ssh and `sh -c` are given one.
    """
    return tuple(
        # What is hidden already is read no further.
        shown if shown != word or word.endswith(HIDDEN) else _word_without_secrets(word)
        for word, shown in zip(words, args_without_secrets(words), strict=True)
    )


def _word_without_secrets(word: str) -> str:
    setting = _SETTING.match(word)
    if setting and is_secret(setting[1]):
        return f"{setting[1]}={HIDDEN}"
    try:
        inner = shlex.split(word)
    except ValueError:  # no command: a text with an apostrophe, say
        return word
    if len(inner) < 2:
        return word
    hidden = command_without_secrets(inner)
    return word if hidden == tuple(inner) else shlex.join(hidden)
