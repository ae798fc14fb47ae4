"""Whether what a stage left is still what its gate spoke of: a file can change after its proof.

Each function gives the stage's gate, as `passed_gate` does, and raises `UsageError` where the
output's digest is another one today; of samples, when the last of them was read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from harness.errors import UsageError
from training.folders import BEST, VOCAB_FILE, Stage, best_checkpoint, stage_folder
from training.gate import Gate, passed_gate
from training.samples import Sample

WEIGHTS = "model.safetensors"


def unchanged_samples(work: Path) -> tuple[Gate, Iterator[Sample]]:
    """The gate of `generate` and its kept samples, which are read but once, as they are taken.

    Whoever takes them takes all: at their end the iterator raises `UsageError` where they are not
    those that the gate spoke of. Nothing is to be made of them before.
    """
    folder = stage_folder(work, "generate")
    gate = passed_gate(folder, "generate")
    return gate, _proved(folder, gate)


def _proved(folder: Path, gate: Gate) -> Iterator[Sample]:
    from training.generate.judge import hashed
    from training.samples import read_samples

    whole = hashlib.sha256()
    yield from hashed(read_samples(folder), whole)
    if whole.hexdigest() != gate.output:
        raise _changed(folder, "samples", "generate", "run `python -m training generate` again")


def check_same_samples(work: Path, *stages: Stage) -> None:
    """Raise `UsageError` where a stage was made from other samples than are kept today.

    What is kept follows the plan (`generate.keep_truncated`), and with it which prompts are held
    out: some that were trained on would be evaluated on.
    """
    now = passed_gate(stage_folder(work, "generate"), "generate").output
    for stage in stages:
        folder = stage_folder(work, stage)
        if passed_gate(folder, stage).inputs.get("generate", now) != now:
            raise UsageError(
                f"{folder}: was made from other samples than generate keeps now; run `python -m "
                f"training generate` with the plan of before, or remove {folder} to make it anew"
            )


def unchanged_vocabulary(work: Path, vocab_size: int) -> Gate:
    """The gate of `vocab`, of a target with `vocab_size` tokens."""
    from training.train.stage import read_vocabulary
    from training.vocab import digest_of

    folder = stage_folder(work, "vocab")
    gate = passed_gate(folder, "vocab")
    kept = read_vocabulary(folder / VOCAB_FILE, vocab_size)
    if digest_of(None if kept is None else kept.tolist()) != gate.output:
        raise _changed(folder, VOCAB_FILE, "vocab", f"remove {folder} and run vocab again")
    return gate


def unchanged_best(work: Path) -> Gate:
    """The gate of `train`; the weights of its best checkpoint are read once."""
    from training.files import file_digest

    folder = stage_folder(work, "train")
    gate = passed_gate(folder, "train")
    weights = best_checkpoint(work) / WEIGHTS
    if not weights.is_file():
        raise UsageError(f"{weights} is missing; put it back, or remove {folder} and train again")
    if file_digest(weights) != gate.output:
        way_out = f"put the file back, or remove {folder} and train again"
        raise _changed(folder, f"{BEST}/{WEIGHTS}", "train", way_out)
    return gate


def _changed(folder: Path, what: str, stage: Stage, way_out: str) -> UsageError:
    return UsageError(f"{folder}: {what} changed since {stage} passed its gate; {way_out}")
