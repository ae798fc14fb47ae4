"""`python -m training`: the demo pair, and the training of drafters stage by stage."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

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

PlanOption = Annotated[str, typer.Option("--plan", help="A plan by name, or a TOML file.")]
OutOption = Annotated[Path, typer.Option("--out", help="The training's folder.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="key=value, over the plan's.")]


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


def _stage(module: str, plan: str, out: Path, sets: list[str] | None, **options: Any) -> None:
    """Run `module`'s stage and end with its exit code: 1 where its gate did not pass."""
    from training.ending import ending

    with ending():
        from training.plan import read_plan

        run: Callable[..., Any] = importlib.import_module(module).run
        run(read_plan(plan, sets or []), out, **options)


@app.command()
def generate(
    plan: PlanOption = "demo", out: OutOption = Path("training-run"), sets: SetOption = None
) -> None:
    """Samples: the target's own answers to the plan's prompts, through a running engine."""
    _stage("training.generate.stage", plan, out, sets)


@app.command()
def capture(
    plan: PlanOption = "demo", out: OutOption = Path("training-run"), sets: SetOption = None
) -> None:
    """Hidden states of the samples, proved to be the target's own."""
    _stage("training.capture.stage", plan, out, sets)


@app.command()
def vocab(
    plan: PlanOption = "demo", out: OutOption = Path("training-run"), sets: SetOption = None
) -> None:
    """The draft vocabulary by frequency in the samples' answers."""
    _stage("training.vocab", plan, out, sets)


@app.command()
def train(
    plan: PlanOption = "demo", out: OutOption = Path("training-run"), sets: SetOption = None
) -> None:
    """Train the drafter; goes on from the last checkpoint where there is one."""
    _stage("training.train.stage", plan, out, sets)


@app.command()
def evaluate(
    plan: PlanOption = "demo", out: OutOption = Path("training-run"), sets: SetOption = None
) -> None:
    """Expected acceptance offline beside what the engines accept, on the same prompts."""
    _stage("training.evaluation.stage", plan, out, sets)


@app.command()
def export(
    plan: PlanOption = "demo", out: OutOption = Path("training-run"), sets: SetOption = None
) -> None:
    """The best checkpoint in every engine's format, validated and loaded."""
    _stage("training.export", plan, out, sets)


@app.command()
def pipeline(
    plan: PlanOption = "demo",
    out: OutOption = Path("training-run"),
    sets: SetOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only estimate memory, disk and time.")
    ] = False,
) -> None:
    """Every stage from one plan; finished ones are kept, the rest goes on where it stopped."""
    _stage("training.pipeline", plan, out, sets, dry_run=dry_run)


if __name__ == "__main__":
    app(prog_name="python -m training")
