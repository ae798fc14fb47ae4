"""What a record leaves out: keys and passwords have no business in a folder that is passed on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

HIDDEN = "(not written down)"
_SECRET = re.compile(r"(^|[^A-Z])(API)?(KEYS?|TOKEN|SECRETS?|PASSWORD|PASSWD|CREDENTIALS?|AUTH)$")


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
