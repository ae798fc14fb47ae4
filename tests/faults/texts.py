"""Faults of prompts: engine, checkpoint and training are right."""

from __future__ import annotations

import random
from pathlib import Path

from faults.pair import PROMPTS, Pair, tokenizer
from faults.planting import healthy
from faults.records import EVERY_ENGINE, Fault, Planted


def _raw(pair: Pair, folder: Path, seed: int, severity: float) -> Planted:
    """Questions as plain text, without the chat template that the drafter was trained with."""
    from training.demo.prompts import demo_dialogues

    dialogues = demo_dialogues()
    chosen = random.Random(seed).sample(range(len(dialogues)), PROMPTS)  # as `Pair.prompts` does
    encode = tokenizer(pair.target).encode
    texts = [dialogues[i].last.prompt for i in chosen]
    prompts = tuple(tuple(encode(text, add_special_tokens=False).ids) for text in texts)
    return healthy(pair, seed, prompts=prompts, form="raw", other_form=pair.prompts(seed))


def _random(pair: Pair, folder: Path, seed: int, severity: float) -> Planted:
    """Prompts of tokens drawn at random."""
    coins = random.Random(seed)
    size = tokenizer(pair.target).get_vocab_size()
    prompts = tuple(tuple(coins.randrange(size) for _ in range(40)) for _ in range(PROMPTS))
    return healthy(pair, seed, prompts=prompts)


def looping(pair: Pair, folder: Path, seed: int, severity: float) -> Planted:
    """Prompts that say one line over and over: the answers go on so, and inflate acceptance."""
    from training.demo.prompts import demo_dialogues

    dialogues = random.Random(seed).sample(demo_dialogues(), PROMPTS)
    encode = tokenizer(pair.target).encode
    texts = [dialogue.last.prompt[:40] for dialogue in dialogues]
    prompts = tuple(tuple(encode(text * 8, add_special_tokens=False).ids[:200]) for text in texts)
    return healthy(pair, seed, prompts=prompts)


TEXTS: tuple[Fault, ...] = (
    Fault(
        name="prompts_raw",
        cause="template",
        way="prompts",
        plant=_raw,
        costs=0.05,
        also=("degenerate_text",),
        engines=EVERY_ENGINE,
    ),
    Fault(
        name="prompts_random",
        cause="degenerate_text",
        way="prompts",
        plant=_random,
        costs=0.05,
        also=("template",),
        engines=EVERY_ENGINE,
    ),
)
