"""Files of prompts for tests, and how they are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.load.prompts.datasets import Prompt, load_prompts
from harness.plan.schema import WorkloadSection


def load(path: Path | str, **fields: Any) -> list[Prompt]:
    known = {k: fields.pop(k) for k in ("tokenizer", "seed", "context") if k in fields}
    return load_prompts(WorkloadSection(dataset=str(path), **fields), **known)


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
