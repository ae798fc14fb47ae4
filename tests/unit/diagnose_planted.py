"""Drafters that the reference engine runs otherwise than it should, and the trace of it.

Written against the engine's own drafting (call by call, with a cache), not against the readings
that are to recognise them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafters.checkpoint import load
from drafters.eagle3 import Eagle3Drafter
from engines.reference.cache import Batch, attend
from engines.reference.draft import EagleProposer
from engines.reference.engine import Engine
from engines.reference.loading import load_engine
from engines.reference.request import Request
from engines.reference.sampling import SamplingParams
from engines.reference.tokenizer import Tokenizer
from engines.trace.base import TraceStep
from engines.trace.reference import trace_to_memory
from harness.diagnose.records import Subject

SLOTS = 4
LENGTH = 256


def target_engine(pair: Path) -> Engine:
    return load_engine(pair / "target", dtype="float32", max_len=LENGTH, slots=SLOTS)


def subject_of(pair: Path, k: int = 3, **more: Any) -> Subject:
    return Subject(
        engine="reference",
        target=str(pair / "target"),
        drafter=str(pair / "drafter-mla"),
        k=k,
        **more,
    )


def prompts_of(engine: Engine, pair: Path, count: int) -> list[list[int]]:
    assert engine.tokenizer is not None
    return demo_prompts(engine.tokenizer, pair, count)


def demo_prompts(tokenizer: Tokenizer, pair: Path, count: int) -> list[list[int]]:
    import json

    lines = (pair / "prompts.jsonl").read_text().splitlines()[:count]
    texts = [tokenizer.render(json.loads(line)["messages"]) for line in lines]
    return [tokenizer.encode(text, special=False) for text in texts]


def drafter_of(pair: Path, engine: Engine) -> Eagle3Drafter:
    head = load(pair / "drafter-mla")
    head.share(embeddings=engine.model.embedding)
    return head.eval().requires_grad_(False)


def serve(
    engine: Engine,
    drafter: Eagle3Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    kind: type[EagleProposer] = EagleProposer,
    k: int = 3,
    around: Callable[[Any], Any] | None = None,
    max_tokens: int = 40,
) -> dict[str, list[TraceStep]]:
    """Answers of an engine that drafts so; `around` wraps its proposer, as a plugin does."""
    proposer: Any = kind(
        drafter, k=k, slots=SLOTS, length=LENGTH, vocab_size=engine.model.config.vocab_size
    )
    served = Engine(
        engine.model,
        tokenizer=engine.tokenizer,
        proposer=around(proposer) if around else proposer,
        max_len=LENGTH,
        slots=SLOTS,
    )
    steps = trace_to_memory(served)
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    requests = [
        Request(list(prompt), params, stream=False, name=f"r{i}")
        for i, prompt in enumerate(prompts)
    ]
    for request in requests:
        served.submit(request)
    while not all(request.finished for request in requests):
        served.step()
    return steps


class Stepping(EagleProposer):
    """Knows its draft step: 0 while it catches up."""

    step = 0
    drafting = False

    def propose(self, rows: int, params: Any, uniform: Any) -> Any:
        self.step, self.drafting = 0, True
        try:
            return super().propose(rows, params, uniform)
        finally:
            self.drafting = False

    def _layer(self, ids: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        ids, hidden = self.changed(ids, hidden, batch)
        found = super()._layer(ids, hidden, batch)
        if self.drafting:
            self.step += 1
        return found

    def changed(self, ids: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return ids, hidden


class Frozen(Stepping):
    def changed(self, ids: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        if self.drafting:
            batch.positions = batch.positions - self.step
        return ids, hidden


class Restarted(Stepping):
    """Verify steps count their positions from 0; the prompt's last token is the prefill's."""

    def changed(self, ids: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        if self.drafting:
            for row in range(batch.rows):
                if self.starts[row] >= self.prompts[row]:
                    batch.positions[row] -= self.starts[row]
        return ids, hidden

    def begin(self, slot: int, tokens: list[int], aux: Tensor) -> None:
        if not hasattr(self, "prompts"):
            self.prompts = [0] * SLOTS
        self.prompts[slot] = len(tokens) - 1
        super().begin(slot, tokens, aux)

    def move(self, source: int, target: int) -> None:
        self.prompts[target] = self.prompts[source]
        super().move(source, target)


class Unshifted(EagleProposer):
    def begin(self, slot: int, tokens: list[int], aux: Tensor) -> None:
        if not hasattr(self, "newest"):
            self.newest = [0] * SLOTS
        self.newest[slot] = tokens[-1]
        super().begin(slot, [tokens[0], *tokens[:-1]], aux)

    def record(self, starts: list[int], accepted: list[int], tokens: Tensor, aux: Tensor) -> None:
        late = torch.cat((torch.zeros_like(tokens[:, :1]), tokens[:, :-1]), dim=1)
        for row, count in enumerate(accepted):
            late[row, 0], self.newest[row] = self.newest[row], int(tokens[row, count])
        super().record(starts, accepted, late, aux)

    def move(self, source: int, target: int) -> None:
        self.newest[target] = self.newest[source]
        super().move(source, target)


class Forgetful(Stepping):
    def changed(self, ids: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        if self.drafting and self.step == 0:
            at = torch.arange(batch.rows), torch.tensor(self.last[: batch.rows])
            self.fused = hidden[at][:, None]
        return (ids, self.fused) if self.drafting and self.step else (ids, hidden)


class Zeroed(Stepping):
    def changed(self, ids: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return ids, torch.zeros_like(hidden) if self.drafting and self.step else hidden


class SameToken(Stepping):
    """Every draft step is fed the token that the first one was."""

    def changed(self, ids: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        if self.drafting and self.step == 0:
            at = torch.arange(batch.rows), torch.tensor(self.last[: batch.rows])
            self.token = ids[at][:, None]
        return (self.token, hidden) if self.drafting and self.step else (ids, hidden)


class Keeping(Stepping):
    """Entries that drafts wrote stay: all of them, or those before the last new one."""

    end_only = False

    def begin(self, slot: int, tokens: list[int], aux: Tensor) -> None:
        if not hasattr(self, "written"):
            self.written: list[set[int]] = [set() for _ in range(SLOTS)]
        self.written[slot] = set()
        super().begin(slot, tokens, aux)

    def move(self, source: int, target: int) -> None:
        self.written[target] = self.written[source]
        self.cache.move(source, target, self.cache.length)
        super().move(source, target)

    def _layer(self, ids: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        drafter, cache = self.drafter, self.cache
        if not self.drafting:
            return super()._layer(ids, hidden, batch)
        q, k, v, residual = drafter.project(drafter.embed(ids), hidden, batch.positions)
        old = [store.clone() for store in (cache.keys[0], cache.values[0])]  # type: ignore[index]
        cache.write(0, batch, k, v)
        for row in range(batch.rows):
            if self.step == 0:
                end = self.starts[row] + self.last[row]
                for at in self.written[row]:
                    if self.starts[row] <= at < end + (not self.end_only):
                        cache.keys[0][row, :, at] = old[0][row, :, at]
                        cache.values[0][row, :, at] = old[1][row, :, at]  # type: ignore[index]
                self.written[row] = set()
            else:
                self.written[row].add(self.starts[row] + self.last[row] + self.step)
        self.step += 1
        keys, values = cache.read(0, batch)
        return attend(q, keys, values, batch, drafter.scale), residual


class KeepingButTheEnd(Keeping):
    end_only = True


class PromptLost(EagleProposer):
    def begin(self, slot: int, tokens: list[int], aux: Tensor) -> None:
        super().begin(slot, tokens, aux)
        for store in (self.cache.keys[0], self.cache.values[0]):  # type: ignore[index]
            store[slot] = 0


class Swapped(EagleProposer):
    def propose(self, rows: int, params: Any, uniform: Any) -> Any:
        drafts, chances = super().propose(rows, params, uniform)
        return drafts.roll(1, 0), chances


class StaleStates(Stepping):
    """Draft steps read the states that the call before left: a buffer a step and a row."""

    def changed(self, ids: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        if not self.drafting or self.step == 0:
            return ids, hidden
        if not hasattr(self, "buffers"):
            self.buffers: dict[int, Tensor] = {}
        place = self.buffers.setdefault(self.step, torch.zeros(SLOTS, 1, hidden.shape[-1]))
        old = place[: batch.rows].clone()
        place[: batch.rows] = hidden
        return ids, old


PLANTED: dict[str, type[EagleProposer]] = {
    "positions frozen in drafting": Frozen,
    "positions restarted at each call": Restarted,
    "tokens not shifted": Unshifted,
    "fused state fed again": Forgetful,
    "recurrent state zero": Zeroed,
    "first token fed again": SameToken,
    "cache not overwritten": Keeping,
    "cache overwritten at its end only": KeepingButTheEnd,
    "cache of the prompt zero": PromptLost,
    "another request's proposals": Swapped,
    "states of the previous call": StaleStates,
}
"""The reading that has to be found, by the proposer that is planted."""
