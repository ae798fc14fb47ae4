"""The parser of server-sent events, beside the plain way to write one."""

from __future__ import annotations

import codecs
from typing import Any

from streams import reads, side_by_side

from harness.load.streaming.sse import SseParser


def plain(pieces: list[bytes]) -> list[tuple[str, str]]:
    """Decode, split into lines, collect fields: complete, and nothing more thought about."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    events: list[tuple[str, str]] = []
    data: list[str] = []
    kind = tail = ""
    for piece in pieces:
        text = tail + decoder.decode(piece)
        lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        tail = lines.pop()
        for line in lines:
            if line == "":
                if data:
                    events.append(("\n".join(data), kind))
                data, kind = [], ""
            elif not line.startswith(":"):
                name, _, value = line.partition(":")
                value = value[1:] if value.startswith(" ") else value
                if name == "data":
                    data.append(value)
                elif name == "event":
                    kind = value
    return events


def parse(pieces: list[bytes]) -> int:
    """All events of a stream through our parser; how many."""
    parser = SseParser()
    return sum(len(parser.feed(piece)) for piece in pieces) + len(parser.finish())


def split(pieces: list[bytes], size: int) -> list[bytes]:
    """The same bytes in reads of `size`."""
    whole = b"".join(pieces)
    return [whole[i : i + size] for i in range(0, len(whole), size)]


def test_one_event_a_read(benchmark: Any) -> None:
    pieces = reads()
    events = benchmark(parse, pieces)
    assert events == len(plain(pieces)) == 1002
    ratio = side_by_side(lambda: parse(pieces), lambda: plain(pieces))
    benchmark.extra_info["over the plain parser"] = round(ratio, 3)
    benchmark.extra_info["µs an event"] = round(1e6 * benchmark.stats["min"] / events, 3)
    assert ratio <= 1.0  # what a live stream is like


def test_reads_that_end_anywhere(benchmark: Any) -> None:
    pieces = split(reads(), 177)
    assert benchmark(parse, pieces) == 1002
    ratio = side_by_side(lambda: parse(pieces), lambda: plain(pieces))
    benchmark.extra_info["over the plain parser"] = round(ratio, 3)
    assert ratio <= 1.25


def test_many_events_a_read(benchmark: Any) -> None:
    pieces = split(reads(), 65_536)
    assert benchmark(parse, pieces) == 1002
    ratio = side_by_side(lambda: parse(pieces), lambda: plain(pieces))
    benchmark.extra_info["over the plain parser"] = round(ratio, 3)
    assert ratio <= 1.75  # no live stream, only a backlog
