"""A launch through another program: `ssh host`, `srun`, `docker run`, `kubectl exec`, `numactl`.

The engine's processes are then no descendants of this machine's supervisor, which can end the
program alone. So a second supervisor runs where the engine runs: it watches its standard input,
which the program carries over, and ends the engine and all its descendants when that closes,
however it came to be closed. What the program must do for that is pass standard input on.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from engines.base import EngineUsageError, Launch

COMMAND = "{command}"
"""Stands in a prefix for the whole command, quoted for a shell."""
ELSEWHERE = ("ssh", "srun", "docker", "podman", "nerdctl", "kubectl", "oc", "ray")
"""Programs behind which nothing of the engine is seen in this machine's processes."""
_NEEDS_STDIN = {
    "docker": ("run", "exec"),
    "podman": ("run", "exec"),
    "nerdctl": ("run", "exec"),
    "kubectl": ("exec", "run"),
    "oc": ("exec", "run"),
}
_SSH = ("ssh", "sshpass")
"""Whose words a shell elsewhere reads."""
_STARTERS = (
    *("env", "nice", "ionice", "chrt", "taskset", "numactl", "nohup", "setsid", "stdbuf"),
    *("time", "timeout", "sudo", "doas"),
)
"""Programs of this machine that start the rest of their words as they stand."""
SUPERVISOR = Path(__file__).with_name("supervise.py")


def is_elsewhere(prefix: Sequence[str]) -> bool:
    """Whether the engine's processes are not to be seen from here."""
    return any(Path(word).name in ELSEWHERE for word in prefix)


def check_prefix(prefix: Sequence[str]) -> None:
    """Raise `EngineUsageError` where the program would not pass standard input on."""
    names = [Path(word).name for word in prefix]
    for program, verbs in _NEEDS_STDIN.items():
        if program in names and any(verb in prefix for verb in verbs) and not _interactive(prefix):
            raise EngineUsageError(
                f"engine.command_prefix: {program} needs -i, so that the engine ends when the "
                "harness does"
            )
    if "ssh" in names:
        own = prefix[names.index("ssh") + 1 :]  # before it there may be `nice -n 5`
        cutting = next((word for word in own if word in ("-n", "-f", "-fN", "-tt", "-t")), None)
        if cutting is not None:
            raise EngineUsageError(
                f"engine.command_prefix: ssh {cutting} does not pass standard input on, and "
                "by that the engine is ended; leave it out"
            )
    if "srun" in names and any(word.startswith("--input=none") for word in prefix):
        raise EngineUsageError("engine.command_prefix: srun --input=none leaves the engine behind")


def _interactive(prefix: Sequence[str]) -> bool:
    return any(
        word in ("--interactive", "--interactive=true", "--stdin", "--stdin=true")
        or (word.startswith("-") and not word.startswith("--") and "i" in word[1:])
        for word in prefix
    )


def _reaches_a_shell(prefix: Sequence[str]) -> bool:
    """Whether ssh is what the command is handed to, as the first program or behind starters."""
    names = [Path(word).name for word in prefix]
    if names[0] not in (*_SSH, *_STARTERS):
        return False
    first = next((name for name in names if name in (*_SSH, *ELSEWHERE)), None)
    return first in _SSH


def through(
    prefix: Sequence[str], launch: Launch, *, grace_s: float, env: Mapping[str, str]
) -> tuple[str, ...]:
    """The whole command: the prefix, then a supervisor with the engine's environment and command.

    `env` is set where the engine runs, by `env`, as the program may carry over none. ssh gives its
    words to a shell, so that they are quoted for it. The supervisor is handed over as text: the
    harness need not be installed there, only the engine.
    """
    check_prefix(prefix)
    python = launch.argv[0] if "python" in Path(launch.argv[0]).name else "python3"
    where = ("-C", str(launch.cwd)) if launch.cwd is not None else ()
    settings = [f"{name}={value}" for name, value in sorted({**env, **launch.env}.items())]
    supervise = (python, "-I", "-S", "-c", SUPERVISOR.read_text("utf-8"), "--inner", f"{grace_s:g}")
    command = ("env", *where, *settings, *supervise, *launch.argv)
    if any(COMMAND in word for word in prefix):
        quoted = shlex.join(command)
        return tuple(word.replace(COMMAND, quoted) for word in prefix)
    if _reaches_a_shell(prefix):
        return (*prefix, shlex.join(command))
    return (*prefix, *command)
