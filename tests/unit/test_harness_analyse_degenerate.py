"""Loops are found; healthy text of every kind is not called one."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path

import pytest
from harness_records import cell, request, run_of
from hypothesis import given
from hypothesis import strategies as st

from harness.analyse.degenerate import (
    GRAM,
    degenerate_of,
    diversity,
    is_degenerate,
    longest_run,
    pool,
)
from harness.analyse.summary import summarise
from harness.records import DraftCounts, RequestRecord
from training.demo import corpus

REPO = Path(__file__).resolve().parents[2]


def said(text: str, **fields: object) -> RequestRecord:
    return request(text=text, token_ids=None, **fields)


def tokens(ids: list[int], **fields: object) -> RequestRecord:
    return request(token_ids=tuple(ids), output_tokens=len(ids), **fields)


def in_words(text: str) -> RequestRecord:
    """A tokenizer of words and signs: repetition shows as it does in a real vocabulary."""
    words = "".join(c if c.isalnum() else f" {c} " for c in text).split()
    known = {word: i for i, word in enumerate(dict.fromkeys(words))}
    return tokens([known[word] for word in words])


def healthy() -> dict[str, str]:
    found: dict[str, str] = {}
    for line in (REPO / "harness/load/prompts/builtin.jsonl").read_text().splitlines():
        row = json.loads(line)
        said = row.get("prompt") or "\n".join(m["content"] for m in row["messages"])
        found[row["id"]] = said
    for file in sorted((REPO / "harness").rglob("*.py")):
        found[file.name] = file.read_text()[:5000]
    found["css"] = (REPO / "harness/report/templates/report.css").read_text()[:5000]
    for begin in (0, 10, 1000):
        found[f"numbers-{begin}"] = ", ".join(map(str, range(begin, begin + 700)))
    found["list"] = "\n".join(f"{i}. item {i}" for i in range(200))
    found["times"] = "\n".join(f"{i} x {j} = {i * j}" for i in range(1, 13) for j in range(1, 13))
    rows = [{"id": i, "name": f"user {i}", "active": i % 2 == 0} for i in range(80)]
    found["json"] = json.dumps(rows, indent=2)
    found["csv"] = "\n".join(f"2024-01-{i % 28 + 1:02d},{i * 37 % 101},ok" for i in range(200))
    found["table"] = "| a | b |\n|---|---|\n" + "\n".join(f"| {i} | {i * i} |" for i in range(80))
    return found


def test_healthy_text_of_every_kind_passes() -> None:
    texts = healthy()
    assert len(texts) > 150
    for name, text in texts.items():
        for finish in ("stop", "length"):
            assert not is_degenerate(said(text, finish_reason=finish)), name
        assert not is_degenerate(in_words(text)), name


def test_answers_of_the_demo_generator_pass() -> None:
    answers = [
        corpus.reply_text(turn) for talk in corpus.held_out_dialogues(1, 300) for turn in talk.turns
    ]
    judged = [is_degenerate(said(text, finish_reason="length")) for text in answers]
    assert sum(j is not None for j in judged) > 20
    assert not any(judged)
    assert not is_degenerate(said("\n".join(answers)))


@pytest.mark.parametrize(
    "text",
    [
        "ab" * 100,
        "a" * 200,
        "I am sure that I do not know. " * 12,
        "[" + "0, " * 100 + "]",
        "It begins well, and says a thing or two of use before it goes. " + "So it goes on. " * 30,
        "很好" * 90,
    ],
)
def test_loops_are_found(text: str) -> None:
    assert is_degenerate(said(text))


def test_a_loop_at_the_end_of_a_long_answer_is_found_where_it_was_cut() -> None:
    rng = random.Random(1)
    ids = [rng.randrange(5000) for _ in range(400)] + [7, 8] * 40
    assert is_degenerate(tokens(ids, finish_reason="length"))
    assert not is_degenerate(tokens(ids, finish_reason="stop"))
    assert not is_degenerate(tokens([*ids, *range(9000, 9080)], finish_reason="length"))


def test_loops_that_are_not_quite_periodic_are_found_by_their_diversity() -> None:
    rng = random.Random(2)
    sentences = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8], [1, 2, 9, 10]]
    ids = [t for _ in range(300) for t in rng.choice(sentences)]
    found = diversity(ids)
    assert found.run is None or found.run.units < 0.5 * found.units
    assert is_degenerate(tokens(ids))


def test_short_answers_are_not_judged() -> None:
    assert is_degenerate(tokens([1, 2] * 23)) is None
    assert is_degenerate(said("ab" * 70)) is None
    assert is_degenerate(request(token_ids=None, text=None)) is None
    assert is_degenerate(tokens([1, 2] * 24)) is True


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.integers(3, 12),
    st.lists(st.integers(10, 10_000), max_size=40),
    st.lists(st.integers(10, 10_000), max_size=40),
)
def test_a_planted_run_is_found_whole(
    period: list[int], times: int, before: list[int], after: list[int]
) -> None:
    ids = [*before, *(period * times), *after]
    if len(period) * times < GRAM + 2 * len(period):
        return
    grams = list(zip(*(ids[i:] for i in range(GRAM)), strict=False))
    found = longest_run(ids, grams)
    assert found is not None
    assert found.units >= len(period) * times
    assert found.times >= times - 1e-9 or found.period < len(period) or found.units > len(period)
    start = next(
        s
        for s in range(len(ids) - found.units + 1)
        if all(ids[i] == ids[i - found.period] for i in range(s + found.period, s + found.units))
    )
    assert start <= len(before)


@given(st.lists(st.integers(0, 50), min_size=GRAM + 1, max_size=300))
def test_a_run_that_is_told_is_there(ids: list[int]) -> None:
    grams = list(zip(*(ids[i:] for i in range(GRAM)), strict=False))
    found = longest_run(ids, grams)
    if found is None:
        return
    assert 2 * found.period <= found.units <= len(ids)
    assert any(
        all(ids[i] == ids[i - found.period] for i in range(s + found.period, s + found.units))
        for s in range(len(ids) - found.units + 1)
    )


@given(st.text(alphabet=string.ascii_letters + " .,", min_size=0, max_size=400))
def test_random_text_is_no_loop(text: str) -> None:
    if len(set(text)) > 20:
        assert not is_degenerate(said(text))


def test_acceptance_is_told_apart() -> None:
    loop = DraftCounts(drafts=10, drafted=30, accepted=30, per_position=(10, 10, 10))
    sane = DraftCounts(drafts=10, drafted=30, accepted=10, per_position=(5, 3, 2))
    records = [
        tokens([1, 2] * 30, index=0, prompt_id="p0", acceptance=loop),
        tokens(list(range(60)), index=1, prompt_id="p1", acceptance=sane),
        tokens([1, 2, 3], index=2, prompt_id="p2", acceptance=sane),
    ]
    found = degenerate_of(cell("speculative", 0, records))
    assert found is not None
    assert (found.judged, found.degenerate) == (2, 1)
    assert (found.tokens, found.degenerate_tokens) == (123, 60)
    assert found.acceptance_degenerate == loop
    assert found.acceptance_healthy is not None
    assert found.acceptance_healthy.accepted == 20
    assert found.examples == ("p0",)
    both = pool([found, None, found])
    assert both is not None
    assert (both.judged, both.degenerate_tokens) == (4, 120)
    assert pool([None]) is None
    summary = summarise(run_of([cell("speculative", 0, records)]))
    (text,) = [c.text for c in summary.cautions if c.code == "output_degenerate"]
    assert "4.00 in them, 2.00 in the others" in text
    assert summary.void is None


def test_a_run_dominated_by_loops_is_void() -> None:
    records = [tokens([1, 2] * 30, index=i, prompt_id=f"p{i}") for i in range(3)]
    records.append(tokens(list(range(60)), index=3, prompt_id="p3"))
    both = [cell("baseline", 0, records), cell("speculative", 0, records)]
    summary = summarise(run_of(both))
    assert summary.void is not None
    assert "180 of 240 output tokens" in summary.void
    assert summarise(run_of(both[:1])).void is None  # nothing is said of speculation
    search = run_of(both)
    search.manifest.plan["capacity"] = {}
    assert summarise(search).void is None  # it asks what the server bears
