"""The doctor on memory, the engine's environment and the models, and what it tells."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from doctor_findings import QUIET, codes, only
from hypothesis import given
from hypothesis import strategies as st

from drafters.headers import TensorHeader
from engines.base import EngineUsageError, ServeSpec
from engines.hardware import Gpus
from engines.sglang import _kv_tokens
from harness.doctor import check_engine, doctor, subject_of
from harness.doctoring import memory, software
from harness.doctoring.finding import Finding, ordered
from harness.doctoring.memory import Model, need_of
from harness.doctoring.text import closing, text_of
from harness.prepare import Request
from tests.drafter_folders import folder_of, plain_spec, target_folder

GIB = 2**30


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
        for said in ("fp8_e4m3", "fp8_e5m2"):
            halved = spec(target=folder, kv_cache_gib=4.0, extra_args=("--kv-cache-dtype", said))
            assert _kv_tokens(halved) == 4 * GIB // (each // 2)


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


def test_an_argument_of_thousands_of_digits_is_left_to_the_engine() -> None:
    asked = spec(device="cuda", tensor_parallel=2, extra_args=("--tp", "9" * 5000))
    assert memory.parallel_of(asked).tensor == 2


def test_what_the_table_does_not_know_is_told() -> None:
    asked = spec(extra_args=("--enable-expert-parallel", "--data-parallel-size=8"))
    notes = need_of(asked, Model(config=KIMI, total=0), None, 1).notes
    assert len(notes) == 2 and all(note.startswith("not counted") for note in notes)
    pipeline = memory.parallel_of(spec(tensor_parallel=4, extra_args=("--pp-size", "2")))
    assert (pipeline.tensor, pipeline.pipeline) == (4, 2)


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


@pytest.mark.parametrize("variant", ["baseline", "speculative"])
def test_the_engine_is_asked_of_both_variants(tmp_path: Path, variant: str) -> None:
    target = target_folder(tmp_path / "target", weights=True, intermediate_size=64)
    drafter = folder_of(plain_spec(), tmp_path / "drafter", embedding=False)
    sets = (f"target.path={target}", f"drafter.path={drafter}", "engine.max_model_len=16")
    flag = f'engine.flags.--no-such={{why="w", variant="{variant}"}}'
    both = 'engine.flags.--nowhere={why="w"}'
    for more, wrong in (((), []), ((flag,), ["--no-such"]), ((both,), ["--nowhere"])):
        subject = subject_of(Request(sets=(*sets, *more), out=tmp_path))
        found = [f for f in check_engine(subject, Gpus(), (), QUIET) if f.code == "plan"]
        assert [f.severity for f in found] == (["fail"] if wrong else ["ok"])
        assert all(flag in only(found).what for flag in wrong)


def test_a_program_that_starts_the_engine_is_told(tmp_path: Path) -> None:
    sets = (f"target.path={tmp_path}", 'engine.command_prefix=["ssh", "gpu-box"]')
    for request, said in ((Request(sets=sets), ["elsewhere"]), (Request(sets=sets[:1]), [])):
        told = doctor(msgspec.structs.replace(request, out=tmp_path), QUIET).findings
        assert [f.code for f in told if f.where == "engine.command_prefix"] == said
        assert all("ssh gpu-box" in f.what for f in told if f.code == "elsewhere")


def test_the_doctor_tells_no_secret_of_the_program(tmp_path: Path) -> None:
    sets = (f"target.path={tmp_path}", "engine.command_prefix=env,HF_TOKEN=s3cret,ssh,gpu-box")
    told = doctor(Request(sets=sets, out=tmp_path), QUIET)
    assert "s3cret" not in msgspec.json.encode(told).decode()
    assert "HF_TOKEN" in only([f for f in told.findings if f.code == "elsewhere"]).what


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
