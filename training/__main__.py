"""`python -m training`: the demo pair, and the training of drafters."""

from __future__ import annotations

import os
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

# Torch's threads spin while they wait, by default. Where another program has one of the cores that
# makes training thirty times slower; to sleep instead costs little. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

app = typer.Typer(
    help="Make the demo pair; train draft models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Kind(str, Enum):  # noqa: UP042 - typer shows str enums by value
    """Model families of the demo."""

    mla = "mla"
    llama = "llama"


@app.callback()
def main() -> None:
    """Make the demo pair; train draft models."""


@app.command()
def demo(
    target: Annotated[Kind, typer.Option(help="Architecture of the target.")] = Kind.mla,
    drafter: Annotated[Kind, typer.Option(help="Head of the drafter.")] = Kind.mla,
    which: Annotated[
        bool, typer.Option("--which", help="Only print the pair's path; 1 if it is missing.")
    ] = False,
    root: Annotated[Path | None, typer.Option(help="Folder to keep pairs in.")] = None,
) -> None:
    """Make or find a small target and an EAGLE-3 drafter for it; prints their folder."""
    from training.demo import pair

    configs = pair.configs(target.value, drafter.value)
    if which:
        print(pair.pair_folder(configs[0], root))
        raise typer.Exit(0 if pair.find(*configs, root) else 1)
    try:
        print(pair.make(*configs, root))
    except pair.PairError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        print("stopped; what was finished is kept, the rest starts anew", file=sys.stderr)
        raise typer.Exit(130) from None


if __name__ == "__main__":
    app(prog_name="python -m training")
