"""`python -m drafters`: what a drafter's folder is, whether it is whole, and its translation."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from drafters.findings import Finding
    from drafters.reading import Stated

app = typer.Typer(
    help="Inspect, validate and convert the folders of EAGLE-3 draft models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_PROGRESS_S = 5.0


class Convention(str, Enum):  # noqa: UP042 - typer shows str enums by value
    """Who counts layers how; see docs/formats.md."""

    hf = "hf"
    vllm = "vllm"
    sglang = "sglang"
    speculators_old = "speculators-0.3"
    specforge = "specforge"


class Engine(str, Enum):  # noqa: UP042
    """Engines that are given a translated folder."""

    vllm = "vllm"
    sglang = "sglang"


class Destination(str, Enum):  # noqa: UP042
    """What a folder can be converted for."""

    vllm = "vllm"
    sglang = "sglang"
    speculators = "speculators"


Folder = Annotated[Path, typer.Argument(metavar="PATH", help="Folder of the draft model.")]
TargetFolder = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder of the target model.")
]
Ids = Annotated[
    Convention | None,
    typer.Option(help="How the folder's layer ids are counted, where it does not say."),
]
LayerIds = Annotated[
    str | None,
    typer.Option(metavar="ID,ID…", help="The layer ids, as 2,30,58, where the folder names none."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback()
def main() -> None:
    """Inspect, validate and convert the folders of EAGLE-3 draft models."""


@app.command()
def inspect(
    path: Folder,
    target: TargetFolder = None,
    ids: Ids = None,
    layer_ids: LayerIds = None,
    as_json: AsJson = False,
) -> None:
    """Say what a folder is. From its config and the headers of its weights."""
    with _mistakes():
        from drafters.inspection import inspect as look
        from drafters.inspection import lines

        found = look(path, target, _stated(ids, layer_ids))
        if as_json:
            _print_json(found)
        else:
            print("\n".join(lines(found)))


@app.command()
def validate(
    path: Folder,
    target: TargetFolder = None,
    engine: Annotated[
        Engine | None, typer.Option(help="Only what matters to this engine; what it cannot do "
                                         "is then an error.")
    ] = None,
    ids: Ids = None,
    layer_ids: LayerIds = None,
    strict: Annotated[bool, typer.Option(help="Warnings fail too.")] = False,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Check tensors, config, and what engines make of them. The config against the target.

    Ends with 1 where something is wrong, with 2 where the command is.
    """
    with _mistakes():
        from drafters.validate import validate as check

        found = check(
            path,
            target,
            engine=None if engine is None else engine.value,
            stated=_stated(ids, layer_ids),
            watch=_Progress(),
        )
        worst = {finding.severity for finding in found}
        failed = "error" in worst or (strict and "warning" in worst)
        if as_json:
            _print_json({"passed": not failed, "findings": found})
        else:
            _print_findings(path, found, failed)
    raise typer.Exit(1 if failed else 0)


@app.command()
def convert(
    path: Folder,
    to: Annotated[Destination, typer.Option(help="Who is to read the new folder.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The new folder.")],
    target: TargetFolder = None,
    ids: Ids = None,
    layer_ids: LayerIds = None,
    as_json: AsJson = False,
) -> None:
    """Write a folder anew for an engine or speculators. Tensors keep their bytes.

    Refused, with 2, where the result would compute something else.
    """
    with _mistakes():
        from drafters.convert import convert as write

        made = write(path, to.value, out, target_path=target, stated=_stated(ids, layer_ids))
        if as_json:
            _print_json(made)
            return
        from drafters.findings import plain

        for text in (
            f"source ids: {made.source_ids}",
            f"aux layers: {list(made.spec.aux_layers)} as transformers' hidden_states index",
            f"written ids: {made.written_ids} for {made.to}",
            f"weights: {made.weights}",
            *(f"note: {note}" for note in made.notes),
        ):
            print(plain(text), file=sys.stderr)
        print(made.out)


def _stated(ids: Convention | None, layer_ids: str | None) -> Stated:
    from drafters.reading import Stated
    from drafters.spec import DrafterError

    layers = None
    if layer_ids is not None:
        parts = layer_ids.replace(" ", "").split(",")
        if not all(part.isascii() and part.isdigit() and len(part) < 6 for part in parts):
            raise DrafterError(f"--layer-ids {layer_ids}: give numbers, as 2,30,58")
        layers = tuple(int(part) for part in parts)
    return Stated(ids=None if ids is None else ids.value, layers=layers)


class _Progress:
    """Says on stderr, at most every few seconds, which tensor is being read."""

    def __init__(self) -> None:
        self.last, self.read = time.monotonic(), 0

    def __call__(self, name: str, size: int) -> None:
        from drafters.findings import plain

        now = time.monotonic()
        if now - self.last > _PROGRESS_S:
            print(f"{self.read / 1e9:.1f} GB read, now {plain(name)}", file=sys.stderr, flush=True)
            self.last = now
        self.read += size


def _print_findings(path: Path, found: list[Finding], failed: bool) -> None:
    from drafters.findings import plain

    for finding in found:
        print(plain(f"{finding.severity:7} {finding.code}: {finding.where}: {finding.what}"))
        for label, text in (("why", finding.why), ("remedy", finding.remedy)):
            if text:
                print(f"        {label}: {plain(text)}")
    counts = [(n, sum(f.severity == n for f in found)) for n in ("error", "warning", "note")]
    told = ", ".join(f"{count} {name}{'s' * (count != 1)}" for name, count in counts)
    print(f"{'FAILED' if failed else 'passed'}: {plain(str(path))}: {told}")


def _print_json(value: Any) -> None:
    import msgspec

    encoded = msgspec.json.encode(value, enc_hook=str)
    print(msgspec.json.format(encoded, indent=2).decode())


def _terminated(number: int, frame: object) -> None:
    raise KeyboardInterrupt(number)


@contextmanager
def _mistakes() -> Iterator[None]:
    """A mistake is one line and the exit code 2; an interruption is no traceback either."""
    from drafters.findings import plain
    from drafters.spec import DrafterError

    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    except DrafterError as error:
        print(plain(f"error: {error}"), file=sys.stderr)
        raise typer.Exit(2) from None
    except (OSError, MemoryError) as error:
        print(plain(f"error: {type(error).__name__}: {error}"), file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt as stopped:
        print("stopped; nothing was left half written", file=sys.stderr)
        raise typer.Exit(143 if stopped.args else 130) from None
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    app(prog_name="python -m drafters")
