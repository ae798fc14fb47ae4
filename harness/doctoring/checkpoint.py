"""Is a checkpoint whole? Every file of its index, every header against its file, every checksum."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from drafters.formats import text_config
from drafters.headers import TensorHeader, read_header
from drafters.headers import read_json as read_object
from drafters.reading import wrong_layers, wrong_number
from drafters.spec import DrafterError
from engines.base import EngineUsageError
from engines.checkpoint import read_json
from harness.doctoring.finding import Finding, fail, gib, ok, unknown, warn
from harness.doctoring.telling import Tell

INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
"""Of every file that the index may name."""
SUMMED_UNASKED = 256 * 2**20
"""Checksums of so many bytes in all are verified without being asked for."""
_POINTER = b"version https://git-lfs"
_LINE = re.compile(r"^([0-9a-fA-F]{64})[ \t]+\*?(.+?)\s*$")
_PIECE = 1 << 20


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """One file of weights. `size` None: it is not there; `problem`: why it cannot be used."""

    name: str
    size: int | None = None
    problem: str | None = None
    tensors: dict[str, TensorHeader] = {}


class CheckpointFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint's folder as it lies. `placed`: the index's file of each tensor.

    `unfinished`: a download's left-overs. `index_problem`: why the index cannot be used.
    `total`: bytes of all tensors as the index says. `sums`: the expected checksum of each file,
    as `sha256:…` or git's `blob:…`.
    """

    folder: Path
    shards: tuple[Shard, ...] = ()
    placed: Mapping[str, str] = {}
    index_problem: str | None = None
    total: int | None = None
    unfinished: tuple[str, ...] = ()
    sums: Mapping[str, str] = {}

    @property
    def bytes(self) -> int:
        """Bytes of the files that are there."""
        return sum(shard.size or 0 for shard in self.shards)

    @property
    def tensors(self) -> dict[str, TensorHeader]:
        """All tensors whose headers could be read."""
        return {name: header for shard in self.shards for name, header in shard.tensors.items()}

    @property
    def whole(self) -> bool:
        """Whether every file is there with a header that could be read."""
        return not self.index_problem and bool(self.shards) and not any(
            shard.problem for shard in self.shards
        )  # fmt: skip


def read_checkpoint(folder: Path, tell: Tell = lambda line: None) -> CheckpointFacts:
    """The weights' files and headers, the index, and the checksums that are given."""
    placed, total, problem = read_index(folder / INDEX)
    names = sorted(set(placed.values())) or sorted(
        file.name
        for pattern in ("*.safetensors", "*.bin", "*.gguf")
        for file in folder.glob(pattern)
    )
    shards = []
    for i, name in enumerate(names, start=1):
        if len(names) > 1:
            tell(f"{folder.name}: header {i} of {len(names)}")
        shards.append(read_shard(folder, name))
    blobs = folder.parent.parent / "blobs"
    places = (folder, folder / ".cache" / "huggingface" / "download", blobs)
    unfinished = [f.name for place in places for f in place.glob("*.incomplete")]
    return CheckpointFacts(
        folder=folder,
        shards=tuple(shards),
        placed=placed,
        index_problem=problem,
        total=total,
        unfinished=tuple(sorted(unfinished)),
        sums={**hub_sums(folder), **listed_sums(folder)},
    )


def read_index(index: Path) -> tuple[dict[str, str], int | None, str | None]:
    """The index's map from tensor to file, its total of bytes, and what is wrong with it."""
    if not index.exists() and not index.is_symlink():
        return {}, None, None
    try:
        raw = read_object(index)
        placed = {str(tensor): name for tensor, name in raw["weight_map"].items()}
    except DrafterError as error:
        return {}, None, str(error).removeprefix(f"{index} ")
    except (KeyError, AttributeError) as error:
        return {}, None, f"it is no index of weights ({type(error).__name__}: {error})"
    if not placed:
        return {}, None, "its weight_map is empty"
    for name in placed.values():
        named = isinstance(name, str) and bool(name) and name.isprintable()
        if not named or ".." in name or name.startswith("/"):
            return {}, None, f"it names {name!r}, which is no file of this folder"
        if not name.endswith(SUFFIX):
            return {}, None, f"it names {name!r}, which is no {SUFFIX} file"
    metadata = raw.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return placed, total if type(total) is int else None, None


def read_shard(folder: Path, name: str) -> Shard:
    """One file, its size held against what its own header declares."""
    file = folder / name
    try:
        found = file.stat()
        if stat.S_ISFIFO(found.st_mode):  # opening one waits for a writer
            return Shard(name=name, problem="is a pipe, not a file")
        size = found.st_size
        with file.open("rb") as stream:
            begins = stream.read(len(_POINTER))
    except FileNotFoundError:
        broken = file.is_symlink()
        return Shard(name=name, problem="is a link to nothing" if broken else "is missing")
    except OSError as error:
        return Shard(name=name, problem=f"cannot be read: {error.strerror}")
    if begins == _POINTER:
        return Shard(name=name, size=size, problem="is a pointer of git LFS, not the file itself")
    if not name.endswith(".safetensors"):
        return Shard(name=name, size=size, problem=None if size else "is empty")
    try:
        tensors = read_header(file)
    except DrafterError as error:
        told = str(error).removeprefix(str(file)).strip(" :")
        return Shard(name=name, size=size, problem=told)
    declared = declared_size(file, tensors)
    problem = None
    if size != declared:
        problem = f"has {size} bytes where its header declares {declared}"
    return Shard(name=name, size=size, problem=problem, tensors=tensors)


def declared_size(file: Path, tensors: Mapping[str, TensorHeader]) -> int:
    """How long a safetensors file must be, by its header."""
    with file.open("rb") as stream:
        header = 8 + int.from_bytes(stream.read(8), "little")
    return max((tensor.end for tensor in tensors.values()), default=header)


def hub_sums(folder: Path) -> dict[str, str]:
    """Checksums by which the hub's cache names its blobs: SHA-256 of large files, git's of others.

    A snapshot's files are links to `blobs/<checksum>`.
    """
    sums = {}
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not file.is_symlink():
            continue
        blob = file.readlink()
        if blob.parent.name != "blobs":
            continue
        if re.fullmatch("[0-9a-f]{64}", blob.name):
            sums[file.name] = f"sha256:{blob.name}"
        elif re.fullmatch("[0-9a-f]{40}", blob.name):
            sums[file.name] = f"blob:{blob.name}"
    return sums


def listed_sums(folder: Path) -> dict[str, str]:
    """Checksums of a list beside the weights, as `sha256sum` writes it; for files of the folder."""
    sums = {}
    lists = [p for p in (*folder.glob("*SHA256SUMS*"), *folder.glob("*sha256*")) if p.is_file()]
    for listed in lists:
        try:
            lines = listed.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            continue
        for line in lines:
            found = _LINE.match(line)
            name = found[2].removeprefix("./") if found else ""
            if found and not name.startswith("/") and ".." not in Path(name).parts:
                sums[name] = f"sha256:{found[1].lower()}"
    return sums


def check_target(facts: CheckpointFacts, checksums: bool, tell: Tell) -> Iterator[Finding]:
    """The target's folder: its config, its files, its checksums."""
    folder = facts.folder
    if not folder.is_dir():
        yield fail("checkpoint", "folder", str(folder), "there is no such folder",
                   "set target.path to the folder of a checkpoint")  # fmt: skip
        return
    try:
        config = text_config(read_json(folder / "config.json"))
        what = wrong_layers(config) or wrong_number(config)
    except EngineUsageError as error:
        what = str(error).removeprefix(f"{folder / 'config.json'}: ")
    if what is not None:
        yield fail("checkpoint", "config", str(folder / "config.json"), what)
    yield from check_whole(facts, "target.path")
    if facts.sums and checksums:
        tell(f"summing {len(facts.sums)} files of {folder}")
    yield from check_sums(facts, checksums, tell)


def check_whole(facts: CheckpointFacts, key: str) -> Iterator[Finding]:
    """Files, headers and index of the checkpoint that the plan's `key` names."""
    where = str(facts.folder)
    if facts.index_problem:
        yield fail("checkpoint", "index", str(facts.folder / INDEX), facts.index_problem,
                   "fetch it again")  # fmt: skip
    elif not facts.shards:
        yield fail("checkpoint", "weights", where, f"{key} holds no weights (*.safetensors, *.bin, "
                   "*.gguf)", "fetch the checkpoint")  # fmt: skip
    for shard in facts.shards:
        if shard.problem:
            yield fail("checkpoint", "shard", str(facts.folder / shard.name), shard.problem,
                       "fetch this file again")  # fmt: skip
    yield from _misplaced(facts)
    if facts.unfinished:
        names = ", ".join(facts.unfinished[:3])
        yield warn(
            "checkpoint",
            "unfinished",
            where,
            f"{len(facts.unfinished)} unfinished downloads lie there: {names}",
            "finish the download, or remove them",
        )
    if facts.whole:
        yield ok("checkpoint", "whole", where, f"{len(facts.shards)} of {len(facts.shards)} files "
                 f"of weights, {gib(facts.bytes)}, {len(facts.tensors)} tensors; each file is as "
                 "long as its header says")  # fmt: skip


def _misplaced(facts: CheckpointFacts) -> Iterator[Finding]:
    """Tensors that are not in the file that the index names."""
    held = {shard.name: shard for shard in facts.shards}
    lacking = [
        f"{tensor} in {name}"
        for tensor, name in sorted(facts.placed.items())
        if not held[name].problem and held[name].tensors and tensor not in held[name].tensors
    ]
    if lacking:
        yield fail("checkpoint", "index", str(facts.folder / INDEX), f"{len(lacking)} tensors are "
                   f"not in the file that it names: {lacking[0]}", "index and files are of two "
                   "versions: fetch both again")  # fmt: skip


def check_sums(facts: CheckpointFacts, every: bool, tell: Tell) -> Iterator[Finding]:
    """Checksums of the files that have one; of all only where `every` is asked for.

    Small files first, so that within the unasked bytes as many as can be are verified.
    """
    where, left = str(facts.folder), SUMMED_UNASKED
    files = [(facts.folder / name, expected) for name, expected in facts.sums.items()]
    # os.path: a name from a list of checksums may be one that no file can have.
    present = sorted((p.stat().st_size, p, e) for p, e in files if os.path.isfile(p))
    if not present:
        yield unknown(
            "checkpoint",
            "checksums",
            where,
            "no checksums are given, nor is it in the hub's cache",
            "put a SHA256SUMS beside the files to have them verified",
        )
        return
    for missing in sorted(p for p, _ in files if not os.path.exists(p)):
        yield fail("checkpoint", "checksums", str(missing), "a checksum is given and the file is "
                   "missing", "fetch it")  # fmt: skip
    verified, skipped = 0, 0
    for size, file, expected in present:
        if not every and size > left:
            skipped += size
            continue
        left -= size
        verified += 1
        try:
            same = checksum(file, expected.partition(":")[0], tell) == expected
        except OSError as error:
            yield fail("checkpoint", "checksums", str(file), f"cannot be read: {error.strerror}",
                       "change its permissions, or fetch this file again")  # fmt: skip
            continue
        if not same:
            yield fail("checkpoint", "checksums", str(file), "its content is not that of its "
                       "checksum", "fetch this file again")  # fmt: skip
    if verified:
        yield ok("checkpoint", "checksums", where, f"{verified} of {len(present)} verified")
    if skipped:
        yield unknown("checkpoint", "checksums", where, f"{gib(skipped)} were not verified",
                      "give --checksums to read every byte")  # fmt: skip


def checksum(file: Path, kind: str, tell: Tell) -> str:
    """`sha256:…` of a file, or git's name of it as a blob, `blob:…`."""
    size = file.stat().st_size
    digest = hashlib.sha256() if kind == "sha256" else hashlib.sha1(usedforsecurity=False)
    if kind == "blob":
        digest.update(f"blob {size}\0".encode())
    done, told = 0, 0
    with file.open("rb") as stream:
        while piece := stream.read(_PIECE):
            digest.update(piece)
            done += len(piece)
            if done - told >= 2**30:
                told = done
                tell(f"{file.name}: {gib(done)} of {gib(size)} summed")
    return f"{kind}:{digest.hexdigest()}"
