"""Train the demo's target on the corpus, and let it write."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from training.data import Batch, pack, token_documents
from training.demo import corpus
from training.demo.config import TargetConfig
from training.demo.model import DemoTarget, document_mask
from training.optim import Optimizers
from training.precision import training_precision
from training.progress import Progress, Smoothed

BALANCE_RATE = 0.001
PROMPT_WEIGHT = 0.3  # of a question's tokens in the loss, against 1 for a reply's
_BATCH = 40


def batches(config: TargetConfig, tokenizer: Tokenizer, seed: int) -> Iterator[Batch]:
    """Endless packed batches of the corpus of `seed`."""
    texts = corpus.training_documents(seed)
    documents = token_documents(texts, tokenizer)
    return pack(documents, config.rows, config.row_length)


def train_target(config: TargetConfig, tokenizer: Tokenizer) -> DemoTarget:
    """A target trained from scratch for `config.steps` steps; the loss is on the replies."""
    torch.manual_seed(config.seed)
    model = DemoTarget(config)
    optimizers = Optimizers(
        model, muon_lr=config.muon_lr, adam_lr=config.adam_lr, steps=config.steps
    )
    stream = batches(config, tokenizer, config.seed)
    progress = Progress(f"target ({config.kind})", config.steps)
    smooth = Smoothed()
    for step in range(config.steps):
        batch = next(stream)
        loss, accuracy = target_loss(model, batch)
        loss.backward()
        optimizers.step(step)
        model.balance(BALANCE_RATE)
        smooth.add(loss.item(), accuracy.item())
        progress.update(
            step,
            tokens=batch.ids.numel(),
            text="loss {:.3f}  accuracy {:.3f}".format(*smooth.values),
        )
    return model.eval()


def target_loss(model: DemoTarget, batch: Batch) -> tuple[Tensor, Tensor]:
    """Cross entropy of the next token, and its accuracy within replies.

    Questions count too, for less: much in them is copied, and copying is learnt first.
    """
    inside = (batch.documents[:, 1:] >= 0) & (batch.positions[:, 1:] > 0)
    labels = batch.ids[:, 1:][inside]
    replies = batch.loss_mask[:, 1:][inside]
    with training_precision():
        states = model(batch.ids, batch.positions, document_mask(batch.documents))
        logits = model.logits(states[-1][:, :-1][inside]).float()
    weights = torch.where(replies, 1.0, PROMPT_WEIGHT)
    each = F.cross_entropy(logits, labels, reduction="none")
    right = (logits.detach().argmax(-1) == labels)[replies]
    return (each * weights).sum() / weights.sum(), right.float().mean()


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A greedy reply: its ids up to and with the end token, and what the target would say after.

    `ended` is False where the length limit cut it; then `beyond` is empty.
    """

    prompt: list[int]
    ids: list[int]
    beyond: list[int]
    ended: bool


@torch.no_grad()
def greedy(
    model: DemoTarget, prompts: list[list[int]], *, end: int, limit: int, beyond: int = 8
) -> list[Reply]:
    """Greedy replies to prompts of token ids, of at most `limit` tokens, in the prompts' order."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    replies: dict[int, Reply] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a step of one token is too little to share
    for start in range(0, len(order), _BATCH):
        group = order[start : start + _BATCH]
        rows = _greedy_batch(model, [prompts[i] for i in group], end, limit, beyond)
        for i, row in zip(group, rows, strict=True):
            replies[i] = _reply(prompts[i], row, end, limit, beyond)
    torch.set_num_threads(threads)
    return [replies[i] for i in range(len(prompts))]


def _greedy_batch(
    model: DemoTarget, prompts: list[list[int]], end: int, limit: int, beyond: int
) -> list[list[int]]:
    """What is written after each prompt, at least to `beyond` tokens past the end token."""
    count = len(prompts)
    longest = max(map(len, prompts))
    cache = model.new_cache(count, longest + limit + beyond + 1)
    ids = torch.zeros(count, longest, dtype=torch.int64)
    lengths = torch.tensor([len(p) for p in prompts])
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    slots = torch.arange(cache[0][0].shape[2])
    positions = torch.arange(longest).expand(count, -1)
    state = model(ids, positions, _cache_mask(slots, positions), cache)[-1]
    token = model.logits(state[torch.arange(count), lengths - 1]).argmax(-1)
    written = [token]
    over = (token == end).long()
    for step in range(limit + beyond - 1):
        if bool((over > beyond).all()):
            break
        positions = (lengths + step).unsqueeze(1)
        state = model(token.unsqueeze(1), positions, _cache_mask(slots, positions), cache)[-1]
        token = model.logits(state[:, 0]).argmax(-1)
        written.append(token)
        over = torch.where((over > 0) | (token == end), over + 1, over)
    rows: list[list[int]] = torch.stack(written, 1).tolist()
    return rows


def _reply(prompt: list[int], row: list[int], end: int, limit: int, beyond: int) -> Reply:
    stop = row.index(end) + 1 if end in row[:limit] else None
    if stop is None:
        return Reply(prompt=prompt, ids=row[:limit], beyond=[], ended=False)
    return Reply(prompt=prompt, ids=row[:stop], beyond=row[stop : stop + beyond], ended=True)


def _cache_mask(slots: Tensor, positions: Tensor) -> Tensor:
    """Slots [S], positions [B, T] -> additive mask [B, T, S]: each sees the slots up to its own."""
    hidden = slots > positions.unsqueeze(-1)
    return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
