"""How each engine is started so that it writes a trace.

The reference engine has an option for it. vLLM's worker takes an extension class by name, which is
told to begin once the server is ready. SGLang builds forward hooks by name while it loads a model;
the one that is named here wraps its drafting.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

from engines.base import EngineFailed, EngineUsageError, ServeSpec
from engines.sglang import KERNEL_PATH

PLUGIN = Path(__file__).with_name("plugin")
VLLM_EXTENSION = "trace_vllm.VllmTrace"
SGLANG_HOOK = "trace_sglang:sglang_trace"
ANSWER_S = 120.0


def traced(engine: str, spec: ServeSpec, folder: Path) -> ServeSpec:
    """`spec`, served so that the engine writes its trace into `folder` (`read.read_trace`).

    Raises `EngineUsageError` for a `spec` without a drafter and an engine that has no trace.
    """
    if spec.drafter is None:
        raise EngineUsageError("a trace is of a drafter's work: name the drafter")
    told = str(folder.absolute())
    if engine == "reference":
        return replace(spec, extra_args=(*spec.extra_args, "--trace", told))
    if engine == "vllm":
        args = (*spec.extra_args, "--worker-extension-cls", VLLM_EXTENSION)
        # The extension is called through the development routes, and knows this model runner.
        env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}
        return replace(spec, extra_args=args, extra_env=_environment(spec, env, ()))
    if engine == "sglang":
        hook = {
            "name": "trace",
            "target_modules": ["logits_processor", "*.logits_processor"],
            "hook_factory": SGLANG_HOOK,
            "config": {"folder": told},
        }
        args = (*spec.extra_args, "--forward-hooks", json.dumps([hook]))
        kernels = (str(KERNEL_PATH),) if spec.device == "cpu" else ()
        return replace(spec, extra_args=args, extra_env=_environment(spec, {}, kernels))
    raise EngineUsageError(
        f"the engine {engine} writes no trace: known are reference, vllm, sglang"
    )


def begin(engine: str, base_url: str, folder: Path) -> None:
    """Tell a ready engine to begin its trace, where it must be told.

    Raises `EngineFailed` where it does not, with its own words.
    """
    if engine != "vllm":
        return
    body = {"method": "begin_trace", "args": [str(folder.absolute())]}
    request = urllib.request.Request(
        f"{base_url}/collective_rpc",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            told: Any = json.load(answer)
    except urllib.error.HTTPError as error:
        said = " ".join(error.read(2000).decode("utf-8", "replace").split())[:300]
        raise EngineFailed(f"vllm did not begin its trace ({error.code}): {said}") from None
    except (OSError, ValueError) as error:
        raise EngineFailed(f"vllm did not begin its trace: {error}") from None
    results = told.get("results") if isinstance(told, dict) else None
    if not results or not all(isinstance(each, dict) and each.get("traced") for each in results):
        raise EngineFailed(f"vllm did not begin its trace: {str(told)[:300]}")


def _environment(spec: ServeSpec, env: dict[str, str], modules: tuple[str, ...]) -> dict[str, str]:
    """The specification's environment, with the folders of modules before its own."""
    own = spec.extra_env.get("PYTHONPATH", "")
    paths = [*modules, str(PLUGIN), *(own.split(os.pathsep) if own else [])]
    return {**env, **spec.extra_env, "PYTHONPATH": os.pathsep.join(paths)}
