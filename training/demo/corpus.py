"""The demo's text: an endless, seeded stream of short dialogues, and prompts held out from it.

Whether a question is held out is decided by a hash of its own words (`is_held_out`), so that no
question of `held_out_dialogues` can occur in `training_documents`, whatever the seeds.
"""

# ruff: noqa: SIM905 (a list of words reads better as text)
from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator
from random import Random

import msgspec

from training.demo.stories import STORIES
from training.demo.tasks import TASKS, Turn

IM_END, IM_USER, IM_ASSISTANT = "<|im_end|>", "<|im_user|>", "<|im_assistant|>"
IM_SYSTEM, IM_MIDDLE = "<|im_system|>", "<|im_middle|>"
BOS, EOS, THINK, END_THINK = "[BOS]", "[EOS]", "<think>", "</think>"

TWO_TURN_SHARE = 0.25
PLAIN_TEXT_SHARE = 0.02
_HELD_OUT_ONE_IN = 16
# Modules of the standard library whose documentation strings serve as plain text.
_LIBRARY = "string textwrap random heapq bisect statistics fractions calendar queue shelve".split()

# Share of the held-out prompts that ask for a story or a list; in training it is much smaller.
STORY_PROMPTS_SHARE = 0.35

_GENERATORS = [generator for generator, _ in (*TASKS, *STORIES)]
_WEIGHTS = [weight for _, weight in (*TASKS, *STORIES)]


def _prompt_weights() -> list[float]:
    """The weights of the mix, with the stories' scaled up to their share of the prompts."""
    tasks, stories = (sum(weight for _, weight in group) for group in (TASKS, STORIES))
    scale = STORY_PROMPTS_SHARE / (1 - STORY_PROMPTS_SHARE) * tasks / stories
    return [w for _, w in TASKS] + [w * scale for _, w in STORIES]


class Dialogue(msgspec.Struct, frozen=True, kw_only=True):
    """One or two turns; the answer to the last one is what the model is to write."""

    turns: tuple[Turn, ...]

    @property
    def last(self) -> Turn:
        return self.turns[-1]

    def messages(self) -> list[dict[str, str]]:
        """The chat messages up to the last question, earlier answers without their working."""
        out = []
        for turn in self.turns[:-1]:
            out.append({"role": "user", "content": turn.prompt})
            out.append({"role": "assistant", "content": turn.answer})
        out.append({"role": "user", "content": self.last.prompt})
        return out


def is_held_out(prompt: str) -> bool:
    """True for the sixteenth part of all questions that is never trained on."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _HELD_OUT_ONE_IN == 0


def _draw(rng: Random, *, held_out: bool) -> Turn:
    generator = rng.choices(_GENERATORS, _prompt_weights() if held_out else _WEIGHTS)[0]
    while True:
        turn = generator(rng)
        if is_held_out(turn.prompt) == held_out:
            return turn


def _dialogue(rng: Random, *, held_out: bool) -> Dialogue:
    turns = 2 if rng.random() < TWO_TURN_SHARE else 1
    return Dialogue(turns=tuple(_draw(rng, held_out=held_out) for _ in range(turns)))


def training_dialogues(seed: int) -> Iterator[Dialogue]:
    """Endless dialogues of questions that are not held out."""
    rng = Random(seed)
    while True:
        yield _dialogue(rng, held_out=False)


def held_out_dialogues(seed: int, wanted: int) -> list[Dialogue]:
    """`wanted` dialogues of held-out questions, no two with the same last question."""
    rng = Random(seed)
    seen: set[str] = set()
    out: list[Dialogue] = []
    while len(out) < wanted:
        dialogue = _dialogue(rng, held_out=True)
        if dialogue.last.prompt not in seen:
            seen.add(dialogue.last.prompt)
            out.append(dialogue)
    return out


def prompt_text(dialogue: Dialogue) -> str:
    """The rendered prompt, as the chat template renders it with a generation prompt."""
    parts = []
    for turn in dialogue.turns[:-1]:
        parts.append(f"{IM_USER}user{IM_MIDDLE}{turn.prompt}{IM_END}")
        parts.append(f"{IM_ASSISTANT}assistant{IM_MIDDLE}{THINK}{END_THINK}{turn.answer}{IM_END}")
    parts.append(f"{IM_USER}user{IM_MIDDLE}{dialogue.last.prompt}{IM_END}")
    parts.append(f"{IM_ASSISTANT}assistant{IM_MIDDLE}{THINK}")
    return "".join(parts)


def reply_text(turn: Turn) -> str:
    """What the model is to write after the prompt, end token included."""
    return f"{turn.reasoning}{END_THINK}{turn.answer}{IM_END}"


def library_paragraphs() -> list[str]:
    """Paragraphs of the standard library's own documentation strings, in a fixed order."""
    import importlib

    paragraphs: list[str] = []
    for name in _LIBRARY:
        module = importlib.import_module(name)
        members = sorted(vars(module).items())
        for text in [module.__doc__, *(inspect.getdoc(v) for k, v in members if callable(v))]:
            for paragraph in (text or "").split("\n\n"):
                flat = " ".join(paragraph.split())
                if 80 <= len(flat) <= 400 and flat.isascii() and flat not in paragraphs:
                    paragraphs.append(flat)
    return paragraphs


def training_documents(seed: int) -> Iterator[tuple[str, str]]:
    """Endless (context, continuation) pairs of text; the loss is on the continuation."""
    rng = Random(seed)
    dialogues = training_dialogues(rng.getrandbits(64))
    library = library_paragraphs()
    while True:
        if rng.random() < PLAIN_TEXT_SHARE:
            yield BOS, rng.choice(library) + EOS
        else:
            dialogue = next(dialogues)
            yield prompt_text(dialogue), reply_text(dialogue.last)
