"""The experiments of a diagnosis, in the order in which they are made: what each is, and needs."""

from __future__ import annotations

from typing import Any

import msgspec

from harness.diagnose.records import (
    Audit,
    Controls,
    Expected,
    Observed,
    Replay,
    Sampling,
    States,
    TargetParity,
    Toggle,
    Wanted,
)


class Experiment(msgspec.Struct, frozen=True):
    """What it looks at, what it cannot be made without, and the type of its record."""

    looks_at: str
    needs: str
    record: Any


EXPERIMENTS: dict[str, Experiment] = {
    "audit": Experiment("the checkpoints, the arguments and the log, read", "the files", Audit),
    "expected": Experiment(
        "what the drafter would be accepted by the paper", "a target that can be computed here",
        Expected,
    ),
    "observed": Experiment("what the engine accepts", "the engine", Observed),
    "states": Experiment(
        "the states handed to the drafter, beside the reference's",
        "an engine that is started here (a trace), and the target", States,
    ),
    "replay": Experiment(
        "the drafter in float32 on the engine's own states", "as states", Replay
    ),
    "wanted": Experiment("what the drafter was trained for", "the target", Wanted),
    "target": Experiment(
        "the target's log-probabilities, beside the reference's",
        "an engine that tells log-probabilities, and the target", TargetParity,
    ),
    "sampling": Experiment(
        "acceptance at the temperature", "sampling.temperature above 0, and the target", Sampling
    ),
    "toggles": Experiment(
        "one thing at a time otherwise", "the engine; most of them, one started here",
        tuple[Toggle, ...],
    ),
    "controls": Experiment("what working and broken look like", "the target", Controls),
}  # fmt: skip


def listed() -> list[tuple[str, str]]:
    """Names, and a line on each."""
    return [(name, f"{e.looks_at}. Needs {e.needs}.") for name, e in EXPERIMENTS.items()]
