"""Traces: both styles, exact times, and the line that is wrong is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.load.schedule.trace import read_trace


def write(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_our_own_style_carries_prompts_and_lengths(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 10.5, "prompt": "a", "output_tokens": 7, "more": [1]},
        {"timestamp": 10.75, "messages": [{"role": "user", "content": "b"}], "input_tokens": 3},
    ]
    trace = read_trace(write(tmp_path / "t.jsonl", rows))
    assert trace.offsets_s == (0.0, 0.25)
    prompts = trace.prompts()
    assert prompts is not None
    assert [(p.id, p.text, p.max_tokens, p.input_tokens) for p in prompts] == [
        ("t-1", "a", 7, None),
        ("t-2", None, None, 3),
    ]
    assert prompts[1].messages == ({"role": "user", "content": "b"},)


def test_mooncake_style_is_in_milliseconds(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]},
        {"timestamp": 3054, "input_length": 6472, "output_length": 26, "hash_ids": [46, 2353]},
    ]
    trace = read_trace(write(tmp_path / "t.jsonl", rows))
    assert trace.offsets_s == (0.0, 3.054)
    assert trace.prompts() is None
    assert [(r.input_tokens, r.output_tokens) for r in trace.rows] == [
        (6955, 52),
        (6472, 26),
    ]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=50))
def test_times_are_exact_sorted_and_keep_their_line(
    tmp_path_factory: pytest.TempPathFactory, stamps: list[float]
) -> None:
    path = write(tmp_path_factory.mktemp("t") / "t.jsonl", [{"timestamp": s} for s in stamps])
    trace = read_trace(path)
    ordered = sorted(stamps)
    assert list(trace.offsets_s) == [s - ordered[0] for s in ordered]
    assert [stamps[row.line - 1] for row in trace.rows] == ordered


@pytest.mark.parametrize(
    ("line", "needle"),
    [
        ("{oops", "line 3: not JSON"),
        ("[1]", "line 3: an object is wanted, not a list"),
        ("{}", "line 3: 'timestamp' is missing"),
        ('{"timestamp": "noon"}', "line 3: 'timestamp': a number is wanted, not a text"),
        ('{"timestamp": 1e300}', "line 3: 'timestamp'"),
        ('{"timestamp": 1, "prompt": "a", "messages": []}', "line 3: give either"),
        ('{"timestamp": 1, "prompt": ""}', "line 3: 'prompt'"),
        ('{"timestamp": 1, "messages": []}', "line 3: 'messages'"),
        ('{"timestamp": 1, "messages": [{"role": "user"}]}', "line 3: 'messages'"),
        (
            '{"timestamp": 1, "input_tokens": 0}',
            "line 3: 'input_tokens': a whole number >= 1 is wanted",
        ),
        ('{"timestamp": 1, "prompt": "\\ud800"}', "line 3: "),
        ('{"timestamp": 1, "prompt": "one asks"}', "line 3: a prompt in every line"),
        ('{"timestamp": 1, "x": ' + "[" * 100_000, "line 3: not JSON"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, needle: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 1}\n\n' + line + "\n")
    with pytest.raises(UsageError) as caught:
        read_trace(path)
    assert needle in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "needle"),
    [
        (b"", "holds no request"),
        (b"\xff\xfe{}", "cannot be read"),
        (b"3\n", "line 1: an object with a 'timestamp'"),
        (b'{"timestamp": 1, "output_length": 5}\n', "line 1: 'input_length' is missing"),
        (b"{'timestamp': 1}\n", "line 1: not JSON"),
    ],
)
def test_files_that_are_no_trace(tmp_path: Path, content: bytes, needle: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=needle):
        read_trace(path)


def test_a_missing_file() -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_trace("no/such.jsonl")
