"""The held-out prompts that go with the demo's target, and the marking of its replies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from training.demo import corpus

PROMPTS = 160
PROMPTS_SEED = 77


def demo_dialogues() -> list[corpus.Dialogue]:
    """The dialogues behind prompts.jsonl."""
    return corpus.held_out_dialogues(PROMPTS_SEED, PROMPTS)


def write_prompts(dialogues: list[corpus.Dialogue], path: Path) -> None:
    """One line a prompt: id, category, messages, and the right answer or null."""
    lines = []
    for number, dialogue in enumerate(dialogues):
        line: dict[str, Any] = {
            "id": f"demo-{number:03d}",
            "category": dialogue.last.category,
            "messages": dialogue.messages(),
            "answer": dialogue.last.answer if dialogue.last.checked else None,
        }
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


def is_right(reply: str, answer: str) -> bool:
    """True if what the reply says after its reasoning is the answer, blanks at the ends aside."""
    return reply.split(corpus.END_THINK)[-1].replace(corpus.IM_END, "").strip() == answer


def is_degenerate(reply: list[int]) -> bool:
    """True if the reply's tokens end in a loop: one run of tokens said four times over."""
    for size in range(1, len(reply) // 4 + 1):
        tail = reply[-4 * size :]
        if size * 4 >= 12 and tail == tail[:size] * 4:
            return True
    return False
