"""The import of other tools' results, and of points that `export` wrote, into the results' root.

Each file becomes a folder `imported/<id>/` that the history reads like a run's: `import.json` and,
of a file below `KEPT_BYTES`, a copy of it. A folder appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec

from harness.errors import UsageError, one_line
from harness.exchange.fields import COUNTS_END, from_epoch, text, utc
from harness.exchange.reading import Document, check_beginning, documents
from harness.exchange.recognise import AIPERF, AIPERF_RECORDS, Tool, tool_of
from harness.exchange.records import (
    IMPORT,
    IMPORT_VERSION,
    IMPORTED,
    Foreign,
    Given,
    Import,
)
from harness.exchange.tables import from_document, is_points, read_points
from harness.history.points import utc_text
from harness.history.records import Point
from harness.measure.store import MANIFEST, SUMMARY, read_json, to_json, write_atomic
from harness.records import Record

KEPT_BYTES = 10_000_000
LONGEST_LINE = 1_000_000
UNNAMED = "?"
OWN = "points"
"""The tool's name of points that `export` wrote; they keep the source that they have."""
CreatedFrom = Literal["content", "user", "file"]


class Done(Record, frozen=True, kw_only=True):
    """What became of one file. `folder`: the import's; `known`: it had been imported before."""

    file: Path
    folder: Path
    record: Import
    known: bool


class Skipped(Record, frozen=True, kw_only=True):
    """A file of a folder that was not imported, and why."""

    file: Path
    reason: str


class Outcome(Record, frozen=True, kw_only=True):
    """What became of everything that was named."""

    done: tuple[Done, ...]
    skipped: tuple[Skipped, ...]


def import_paths(paths: Sequence[Path], root: Path, given: Given) -> Outcome:
    """Import files, and every file below folders that can be.

    Raises `UsageError` where a file cannot be, or no file of a folder. What was imported before
    that stays: to import it once more does nothing.
    """
    done: list[Done] = []
    skipped: list[Skipped] = []
    imports = _Imports(root)
    for path in paths:
        if not path.exists():
            raise UsageError(f"{path}: no such file or folder")
        if path.is_dir():
            own, left = _import_folder(path, imports, given)
            if not own:
                first = f", such as {left[0].reason}" if left else ""
                raise UsageError(f"{path}: nothing in it could be imported{first}")
            done += own
            skipped += left
        elif not path.is_file():  # a pipe may never begin, and is read but once
            raise UsageError(f"{path}: not a plain file; write it to one first")
        else:
            done.append(_import_file(path, imports, given, set())[0])
    return Outcome(done=tuple(done), skipped=tuple(skipped))


def tell(outcome: Outcome, *, as_json: bool) -> None:
    """Results on standard output; notes, and what was skipped, on standard error."""
    for one in outcome.done:
        for note in () if one.known else one.record.notes:
            print(f"{one.file}: {note}", file=sys.stderr)
    for left in outcome.skipped:
        print(f"skipped: {left.reason}", file=sys.stderr)
    sys.stderr.flush()
    if as_json:
        sys.stdout.write(to_json([_told(one) for one in outcome.done]).decode())
    else:
        for one in outcome.done:
            what = "imported before, nothing done" if one.known else one.record.tool
            runs = len({point.run_id for point in one.record.points})
            count = f"{runs} run{'s' * (runs != 1)}, {len(one.record.points)} figures"
            print(f"{one.file}: {what}: {count}: {one.folder}")
    sys.stdout.flush()


def _told(one: Done) -> dict[str, object]:
    return {
        "file": str(one.file),
        "folder": str(one.folder),
        "imported_before": one.known,
        "tool": one.record.tool,
        "created": one.record.created,
        "points": len(one.record.points),
        "notes": one.record.notes,
    }


def _import_folder(path: Path, imports: _Imports, given: Given) -> tuple[list[Done], list[Skipped]]:
    done: list[Done] = []
    files, skipped = _files(path)
    summaries: set[Path] = set()
    seen: set[bytes] = set()
    # AIPerf writes a run's records beside its summary: those of such a run come last, and only
    # where there is no summary, so that no run is counted twice.
    for file in sorted(files, key=_is_records):
        try:
            if file.parent in summaries and _is_records(file):
                raise UsageError(f"{file}: records of the summary beside it, which was imported")
            one, tool = _import_file(file, imports, given, seen)
        except (UsageError, OSError) as error:
            skipped.append(Skipped(file=file, reason=_reason(error, file)))
            continue
        done.append(one)
        if tool is AIPERF:
            summaries.add(file.parent)
    return done, skipped


def _files(path: Path) -> tuple[list[Path], list[Skipped]]:
    """Every plain file below a folder by name; the history's own folders are told, not entered."""
    files: list[Path] = []
    skipped: list[Skipped] = []
    for place, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        here = Path(place)
        if any(_is_ours(here / name) for name in (MANIFEST, SUMMARY, IMPORT) if name in names):
            folders.clear()
            reason = f"{here}: a run or an import of this harness; its history reads it there"
            skipped.append(Skipped(file=here, reason=reason))
            continue
        own = [here / name for name in sorted(names) if not name.startswith(".")]
        files += [file for file in own if file.is_file()]
    return files, skipped


class _Versioned(msgspec.Struct):
    """What every file of this harness tells; those of the same name of others do not."""

    schema_version: str


def _is_ours(file: Path) -> bool:
    """Whether a `summary.json` or the like is this harness's: `vllm bench sweep` writes one too."""
    try:
        msgspec.json.decode(file.read_bytes(), type=_Versioned)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError):
        return False
    return True


def _reason(error: Exception, file: Path) -> str:
    if isinstance(error, OSError):
        return f"{file}: {(error.strerror or 'cannot be read').lower()}"
    return str(error)


def _is_records(file: Path) -> bool:
    """Whether the first line is one of AIPerf's records."""
    try:
        with open(file, "rb") as lines:
            document = msgspec.json.decode(lines.readline(LONGEST_LINE))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError):
        return False
    return isinstance(document, dict) and AIPERF_RECORDS.recognise(document)


def _import_file(
    file: Path, imports: _Imports, given: Given, seen: set[bytes]
) -> tuple[Done, Tool | None]:
    """Import one file. `seen`: of every result in files before it; its own are added."""
    check_beginning(file)
    about = _About(file, file.read_bytes())
    before = imports.find(about.digest)
    try:
        points, tool, found = _told_in(about, seen)
    except RecursionError:  # of a text that was just read
        raise UsageError(f"{file}: nested too deeply") from None
    if before is not None:
        record = read_json(before / IMPORT, Import)
        return Done(file=file, folder=before, record=record, known=True), tool
    if tool is None:
        record = _of_points(about, points)
    else:
        record = _of_results(about, tool, tool.convert(found), given)
    return Done(file=file, folder=imports.store(about, record), record=record, known=False), tool


def _told_in(about: _About, seen: set[bytes]) -> tuple[list[Point], Tool | None, list[Document]]:
    """A file's points; else the tool that wrote it, and its results."""
    points = read_points(about.data, about.file)
    if points is not None:
        return points, None, []
    found = documents(about.data, about.file)
    if len(found) == 1 and is_points(found[0]):
        return from_document(found[0], about.file), None, []
    tool = tool_of(found, about.file)
    return [], tool, _unseen(found, seen, about.file)


def _unseen(found: list[Document], seen: set[bytes], file: Path) -> list[Document]:
    """Without results that a file beside it holds as well, as a sweep's summary does."""
    digests = [hashlib.sha256(json.dumps(d, sort_keys=True).encode()).digest() for d in found]
    left = [d for d, digest in zip(found, digests, strict=True) if digest not in seen]
    seen.update(digests)
    if not left:
        raise UsageError(f"{file}: its results are in files before it, which were imported")
    return left


class _About:
    """What is known of a file before it is read."""

    def __init__(self, file: Path, data: bytes) -> None:
        self.file, self.data = file, data
        self.digest = hashlib.sha256(data).hexdigest()
        self.changed = from_epoch(file.stat().st_mtime) or utc(datetime.now(UTC))

    def folder(self, created: str, name: str) -> str:
        """The name of the import's folder."""
        when = datetime.fromisoformat(created).strftime("%Y%m%d-%H%M%S")
        return f"{when}-{name}-{self.digest[:12]}"

    def record(
        self,
        tool: str,
        version: str | None,
        created: tuple[str, CreatedFrom],
        points: Sequence[Point],
        notes: Sequence[str],
    ) -> Import:
        """The whole of `import.json`."""
        suffix = re.sub(r"[^A-Za-z0-9.]", "", "".join(self.file.suffixes[-1:]))[:12]
        return Import(
            schema_version=IMPORT_VERSION,
            tool=tool,
            tool_version=version,
            file=text(self.file.name) or UNNAMED,
            sha256=self.digest,
            size=len(self.data),
            original=f"original{suffix}" if len(self.data) < KEPT_BYTES else None,
            created=created[0],
            created_from=created[1],
            imported=utc(datetime.now(UTC)),
            points=tuple(points),
            notes=tuple(notes),
        )


def _of_points(about: _About, points: Sequence[Point]) -> Import:
    if not points:
        raise UsageError(f"{about.file}: there is no point in it")
    for p in points:
        if p.n is not None and not 0 <= p.n < COUNTS_END:
            raise UsageError(
                f"{about.file}: {one_line(p.metric, 40)}: n={one_line(str(p.n), 40)} is no count"
            )
    try:
        kept = [
            msgspec.structs.replace(p, folder=None, created=utc_text(p.created)) for p in points
        ]
    except UsageError as error:
        raise UsageError(f"{about.file}: {error}") from None
    first = min(point.created for point in kept)
    return about.record(OWN, None, (first, "content"), kept, ())


def _of_results(about: _About, tool: Tool, found: Sequence[Foreign], given: Given) -> Import:
    if not any(one.figures for one in found):
        raise UsageError(f"{about.file}: {tool.shown}, but there is no figure in it")
    told = [given.created or one.created for one in found]
    first = min((t for t in told if t is not None), default=about.changed)
    known: CreatedFrom = "content" if any(one.created for one in found) else "file"
    created: tuple[str, CreatedFrom] = (first, "user" if given.created else known)
    run_id = about.folder(first, tool.name)
    runs = dict.fromkeys(one.run for one in found)
    points: list[Point] = []
    for one, when in zip(found, told, strict=True):
        own = run_id if len(runs) == 1 else f"{run_id}.{list(runs).index(one.run) + 1}"
        points += points_of_result(one, tool.name, own, when or first, given)
    version = next((one.tool_version for one in found if one.tool_version), None)
    return about.record(tool.name, version, created, points, _notes(found, created, given))


def _notes(found: Sequence[Foreign], created: tuple[str, CreatedFrom], given: Given) -> list[str]:
    notes = []
    if created[1] == "file":
        notes.append(
            f"the file does not say when it was measured: {created[0]} is when it was last "
            "changed; --date says it better"
        )
    if given.variant is None and any(one.variant is None for one in found):
        notes.append(
            "the file does not say whether the server speculated: taken as baseline; "
            "--variant speculative says otherwise"
        )
    if given.engine is None and any(one.engine == "openai" for one in found):
        notes.append("the file does not say which engine served it: openai; --engine says it")
    return notes


def points_of_result(
    one: Foreign, tool: str, run_id: str, created: str, given: Given
) -> list[Point]:
    """A foreign measurement's points. Its model stands in for a profile, which it had none of."""
    variant = given.variant or one.variant or "baseline"
    model = _last(one.model)
    return [
        Point(
            run_id=run_id,
            created=created,
            engine=given.engine or one.engine,
            variant=variant,
            workload=given.workload or one.workload,
            load=one.load,
            profile=given.profile or model,
            drafter_name=_last(one.drafter) if variant == "speculative" else None,
            target_name=model,
            git_commit=one.git_commit,
            engine_version=given.engine_version or one.engine_version,
            source=f"import:{tool}",
            **msgspec.structs.asdict(figure),
        )
        for figure in one.figures
    ]


def _last(name: str | None) -> str | None:
    """A model's own name: the last part of its path."""
    return (name.rstrip("/\\").replace("\\", "/").rpartition("/")[2] or None) if name else None


class _Imports:
    """The folders of all imports below a results' root, listed once however many files come."""

    def __init__(self, root: Path) -> None:
        self.base = root / IMPORTED
        self._folders: dict[str, list[Path]] = {}
        for folder in sorted(self.base.glob("*-*")):
            self._folders.setdefault(folder.name.rpartition("-")[2], []).append(folder)

    def find(self, digest: str) -> Path | None:
        """The folder that a file of this SHA-256 was imported into."""
        for folder in self._folders.get(digest[:12], ()):
            told = folder / IMPORT
            if told.is_file() and read_json(told, Import).sha256 == digest:
                return folder
        return None

    def store(self, about: _About, record: Import) -> Path:
        """Write an import's folder, whole or not at all."""
        self.base.mkdir(parents=True, exist_ok=True)
        final = self.base / about.folder(record.created, record.tool)
        work = Path(tempfile.mkdtemp(dir=self.base, prefix=f".{final.name}-"))
        try:
            work.chmod(0o755)
            if record.original is not None:
                write_atomic(work / record.original, about.data)
            write_atomic(work / IMPORT, to_json(record))
            os.rename(work, final)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        self._folders.setdefault(about.digest[:12], []).append(final)
        return final
