"""Prompts read from every shape of file, chosen and dealt."""

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
from tiny_tokenizers import save

from harness.errors import UsageError
from harness.load.datasets import Prompt, allot, load_prompts, needs_tokenizer, read_jsonl
from harness.load.known import KNOWN, known_set
from harness.plan.schema import Length, WorkloadSection


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("target"))


def load(path: Path | str, **fields: Any) -> list[Prompt]:
    known = {k: fields.pop(k) for k in ("tokenizer", "seed", "context") if k in fields}
    return load_prompts(WorkloadSection(dataset=str(path), **fields), **known)


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@given(st.integers(1, 30), st.integers(0, 5), st.lists(st.integers(0, 12), min_size=1, max_size=4))
def test_allotment(size: int, warmup: int, needs: list[int]) -> None:
    prompts = [Prompt(id=str(i), text=str(i)) for i in range(size)]
    allotment = allot(prompts, warmup=warmup, needs=needs, seed=5)
    measured = [p.id for cell in allotment.cells for p in cell]
    assert [len(cell) for cell in allotment.cells] == needs
    assert len(allotment.warmup) == warmup
    assert not {p.text for p in allotment.warmup} & {p.text for c in allotment.cells for p in c}
    assert allotment.repeated == (len(set(measured)) < len(measured))
    assert allotment == allot(prompts, warmup=warmup, needs=needs, seed=5)


@pytest.mark.parametrize(
    ("line", "needle"),
    [
        ("{oops", "line 2: not JSON"),
        ("[1]", "line 2: an object"),
        ("{}", "line 2: give either"),
        ('{"prompt": "a", "messages": []}', "line 2: give either"),
        ('{"prompt": ""}', "line 2: 'prompt'"),
        ('{"messages": []}', "line 2: 'messages'"),
        ('{"messages": [{"role": "user"}]}', "line 2: 'messages'"),
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


def test_ids_are_dealt_and_the_warm_up_asks_others() -> None:
    prompts = [Prompt(id=str(i), token_ids=(i, i + 1, i + 2)) for i in range(3)]
    prompts.append(Prompt(id="same", token_ids=(7, 7)))
    allotment = allot(prompts, warmup=9, needs=[4], seed=0)
    measured = {p.token_ids for p in prompts}
    assert not allotment.repeated
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
    assert allotment.repeated
    assert not allot(prompts, warmup=2, needs=[4], seed=5).repeated
    assert allot(prompts, warmup=0, needs=[7], seed=5).repeated


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
    assert load(path, endpoint="completions")[0].token_ids == (1, 2)
    with pytest.raises(UsageError, match="'p-1' is a list of token ids"):
        load(path)


def test_which_workloads_need_the_tokenizer(tmp_path: Path) -> None:
    assert not needs_tokenizer(WorkloadSection())
    assert needs_tokenizer(WorkloadSection(dataset="random"))
    assert needs_tokenizer(WorkloadSection(max_input_tokens=5))
    trace = write(tmp_path / "t.jsonl", {"timestamp": 0, "input_length": 5})
    assert needs_tokenizer(WorkloadSection(dataset=str(trace)))
    plain = write(tmp_path / "p.jsonl", {"prompt": "a"})
    assert not needs_tokenizer(WorkloadSection(dataset=str(plain)))


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
