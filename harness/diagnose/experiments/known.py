"""What is known of the subject: the target's text with all its hidden states, and the drafter.

The target is computed by the reference engine in float32 on the CPU, the drafter is read as its
checkpoint says. Every experiment is held against these.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from harness.diagnose.records import Subject
from harness.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from drafters.eagle3 import Eagle3Drafter
    from engines.reference.engine import Engine
    from training.unroll import Captured

MAX_TOKENS = 56
SLOTS = 8


@dataclass(frozen=True, kw_only=True)
class HiddenStates:
    """All that the target computes for T tokens, float32, L layers.

    `inputs` [L + 1, T, H]: the input of each layer, and the last one's output without the final
    norm. `normed` [T, H]: that output after it. `mlp` [L, T, H]: each layer's feed-forward part
    alone, which is what an engine holds apart from its residual stream between two layers.
    """

    inputs: Tensor
    normed: Tensor
    mlp: Tensor

    @property
    def layers(self) -> int:
        return self.mlp.shape[0]

    def at(self, index: int) -> Tensor:
        """The state [T, H] at transformers' index: the number of layers is the normed last one."""
        return self.normed if index == self.layers else self.inputs[index]

    def aux(self, layers: Sequence[int]) -> Tensor:
        """The states at these indices side by side, [T, n * H]."""
        import torch

        return torch.cat([self.at(i) for i in layers], dim=-1)

    def branch(self, layer: int) -> Tensor:
        """What this layer adds to the residual stream, [T, H]."""
        return self.inputs[layer + 1] - self.inputs[layer]


@dataclass(frozen=True, kw_only=True)
class Text:
    """A prompt, the answer to it, at most k tokens that the target would go on with; and states."""

    prompt: list[int]
    answer: list[int]
    beyond: list[int]
    states: HiddenStates

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.answer, *self.beyond]

    @property
    def end(self) -> int:
        """The index behind the answer's last token."""
        return len(self.prompt) + len(self.answer)


class Knowledge:
    """The subject's target and drafter, loaded, and the texts they are looked at on.

    `aux_layers`: those of the checkpoint, in transformers' index; where it names none
    (`layers_named` False) the engines' default. `greedy`: whether the answers are the target's own
    argmax by the reference engine, not an engine's.
    """

    def __init__(
        self,
        *,
        subject: Subject,
        engine: Engine,
        drafter: Eagle3Drafter,
        texts: Sequence[Text],
        layers_named: bool,
        greedy: bool,
    ) -> None:
        self.subject, self.engine, self.drafter = subject, engine, drafter
        self.texts = tuple(texts)
        self.layers_named, self.greedy = layers_named, greedy
        self._states = {tuple(text.tokens): text.states for text in self.texts}

    @property
    def k(self) -> int:
        return self.subject.k

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.drafter.spec.aux_layers

    @property
    def layers(self) -> int:
        """Of the target."""
        return self.engine.model.config.layers

    def states(self, tokens: Sequence[int]) -> HiddenStates:
        """The target's states of any text; computed once for each."""
        key = tuple(tokens)
        if key not in self._states:
            self._states[key] = hidden_states(self.engine, list(tokens))
        return self._states[key]

    def choice(self, states: HiddenStates) -> Tensor:
        """The target's own next token at each position, int64 [T]."""
        return self.engine.model.logits(states.normed).argmax(-1)

    def captured(self, layers: Sequence[int] | None = None) -> Captured:
        """All texts as one batch, a row each, with the aux states at `layers` (None: its own)."""
        texts = [(text.tokens, len(text.prompt), text.states) for text in self.texts]
        chosen = self.aux_layers if layers is None else tuple(layers)
        return batch_of([(t, begin, s.aux(chosen)) for t, begin, s in texts])


def batch_of(rows: Sequence[tuple[Sequence[int], int, Tensor]]) -> Captured:
    """Rows (tokens, first answer token, aux [T, A]) as a batch; no last states are in it."""
    from training.data import Document, collate
    from training.unroll import Captured

    length = max(len(tokens) for tokens, _, _ in rows)
    documents = [[Document(ids=list(tokens), loss_from=begin)] for tokens, begin, _ in rows]
    aux = rows[0][2].new_zeros(len(rows), length, rows[0][2].shape[-1])
    for row, (tokens, _, states) in enumerate(rows):
        aux[row, : len(tokens)] = states[: len(tokens)]
    return Captured(batch=collate(documents, length), aux=aux, last_normed=aux[..., :0])


def know(
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    *,
    answers: Sequence[Sequence[int]] | None = None,
    max_tokens: int = MAX_TOKENS,
    engine: Engine | None = None,
) -> Knowledge:
    """Load the subject's target and drafter, and compute the texts of `prompts`.

    `answers`: what an engine answered; None: the target's own greedy answers of at most
    `max_tokens`. `engine`: the reference engine with this target, loaded before, to be used again.
    Raises `EngineUsageError` or `UsageError` where the reference engine cannot serve the target,
    `DrafterError` where the drafter cannot be read.
    """
    longest = max(map(len, prompts)) + max([max_tokens, *map(len, answers or ())])
    engine = loaded_target(subject, longest, engine)
    drafter, named = declared(subject, engine)
    positions = drafter.spec.max_position_embeddings
    if longest + subject.k > positions:
        raise UsageError(
            f"{subject.drafter}: the drafter knows {positions} positions, and prompt and answer "
            f"take {longest + subject.k}; diagnose with shorter prompts"
        )
    return Knowledge(
        subject=subject,
        engine=engine,
        drafter=drafter,
        texts=_texts(engine, prompts, answers, max_tokens, subject.k),
        layers_named=named,
        greedy=answers is None,
    )


def loaded_target(subject: Subject, longest: int, engine: Engine | None = None) -> Engine:
    """The reference engine with the subject's target in float32, for texts of `longest` tokens."""
    from engines.reference.config import read_config
    from engines.reference.loading import load_engine
    from training.capture.proving import FLOAT32_GROWTH
    from training.targets import reference_refusal

    target = Path(subject.target)
    wanted = min(longest + subject.k + 1, read_config(target).max_positions)
    if engine is not None and engine.max_len >= wanted:
        return engine
    refused = reference_refusal(target, growth=FLOAT32_GROWTH)
    if refused is not None:
        raise UsageError(f"the reference engine cannot compute the target: {refused}")
    return load_engine(target, dtype="float32", max_len=wanted, slots=SLOTS, threads=_threads())


def _threads() -> int:
    """All cores but one, which is the served engine's: threads that wait for a core wait long."""
    import torch

    return max(1, min(torch.get_num_threads(), (os.cpu_count() or 2) - 1))


def declared(subject: Subject, engine: Engine) -> tuple[Eagle3Drafter, bool]:
    """The drafter as its checkpoint says, and whether that names its layers.

    Where it names none it is read with the layers that engines then take.
    """
    from drafters.ids import default_layers
    from drafters.reading import read_folder, read_target
    from training.evaluation.offline import sharing

    folder, target = Path(subject.drafter), Path(subject.target)
    checkpoint = read_folder(folder, read_target(target))
    if checkpoint.ids is not None:
        return sharing(folder, engine, target), True
    taken = default_layers(engine.model.config.layers)[: checkpoint.num_aux]
    with tempfile.TemporaryDirectory() as copy:
        _name_layers(folder, Path(copy), taken)
        return sharing(Path(copy), engine, target), False


def _name_layers(folder: Path, copy: Path, indices: Sequence[int]) -> None:
    """The same checkpoint, its weights linked, with `indices` written as its layers."""
    import json

    for file in folder.resolve().iterdir():
        if file.name != "config.json":
            (copy / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    ids = list(indices)
    inner = {**(config.get("eagle_config") or {}), "eagle_aux_hidden_state_layer_ids": ids}
    mark = {"ids_for": "vllm", "hidden_states_index": ids, "layer_ids": ids}
    named = {**config, "eagle_aux_hidden_state_layer_ids": ids, "eagle_config": inner}
    text = json.dumps({**named, "drafter_format": mark})
    (copy / "config.json").write_text(text, encoding="utf-8")


def _texts(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]] | None,
    max_tokens: int,
    k: int,
) -> list[Text]:
    """The target's texts: they are no drafter's, and computed once as long as an engine lives."""
    given = None if answers is None else tuple(map(tuple, answers))
    key = (tuple(map(tuple, prompts)), given, max_tokens, k)
    known = _KNOWN.setdefault(engine, {})
    if key not in known:
        known[key] = _computed(engine, prompts, answers, max_tokens, k)
    return known[key]


_KNOWN: WeakKeyDictionary[Engine, dict[tuple, list[Text]]] = WeakKeyDictionary()
"""Of each engine the texts that were computed by it."""


def _computed(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]] | None,
    max_tokens: int,
    k: int,
) -> list[Text]:
    from training.evaluation import offline
    from training.evaluation.records import HeldOut

    if answers is None:
        held = [
            HeldOut(prompt_id=str(i), category=None, token_ids=tuple(p), max_tokens=max_tokens)
            for i, p in enumerate(prompts)
        ]
        known = [
            (list(e.held.token_ids), e.answer, e.beyond)
            for e in offline.answers(engine, held, k, stage=None)
        ]
    else:
        ends = [[*p, *a] for p, a in zip(prompts, answers, strict=True)]
        tails = offline.beyond(engine, ends, k, stage=None)
        known = [(list(p), list(a), b) for p, a, b in zip(prompts, answers, tails, strict=True)]
    return [
        Text(prompt=p, answer=a, beyond=b, states=hidden_states(engine, [*p, *a, *b]))
        for p, a, b in known
    ]


def hidden_states(engine: Engine, tokens: list[int]) -> HiddenStates:
    """All layers' states of `tokens` by an idle reference engine."""
    import torch

    model = engine.model
    count = model.config.layers
    with _Listening(model.layers) as heard, torch.no_grad():
        states = engine.capture(tokens, tuple(range(count + 1)))  # [T, L + 1, H]
    mlp = [torch.cat([piece[0] for piece in pieces]) for pieces in heard.mlp]
    last = torch.cat([piece[0] for piece in heard.last])
    inputs = torch.cat((states[:, :-1].transpose(0, 1), last[None]))
    return HiddenStates(inputs=inputs.clone(), normed=states[:, -1].clone(), mlp=torch.stack(mlp))


class _Listening:
    """Keeps what the layers' feed-forward parts and the last layer return, while it is open."""

    def __init__(self, layers: list) -> None:
        self.layers = layers
        self.mlp: list[list[Tensor]] = [[] for _ in layers]
        self.last: list[Tensor] = []

    def __enter__(self) -> _Listening:
        self.parts = [layer.mlp for layer in self.layers]
        self.final = self.layers[-1]
        for layer, kept in zip(self.layers, self.mlp, strict=True):
            layer.mlp = _Tap(layer.mlp, kept)
        self.layers[-1] = _Tap(self.final, self.last)
        return self

    def __exit__(self, *error: object) -> None:
        self.layers[-1] = self.final
        for layer, part in zip(self.layers, self.parts, strict=True):
            layer.mlp = part


class _Tap:
    """A function that keeps its results."""

    def __init__(self, inner, kept: list[Tensor]) -> None:  # type: ignore[no-untyped-def]
        self.inner, self.kept = inner, kept

    def __call__(self, *inputs: object) -> Tensor:
        found: Tensor = self.inner(*inputs)
        self.kept.append(found)
        return found
