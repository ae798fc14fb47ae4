"""What was not the same when two runs were made: plan, models, versions, code, machine.

These are the usual cause of a difference in figures, so that they are told first. What every run
has of its own, such as its time, its ports and its folder, is passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from harness.analyse.across.records import Area, Difference, Stored
from harness.analyse.data import SEARCH
from harness.errors import one_line
from harness.measure.hardware import gpu_words, number_of
from harness.records import VARIANTS, Manifest

ALL: tuple[Area, ...] = ("speed", "acceptance", "start-up", "output", "memory")
DRAFTING: tuple[Area, ...] = ("speed", "acceptance", "start-up", "memory")
ENGINE: tuple[Area, ...] = ("speed", "start-up", "memory")
SPEED: tuple[Area, ...] = ("speed",)
ASKED: tuple[Area, ...] = ("speed", "acceptance", "output")

MOVES: dict[str, tuple[Area, ...]] = {
    "engine.dtype": ALL,
    "engine.device": ALL,
    "engine.flags": ALL,
    "engine.env": ALL,
    "engine.extra_args": ALL,
    "engine.extra_env": ALL,
    "engine.reasoning_parser": ("output",),
    "engine": ENGINE,
    "target": ALL,
    "drafter": DRAFTING,
    "demo": ALL,
    "speculative": DRAFTING,
    "workload": ASKED,
    "sampling": ASKED,
    "seed": ASKED,
    "load": SPEED,
    "client": SPEED,
    "slo": SPEED,
    "telemetry": SPEED,
}
"""What a key of the plan may move: the longest beginning that fits counts; others move nothing."""
SILENT = ("why", "description", "engines", "expect", "name")
"""Keys of the plan that tell a reader something and change nothing."""
UNSEEN = ("engine.port", "target.path", "drafter.path", "engine.startup_deadline_s")
"""Told elsewhere, or of no consequence: where a checkpoint lies is not what it is."""
WORKLOAD = ("workload.", "sampling.temperature", "sampling.top_p", "sampling.top_k")
SAME_WORKLOAD = ("workload.num_prompts",)
"""More prompts of the same kind: the starts do not pair, but may be compared."""
SECRET = re.compile(r"^client\.headers\.|token$|key$|secret|password", re.IGNORECASE)
"""Keys whose values are not for a page that others read."""
MACHINE = {
    "cpu": "CPU",
    "cores_usable": "usable cores",
    "machine": "architecture",
    "platform": "operating system",
    "python": "Python",
}
"""Of the manifest's `environment`, and how it is called."""
MEMORY_SHARE = 0.02
"""Two machines of one kind tell their memory a little differently."""


def differences(a: Stored, b: Stored, engines: Mapping[str, str]) -> list[Difference]:
    """Everything that differs in how the two were made.

    `engines`: each of `a` that is compared, and the one of `b` that it is compared with.
    """
    found = [d for names in engines.items() for d in _of_engine(a, b, names)]
    found += [*_software(a.run.manifest, b.run.manifest)]
    found += [*_machine(a.run.manifest.environment, b.run.manifest.environment)]
    return found


def ordered(found: Iterable[Difference]) -> tuple[Difference, ...]:
    """Each once: what hinders a comparison first, then what may move figures."""
    return tuple(sorted(dict.fromkeys(found), key=lambda d: (not d.blocks, not d.affects)))


def _of_engine(a: Stored, b: Stored, names: tuple[str, str]) -> Iterator[Difference]:
    one, other = names
    # Of a single engine there is no need to say which.
    prefix = f"{one}: " if len(a.plans) > 1 else ""
    if one != other:
        yield _difference(f"{prefix}engine", names, ALL)
    yield from _models(a, b, names, prefix)
    yield from _plan(a.plans[one], b.plans[other], prefix)
    yield from _flags(a, b, names, prefix)
    was = a.run.manifest.engine_versions.get(one)
    is_ = b.run.manifest.engine_versions.get(other)
    if was and is_:  # where its Python did not answer, nothing is known
        yield from _changed(was, is_, ALL, f"{one}'s ")


def _models(a: Stored, b: Stored, names: tuple[str, str], prefix: str) -> Iterator[Difference]:
    sides = tuple(zip((a.run.manifest, b.run.manifest), names, strict=True))
    for what, affects in (("target", ALL), ("drafter", DRAFTING)):
        digests = [m.digests.get(n, {}).get(what) for m, n in sides]
        paths = [m.plan.get("models", {}).get(n, {}).get(what) for m, n in sides]
        if None not in digests:
            said = [f"{_name(p)} ({d})" for p, d in zip(paths, digests, strict=True)]
            if digests[0] != digests[1]:
                yield _difference(f"{prefix}{what}", said, affects, blocks=what == "target")
        elif paths[0] != paths[1]:
            blocks = what == "target" and _name(paths[0]) != _name(paths[1])
            yield _difference(f"{prefix}{what}'s path", paths, affects, blocks=blocks)


def _name(path: str | None) -> str | None:
    """A checkpoint's name: a demo pair's target lies in a folder that names the pair."""
    return None if path is None else "/".join(PurePath(path).parts[-2:])


def _plan(a: dict[str, Any], b: dict[str, Any], prefix: str) -> Iterator[Difference]:
    was, is_ = flat(a), flat(b)
    for key in dict.fromkeys((*was, *is_)):
        ends = was.get(key), is_.get(key)
        if ends[0] != ends[1] and key not in UNSEEN:
            blocks = key.startswith(WORKLOAD) and key not in SAME_WORKLOAD
            if SECRET.search(key):
                ends = was.get(key) and "one value", is_.get(key) and "another"
            yield _difference(f"{prefix}{key}", ends, moves(key), blocks=blocks)


def flat(plan: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """A plan's keys by their whole names; of a flag its value alone, without its reason."""
    found: dict[str, Any] = {}
    for name, value in plan.items():
        key = f"{above}{name}"
        if key in SILENT:
            continue
        if above in ("engine.flags.", "engine.env."):
            variant = value.get("variant")
            found[f"{key} ({variant})" if variant else key] = value.get("value")
        elif isinstance(value, Mapping) and value:
            found.update(flat(value, f"{key}."))
        elif value not in ({}, [], ()):
            found[key] = value
    return found


def moves(key: str) -> tuple[Area, ...]:
    """What a key of the plan may move."""
    fit = [known for known in MOVES if key == known or key.startswith(f"{known}.")]
    return MOVES[max(fit, key=len)] if fit else ()


def _flags(a: Stored, b: Stored, names: tuple[str, str], prefix: str) -> Iterator[Difference]:
    """What the engine was started with: also what this harness adds to the plan."""
    if names[0] != names[1]:
        return
    for variant in VARIANTS:
        was, is_ = (s.argv.get(f"{names[0]} {variant}") for s in (a, b))
        if was is not None and is_ is not None:
            yield from _changed(flags_of(was), flags_of(is_), ALL, f"{prefix}{variant} ")


def flags_of(argv: tuple[str, ...]) -> dict[str, str]:
    """A command's flags with their values, without ports and paths, which every start has anew."""
    found: dict[str, str] = {}
    name = None
    for word in argv:
        if word.startswith("-") and len(word) > 1 and not word[1].isdigit():
            name, equals, value = word.partition("=")
            found[name] = value if equals else ""
        elif name is not None:
            found[name] = f"{found[name]} {word}".strip()
    return {
        flag: "set" if SECRET.search(flag) else value
        for flag, value in found.items()
        if "port" not in flag and "/" not in value and flag not in ("-m", "-c")
    }


def _software(was: Manifest, is_: Manifest) -> Iterator[Difference]:
    commits = [m.git_commit and m.git_commit[:12] for m in (was, is_)]
    if commits[0] != commits[1]:
        yield _difference("git commit", commits, ALL)
    elif (was.git_dirty, was.git_diff) != (is_.git_dirty, is_.git_diff):
        yield _difference("uncommitted changes", [_dirt(was), _dirt(is_)], ALL)
    yield from _changed(was.versions, is_.versions, ALL)
    if was.changes != is_.changes:
        ends = ["; ".join(m.changes) or "nothing" for m in (was, is_)]
        yield _difference("changed within the run", ends, ALL)


def _dirt(manifest: Manifest) -> str:
    return f"yes ({manifest.git_diff or 'not known which'})" if manifest.git_dirty else "none"


def _machine(was: Mapping[str, Any], is_: Mapping[str, Any]) -> Iterator[Difference]:
    for key, name in MACHINE.items():
        if was.get(key) != is_.get(key):
            yield _difference(name, [was.get(key), is_.get(key)], ENGINE)
    if "gpus" in was and "gpus" in is_:
        cards = [gpu_words(was["gpus"]), gpu_words(is_["gpus"])]
        if cards[0] != cards[1]:
            yield _difference("GPUs", cards, ALL)
    sizes = [number_of(e.get("memory_bytes")) or 0 for e in (was, is_)]
    if all(sizes) and abs(sizes[0] - sizes[1]) > MEMORY_SHARE * max(sizes):
        yield _difference("memory", [f"{size / 2**30:.0f} GiB" for size in sizes], ENGINE)


def _changed(
    was: Mapping[str, Any], is_: Mapping[str, Any], affects: tuple[Area, ...], prefix: str = ""
) -> Iterator[Difference]:
    for key in dict.fromkeys((*was, *is_)):
        if was.get(key) != is_.get(key):
            yield _difference(f"{prefix}{key}", [was.get(key), is_.get(key)], affects)


def _difference(
    key: str, ends: Sequence[Any], affects: tuple[Area, ...], *, blocks: bool = False
) -> Difference:
    """`ends`: the reference's value and the candidate's."""
    return Difference(
        key=one_line(key, 80),
        reference=_said(ends[0]),
        candidate=_said(ends[1]),
        affects=affects,
        blocks=blocks,
    )


def _said(value: Any) -> str | None:
    """A value in words; None where there is none."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return one_line(", ".join(_said(item) or "none" for item in value) or "none", 200)
    return one_line(str(value), 200) or "set"


def searching(*runs: Stored) -> bool:
    """Whether one of them is a capacity search, whose loads no plan names."""
    return any(SEARCH in s.run.manifest.plan for s in runs)
