"""Sampling: the shaped distributions, and that speculation leaves the target's one unchanged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_models import build_drafter, build_target, load_target
from scipy.stats import chisquare

from engines.reference.draft import EagleProposer
from engines.reference.engine import Engine, Request, SamplingParams
from engines.reference.sampling import (
    distributions,
    force,
    pick,
    verify_greedy,
    verify_sampled,
)

SMALL = 10  # vocabulary of the statistical tests
P_MIN = 1e-3  # with fixed seeds the tests are deterministic; this is no flakiness margin


def _params(**fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=3, ignore_eos=True, **fields)


def test_distributions_by_hand() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(6, 1, 4)
    rows = [
        _params(),
        _params(temperature=0),
        _params(top_k=2),
        _params(top_p=0.6),
        _params(min_p=0.25),
        _params(temperature=0.5),
    ]
    squares = [0.25, 0.09, 0.0225, 0.0025]
    expected = [
        [0.5, 0.3, 0.15, 0.05],
        [1, 0, 0, 0],
        [0.625, 0.375, 0, 0],
        [0.625, 0.375, 0, 0],  # the fewest tokens that hold 0.6
        [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0],
        [s / sum(squares) for s in squares],
    ]
    torch.testing.assert_close(distributions(logits, rows)[:, 0], torch.tensor(expected))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9), st.floats(0, 1, exclude_max=True))
def test_pick_never_takes_an_impossible_token(weights: list[float], uniform: float) -> None:
    if max(weights) < 1e-30:
        weights = [*weights, 1.0]
    token = int(pick(torch.tensor(weights), torch.tensor(uniform)))
    assert weights[token] > 0


@given(st.integers(0, 2**32), st.integers(1, 8))
@settings(max_examples=50, deadline=None)
def test_sampled_verification_of_certain_rows_is_greedy_verification(seed: int, k: int) -> None:
    torch.manual_seed(seed)
    logits, drafts = torch.randn(5, k + 1, 3), torch.randint(0, 3, (5, k))
    sure = [_params(temperature=0)] * 5
    one_hot = torch.nn.functional.one_hot(drafts, 3).float()
    sampled = verify_sampled(distributions(logits, sure), one_hot, drafts, torch.rand(5, k + 1))
    tokens, accepted = verify_greedy(logits, drafts)
    assert sampled[1].tolist() == accepted.tolist()
    for row, count in enumerate(accepted.tolist()):
        assert sampled[0][row, : count + 1].tolist() == tokens[row, : count + 1].tolist()


def _verified(claimed: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """p-value of 40,000 first tokens against the target, for a draft distribution `claimed`."""
    torch.manual_seed(5)
    target, draft = torch.randn(2, SMALL).mul(1.5).softmax(-1)
    count = 40_000
    drafts = pick(draft.expand(count, 1, SMALL), torch.rand(count, 1))
    said = claimed(draft).expand(count, 1, SMALL)
    tokens, _ = verify_sampled(target.expand(count, 2, -1), said, drafts, torch.rand(count, 2))
    seen = torch.bincount(tokens[:, 0], minlength=SMALL)
    return float(chisquare(seen.numpy(), (target * count).numpy(), sum_check=False).pvalue)


def test_verification_keeps_the_distribution_and_the_test_would_notice() -> None:
    assert _verified(lambda draft: draft) > P_MIN
    # a draft distribution that is not the real one breaks it
    assert _verified(lambda draft: torch.full_like(draft, 1 / SMALL)) < 1e-9


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("small")
    changes = {"vocab_size": SMALL, "initializer_range": 0.08}
    return build_target("deepseek", folder, **changes), folder


TRUNCATED = {"temperature": 0.7, "top_k": 6, "top_p": 0.9}
LONG = [
    pytest.param(kind, shape, 12_000, marks=pytest.mark.full)
    for kind in ("llama", "mla", None)
    for shape in ({}, TRUNCATED)
]


@pytest.mark.parametrize(
    ("kind", "shape", "count"),
    [("llama", {}, 1500), ("mla", TRUNCATED, 1500), (None, TRUNCATED, 800), *LONG],
)
def test_sampled_output_follows_the_target(
    small: Any, kind: str | None, shape: Any, count: int
) -> None:
    """Chi-square of outputs of three tokens: the second, and the third given the two before."""
    theirs, folder = small
    model = load_target(folder)
    proposer = None
    if kind is not None:
        size = 8 if kind == "llama" else SMALL  # with and without a draft vocabulary
        drafter = build_drafter(kind, vocab_size=SMALL, draft_vocab_size=size)
        drafter.lm_head.weight.mul_(0.3)  # flat enough to be accepted now and then
        proposer = EagleProposer(drafter, k=2, slots=64, length=32, vocab_size=SMALL)
    engine = Engine(model, tokenizer=None, proposer=proposer, max_len=32, slots=64, seed=11)
    prompt = [3, 1, 4, 1, 5]
    done = engine.generate([prompt] * count, _params(**shape))
    outputs = torch.tensor([r.output for r in done])
    if proposer is not None:
        accepted = [a for r in done if r.drafts is not None for a in r.drafts.accepted]
        assert 300 < sum(accepted) < 1.8 * len(accepted)  # both fates of drafts are common

    exact = _exact_joint(theirs, prompt, _params(**shape))
    flat = (outputs * torch.tensor([SMALL**2, SMALL, 1])).sum(-1)
    seen = torch.bincount(flat, minlength=SMALL**3).view(SMALL, SMALL, SMALL)
    assert int(seen[exact == 0].sum()) == 0
    for axes in ((1, 2), (0, 2), (0, 1), (0,), (2,), ()):  # marginals, pairs, the whole joint
        expected = exact.sum(axes) * len(done) if axes else exact * len(done)
        assert _pvalue(seen.sum(axes) if axes else seen, expected) > P_MIN


def _exact_joint(theirs: Any, prompt: list[int], params: SamplingParams) -> torch.Tensor:
    """The probability of every output of three tokens, from transformers' logits."""
    pairs = [[a, b] for a in range(SMALL) for b in range(SMALL)]
    with torch.no_grad():
        logits = theirs(torch.tensor([prompt + pair for pair in pairs])).logits.float()
    probs = distributions(logits[:, len(prompt) - 1 :], [params] * len(pairs))
    first = probs[0, 0]
    second = probs[::SMALL, 1]  # [a, b]
    third = probs[:, 2].view(SMALL, SMALL, SMALL)  # [a, b, c]
    return (first[:, None] * second)[..., None] * third


def _pvalue(seen: torch.Tensor, expected: torch.Tensor) -> float:
    """Chi-square with all rare cells (expected under 5) pooled into one."""
    common = expected >= 5
    observed = [*seen[common].tolist(), int(seen[~common].sum())]
    wanted = [*expected[common].tolist(), float(expected[~common].sum())]
    if wanted[-1] < 1e-9:
        observed, wanted = observed[:-1], wanted[:-1]
    return float(chisquare(observed, wanted, sum_check=False).pvalue)


def test_a_seed_gives_the_same_output_whatever_runs_beside_it(small: Any) -> None:
    _, folder = small
    model = load_target(folder)

    def run(beside: int) -> list[int]:
        drafter = build_drafter("llama", vocab_size=SMALL, draft_vocab_size=8)
        proposer = EagleProposer(drafter, k=2, slots=8, length=64, vocab_size=SMALL)
        engine = Engine(model, tokenizer=None, proposer=proposer, max_len=64, slots=8)
        params = SamplingParams(max_tokens=20, ignore_eos=True, seed=7)
        wanted = Request([3, 1, 4], params)
        others = [
            Request([5, 2 + i], SamplingParams(max_tokens=20, ignore_eos=True, temperature=i % 2))
            for i in range(beside)
        ]
        for request in [*others, wanted]:
            engine.submit(request)
        while not all(r.finished for r in [*others, wanted]):
            engine.step()
        return wanted.output

    assert run(0) == run(0) == run(4)


def test_forced_acceptance_takes_the_floor_or_the_ceiling_of_the_length() -> None:
    logits = torch.zeros(3, 4, 9)
    logits[:, :, 7] = 1.0  # the target would say 7 everywhere
    drafts = torch.tensor([[1, 2, 3]] * 3)
    tokens, accepted = force(logits, drafts, 2.25, [0.0, 0.24, 0.25])
    assert accepted.tolist() == [2, 2, 1]
    assert tokens[0, :3].tolist() == [1, 2, 7]
    assert tokens[2, :2].tolist() == [1, 7]
    for length, count in ((1.0, 0), (4.0, 3)):
        tokens, accepted = force(logits, drafts, length, [0.0, 0.5, 0.999])
        assert accepted.tolist() == [count] * 3
        assert tokens[0, : count + 1].tolist() == [*[1, 2, 3][:count], 7]
