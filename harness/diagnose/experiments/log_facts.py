"""What an engine's log says of its drafter: layers, what is shared, the method, the runner."""

from __future__ import annotations

import re

from harness.errors import one_line

_MOST = 4_000_000
"""Characters of a log that are looked at; start-up is at its beginning."""
_FACTS: dict[str, tuple[tuple[str, str | None], ...]] = {
    # fact -> (pattern, what it means; None: the pattern's group)
    "layers": (
        (r"Using auxiliary layers from speculative config: (.+)", None),
        (r"Using Eagle3 auxiliary layers from (?:config|model): (.+)", None),
    ),
    "embeddings": (
        (r"Detected EAGLE model without its own embed_tokens", "shared: the drafter has none"),
        (r"Detected EAGLE model with embed_tokens identical", "shared: equal to the target's"),
        (r"Detected EAGLE model with distinct embed_tokens", "the drafter's own"),
    ),
    "lm_head": (
        (r"Detected EAGLE model without its own lm_head", "shared: the drafter has none"),
        (r"Detected EAGLE model with lm_head identical", "shared: equal to the target's"),
        (r"Detected EAGLE model with distinct lm_head", "the drafter's own"),
    ),
    "method": (
        (r"SpeculativeConfig\(method='(\w+)'", None),
        (r"'speculative_algorithm': '?(\w+)'?", None),
    ),
    "k": (
        (r"SpeculativeConfig\(.*?num_spec_tokens=(\d+)", None),
        (r"'speculative_num_steps': (\d+)", None),
    ),
    "runner": (
        (r"using the V1 model runner instead", "V1"),
        (r"Using V2 [Mm]odel [Rr]unner", "V2"),
    ),
    "attention": (
        (r"Using (?:AttentionBackendEnum\.)?([A-Z][A-Z0-9_]+) (?:attention )?backend\b", None),
        (r"'attention_backend': '(\w+)'", None),
    ),
    "prefix_cache": (
        (r"forcing chunked prefill and prefix caching to be disabled", "off"),
        (r"'enable_prefix_caching': (\w+)", None),
        (r"'disable_radix_cache': (\w+)", "off: radix cache disabled is \\1"),
    ),
    "eager": (
        (r"'enforce_eager': (\w+)", None),
        (r"'disable_cuda_graph': (\w+)", "cuda graphs disabled is \\1"),
    ),
    "draft_sampling": ((r"[\"']draft_sample_method[\"']: [\"'](\w+)[\"']", None),),
    "overlap": ((r"'enable_two_batch_overlap': (\w+)", None),),
    "kv_cache_dtype": ((r"'kv_cache_dtype': '(\w+)'", None),),
    "unknown_weights": (
        (r"Parameter (\S+ not found in params_dict)", None),
        # t2d is for training alone: no engine has a place for it
        (r"Eagle3 MLA: skipping unexpected weight (?!t2d\b)(\S+)", None),
    ),
}


def log_facts(text: str) -> dict[str, str]:
    """The facts that an engine's log states; one that it does not state is not there.

    The first pattern of a fact that is found decides. Several ranks that say otherwise of what is
    shared are told with a `|` between them.
    """
    text = text[:_MOST]
    found: dict[str, str] = {}
    for name, patterns in _FACTS.items():
        told = _told(text, patterns)
        if told:
            found[name] = " | ".join(told)
    return found


def _told(text: str, patterns: tuple[tuple[str, str | None], ...]) -> list[str]:
    """Every different statement of the patterns; of those that carry no value the first is enough.

    Ranks that disagree on sharing (vLLM #50158) match different patterns of one fact.
    """
    said: dict[str, None] = {}
    for pattern, meaning in patterns:
        for match in re.finditer(pattern, text):
            said[one_line(match.expand(meaning or r"\1"), 120)] = None
        if said and any(m is None for _, m in patterns):
            break
    return list(said)
