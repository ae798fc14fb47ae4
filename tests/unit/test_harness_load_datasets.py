"""Prompts read from every shape of file, and published sets by name."""

from __future__ import annotations

import csv
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prompt_files import load, write

from harness.errors import UsageError
from harness.load.prompts.datasets import load_prompts, read_jsonl
from harness.load.prompts.known import KNOWN, known_set
from harness.plan.schema import WorkloadSection


@pytest.mark.parametrize(
    ("line", "needle"),
    [
        ("{oops", "line 2: not JSON"),
        ("[1]", "line 2: an object"),
        ("{}", "line 2: nothing in it is asked: give one of 'messages', 'prompt', "),
        ('{"promt": "a"}', "it has promt; did you mean 'prompt' by 'promt'?"),
        ('{"text": "a"}', "it has text"),
        ('{"prompt": "a", "messages": []}', "line 2: give either"),
        ('{"prompt": ""}', "line 2: 'prompt'"),
        ('{"messages": []}', "line 2: 'messages'"),
        ('{"messages": [{"role": "user"}]}', "line 2: 'messages'"),
        ('{"prompt": "a", "max_tokens": 99999999999999999999}', "line 2: holds a whole number"),
        (
            '{"prompt": "a", "sampling": {"x": [1e3, -9223372036854775809]}}',
            "line 2: holds a whole",
        ),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, needle: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(UsageError) as caught:
        read_jsonl(path)
    assert needle in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_of_both_kinds_is_read(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    rows = [
        {"prompt": "a", "answer": 4, "id": 7, "category": "x"},
        {"messages": [{"role": "user", "content": "b\u2028c"}]},
    ]
    path.write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in rows) + "\n\n")
    first, second = read_jsonl(path)
    assert (first.id, first.answer, first.category) == ("7", "4", "x")
    assert second.messages == ({"role": "user", "content": "b\u2028c"},)
    assert second.id == "p-2"


@pytest.mark.parametrize(
    ("dataset", "needle"),
    [
        ("no/such.jsonl", "no such file"),
        ("random", "input_tokens=512"),
        ("gsm9k", "did you mean gsm8k"),
        ("demo", "demo pair"),
        ("", "no such file"),
    ],
)
def test_datasets_that_cannot_be(dataset: str, needle: str) -> None:
    with pytest.raises(UsageError, match=needle):
        load_prompts(WorkloadSection(dataset=dataset))


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("\n")
    with pytest.raises(UsageError, match="no prompt"):
        read_jsonl(path)


def test_what_a_row_says_of_its_request_is_kept(tmp_path: Path) -> None:
    first, second = load(
        write(
            tmp_path / "p.jsonl",
            {"prompt": [3, 4], "max_tokens": 9, "temperature": 0.5, "sampling": {"seed": 4}},
            {"custom_id": "r", "body": {"model": "m", "messages": [
                {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
            ], "max_completion_tokens": 7, "top_p": 0.9}},
        ),
        endpoint="completions",
    )  # fmt: skip
    assert (first.token_ids, first.max_tokens) == ((3, 4), 9)
    assert first.sampling == {"temperature": 0.5, "seed": 4}
    assert second.messages == ({"role": "user", "content": "a"},), "the answer is not asked"
    assert (second.id, second.max_tokens, second.sampling) == ("r", 7, {"top_p": 0.9})


SHAREGPT = [
    {"id": "x", "conversations": [
        {"from": "gpt", "value": "Hi."}, {"from": "human", "value": "One?"},
        {"from": "gpt", "value": "1"}, {"from": "human", "value": "Two?"}]},
    {"id": "x", "conversations": [{"from": "gpt", "value": "alone"}]},
    {"id": "x", "conversations": [
        {"from": "system", "value": "Be brief."}, {"from": "human", "value": "Three?"}]},
]  # fmt: skip


def test_sharegpt_asks_the_first_turn_and_the_later_ones_on_request(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(SHAREGPT))
    first, third = load(path)
    assert (first.id, first.text, first.turns) == ("x", "One?", ())
    assert third.id == "x-2"
    assert third.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Three?"},
    )
    first, _ = load(path, multi_turn=True)
    assert first.messages == ({"role": "user", "content": "One?"},)
    assert first.turns == ({"role": "user", "content": "Two?"},)


def test_question_files_keep_turns_and_categories(tmp_path: Path) -> None:
    path = write(
        tmp_path / "question.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."], "reference": []},
        {"question_id": 82, "category": "qa", "turns": ["Who?"]},
    )
    first, second = load(path)
    assert (first.id, first.category) == ("81", "writing")
    assert first.messages == ({"role": "user", "content": "Write."},)
    assert first.turns == ({"role": "user", "content": "Again."},)
    assert (second.text, second.turns) == ("Who?", ())
    assert load(path, multi_turn=False)[0].text == "Write."
    assert [p.id for p in load(path, categories=("qa",))] == ["82"]
    with pytest.raises(UsageError, match=r"no category 'writting'; .* did you mean writing"):
        load(path, categories=("writting",))


def test_turns_beside_messages_are_read(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "a"}], "turns": ["b", "c"]}
    [prompt] = load(write(tmp_path / "p.jsonl", row))
    assert [turn["content"] for turn in prompt.turns] == ["b", "c"]
    row["turns"] = [{"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    with pytest.raises(UsageError, match="line 1: 'turns' are what the user says"):
        load(write(tmp_path / "p.jsonl", row))


@pytest.mark.parametrize(
    ("row", "text", "answer", "category"),
    [
        ({"question": "2+2?", "answer": "2+2=<<2+2=4>>4\n#### 4"}, "2+2?", "4", "mathematics"),
        ({"problem": "x?", "answer": "\\frac{1}{2}", "subject": "Algebra", "unique_id": "t/1"},
         "x?", "\\frac{1}{2}", "Algebra"),
        ({"ID": "2024-I-1", "Problem": "x?", "Solution": "so", "Answer": 204}, "x?", "204",
         "mathematics"),
        ({"problem": "x?", "solution": "So \\boxed{\\sqrt{2}}."}, "x?", "\\sqrt{2}", "mathematics"),
        ({"task_id": "HumanEval/0", "prompt": "def f():", "canonical_solution": "1",
          "entry_point": "f", "test": "t"}, "def f():", None, "code"),
        ({"instruction": "Sum.", "input": "1 2", "output": "3"}, "Sum.\n\n1 2", None, None),
    ],
)  # fmt: skip
def test_published_sets_are_known_by_their_fields(
    tmp_path: Path, row: dict[str, Any], text: str, answer: str | None, category: str | None
) -> None:
    [prompt] = load(write(tmp_path / "set.jsonl", row))
    assert prompt.text is not None and prompt.text.startswith(text)
    assert (prompt.answer, prompt.category) == (answer, category)


def test_a_placeholder_of_speed_bench_is_no_prompt(tmp_path: Path) -> None:
    masked = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    with pytest.raises(UsageError, match="line 1: a placeholder"):
        load(write(tmp_path / "p.jsonl", {"question_id": "1", "turns": [masked]}))


def test_plain_text_is_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes("\ufeffone\r\n\n two words \n".encode())
    assert [(p.id, p.text) for p in load(path)] == [("p-1", "one"), ("p-3", "two words")]


def test_tables_are_read_by_their_column(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "p.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["Ask", "category"], ['a,\n"b"', "x"], ["007", "y"]])
    assert [(p.text, p.category) for p in load(path, column="Ask")] == [
        ('a,\n"b"', "x"), ("007", "y")
    ]  # fmt: skip
    with pytest.raises(UsageError, match=r"column=ask: no such column; .*did you mean Ask\?"):
        load(path, column="ask")
    with pytest.raises(UsageError, match=r"row 1: .*workload\.column; it has ask, category"):
        load(path)
    chat = [[{"role": "user", "content": "hi"}], [{"role": "user", "content": "ho"}]]
    table = pyarrow.table({"chat": chat, "turns": [["a", "b"], ["c"]]})
    parquet.write_table(table, tmp_path / "p.parquet")
    first, second = load(tmp_path / "p.parquet", column="chat")
    assert (first.messages, second.messages) == (tuple(chat[0]), tuple(chat[1]))
    assert [len(p.turns) for p in load(tmp_path / "p.parquet")] == [1, 0]


def test_a_csv_field_may_be_large(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["prompt"], ["y" * 3_000_000], ["z"]])
    assert [len(p.text or "") for p in load(path)] == [3_000_000, 1]


@pytest.mark.parametrize(
    ("name", "data", "needle"),
    [
        ("p.parquet", b"PAR no", "cannot be read as Parquet"),
        ("p.csv", b"", "holds no prompt"),
        ("p.csv", b"prompt\n", "holds no prompt"),
        ("p.csv", b"prompt,x\na,b,c\n", "cannot be read as CSV"),
        ("p.csv", b"prompt\n\xff\xfe\n", "UTF-?8|utf8|utf-8"),
        ("p.csv", b'prompt\n""\n', "row 1: 'prompt' is a text"),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": "\xff"}\n', "line 2: cannot be read as UTF-8"),
        ("p.jsonl", b"\xff", "line 1: cannot be read as UTF-8"),
        ("p.jsonl", b"[" * 100_000, "line 1: not JSON"),
        ("p.json", b"[{}", "p.json: not JSON"),
        ("p.json", b"[]", "holds no prompt"),
        ("p.json", b'[{"prompt": "a"}, 3]', "element 2: an object"),
        ("p.json", b'{"prompt": ""}', "line 1: 'prompt'"),
        ("p.jsonl", b'{"turns": []}', "line 1: 'turns'"),
        ("p.jsonl", b'{"conversations": [{"from": "human"}]}', "line 1: a conversation"),
        ("p.jsonl", b'{"prompt": [1, -1]}', "line 1: 'prompt' is a list of token ids"),
        ("p.jsonl", b'{"prompt": "a", "max_tokens": 0}', "line 1: 'max_tokens'"),
        ("p.jsonl", b'{"prompt": "a", "sampling": 1}', "line 1: 'sampling'"),
        ("p.txt", b" \n\n", "holds no prompt"),
    ],
)
def test_a_bad_file_is_one_clear_line(tmp_path: Path, name: str, data: bytes, needle: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(UsageError, match=needle) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@given(
    st.binary(max_size=200), st.sampled_from(["a.jsonl", "a.json", "a.csv", "a.parquet", "a.txt"])
)
def test_any_bytes_are_prompts_or_one_usage_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, name: str
) -> None:
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(data)
    try:
        assert load(path)
    except UsageError as error:
        assert str(path) in str(error)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["role", "content", "from", "value", "text", "body"]), inner, max_size=3
    ),
    max_leaves=8,
)  # fmt: skip
FIELDS = st.sampled_from(
    ["messages", "prompt", "token_ids", "conversations", "turns", "question", "problem", "answer",
     "solution", "instruction", "input", "id", "category", "max_tokens", "sampling", "body"]
)  # fmt: skip


@given(st.dictionaries(FIELDS, JSON, max_size=4), st.booleans())
def test_any_row_is_a_prompt_or_names_its_line(
    tmp_path_factory: pytest.TempPathFactory, row: dict[str, Any], multi_turn: bool
) -> None:
    path = write(tmp_path_factory.getbasetemp() / "row.jsonl", row)
    try:
        [prompt] = load(path, multi_turn=multi_turn, endpoint="completions")
    except UsageError as error:
        assert str(path) in str(error)
        return
    assert sum(v is not None for v in (prompt.text, prompt.messages, prompt.token_ids)) == 1
    assert all(turn["role"] == "user" or row.get("messages") for turn in prompt.turns)


def test_a_downloaded_folder_is_read_where_one_file_fits(tmp_path: Path) -> None:
    (tmp_path / "main").mkdir()
    write(tmp_path / "main" / "test-00000.jsonl", {"prompt": "t"})
    write(tmp_path / "main" / "train-00000.jsonl", {"prompt": "r"})
    assert [p.text for p in load(tmp_path, subset="main", split="test")] == ["t"]
    with pytest.raises(UsageError, match="several files may be meant"):
        load(tmp_path)
    with pytest.raises(UsageError, match="no file of prompts fits"):
        load(tmp_path, split="validation")


def fake_hub(monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[Any]:
    asked: list[Any] = []

    def load_dataset(*args: Any, **kwargs: Any) -> Any:
        asked.append((args, kwargs))
        if isinstance(answer, Exception):
            raise answer
        return answer

    library = types.ModuleType("datasets")
    library.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", library)
    return asked


def test_a_known_set_is_fetched_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fake_hub(monkeypatch, [{"question": "1+1?", "answer": "It is\n#### 2"}])
    [prompt] = load("GSM8K")
    assert asked == [(("openai/gsm8k", "main"), {"split": "test", "data_files": None})]
    assert (prompt.id, prompt.answer) == ("gsm8k-1", "2")
    load("gsm8k", split="train", subset="socratic")
    assert asked[1] == (("openai/gsm8k", "socratic"), {"split": "train", "data_files": None})


def test_a_set_that_cannot_be_fetched_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub(monkeypatch, ConnectionError("no route\nto hub"))
    with pytest.raises(UsageError, match=r"no route to hub\); fetch https://.* give its path"):
        load("aime")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match="pip install datasets"):
        load("mt_bench")
    with pytest.raises(UsageError, match=r"lies on no hub; fetch https://raw"):
        load("spec-bench")


def test_every_known_set_is_found_by_each_of_its_names() -> None:
    names = [name for one in KNOWN for name in (one.name, *one.aliases)]
    assert len(set(names)) == len(names)
    assert all(known_set(name.upper().replace("-", "_")) for name in names)
    assert known_set("nothing") is None
