"""Each check of the doctor by facts, and by planted faults where the fault is a file's or a port's.

The facts of GPUs are written by hand: none is here.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from drafters.headers import TensorHeader
from engines.base import EngineUsageError, ServeSpec
from engines.hardware import Gpu, GpuProcess, Gpus, Link
from engines.sglang import _kv_tokens
from harness.doctor import Subject, check_engine, check_fitting, doctor, subject_of
from harness.doctoring import machine, memory, software, storage
from harness.doctoring.checkpoint import (
    check_sums,
    check_target,
    check_whole,
    read_checkpoint,
)
from harness.doctoring.finding import Finding, ordered
from harness.doctoring.gpus import check_gpus
from harness.doctoring.machine import MachineFacts
from harness.doctoring.memory import Model, need_of
from harness.doctoring.text import closing, text_of
from harness.plan.load import build, read_profile
from harness.prepare import Request
from tests.drafter_folders import folder_of, plain_spec, target_folder

GIB = 2**30
QUIET = lambda line: None  # noqa: E731


def codes(findings: Any, severity: str) -> list[str]:
    return [f.code for f in findings if f.severity == severity]


def only(findings: Any) -> Finding:
    (one,) = findings
    return one


# --- the checkpoint ---------------------------------------------------------------------------


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


# --- memory -----------------------------------------------------------------------------------

KIMI = {  # sizes of Kimi-K2.5's text model
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "vocab_size": 163840,
    "dtype": "bfloat16",
}
LLAMA = {  # Llama-3.1-8B
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "dtype": "bfloat16",
}


def spec(**changes: Any) -> ServeSpec:
    fields: dict[str, Any] = {
        "target": Path("/models/target"),
        "served_name": "m",
        "port": 1,
        "device": "cuda",
        "max_model_len": 1024,
        "max_num_seqs": 4,
    }
    return ServeSpec(**{**fields, **changes})


@pytest.mark.parametrize(
    ("config", "changes", "a_token"),
    [
        # 70,272 bytes a token, of DeepSeek-V3's and Kimi-K2's cache, however many ranks
        (KIMI, {}, 61 * 576 * 2),
        (KIMI, {"tensor_parallel": 8}, 61 * 576 * 2),
        (KIMI, {"tensor_parallel": 8, "extra_args": ("--kv-cache-dtype", "fp8")}, 61 * 576),
        # 128 KiB a token of Llama-3.1-8B, an eighth of it on each of 8 ranks, and no less on 16
        (LLAMA, {}, 131072),
        (LLAMA, {"tensor_parallel": 8}, 16384),
        (LLAMA, {"tensor_parallel": 16}, 16384),
        (LLAMA, {"extra_args": ("--kv-cache-dtype=fp8_e4m3",)}, 65536),
    ],
)
def test_the_cache_of_a_token(config: Any, changes: Any, a_token: int) -> None:
    need = need_of(spec(**changes), Model(config=config, total=0), None, 2)
    assert need.kv_sequence == 1024 * a_token
    assert (need.sequences, need.kv_bytes) == (2, 2 * 1024 * a_token)


def test_the_cache_agrees_with_what_sglang_is_told(tmp_path: Path) -> None:
    for config in (KIMI, LLAMA):
        folder = target_folder(tmp_path / str(config["hidden_size"]), **config)
        asked = spec(target=folder, kv_cache_gib=4.0)
        each = need_of(asked, Model(config=config, total=0), None, 1).kv_sequence // 1024
        assert _kv_tokens(asked) == 4 * GIB // each


@pytest.mark.parametrize("layers", ["0", "1e999", '"x"', "null"])
def test_sglang_is_told_no_cache_of_a_model_without_sizes(tmp_path: Path, layers: str) -> None:
    (tmp_path / "config.json").write_text(
        f'{{"num_hidden_layers": {layers}, "num_attention_heads": 4, "hidden_size": 64}}'
    )
    with pytest.raises(EngineUsageError, match="sizes cannot be read"):
        _kv_tokens(spec(target=tmp_path, kv_cache_gib=1.0, drafter=None))


def header(shape: tuple[int, ...], dtype: str = "BF16") -> TensorHeader:
    size = torch.Size(shape).numel() * (1 if dtype == "U8" else 4 if dtype == "F32" else 2)
    return TensorHeader(dtype, shape, Path("x"), 0, size)


def test_what_is_shared_between_the_ranks_and_what_is_not() -> None:
    tensors = {
        "model.layers.0.self_attn.q_proj.weight": header((64, 64)),  # 8192 bytes, shared
        "model.layers.0.self_attn.k_proj.weight": header((16, 64)),  # 2048, 2 heads on 4 ranks
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": header((32, 64)),  # 4096, whole
        "model.layers.0.input_layernorm.weight": header((64,)),  # 128, whole
        "model.layers.0.mlp.gate.weight": header((8, 64)),  # the router: 1024, whole
        "model.layers.0.mlp.experts.0.gate_proj.weight": header((64, 64)),  # 8192, shared
        "model.layers.2.eh_proj.weight": header((64, 128)),  # a multi-token head: not loaded
    }
    model = Model(config={"num_hidden_layers": 2, "num_key_value_heads": 2}, tensors=tensors)
    got = memory.weight_bytes(model, "auto", memory.Parallel(tensor=4))
    assert got == (8192 // 4 * 2 + 2048 // 2, 4096 + 128 + 1024)
    assert memory.weight_bytes(model, "float32", memory.Parallel(tensor=4)) == (
        2 * got[0],
        2 * got[1],
    )
    packed = msgspec.structs.replace(model, quantized=True)
    assert memory.weight_bytes(packed, "float32", memory.Parallel(tensor=4)) == got


@given(tensor=st.integers(1, 16), sizes=st.lists(st.integers(1, 99), min_size=1, max_size=8))
def test_all_ranks_together_hold_the_weights_once(tensor: int, sizes: list[int]) -> None:
    tensors = {f"layers.0.mlp.experts.{i}.up_proj": header((n, 8)) for i, n in enumerate(sizes)}
    split, whole_ = memory.weight_bytes(
        Model(config={"num_hidden_layers": 1}, tensors=tensors),
        "auto",
        memory.Parallel(tensor=tensor),
    )
    assert whole_ == 0
    assert abs(split * tensor - sum(sizes) * 16) <= tensor


def test_a_sliding_window_and_linear_attention_keep_less() -> None:
    kinds = ["full_attention", "sliding_attention", "linear_attention"]
    config = {"num_hidden_layers": 3, "layer_types": kinds, "sliding_window": 100}
    assert memory.kv_tokens(config, 1000) == 1100
    assert memory.kv_tokens({"num_hidden_layers": 3}, 1000) == 3000


def kimi_need(**changes: Any) -> memory.Need:
    """547 GB on 8 GPUs, with 32k of context."""
    asked = {"tensor_parallel": 8, "max_model_len": 32768, "max_num_seqs": 16, **changes}
    return need_of(spec(**asked), Model(config=KIMI, total=547 * 10**9, quantized=True), None, 16)


def test_kimi_on_eight_gpus_of_96_gb() -> None:
    bf16, fp8 = kimi_need(), kimi_need(extra_args=("--kv-cache-dtype", "fp8"))
    usable = int(96 * 10**9 * 0.92)
    said = memory.check_memory(bf16, "GPU 0", usable, "usable")
    assert said.severity == "warn" and "of the 16 sequences" in said.what
    assert memory.check_memory(fp8, "GPU 0", int(140e9), "usable").severity == "ok"
    assert memory.check_memory(bf16, "GPU 0", int(70e9), "usable").severity == "fail"
    assert memory.check_memory(bf16, "GPU 0", None, "").severity == "unknown"
    weights = bf16.terms[0]
    assert (weights.name, weights.bytes) == ("weights", 547 * 10**9 // 8)


def test_a_cache_of_the_plans_own_size_must_hold_one_sequence() -> None:
    small = need_of(spec(kv_cache_gib=0.1), Model(config=LLAMA, total=0), None, 4)
    assert memory.check_memory(small, "GPU 0", 80 * GIB, "free").code == "kv_cache"
    fits = need_of(spec(kv_cache_gib=1.0), Model(config=LLAMA, total=0), None, 4)
    assert fits.kv_bytes == GIB
    assert memory.check_memory(fits, "GPU 0", 80 * GIB, "free").severity == "ok"


def test_a_drafter_adds_its_weights_and_its_own_cache() -> None:
    head = plain_spec(num_key_value_heads=8, head_dim=128, num_attention_heads=32)
    drafter = Model(config=memory.drafter_config(head), total=4_500_000_000)
    alone = need_of(spec(), Model(config=LLAMA, total=0), None, 4)
    both = need_of(spec(drafter=Path("d"), k=3), Model(config=LLAMA, total=0), drafter, 4)
    assert both.kv_sequence - alone.kv_sequence == 1024 * 2 * 8 * 128 * 2
    assert {t.name: t.bytes for t in both.terms}["drafter"] == 4_500_000_000


def test_vllm_refuses_a_gpu_that_others_fill() -> None:
    usable, rule = memory.usable_bytes("vllm", spec(), 60 * GIB, 100 * GIB)
    assert usable == 92 * GIB and "92%" in rule
    assert codes(memory.check_free("vllm", "GPU 0", usable, 60 * GIB), "fail") == ["free"]
    less = spec(extra_args=("--gpu-memory-utilization", "0.5"))
    usable, _ = memory.usable_bytes("vllm", less, 60 * GIB, 100 * GIB)
    assert usable == 50 * GIB and not list(memory.check_free("vllm", "GPU 0", usable, 60 * GIB))
    assert memory.usable_bytes("sglang", spec(), 60 * GIB, 100 * GIB) == (60 * GIB, "free")


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


def test_an_argument_of_thousands_of_digits_is_left_to_the_engine() -> None:
    asked = spec(device="cuda", tensor_parallel=2, extra_args=("--tp", "9" * 5000))
    assert memory.parallel_of(asked).tensor == 2


def test_what_the_table_does_not_know_is_told() -> None:
    asked = spec(extra_args=("--enable-expert-parallel", "--data-parallel-size=8"))
    notes = need_of(asked, Model(config=KIMI, total=0), None, 1).notes
    assert len(notes) == 2 and all(note.startswith("not counted") for note in notes)
    pipeline = memory.parallel_of(spec(tensor_parallel=4, extra_args=("--pp-size", "2")))
    assert (pipeline.tensor, pipeline.pipeline) == (4, 2)


# --- the disk ---------------------------------------------------------------------------------


def test_a_file_is_read_no_further_than_it_may(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(20 * 2**20))
    speed = storage.read_speed(file, most=9 * 2**20)
    assert speed is not None and 9 * 2**20 <= speed.bytes <= 12 * 2**20
    assert storage.read_speed(tmp_path / "none") is None


def test_a_file_that_another_process_holds_is_read_past_memory_or_said_to_be_there(
    tmp_path: Path,
) -> None:
    file = tmp_path / "weights"
    file.write_bytes(os.urandom(2**22))
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as held:
            assert sum(held[:: mmap.PAGESIZE]) > 0  # every page is mapped now
            if not storage.in_memory(stream.fileno()):
                pytest.skip("this file system does not tell what is in memory")
            speed = storage.read_speed(file)
            assert speed is not None and speed.bytes == 2**22
            assert storage.in_memory(stream.fileno())  # it had to be read some other way


def reading(per_s: float, **changes: Any) -> storage.ReadSpeed:
    fields = {"file": "w", "bytes": 2**28, "seconds": 2**28 / per_s, **changes}
    return storage.ReadSpeed(**fields)


@pytest.mark.parametrize(
    ("speed", "severity"),
    [
        (reading(365e6), "fail"),  # 547 GB in 25 minutes, against a patience of 10
        (reading(1e9), "fail"),  # 547 s are above the 500 allowed here
        (reading(2e9), "warn"),
        (reading(25e9), "ok"),
        (reading(25e9, cached=True), "unknown"),
        (reading(1e9, bytes=1000), "unknown"),
        (None, "unknown"),
    ],
)
def test_the_load_time_against_the_plans_patience(speed: Any, severity: str) -> None:
    first = next(storage.check_read(speed, 547 * 10**9, 500.0, 10**12))
    assert first.severity == severity


def test_a_checkpoint_above_the_memory_is_read_at_every_start() -> None:
    found = list(storage.check_read(reading(2e9), 547 * 10**9, 3600.0, 256 * GIB))
    assert [(f.severity, f.code) for f in found] == [("ok", "read"), ("warn", "cache")]


@pytest.mark.parametrize(
    ("free", "writable", "severity"),
    [(10, True, "fail"), (2**29, True, "warn"), (2**31, True, "ok"), (2**31, False, "fail"),
     (None, True, "unknown")],
)  # fmt: skip
def test_room_on_the_disk(free: int | None, writable: bool, severity: str) -> None:
    place = storage.Room(
        folder="r", purpose="the run", free=free, wanted=GIB, least=2**20, writable=writable
    )
    assert only(storage.check_room([place])).severity == severity


def test_nothing_is_written_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        assert not storage.room(folder, "the run", GIB).writable


def test_room_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    place = storage.room(tmp_path / "a" / "b", "a run", 1)
    assert place.free is not None and place.free > 0 and place.writable


# --- the host ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "severity"),
    [((1024, 1024), "fail"), ((1024, 65536), "warn"), ((65536, 65536), "ok"), ((-1, -1), "ok")],
)
def test_open_files(limits: tuple[int, int], severity: str) -> None:
    assert machine.check_open_files(MachineFacts(open_files=limits), 256, 64).severity == (
        "ok" if severity == "ok" else severity if limits[0] < 1088 else "ok"
    )


@pytest.mark.parametrize(
    ("free", "ranks", "severity"),
    [(64 * 2**20, 8, "fail"), (600 * 2**20, 8, "warn"), (16 * GIB, 8, "ok"),
     (64 * 2**20, 1, "ok"), (None, 8, "unknown")],
)  # fmt: skip
def test_shared_memory(free: int | None, ranks: int, severity: str) -> None:
    """64 MiB is what a container has unless it is told otherwise."""
    assert machine.check_shm(MachineFacts(shm_free=free), ranks).severity == severity


def test_cores_by_the_cgroups_limit() -> None:
    facts = MachineFacts(cores=64, cpu_limit=4.0)
    said = machine.check_cpu(facts, 8)
    assert said.severity == "warn" and "cgroup" in said.what
    assert machine.check_cpu(MachineFacts(cores=64), 8).severity == "ok"


def test_huge_pages_set_aside() -> None:
    facts = MachineFacts(memory_bytes=100 * GIB, huge_reserved=50 * GIB, huge_pages="[never] x")
    assert machine.check_huge_pages(facts).severity == "warn"
    meminfo = "HugePages_Free:      512\nHugepagesize:       2048 kB\n"
    assert machine.reserved_pages(meminfo) == GIB
    assert machine.reserved_pages("") is None


def test_the_clock() -> None:
    past = MachineFacts(now_s=0.0, newest_file_s=1.7e9)
    assert machine.check_clock(past).severity == "warn"
    assert machine.check_clock(MachineFacts(now_s=2e9, clock_source="hpet")).severity == "warn"
    assert machine.check_clock(MachineFacts(now_s=2e9, newest_file_s=1e9)).severity == "ok"


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_lowest_limit_of_the_groups_above_holds(tmp_path: Path) -> None:
    root, own = tmp_path / "cg", tmp_path / "own"
    write(root / "pod" / "box", cpu__max="max 100000", memory__max="max")
    write(root / "pod", cpu__max="350000 100000", memory__max=str(8 * GIB))
    (root / "pod" / "memory.current").write_text(str(GIB))
    own.write_text("0::/pod/box\n")
    assert machine.read_cgroup(root, own) == (3.5, 8 * GIB, GIB)
    facts = MachineFacts(memory_available=32 * GIB, memory_limit=8 * GIB, memory_used=GIB)
    assert facts.memory_usable == 7 * GIB


def test_limits_of_the_first_cgroup_version(tmp_path: Path) -> None:
    root, own = tmp_path / "cg", tmp_path / "own"
    write(root / "memory", memory__limit_in_bytes=str(4 * GIB), memory__usage_in_bytes="5")
    cpu = root / "cpu" / "x"
    cpu.mkdir(parents=True)
    (cpu / "cpu.cfs_quota_us").write_text("-1")
    (cpu / "cpu.cfs_period_us").write_text("100000")
    own.write_text("4:memory:/gone\n1:cpu,cpuacct:/x\n")
    assert machine.read_cgroup(root, own) == (None, 4 * GIB, 5)
    (cpu / "cpu.cfs_quota_us").write_text("150000")
    assert machine.read_cgroup(root, own)[0] == 1.5
    (root / "memory" / "memory.limit_in_bytes").write_text(str(2**63 - 4096))  # no limit
    assert machine.read_cgroup(root, own)[1] is None
    assert machine.read_cgroup(root, tmp_path / "none") == (None, None, None)


# --- the GPUs ---------------------------------------------------------------------------------


def eight(nvlink: bool = True, **changes: Any) -> Gpus:
    fields: dict[str, Any] = {"name": "H200", "capability": "9.0", "numa_node": 0, **changes}
    return Gpus(
        driver="580",
        cuda="13.0",
        gpus=tuple(Gpu(index=i, **fields) for i in range(8)),
        links=tuple(
            Link(first=i, second=j, nvlink=nvlink, path="PCIe within one NUMA node")
            for i in range(8)
            for j in range(i + 1, 8)
        ),
    )


def on(found: Gpus, wanted: int) -> list[Finding]:
    return list(check_gpus(found, found.visible(None), wanted))


def test_absent_gpus_are_absent_and_fail_only_a_plan_that_wants_them() -> None:
    none = Gpus(absent="no NVIDIA driver is on this machine")
    assert only(check_gpus(none, (), 0)).severity == "ok"
    said = only(check_gpus(none, (), 8))
    assert said.severity == "fail" and "8 wanted, none here" in said.what


def test_eight_alike_gpus_with_nvlink_are_in_order() -> None:
    assert {f.severity for f in on(eight(), 8)} == {"ok"}


@pytest.mark.parametrize(
    ("found", "wanted", "severity", "code"),
    [
        (eight(), 16, "fail", "count"),
        (eight(nvlink=False), 8, "warn", "links"),
        (eight(partitioned=True), 8, "warn", "mig"),
        (eight(uncorrected_errors=2), 8, "warn", "ecc"),
        (eight(pcie_width=4, pcie_width_max=16), 8, "warn", "pcie"),
        (eight(processes=(GpuProcess(pid=7, name="python", used_bytes=GIB),)), 8, "warn",
         "processes"),
    ],
)  # fmt: skip
def test_each_fault_of_the_gpus(found: Gpus, wanted: int, severity: str, code: str) -> None:
    told = on(found, wanted)
    assert set(codes(told, severity)) == {code}


def test_unlike_gpus_numa_nodes_and_untold_links() -> None:
    mixed = Gpus(
        gpus=(
            Gpu(index=0, name="A", capability="8.0", numa_node=0),
            Gpu(index=1, name="B", capability="9.0", numa_node=1),
        )
    )
    told = on(mixed, 2)
    assert set(codes(told, "warn")) == {"alike", "numa"} and codes(told, "unknown") == ["links"]
    hidden = list(check_gpus(eight(), eight().visible("0,1"), 8))
    assert "hides 6" in only(f for f in hidden if f.severity == "fail").what


# --- software ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("torch_cuda", "driver", "severity"),
    [("12.9", "13.0", "ok"), ("12.9", "12.4", "warn"), ("13.0", "12.8", "fail"),
     ("12.9", None, "unknown"), (None, "13.0", "fail")],
)  # fmt: skip
def test_torchs_cuda_against_the_drivers(
    torch_cuda: str | None, driver: str | None, severity: str
) -> None:
    found = software.Environment(name="vllm", state="ready", cuda=torch_cuda)
    assert software.check_cuda(found, Gpus(cuda=driver)).severity == severity


def test_torchs_cuda_is_read_without_importing_it(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    file = tmp_path / "torch" / "version.py"
    file.write_text("cuda: Optional[str] = '12.9'\nhip: Optional[str] = None\n")
    assert software.torch_cuda(tmp_path) == "12.9"
    file.write_text("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n")
    assert software.torch_cuda(tmp_path) is None


def test_an_environment_of_another_user_is_told(tmp_path: Path, monkeypatch: Any) -> None:
    def denied(name: str) -> Path:
        raise PermissionError(13, "Permission denied", f"{tmp_path}/{name}")

    monkeypatch.setattr(software, "engine_python", denied)
    others = {e.name: e.problem for e in software.other_environments("vllm")}
    assert others["sglang"] == f"{tmp_path}/sglang: Permission denied" and "vllm" not in others
    found = software.read_environment("vllm")
    said = only(software.check_environment(found, Gpus(), on_gpus=False))
    assert said.severity == "fail" and "Permission denied" in said.what


@pytest.mark.parametrize(
    ("engine", "sets", "severity"),
    [
        ("vllm", ("engine.extra_args=--max-num-sequences",), "fail"),
        ("sglang", ('engine.flags.--no-such={why="w", variant="baseline"}',), "fail"),
        ("sglang", ("engine.extra_args=--mem-fraction-static=0.8",), "unknown"),
    ],
)
def test_the_arguments_are_looked_at_without_the_environment(
    tmp_path: Path, monkeypatch: Any, engine: str, sets: tuple[str, ...], severity: str
) -> None:
    monkeypatch.setenv("SPEC_HARNESS_VENVS", str(tmp_path))
    request = Request(engines=(engine,), sets=(f"target.path={tmp_path}", *sets), out=tmp_path)
    found = list(check_engine(subject_of(request), Gpus(), (), QUIET))
    assert [f.severity for f in found if f.code == "plan"] == [severity]
    assert "environment" in codes(found, "fail")


def test_a_program_that_starts_the_engine_is_told(tmp_path: Path) -> None:
    sets = (f"target.path={tmp_path}", 'engine.command_prefix=["ssh", "gpu-box"]')
    for request, said in ((Request(sets=sets), ["elsewhere"]), (Request(sets=sets[:1]), [])):
        told = doctor(msgspec.structs.replace(request, out=tmp_path), QUIET).findings
        assert [f.code for f in told if f.where == "engine.command_prefix"] == said
        assert all("ssh gpu-box" in f.what for f in told if f.code == "elsewhere")


def test_a_missing_environment_fails(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("SPEC_HARNESS_VENVS", str(tmp_path))
    monkeypatch.delenv("SPEC_HARNESS_PYTHON_VLLM", raising=False)
    found = software.read_environment("vllm")
    said = only(software.check_environment(found, Gpus(), on_gpus=True))
    assert said.severity == "fail" and "is not installed" in said.what and "run `" in said.remedy


def test_a_taken_port_and_who_holds_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = software.check_ports("127.0.0.1", port)
        assert said.severity == "fail" and f"process {os.getpid()}" in said.what
    assert software.check_ports("127.0.0.1", port).severity == "ok"
    assert software.check_ports("127.0.0.1", None).severity == "ok"
    assert software.check_ports("0.0.0.0", port, reach="node17").severity == "unknown"


def test_a_broken_tokenizer_and_one_that_only_the_engine_may_load(tmp_path: Path) -> None:
    assert codes(software.check_tokenizer(tmp_path, False, True), "unknown") == ["tokenizer"]
    (tmp_path / "tokenizer.json").write_text("{")
    assert codes(software.check_tokenizer(tmp_path, False, True), "fail") == ["tokenizer"]


def test_the_wrong_drafter_for_the_target(tmp_path: Path) -> None:
    target = target_folder(tmp_path / "target", weights=True)
    right = folder_of(plain_spec(), tmp_path / "right", embedding=False)
    wrong = folder_of(plain_spec(hidden_size=16, target_hidden_size=16), tmp_path / "wrong")
    quiet = lambda name, size: None  # noqa: E731
    assert codes(software.check_drafter(right, target, "vllm", quiet), "fail") == []
    bad = list(software.check_drafter(wrong, target, "vllm", quiet))
    assert codes(bad, "fail") and not codes(bad, "ok")
    gone = only(software.check_drafter(tmp_path / "none", target, "vllm", quiet))
    assert gone.severity == "fail"


# --- what is told -----------------------------------------------------------------------------


def test_worst_first_and_one_closing_line() -> None:
    told = [
        Finding(severity=s, area=a, code="c", where="w", what=f"{s} {a}")  # type: ignore[arg-type]
        for s, a in (("ok", "gpu"), ("warn", "disk"), ("fail", "gpu"), ("unknown", "gpu"))
    ]
    found = ordered(told)
    assert [f.severity for f in found] == ["fail", "warn", "unknown", "ok"]
    assert closing(found) == "1 thing would fail; 1 warning, 1 not known, 1 in order"
    text = text_of("doctor: x", found, [kimi_need()])
    assert text.index("fail gpu") < text.index("warn disk") < text.index("ok gpu")
    assert "KV cache" in text and text.endswith(closing(found) + "\n")
