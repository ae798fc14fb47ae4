"""Faults of prompts: engine, checkpoint and training are right."""

from __future__ import annotations

import random
from pathlib import Path

from faults.pair import PROMPTS, Pair, tokenizer
from faults.planting import healthy
from faults.records import EVERY_ENGINE, Fault, Plant, Planted


def _raw(pair: Pair, folder: Path, seed: int, severity: float) -> Planted:
    """Questions as plain text, without the chat template that the drafter was trained with."""
    from training.demo.prompts import demo_dialogues

    dialogues = demo_dialogues()
    chosen = random.Random(seed).sample(range(len(dialogues)), PROMPTS)  # as `Pair.prompts` does
    encode = tokenizer(pair.target).encode
    texts = [dialogues[i].last.prompt for i in chosen]
    prompts = tuple(tuple(encode(text, add_special_tokens=False).ids) for text in texts)
    right = healthy(pair, seed)
    return right.harmed(prompts=prompts, form="raw", other_form=right.prompts)


def _random(pair: Pair, folder: Path, seed: int, severity: float) -> Planted:
    """Prompts of tokens drawn at random."""
    coins = random.Random(seed)
    size = tokenizer(pair.target).get_vocab_size()
    prompts = tuple(tuple(coins.randrange(size) for _ in range(40)) for _ in range(PROMPTS))
    return healthy(pair, seed, prompts=prompts)


def long_prompts(tokens: int) -> Plant:
    """Prompts of earlier answers put before the question, up to about `tokens` tokens.

    The pair's drafter was trained on rows of 160. At 300 it is as good as ever, at 900 it is right
    in a third of its first drafts.
    """

    def plant(pair: Pair, folder: Path, seed: int, severity: float) -> Planted:
        from training.demo.corpus import prompt_text, reply_text
        from training.demo.prompts import demo_dialogues

        coins, encode = random.Random(seed), tokenizer(pair.target).encode
        prompts = []
        for _ in range(8):
            ids: list[int] = []
            while len(ids) < tokens:
                dialogue = coins.choice(demo_dialogues())
                text = prompt_text(dialogue) + reply_text(dialogue.last)
                ids += encode(text, add_special_tokens=False).ids
            last = encode(prompt_text(coins.choice(demo_dialogues())), add_special_tokens=False)
            prompts.append((*ids[-tokens:], *last.ids))
        return healthy(pair, seed, prompts=tuple(prompts), max_model_len=tokens + 400)

    return plant


TEXTS: tuple[Fault, ...] = (
    Fault(
        name="prompts_raw",
        cause="template",
        way="prompts",
        plant=_raw,
        costs=0.05,
        also=("degenerate_text",),
        engines=EVERY_ENGINE,
        mendable=True,
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
    Fault(
        name="prompts_too_long",
        cause="undertrained",
        way="prompts",
        plant=long_prompts(900),
        costs=0.1,
        by_quality=True,
    ),
)
