"""Calls into CUDA that SGLang's models make on every device."""

from __future__ import annotations

import torch


def silence() -> None:
    """Make `torch.cuda.synchronize` and `empty_cache` do nothing where there is no GPU.

    SGLang's MLA draft head calls both after it has taken over the target's embedding
    (`models/kimi_k25_eagle3.py`, `set_embed`). A torch built without CUDA raises there, and so
    does one built for it on a machine without NVIDIA's driver.
    """
    if not torch.cuda.is_available():
        torch.cuda.synchronize = _nothing
        torch.cuda.empty_cache = _nothing


def _nothing(*_args: object, **_kwargs: object) -> None:
    return None
