"""The demo's tokenizer: byte-level BPE with single-digit tokens and Kimi's chat tokens."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.demo import corpus

# Control tokens, left out when text is decoded without special tokens; and the two think
# tokens, which stay in the text.
CONTROL = (
    corpus.BOS,
    corpus.EOS,
    corpus.IM_END,
    corpus.IM_USER,
    corpus.IM_ASSISTANT,
    corpus.IM_SYSTEM,
    corpus.IM_MIDDLE,
)
THINKING = (corpus.THINK, corpus.END_THINK)

CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}{%- for part in content -%}{{ part.text or '' }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
<|im_assistant|>assistant<|im_middle|><think></think>
{{- text(message.content or '').split('</think>') | last }}
{%- elif message.role == 'system' -%}
<|im_system|>system<|im_middle|>{{ text(message.content) }}
{%- else -%}
<|im_user|>{{ message.role }}<|im_middle|>{{ text(message.content) }}
{%- endif -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_assistant|>assistant<|im_middle|><think>
{%- endif -%}
"""


def train_tokenizer(vocab_size: int, seed: int, documents: int = 3000) -> Tokenizer:
    """A tokenizer of `vocab_size` ids in all, learnt from the corpus of `seed`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = len(CONTROL) + len(THINKING)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - added,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_plain_texts(seed, documents), trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in THINKING])
    return tokenizer


def _plain_texts(seed: int, documents: int) -> list[str]:
    """The corpus's text with its control tokens taken out."""
    texts = []
    for context, continuation in islice(corpus.training_documents(seed), documents):
        text = context + continuation
        for token in (*CONTROL, *THINKING):
            text = text.replace(token, "\n")
        texts.extend(text.split("\n"))
    return texts


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template, as transformers reads."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": corpus.BOS,
        "eos_token": corpus.EOS,
        "pad_token": corpus.EOS,
        "additional_special_tokens": [t for t in CONTROL if t not in (corpus.BOS, corpus.EOS)],
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
