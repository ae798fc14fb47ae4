"""Chat prompts to train SmolLM2's drafter on, made by SmolLM2 itself.

    python tests/recipes/smollm2_prompts.py TARGET OUT.jsonl --count 1500

The chat template is given up to where the user's words would begin, and the model goes on with
them: what it believes a user to say (the idea of Magpie, arXiv 2406.08464). Prompts that come
twice, are cut, or hold no word are left out. The built-in prompts are not among them, so that they
can be held out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

# Torch's threads spin while they wait, by default: ruinous where something else has a core.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
MOST_TOKENS = 64
AT_ONCE = 64
ROUND = 256  # more than run at once, so that a place is taken as soon as it is free


def beginning(folder: Path) -> list[int]:
    """The template's tokens up to the user's first word."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    mark = "\N{SNOWMAN}"
    text = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    return list(tokenizer.encode(text.partition(mark)[0]))


def is_prompt(text: str) -> bool:
    """Whether it is something that a user would say: some words, and no markup."""
    return len(re.findall(r"[A-Za-z]{2,}", text)) >= 3 and "<|" not in text


def write(engine: Any, start: list[int], count: int, out: Path, seed: int) -> int:
    """Append prompts until the file has `count`; returns how many it holds."""
    from engines.reference.sampling import SamplingParams

    seen: set[str] = set()
    with open(out, "w", encoding="utf-8") as file:
        for turn in range(100):
            params = [
                SamplingParams(max_tokens=MOST_TOKENS, temperature=0.9, seed=seed + i)
                for i in range(turn * ROUND, (turn + 1) * ROUND)
            ]
            for request in ask(engine, start, params):
                text = request.text.strip()
                if request.finish_reason != "stop" or text in seen or not is_prompt(text):
                    continue
                seen.add(text)
                line = {"id": f"own-{len(seen):05d}", "prompt": text}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                if len(seen) == count:
                    return count
            print(f"{len(seen)} of {count} prompts", file=sys.stderr, flush=True)
    return len(seen)


def ask(engine: Any, start: list[int], params: list[Any]) -> list[Any]:
    """One continuation of `start` by each of `params`."""
    from engines.reference.request import Request

    requests = [Request(start, p, tokenizer=engine.tokenizer, stream=False) for p in params]
    for request in requests:
        engine.submit(request)
    while not all(request.finished for request in requests):
        engine.step()
    return requests


def main() -> None:
    from engines.reference.loading import load_engine

    parser = argparse.ArgumentParser(description="Chat prompts made by the target itself.")
    parser.add_argument("target", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    engine = load_engine(given.target, dtype="bfloat16", max_len=256, slots=AT_ONCE)
    made = write(engine, beginning(given.target), given.count, given.out, given.seed)
    print(f"{given.out}: {made} prompts")


if __name__ == "__main__":
    main()
