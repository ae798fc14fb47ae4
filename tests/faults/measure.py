"""What a case is accepted on the reference engine, by its own counts, without any server."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from faults.records import Planted
from harness.diagnose.experiments.lengths import counts_of_steps
from harness.records import DraftCounts

if TYPE_CHECKING:
    from engines.reference.engine import Engine
    from engines.reference.model import Model


LEAST, ERRORS = 0.05, 3.0
"""What every fault costs at every severity, over the prompts of three seeds: such a share of the
accepted drafts, and so many standard errors. Less is no collapse."""
ORDINARY = 0.4
"""A drafter whose first drafts are right this often is no collapse by itself: one that is only
worse (`Fault.by_quality`) has to be worse than this."""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What a fault takes of the accepted drafts: drafts a step, paired by prompt.

    `share`: of those that are accepted without it. `errors`: how many of its own standard errors
    the loss is; None where it has none. `first`: how often the first draft is accepted with it.
    """

    share: float
    errors: float | None
    first: float


def cost(cases: Sequence[tuple[Planted, Planted]]) -> Cost:
    """Each case without its fault and with it: over the prompts of all of them."""
    from harness.diagnose.experiments.figures import paired

    right: list[tuple[float, float]] = []
    wrong: list[tuple[float, float]] = []
    firsts = steps = 0
    for healthy, planted in cases:
        right += [(sum(log), len(log)) for log in accepted_by_prompt(healthy)]
        logs = accepted_by_prompt(planted)
        wrong += [(sum(log), len(log)) for log in logs]
        firsts += sum(count > 0 for log in logs for count in log)
        steps += sum(map(len, logs))
    usual = sum(a for a, _ in right) / sum(n for _, n in right)
    lost = paired(right, wrong)
    errors = lost.gain / lost.error if lost.error else None
    return Cost(share=lost.gain / usual, errors=errors, first=firsts / steps)


def accepted(planted: Planted, *, dtype: str | None = None) -> DraftCounts:
    """Serve the case's prompts and pool what the engine says of its verify steps.

    With several rounds the last one counts.
    """
    steps = [count for log in accepted_by_prompt(planted, dtype=dtype) for count in log]
    return counts_of_steps(steps, planted.k)


def accepted_by_prompt(planted: Planted, *, dtype: str | None = None) -> list[list[int]]:
    """How many drafts each verify step accepted, by prompt."""
    from engines.reference.sampling import SamplingParams

    params = SamplingParams(
        max_tokens=planted.max_tokens, temperature=planted.temperature, seed=None
    )
    with as_served(planted, dtype) as engine:
        for _ in range(planted.rounds):
            requests = engine.generate([list(prompt) for prompt in planted.prompts], params)
    return [[] if r.drafts is None else list(r.drafts.accepted) for r in requests]


def share(counts: DraftCounts) -> float:
    """Accepted of all drafts; 0 where none was made."""
    return counts.accepted / counts.drafted if counts.drafted else 0.0


@contextmanager
def as_served(planted: Planted, dtype: str | None = None) -> Iterator[Engine]:
    """The case's engine, loaded, with its plugin; what plugins replaced is put back at the end."""
    from engines.reference import engine as module
    from engines.reference.config import read_config
    from engines.reference.engine import Engine
    from engines.reference.loading import load_proposer

    kind = dtype or (planted.dtype if planted.dtype != "auto" else "float32")
    config = read_config(planted.target)
    length = min(planted.max_model_len or 512, config.max_positions)
    model = _model(planted.target, kind)
    known = (module.verify_greedy, module.verify_sampled, model.config, list(model.layers))
    proposer = load_proposer(
        planted.drafter,
        planted.target,
        model,
        k=planted.k,
        slots=planted.concurrency,
        length=length,
    )
    engine = Engine(
        model, tokenizer=None, proposer=proposer, max_len=length, slots=planted.concurrency
    )
    mlps = [layer.mlp for layer in model.layers]
    attentions = [(layer.attention.out, layer.attention.out.weight) for layer in model.layers]
    try:
        if planted.plugin is not None:
            _load(planted.plugin)(engine)
        yield engine
    finally:
        module.verify_greedy, module.verify_sampled, model.config, model.layers = known
        for layer, mlp, (out, weight) in zip(model.layers, mlps, attentions, strict=True):
            layer.mlp = mlp
            out.weight = weight
        model.prepare_rope(length)


@functools.lru_cache(maxsize=4)
def _model(target: Path, dtype: str) -> Model:
    from engines.reference.config import read_config
    from engines.reference.loading import load_model
    from engines.reference.weights import DTYPES

    return load_model(target, read_config(target), DTYPES[dtype], "cpu")


def _load(plugin: str) -> Any:
    file, function = plugin.rsplit(":", 1)
    spec = importlib.util.spec_from_file_location("planted", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, function)
