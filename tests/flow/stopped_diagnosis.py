"""A diagnosis of the demo pair in a process of its own, which ends itself where it is told to.

`python stopped_diagnosis.py PAIR FOLDER [EXPERIMENT SIGNAL]`: every experiment is made, and as soon
as EXPERIMENT is kept the process sends itself the signal.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from engines.reference.tokenizer import Tokenizer
from harness.diagnose import story
from harness.diagnose.experiments.work import Options
from harness.diagnose.records import Subject
from harness.progress import PlainProgress

PROMPTS, TOKENS = 4, 24


class Stopping(PlainProgress):
    """Ends its own process as soon as an experiment is kept."""

    def __init__(self, after: str | None, number: int) -> None:
        super().__init__()
        self.after, self.number = after, number

    def say(self, text: str) -> None:
        """As always, and the end behind it."""
        super().say(text)
        if self.after is not None and text.startswith(f"{self.after}: done"):
            os.kill(os.getpid(), self.number)


def main(pair: Path, folder: Path, after: str | None = None, number: str = "0") -> None:
    """Diagnose."""
    tokenizer = Tokenizer(pair / "target")
    lines = (pair / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:PROMPTS]
    texts = [tokenizer.render(json.loads(line)["messages"]) for line in lines]
    subject = Subject(
        engine="reference",
        target=str(pair / "target"),
        drafter=str(pair / "drafter-mla"),
        k=3,
        temperature=0.7,
    )
    with Stopping(after, int(number)) as progress:
        story.run(
            subject,
            [tokenizer.encode(text, special=False) for text in texts],
            folder,
            progress=progress,
            options=Options(max_tokens=TOKENS, thorough=True),
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
