"""Calls into CUDA that SGLang's models make on every device."""

from __future__ import annotations

import torch


def silence() -> None:
    """Make `torch.cuda.synchronize` and `empty_cache` do nothing where torch has no CUDA.

    SGLang's MLA draft head calls both after it has taken over the target's embedding
    (`models/kimi_k25_eagle3.py`, `set_embed`); a torch built without CUDA raises there.
    """
    if torch.version.cuda is None and torch.version.hip is None:
        torch.cuda.synchronize = _nothing
        torch.cuda.empty_cache = _nothing


def _nothing(*_args: object, **_kwargs: object) -> None:
    return None
