"""The demo's text: right answers, held-out questions, the chat template."""

import json
import re
from itertools import islice
from random import Random

import jinja2
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from training.demo import corpus, stories, tasks
from training.demo.prompts import demo_dialogues, is_degenerate, is_right, write_prompts
from training.demo.tokenizer import CHAT_TEMPLATE, CONTROL, THINKING, train_tokenizer

SEEDS = st.integers(0, 2**32)


def test_no_held_out_question_is_trained_on() -> None:
    trained = {
        turn.prompt
        for dialogue in islice(corpus.training_dialogues(1), 4000)
        for turn in dialogue.turns
    }
    asked = {turn.prompt for dialogue in demo_dialogues() for turn in dialogue.turns}
    assert not trained & asked
    assert not any(corpus.is_held_out(prompt) for prompt in trained)
    assert all(corpus.is_held_out(prompt) for prompt in asked)


def test_prompts_are_many_distinct_and_of_every_kind() -> None:
    dialogues = demo_dialogues()
    assert len({d.last.prompt for d in dialogues}) == len(dialogues) == 160
    assert 20 <= sum(len(d.turns) == 2 for d in dialogues) <= 60
    kinds = {d.last.category for d in dialogues}
    assert {"arithmetic", "sorting", "counting", "table", "story", "naming", "code"} <= kinds


def test_the_stream_is_seeded() -> None:
    first = list(islice(corpus.training_documents(3), 50))
    assert first == list(islice(corpus.training_documents(3), 50))
    assert first != list(islice(corpus.training_documents(4), 50))


def test_a_quarter_of_the_dialogues_has_two_turns() -> None:
    dialogues = list(islice(corpus.training_dialogues(5), 2000))
    assert 0.2 < sum(len(d.turns) == 2 for d in dialogues) / len(dialogues) < 0.3


@given(SEEDS)
def test_arithmetic_is_right(seed: int) -> None:
    for generator in (tasks.addition, tasks.subtraction, tasks.multiplication):
        turn = generator(Random(seed))
        a, b = map(int, re.findall(r"\d+", turn.prompt))
        assert int(turn.answer) in (a + b, a - b, a * b)
        for left, right in re.findall(r"([\d+-]+)=(\d+)", turn.reasoning):
            assert eval(left) == int(right)  # the generators' own digits and signs


@given(SEEDS)
def test_loops_print_what_they_say(seed: int) -> None:
    turn = tasks.loop_code(Random(seed))
    printed: list[object] = []
    exec(turn.prompt.split("\n", 1)[1], {"print": printed.append, "range": range})
    assert printed == [int(turn.answer)]


@given(SEEDS)
def test_written_code_is_a_function(seed: int) -> None:
    turn = tasks.write_code(Random(seed))
    space: dict[str, object] = {}
    exec(turn.answer, space)
    name = re.match(r"Write (\w+)", turn.prompt)
    assert name and callable(space[name[1]])


@given(SEEDS)
def test_sorting_and_counting(seed: int) -> None:
    turn = tasks.sorting(Random(seed))
    numbers = [int(n) for n in re.findall(r"\d+", turn.prompt)]
    assert turn.answer == " ".join(map(str, sorted(numbers, reverse="high to" in turn.prompt)))
    turn = tasks.letter_count(Random(seed))
    assert int(turn.answer) == len(re.findall(r" [a-h]\b", turn.prompt))
    turn = tasks.item_count(Random(seed))
    assert int(turn.answer) == len(turn.prompt.split(":")[1].split())


@given(SEEDS)
def test_tables_and_sequences(seed: int) -> None:
    turn = tasks.table(Random(seed))
    prices = re.findall(r"[a-z]+ (\d)", turn.prompt)
    assert turn.answer == prices[-1 if "last" in turn.prompt else 0]
    turn = tasks.sequence(Random(seed))
    start, step, times = map(int, re.findall(r"\d+", turn.prompt))
    assert int(turn.answer) == start + step * times


@given(SEEDS)
def test_dates_count_round_the_cycle(seed: int) -> None:
    turn = tasks.calendar(Random(seed))
    steps = int(re.search(r"\d+", turn.prompt)[0])  # type: ignore[index]
    assert len(turn.reasoning.split(", ")) == steps
    assert turn.reasoning.endswith(turn.answer)


@given(SEEDS)
def test_stories_have_no_right_answer(seed: int) -> None:
    for generator in (stories.story, stories.naming):
        assert not generator(Random(seed)).checked


@settings(max_examples=20)
@given(SEEDS)
def test_template_renders_what_is_trained_on(seed: int) -> None:
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(CHAT_TEMPLATE)
    (dialogue,) = corpus.held_out_dialogues(seed, 1)
    rendered = template.render(messages=dialogue.messages(), add_generation_prompt=True)
    assert rendered == corpus.prompt_text(dialogue)
    assert rendered.endswith("<|im_assistant|>assistant<|im_middle|><think>")


def test_template_drops_the_reasoning_of_earlier_turns() -> None:
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(CHAT_TEMPLATE)
    said = [{"role": "system", "content": "s"}, {"role": "assistant", "content": "why</think>x"}]
    assert template.render(messages=said) == (
        "<|im_system|>system<|im_middle|>s<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think></think>x<|im_end|>"
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "<|im_middle|>ab<|im_end|>" in template.render(
        messages=[{"role": "user", "content": parts}]
    )


@pytest.fixture(scope="module")
def tokenizer():  # type: ignore[no-untyped-def]
    return train_tokenizer(768, 1, documents=800)


def test_tokenizer_has_single_digits_and_whole_control_tokens(tokenizer) -> None:  # type: ignore[no-untyped-def]
    assert tokenizer.get_vocab_size() == 768
    tokens = tokenizer.encode("3047").tokens
    assert tokens == ["3", "0", "4", "7"]
    for control in (*CONTROL, *THINKING):
        assert len(tokenizer.encode(control).ids) == 1


@settings(max_examples=50)
@given(text=st.text(max_size=60))
@example(text="a<|im_assistant|>b </think>")
def test_tokenizer_is_lossless(tokenizer, text: str) -> None:  # type: ignore[no-untyped-def]
    # Drawn texts may spell a control token: it is lost only where it is asked to be left out.
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_think_tokens_stay_when_special_tokens_are_skipped(tokenizer) -> None:  # type: ignore[no-untyped-def]
    ids = tokenizer.encode("a</think>b<|im_end|>").ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a</think>b"


def test_prompt_lines_and_marking(tmp_path) -> None:  # type: ignore[no-untyped-def]
    dialogues = corpus.held_out_dialogues(1, 30)
    write_prompts(dialogues, tmp_path / "prompts.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert [set(line) for line in lines] == [{"id", "category", "messages", "answer"}] * 30
    for line, dialogue in zip(lines, dialogues, strict=True):
        assert line["messages"][-1] == {"role": "user", "content": dialogue.last.prompt}
        assert (line["answer"] is None) == (not dialogue.last.checked)
        assert is_right(corpus.reply_text(dialogue.last), dialogue.last.answer)
    assert not is_right("1</think>2<|im_end|>", "1")


def test_degenerate_means_a_loop() -> None:
    assert is_degenerate([5, 6, *[7, 8, 9] * 4])
    assert is_degenerate([1] * 12)
    assert not is_degenerate([1] * 8)
    assert not is_degenerate(list(range(40)))
