"""Read a trace back from its folder (`engines/trace/plugin/trace_files.py` says what lies there).

A trace outlives what cost it a file: what cannot be read is left out and told.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.base import EngineUsageError
from engines.trace.base import TraceStep

if TYPE_CHECKING:
    from torch import Tensor

Answer = tuple["Tensor", int]
"""Drafts int64 [k], and how many requests they were made for at once."""
# cmpl-<client's id>-<index of the prompt>[-<random>] and chatcmpl-<client's id>[-<random>]
_VLLM_COMPLETION = re.compile(r"^cmpl-(?P<id>.+?)-\d+(?:-[0-9a-f]{8})?$")
_VLLM_CHAT = re.compile(r"^chatcmpl-(?P<id>.+?)(?:-[0-9a-f]{8})?$")


@dataclass(frozen=True, kw_only=True)
class Trace:
    """All steps by the client's request id, in order, and the files that could not be read."""

    steps: dict[str, list[TraceStep]]
    problems: tuple[str, ...]


def read_trace(
    folder: Path, tell: Callable[[str], None] = lambda line: None
) -> dict[str, list[TraceStep]]:
    """The steps of every request by the client's request id, in order.

    A request with a step missing is left out: what lies around the gap would be taken for one step
    and the next, and its counts for the engine's. `tell` hears of that in one line. Raises
    `EngineUsageError` where there is no such folder, or no request in it can be read.
    """
    trace = read_whole(folder)
    steps = {name: found for name, found in trace.steps.items() if _unbroken(found)}
    broken = len(trace.steps) - len(steps)
    why = f": {' '.join(trace.problems[0].split())[:200]}" if trace.problems else ""
    if not steps:
        why = why or (": steps are missing" if broken else "; the engine wrote no call into it")
        raise EngineUsageError(f"{folder}: no trace of a drafter can be read{why}")
    if trace.problems or broken:
        files, left = len(trace.problems), f"{broken} requests with steps missing are left out"
        tell(f"{folder}: {files} files of the trace cannot be read, {left}{why}")
    return steps


def _unbroken(steps: Sequence[TraceStep]) -> bool:
    """Whether every step up to the last is there; ranks that share a folder write each again."""
    numbers = {step.step for step in steps}
    return numbers == set(range(len(numbers)))


def read_whole(folder: Path) -> Trace:
    """As `read_trace`, with what could not be read; an empty folder has no steps."""
    if not folder.is_dir():
        raise EngineUsageError(f"{folder}: there is no such folder of a trace")
    steps: dict[str, list[TraceStep]] = defaultdict(list)
    answers: dict[tuple[str, int], Answer] = {}
    problems = []
    for path in sorted(folder.glob("*.safetensors")):
        try:
            found, answered = read_call(path)
        except Exception as error:  # whatever a damaged file makes of its reader
            problems.append(f"{path.name}: {type(error).__name__}: {error}")
            continue
        answers |= answered
        for step in found:
            steps[step.request].append(step)
    for name, of_request in steps.items():
        steps[name] = [_answered(step, answers.get((name, step.step))) for step in of_request]
    return Trace(steps=dict(steps), problems=tuple(problems))


def _answered(step: TraceStep, answer: Answer | None) -> TraceStep:
    if answer is None:
        return step
    drafts, batch = answer
    return replace(step, drafts=drafts, batch=max(step.batch, batch))


def read_call(path: Path) -> tuple[list[TraceStep], dict[tuple[str, int], Answer]]:
    """The steps of one file, or the drafts that were made for steps of other files.

    Raises whatever a damaged file makes of its reader, ValueError.
    """
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        header = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if "answer" in header:
        return [], _answers(json.loads(header["answer"]), tensors["drafts"])
    told = json.loads(header["call"])
    lengths = tensors["lengths"].tolist()
    for name in ("positions", "token_ids", "aux"):
        if len(tensors[name]) != sum(lengths):
            raise ValueError(f"{len(tensors[name])} {name} for {sum(lengths)} rows")
    rows = [tensors[name].split(lengths) for name in ("positions", "token_ids", "aux")]
    singles = [tensors[name] for name in ("valid", "next_token", "drafts", "proposed")]
    of_request = zip(told["requests"], *rows, *singles, strict=True)
    return [_step(told, *parts) for parts in of_request], {}


def _answers(told: list[dict[str, Any]], drafts: Tensor) -> dict[tuple[str, int], Answer]:
    return {
        (client_id(each["request"]), int(each["step"])): (row, len(told))
        for each, row in zip(told, drafts, strict=True)
    }


def _step(
    told: dict[str, Any], request: dict[str, Any], positions: Tensor, ids: Tensor, aux: Tensor,
    valid: Tensor, next_token: Tensor, drafts: Tensor, proposed: Tensor,
) -> TraceStep:  # fmt: skip
    if not 0 <= int(valid) <= len(positions):
        raise ValueError(f"{int(valid)} of {len(positions)} rows are valid")
    return TraceStep(
        request=client_id(request["request"]),
        step=int(request["step"]),
        call=int(told["call"]),
        batch=int(told["batch"]),
        kind=request["kind"],
        positions=positions,
        token_ids=ids,
        aux=aux.float(),
        valid=int(valid),
        next_token=None if int(next_token) < 0 else int(next_token),
        drafts=drafts[: int(proposed)],
    )


def client_id(engine_id: str) -> str:
    """The client's own id of a request, from the name that vLLM makes of it."""
    for pattern in (_VLLM_COMPLETION, _VLLM_CHAT):
        found = pattern.match(engine_id)
        if found:
            return found["id"]
    return engine_id
