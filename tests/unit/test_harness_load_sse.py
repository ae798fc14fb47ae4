"""The SSE parser: any split of any valid stream gives the same events."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.load.streaming.sse import Event, SseParser

NO_BREAKS = st.text(
    st.characters(blacklist_characters="\r\n\x00", blacklist_categories=("Cs",)), max_size=20
)
DATA = st.lists(NO_BREAKS, min_size=1, max_size=3)


def parse(reads: list[bytes]) -> list[Event]:
    parser = SseParser()
    events = [event for read in reads for event in parser.feed(read)]
    return events + parser.finish()


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[Event]]:
    """A valid stream with mixed line ends, comments and other fields, and its events."""
    out, expected = b"", []
    for _ in range(draw(st.integers(0, 6))):
        ends = st.sampled_from([b"\n", b"\r\n", b"\r"])
        kind = draw(st.sampled_from(["", "error", "délta"]))
        if draw(st.booleans()):
            out += b": " + draw(NO_BREAKS).encode() + draw(ends)
        if kind:
            out += b"event: " + kind.encode() + draw(ends)
        if draw(st.booleans()):
            out += b"id: 7" + draw(ends)
        lines = draw(DATA)
        for line in lines:
            out += b"data: " + line.encode() + draw(ends)
        # A CR that ends the last data line followed by LF would be one line end, not two.
        out += b"\n\n" if not out.endswith(b"\r") else b"\r"
        expected.append(Event("\n".join(lines).encode(), kind.encode()))
    return out, expected


@given(streams(), st.lists(st.integers(0, 400), max_size=30))
def test_any_split_gives_the_same_events(
    stream: tuple[bytes, list[Event]], cuts: list[int]
) -> None:
    raw, expected = stream
    edges = sorted({0, len(raw), *(c for c in cuts if c < len(raw))})
    reads = [raw[a:b] for a, b in itertools.pairwise(edges)]
    assert parse(reads) == expected


@given(streams())
def test_byte_by_byte(stream: tuple[bytes, list[Event]]) -> None:
    raw, expected = stream
    assert parse([raw[i : i + 1] for i in range(len(raw))]) == expected


@pytest.mark.parametrize(
    ("raw", "data"),
    [
        (b"data: a\n\ndata:b\n\n", [b"a", b"b"]),
        (b"data:  two spaces\n\n", [b" two spaces"]),
        (b"\xef\xbb\xbfdata: after a BOM\n\n", [b"after a BOM"]),
        (b"data\n\n", [b""]),
        (b"event: ping\n\ndata: x\n\n", [b"x"]),
        (b"data: never closed", [b"never closed"]),
        (b"data: a: b\r\n\r\n", [b"a: b"]),
        (b": only a comment\n\n", []),
        (b"", []),
    ],
)
def test_single_cases(raw: bytes, data: list[bytes]) -> None:
    assert [event.data for event in parse([raw])] == data


def test_an_event_is_handed_out_as_soon_as_its_blank_line_is_there() -> None:
    parser = SseParser()
    assert parser.feed(b"data: x\r") == []
    assert parser.feed(b"\n\r") == [Event(b"x")]
    assert parser.feed(b"\ndata: y\n\n") == [Event(b"y")]
