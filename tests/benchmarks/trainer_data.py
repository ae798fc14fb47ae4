"""What both trainers are given: batches of states, a target's head, and first weights, as files.

`demo`: dialogues of the demo's corpus, their states captured by the reference engine from the demo
target. The other shapes: a made-up language in which most tokens follow from the one before, with
states from which a head of the right size reads the next token, as it does from a real target's.
Every document is told as its slots: what a trainer's own collation would make of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from drafters.eagle3 import Eagle3Drafter
from drafters.spec import DrafterSpec
from training.data import Document

AUX = 3


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of one comparison; `tokens` of a batch, one packed row."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft_vocab: int
    tokens: int
    aux_layers: tuple[int, ...] = (2, 4, 5)
    prompt_share: float = 0.25
    lengths: tuple[int, int] = (64, 512)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(name="demo", hidden=192, intermediate=384, heads=4, kv_heads=2, head_dim=64,
              vocab=768, draft_vocab=768, tokens=2048),
        Shape(name="medium", hidden=512, intermediate=1536, heads=8, kv_heads=2, head_dim=64,
              vocab=8192, draft_vocab=8192, tokens=2048),
        Shape(name="large", hidden=1024, intermediate=2816, heads=16, kv_heads=4, head_dim=64,
              vocab=32000, draft_vocab=8192, tokens=2048),
    )
}  # fmt: skip


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """One document with its states: aux [T, 3 * H], last_normed [T, H]."""

    document: Document
    aux: Tensor
    last_normed: Tensor


def drafter_spec(shape: Shape) -> DrafterSpec:
    """The Llama head that both train (speculators has no MLA head)."""
    return DrafterSpec(
        kind="llama",
        hidden_size=shape.hidden,
        target_hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        draft_vocab_size=shape.draft_vocab,
        aux_layers=shape.aux_layers,
        max_position_embeddings=4096,
    )


def write_data(shape: Shape, folder: Path, *, batches: int, held_out: int) -> None:
    """`batches` to train on and `held_out` to judge by, the target's parts and first weights."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    if shape.name == "demo":
        source, target = _demo(shape)
    else:
        source, target = _made_up(shape)
    rows = _rows(source, shape.tokens, batches + held_out)
    lm_head = target["lm_head"]
    tensors: dict[str, Tensor] = {}
    for number, row in enumerate(rows):
        name = f"train.{number}" if number < batches else f"held_out.{number - batches}"
        tensors |= {
            f"{name}.{key}": value for key, value in _packed(row, shape.tokens, lm_head).items()
        }
    save_file(tensors, folder / "batches.safetensors")
    kept = _draft_vocabulary(shape, rows[:batches])
    save_file(_first_weights(shape, target, kept), folder / "drafter.safetensors")
    save_file({**target, "kept": kept}, folder / "target.safetensors")
    (folder / "shape.json").write_bytes(msgspec.json.encode(shape))


def _rows(source: Any, tokens: int, count: int) -> list[list[Example]]:
    """Documents as they come, each row filled until one does not fit; none is cut."""
    rows: list[list[Example]] = [[]]
    space = tokens
    for example in source:
        length = len(example.document.ids)
        if length > space:
            if len(rows) == count:
                return rows
            rows.append([])
            space = tokens
        rows[-1].append(example)
        space -= length
    raise RuntimeError("the source of documents ended")


def _packed(row: list[Example], tokens: int, lm_head: Tensor) -> dict[str, Tensor]:
    """One row [1, tokens], padded at its end; choices as the capture stage stores them."""
    from training.data import collate
    from training.loss import target_choice

    batch = collate([[example.document for example in row]], tokens)
    aux = torch.zeros(1, tokens, row[0].aux.shape[-1])
    last = torch.zeros(1, tokens, row[0].last_normed.shape[-1])
    filled = sum(len(example.document.ids) for example in row)
    aux[0, :filled] = torch.cat([example.aux for example in row])
    last[0, :filled] = torch.cat([example.last_normed for example in row])
    return {
        "ids": batch.ids,
        "positions": batch.positions,
        "documents": batch.documents,
        "loss_mask": batch.loss_mask,
        "aux": aux,
        "last_normed": last,
        "choice": target_choice(last[0], lm_head)[None],
    }


def _draft_vocabulary(shape: Shape, rows: list[list[Example]]) -> Tensor:
    """The most frequent tokens of the answers, ascending."""
    counts = torch.zeros(shape.vocab)
    for row in rows:
        for example in row:
            document = example.document
            counts += torch.bincount(
                torch.tensor(document.ids[document.loss_from :]), minlength=shape.vocab
            )
    return counts.topk(shape.draft_vocab).indices.sort().values


def _first_weights(shape: Shape, target: dict[str, Tensor], kept: Tensor) -> dict[str, Tensor]:
    """An untrained drafter with the target's embedding and its head's rows."""
    torch.manual_seed(1)
    drafter = Eagle3Drafter(drafter_spec(shape))
    for parameter in drafter.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    drafter.embed_tokens.weight.data.copy_(target["embedding"])
    drafter.lm_head.weight.data.copy_(target["lm_head"][kept])
    if shape.draft_vocab < shape.vocab:
        drafter.set_vocabulary(kept)
    return {name: tensor.clone() for name, tensor in drafter.state_dict().items()}


def _demo(shape: Shape) -> tuple[Any, dict[str, Tensor]]:
    """The corpus under the demo target, as the reference engine computes it."""
    from tokenizers import Tokenizer

    from engines.reference.cache import Batch
    from engines.reference.config import read_config
    from engines.reference.loading import load_model
    from training.data import token_documents
    from training.demo import corpus, pair
    from training.demo.config import DrafterConfig, TargetConfig

    folder = pair.pair_folder(TargetConfig())
    if not pair.target_ready(folder):
        pair.make(TargetConfig(), DrafterConfig())
    folder = folder / "target"
    model = load_model(folder, read_config(folder), torch.float32, "cpu")
    model.prepare_rope(512)
    cache = model.new_cache(slots=1, length=512)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def examples() -> Any:
        for document in token_documents(corpus.training_documents(77), tokenizer):
            length = len(document.ids)
            # Of prompts shorter than the TTT steps the two trainers count other slots.
            if document.loss_from < 8 or length > 512:
                continue
            batch = Batch(cache, first_slot=0, starts=[0], tokens=length, device="cpu")
            with torch.no_grad():
                last, aux = model.forward(
                    torch.tensor([document.ids]), batch, cache, shape.aux_layers
                )
            assert aux is not None
            yield Example(document=document, aux=aux[0], last_normed=last[0])

    head = model.head.weight.t().contiguous()
    return examples(), {"embedding": model.embedding.clone(), "lm_head": head}


def _made_up(shape: Shape) -> tuple[Any, dict[str, Tensor]]:
    """A language whose next token follows from the last one seven times in ten."""
    generator = torch.Generator().manual_seed(3)
    vocab, hidden = shape.vocab, shape.hidden
    often = 1.0 / torch.arange(1, vocab + 1)  # Zipf
    follower = torch.multinomial(often, vocab, replacement=True, generator=generator)
    embedding = torch.randn(vocab, hidden, generator=generator)
    lm_head = torch.randn(vocab, hidden, generator=generator) * hidden**-0.5
    mixers = torch.randn(AUX, hidden, hidden, generator=generator) * hidden**-0.5

    def text(length: int) -> Tensor:
        free = torch.multinomial(often, length + 1, replacement=True, generator=generator)
        chained = torch.rand(length + 1, generator=generator) < 0.7
        ids = free.clone()
        for i in range(1, length + 1):
            if chained[i]:
                ids[i] = follower[ids[i - 1]]
        return ids

    def examples() -> Any:
        shortest, longest = shape.lengths
        while True:
            length = int(torch.randint(shortest, longest, (1,), generator=generator))
            ids = text(length)
            ids, following = ids[:-1], ids[1:]
            other = torch.multinomial(often, length, replacement=True, generator=generator)
            last = lm_head[following] + 0.6 * lm_head[other]
            last = last + 0.3 * torch.randn(length, hidden, generator=generator) * hidden**-0.5
            last = torch.nn.functional.rms_norm(last, (hidden,)) * 0.5
            states = (embedding[ids], embedding[ids].roll(1, 0), last * 2)
            aux = torch.cat([s @ m for s, m in zip(states, mixers, strict=True)], dim=-1)
            document = Document(ids=ids.tolist(), loss_from=int(length * shape.prompt_share))
            yield Example(document=document, aux=aux, last_normed=last)

    return examples(), {"embedding": embedding, "lm_head": lm_head}
