"""An answer by its ids, by a reasoning field or by inline think tokens: one and the same sample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_samples import FORGETFUL, target

from harness.errors import UsageError
from harness.load.streaming.answer import split_reasoning
from training.generate.text import TargetText, end_token_ids, read_text

MESSAGES = [{"role": "user", "content": "The answer is 42"}]
WORDS = st.text("abc 12.\n", max_size=12)


@pytest.fixture(scope="module")
def keeping(tmp_path_factory: pytest.TempPathFactory) -> TargetText:
    return read_text(target(tmp_path_factory.mktemp("keeping")))


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> TargetText:
    return read_text(target(tmp_path_factory.mktemp("forgetful"), FORGETFUL))


def rebuilt(
    text: TargetText,
    served: tuple[str, str | None],
    finish: str = "stop",
    count: int | None = None,
    **variables: Any,
) -> str:
    prompt = text.prompt_ids(MESSAGES, variables)
    ids = text.rebuilt((prompt, MESSAGES, variables), served, finish, count)
    return text.decode(ids)


def test_the_template_wraps_what_it_keeps(keeping: TargetText) -> None:
    assert rebuilt(keeping, ("it is 3", "a b c")) == "<think>\na b c\n</think>\n\nit is 3<|end|>"
    opened = rebuilt(keeping, ("it is 3", "a b c"), thinking=True)
    assert opened == "a b c\n</think>\n\nit is 3<|end|>"
    assert rebuilt(keeping, ("it is 3", None)) == "it is 3<|end|>"


def test_what_the_template_forgets_is_wrapped_all_the_same(forgetful: TargetText) -> None:
    assert rebuilt(forgetful, ("it is 3", "a b c")) == "a b c</think>it is 3<|end|>"
    assert rebuilt(forgetful, ("it is 3", None)) == "</think>it is 3<|end|>"


def test_a_cut_answer_has_no_end(keeping: TargetText, forgetful: TargetText) -> None:
    assert rebuilt(forgetful, ("it is", "a b"), "length") == "a b</think>it is"
    assert rebuilt(forgetful, ("", "a b"), "length") == "a b"
    assert rebuilt(keeping, ("", "a b"), "length") == "<think>a b"
    assert rebuilt(keeping, ("it is", None), "length") == "it is"


def test_the_servers_count_decides_between_the_ways(forgetful: TargetText) -> None:
    ways = ["</think>it is 3<|end|>", "it is 3<|end|>"]
    for way in ways:
        assert rebuilt(forgetful, ("it is 3", None), count=len(forgetful.encode(way))) == way


@given(reasoning=WORDS, answer=WORDS.filter(str.strip))
def test_a_field_and_inline_think_tokens_give_the_same(
    forgetful: TargetText, reasoning: str, answer: str
) -> None:
    inline = split_reasoning(f"{reasoning}</think>{answer}", None)
    assert inline == (answer, reasoning)
    prompt = forgetful.prompt_ids(MESSAGES, {})
    ids = forgetful.encode(f"{reasoning}</think>{answer}<|end|>")
    assert rebuilt(forgetful, inline) == forgetful.decode(ids)
    parts = forgetful.parts(prompt, ids)
    assert (parts.reasoning, parts.answer) == (reasoning, answer)
    assert forgetful.gives(ids, reasoning + answer)
    assert forgetful.gives(ids, f"<think>{reasoning}</think>{answer}")
    assert not forgetful.gives(ids, reasoning + answer + "x")


def test_parts_of_answers_without_and_with_open_thought(
    keeping: TargetText, forgetful: TargetText
) -> None:
    plain = keeping.prompt_ids(MESSAGES, {})
    opened = forgetful.prompt_ids(MESSAGES, {})
    assert forgetful.opened(opened) and not keeping.opened(plain)
    short = [{"role": "assistant", "content": ""}]  # an earlier thought, closed, stands near
    assert forgetful.opened(forgetful.prompt_ids(short, {}))
    assert not forgetful.opened([*opened, forgetful.think_ids[1] or 0])
    assert keeping.parts(plain, keeping.encode("it is 3<|end|>")).reasoning is None
    assert keeping.parts(plain, keeping.encode("<think>a b")) == ("<think>a b", "a b", None)
    assert forgetful.parts(opened, forgetful.encode("a b")) == ("a b", "a b", None)
    assert forgetful.parts(opened, []) == ("", "", None)


def test_end_tokens_come_from_every_config(tmp_path: Path) -> None:
    folder = target(tmp_path / "t")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] = {"eos_token_id": [7, 8]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert end_token_ids(folder) == tuple(sorted([config["eos_token_id"], 7, 8, 9]))
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="names no eos_token_id"):
        end_token_ids(folder)


def test_a_target_without_a_template_is_told(tmp_path: Path) -> None:
    folder = target(tmp_path / "t")
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UsageError, match="no chat template"):
        read_text(folder).prompt_ids(MESSAGES, {})
