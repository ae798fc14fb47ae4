"""Small tokenizers of the kinds that models use, made on the spot."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from harness.load.prompts.synthetic import WORDS

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if thinking %}<think>{% endif %}{% endif %}"
)
SPECIAL = ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<s>"]
TEXT = [" ".join(WORDS), "The answer is 42, isn't it? a b c 1 2 3 x - ! ."] * 3


def byte_level() -> Tokenizer:
    """As of Llama 3, Qwen and Kimi: bytes, words never joined."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def sentence_pieces() -> Tokenizer:
    """As of Llama 2 and Mistral: a mark for the space, one before the text too, no pre-tokens."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    # No pre-tokens, so that words may be joined: the hard case for an exact length.
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", *SPECIAL], show_progress=False
    )
    tokenizer.train_from_iterator([text[i : i + 40] for text in TEXT for i in range(0, 3000, 40)],
                                  trainer)  # fmt: skip
    return tokenizer


KINDS = {"byte_level": byte_level, "sentence_pieces": sentence_pieces}


def save(folder: Path, kind: str = "byte_level", *, template: str | None = TEMPLATE) -> Path:
    """A target's folder that holds a tokenizer and no model."""
    folder.mkdir(parents=True, exist_ok=True)
    KINDS[kind]().save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
