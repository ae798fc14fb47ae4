"""Writes a trace, one file a call of the drafter. Runs inside every engine's own process.

This folder is put on the PYTHONPATH of the engine, which imports the modules by name; they use
torch and safetensors alone, which every engine has, and no part of this repository.

A file is whole as soon as it has its name, `<start>-<call>.safetensors`: `start` is when the
writer began (nanoseconds, hexadecimal), so that engines started one after another, and the ranks
of one, may share a folder. The requests' rows lie behind one another: `positions` and `token_ids`
int64 [R], `aux` [R, n * H] in the type it was handed over in; `lengths`, `valid` and `next_token`
int64 [requests] (-1: none), `drafts` int64 [requests, k] and `proposed` int64 [requests], how many
of these k count. The header's `call` is JSON: the call's number, the batch, and for each request
its id, step and kind. Where drafts are made later than states are handed over, they come in a file
of their own, `<start>-<answer>-drafts.safetensors`, with `drafts` and the header's `answer`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import save_file

PLUGIN_VARIABLE = "SPEC_HARNESS_ENGINE_PLUGIN"
"""FILE.py:FUNCTION, several of them separated by `;`."""


@dataclass(kw_only=True)
class Handed:
    """One request's part of a call; as `engines.trace.base.TraceStep` says, `aux` in any type."""

    request: str
    kind: str
    positions: torch.Tensor
    token_ids: torch.Tensor
    aux: torch.Tensor
    valid: int
    next_token: int | None
    drafts: torch.Tensor


class CallFiles:
    """Counts the calls and each request's steps, and writes every call to a file of its own.

    A write that fails costs that call: one line says so, and the engine goes on.
    """

    def __init__(self, folder: str) -> None:
        os.makedirs(folder, exist_ok=True)
        self.folder, self.start = folder, time.time_ns()
        self.calls = self.answers = 0
        self.steps: dict[str, int] = {}

    def __call__(self, handed: Sequence[Handed], batch: int) -> None:
        """Write one call of `batch` requests, of which `handed` are known."""
        call, told = self.calls, []
        self.calls += 1
        for part in handed:
            step = self.steps.get(part.request, 0)
            self.steps[part.request] = step + 1
            told.append({"request": part.request, "step": step, "kind": part.kind})
        header = {"call": json.dumps({"call": call, "batch": batch, "requests": told})}
        self._save(f"{call:08d}", _tensors(handed), header)

    def answer(self, requests: Sequence[str], drafts: torch.Tensor) -> None:
        """Write the drafts int64 [requests, k] that were made for each one's last step."""
        told = [{"request": each, "step": self.steps.get(each, 0) - 1} for each in requests]
        self.answers += 1
        self._save(
            f"{self.answers - 1:08d}-drafts", {"drafts": drafts}, {"answer": json.dumps(told)}
        )

    def _save(self, name: str, tensors: dict[str, torch.Tensor], header: dict[str, str]) -> None:
        path = os.path.join(self.folder, f"{self.start:016x}-{name}.safetensors")
        try:
            save_file(tensors, f"{path}.partial", metadata=header)
            os.replace(f"{path}.partial", path)
        except (OSError, ValueError, RuntimeError) as error:
            say(f"{os.path.basename(path)} is not in the trace: {error}")


def _tensors(handed: Sequence[Handed]) -> dict[str, torch.Tensor]:
    k = max((len(part.drafts) for part in handed), default=0)
    drafts = torch.full((len(handed), k), -1, dtype=torch.int64)
    for row, part in zip(drafts, handed, strict=True):
        row[: len(part.drafts)] = part.drafts
    nexts = [-1 if part.next_token is None else part.next_token for part in handed]
    return {
        "positions": torch.cat([part.positions for part in handed]).to("cpu", torch.int64),
        "token_ids": torch.cat([part.token_ids for part in handed]).to("cpu", torch.int64),
        "aux": torch.cat([part.aux.detach() for part in handed]).to("cpu").contiguous(),
        "lengths": torch.tensor([len(part.positions) for part in handed]),
        "valid": torch.tensor([part.valid for part in handed]),
        "next_token": torch.tensor(nexts),
        "drafts": drafts,
        "proposed": torch.tensor([len(part.drafts) for part in handed]),
    }


def load_functions(named: str) -> list[Callable[[Any], Any]]:
    """The functions that `FILE.py:FUNCTION[;…]` names. Raises ValueError, one clear line."""
    found = []
    for number, entry in enumerate(part for part in named.split(";") if part):
        path, colon, name = entry.rpartition(":")
        if not colon or not name.isidentifier():
            raise ValueError(f"{entry}: an engine's plugin is named FILE.py:FUNCTION")
        if not os.path.isfile(path):
            raise ValueError(f"{entry}: there is no file {path}")
        spec = importlib.util.spec_from_file_location(f"engine_plugin_{number}", path)
        if spec is None or spec.loader is None:
            raise ValueError(f"{entry}: {path} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise ValueError(f"{entry}: {path} cannot be imported: {error!r}") from error
        function = getattr(module, name, None)
        if not callable(function):
            raise ValueError(f"{entry}: {path} has no function {name}")
        found.append(function)
    return found


def call_plugins(subject: Any) -> None:
    """Give `subject` to the plugins that the environment names. Raises ValueError."""
    for function in load_functions(os.environ.get(PLUGIN_VARIABLE, "")):
        function(subject)


def say(message: str) -> None:
    """A line in the engine's log."""
    print(f"[trace] {message}", file=sys.stderr, flush=True)
