"""Which profile is chosen without `--profile`: by the target, the drafter and the GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engines.hardware import Gpu, Gpus
from harness.choose import KIMI, choose_profile, machine
from harness.plan.load import build, profile_names
from harness.prepare import Request

GB = 1_000_000_000
SM120 = Gpu(index=0, name="NVIDIA RTX PRO 6000", capability="12.0", memory_bytes=102 * GB)
H200 = Gpu(index=0, name="NVIDIA H200", capability="9.0", memory_bytes=150 * GB)
H100 = Gpu(index=0, name="NVIDIA H100", capability="9.0", memory_bytes=85 * GB)
B200 = Gpu(index=0, name="NVIDIA B200", capability="10.0", memory_bytes=191 * GB)
UNTOLD = Gpu(index=0, name="NVIDIA H200", capability="9.0")


def checkpoint(folder: Path, **config: Any) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture
def kimi(tmp_path: Path) -> str:
    return checkpoint(tmp_path / "kimi", architectures=[KIMI])


def see(monkeypatch: pytest.MonkeyPatch, here: list[Gpu]) -> None:
    """A machine with these GPUs, as NVML numbers them."""
    numbered = tuple(msgspec.structs.replace(gpu, index=i) for i, gpu in enumerate(here))
    monkeypatch.setattr("engines.hardware.read_gpus", lambda: Gpus(gpus=numbered))


def chosen(
    monkeypatch: pytest.MonkeyPatch,
    here: list[Gpu],
    *sets: str,
    engine: str = "vllm",
    **more: Any,
) -> tuple[str, str]:
    see(monkeypatch, here)
    source, why = choose_profile(Request(engines=(engine,), sets=sets, **more), engine)
    return source.name, why


@pytest.mark.parametrize(("gpu", "kind"), [(SM120, "sm120"), (H200, "h200"), (B200, "b200")])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_kimi_on_eight_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kimi: str, gpu: Gpu, kind: str,
    engine: str,
) -> None:  # fmt: skip
    llama = checkpoint(tmp_path / "llama", architectures=["LlamaForCausalLMEagle3"])
    mla = checkpoint(tmp_path / "mla", kv_lora_rank=512)
    nested = checkpoint(tmp_path / "nested", transformer_layer_config={"kv_lora_rank": 512})
    for drafter, head in ((llama, "llama"), (mla, "mla"), (nested, "mla")):
        sets = (f"target.path={kimi}", f"drafter.path={drafter}")
        name, why = chosen(monkeypatch, [gpu] * 8, *sets, engine=engine)
        assert name == f"kimi-k2.5-{kind}-{head}"
        assert name in profile_names()
        assert f"8 {gpu.name}" in why
    assert chosen(monkeypatch, [gpu] * 8, f"target.path={kimi}")[0] == f"kimi-k2.5-{kind}-mla"


@pytest.mark.parametrize(
    "here",
    [[], [H200] * 7, [H200] * 16, [H100] * 8, [H200] * 4 + [B200] * 4, [SM120] * 4, [UNTOLD] * 8],
)
def test_other_machines_have_none(
    monkeypatch: pytest.MonkeyPatch, kimi: str, here: list[Gpu]
) -> None:
    assert machine(here) is None
    assert chosen(monkeypatch, here, f"target.path={kimi}")[0] == "model"


def test_gpus_that_cuda_is_not_to_see_do_not_count(
    monkeypatch: pytest.MonkeyPatch, kimi: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert chosen(monkeypatch, [H200] * 8, f"target.path={kimi}")[0] == "model"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "8,9,10,11,12,13,14,15")
    assert chosen(monkeypatch, [H200] * 16, f"target.path={kimi}")[0] == "kimi-k2.5-h200-mla"


def test_what_is_said_is_not_chosen_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kimi: str
) -> None:
    here = [H200] * 8
    other = checkpoint(tmp_path / "other", architectures=["LlamaForCausalLM"])
    broken = checkpoint(tmp_path / "broken", architectures=5)
    assert chosen(monkeypatch, here, f"target.path={broken}")[0] == "model"
    assert chosen(monkeypatch, here, f"target.path={other}")[0] == "model"
    assert chosen(monkeypatch, here, f"target.path={tmp_path / 'gone'}")[0] == "model"
    assert chosen(monkeypatch, here, f"target.path={kimi}", "engine.device=cpu")[0] == "model"
    assert chosen(monkeypatch, here, f"target.path={kimi}", engine="reference")[0] == "model"
    assert chosen(monkeypatch, here, f"target.path={kimi}", profile="demo")[0] == "demo"
    assert chosen(monkeypatch, here, f"target.path={kimi}", urls={"": "http://a"})[0] == "attach"
    assert chosen(monkeypatch, here)[0] == "demo"


def test_the_chosen_profile_is_laid_under_what_is_set(
    monkeypatch: pytest.MonkeyPatch, kimi: str
) -> None:
    see(monkeypatch, [H200] * 8)
    sets = (f"target.path={kimi}", "load.concurrency=2")
    source, _ = choose_profile(Request(engines=("vllm",), sets=sets), "vllm")
    plan = build(source, "vllm", list(sets))
    assert (plan.target.path, plan.load.concurrency) == (kimi, (2,))
    assert plan.engine.tensor_parallel == 8
