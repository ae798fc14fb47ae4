"""A whole answer, from its reads to its record, beside reading its JSON alone."""

from __future__ import annotations

import json
from typing import Any

from streams import reads, side_by_side

from harness.load.streaming.answer import Answer, AnswerReader


def read_answer(pieces: list[bytes]) -> Answer:
    """All pieces of a stream through the reader that a request uses."""
    reader = AnswerReader()
    reader.head(200, {b"content-type": b"text/event-stream; charset=utf-8"})
    for i, piece in enumerate(pieces):
        reader.piece(i, piece)
    return reader.answer()


def json_alone(pieces: list[bytes]) -> int:
    """The standard library's JSON of every event; nothing kept."""
    tokens = 0
    for piece in pieces:
        for event in piece.split(b"\n\n"):
            if event.startswith(b"data: {"):
                payload = json.loads(event[6:])
                for choice in payload["choices"]:
                    tokens += len(choice["token_ids"])
    return tokens


def test_a_whole_answer(benchmark: Any) -> None:
    pieces = reads()
    answer = benchmark(read_answer, pieces)
    assert answer.error is None
    assert answer.output_tokens == json_alone(pieces)
    assert answer.chunk_tokens is not None and answer.chunk_tokens[:4] == (1, 2, 3, 1)
    ratio = side_by_side(lambda: read_answer(pieces), lambda: json_alone(pieces))
    benchmark.extra_info["over the standard library's JSON alone"] = round(ratio, 3)
    benchmark.extra_info["µs a chunk"] = round(1e6 * benchmark.stats["min"] / 1000, 3)
    assert ratio <= 1.0
