"""The prompts of a plan: read from a file, fetched by name or made, then chosen and dealt.

A line of a JSONL file is `{"messages": [{"role", "content"}…]}` or `{"prompt": "…"}`, with
optional `id`, `category` and `answer`; `docs/workloads.md` tells the other shapes.
"""

from __future__ import annotations

import difflib
import random
from pathlib import Path

import msgspec

from harness.errors import UsageError
from harness.load.prompts.choose import (
    fitting,
    limited,
    of_categories,
    of_lengths,
    sampled,
    templated,
    unique_ids,
)
from harness.load.prompts.correct import is_correct
from harness.load.prompts.known import KNOWN, fetch_prompts, known_set
from harness.load.prompts.lengths import check_length
from harness.load.prompts.prompt import Prompt
from harness.load.prompts.readers import LINES, read_prompts, set_file
from harness.load.prompts.rows import Reading
from harness.load.prompts.synthetic import check_made, make_of_lengths, make_prompts
from harness.load.prompts.tokens import TargetTokenizer
from harness.load.schedule.trace import Trace, looks_like_trace, read_trace
from harness.plan.schema import WorkloadSection

__all__ = (
    "Allotment", "Prompt", "allot", "check_workload", "is_correct", "load_prompts",
    "needs_tokenizer", "read_jsonl",
)  # fmt: skip

BUILTIN = Path(__file__).with_name("builtin.jsonl")
MADE = ("synthetic", "random")
NAMED = ("builtin", "demo", *MADE)
TURNS = 64
"""Beginnings that are tried to make a warm-up prompt of token ids."""


class Allotment(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts of one start of an engine: its warm-up, and each measured cell's in order."""

    warmup: tuple[Prompt, ...]
    cells: tuple[tuple[Prompt, ...], ...]


def needs_tokenizer(workload: WorkloadSection) -> bool:
    """Whether the prompts cannot be had without the target's tokenizer."""
    counted = workload.min_input_tokens is not None or workload.max_input_tokens is not None
    made = workload.dataset in MADE or _trace(workload) is not None
    return made or counted or workload.chat_template == "client"


def load_prompts(
    workload: WorkloadSection,
    *,
    demo_prompts: Path | None = None,
    tokenizer: Path | None = None,
    seed: int = 0,
    context: int | None = None,
    trust_remote_code: bool = False,
    replay: Trace | None = None,
) -> list[Prompt]:
    """The plan's prompts, chosen and ready to be asked.

    `tokenizer`: the target's folder. `context`: the most tokens of prompt and answer together.
    `replay`: the trace whose prompts take the data set's place.
    Raises `UsageError` naming file and line.
    """
    check_workload(workload, context)
    tokens = TargetTokenizer(tokenizer, trust_remote_code=trust_remote_code)
    trace = _trace(workload) if replay is None else replay
    if trace is not None:
        prompts = of_trace(workload, tokens, trace, seed)
    elif workload.dataset in MADE:
        prompts = make_prompts(workload, tokens, seed=seed)
    else:
        prompts = unique_ids(_read(workload, demo_prompts))
        prompts = of_categories(prompts, workload)
        prompts = of_lengths(prompts, workload, tokens)
        prompts = sampled(prompts, workload.num_prompts, seed)
    prompts = limited(prompts, workload, seed)
    if workload.chat_template == "client":
        prompts = [templated(prompt, workload, tokens) for prompt in prompts]
    if context is not None and tokenizer is not None:
        prompts = fitting(prompts, workload, tokens, context)
    return prompts


def check_workload(workload: WorkloadSection, context: int | None = None) -> None:
    """Raise `UsageError` for what is wrong whatever the target's tokenizer may be."""
    check_length(workload.input_tokens, "workload.input_tokens")
    check_length(workload.output_tokens, "workload.output_tokens")
    low, high = workload.min_input_tokens, workload.max_input_tokens
    if low is not None and high is not None and high < low:
        raise UsageError(f"workload.max_input_tokens={high}: less than min_input_tokens={low}")
    if workload.chat_template == "client" and workload.endpoint == "chat":
        raise UsageError(
            "workload.chat_template=client: a chat endpoint applies the template itself; "
            "use it with workload.endpoint=completions"
        )
    untemplated = workload.endpoint == "completions" and workload.chat_template == "server"
    if workload.chat_template_kwargs and untemplated:
        raise UsageError(
            "workload.chat_template_kwargs: a completions endpoint applies no template; "
            "use workload.endpoint=chat, or workload.chat_template=client"
        )
    _check_keys(workload, trace=_trace(workload) is not None)
    if workload.dataset in MADE:
        check_made(workload, context)


def _check_keys(workload: WorkloadSection, *, trace: bool) -> None:
    """Raise `UsageError` for a key that would be passed over in silence."""
    made = workload.dataset in MADE
    chosen = ("categories", "min_input_tokens", "max_input_tokens", "column", "multi_turn")
    for key in chosen if made or trace else ():
        if getattr(workload, key) is not None:
            raise UsageError(f"workload.{key}: says nothing of prompts that are made; leave it out")
    if workload.input_tokens is not None and not made:
        raise UsageError(
            "workload.input_tokens: for workload.dataset=synthetic and random; a file's prompts "
            "are chosen by workload.min_input_tokens and workload.max_input_tokens"
        )
    if workload.prefix_tokens and not (made or trace):
        raise UsageError("workload.prefix_tokens: for workload.dataset=synthetic and random")
    if not workload.prefix_tokens and (workload.prefix_reuse != 1 or workload.prefix_groups != 1):
        raise UsageError(
            "workload.prefix_reuse and prefix_groups: only with workload.prefix_tokens"
        )
    for key in ("subset", "split"):
        if getattr(workload, key) is not None and workload.dataset in NAMED:
            raise UsageError(f"workload.{key}: says nothing of workload.dataset={workload.dataset}")


def _read(workload: WorkloadSection, demo_prompts: Path | None) -> list[Prompt]:
    dataset = workload.dataset
    how = Reading(column=workload.column, multi_turn=workload.multi_turn)
    if dataset == "builtin":
        return read_prompts(BUILTIN, how)
    if dataset == "demo":
        if demo_prompts is None:
            raise UsageError("workload.dataset=demo: only with the demo pair as the target")
        return read_prompts(demo_prompts, how)
    known = known_set(dataset)
    path = _existing(dataset)
    if path is None and known is not None:
        return fetch_prompts(known, workload.subset, workload.split, how)
    if path is None:
        names = (*NAMED, *(one.name for one in KNOWN))
        near = difflib.get_close_matches(dataset.casefold(), names, n=1)
        raise UsageError(
            f"workload.dataset={dataset[:200]}: no such file, nor a known data set "
            f"({', '.join(names)})" + (f"; did you mean {near[0]}?" if near else "")
        )
    if path.is_dir():
        path = set_file(path, workload.subset, workload.split)
    return read_prompts(path, how)


def _existing(dataset: str) -> Path | None:
    try:
        path = Path(dataset).expanduser()
        return path if dataset.strip() and (path.is_file() or path.is_dir()) else None
    except (OSError, RuntimeError, ValueError):
        return None


def read_jsonl(path: Path) -> list[Prompt]:
    """Read prompts, one JSON object a line. Raises `UsageError` naming the line."""
    return read_prompts(path, Reading())


def _trace(workload: WorkloadSection) -> Trace | None:
    """The trace, where the data set is one that says lengths and no prompts."""
    if workload.dataset in NAMED or not workload.dataset.lower().endswith(LINES):
        return None
    path = _existing(workload.dataset)
    if path is None or not path.is_file() or not looks_like_trace(path):
        return None
    return read_trace(path, "workload.dataset")


def of_trace(
    workload: WorkloadSection, tokens: TargetTokenizer, trace: Trace, seed: int
) -> list[Prompt]:
    """What a trace asked, in its order; made prompts of its lengths where it says no more.

    The first ones where fewer are wanted. Raises `UsageError` where a line says no length either.
    """
    rows = trace.rows[: workload.num_prompts]
    told = trace.prompts()
    if told is not None:
        return told[: workload.num_prompts]
    lengths = []
    for row in rows:
        if row.input_tokens is None:
            raise UsageError(f"{trace.path}, line {row.line}: no prompt and no 'input_tokens'")
        lengths.append(row.input_tokens)
    made = make_of_lengths(workload, tokens, lengths, random.Random(f"{seed}-trace"))
    return [
        msgspec.structs.replace(
            prompt,
            id=f"trace-{i:06d}",
            category="trace",
            max_tokens=row.output_tokens,
            position=i,
        )
        for i, (prompt, row) in enumerate(zip(made, rows, strict=True))
    ]


def allot(prompts: list[Prompt], *, warmup: int, needs: list[int], seed: int) -> Allotment:
    """Deal the prompts of one start: shuffled by `seed`, each once before any comes again.

    A trace's prompts are dealt in its order, to each cell from the beginning. The warm-up's prompts
    are not measured, so that no cache holds a measured prompt; where the set is too small for that,
    the warm-up asks something else: its prompts are altered.
    """
    order = list(prompts)
    in_order = all(prompt.position is not None for prompt in order)
    if not in_order:
        random.Random(seed).shuffle(order)
    used = max(needs, default=0) if in_order else sum(needs)
    spare = max(0, len(order) - used)
    apart = order[len(order) - min(warmup, spare) :] if spare and warmup else []
    measured = order[: len(order) - len(apart)] or order
    known = {prompt.token_ids for prompt in measured if prompt.token_ids is not None}
    altered = [_altered(measured[i % len(measured)], known) for i in range(warmup - len(apart))]
    cells: list[tuple[Prompt, ...]] = []
    at = 0
    for need in needs:
        cells.append(tuple(measured[(at + i) % len(measured)] for i in range(need)))
        at += 0 if in_order else need
    return Allotment(
        warmup=tuple(apart + altered),
        cells=tuple(cells),
    )


def _altered(prompt: Prompt, measured: set[tuple[int, ...]]) -> Prompt:
    """The prompt with another beginning, so that no cache of prefixes knows it."""
    name = f"{prompt.id}-warm"
    if prompt.token_ids is not None:
        ids = prompt.token_ids
        # Of ids nothing is known but that these are good ones: the same from another one on.
        turned = (ids[at:] + ids[:at] for at in range(1, min(len(ids), TURNS)))
        moved = next((t for t in turned if t not in measured), ids)
        while moved in measured:
            moved = (*moved, ids[-1])
        return msgspec.structs.replace(prompt, id=name, token_ids=moved)
    if prompt.text is not None:
        return msgspec.structs.replace(prompt, id=name, text=f"Warm up. {prompt.text}")
    assert prompt.messages is not None
    first = dict(prompt.messages[0])
    if isinstance(first["content"], list):
        first["content"] = [{"type": "text", "text": "Warm up."}, *first["content"]]
    else:
        first["content"] = f"Warm up. {first['content'] or ''}"
    return msgspec.structs.replace(prompt, id=name, messages=(first, *prompt.messages[1:]))
