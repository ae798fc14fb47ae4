"""A diagnosis's folder: whose it is, each experiment's evidence, and the verdict, written last.

Evidence is written whole or not at all, so that a diagnosis that was cut short goes on behind the
last experiment that was finished.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from harness.diagnose.records import Diagnosis, Dossier, Subject
from harness.errors import UsageError
from harness.measure.store import held, locked, read_json, to_json, write_atomic

T = TypeVar("T")
IDENTITY, DOSSIER, DIAGNOSIS = "subject.json", "dossier.json", "diagnosis.json"
MARKDOWN, PAGE = "diagnosis.md", "diagnosis.html"
HOLDER = ".process"
"""Holds the id of the process that is diagnosing in the folder."""
FAILED = "engine-failed.txt"
"""Says what the engine died of: the verdict is one without what it was needed for."""
WORDS = ("dataset", "prompts")
"""What a subject says of the prompts: their token ids tell whether they are others."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What a diagnosis is of: evidence of one identity is never mixed with another's.

    `digests` are of the checkpoints' files, `prompts` of the token ids; `settings`: how many
    tokens, how many at once, and the rest that shapes the evidence.
    """

    subject: Subject
    digests: dict[str, str | None]
    prompts: str
    settings: dict[str, str] = {}

    def differences(self, other: Identity) -> list[str]:
        """In words, what differs."""
        ours, theirs = msgspec.structs.asdict(self.subject), msgspec.structs.asdict(other.subject)
        found = [key for key in ours if key not in WORDS and ours[key] != theirs[key]]
        found += [
            f"the {name}'s files"
            for name in self.digests
            if self.digests[name] != other.digests.get(name)
        ]
        if self.prompts != other.prompts:
            found.append("the prompts")
        found += [key for key in self.settings if self.settings[key] != other.settings.get(key)]
        return found


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One experiment's end: what it found."""

    name: str
    took_s: float
    found: Any


def prompts_digest(prompts: Sequence[Sequence[int]]) -> str:
    """Identifies prompts by their token ids."""
    return hashlib.sha256(msgspec.json.encode([list(p) for p in prompts])).hexdigest()[:16]


class DiagnosisFolder:
    """Where everything of one diagnosis lies."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def work(self) -> Path:
        """Logs, traces, and translated drafters of the engines that are started."""
        return self.path / "engines"

    def begin(self, identity: Identity) -> None:
        """Claim the folder for `identity`. Raises `UsageError` where it is another's."""
        known = self.identity()
        if known is None:
            if self.path.is_dir() and any(p.name != HOLDER for p in self.path.iterdir()):
                raise UsageError(f"{self.path}: is not empty, and no diagnosis; name a new folder")
            write_atomic(self.path / IDENTITY, to_json(identity))
            return
        changed = known.differences(identity)
        if changed:
            raise UsageError(
                f"{self.path}: what was diagnosed there has changed since ({', '.join(changed)}); "
                "name a new folder, or remove this one"
            )

    def identity(self) -> Identity | None:
        """Whose folder it is; None where it is nobody's yet."""
        path = self.path / IDENTITY
        return read_json(path, Identity) if path.is_file() else None

    @property
    def finished(self) -> bool:
        """Whether the verdict was written."""
        return (self.path / DIAGNOSIS).is_file()

    @property
    def to_go_on(self) -> bool:
        """Whether the same command goes on here: it was cut short, or its engine failed."""
        return not self.finished or (self.path / FAILED).is_file()

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Hold the folder for one process. Raises `UsageError` where another holds it."""
        note = self.path / HOLDER
        by = self._noted()
        with held(self.path, f"{by} is diagnosing in it; wait for its end"):
            note.write_text(str(os.getpid()), encoding="utf-8")
            try:
                yield
            finally:
                note.unlink(missing_ok=True)

    def held_by(self) -> str | None:
        """Which process is diagnosing in it, in words; None where none is."""
        handle = os.open(self.path, os.O_RDONLY)
        try:
            return None if locked(handle) else self._noted()
        finally:
            os.close(handle)

    def _noted(self) -> str:
        """The process that noted itself last; one that was killed leaves its note, and no lock."""
        try:
            return f"process {int((self.path / HOLDER).read_text(encoding='utf-8'))}"
        except (OSError, ValueError):
            return "another process"

    def found(self, name: str, kind: type[T]) -> tuple[T, float] | None:
        """An experiment's finding as its record, and the seconds that it took.

        None where it was not finished, cannot be read, or is of another version's form.
        """
        path = self._evidence(name)
        if not path.is_file():
            return None
        try:
            known = read_json(path, Evidence)
        except UsageError:
            path.unlink(missing_ok=True)  # damaged: it is made anew
            return None
        try:
            return msgspec.convert(known.found, kind), known.took_s
        except msgspec.ValidationError:
            return None  # of another version: it is made anew

    def keep(self, name: str, found: Any, took_s: float) -> None:
        """An experiment's finding."""
        evidence = Evidence(name=name, took_s=took_s, found=msgspec.to_builtins(found))
        write_atomic(self._evidence(name), to_json(evidence))

    def finish(
        self,
        dossier: Dossier,
        diagnosis: Diagnosis,
        pages: dict[str, str],
        failure: str | None = None,
    ) -> None:
        """The verdict; `failure`: why the engine did not start, or died."""
        write_atomic(self.path / DOSSIER, to_json(dossier))
        if failure is not None:
            write_atomic(self.path / FAILED, f"{failure}\n".encode())
        self.tell(diagnosis, pages)
        if failure is None:  # last: until then the verdict is the one before
            (self.path / FAILED).unlink(missing_ok=True)

    def tell(self, diagnosis: Diagnosis, pages: dict[str, str]) -> None:
        """Pages first, `diagnosis.json` last, which says that all is there."""
        for name, text in pages.items():
            write_atomic(self.path / name, text.encode())
        write_atomic(self.path / DIAGNOSIS, to_json(diagnosis))

    def _evidence(self, name: str) -> Path:
        return self.path / "evidence" / f"{name}.json"


def unfinished(root: Path) -> Iterator[tuple[DiagnosisFolder, Identity]]:
    """The diagnoses below `root` that are to be gone on with or under way, the newest first."""
    for path in sorted(root.glob(f"*/{IDENTITY}"), reverse=True):
        for folder, known in of_folder(path.parent):
            if folder.to_go_on:
                yield folder, known


def of_folder(path: Path | None) -> Iterator[tuple[DiagnosisFolder, Identity]]:
    """The diagnosis in `path`, where there is one that can be read."""
    if path is None:
        return
    folder = DiagnosisFolder(path)
    try:
        known = folder.identity()
    except UsageError:
        return
    if known is not None:
        yield folder, known
