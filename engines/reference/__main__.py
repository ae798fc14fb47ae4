"""`python -m engines.reference --model DIR [--drafter DIR --k K] --port P`: load, then serve.

Start-up prints one line a phase to stdout: reading config, loading target, loading drafter,
allocating cache, ready. The port is taken first, so that a port in use is known at once.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from engines.base import EngineUsageError

if TYPE_CHECKING:
    from engines.reference.engine import Engine

_BEGAN = time.perf_counter()


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m engines.reference", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the target")
    parser.add_argument("--served-model-name", help="default: the folder's name")
    parser.add_argument("--drafter", type=Path, help="folder of an EAGLE-3 drafter (vLLM's form)")
    parser.add_argument("--k", type=int, default=3, help="draft tokens a verify step, 1 to 8")
    parser.add_argument(
        "--forced-length",
        type=float,
        help="make verify steps yield so many tokens on average, whatever the target says: the "
        "output is wrong by design",
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--dtype", default="auto", help="auto, float32, float16 or bfloat16")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--max-model-len", type=int, help="default: what the model was made for")
    parser.add_argument("--max-num-seqs", type=int, default=16, help="slots")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="torch threads; default: all but one core")
    parser.add_argument("--trust-remote-code", action="store_true", help="for tokenizers only")
    return parser.parse_args(argv)


def say(phase: str) -> None:
    """One phase line, with the seconds since the start."""
    print(f"[reference {time.perf_counter() - _BEGAN:7.2f}s] {phase}", flush=True)


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

    return load_engine(
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
