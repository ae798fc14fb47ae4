"""Files as the documents in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.exchange.reading import check_beginning, documents

FILE = Path("results.json")
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9)
VALUES = (
    PLAIN | st.lists(PLAIN, max_size=2) | st.dictionaries(st.text(max_size=3), PLAIN, max_size=2)
)
OBJECTS = st.lists(st.dictionaries(st.text(max_size=3), VALUES, max_size=2), min_size=1, max_size=3)


@given(OBJECTS, st.sampled_from(["", "\n", "\r\n", "\n\n  "]), st.sampled_from([None, 1]))
def test_objects_behind_each_other_are_all_read(
    objects: list[dict[str, object]], between: str, indent: int | None
) -> None:
    text = between.join(json.dumps(one, indent=indent) for one in objects)
    assert documents(text.encode(), FILE) == objects


@given(OBJECTS)
def test_a_list_is_its_objects(objects: list[dict[str, object]]) -> None:
    assert documents(json.dumps(objects).encode("utf-8-sig"), FILE) == objects


@given(st.binary(max_size=60) | st.text(alphabet='{}[]",: \n0eaN', max_size=40).map(str.encode))
def test_any_bytes_are_read_or_refused_in_one_line_that_names_the_file(data: bytes) -> None:
    try:
        found = documents(data, FILE)
    except UsageError as error:
        assert str(error).startswith("results.json: ") and "\n" not in str(error)
    else:
        assert found and all(isinstance(one, dict) for one in found)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "the file is empty"),
        (" \n", "the file is empty"),
        ("[]", "an empty list"),
        ('{"a": 1}\n{"a": 2\n', "line 3: not JSON"),
        ('{"a": 1}\n\nnope', "line 3: not JSON"),
        ('{"a": 1}\n17\n', "line 2: JSON objects are wanted, not 17"),
        ('[{"a": 1}, "x"]', "line 1: JSON objects are wanted, not 'x'"),
        ("[" * 100_000, "line 1: nested too deeply"),
        ("9" * 5000, "line 1: Exceeds the limit"),
    ],
)
def test_what_is_broken_is_told_with_its_line(text: str, wanted: str) -> None:
    with pytest.raises(UsageError, match=wanted.replace("[", r"\[")):
        documents(text.encode(), FILE)


def test_what_is_no_text_is_told() -> None:
    with pytest.raises(UsageError, match="not a text in UTF-8"):
        documents(b'{"a": "\xff"}', FILE)


@pytest.mark.parametrize("begin", [b"\x7fELF\x02", b"# Notes", b"\x00" * 5000])
def test_a_file_of_another_kind_is_refused_by_its_beginning(tmp_path: Path, begin: bytes) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(begin)
    with pytest.raises(UsageError, match="not JSON; it begins with"):
        check_beginning(path)


def test_beginnings_of_results_pass(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for begin in (b'{"a"', b" \n[{", b'\xef\xbb\xbf{"', b"PAR1", b"metric,value,run_id\r\n"):
        path.write_bytes(begin)
        check_beginning(path)
