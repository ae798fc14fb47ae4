"""Where each stage of a training keeps its output, under one folder."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

Stage = Literal["generate", "capture", "vocab", "train", "evaluate", "export"]
STAGES: tuple[Stage, ...] = ("generate", "capture", "vocab", "train", "evaluate", "export")
NAMES: dict[Stage, str] = {
    "generate": "samples",
    "capture": "states",
    "vocab": "vocab",
    "train": "train",
    "evaluate": "evaluate",
    "export": "export",
}
MODULES: dict[Stage, str] = {
    "generate": "training.generate.stage",
    "capture": "training.capture.stage",
    "vocab": "training.vocab",
    "train": "training.train.stage",
    "evaluate": "training.evaluation.stage",
    "export": "training.export",
}
"""Where each stage's `run(plan, out)` lies; imported when it is asked for."""
BEST = "best"
"""`train/best`: the folder of the checkpoint that evaluation and export take."""
CHECKPOINTS = "checkpoints"
VOCAB_FILE = "vocab.safetensors"
"""Holds d2t int64 [D] (offsets) and t2d bool [V]."""


def stage_folder(work: Path, stage: Stage) -> Path:
    """The folder of `stage` under the training's own folder."""
    return work / NAMES[stage]


def best_checkpoint(work: Path) -> Path:
    """Where the best drafter of `train` lies: config.json and model.safetensors."""
    return stage_folder(work, "train") / BEST
