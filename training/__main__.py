"""`python -m training`: the demo pair, and the training of drafters stage by stage."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from harness.ending import DEBUG, Command, Commands, run_commands
from harness.errors import GateFailed, UsageError
from training.ending import training_exit_code
from training.folders import MODULES, Stage

# Torch's threads spin while they wait, by default. Where another program has one of the cores that
# makes training thirty times slower; to sleep instead costs little. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

app = typer.Typer(
    name="training",
    cls=Commands,
    help="Make the demo pair; train draft models, stage by stage or all in one.",
    epilog=DEBUG,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

PlanOption = Annotated[
    str,
    typer.Option("--plan", metavar="NAME|FILE", help="A plan by name, or a TOML file."),
]
OutOption = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="The training's folder, one for all stages.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the plan; repeat it."),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print the gate as JSON; the folder goes to stderr.")
]
OUT = Path("training-run")


class Given:
    """The options that every stage has."""

    def __init__(self, plan: str, out: Path, sets: Sequence[str] | None, as_json: bool) -> None:
        self.plan, self.out, self.sets, self.as_json = plan, out, list(sets or ()), as_json


class Kind(str, Enum):  # noqa: UP042 - typer shows str enums by value
    """Model families of the demo."""

    mla = "mla"
    llama = "llama"


@app.command()
def demo(
    target: Annotated[Kind, typer.Option(help="Architecture of the target.")] = Kind.mla,
    drafter: Annotated[Kind, typer.Option(help="Head of the drafter.")] = Kind.mla,
    which: Annotated[
        bool, typer.Option("--which", help="Only print the pair's path; 1 if it is missing.")
    ] = False,
    root: Annotated[Path | None, typer.Option(help="Folder to keep pairs in.")] = None,
) -> None:
    """Make or find the demo pair; print its folder. A small target and an EAGLE-3 drafter."""
    from training.demo import pair

    configs = pair.configs(target.value, drafter.value)
    if which:
        print(pair.pair_folder(configs[0], root))
        raise typer.Exit(0 if pair.find(*configs, root) else 1)
    try:
        print(pair.make(*configs, root))
    except pair.PairError as error:
        raise UsageError(str(error)) from None


def _stage(stage: Stage, given: Given, **options: Any) -> None:
    """Run a stage and print its gate and folder, also where the gate did not pass (exit 1)."""
    from training.folders import stage_folder
    from training.plan import read_plan
    from training.took import timed

    plan = read_plan(given.plan, given.sets)
    module = importlib.import_module(MODULES[stage])

    def counted(plan: Any, out: Path, **options: Any) -> Any:
        return timed(out, stage, lambda: module.run(plan, out, **options)).gate

    _show(counted, plan, stage_folder(given.out, stage), given, options)


def _show(
    run: Callable[..., Any], plan: Any, folder: Path, given: Given, options: dict[str, Any]
) -> None:
    """Call `run(plan, out, …)`; whatever gate it leaves in `folder` is printed."""
    from training.gate import read_gate
    from training.shown import show_gate

    try:
        gate = run(plan, given.out, **options)
    except GateFailed:
        gate = read_gate(folder)
        if gate is not None and not gate.passed:  # its own, not that of the stage before
            show_gate(gate, folder, as_json=given.as_json)
        raise
    show_gate(gate, folder, as_json=given.as_json)


@app.command()
def generate(
    plan: PlanOption = "demo",
    out: OutOption = OUT,
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Samples: the target's own answers to the plan's prompts. A running engine gives them."""
    _stage("generate", Given(plan, out, sets, as_json))


@app.command()
def capture(
    plan: PlanOption = "demo",
    out: OutOption = OUT,
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Hidden states of the samples, proved to be the target's own."""
    _stage("capture", Given(plan, out, sets, as_json))


@app.command()
def vocab(
    plan: PlanOption = "demo",
    out: OutOption = OUT,
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """The draft vocabulary by frequency in the samples' answers."""
    _stage("vocab", Given(plan, out, sets, as_json))


@app.command()
def train(
    plan: PlanOption = "demo",
    out: OutOption = OUT,
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train the drafter. Goes on from the last checkpoint where there is one."""
    _stage("train", Given(plan, out, sets, as_json))


@app.command()
def evaluate(
    plan: Annotated[
        str | None,
        typer.Option(
            "--plan",
            metavar="NAME|FILE",
            help="A plan by name, or a TOML file. Default: demo; with --drafter: evaluate.",
        ),
    ] = None,
    out: OutOption = OUT,
    sets: SetOption = None,
    as_json: JsonOption = False,
    drafter: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Any drafter instead of the training's best checkpoint."),
    ] = None,
    target: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The target of --drafter.")
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Instead of the plan's engines; repeat it."),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A server that serves the drafter: --engine openai."),
    ] = None,
) -> None:
    """Expected acceptance beside what engines accept. Both on the same held-out prompts."""
    named = engine or ()
    sets = [*(sets or ()), *([f"evaluate.engines={','.join(named)}"] if named else ())]
    if drafter is None:
        if target is not None:
            raise UsageError("--target: goes with --drafter; a training's target is its plan's")
        _stage("evaluate", Given(plan or "demo", out, sets, as_json), url=url)
        return
    from training.evaluation.stage import run_drafter
    from training.plan import read_plan

    name = plan or ("evaluate" if target is not None else "demo")
    given = Given(name, out, sets, as_json)
    options = {"drafter": drafter, "target": target, "url": url}
    _show(run_drafter, read_plan(given.plan, given.sets), out, given, options)


@app.command()
def export(
    plan: PlanOption = "demo",
    out: OutOption = OUT,
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """The best checkpoint in every engine's format. Validated, and loaded."""
    _stage("export", Given(plan, out, sets, as_json))


@app.command()
def pipeline(
    plan: PlanOption = "demo",
    out: OutOption = OUT,
    sets: SetOption = None,
    as_json: JsonOption = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only estimate memory, disk and time; nothing is started."),
    ] = False,
) -> None:
    """Every stage from one plan. Finished ones are kept; the rest goes on where it stopped."""
    from training import pipeline as story
    from training.plan import read_plan

    chosen = read_plan(plan, sets or [])
    if dry_run:
        story.show_estimate(chosen, as_json=as_json)
    else:
        story.run_and_show(chosen, out, as_json=as_json)


for _command in app.registered_commands:
    _command.cls = Command


def main() -> NoReturn:
    """Run the command line and leave with an exit code; no traceback but with --debug."""
    run_commands(app, "training", training_exit_code)


if __name__ == "__main__":
    main()
