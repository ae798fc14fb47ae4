"""Our trainer beside speculators': the same data, drafter, batch, optimizer, machine and threads.

    python tests/benchmarks/trainer_speed.py [--shapes demo,medium,large] [--blocks 6]
        [--updates 4] [--precision auto|float32|bfloat16] [--choice stored|computed]
        [--out FILE] [--write]

Each side is a process of its own; blocks of updates take turns, so that what else the machine does
meets both. speculators' trainer refuses to run without an accelerator, and its default attention
has no backward pass on a CPU: its draft model, loss and optimizer are driven with SDPA attention,
once with the whole batch as one packed row, as its trainer packs, and once with short rows, which
spares that attention most of what its mask throws away. Prints a table; with `--write` it goes
into docs/performance.md. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from pages import put
from trainer_data import SHAPES, Shape, write_data

from engines.install import engine_python
from harness.report.words import DASH

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]
PAGE = REPO / "docs" / "performance.md"
BEGIN = "<!-- trainer: begin -->"
END = "<!-- trainer: end -->"
OURS = "this trainer"
CHOICES = {
    "stored": "stored by the capture stage",
    "computed": "computed in every update",
}
PRECISIONS = {"float32": "all in float32", "bfloat16": "products in bfloat16 (autocast)"}


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What is run of each shape."""

    blocks: int
    updates: int
    threads: int
    ttt_steps: int
    lr: float
    head: str
    batches: int
    held_out: int
    precision: str
    choice: str


class Side(msgspec.Struct, kw_only=True):
    """One trainer at one shape, and what it came to."""

    name: str
    loss: float | None = None
    blocks: list[dict[str, Any]] = []
    judged: dict[str, Any] = {}

    def rates(self, time: str = "seconds") -> list[float]:
        """Real tokens a second of each block."""
        return [block["tokens"] / block[time] for block in self.blocks]

    @property
    def peak_bytes(self) -> int:
        """The most memory that the process has held."""
        return max(block["peak_bytes"] for block in self.blocks)


class Process:
    """A worker: a line in, a line of JSON out. Raises `RuntimeError` where it ends early."""

    def __init__(self, kind: str, python: Path, folder: Path, options: Options, row: int) -> None:
        arguments = [options.threads, options.ttt_steps, options.lr, options.head, row]
        arguments += [options.precision, options.choice]
        command = [str(python), str(HERE / "trainer_worker.py"), kind, str(folder)]
        environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
        if kind == "ours":
            environment["PYTHONPATH"] = str(REPO)
        else:
            environment.pop("PYTHONPATH", None)
        self.kind = kind
        self.process = subprocess.Popen(
            [*command, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def ask(self, line: str) -> dict[str, Any]:
        """The answer to one line."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self.kind} ended at {line!r}; what it said stands above")
        return dict(json.loads(answer))

    def end(self) -> None:
        """Let it go."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def compare(shape: Shape, options: Options) -> list[Side]:
    """All sides at one shape: ours, speculators on one row, speculators on short rows."""
    python = engine_python("speculators")
    short = shape.lengths[1] if shape.name != "demo" else 256
    asked = [
        (OURS, "ours", Path(sys.executable), 0),
        ("speculators, one row", "speculators", python, 0),
        (f"speculators, rows of {short}", "speculators", python, short),
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tell(f"{shape.name}: making its data")
        write_data(shape, folder, batches=options.batches, held_out=options.held_out)
        processes: dict[str, Process] = {}
        try:
            for shown, kind, binary, row in asked:
                processes[shown] = Process(kind, binary, folder, options, row)
            return take_turns(shape, options, processes, folder)
        finally:
            for process in processes.values():
                process.end()


def take_turns(
    shape: Shape, options: Options, processes: dict[str, Process], folder: Path
) -> list[Side]:
    """Blocks in turn, every second round backwards; then what each has learnt."""
    sides = {shown: Side(name=shown) for shown in processes}
    for shown, process in processes.items():
        sides[shown].loss = process.ask("loss")["loss"]
        process.ask("block 1")  # not timed: what is done only once
    for block in range(options.blocks):
        order = list(processes) if block % 2 == 0 else list(processes)[::-1]
        for shown in order:
            answer = processes[shown].ask(f"block {options.updates}")
            sides[shown].blocks.append(answer)
        rates = ", ".join(f"{name} {side.rates()[-1]:.0f}" for name, side in sides.items())
        tell(f"{shape.name}: block {block + 1} of {options.blocks}: tokens/s {rates}")
    for shown, process in processes.items():
        file = folder / "learnt.safetensors"
        process.ask(f"save {file}")
        sides[shown].judged = processes[OURS].ask(f"judge {file}")
    return list(sides.values())


def ratios(ours: Side, other: Side, time: str = "seconds") -> list[float]:
    """How many times as many tokens a second ours took in, block by block."""
    return [a / b for a, b in zip(ours.rates(time), other.rates(time), strict=True)]


def heading(options: Options, load: float) -> str:
    """What the table was measured on."""
    packages = version("torch"), version("speculators", engine_python("speculators"))
    updates = 1 + options.blocks * options.updates
    return (
        f"{options.threads} threads of {len(os.sched_getaffinity(0))} CPUs ({cpu_name()}), load "
        f"{load:.2f} before the start, Python {platform.python_version()}, torch {packages[0]}, "
        f"speculators {packages[1]} (its draft model, KL loss and AdamW, driven with SDPA "
        f"attention), {PRECISIONS[options.precision]}, {options.ttt_steps} TTT steps, "
        f"head {options.head}; the target's choice {CHOICES[options.choice]} (for this trainer: "
        f"speculators uses none); "
        f"{options.blocks} blocks of {options.updates} updates, in turn; held-out accuracy after "
        f"{updates} updates; {datetime.now(UTC).date().isoformat()}."
    )


def table(results: dict[str, list[Side]]) -> str:
    """The results in Markdown: medians over blocks, the least and the most in brackets."""
    out = [
        "| shape | trainer | tokens/s | ours is faster by | in CPU time | first loss "
        "| held-out accuracy of step 1, 2, 3 | peak memory |",
        "|---|---|---:|---:|---:|---:|---|---:|",
    ]
    for shape, sides in results.items():
        for side in sides:
            faster = [DASH, DASH]
            if side.name != OURS:
                faster = [spread(ratios(sides[0], side, t)) for t in ("seconds", "cpu_seconds")]
            accuracy = ", ".join(DASH if a is None else f"{a:.4f}" for a in side.judged["accuracy"])
            cells = [shape, side.name, f"{statistics.median(side.rates()):.0f}", *faster]
            cells += [f"{side.loss:.5f}", accuracy, f"{side.peak_bytes / 2**20:.0f} MiB"]
            out.append("| " + " | ".join(cells) + " |")
    return "\n".join(out)


def spread(values: list[float]) -> str:
    """The median, and how far the blocks lie apart."""
    middle = statistics.median(values)
    return f"{middle:.2f} x ({min(values):.2f} … {max(values):.2f})"


def chosen_precision() -> str:
    """What both trainers would choose for speed on this CPU."""
    import torch

    from training.trainer import autocast

    with autocast(torch.device("cpu")):
        return "bfloat16" if torch.is_autocast_enabled("cpu") else "float32"


def version(package: str, python: Path | None = None) -> str:
    """The installed version of a package."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    command = [str(python or sys.executable), "-c", code]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def cpu_name() -> str:
    """The processor's name, its architecture where that is not told."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def tell(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Run the shapes that are asked for, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--updates", type=int, default=4, help="updates in a block")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--ttt-steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--head", choices=("frozen", "trained"), default="frozen")
    parser.add_argument("--precision", choices=("auto", *PRECISIONS), default="auto")
    parser.add_argument("--choice", choices=tuple(CHOICES), default="stored")
    parser.add_argument("--batches", type=int, default=12, help="batches that are trained on")
    parser.add_argument("--held-out", type=int, default=4, help="batches to judge by")
    parser.add_argument("--out", type=Path, help="write everything measured, as JSON")
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.relative_to(REPO)}")
    given = vars(parser.parse_args())
    out, into_page = given.pop("out"), given.pop("write")
    names = [name for name in given.pop("shapes").split(",") if name]
    if unknown := [name for name in names if name not in SHAPES]:
        parser.error(f"--shapes {unknown[0]}: known are {', '.join(SHAPES)}")
    if given["precision"] == "auto":
        given["precision"] = chosen_precision()
    options = Options(**given)
    load = os.getloadavg()[0]
    results = {name: compare(SHAPES[name], options) for name in names}
    text = f"{heading(options, load)}\n\n{table(results)}"
    print(text)
    if out is not None:
        record = {"heading": heading(options, load), "options": options, "shapes": SHAPES}
        out.write_bytes(msgspec.json.format(msgspec.json.encode(record | {"results": results})))
    if into_page:
        put(PAGE, BEGIN, END, text)


if __name__ == "__main__":
    main()
