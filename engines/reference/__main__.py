"""`python -m engines.reference --model DIR [--drafter DIR --k K] --port P`: load, then serve.

Start-up prints one line a phase to stdout: reading config, loading target, loading drafter,
allocating cache, ready. Both folders are looked at and the port is taken before weights are loaded,
so that a mistake in them is known at once.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from engines.base import EngineUsageError

if TYPE_CHECKING:
    from engines.reference.engine import Engine

_BEGAN = time.perf_counter()


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m engines.reference", description=__doc__)
    parser.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="folder of the target"
    )
    parser.add_argument("--served-model-name", metavar="NAME", help="default: the folder's name")
    parser.add_argument(
        "--drafter", type=Path, metavar="DIR", help="folder of an EAGLE-3 drafter; default: none"
    )

    def number(name: str, default: int | None, text: str) -> None:
        parser.add_argument(name, type=int, default=default, metavar="N", help=text)

    number("--k", 3, "draft tokens a verify step, 1 to 8; default: 3")
    parser.add_argument(
        "--forced-length",
        type=float,
        metavar="TOKENS",
        help="make verify steps yield so many tokens on average, whatever the target says: the "
        "output is wrong by design; default: drafts are verified",
    )
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1")
    number("--port", 8000, "default: 8000")
    parser.add_argument(
        "--dtype", default="auto", help="auto (the default), float32, float16 or bfloat16"
    )
    parser.add_argument("--device", default="cpu", help="cpu (the default), cuda or cuda:N")
    number("--max-model-len", None, "tokens; default: what the model was made for")
    number("--max-num-seqs", 16, "requests at once, the slots of the cache; default: 16")
    number("--seed", 0, "default: 0")
    number("--threads", None, "torch threads; default: all but one core")
    parser.add_argument("--trust-remote-code", action="store_true", help="for tokenizers only")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FOLDER",
        help="write there what the drafter is handed and proposes, a file a call; default: not",
    )
    parser.add_argument(
        "--plugin",
        action="append",
        default=[],
        metavar="FILE.py:FUNCTION",
        help="call it with the loaded engine, before the trace begins; may be given several times, "
        "and by SPEC_HARNESS_ENGINE_PLUGIN; default: none",
    )
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """The options of a command line; leaves with code 2 for a mistake in it."""
    return parser().parse_args(argv)


def flag_names() -> set[str]:
    """Every option the command line takes."""
    return {name for action in parser()._actions for name in action.option_strings}


def say(phase: str) -> None:
    """One phase line, with the seconds since the start."""
    print(f"[reference {time.perf_counter() - _BEGAN:7.2f}s] {phase}", flush=True)


def check_folders(model: Path, drafter: Path | None) -> None:
    """Raise EngineUsageError for a folder that is no checkpoint, and a drafter that does not fit.

    Reads configs and the headers of weights, so that nobody waits for weights to hear of it.
    """
    for option, folder in (("--model", model), ("--drafter", drafter)):
        if folder is None or (folder / "config.json").is_file():
            continue
        what = "has no config.json" if folder.is_dir() else "no such folder"
        others = sorted(p.parent.name for p in folder.absolute().parent.glob("*/config.json"))
        beside = f"; beside it there are {', '.join(others[:8])}" if others else ""
        raise EngineUsageError(
            f"{option} {folder}: {what}; the folder of a checkpoint is wanted{beside}"
        )
    if drafter is None:
        return
    from drafters.spec import DrafterError
    from drafters.validate import check_fit

    try:
        check_fit(drafter, model)
    except DrafterError as error:
        raise EngineUsageError(f"--drafter: {error}") from error


def bind(host: str, port: int) -> socket.socket:
    """Take the port without listening yet: until the engine is ready connections are refused."""
    taken = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind((host, port))
    except OSError as error:
        message = f"port {port} on {host} cannot be used: {error.strerror}; choose another"
        raise EngineUsageError(message) from error
    return taken


def main(argv: list[str]) -> int:
    """Load and serve; exit code 2 for a mistake in the arguments, 1 for a failure."""
    options = parse(argv)
    name = options.served_model_name or options.model.resolve().name
    try:
        if not 1 <= options.k <= 8:
            raise EngineUsageError(f"--k {options.k}: draft tokens a step must be 1 to 8")
        if options.forced_length is not None and not 1 <= options.forced_length <= options.k + 1:
            raise EngineUsageError(
                f"--forced-length {options.forced_length:g}: must be 1 to {options.k + 1}, k + 1"
            )
        check_folders(options.model, options.drafter)
        taken = bind(options.host, options.port)
        engine = load(options, name)
    except (EngineUsageError, MemoryError) as error:
        print(f"[reference] error: {error}", file=sys.stderr, flush=True)
        return 2
    from engines.reference.server import serve

    say(f"ready: {name} on http://{options.host}:{options.port}")
    return serve(engine, name, taken)


def load(options: argparse.Namespace, name: str) -> Engine:
    """The engine of these options, saying each phase. Raises EngineUsageError."""
    say(f"reading config: {options.model}")
    threads = options.threads or max((os.cpu_count() or 2) - 1, 1)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # read when torch is imported
    from engines.reference.loading import load_engine

    engine = load_engine(
        options.model,
        drafter=options.drafter,
        k=options.k,
        forced_length=options.forced_length,
        name=name,
        dtype=options.dtype,
        device=options.device,
        max_len=options.max_model_len,
        slots=options.max_num_seqs,
        seed=options.seed,
        threads=threads,
        trust_remote_code=options.trust_remote_code,
        on_phase=say,
    )
    watch(engine, options)
    return engine


def watch(engine: Engine, options: argparse.Namespace) -> None:
    """Call the plugins, then begin the trace. Raises EngineUsageError."""
    named = ";".join([os.environ.get("SPEC_HARNESS_ENGINE_PLUGIN", ""), *options.plugin])
    if named.strip(";"):
        from engines.trace.plugin.trace_files import load_functions

        say(f"calling plugins: {named.strip(';')}")
        try:
            functions = load_functions(named)
        except ValueError as error:
            raise EngineUsageError(f"--plugin {error}") from error
        for function in functions:
            try:
                function(engine)
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                raise EngineUsageError(
                    f"--plugin {function.__name__} failed: {error!r} ({where.filename}, line "
                    f"{where.lineno})"
                ) from error
    if options.trace is not None:
        from engines.trace.reference import trace_to_folder

        trace_to_folder(engine, options.trace.absolute())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
