"""One row of a data set, in any shape it is published in, as a prompt."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import msgspec

from harness.errors import UsageError, one_line
from harness.load.prompts.correct import GSM8K_MARK, last_boxed
from harness.load.prompts.prompt import Prompt

SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "tools", "tool_choice", "response_format",
)  # fmt: skip
LIMIT_FIELDS = ("max_tokens", "max_completion_tokens")
ID_FIELDS = ("id", "question_id", "custom_id", "task_id", "unique_id", "problem_idx")
SHAPES = "'messages', 'prompt', 'conversations', 'turns', 'question', 'problem' or 'instruction'"
ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "assistant": "assistant", "bard": "assistant", "bing": "assistant", "system": "system",
}  # fmt: skip
MASKED = "FULL BENCHMARK DATA SHOULD BE FETCHED"
SHOW_THE_ANSWER = "\n\nReason step by step, and put the final answer within \\boxed{}."


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """How rows are read: the column to take, and whether later turns are asked (None: by shape)."""

    column: str | None = None
    multi_turn: bool | None = None


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """What a row's shape says: the question itself, and what goes with that shape."""

    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    token_ids: tuple[int, ...] | None = None
    turns: tuple[dict[str, Any], ...] = ()
    answer: str | None = None
    category: str | None = None


def prompt_of(row: Any, where: str, default_id: str, how: Reading) -> Prompt | None:
    """The prompt in a row; None where a ShareGPT conversation holds nothing that a user said.

    Raises `UsageError` naming `where`.
    """
    if not isinstance(row, dict) or not all(isinstance(key, str) for key in row):
        raise UsageError(f"{where}: an object with {SHAPES} is wanted")
    if isinstance(row.get("body"), dict):  # a line of OpenAI's batch files
        row = {**row, **row["body"]}
    fields = {key.lower(): value for key, value in row.items()}
    content = _of_column(row, where, how) if how.column else _of_shape(fields, where, how)
    if content is None:
        return None
    identity = next((fields[k] for k in ID_FIELDS if fields.get(k) is not None), default_id)
    category = next((fields[k] for k in ("category", "subject") if fields.get(k)), content.category)
    answer = content.answer
    if answer is None and isinstance(fields.get("answer"), str | int | float | bool):
        answer = str(fields["answer"])
    return Prompt(
        id=one_line(str(identity), 200),
        category=None if category is None else one_line(str(category), 200),
        messages=content.messages,
        text=content.text,
        token_ids=content.token_ids,
        answer=answer,
        turns=content.turns + _turns(fields, where, how),
        max_tokens=_limit(fields, where),
        sampling=_sampling(fields, where),
    )


def check_column(how: Reading, names: list[str], where: str) -> None:
    """Raise `UsageError` where there is no such column, naming those there are."""
    if how.column is None or how.column in names:
        return
    near = difflib.get_close_matches(how.column, names, n=1, cutoff=0.5)
    raise UsageError(
        f"{where}: workload.column={how.column}: no such column; there are "
        f"{one_line(', '.join(names), 200)}" + (f"; did you mean {near[0]}?" if near else "")
    )


def _of_column(row: dict[str, Any], where: str, how: Reading) -> Content | None:
    assert how.column is not None
    check_column(how, list(row), where)
    value = row[how.column]
    if isinstance(value, list) and value and all(isinstance(v, str) for v in value):
        return _questions(value, where, how)
    if isinstance(value, list) and value and isinstance(value[0], dict) and "from" in value[0]:
        return _sharegpt(value, where, how)
    return _prompt_value(value, where, f"column '{how.column}'")


def _of_shape(fields: dict[str, Any], where: str, how: Reading) -> Content | None:
    messages, prompt = fields.get("messages"), fields.get("prompt")
    ids = fields.get("token_ids")
    given = [v for v in (messages, prompt, ids) if v is not None]
    if len(given) > 1:
        raise UsageError(f"{where}: give either 'messages' or 'prompt', not several of them")
    if messages is not None:
        return Content(messages=_messages(messages, where, "'messages'"))
    if ids is not None:
        return Content(token_ids=_token_ids(ids, where, "'token_ids'"))
    if prompt is not None:
        content = _prompt_value(prompt, where, "'prompt'")
        humaneval = "canonical_solution" in fields or "entry_point" in fields
        return msgspec.structs.replace(content, category="code" if humaneval else None)
    if fields.get("conversations") is not None:
        return _sharegpt(fields["conversations"], where, how)
    if fields.get("turns") is not None:
        return _questions(fields["turns"], where, how)
    for read in (_mathematics, _instruction):
        content_or_none = read(fields)
        if content_or_none is not None:
            return content_or_none
    has = one_line(", ".join(fields), 200) or "nothing"
    raise UsageError(
        f"{where}: nothing in it is asked: give one of {SHAPES}, or name the column with "
        f"workload.column; it has {has}{_meant(fields)}"
    )


def _meant(fields: dict[str, Any]) -> str:
    """The field that was perhaps meant by one that is not known."""
    words = SHAPES.replace(" or ", ", ").replace("'", "").split(", ")
    for name in fields:
        near = difflib.get_close_matches(name, words, n=1, cutoff=0.75)
        if near and near[0] != name:
            return f"; did you mean '{near[0]}' by '{one_line(name, 40)}'?"
    return ""


def _prompt_value(value: Any, where: str, name: str) -> Content:
    if isinstance(value, str) and value.strip():
        return Content(text=_unmasked(value, where))
    if isinstance(value, list) and value and type(value[0]) is int:
        return Content(token_ids=_token_ids(value, where, name))
    if isinstance(value, list) and value:
        return Content(messages=_messages(value, where, name))
    raise UsageError(f"{where}: {name} is a text that is not empty")


def _token_ids(value: Any, where: str, name: str) -> tuple[int, ...]:
    good = isinstance(value, list) and all(type(v) is int and 0 <= v < 2**31 for v in value)
    if not (good and value):
        raise UsageError(f"{where}: {name} is a list of token ids that is not empty")
    return tuple(value)


def _messages(messages: Any, where: str, name: str) -> tuple[dict[str, Any], ...]:
    """The messages up to the last one that is not the assistant's: what is to be answered.

    A file for fine-tuning ends each row with the answer, which is not asked.
    """
    good = isinstance(messages, list) and all(
        isinstance(m, dict) and "role" in m and "content" in m for m in messages
    )
    if not (good and messages):
        raise UsageError(f"{where}: {name} is a list of objects with 'role' and 'content'")
    for message in messages:
        role, content = message["role"], message["content"]
        silent = content is None and role == "assistant"  # one that calls a tool
        if not isinstance(role, str) or not (isinstance(content, str | list) or silent):
            raise UsageError(f"{where}: a message's 'role' and 'content' are texts")
        if isinstance(content, str):
            _unmasked(content, where)
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    return tuple(messages[:end] or messages)


def _sharegpt(conversation: Any, where: str, how: Reading) -> Content | None:
    good = isinstance(conversation, list | tuple) and all(
        isinstance(said, dict) and isinstance(said.get("value"), str) for said in conversation
    )
    if not good:
        raise UsageError(f"{where}: a conversation is a list of objects with 'from' and 'value'")
    said = [(ROLES.get(str(s.get("from")).lower()), s["value"]) for s in conversation]
    users = [text for role, text in said if role == "user" and text.strip()]
    if not users:
        return None
    turns = tuple(_user(text) for text in users[1:]) if how.multi_turn else ()
    if said[0][0] == "system" and said[0][1].strip():
        system = {"role": "system", "content": said[0][1]}
        return Content(messages=(system, _user(users[0])), turns=turns)
    if turns:
        return Content(messages=(_user(users[0]),), turns=turns)
    return Content(text=users[0])


def _questions(turns: Any, where: str, how: Reading) -> Content:
    """Of a question file (MT-Bench, Spec-Bench, SPEED-Bench): what the user says, turn by turn."""
    if not (isinstance(turns, list) and turns and _texts(turns)):
        raise UsageError(f"{where}: 'turns' is a list of texts that are not empty")
    for text in turns:
        _unmasked(text, where)
    if len(turns) == 1 or how.multi_turn is False:
        return Content(text=turns[0])
    return Content(messages=(_user(turns[0]),), turns=tuple(_user(text) for text in turns[1:]))


def _turns(fields: dict[str, Any], where: str, how: Reading) -> tuple[dict[str, Any], ...]:
    """The later turns that a row gives beside its 'messages'."""
    value = fields.get("turns")
    if value is None or fields.get("messages") is None or how.multi_turn is False:
        return ()
    if isinstance(value, list) and _texts(value):
        return tuple(_user(text) for text in value)
    turns = _messages(value, where, "'turns'")
    if len(turns) < len(value) or any(turn["role"] == "assistant" for turn in turns):
        raise UsageError(f"{where}: 'turns' are what the user says; the answers come in between")
    return turns


def _mathematics(fields: dict[str, Any]) -> Content | None:
    """GSM8K (question, worked answer after "####"), MATH and AIME (problem, answer or solution)."""
    question, answer = fields.get("question", fields.get("problem")), fields.get("answer")
    if not isinstance(question, str) or not question.strip():
        return None
    solution = fields.get("solution")
    if isinstance(answer, str) and GSM8K_MARK in answer:
        answer = answer.rpartition(GSM8K_MARK)[2].strip()
    elif answer is None and isinstance(solution, str):
        answer = last_boxed(solution)
    elif "problem" not in fields:
        return Content(text=question)  # some other set of questions and answers
    return Content(
        text=question + SHOW_THE_ANSWER,
        answer=None if answer is None else str(answer),
        category="mathematics",
    )


def _instruction(fields: dict[str, Any]) -> Content | None:
    """Alpaca: an instruction, and often what it is to be applied to."""
    instruction, given = fields.get("instruction"), fields.get("input")
    if not isinstance(instruction, str) or not instruction.strip():
        return None
    more = f"\n\n{given}" if isinstance(given, str) and given.strip() else ""
    return Content(text=instruction + more)


def _limit(fields: dict[str, Any], where: str) -> int | None:
    for name in LIMIT_FIELDS:
        value = fields.get(name)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise UsageError(f"{where}: '{name}' is a whole number from 1")
        return value
    return None


def _sampling(fields: dict[str, Any], where: str) -> dict[str, Any]:
    said = fields.get("sampling") or {}
    if not isinstance(said, dict):
        raise UsageError(f"{where}: 'sampling' is an object of request fields")
    plain = {k: fields[k] for k in SAMPLING_FIELDS if fields.get(k) is not None}
    return {**plain, **said}


def _unmasked(text: str, where: str) -> str:
    if text.startswith(MASKED):
        raise UsageError(
            f"{where}: a placeholder stands for the prompt, which SPEED-Bench may not publish; "
            "prepare the set with its own prepare_data.py and give the path of what that writes"
        )
    return text


def _texts(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) and value.strip() for value in values)


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}
