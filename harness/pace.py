"""How long a run will take, told before it begins, from earlier runs in the same folder."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import msgspec

from harness.announce import how_often
from harness.errors import UsageError
from harness.measure.store import RunFolder, read_json
from harness.plan.expand import launches_of
from harness.prepare import Prepared
from harness.records import LaunchRecord, LoadPoint, Manifest, Variant
from harness.stored import LAUNCH

MOST_RUNS = 30
"""So many of the latest runs are looked at."""


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that earlier starts took to come up, by variant, and cells, by variant and load."""

    starts: dict[Variant, list[float]]
    cells: dict[tuple[Variant, LoadPoint], list[float]]
    runs: int


def announced(prepared: Prepared, out: Path) -> list[str]:
    """What the run will start and for how long, and what it cannot show, one line each."""
    plan = prepared.plan.compare
    word = "repeats" if prepared.attached else "starts"
    count = how_often(prepared.cells, plan, attached=prepared.attached)
    if plan.precision is not None:
        most = plan.max_launches * (plan.blocks if prepared.attached else 1)
        count += f"; more until the precision is reached, up to {most} {word} of each variant"
    lines = [f"{prepared.name}: {prepared.why}; {prepared.served_words()}; {count}"]
    lines.append(f"{prepared.name}: {_how_long(prepared, earlier(prepared, out), out)}")
    repeats = len({c.repeat for c in prepared.cells})
    if len({c.variant for c in prepared.cells}) == 2 and repeats < 3:
        lines.append(f"{prepared.name}: {_too_few(repeats, word)}")
    return lines


def _too_few(repeats: int, word: str) -> str:
    if repeats == 1:
        return (
            f"one {word[:-1]} of each variant gives `undecided` at best: what differs from one "
            "to the next is not seen; --set compare.launches=3 or more"
        )
    return (
        f"two {word} of each variant: with so few, intervals are six times as wide as with many; "
        "--set compare.launches=3 or more"
    )


def earlier(prepared: Prepared, out: Path) -> Pace:
    """What runs of the same engine and target in `out` took; runs that cannot be read are none."""
    pace = Pace(starts={}, cells={}, runs=0)
    known = 0
    target = prepared.models()["target"]
    for path in sorted(out.glob("*/manifest.json"), reverse=True)[:MOST_RUNS]:
        try:
            folder = RunFolder(path.parent)
            manifest = folder.manifest()
            if manifest.plan["models"][prepared.name]["target"] == target:
                known += _read(prepared.name, folder, manifest, pace)
        except (UsageError, OSError, KeyError, TypeError):
            continue
    return msgspec.structs.replace(pace, runs=known)


def _read(engine: str, folder: RunFolder, manifest: Manifest, pace: Pace) -> bool:
    """Add one run's times to the pace; whether it had any."""
    found = False
    for path in folder.launch_dirs():
        if (path / LAUNCH).exists():
            record = read_json(path / LAUNCH, LaunchRecord)
            if record.engine == engine and record.ready_s is not None:
                pace.starts.setdefault(record.variant, []).append(record.ready_s)
                found = True
    for cell in manifest.cells:
        if cell.engine == engine and folder.has_cell(cell.cell_id):
            timeline = folder.timeline(cell.cell_id)
            begin, end = timeline.window_start_ns, timeline.window_end_ns
            if begin is not None and end is not None:
                key = (cell.variant, cell.load)
                pace.cells.setdefault(key, []).append((end - begin) / 1e9)
                found = True
    return found


def _how_long(prepared: Prepared, pace: Pace, out: Path) -> str:
    keys = [(c.variant, c.load) for c in prepared.cells]
    variants = [start[0].variant for start in launches_of(prepared.cells)]
    known_starts = prepared.attached or all(v in pace.starts for v in variants)
    if not known_starts:
        return f"how long it takes is not known: {out} holds no earlier run of this target"
    coming_up = 0.0 if prepared.attached else sum(median(pace.starts[v]) for v in variants)
    said = "" if prepared.attached else f"coming up takes about {words_of(coming_up)} in all"
    if not all(key in pace.cells for key in keys):
        rest = "how long the cells take is not known: no earlier run had all these loads"
        return f"{said}; {rest}" if said else rest
    cells = sum(median(pace.cells[key]) for key in keys)
    whole = f"about {words_of(coming_up + cells)} in all"
    of = f", {words_of(coming_up)} of it for coming up" if coming_up else ""
    first = " before more are added" if prepared.plan.compare.precision is not None else ""
    return f"{whole}{of}{first}, judging by {of_runs(pace.runs)}"


def of_runs(runs: int) -> str:
    """How many earlier runs there were."""
    return "one earlier run" if runs == 1 else f"{runs} earlier runs"


def words_of(seconds: float) -> str:
    """A length of time in the reader's words, to two figures."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 5400:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"
