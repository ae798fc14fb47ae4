"""From logits to tokens: the target's distribution, greedy and lossless sampled verification."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one request wants its tokens. `temperature` 0 is greedy; `top_k` 0 keeps all tokens.

    `logprobs` n: the token's own and the n best log-probabilities, of the model's raw logits
    (before temperature and truncation, as vLLM's default); `prompt_logprobs` likewise.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop: bool = False

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < 1e-5


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One token's log-probability, its rank (1 is the likeliest) and the best alternatives."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def distributions(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """Logits [n, T, V], one set of parameters a row -> probabilities [n, T, V] to sample from.

    A greedy row gets all its probability on the likeliest token, so that sampled verification of
    it is greedy verification. Order as in vLLM: temperature, min_p, top_k, top_p.
    """

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=logits.device, dtype=logits.dtype)[:, None, None]

    probs = (logits / column([1.0 if p.greedy else p.temperature for p in params])).softmax(-1)
    if any(p.min_p > 0 for p in params):
        floor = column([p.min_p for p in params]) * probs.amax(-1, keepdim=True)
        probs = probs.masked_fill(probs < floor, 0)
    if any(p.top_k > 0 or p.top_p < 1 for p in params):
        probs = _truncate(probs, params, column)
    greedy = torch.tensor([p.greedy for p in params], device=logits.device)[:, None, None]
    best = torch.zeros_like(probs).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where(greedy, best, probs / probs.sum(-1, keepdim=True))


def _truncate(probs: Tensor, params: list[SamplingParams], column: object) -> Tensor:
    """Keep each row's `top_k` likeliest tokens, then the fewest of them that hold `top_p`."""
    assert callable(column)
    ordered, index = probs.sort(dim=-1, descending=True, stable=True)
    size = probs.shape[-1]
    ranks = torch.arange(size, device=probs.device)
    ordered = ordered * (ranks < column([float(p.top_k or size) for p in params]))
    ordered = ordered / ordered.sum(-1, keepdim=True)
    before = ordered.cumsum(-1) - ordered  # probability of all likelier tokens
    kept = before < column([p.top_p for p in params])
    kept |= (column([p.top_p for p in params]) >= 1) | (ranks == 0)
    return torch.zeros_like(probs).scatter_(-1, index, ordered * kept)


def pick(probs: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF sampling: weights [..., V] (need not sum to 1), uniform [...] in [0, 1)."""
    cdf = probs.double().cumsum(-1)
    at = torch.searchsorted(cdf, uniform.double()[..., None] * cdf[..., -1:], right=True)
    return at.squeeze(-1).clamp_max(probs.shape[-1] - 1)


def verify_greedy(logits: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [n, k + 1, V], drafts [n, k] -> tokens [n, k + 1], accepted counts [n].

    tokens[:, :a + 1] are the a accepted drafts and the target's own next token.
    """
    tokens = logits.argmax(-1)
    return tokens, (tokens[:, :-1] == drafts).cumprod(1).sum(1)


def verify_sampled(
    target: Tensor, draft: Tensor, drafts: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Speculative sampling (arXiv 2211.17192, theorem 1): the output follows `target` exactly.

    target [n, k + 1, V] and draft [n, k, V] are the probabilities the tokens are, and were,
    sampled from; uniform [n, k + 1] is independent of the drafts [n, k]. Returns as
    `verify_greedy`: draft i is kept with probability min(1, p/q); after the first that is not,
    one token comes from the normalised positive part of p - q (of p where all were kept).
    """
    wanted = drafts[..., None]
    p = target[:, :-1].gather(-1, wanted).squeeze(-1)
    q = draft.gather(-1, wanted).squeeze(-1)
    accepted = (uniform[:, :-1] * q < p).cumprod(1).sum(1)
    rows = torch.arange(len(accepted), device=accepted.device)
    padded = torch.cat((draft, torch.zeros_like(target[:, :1])), dim=1)
    at_stop = target[rows, accepted]
    residual = (at_stop - padded[rows, accepted]).clamp_min(0)
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, at_stop)
    tokens = torch.cat((drafts, torch.zeros_like(accepted)[:, None]), dim=1)
    tokens[rows, accepted] = pick(residual, uniform[:, -1])
    return tokens, accepted


def force(
    logits: Tensor, drafts: Tensor, length: float, flips: list[float]
) -> tuple[Tensor, Tensor]:
    """Accept as many drafts as give `length` tokens a step on average, right or wrong.

    Each row takes the floor or the ceiling of `length`, by its flip in [0, 1); the last token is
    the target's likeliest. Returns as `verify_greedy`.
    """
    whole = int(length - 1)
    accepted = torch.tensor([whole + (flip < length - 1 - whole) for flip in flips])
    accepted = accepted.to(drafts.device)
    tokens = logits.argmax(-1)
    kept = torch.arange(drafts.shape[1], device=drafts.device) < accepted[:, None]
    tokens[:, :-1] = torch.where(kept, drafts, tokens[:, :-1])
    return tokens, accepted


def top_logprobs(logits: Tensor, tokens: list[int], count: int) -> list[TokenLogprob]:
    """Log-probabilities of `tokens` under logits [N, V], with the `count` best of each row."""
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    ranks = (logprobs > chosen).sum(-1) + 1
    best = logprobs.topk(min(count, logits.shape[-1]), dim=-1)
    columns = (chosen[:, 0].tolist(), ranks.tolist(), best.indices.tolist(), best.values.tolist())
    return [
        TokenLogprob(
            token=token, logprob=value, rank=rank, top=tuple(zip(ids, values, strict=True))
        )
        for token, value, rank, ids, values in zip(tokens, *columns, strict=True)
    ]
