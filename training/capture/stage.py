"""`python -m training capture`: hidden states of the samples, proved to be the target's own."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from engines.capture.base import Capturer, open_capturer
from harness.errors import UsageError
from training.capture.checks import stored_checks
from training.capture.choice import WithChoice
from training.capture.inputs import Inputs, Row, capture_spec, made_from, read_inputs
from training.capture.proving import GotStates, States, proof_checks, proof_samples, prove
from training.capture.store import (
    Layout,
    ShardEntry,
    ShardWriter,
    StatesIndex,
    plan_shards,
    read_index,
    write_index,
)
from training.files import locked
from training.folders import stage_folder
from training.gate import GATE, Check, Gate, check_line, read_gate, require, write_gate
from training.kept import differences, refuse_changed
from training.plan import TrainingPlan
from training.progress import Progress, note
from training.states import StoredStates, open_states

DISK_MARGIN = 1.02
EARLY_FROM = 4
"""The first states are proved before the rest is captured, from so many batches on."""


def run(plan: TrainingPlan, work: Path) -> Gate:
    """Capture what is missing, then prove it; with `capture.online` only prove a few samples.

    Raises `GateFailed` after the gate is written, `UsageError` for samples or a plan that do not
    fit what was captured already, `TrainingError`, and what the engine raises.
    """
    inputs = read_inputs(plan, work)
    folder = stage_folder(work, "capture")
    with locked(folder):
        return _run(folder, plan, inputs)


def _run(folder: Path, plan: TrainingPlan, inputs: Inputs) -> Gate:
    index = _begun(folder, plan, inputs)
    # A folder begun before choices were stored goes on without them.
    inputs = msgspec.structs.replace(inputs, layout=index.layout)
    gate = read_gate(folder)
    if gate is not None and gate.passed and _finished(index, gate, plan):
        note(f"capture: done already, {folder}")
        return gate
    _check_disk(folder, inputs, index, plan)
    (folder / GATE).unlink(missing_ok=True)
    write_index(folder, index)
    _tell(plan, inputs)
    spec = capture_spec(plan, inputs, folder / "engine")
    engine = open_capturer(plan.capture.engine, spec)
    capturer = WithChoice(engine, inputs.target, spec.device) if inputs.layout.choice else engine
    try:
        checks = _early(plan, inputs, capturer, index)
        if checks is None and plan.capture.online:
            checks = prove(plan, inputs, capturer, _computed(inputs, capturer, plan.capture.batch))
        elif checks is None:
            index = _capture(folder, plan, inputs, index, capturer)
            checks = _stored(folder, plan, inputs, index, capturer)
    finally:
        capturer.close()
    gate = Gate.of(
        "capture", tuple(checks), output=_digest(index), inputs={"generate": inputs.digest}
    )
    return _end(folder, gate)


def _begun(folder: Path, plan: TrainingPlan, inputs: Inputs) -> StatesIndex:
    """The index to go on from: what was captured before, without shards that are cut or gone.

    Raises `UsageError` where it was made from something else.
    """
    told = made_from(plan, inputs)
    lengths = [len(row.token_ids) for row in inputs.rows]
    planned = 0 if plan.capture.online else len(plan_shards(lengths, plan.capture.shard_tokens))
    index = read_index(folder)
    if index is None:
        return StatesIndex(layout=inputs.layout, made_from=told, shards_planned=planned)
    before = {name: index.made_from.get(name, "") for name in told}
    digests = {"samples", "target"}
    changed = list(differences(_without(before, digests), _without(told, digests)))
    changed += [f"the {name} changed" for name in sorted(digests) if before[name] != told[name]]
    refuse_changed(folder, changed)
    return msgspec.structs.replace(
        index, shards=tuple(shard for shard in index.shards if _whole(folder, shard))
    )


def _without(told: dict[str, str], names: set[str]) -> dict[str, str]:
    return {name: value for name, value in told.items() if name not in names}


def _whole(folder: Path, shard: ShardEntry) -> bool:
    path = folder / shard.file
    return path.is_file() and path.stat().st_size == shard.bytes


def _finished(index: StatesIndex, gate: Gate, plan: TrainingPlan) -> bool:
    """Whether the gate still speaks of what lies there, by the limits the plan has today."""
    limits = {check.name: check.limit for check in gate.checks}
    return (
        len(index.shards) == index.shards_planned
        and gate.output == _digest(index)
        and limits.get("proof") == plan.capture.least_proof
        and limits.get("batch_parity") == plan.capture.least_parity
    )


def _check_disk(folder: Path, inputs: Inputs, index: StatesIndex, plan: TrainingPlan) -> None:
    """Raise `UsageError` where what is still to be captured does not fit the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    for partial in folder.glob(".states-*.partial"):
        partial.unlink(missing_ok=True)  # of a run that was killed
    if plan.capture.online:
        return
    tokens = sum(len(row.token_ids) for row in inputs.rows)
    whole = inputs.layout.size(len(inputs.rows), tokens)
    needed = (whole - sum(shard.bytes for shard in index.shards)) * DISK_MARGIN
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UsageError(
            f"{folder}: the states of {tokens:,} tokens take {_size(whole)} "
            f"({whole / tokens:,.0f} bytes a token), {_size(needed)} of them still to come, and "
            f"{_size(free)} are free: make room, or set capture.dtype=fp8, capture.online=true or "
            "a smaller capture.max_length"
        )


def _size(size: float) -> str:
    """A size in the unit that reads best."""
    if size < 2**30:
        return f"{size / 2**20:,.1f} MiB"
    return f"{size / 2**30:,.1f} GiB"


def _tell(plan: TrainingPlan, inputs: Inputs) -> None:
    """What is about to be captured, in one line."""
    tokens = sum(len(row.token_ids) for row in inputs.rows)
    size = inputs.layout.size(len(inputs.rows), tokens)
    kept = "nothing is stored" if plan.capture.online else f"{_size(size)} {plan.capture.dtype}"
    cut = f", {inputs.cut} cut at {plan.capture.max_length} tokens" if inputs.cut else ""
    left = f", {inputs.left_out} left out (no answer within it)" if inputs.left_out else ""
    note(
        f"capture: {len(inputs.rows):,} samples, {tokens:,} tokens{cut}{left}; hidden states "
        f"{list(inputs.layout.aux_layers)} and the last from {plan.capture.engine}, {kept}"
    )


def _early(
    plan: TrainingPlan, inputs: Inputs, capturer: Capturer, index: StatesIndex
) -> list[Check] | None:
    """The proof on the first batch alone: a large capture of wrong states ends here.

    None where it passed, or where the capture is small or under way already.
    """
    if index.shards or len(inputs.rows) < EARLY_FROM * plan.capture.batch:
        return None
    chosen = proof_samples(inputs.rows, plan.capture.batch)
    got = _computed(inputs, capturer, plan.capture.batch)(chosen)
    last = [(inputs.rows[i], states.last_normed) for i, states in zip(chosen, got, strict=True)]
    checks, _ = proof_checks(plan, inputs, last, inputs.target.head(), rounded=False)
    if all(check.passed for check in checks):
        return None
    return [
        msgspec.structs.replace(
            check, reason=f"{check.reason}; on the first samples, nothing more was captured"
        )
        for check in checks
    ]


def _computed(inputs: Inputs, capturer: Capturer, batch: int) -> GotStates:
    """Samples as they come from the engine now, in batches."""

    def got(numbers: Sequence[int]) -> list[States]:
        found: list[States] = []
        for begin in range(0, len(numbers), batch):
            rows = [inputs.rows[i].token_ids.tolist() for i in numbers[begin : begin + batch]]
            found += capturer.capture(rows)
        return found

    return got


def _capture(
    folder: Path, plan: TrainingPlan, inputs: Inputs, index: StatesIndex, capturer: Capturer
) -> StatesIndex:
    """The shards that are missing, one after another; the index grows with each."""
    lengths = [len(row.token_ids) for row in inputs.rows]
    groups = plan_shards(lengths, plan.capture.shard_tokens)
    have = {shard.file: shard for shard in index.shards}
    names = [f"states-{number:05d}.safetensors" for number in range(len(groups))]
    progress = Progress("capture", len(inputs.rows))
    done = sum(len(group) for name, group in zip(names, groups, strict=True) if name in have)
    progress.start_at(done)
    for name, group in zip(names, groups, strict=True):
        if name in have:
            continue

        def tell(samples: int, tokens: int, done: int = done, name: str = name) -> None:
            progress.update(done + samples - 1, tokens=tokens, text=name)

        rows = [inputs.rows[i] for i in group]
        have[name] = _shard(
            folder / name, inputs.layout, rows, (capturer, plan.capture.batch), tell
        )
        done += len(group)
        shards = tuple(have[n] for n in names if n in have)
        index = msgspec.structs.replace(index, shards=shards)
        write_index(folder, index)
    return index


def _shard(
    path: Path,
    layout: Layout,
    rows: Sequence[Row],
    source: tuple[Capturer, int],
    tell: Callable[[int, int], None],
) -> ShardEntry:
    """One shard of `rows` from the `source` (an engine, and how many rows it takes at once).

    The shard's batches are its own, so that it comes out the same after any resume. `tell` hears
    how many samples are done, and of how many tokens the last of them were.
    """
    capturer, at_once = source
    lengths = [len(row.token_ids) for row in rows]
    writer = ShardWriter(path, layout, lengths=lengths, loss_from=[row.loss_from for row in rows])
    try:
        # Rows of like length share a batch: less padding.
        order = sorted(range(len(rows)), key=lambda i: (-lengths[i], i))
        for begin in range(0, len(order), at_once):
            batch = order[begin : begin + at_once]
            found = capturer.capture([rows[i].token_ids.tolist() for i in batch])
            for number, states in zip(batch, found, strict=True):
                writer.add(number, states.token_ids, states.aux, states.last_normed, states.choice)
            tell(begin + len(batch), sum(lengths[i] for i in batch))
        return writer.finish(tuple(row.id for row in rows), tuple(row.category for row in rows))
    except BaseException:
        writer.abandon()
        raise


def _stored(
    folder: Path, plan: TrainingPlan, inputs: Inputs, index: StatesIndex, capturer: Capturer
) -> list[Check]:
    """The gate of what lies on disk: every row's own checks, then the proofs on some samples."""
    note("capture: reading everything again for the gate")
    stored: StoredStates = open_states(folder)
    checks = stored_checks(folder, index, stored, inputs.rows)
    broken = {"checksums", "samples"}
    if any(not check.passed and check.name in broken for check in checks):
        return checks

    def got(numbers: Sequence[int]) -> list[States]:
        return [stored.read(number) for number in numbers]

    return checks + prove(plan, inputs, capturer, got)


def _digest(index: StatesIndex) -> str:
    """Of everything that was captured; of an online capture, of what it is made from."""
    told = {"layout": index.layout, "made_from": index.made_from, "shards": index.shards}
    return hashlib.sha256(msgspec.json.encode(told)).hexdigest()


def _end(folder: Path, gate: Gate) -> Gate:
    """Write the gate and tell it. Raises `GateFailed` where a check did not pass."""
    write_gate(folder, gate)
    for check in gate.checks:
        note(f"capture: {check_line(check)}")
    require(gate, folder)
    note(f"capture: {folder}")
    return gate
