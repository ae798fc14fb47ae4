"""Tiny random models for the tests of the reference engine, built through transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafters.eagle3 import Eagle3Drafter
from drafters.spec import DrafterSpec, MlaDims
from engines.reference.config import read_config
from engines.reference.loading import load_model
from engines.reference.model import Model

VOCAB = 97
END = 1
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": END,
}
_DEEPSEEK = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 20,
    "v_head_dim": 24,
    "rope_parameters": YARN,
}


def build_target(family: str, folder: Path, **changes: Any) -> Any:
    """A random float32 `llama` or `deepseek` model saved to `folder`; transformers' own model."""
    torch.manual_seed(0)
    if family == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        config: Any = LlamaConfig(**{**_SHARED, "num_key_value_heads": 2, **changes})
        model: Any = LlamaForCausalLM(config)
    else:
        from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

        config = DeepseekV3Config(**{**_SHARED, **_DEEPSEEK, **changes})
        model = DeepseekV3ForCausalLM(config)
        for layer in model.model.layers:
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.e_score_correction_bias.normal_(0, 0.2)
    model.eval().float().save_pretrained(folder)
    return model


def load_target(folder: Path) -> Model:
    """The engine's own reading of a checkpoint."""
    return load_model(folder, read_config(folder), torch.float32, "cpu")


def build_drafter(kind: str, **changes: Any) -> Eagle3Drafter:
    """A random drafter for the tiny targets, with a draft vocabulary of 60."""
    fields: dict[str, Any] = {
        "kind": kind,
        "hidden_size": 64,
        "target_hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2 if kind == "llama" else 4,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "draft_vocab_size": 60,
        "aux_layers": (0, 1, 3),
        "max_position_embeddings": 256,
    }
    if kind == "mla":
        fields["mla"] = MlaDims(
            q_lora_rank=24,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=16,
            v_head_dim=20,
        )
    torch.manual_seed(3)
    drafter = Eagle3Drafter(DrafterSpec(**{**fields, **changes}))
    for parameter in drafter.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    if drafter.d2t is not None:
        size = drafter.spec.draft_vocab_size
        drafter.set_vocabulary(torch.arange(size) + drafter.spec.vocab_size - size)
    return drafter.eval().requires_grad_(False)


def prompts(*lengths: int) -> list[list[int]]:
    """Random prompts of these lengths, the same at every call."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def greedy(model: Any, prompt: list[int], tokens: int, **more: Any) -> list[int]:
    """What transformers' own generate answers."""
    with torch.no_grad():
        out = model.generate(torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, **more)
    return out[0, len(prompt) :].tolist()


class ScriptedProposer:
    """Proposes the target's own greedy continuation, wrong from a chosen draft position on.

    `answers` maps prompts to greedy outputs; `right(step)` is how many drafts of a request's
    verify step number `step` are to be right. Drafts are made wrong by adding one.
    """

    aux_layers = (0,)

    def __init__(
        self, k: int, answers: dict[tuple[int, ...], list[int]], right: Callable[[int], int]
    ) -> None:
        self.k, self.answers, self.right = k, answers, right
        self.rows: list[list[Any]] = [[] for _ in range(64)]  # [answer, tokens known, steps]

    def begin(self, slot: int, tokens: list[int], aux: Tensor) -> None:
        self.rows[slot] = [self.answers[tuple(tokens[:-1])], 1, 0]

    def record(self, starts: list[int], accepted: list[int], tokens: Tensor, aux: Tensor) -> None:
        for slot, count in enumerate(accepted):
            self.rows[slot][1] += count + 1
            self.rows[slot][2] += 1

    def move(self, source: int, target: int) -> None:
        self.rows[target] = self.rows[source]

    def propose(self, rows: int, params: Any, uniform: Any) -> tuple[Tensor, None]:
        drafts = []
        for answer, known, step in self.rows[:rows]:
            ahead = (answer[known : known + self.k] + [0] * self.k)[: self.k]
            right = self.right(step)
            drafts.append([t if i < right else (t + 1) % VOCAB for i, t in enumerate(ahead)])
        return torch.tensor(drafts), None


def byte_tokenizer(folder: Path, *, first: int = 2) -> None:
    """A tokenizer of bytes (256 tokens from id `first`) with `<end>` as END and a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<end>": END}
    vocabulary.update({letter: index + first for index, letter in enumerate(alphabet)})
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
        "{% endif %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    (folder / "chat_template.jinja").write_text(template)
