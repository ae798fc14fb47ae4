"""The catalogue of engines: lazy, and helpful about a wrong name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engines import catalog
from engines.base import EngineUsageError


def test_names() -> None:
    assert catalog.names() == ["reference", "vllm", "sglang", "openai"]


@pytest.mark.parametrize("name", ["vllm", "openai"])
def test_adapter_by_name(name: str) -> None:
    adapter = catalog.adapter(name)
    assert adapter.name == name
    assert adapter.ready_path.startswith("/")


@pytest.mark.parametrize(("wrong", "near"), [("vlm", "vllm"), ("SGLang", "sglang")])
def test_unknown_name_suggests_the_nearest(wrong: str, near: str) -> None:
    with pytest.raises(EngineUsageError, match=f"did you mean '{near}'") as caught:
        catalog.adapter(wrong)
    assert "\n" not in str(caught.value)


def test_hopeless_name_lists_the_known() -> None:
    with pytest.raises(EngineUsageError, match="known are reference, vllm, sglang, openai"):
        catalog.adapter("zzz")


def test_light_import() -> None:
    """Neither the catalogue nor an adapter brings torch, or an HTTP client, into the process."""
    code = (
        "import sys; from engines import catalog; "
        "[catalog.adapter(n) for n in ('vllm', 'openai')]; "
        "print([m for m in ('torch', 'transformers', 'httpx', 'pandas') if m in sys.modules])"
    )
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert run.stdout.strip() == "[]", run.stderr
