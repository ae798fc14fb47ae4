"""Does this drafter fit this target, and is it whole? The quick question, and every check.

`check_fit` and `misfits` look at configs and headers alone and are asked before each run,
`check_numbers` at the weights alone before a drafter is trained further; `validate` looks at every
number, at what each engine would make of the folder, and at the trainer's state beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from drafters.check_state import check_state, check_tokens
from drafters.check_weights import Vocabulary, Watch, check_ends, check_sharing, check_weights
from drafters.checks import check_config, check_ids, check_quick
from drafters.engines import ENGINES, Engine
from drafters.findings import Finding, ordered
from drafters.reading import Checkpoint, Stated, Target, read_folder, read_target
from drafters.shapes import check_headers, expected_shapes
from drafters.spec import DrafterError

__all__ = ["check_fit", "check_numbers", "expected_shapes", "misfits", "validate"]


def check_fit(drafter_path: Path, target_path: Path) -> None:
    """Raise DrafterError with the first reason why the drafter cannot serve this target.

    Looks at configs, tensor names and shapes, layer ids and vocabulary; reads headers only.
    """
    for problem in misfits(drafter_path, target_path):
        raise DrafterError(problem)


def misfits(drafter_path: Path, target_path: Path) -> Iterator[str]:
    """Every reason why the drafter does not fit, one line each."""
    target = read_target(target_path)
    checkpoint = read_folder(drafter_path, target)
    for found in (*check_quick(checkpoint, target), *check_headers(checkpoint)):
        if found.severity == "error":
            yield found.line()


def check_numbers(drafter_path: Path, target_path: Path) -> None:
    """Raise DrafterError with the first tensor whose numbers are broken or were never written.

    Reads every weight once: NaN and infinities, tensors of one value, norms out of all proportion.
    """
    checkpoint = read_folder(drafter_path, read_target(target_path))
    for found in check_weights(checkpoint, lambda name, size: None):
        if found.severity == "error":
            raise DrafterError(found.line())


def validate(
    path: Path,
    target_path: Path | None = None,
    *,
    engine: Engine | None = None,
    stated: Stated | None = None,
    watch: Watch = lambda name, size: None,
) -> list[Finding]:
    """Every check on the drafter in `path`, worst first. Without a target less can be said.

    `engine`: the findings of the other engine are left out, and what this one cannot do is an
    error. `watch` is told each tensor before it is read. Raises DrafterError where `path` or the
    target's config cannot be used at all; a folder whose own files are broken is a finding.
    """
    target = None if target_path is None else read_target(target_path)
    if not path.is_dir():
        raise DrafterError(f"{path} is no folder: give the checkpoint's folder")
    try:
        checkpoint = read_folder(path, target, stated)
    except DrafterError as error:
        broken = Finding(severity="error", code="unreadable", where=str(path), what=str(error))
        return [broken]
    engines = ENGINES if engine is None else (engine,)
    found = list(check_headers(checkpoint))
    found += check_quick(checkpoint, target) if target else check_ids(checkpoint, None)
    found += check_config(checkpoint, target, engines)
    if target is None:
        found.append(_no_target(path))
    else:
        found += check_tokens(checkpoint, target)
    found += _numbers(checkpoint, target, watch)
    found += check_state(checkpoint)
    return ordered(found)


def _numbers(checkpoint: Checkpoint, target: Target | None, watch: Watch) -> Iterator[Finding]:
    vocabulary = Vocabulary(checkpoint)
    yield from vocabulary.findings
    yield from check_ends(checkpoint, vocabulary)
    yield from check_weights(checkpoint, watch)
    yield from check_sharing(checkpoint, target, vocabulary, watch)


def _no_target(path: Path) -> Finding:
    return Finding(
        severity="note",
        code="no_target",
        where=str(path),
        what="sizes, layers, rope, tokens and embedding were not compared with a target's",
        remedy="give the target's folder with --target",
    )
