"""All that is said of a run's output: lossless or not, sampled alike, looping, the right model."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from harness.analyse.data import RunData
from harness.analyse.degenerate import degenerate_caution, degenerate_of, degenerate_void
from harness.analyse.lossless import (
    cell_integrity,
    engine_integrity,
    lossless_caution,
    lossless_void,
)
from harness.analyse.parity import parity_caution, parity_findings, parity_void
from harness.analyse.sampling import sampled, sampling_caution
from harness.analyse.speed import forced_length
from harness.findings import Caution, Degenerate, EngineIntegrity, Integrity, ParityFinding


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """What was found. `cells`: by the speculative cell's id; `degenerate`: by any cell's id."""

    cells: dict[str, Integrity | None]
    degenerate: dict[str, Degenerate | None]
    engines: tuple[EngineIntegrity, ...]
    parity: tuple[ParityFinding, ...]


def output_of(run: RunData) -> Output:
    """Look at everything that the run's servers said."""
    forced = {e for e in run.engines() if forced_length(run.plan(e)) is not None}
    by_design = {
        c.cell.cell_id
        for c in run.cells
        if c.cell.engine in forced and c.cell.variant == "speculative"
    }  # wrong, whatever the engine is worth: acceptance is forced there
    found = cell_integrity(run)
    cells = {cell_id: None if cell_id in by_design else found[cell_id] for cell_id in found}
    return Output(
        cells=cells,
        degenerate={
            c.cell.cell_id: None if c.cell.cell_id in by_design else degenerate_of(c)
            for c in run.cells
        },
        engines=tuple(_engine(run, e, cells) for e in run.engines() if e not in forced),
        parity=tuple(
            p for p in parity_findings(run) if p.engine not in forced or p.variant == "baseline"
        ),
    )


def _engine(run: RunData, engine: str, cells: dict[str, Integrity | None]) -> EngineIntegrity:
    found = engine_integrity(run, engine, cells)
    test = sampled(run, engine)
    if test is None:
        return found
    return msgspec.structs.replace(found, sampling_p=test.p_value, sampling_prompts=test.prompts)


def output_cautions(run: RunData, output: Output) -> Iterable[Caution]:
    """What a reader must know of the output before believing a number."""
    for found in output.engines:
        checks = (
            lossless_caution(run, found),
            sampling_caution(found),
            degenerate_caution(run, found.engine, output.degenerate),
            parity_caution(run, output.parity, found.engine),
        )
        yield from (c for c in checks if c is not None)


def output_void(run: RunData, output: Output) -> str | None:
    """Why nothing may be concluded from such output, or None."""
    return (
        parity_void(output.parity)
        or lossless_void(output.engines)
        or degenerate_void(run, output.degenerate)
    )
