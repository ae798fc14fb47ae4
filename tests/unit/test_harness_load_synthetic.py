"""Made prompts: exact in tokens, with the prefixes and lengths the plan says."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import KINDS, save
from tokenizers import Tokenizer

from harness.errors import UsageError
from harness.load.prompts.datasets import Prompt, load_prompts
from harness.load.prompts.lengths import check_length, draw_lengths, longest
from harness.plan.schema import Length, WorkloadSection


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: save(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


def made(target: Path, seed: int = 0, **fields: Any) -> list[Prompt]:
    return load_prompts(WorkloadSection(**fields), tokenizer=target, seed=seed)


def ids_of(target: Path, prompt: Prompt) -> list[int]:
    if prompt.token_ids is not None:
        return list(prompt.token_ids)
    assert prompt.text is not None
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    encoded: list[int] = tokenizer.encode(prompt.text, add_special_tokens=False).ids
    return encoded


@settings(max_examples=40)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    dataset=st.sampled_from(["synthetic", "random"]),
    endpoint=st.sampled_from(["chat", "completions"]),
    length=st.integers(1, 300),
    seed=st.integers(0, 1000),
)
def test_a_made_prompt_has_exactly_the_tokens_wanted(
    targets: dict[str, Path], kind: str, dataset: str, endpoint: str, length: int, seed: int
) -> None:
    target = targets[kind]
    prompts = made(
        target, seed, dataset=dataset, endpoint=endpoint, input_tokens=length, num_prompts=3
    )
    assert [len(ids_of(target, p)) for p in prompts] == [length] * 3
    assert [p.input_tokens for p in prompts] == [length] * 3
    for prompt in prompts:
        # A chat template may strip what stands around a text, and the count would change.
        assert prompt.text is None or prompt.text == prompt.text.strip()


@settings(max_examples=25)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    dataset=st.sampled_from(["synthetic", "random"]),
    endpoint=st.sampled_from(["chat", "completions"]),
    prefix=st.integers(1, 60),
    groups=st.integers(1, 3),
)
def test_prefixes_are_shared_to_the_token(
    targets: dict[str, Path], kind: str, dataset: str, endpoint: str, prefix: int, groups: int
) -> None:
    target = targets[kind]
    prompts = made(
        target, dataset=dataset, endpoint=endpoint, input_tokens=prefix + 40, num_prompts=30,
        prefix_tokens=prefix, prefix_groups=groups,
    )  # fmt: skip
    everything = [ids_of(target, p) for p in prompts]
    assert {len(ids) for ids in everything} == {prefix + 40}
    assert 1 <= len({tuple(ids[:prefix]) for ids in everything}) <= groups
    assert len({tuple(ids) for ids in everything}) == 30


def test_the_share_of_prompts_with_a_prefix_is_the_reuse(targets: dict[str, Path]) -> None:
    prompts = made(
        targets["byte_level"], dataset="random", endpoint="completions", input_tokens=64,
        num_prompts=1000, prefix_tokens=16, prefix_reuse=0.3,
    )  # fmt: skip
    heads = [p.token_ids[:16] for p in prompts if p.token_ids]
    assert 250 < max(heads.count(head) for head in set(heads)) < 350


def test_random_tokens_are_no_special_ones_and_differ(targets: dict[str, Path]) -> None:
    target = targets["byte_level"]
    prompts = made(
        target, dataset="random", endpoint="completions", input_tokens=500, num_prompts=20
    )
    specials = set(Tokenizer.from_file(str(target / "tokenizer.json")).get_added_tokens_decoder())
    asked = {i for p in prompts for i in p.token_ids or ()}
    assert specials and not asked & specials
    assert len(asked) > 500


@pytest.mark.parametrize("dataset", ["synthetic", "random"])
def test_a_tokenizer_without_a_tokenizer_json_is_read_too(tmp_path: Path, dataset: str) -> None:
    config = {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 0}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    for endpoint in ("chat", "completions"):
        prompts = made(
            tmp_path, dataset=dataset, endpoint=endpoint, input_tokens=37, num_prompts=4,
            prefix_tokens=9,
        )  # fmt: skip
        if endpoint == "chat":  # a token a byte
            assert {len((p.text or "").encode()) for p in prompts} == {37}
        else:
            assert {len(p.token_ids or ()) for p in prompts} == {37}
            assert all(3 <= i < 259 for p in prompts for i in p.token_ids or ())


def test_the_seed_decides_what_is_made(targets: dict[str, Path]) -> None:
    def texts(seed: int) -> list[str | None]:
        plan = {"dataset": "synthetic", "input_tokens": 20, "num_prompts": 4}
        return [p.text for p in made(targets["byte_level"], seed, **plan)]

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)


def test_lengths_and_limits_follow_their_distributions(targets: dict[str, Path]) -> None:
    target = targets["byte_level"]
    prompts = made(
        target, dataset="random", endpoint="completions", num_prompts=400,
        input_tokens=Length(dist="uniform", mean=100, spread=50),
        output_tokens=Length(dist="normal", mean=80, spread=10, max=90),
    )  # fmt: skip
    lengths = [len(p.token_ids or ()) for p in prompts]
    limits = [p.max_tokens or 0 for p in prompts]
    assert min(lengths) < 60 and max(lengths) > 140
    assert min(lengths) >= 50 and max(lengths) <= 150
    assert max(limits) == 90 and 60 < statistics.mean(limits) < 80.5


@given(
    dist=st.sampled_from(["constant", "uniform", "normal", "lognormal"]),
    mean=st.integers(1, 10_000_000),
    spread=st.integers(0, 10_000_000),
    low=st.integers(1, 1000),
    room=st.integers(0, 1000),
)
def test_no_length_lies_outside_its_bounds(
    dist: str, mean: int, spread: int, low: int, room: int
) -> None:
    wanted = Length(dist=dist, mean=mean, spread=spread, min=low, max=low + room)  # type: ignore[arg-type]
    drawn = draw_lengths(wanted, 20, random.Random(1))
    assert all(low <= n <= low + room for n in drawn)
    most = longest(wanted)
    assert most is not None and max(drawn) <= most


def test_a_lognormal_has_the_mean_and_spread_it_says() -> None:
    drawn = draw_lengths(Length(dist="lognormal", mean=1000, spread=500), 20_000, random.Random(3))
    assert statistics.mean(drawn) == pytest.approx(1000, rel=0.02)
    assert statistics.stdev(drawn) == pytest.approx(500, rel=0.05)


def test_a_trace_gives_its_lengths_in_its_order(targets: dict[str, Path], tmp_path: Path) -> None:
    rows = [{"timestamp": i, "input_length": 5 + i, "output_length": 9 - i} for i in range(8)]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    target = targets["byte_level"]
    prompts = made(target, dataset=str(path))
    assert [len(ids_of(target, p)) for p in prompts] == [5, 6, 7, 8, 9, 10, 11, 12]
    assert [p.max_tokens for p in prompts] == [9, 8, 7, 6, 5, 4, 3, 2]
    with pytest.raises(UsageError, match=r"workload\.input_tokens"):
        made(target, dataset=str(path), input_tokens=7)
    with pytest.raises(UsageError, match=r"'trace-000007' has 12 tokens.* out of the trace"):
        load_prompts(
            WorkloadSection(dataset=str(path), endpoint="completions"), tokenizer=target, context=12
        )
    path.write_text('{"timestamp": 0, "input_length": 5}\n{"timestamp": 1, "input_length": 0}\n')
    with pytest.raises(UsageError, match=r"workload\.dataset: .*line 2: .*input_length"):
        made(target, dataset=str(path))


@pytest.mark.parametrize(
    ("fields", "needle"),
    [
        ({}, "workload.input_tokens=512"),
        ({"input_tokens": 8, "prefix_tokens": 8}, "at most 8 tokens long"),
        ({"input_tokens": 2000}, "do not fit the context of 1000"),
        ({"input_tokens": Length(mean=5, min=9, max=4)}, "max 4 is less than min 9"),
        ({"input_tokens": Length(mean=50, max=10)}, "mean 50 is not from min 1 to max 10"),
        ({"input_tokens": Length(mean=5, min=9)}, "mean 5 is not from min 9"),
    ],
)
def test_lengths_that_cannot_be_are_refused(
    targets: dict[str, Path], fields: dict[str, Any], needle: str
) -> None:
    workload = WorkloadSection(dataset="synthetic", **fields)
    with pytest.raises(UsageError, match=needle):
        load_prompts(workload, tokenizer=targets["byte_level"], context=1000)


def test_without_a_tokenizer_it_is_said_what_to_set() -> None:
    with pytest.raises(UsageError, match=r"target\.path=DIR"):
        load_prompts(WorkloadSection(dataset="random", input_tokens=4))


def test_bounds_that_exclude_each_other_name_their_key() -> None:
    with pytest.raises(UsageError, match=r"workload\.output_tokens: max 1"):
        check_length(Length(mean=5, min=2, max=1), "workload.output_tokens")
