"""The doctor on a checkpoint: planted faults of its files, its index and its checksums."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from doctor_findings import QUIET, codes, only
from safetensors.torch import save_file

from harness.doctor import Subject, check_fitting
from harness.doctoring.checkpoint import (
    check_sums,
    check_target,
    check_whole,
    read_checkpoint,
)
from harness.doctoring.finding import Finding
from harness.doctoring.machine import MachineFacts
from harness.errors import UsageError
from harness.plan.load import build, read_profile
from harness.prepare import check_checkpoint


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A checkpoint of two shards and an index."""
    folder = tmp_path / "model"
    folder.mkdir()
    placed = {}
    for i in (1, 2):
        name = f"model-{i}-of-2.safetensors"
        save_file({f"w{i}": torch.ones(64, 32)}, folder / name)
        placed[f"w{i}"] = name
    index = {"metadata": {"total_size": 2 * 64 * 32 * 4}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def whole(folder: Path) -> list[Finding]:
    return list(check_whole(read_checkpoint(folder), "target.path"))


def test_a_whole_checkpoint_is_in_order(sharded: Path) -> None:
    found = only(whole(sharded))
    assert found.severity == "ok" and "2 of 2 files" in found.what
    assert read_checkpoint(sharded).total == 16384


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-2-of-2.safetensors").unlink()
    found = only(whole(sharded))
    assert found.severity == "fail"
    assert (found.where, found.what) == (str(sharded / "model-2-of-2.safetensors"), "is missing")


@pytest.mark.parametrize("change", [-1, -9000, 1])
def test_a_shard_of_another_length_than_its_header_says(sharded: Path, change: int) -> None:
    file = sharded / "model-1-of-2.safetensors"
    size = file.stat().st_size
    os.truncate(file, max(size + change, 4))
    found = only(whole(sharded))
    assert found.severity == "fail" and found.where == str(file)


def test_a_pointer_of_git_lfs_and_a_link_to_nothing_are_told_as_such(sharded: Path) -> None:
    (sharded / "model-1-of-2.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    (sharded / "model-2-of-2.safetensors").unlink()
    (sharded / "model-2-of-2.safetensors").symlink_to("../../blobs/gone")
    assert [f.what for f in whole(sharded)] == [
        "is a pointer of git LFS, not the file itself",
        "is a link to nothing",
    ]


def test_an_index_of_another_version_than_the_files(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    placed = {"w1": "model-2-of-2.safetensors", "w2": "model-2-of-2.safetensors"}
    index.write_text(json.dumps({"weight_map": placed}))
    assert codes(whole(sharded), "fail") == ["index"]
    index.write_text(json.dumps({"weight_map": {"w1": "../secret.safetensors"}}))
    assert "no file of this folder" in whole(sharded)[0].what
    index.write_text("{")
    assert codes(whole(sharded), "fail") == ["index"]


@pytest.mark.parametrize("name", ["model\0", "\ud800", "x" * 300, ".", "a\x1b[31m"])
def test_an_index_may_name_anything(sharded: Path, name: str) -> None:
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w1": name}}))
    found = only(whole(sharded))
    assert found.severity == "fail"
    assert msgspec.json.encode(found) and found.what.isprintable()


@pytest.mark.parametrize("name", ["pytorch_model-1-of-2.bin", "tokenizer.json", "weights"])
def test_an_index_that_names_other_files_is_not_whole(sharded: Path, name: str) -> None:
    index = sharded / "model.safetensors.index.json"
    (sharded / name).write_bytes(b"{}")
    (sharded / "config.json").write_text("{}")
    placed = json.loads(index.read_text())["weight_map"] | {"w3": name}
    index.write_text(json.dumps({"weight_map": placed}))
    found = whole(sharded)
    assert codes(found, "fail") == ["index"] and not codes(found, "ok")
    assert f"'{name}', which is no .safetensors file" in found[0].what
    with pytest.raises(UsageError, match=rf"names '{name}', which is no \.safetensors file"):
        check_checkpoint(sharded, "target.path")


@pytest.mark.parametrize("nested", [False, True])
def test_a_config_of_no_layers_is_told(sharded: Path, nested: bool) -> None:
    for layers, said in ((-61, ["config"]), (0, ["config"]), (61, [])):
        sizes = {"num_hidden_layers": layers}
        config = {"text_config": sizes} if nested else sizes
        (sharded / "config.json").write_text(json.dumps(config))
        found = list(check_target(read_checkpoint(sharded), False, QUIET))
        assert codes(found, "fail") == said
        assert all(f"is {layers}:" in f.what for f in found if f.code == "config")


def test_a_name_that_no_json_can_hold_is_told_without(sharded: Path) -> None:
    placed = {"\ud800": "model-1-of-2.safetensors"}
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    assert b"not in the file that it names" in msgspec.json.encode(whole(sharded)[0])


@pytest.mark.parametrize(
    "name", ["model.safetensors.index.json", "model-1-of-2.safetensors", "config.json"]
)
def test_a_pipe_is_not_waited_for(sharded: Path, name: str) -> None:
    (sharded / "config.json").write_text("{}")
    (sharded / name).unlink()
    os.mkfifo(sharded / name)
    found = list(check_target(read_checkpoint(sharded), False, QUIET))
    assert found[0].severity == "fail" and Path(found[0].where).name == name


def test_an_index_that_is_a_link_to_nothing_is_no_index(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    index.unlink()
    index.symlink_to(index.name)
    assert only(whole(sharded)).code == "index"


def test_an_empty_folder_and_an_unfinished_download(tmp_path: Path) -> None:
    assert codes(whole(tmp_path), "fail") == ["weights"]
    (tmp_path / "model.safetensors.incomplete").touch()
    assert codes(whole(tmp_path), "warn") == ["unfinished"]


def sums(folder: Path, every: bool = False) -> list[Finding]:
    return list(check_sums(read_checkpoint(folder), every, QUIET))


def test_checksums_of_a_list(sharded: Path) -> None:
    assert codes(sums(sharded), "unknown") == ["checksums"]
    lines = []
    for file in sorted(sharded.glob("*.safetensors")):
        lines.append(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}")
    (sharded / "SHA256SUMS").write_text("\n".join(lines))
    assert "2 of 2 verified" in only(sums(sharded)).what
    file = sharded / "model-1-of-2.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1  # one bit, which neither size nor header shows
    file.write_bytes(data)
    assert codes(whole(sharded), "fail") == []
    assert only(f for f in sums(sharded) if f.severity == "fail").where == str(file)


def test_a_list_of_checksums_may_name_anything(sharded: Path) -> None:
    lines = [f"{'0' * 64}  {name}" for name in ("x" * 300, "a\0b", ".")]
    lines.append(f"{'0' * 64}  model-1-of-2.safetensors")
    (sharded / "SHA256SUMS").write_text("\n".join(lines))
    assert codes(sums(sharded), "fail") == ["checksums"] * 3


def test_checksums_by_the_names_of_the_hubs_blobs(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    weights, config = b"weights", b'{"hidden_size": 4}'
    sha = hashlib.sha256(weights).hexdigest()
    # git's own name of these bytes, by `git hash-object`
    git = hashlib.sha1(b"blob %d\0" % len(config) + config).hexdigest()
    for name, blob, data in (("model.bin", sha, weights), ("config.json", git, config)):
        (blobs / blob).write_bytes(data)
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    assert "2 of 2 verified" in only(sums(snapshot)).what
    (blobs / git).write_bytes(b'{"hidden_size": 8}')
    assert only(f for f in sums(snapshot) if f.severity == "fail").where.endswith("config.json")


def test_what_is_not_summed_unasked_is_told(sharded: Path, monkeypatch: Any) -> None:
    file = sharded / "model-1-of-2.safetensors"
    (sharded / "sha256sums.txt").write_text(f"{'0' * 64} *{file.name}\n")
    monkeypatch.setattr("harness.doctoring.checkpoint.SUMMED_UNASKED", 100)
    assert codes(sums(sharded), "unknown") == ["checksums"]
    assert codes(sums(sharded), "fail") == []
    assert codes(sums(sharded, every=True), "fail") == ["checksums"]


@pytest.mark.parametrize("heads", ["0", "1e999", '"x"'])
def test_sizes_that_cannot_be_are_not_known(sharded: Path, heads: str) -> None:
    (sharded / "config.json").write_text(
        '{"num_hidden_layers": 2, "hidden_size": 64, "num_key_value_heads": 2, "vocab_size": 9,'
        f' "num_attention_heads": {heads}}}'
    )
    plan = build(read_profile("model"), "reference", [f"target.path={sharded}"])
    subject = Subject(
        engine="reference", why="", plan=plan, target=sharded, drafter=None, out=sharded
    )
    needs, found = check_fitting(subject, read_checkpoint(sharded), MachineFacts(), ())
    assert not needs and only(found).severity == "unknown"
    assert "sizes cannot be read" in only(found).what
