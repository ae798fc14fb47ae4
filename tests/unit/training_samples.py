"""Samples and a target's folder of text alone, for the tests of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_tokenizers import byte_level

from training.samples import Sample

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content is defined and m.reasoning_content is not none %}"
    "<think>\n{{ m.reasoning_content.strip() }}\n</think>\n\n{% endif %}"
    "{{ m.content.strip() }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if thinking %}<think>\n{% endif %}{% endif %}"
)
"""As of Qwen: a history keeps its thinking, and white space around it is the template's own."""
FORGETFUL = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)
"""As of Kimi: a history has lost its thinking, and the prompt opens the answer's."""


def target(folder: Path, template: str = TEMPLATE) -> Path:
    """A target's folder without weights: `<|end|>` ends an answer, think tokens are tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level()
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<|end|>")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": end}
    config |= {"max_position_embeddings": 512, "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def sample(name: str, index: int = 0, **more: Any) -> Sample:
    """A sample of five tokens, two of them the answer's."""
    fields: dict[str, Any] = {
        "id": f"{name}#0",
        "prompt_id": name,
        "token_ids": (1, 2, 3, 4, 5),
        "loss_from": 3,
        "text": f"text of {name}\n\u2028",
        "index": index,
    }
    return Sample(**{**fields, **more})
