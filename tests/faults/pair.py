"""The healthy pair that everything is planted in, and prompts for it."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from training.demo import pair as demo

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Kind = Literal["mla", "llama"]
PROMPTS = 16


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """A target with a drafter that was trained well for it."""

    kind: Kind
    folder: Path

    @property
    def target(self) -> Path:
        return self.folder / "target"

    @property
    def drafter(self) -> Path:
        return self.folder / f"drafter-{self.kind}"

    def prompts(self, seed: int, count: int = PROMPTS) -> tuple[tuple[int, ...], ...]:
        """`count` of the held-out prompts through the chat template; another seed, other ones."""
        texts = _texts()
        chosen = random.Random(seed).sample(range(len(texts)), count)
        encode = tokenizer(self.target).encode
        return tuple(tuple(encode(texts[i], add_special_tokens=False).ids) for i in chosen)


def find_pair(kind: Kind = "mla") -> Pair:
    """The demo pair of this kind, made where it is not cached yet. Raises PairError."""
    return Pair(kind=kind, folder=demo.make(*demo.configs(kind, kind)))


@functools.cache
def tokenizer(target: Path) -> Tokenizer:
    """The target's tokenizer, read once."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(target / "tokenizer.json"))


@functools.cache
def _texts() -> tuple[str, ...]:
    from training.demo.corpus import prompt_text
    from training.demo.prompts import demo_dialogues

    return tuple(prompt_text(dialogue) for dialogue in demo_dialogues())
