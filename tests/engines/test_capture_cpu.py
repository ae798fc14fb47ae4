"""Hidden states from vLLM and SGLang themselves on the CPU, held against the reference engine.

The demo target in float32; prompts of several lengths at once, long ones prefilled in chunks.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from capture_samples import demo_samples, plan_for, write_samples
from reference_models import build_target

from engines.base import EngineUsageError
from engines.capture.base import Capturer, CaptureSpec, RowStates, open_capturer
from engines.capture.vllm import gpu_arguments
from engines.install import engine_python
from training.capture import stage
from training.plan import EngineSection

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

LAYERS = (4, 1, 0, 5)
LENGTHS = (5, 300, 33, 128, 64, 200, 17, 1)
HIDDEN = 192
CHUNK = 96
ENVIRONMENTS = {"vllm": "vllm-cpu", "sglang": "sglang-cpu"}
CHUNKED = {
    "vllm": ("--max-num-batched-tokens", str(CHUNK), "--enable-chunked-prefill"),
    "sglang": ("--chunked-prefill-size", str(CHUNK)),
}


def installed(engine: str) -> Path:
    try:
        return engine_python(ENVIRONMENTS[engine])
    except EngineUsageError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def rows() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 700, (n,), generator=generator).tolist() for n in LENGTHS]


def spec(target: Path, workdir: Path, **more: Any) -> CaptureSpec:
    fields: dict[str, Any] = {"dtype": "float32", "kv_cache_gib": 0.5, **more}
    return CaptureSpec(
        target=target,
        aux_layers=LAYERS,
        max_length=max(LENGTHS),
        batch=len(LENGTHS),
        workdir=workdir,
        startup_deadline_s=900.0,
        **fields,
    )


def parts(states: RowStates, width: int = HIDDEN) -> torch.Tensor:
    """[T, n + 1, H] in float32."""
    joined = torch.cat((states.aux.float(), states.last_normed.float()), dim=-1)
    return joined.unflatten(-1, (-1, width))


def worst(found: list[RowStates], wanted: list[RowStates], width: int = HIDDEN) -> torch.Tensor:
    """The lowest cosine of any row, per layer."""
    pairs = zip(found, wanted, strict=True)
    each = [torch.cosine_similarity(parts(a, width), parts(b, width), dim=-1) for a, b in pairs]
    return torch.cat(each).min(0).values


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_every_row_is_the_reference_engines(
    engine: str, demo_pair: Path, rows: list[list[int]], tmp_path: Path
) -> None:
    installed(engine)
    target = demo_pair / "target"
    wanted = open_capturer("reference", spec(target, tmp_path)).capture(rows)
    capturer: Capturer = open_capturer(engine, spec(target, tmp_path, extra_args=CHUNKED[engine]))
    try:
        together = capturer.capture(rows)
        alone = [capturer.capture([row])[0] for row in rows[:3]]
    finally:
        capturer.close()
    assert [states.token_ids.tolist() for states in together] == rows
    assert (worst(together, wanted) >= 0.999).all()
    assert (worst(alone, wanted[:3]) >= 0.999).all()
    for a, b in zip(together, wanted, strict=True):  # the same scale, not the direction alone
        torch.testing.assert_close(a.last_normed, b.last_normed, atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(a.aux, b.aux, atol=1e-2, rtol=1e-2)
    assert not (tmp_path / "handed-over").exists()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_stage_proves_the_engines_states(engine: str, demo_pair: Path, tmp_path: Path) -> None:
    installed(engine)
    write_samples(tmp_path, demo_samples(demo_pair, 12))
    plan = plan_for(
        demo_pair / "target", engine=engine, aux_layers=(2, 4, 5), dtype="float32", batch=4
    )
    section = EngineSection(dtype="float32", kv_cache_gib=0.5, startup_deadline_s=900.0)
    gate = stage.run(msgspec.structs.replace(plan, engine=section), tmp_path)
    by_name = {check.name: check for check in gate.checks}
    assert by_name["layers"].value == "[2, 4, 5, 6]"
    assert by_name["reference_parity"].value >= 0.999  # type: ignore[operator]
    assert by_name["proof"].value >= 0.99  # type: ignore[operator]


def test_sglang_returns_no_last_state_beside_the_aux_states(
    demo_pair: Path, rows: list[list[int]], tmp_path: Path
) -> None:
    """What its own answer holds: the aux states that the hook writes, and nothing more."""
    installed("sglang")
    capturer: Any = open_capturer("sglang", spec(demo_pair / "target", tmp_path))
    try:
        written = capturer.capture([rows[2]])[0]
        told = capturer._post(
            "/generate",
            {
                "input_ids": rows[2],
                "sampling_params": {"max_new_tokens": 1, "temperature": 0},
                "return_hidden_states": True,
            },
        )
    finally:
        capturer.close()
    found = torch.tensor(told["meta_info"]["hidden_states"][0])
    assert found.shape == (len(rows[2]), 3 * HIDDEN)  # layers 1, 4, 5
    ascending = torch.cat(
        [written.aux[:, HIDDEN : 2 * HIDDEN], written.aux[:, :HIDDEN], written.aux[:, -HIDDEN:]],
        dim=-1,
    )
    torch.testing.assert_close(found, ascending, atol=1e-4, rtol=1e-4)


GPU_CONFIG = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
args = make_arg_parser(FlexibleArgumentParser()).parse_args(json.load(sys.stdin))
validate_parsed_serve_args(args)
config = EngineArgs.from_cli_args(args).create_engine_config()
speculative, transfer = config.speculative_config, config.kv_transfer_config
print("READ " + json.dumps({
    "method": speculative.method,
    "tokens": speculative.num_speculative_tokens,
    "ids": speculative.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids,
    "connector": KVConnectorFactory.get_connector_class(transfer).__name__,
    "producer": transfer.is_kv_producer,
    "folder": transfer.get_from_extra_config("shared_storage_path", None),
}))
"""


def test_vllms_own_classes_take_what_it_is_told_on_gpus(
    demo_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configuration alone: no GPU is here to run it."""
    python = installed("vllm")
    told = gpu_arguments(spec(demo_pair / "target", tmp_path, device="cuda"))
    argv = ["--model", str(demo_pair / "target"), "--max-model-len", "512", *told]
    run = subprocess.run(
        [python, "-c", GPU_CONFIG],
        input=json.dumps(argv),
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    read = json.loads(run.stdout.partition("READ ")[2].splitlines()[0])
    assert read == {
        "method": "extract_hidden_states",
        "tokens": 1,
        "ids": [1, 4, 5, 6],  # ascending; 0 is looked up, 6 is the last state
        "connector": "ExampleHiddenStatesConnector",
        "producer": True,
        "folder": str(tmp_path / "handed-over"),
    }


@pytest.mark.full
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_llama_target_has_the_same_layers(
    engine: str, demo_pair: Path, rows: list[list[int]], tmp_path: Path
) -> None:
    """SGLang reads given ids one layer later there; the states come out the same."""
    installed(engine)
    target = tmp_path / "target"
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 6}
    build_target(
        "llama", target, vocab_size=768, hidden_size=256, max_position_embeddings=512, **sizes
    )
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo_pair / "target" / file, target)
    wanted = open_capturer("reference", spec(target, tmp_path)).capture(rows)
    capturer = open_capturer(engine, spec(target, tmp_path))
    try:
        found = capturer.capture(rows)
    finally:
        capturer.close()
    assert (worst(found, wanted, 256) >= 0.999).all()
