"""Faults of trainings, and drafters of other targets: nothing that an engine does is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from faults.algebra import turned_target, with_own_embeddings
from faults.pair import Pair, find_pair
from faults.planting import healthy
from faults.records import EVERY_ENGINE, Fault, Planted
from faults.trainings import trained, trained_samples


def _of(recipe: str) -> Any:
    def plant(pair: Pair, folder: Path, seed: int, severity: float) -> Planted:
        return healthy(pair, seed, drafter=trained(pair, recipe))

    return plant


def _overfit(pair: Pair, folder: Path, seed: int, severity: float) -> Planted:
    """The drafter's training samples are there, as its owner has them."""
    drafter = trained(pair, "overfit")
    samples = write_samples(drafter, folder / "samples")
    return healthy(pair, seed, drafter=drafter, trained_on=samples)


def write_samples(drafter: Path, folder: Path) -> Path:
    """What a drafter was trained on, as a folder of the trainer's samples."""
    import msgspec

    from training.samples import Sample

    folder.mkdir(parents=True, exist_ok=True)
    documents = trained_samples(drafter) or ()
    lines = [
        msgspec.json.encode(
            Sample(
                id=f"sample-{number:03d}",
                prompt_id=f"prompt-{number:03d}",
                token_ids=ids,
                loss_from=begin,
                text="",
                index=number,
            )
        )
        for number, (ids, begin) in enumerate(documents)
    ]
    (folder / "samples-00000.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    return folder


def _of_the_other_target(pair: Pair, folder: Path, seed: int, severity: float) -> Planted:
    """The drafter of the demo's other target: same tokens and sizes, another model."""
    other = find_pair("llama" if pair.kind == "mla" else "mla")
    return healthy(pair, seed, drafter=other.drafter, trained_target=other.target)


def _turned(pair: Pair, folder: Path, seed: int, severity: float) -> Planted:
    """The target was turned after the drafter was trained: equal answers, other states.

    The drafter has its embeddings from before, or shares the turned ones.
    """
    target = turned_target(pair, folder / "target", seed)
    drafter = pair.drafter
    if severity < 1:
        drafter = with_own_embeddings(pair, pair.drafter, folder / "drafter", seed)
    return healthy(pair, seed, target=target, drafter=drafter, trained_target=pair.target)


def _fault(name: str, cause: str, plant: Any, costs: float, **more: Any) -> Fault:
    more.setdefault("engines", EVERY_ENGINE)
    return Fault(name=name, cause=cause, way="training", plant=plant, costs=costs, **more)


TRAINING: tuple[Fault, ...] = (
    _fault("trained_unnormed", "trained_without_norm", _of("unnormed"), 0.05),
    _fault("trained_one_step", "trained_one_step", _of("one_step"), 0.05),
    _fault("trained_own_tokens", "trained_one_step", _of("own_tokens"), 0.02),
    _fault("trained_overfit", "overfit", _overfit, 0.1),
    _fault("trained_mixed", "trained_on_mixed_states", _of("mixed"), 0.1),
    _fault("trained_little", "undertrained", _of("undertrained"), 0.1, by_quality=True),
    _fault("other_target", "other_target", _of_the_other_target, 0.1, engines=("reference",)),
    _fault("target_turned", "other_target", _turned, 0.1, severities=(1.0, 0.5)),
)
