"""A pure-torch stand-in for SGLang's native kernel package, for CPUs without AMX.

SGLang (read: 0.5.23) imports `sgl_kernel` unconditionally, and the package of that name on PyPI
holds CUDA code only. On a CPU without AMX SGLang itself falls back to torch for everything but
the functions below, so this module, put on `PYTHONPATH`, is enough to serve there, with and
without speculative decoding. Correctness comes first; what is easy to vectorise is vectorised.

The arguments follow SGLang's call sites:

- `sglang/srt/mem_cache/allocation.py`, `sglang/kernels/ops/speculative/cache_locs.py`,
  `sglang/kernels/ops/kvcache/cache_move.py` -> `slots`
- `sglang/kernels/ops/speculative/spec_tree.py` -> `tree`
- `sglang/kernels/ops/speculative/{eagle,multi_layer_eagle}.py` -> `draft`
- `sglang/srt/layers/attention/intel_amx_backend.py` -> `attention` (as torch operators)

The operator `convert_weight_packed` is left out on purpose: its presence is how SGLang decides
that a native AMX build is installed.
"""

from __future__ import annotations

from . import attention, no_cuda
from .draft import (
    build_draft_decode_metadata_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
)
from .slots import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    copy_all_layer_kv_cache_cpu,
)
from .tree import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]

attention.register()
no_cuda.silence()
