"""README and docs/: links lead somewhere, no page is lost, commands, options and keys exist."""

from __future__ import annotations

import importlib.util
import posixpath
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any
from urllib.parse import unquote

import docs_pages
import pytest
import typer
from docs_pages import Command

from drafters.__main__ import app as drafters_app
from harness.cli import app as harness_app
from harness.errors import UsageError
from harness.plan.axes import axes_of
from harness.plan.load import parse_set
from harness.plan.schema import Plan, Section
from training.__main__ import app as training_app
from training.plan import TrainingPlan

PAGES = docs_pages.pages()
TRACKED = docs_pages.tracked()
FOLDERS = {posixpath.dirname(path) for path in TRACKED} - {""}
PROGRAMS: dict[str, Any] = {
    "harness": typer.main.get_command(harness_app),
    "training": typer.main.get_command(training_app),
    "drafters": typer.main.get_command(drafters_app),
}
COMMANDS = [command for page in PAGES for command in docs_pages.commands(page)]
OPTION = re.compile(r"--[a-z][a-z-]*")
PLACEHOLDER = re.compile(r"(key|K|[A-Z]+|[a-z]+\.[A-Z]+)=")


def target_of(page: str, link: str) -> tuple[str, str]:
    """The file that a link of a page leads to, and the anchor in it."""
    path, _, anchor = unquote(link).partition("#")
    whole = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
    return whole, anchor


@cache
def local_links() -> list[tuple[str, str, str, str]]:
    """Page, link as written, file and anchor."""
    return [
        (page, link, *target_of(page, link))
        for page in PAGES
        for link in docs_pages.links(docs_pages.text_of(page))
        if not re.match(r"[a-z][a-z0-9+.-]*:", link)
    ]


def test_every_link_leads_to_a_file_that_is_in_git() -> None:
    assert len(local_links()) > 150
    assert not [(p, link) for p, link, to, _ in local_links() if to not in TRACKED | FOLDERS]


def test_every_anchor_exists() -> None:
    found = [(p, link, to, at) for p, link, to, at in local_links() if at and to.endswith(".md")]
    assert len(found) > 20
    known = {to: docs_pages.anchors(docs_pages.text_of(to)) for _, _, to, _ in found}
    assert not [(page, link) for page, link, to, at in found if at not in known[to]]


def test_every_page_is_reached_from_the_readme() -> None:
    reached, fresh = {"README.md"}, {"README.md"}
    while fresh:
        fresh = {to for page, _, to, _ in local_links() if page in fresh} - reached
        reached |= fresh
    assert not set(PAGES) - reached
    pictures = {path for path in TRACKED if path.startswith("docs/img/")}
    assert not pictures - reached


@pytest.mark.parametrize(
    ("head", "slug"),
    [
        ("The environment", "the-environment"),
        ("`run` and its keys", "run-and-its-keys"),
        ("Pairs, or not?", "pairs-or-not"),
        ("Kimi-K2.5 on 8 GPUs", "kimi-k25-on-8-gpus"),
        ("What [the page](x.md) says", "what-the-page-says"),
        ("snake_case — and a dash", "snake_case--and-a-dash"),
    ],
)
def test_slugs_are_github_s(head: str, slug: str) -> None:
    assert docs_pages.anchors(f"# {head}\n\n# {head}\n") == {slug, f"{slug}-1"}


def test_what_stands_in_code_is_no_link_and_no_heading() -> None:
    text = "a\n\n```\n# no [x](y.md)\n```\n\n    # no [x](y.md)\n\n`[x](y.md)` [x](z.md)\n"
    assert docs_pages.links(text) == ["z.md"]
    assert docs_pages.anchors(text) == set()


def commands_of(words: tuple[str, ...], top: Any) -> tuple[list[Any], list[str]]:
    """The command that leading words name, with the groups above it; a|b: every one of them."""
    chain, rest = [top], list(words)
    while rest and getattr(chain[-1], "commands", None) and not rest[0].startswith(("-", "[")):
        names = rest[0].split("|")
        unknown = [name for name in names if name not in chain[-1].commands]
        if unknown:
            raise UsageError(f"no command {unknown[0]}")
        chain += [chain[-1].commands[name] for name in names]
        rest.pop(0)
    return chain, rest


def options_of(command: Any) -> set[str]:
    return {name for p in command.params for name in (*p.opts, *p.secondary_opts)}


def parse(top: Any, words: list[str]) -> None:
    """Parse a whole call as the program would, running nothing. Raises the parser's errors."""
    context = top.make_context(top.name, [w for w in words if w != "--debug"])
    while getattr(context.command, "commands", None):
        rest = [*context._protected_args, *context.args]
        if not rest and context.command.invoke_without_command:
            return
        name, command, rest = context.command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)


def fault(command: Command) -> str | None:
    """What is wrong with a call in a page; None: nothing."""
    if "." in command.program:
        there = importlib.util.find_spec(command.program)
        return None if there is not None else "no such module"
    top = PROGRAMS[command.program]
    try:
        if not command.shape:
            parse(top, list(command.words))
            return None
        chain, rest = commands_of(command.words, top)
    except Exception as error:
        return str(error) or type(error).__name__
    known = set().union({"--debug", "--help"}, *(options_of(c) for c in chain))
    wrong = set(OPTION.findall(" ".join(rest))) - known
    return f"no option {', '.join(sorted(wrong))}" if wrong else None


def test_every_command_and_option_exists() -> None:
    assert len(COMMANDS) > 150
    assert {c.program for c in COMMANDS} >= set(PROGRAMS)
    wrong = {(c.page, c.program, " ".join(c.words)): fault(c) for c in COMMANDS}
    assert not {call: why for call, why in wrong.items() if why}


def every_command(command: Any, named: str) -> Iterator[str]:
    """The whole name of each command that does something by itself."""
    for name, inner in getattr(command, "commands", {}).items():
        yield from every_command(inner, f"{named} {name}")
    if not getattr(command, "commands", None) or command.invoke_without_command:
        yield named


def test_the_page_of_the_command_line_has_every_command() -> None:
    shapes = [c for c in COMMANDS if c.page == "docs/command-line.md"]
    told = {
        f"{c.program} {' '.join(command_path)}".strip()
        for c in shapes
        if "." not in c.program
        for command_path in paths_of(c.words, PROGRAMS[c.program])
    }
    real = {name for top in PROGRAMS for name in every_command(PROGRAMS[top], top)}
    assert len(real) > 25
    assert not real - told


def paths_of(words: tuple[str, ...], top: Any) -> list[tuple[str, ...]]:
    """The commands that a synopsis is of, each as the words that name it."""
    if not words or not getattr(top, "commands", None):
        return [()]
    names = [n for n in words[0].split("|") if n in top.commands]
    inner = [(n, rest) for n in names for rest in paths_of(words[1:], top.commands[n])]
    return [(n, *rest) for n, rest in inner] or [()]


@pytest.mark.parametrize(
    ("program", "line", "shape"),
    [
        ("harness", "rn", False),
        ("harness", "run --engin vllm", False),
        ("harness", "analyse", False),
        ("harness", "engines shw", False),
        ("harness", "nightly accept --suite s.toml", False),
        ("harness", "calibrate --rounds many", False),
        ("harness", "run [--profil NAME]", True),
        ("training", "generate|captur [--plan NAME]", True),
        ("harness.nothing", "", False),
    ],
)
def test_a_wrong_command_is_found(program: str, line: str, shape: bool) -> None:
    made = Command(page="", program=program, words=tuple(line.split()), shape=shape)
    assert fault(made) is not None


def values_of(words: tuple[str, ...], option: str) -> list[str]:
    """What is given to an option, after a space or an equals sign."""
    after = [b for a, b in pairwise(words) if a == option]
    return after + [w.partition("=")[2] for w in words if w.startswith(f"{option}=")]


@cache
def key_fault(item: str, option: str, root: type[Section]) -> str | None:
    try:
        if option == "--over":
            axes_of([item])
        else:
            parse_set(item, root)
    except UsageError as error:
        return str(error)
    return None


def test_every_key_of_a_plan_exists() -> None:
    wrong, count = [], 0
    for command in COMMANDS:
        root = TrainingPlan if command.program == "training" else Plan
        for option in ("--set", "--over"):
            for item in values_of(command.words, option):
                if "=" in item and not PLACEHOLDER.match(item) and not command.shape:
                    count += 1
                    wrong.append((command.page, key_fault(item, option, root)))
    assert count > 80
    assert not [(page, why) for page, why in wrong if why]


def test_keys_within_sentences_exist() -> None:
    """There the page does not say whose key it is: one of the two plans must know it."""
    wrong = []
    for page in PAGES:
        text = docs_pages.FENCE.sub("", docs_pages.text_of(page))
        spans = " ".join(span for _, span in docs_pages.INLINE.findall(text))
        items = re.findall(r"--set +([\w.-]+=[^\s'\"]+)", spans)
        for item in (item for item in items if not PLACEHOLDER.match(item)):
            if all(key_fault(item, "--set", plan) for plan in (Plan, TrainingPlan)):
                wrong.append((page, item))
    assert not wrong
