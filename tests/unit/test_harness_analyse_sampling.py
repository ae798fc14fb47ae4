"""The two-sample test: right error rate where nothing changed, power where something did."""

from __future__ import annotations

import random

from harness_records import cell, request, run_of

from harness.analyse.sampling import permutation_test
from harness.analyse.summary import summarise
from harness.plan.schema import Plan, SamplingSection
from harness.records import RequestRecord

WARM = Plan(sampling=SamplingSection(temperature=1.0))


def drawn(
    rng: random.Random, prompt: int, *, flat: float = 1.0, longer: int = 0, ids: bool = True
) -> RequestRecord:
    """An answer whose tokens depend on its prompt; `flat` above 1 draws likely tokens more."""
    own = random.Random(prompt)
    vocabulary = [own.randrange(300) for _ in range(30)]
    weights = [1 / (i + 1) ** flat for i in range(30)]
    said = tuple(rng.choices(vocabulary, weights, k=rng.randrange(20, 40) + longer))
    return request(
        index=prompt,
        prompt_id=f"p{prompt}",
        token_ids=said if ids else None,
        text=" ".join(map(str, said)),
        output_tokens=len(said),
    )


def matched(seed: int, n: int = 30, **change: float) -> list[tuple[RequestRecord, RequestRecord]]:
    rng = random.Random(seed)
    return [(drawn(rng, i), drawn(rng, i, **change)) for i in range(n)]  # type: ignore[arg-type]


def test_nothing_changed_is_called_about_as_often_as_said() -> None:
    found = [permutation_test(matched(seed)) for seed in range(150)]
    p_values = [f.p_value for f in found if f is not None]
    assert len(p_values) == 150
    assert sum(p < 0.05 for p in p_values) <= 16  # binomial(150, 0.05): p = 0.002
    assert sum(p < 0.5 for p in p_values) >= 30


def test_a_changed_distribution_and_a_changed_length_are_found() -> None:
    sharper = permutation_test(matched(0, flat=2.0))
    longer = permutation_test(matched(0, longer=15))
    assert sharper is not None
    assert longer is not None
    assert sharper.tokens_p < 0.005
    assert longer.lengths_p < 0.005
    assert max(sharper.p_value, longer.p_value) < 0.01


def test_answers_that_repeat_in_every_block_count_once() -> None:
    once = matched(3, n=12)
    one, tenfold = permutation_test(once), permutation_test(once * 10)
    assert one is not None
    assert tenfold is not None
    assert one.prompts == tenfold.prompts == 12
    assert abs(one.tokens_p - tenfold.tokens_p) < 0.02


def test_words_stand_in_for_tokens() -> None:
    rng = random.Random(0)
    pairs = [(drawn(rng, i, ids=False), drawn(rng, i, flat=2.0, ids=False)) for i in range(30)]
    found = permutation_test(pairs)
    assert found is not None
    assert found.tokens_p < 0.005


def test_few_prompts_are_not_judged() -> None:
    assert permutation_test(matched(0, n=9)) is None
    assert permutation_test([]) is None


def test_the_summary_tells_it_with_its_p_value() -> None:
    both = matched(0, flat=2.0)
    cells = [
        cell("baseline", 0, [a for a, _ in both]),
        cell("speculative", 0, [b for _, b in both]),
    ]
    summary = summarise(run_of(cells, plan=WARM))
    (caution,) = [c for c in summary.cautions if c.code == "distribution_differs"]
    assert "p = 0.001" in caution.text
    (found,) = summary.integrity
    assert found.sampling_prompts == 30
    assert summary.void is None
    greedy = summarise(run_of(cells))
    assert greedy.integrity[0].sampling_p is None
