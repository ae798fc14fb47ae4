"""Reads the documentation: its pages, headings, links and commands, as GitHub and a shell would."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import msgspec

REPO = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^(`{3,}).*?^\1`*$", re.S | re.M)
INDENTED = re.compile(r"(?:^\n|\A)((?:^ {4,}.*\n|^\n)*^ {4,}\S.*$)", re.M)
INLINE = re.compile(r"(`+)(.+?)(?<!`)\1(?!`)", re.S)
PROGRAMS = ("harness", "training", "drafters")
CALL = re.compile(r"python3? -m ((?:harness|training|drafters)(?:\.[\w.]+)?)(?![\w.])(.*)", re.S)


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """One call in a page: `words` after the program's name; `shape`: a synopsis, no real call."""

    page: str
    program: str
    words: tuple[str, ...]
    shape: bool


def tracked() -> frozenset[str]:
    """Every file of the repository that is in git."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPO, capture_output=True, check=True)
    return frozenset(listed.stdout.decode().split("\0")) - {""}


def pages() -> list[str]:
    """README.md and every page below docs/."""
    return sorted(p for p in tracked() if p == "README.md" or re.fullmatch(r"docs/.+\.md", p))


def text_of(page: str) -> str:
    return (REPO / page).read_text(encoding="utf-8")


def prose(text: str) -> str:
    """The text without its code: what stands there is no link and no heading."""
    return INLINE.sub("", INDENTED.sub("\n", FENCE.sub("", text)))


def links(text: str) -> list[str]:
    """Targets of links and images, in Markdown and in HTML."""
    return re.findall(r"\]\(\s*([^)\s]+)", prose(text)) + re.findall(
        r"\b(?:src|href)=\"([^\"]+)\"", prose(text)
    )


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings: GitHub's slugs, one that comes again with a number."""
    found: set[str] = set()
    for head in re.findall(r"^#{1,6} +(.+?)(?: +#+)?$", FENCE.sub("", text), re.M):
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", head).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        name, count = slug, 0
        while name in found:
            count += 1
            name = f"{slug}-{count}"
        found.add(name)
    return found | set(re.findall(r"<a (?:name|id)=\"([^\"]+)\"", text))


def blocks(text: str) -> list[str]:
    """The blocks of code of a page, fenced ones and those four spaces in."""
    fenced = [m[0].partition("\n")[2].rpartition("\n")[0] for m in FENCE.finditer(text)]
    return fenced + [m[1] for m in INDENTED.finditer(FENCE.sub("", text))]


def _lines(block: str) -> list[str]:
    """Whole commands: a line that ends in a backslash, or a synopsis, goes on in the next."""
    joined = re.sub(r"[ \t]*\\\n\s*", " ", block)
    joined = re.sub(r"\n +(?=\[|--)", " ", joined)
    return [line.strip() for line in joined.splitlines() if line.strip()]


def _calls(line: str) -> list[tuple[str, tuple[str, ...]]]:
    """The calls in a line of shell, those within `$( )` too: module, and words after it."""
    found: list[tuple[str, tuple[str, ...]]] = []
    here: list[str] = []
    for token in [*_words(line), ";"]:
        if set(token) <= set("();<>|&"):
            at = next((i for i, w in enumerate(here) if re.search(r"python3?$", w)), None)
            if at is not None and here[at + 1 : at + 2] == ["-m"] and len(here) > at + 2:
                found.append((here[at + 2], tuple(here[at + 3 :])))
            here = []
        else:
            here.append(token)
    for inner in re.findall(r"\"[^\"]*\$\(([^()]*)\)[^\"]*\"", line):
        found += _calls(inner)
    return found


def _words(line: str) -> list[str]:
    """A shell's words and operators; a comment ends the line."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    for word in lexer:
        if word.startswith("#"):
            break
        words.append(word)
    return words


def commands(page: str) -> list[Command]:
    """Every call of the three programs: in blocks of code, and in code within sentences."""
    text = text_of(page)
    lines = [(line, False) for block in blocks(text) for line in _lines(block)]
    lines += [(" ".join(m[2].split()), True) for m in INLINE.finditer(FENCE.sub("", text))]
    found: list[Command] = []
    for line, inline in lines:
        call = CALL.search(line)
        if call is None:
            continue
        if inline or re.search(r"\[--|…|\.\.\.|\w\|\w", call[0]):
            words = tuple(call[2].partition(")")[0].split())  # up to the end of a $( )
            found.append(Command(page=page, program=call[1], words=words, shape=True))
            continue
        for program, words in _calls(line):
            if program.partition(".")[0] in PROGRAMS:
                found.append(Command(page=page, program=program, words=words, shape=False))
    return found
