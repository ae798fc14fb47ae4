"""Prompts chosen, limited, templated, held against the context, and dealt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prompt_files import load, write
from tiny_tokenizers import save

from harness.errors import UsageError
from harness.load.prompts.datasets import Prompt, allot, load_prompts, needs_tokenizer
from harness.load.streaming.client import check_prompts
from harness.plan.schema import Length, WorkloadSection


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("target"))


@given(st.integers(1, 30), st.integers(0, 5), st.lists(st.integers(0, 12), min_size=1, max_size=4))
def test_allotment(size: int, warmup: int, needs: list[int]) -> None:
    prompts = [Prompt(id=str(i), text=str(i)) for i in range(size)]
    allotment = allot(prompts, warmup=warmup, needs=needs, seed=5)
    measured = [p.id for cell in allotment.cells for p in cell]
    assert [len(cell) for cell in allotment.cells] == needs
    assert len(allotment.warmup) == warmup
    assert not {p.text for p in allotment.warmup} & {p.text for c in allotment.cells for p in c}
    assert allotment == allot(prompts, warmup=warmup, needs=needs, seed=5)
    if sum(needs) + warmup <= size:  # each once before any comes again
        assert len(set(measured)) == len(measured)


def test_ids_are_dealt_and_the_warm_up_asks_others() -> None:
    prompts = [Prompt(id=str(i), token_ids=(i, i + 1, i + 2)) for i in range(3)]
    prompts.append(Prompt(id="same", token_ids=(7, 7)))
    allotment = allot(prompts, warmup=9, needs=[4], seed=0)
    measured = {p.token_ids for p in prompts}
    assert len(allotment.warmup) == 9
    assert not {p.token_ids for p in allotment.warmup} & measured


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), min_size=1, max_size=8))
def test_no_warm_up_of_ids_is_measured(ids: list[list[int]]) -> None:
    prompts = [Prompt(id=str(i), token_ids=tuple(one)) for i, one in enumerate(ids)]
    allotment = allot(prompts, warmup=6, needs=[len(prompts)], seed=1)
    assert not {p.token_ids for p in allotment.warmup} & {p.token_ids for p in prompts}


def test_a_trace_is_dealt_in_order_to_each_cell() -> None:
    prompts = [Prompt(id=str(i), text=str(i), position=i) for i in range(6)]
    allotment = allot(prompts, warmup=2, needs=[4, 4], seed=5)
    assert [[p.id for p in cell] for cell in allotment.cells] == [["0", "1", "2", "3"]] * 2
    assert [p.id for p in allotment.warmup] == ["4", "5"]


def test_lengths_are_filtered_in_tokens(tmp_path: Path, target: Path) -> None:
    path = write(tmp_path / "p.jsonl", *({"prompt": "a" + " the" * n} for n in range(10)))
    kept = load(path, tokenizer=target, min_input_tokens=3, max_input_tokens=5)
    assert [p.input_tokens for p in kept] == [3, 4, 5]
    with pytest.raises(UsageError, match="none of 10 prompts has from 50 to any number"):
        load(path, tokenizer=target, min_input_tokens=50)
    with pytest.raises(UsageError, match=r"target\.path=DIR"):
        load(path, min_input_tokens=3)
    with pytest.raises(UsageError, match="less than min_input_tokens=3"):
        load(path, min_input_tokens=3, max_input_tokens=2)


def test_a_sample_is_seeded_and_without_replacement(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", *({"prompt": str(n)} for n in range(100)))
    one, again = load(path, num_prompts=20, seed=1), load(path, num_prompts=20, seed=1)
    assert one == again != load(path, num_prompts=20, seed=2)
    assert len({p.id for p in one}) == 20
    assert len(load(path, num_prompts=1000)) == 100


def test_ids_are_made_unique(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "id": i} for i in ("x", "x-2", "x", "x", "y")]
    ids = [p.id for p in load(write(tmp_path / "p.jsonl", *rows))]
    assert len(set(ids)) == 5
    assert ids[:2] == ["x", "x-2"] and ids[4] == "y"


@given(st.lists(st.sampled_from(["a", "a-2", "a-3", "a-2-2", "b"]), min_size=1, max_size=12))
def test_ids_stay_unique_whatever_they_are(
    tmp_path_factory: pytest.TempPathFactory, ids: list[str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "ids.jsonl"
    made = [p.id for p in load(write(path, *({"prompt": "a", "id": i} for i in ids)))]
    assert len(set(made)) == len(ids)


def test_a_prompt_beyond_the_context_is_told(tmp_path: Path, target: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "a"}, {"id": "big", "prompt": "a" + " the" * 99})
    with pytest.raises(UsageError, match=r"'big' has 100 tokens.* context is 100 .*max_input_tok"):
        load(path, tokenizer=target, context=100)
    assert len(load(path, tokenizer=target, context=101)) == 2
    assert len(load(path, tokenizer=target, context=100, max_input_tokens=50)) == 1
    assert len(load(path, context=100)) == 2, "without a tokenizer nothing can be told"
    assert len(load(path, context=100, tokenizer=tmp_path)) == 2


def test_of_the_built_in_set_what_is_too_long_is_left_out(target: Path) -> None:
    everything = load("builtin")
    short = load("builtin", tokenizer=target, context=1000)
    assert 0 < len(short) < len(everything)
    assert {p.id for p in short} < {p.id for p in everything}


def test_a_distribution_gives_each_prompt_its_limit(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "a", "max_tokens": 3}, {"prompt": "b"})
    wanted = Length(dist="uniform", mean=50, spread=10)
    own, drawn = load(path, output_tokens=wanted)
    assert own.max_tokens == 3
    assert drawn.max_tokens is not None and 40 <= drawn.max_tokens <= 60
    assert [p.max_tokens for p in load(path)] == [3, None]


def test_the_chat_template_is_applied_here_on_request(tmp_path: Path, target: Path) -> None:
    from tokenizers import Tokenizer

    path = write(tmp_path / "p.jsonl", {"prompt": "tea"})
    how: dict[str, Any] = {"endpoint": "completions", "chat_template": "client"}
    [plain] = load(path, tokenizer=target, **how)
    [thinking] = load(path, tokenizer=target, chat_template_kwargs={"thinking": True}, **how)
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    assert plain.token_ids and thinking.token_ids and plain.text is None
    text = "<|user|>tea<|end|><|assistant|>"
    assert tokenizer.decode(plain.token_ids, skip_special_tokens=False) == text
    assert tokenizer.decode(thinking.token_ids, skip_special_tokens=False) == text + "<think>"
    assert plain.input_tokens == len(plain.token_ids)


def test_a_template_that_cannot_be_applied_is_told(tmp_path: Path, target: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"turns": ["a", "b"]})
    how: dict[str, Any] = {"endpoint": "completions", "chat_template": "client"}
    with pytest.raises(UsageError, match=r"multi_turn=false"):
        load(path, tokenizer=target, **how)
    bare = save(tmp_path / "bare", template=None)
    with pytest.raises(UsageError, match="no chat template"):
        load(path, tokenizer=bare, multi_turn=False, **how)
    odd = save(tmp_path / "odd", template="{{ raise_exception('roles\nmust alternate') }}")
    with pytest.raises(UsageError, match="does not take these messages: roles must alternate"):
        load(path, tokenizer=odd, multi_turn=False, **how)
    with pytest.raises(UsageError, match="endpoint=completions"):
        load(path, tokenizer=target, chat_template="client")


def test_a_folder_without_a_tokenizer_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no tokenizer that can be read"):
        load("synthetic", input_tokens=4, tokenizer=tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match=r"tokenizer\.json: not a tokenizer"):
        load("synthetic", input_tokens=4, tokenizer=tmp_path)


def test_a_chat_takes_no_token_ids(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": [1, 2]})
    prompts = load(path, endpoint="completions")
    assert prompts[0].token_ids == (1, 2)
    with pytest.raises(UsageError, match="'p-1' holds token ids"):
        check_prompts("chat", prompts)


def test_which_workloads_need_the_tokenizer(tmp_path: Path) -> None:
    assert not needs_tokenizer(WorkloadSection())
    assert needs_tokenizer(WorkloadSection(dataset="random"))
    assert needs_tokenizer(WorkloadSection(max_input_tokens=5))
    trace = write(tmp_path / "t.jsonl", {"timestamp": 0, "input_length": 5})
    assert needs_tokenizer(WorkloadSection(dataset=str(trace)))
    plain = write(tmp_path / "p.jsonl", {"prompt": "a"})
    assert not needs_tokenizer(WorkloadSection(dataset=str(plain)))


@pytest.mark.parametrize(
    ("fields", "needle"),
    [
        ({"dataset": "synthetic", "input_tokens": 4, "categories": ("a",)}, "workload.categories"),
        ({"dataset": "random", "input_tokens": 4, "max_input_tokens": 9}, "max_input_tokens"),
        ({"input_tokens": 4}, "workload.input_tokens: for workload.dataset=synthetic"),
        ({"prefix_tokens": 4}, "workload.prefix_tokens: for workload.dataset=synthetic"),
        (
            {"endpoint": "completions", "chat_template_kwargs": {"thinking": False}},
            "applies no template",
        ),
    ],
)
def test_a_key_that_would_do_nothing_is_refused(
    fields: dict[str, Any], needle: str, target: Path
) -> None:
    with pytest.raises(UsageError, match=needle):
        load_prompts(WorkloadSection(**fields), tokenizer=target)
