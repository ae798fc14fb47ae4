"""Make the parts of the demo pair: the target with its prompts, and a drafter for it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from tokenizers import Tokenizer

from drafters import checkpoint
from training.demo import corpus
from training.demo.config import DrafterConfig, TargetConfig
from training.demo.drafter import (
    held_out_replies,
    measure_drafter,
    padded,
    train_demo_drafter,
)
from training.demo.export import export_target, load_target
from training.demo.prompts import demo_dialogues, is_degenerate, is_right, write_prompts
from training.demo.target import Reply, train_target
from training.demo.tokenizer import train_tokenizer
from training.progress import note

THREADS = 2
MEASURED_K = 3


class Stopwatch:
    """Wall and processor seconds since it was made."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def seconds(self) -> dict[str, float]:
        """Both, rounded to tenths."""
        return {
            "seconds": round(time.perf_counter() - self.wall, 1),
            "cpu_seconds": round(time.process_time() - self.cpu, 1),
        }


def use_threads() -> None:
    """The same number of threads everywhere: sums in another order give another model."""
    torch.set_num_threads(min(THREADS, os.cpu_count() or 1))


def build_target(config: TargetConfig, folder: Path) -> dict[str, Any]:
    """Train and export the target and write its prompts; returns the record for pair.json."""
    use_threads()
    watch = Stopwatch()
    note(f"demo target ({config.kind}): {config.steps} steps, once; it is kept for later runs")
    tokenizer = train_tokenizer(config.vocab_size, config.seed)
    model = train_target(config, tokenizer).requires_grad_(False)
    export_target(model, tokenizer, folder / "target")
    dialogues = demo_dialogues()
    write_prompts(dialogues, folder / "prompts.jsonl")
    record = {"config": msgspec.to_builtins(config), **watch.seconds()}
    record["held_out"] = mark(held_out_replies(model, tokenizer, dialogues), dialogues, tokenizer)
    note(f"demo target ({config.kind}): {record['held_out']}")
    return record


def mark(
    replies: list[Reply], dialogues: list[corpus.Dialogue], tokenizer: Tokenizer
) -> dict[str, Any]:
    """How the replies end, whether they loop, and how many are right, by category."""
    right: dict[str, list[bool]] = {}
    for reply, dialogue in zip(replies, dialogues, strict=True):
        if dialogue.last.checked:
            text = tokenizer.decode(reply.ids, skip_special_tokens=False)
            good = is_right(text, dialogue.last.answer)
            turn = "after_earlier_turn" if len(dialogue.turns) > 1 else "single_turn"
            for group in ("all", turn, dialogue.last.category):
                right.setdefault(group, []).append(good)
    return {
        "prompts": len(replies),
        "ended": sum(r.ended for r in replies) / len(replies),
        "degenerate": sum(is_degenerate(r.ids) for r in replies),
        "mean_tokens": round(sum(len(r.ids) for r in replies) / len(replies), 1),
        "max_tokens": max(len(r.ids) for r in replies),
        "accuracy": {group: round(sum(x) / len(x), 3) for group, x in sorted(right.items())},
    }


def build_drafter(
    target: TargetConfig, drafter: DrafterConfig, pair: Path, folder: Path
) -> dict[str, Any]:
    """Train a drafter for the target in `pair` and save it in `folder`; returns its record."""
    use_threads()
    watch = Stopwatch()
    tokenizer = Tokenizer.from_file(str(pair / "target" / "tokenizer.json"))
    model = load_target(pair / "target", target)
    note(f"demo drafter ({drafter.kind}): {drafter.steps} steps")
    made = padded(train_demo_drafter(model, drafter, tokenizer))
    checkpoint.save(made, folder)
    record = {"config": msgspec.to_builtins(drafter), **watch.seconds()}
    replies = held_out_replies(model, tokenizer, demo_dialogues())
    counts = measure_drafter(model, made, replies, MEASURED_K)
    record["held_out"] = {
        "k": MEASURED_K,
        "acceptance_length": round(counts.acceptance_length or 0.0, 4) or None,
        "per_position": [round(p, 4) for p in counts.position_rates or ()],
        "counts": msgspec.to_builtins(counts),
    }
    note(f"demo drafter ({drafter.kind}): {record['held_out']}")
    return record
