"""The engines by name. A name's module is imported only when the engine is asked for."""

from __future__ import annotations

import difflib
import importlib
from typing import cast

from engines.base import Adapter, EngineUsageError

_CLASSES = {
    "reference": "engines.reference.adapter:ReferenceAdapter",
    "vllm": "engines.vllm:VllmAdapter",
    "sglang": "engines.sglang:SglangAdapter",
    "openai": "engines.openai:OpenAIAdapter",
}


def names() -> list[str]:
    """The engines' names, the embedded one first."""
    return list(_CLASSES)


def adapter(name: str) -> Adapter:
    """The adapter of the engine `name`. Raises `EngineUsageError` for an unknown one."""
    path = _CLASSES.get(name)
    if path is None:
        near = difflib.get_close_matches(name.lower(), _CLASSES, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise EngineUsageError(f"unknown engine {name!r}: {hint}known are {', '.join(_CLASSES)}")
    module, _, attribute = path.partition(":")
    return cast(Adapter, getattr(importlib.import_module(module), attribute)())
