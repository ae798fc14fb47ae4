"""The sources of hidden states that run in process, and what served ones are told and hand over."""

from __future__ import annotations

import fcntl
import json
import threading
import time
from pathlib import Path

import pytest
import torch
from reference_models import build_target, prompts
from safetensors.torch import save_file

from engines.base import EngineFailed, EngineUsageError
from engines.capture.base import CaptureSpec, open_capturer
from engines.capture.plugin.hidden_state_files import VllmCapture, sglang_capture, write_rows
from engines.capture.served import read_chunks
from engines.capture.sglang import capture_arguments
from engines.capture.target import (
    capture_target,
    final_norm,
    inner_layers,
    side_by_side,
)
from engines.capture.vllm import gpu_arguments, read_handed_over

ROWS = prompts(1, 40, 7, 33, 64)


@pytest.fixture(scope="module", params=["llama", "deepseek"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    model = build_target(request.param, folder, tie_word_embeddings=request.param == "llama")
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.5, 2.0)
    model.save_pretrained(folder)
    return folder


def spec(target: Path, *layers: int, batch: int = 8, **more: object) -> CaptureSpec:
    fields: dict[str, object] = {"max_length": 64, "workdir": target, **more}
    return CaptureSpec(target=target, aux_layers=layers, batch=batch, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["reference", "transformers"])
def test_states_are_transformers_own(target: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    captured = open_capturer(name, spec(target, 2, 0, 3, 1)).capture(ROWS)
    for row, found in zip(ROWS, captured, strict=True):
        with torch.no_grad():
            wanted = model(torch.tensor([row]), output_hidden_states=True)
        states = wanted.hidden_states
        assert found.token_ids.tolist() == row
        aux = torch.cat([states[layer][0] for layer in (2, 0, 3, 1)], dim=-1)
        torch.testing.assert_close(found.aux, aux, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found.last_normed, states[-1][0], atol=1e-4, rtol=1e-4)
        head = capture_target(target).head()
        torch.testing.assert_close(
            found.last_normed @ head.T, wanted.logits[0], atol=1e-3, rtol=1e-3
        )


def test_a_small_mask_limit_changes_no_state(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = open_capturer("reference", spec(target, 1)).capture(ROWS)
    monkeypatch.setattr("engines.capture.reference.MASK_ELEMENTS", 5000)
    parts = open_capturer("reference", spec(target, 1)).capture(ROWS)
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a.aux, b.aux, atol=1e-5, rtol=1e-4)


def test_mistakes_are_said_in_one_line(target: Path) -> None:
    with pytest.raises(EngineUsageError, match=r"aux layer 4: .* has 3 layers"):
        open_capturer("reference", spec(target, 1, 4))
    with pytest.raises(EngineUsageError, match="256 positions"):
        open_capturer("reference", spec(target, 1, max_length=300))
    with pytest.raises(EngineUsageError, match="known are reference, vllm"):
        open_capturer("tensorrt", spec(target, 1))
    with pytest.raises(EngineUsageError, match="at least one layer"):
        open_capturer("reference", spec(target))


def test_layers_asked_of_an_engine_and_laid_out_again() -> None:
    assert inner_layers((5, 2, 0, 6, 2), 6) == (2, 5)
    assert inner_layers((0, 6), 6) == (5,)
    captured = {2: torch.full((1, 2), 2.0), 5: torch.full((1, 2), 5.0)}
    found = side_by_side(
        (5, 0, 6, 2),
        captured,
        embeddings=torch.zeros(1, 2),
        last_normed=torch.full((1, 2), 6.0),
    )
    assert found.tolist() == [[5, 5, 0, 0, 6, 6, 2, 2]]


def test_final_norm_is_transformers_own(target: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    seen: list[torch.Tensor] = []
    model.model.norm.register_forward_hook(lambda _, args, out: seen.extend((args[0], out)))
    with torch.no_grad():
        model(torch.tensor([ROWS[1]]))
    facts = capture_target(target)
    found = final_norm(seen[0], facts.norm(), facts.norm_eps)
    torch.testing.assert_close(found, seen[1], atol=1e-5, rtol=1e-5)


def test_chunks_of_a_prefill_are_put_together(tmp_path: Path) -> None:
    ids, states = torch.arange(10), torch.randn(10, 3, 4)
    name = "cmpl-capture-abc-0-1f"
    for begin, end in ((0, 4), (4, 9), (4, 9), (9, 10)):  # one chunk twice: a preemption
        write_rows(str(tmp_path), name, begin, ids[begin:end], states[begin:end])
    write_rows(str(tmp_path), "cmpl-capture-xyz-0-1f", 0, ids, states)
    found = read_chunks(tmp_path, "capture-abc", 10)
    assert found[0].tolist() == list(range(10))
    assert torch.equal(found[1], states)
    assert [path.name[:16] for path in tmp_path.iterdir()] == ["cmpl-capture-xyz"]
    with pytest.raises(EngineFailed, match="no hidden states of request capture-abc"):
        read_chunks(tmp_path, "capture-abc", 10)


def test_vllms_file_is_read_once_its_lock_is_free(tmp_path: Path) -> None:
    path = tmp_path / "r.safetensors"
    states = torch.randn(5, 2, 4, dtype=torch.bfloat16)
    lock = open(f"{path}.lock", "w")  # noqa: SIM115
    fcntl.flock(lock, fcntl.LOCK_EX)

    def write_late() -> None:
        time.sleep(0.1)
        save_file({"token_ids": torch.arange(5), "hidden_states": states}, path)
        lock.close()

    writer = threading.Thread(target=write_late)
    writer.start()
    ids, found = read_handed_over(path)
    writer.join()
    assert ids.tolist() == list(range(5)) and torch.equal(found, states)
    assert not list(tmp_path.iterdir())
    with pytest.raises(EngineFailed, match="cannot be read"):
        read_handed_over(path)


def test_what_served_engines_are_told(target: Path) -> None:
    facts = capture_target(target)
    told = gpu_arguments(spec(target, 2, 0, 1))
    speculative = json.loads(told[told.index("--speculative-config") + 1])
    ids = speculative["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
    assert ids == [1, 2, 3]  # ascending, the last one before the norm
    assert speculative["num_speculative_tokens"] == 1
    if "Llama" in facts.architecture:
        told = capture_arguments(spec(target, 2, 1))
        at = told.index("--return-aux-hidden-state-layer-ids")
        assert told[at + 1 : at + 3] == ("1", "0")  # SGLang adds one
        return
    told = capture_arguments(spec(target, 1, 2))
    at = told.index("--return-aux-hidden-state-layer-ids")
    assert told[at + 1 : at + 3] == ("2", "1")  # never 1 first: it would be read as 2
    with pytest.raises(EngineUsageError, match="begins with 1"):
        capture_arguments(spec(target, 1))


class _Batch:
    req_ids = ("a", "b", "c")
    num_computed_tokens_cpu = (0, 4, 9)
    num_prompt_tokens = (3, 6, 9)


class _Runner:
    """What the worker extension touches of vLLM's model runner."""

    input_batch = _Batch

    class query_start_loc:  # noqa: N801
        np = (0, 3, 5, 6, 6)

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model


class _Model(torch.nn.Module):
    layers: tuple[int, ...] = ()

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.layers = layers

    def forward(self, input_ids: torch.Tensor) -> object:
        last = torch.ones(8, 4) * 9  # padded to 8 rows
        return (last, [torch.ones(8, 4) * i for i in self.layers]) if self.layers else last


def test_the_worker_extension_writes_prefill_rows_alone(tmp_path: Path) -> None:
    worker = VllmCapture()
    worker.rank = 0  # type: ignore[attr-defined]
    worker.model_runner = _Runner(_Model())  # type: ignore[attr-defined]
    assert worker.begin_capture(str(tmp_path), "2,5") == {"rank": 0, "layers": [2, 5]}
    out = worker.model_runner.model(input_ids=torch.arange(8))  # type: ignore[attr-defined]
    assert torch.equal(out, torch.ones(8, 4) * 9)  # the engine sees what it always saw
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["a.00000000.safetensors", "b.00000004.safetensors"]  # c decodes
    ids, states = read_chunks(tmp_path, "a", 3)
    assert ids.tolist() == [0, 1, 2] and states[0, :, 0].tolist() == [2, 5, 9]


class _Forward:
    rids = ("capture-a", "HEALTH_CHECK", "capture-b")
    extend_seq_lens_cpu = (2, 1, 3)
    extend_prefix_lens_cpu = (0, 0, 5)

    class forward_mode:  # noqa: N801
        @staticmethod
        def is_extend() -> bool:
            return True


def test_the_forward_hook_writes_its_own_requests_alone(tmp_path: Path) -> None:
    hook = sglang_capture({"folder": str(tmp_path), "prefix": "capture-"})
    last = torch.arange(6.0)[:, None].expand(6, 4)
    for aux in (torch.cat((last + 10, last + 20), dim=-1), [last + 10, last + 20]):
        hook(None, (torch.arange(6), last, None, _Forward, aux), None)
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == ["capture-a.00000000.safetensors", "capture-b.00000005.safetensors"]
        ids, states = read_chunks(tmp_path, "capture-a", 2)
        assert ids.tolist() == [0, 1] and states[1, :, 0].tolist() == [11, 21, 1]
