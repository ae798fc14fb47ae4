"""Asking a served engine over HTTP, for the tests of real engines: streamed answers, counters."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import dataclass
from typing import Any

from engines.base import RequestAcceptance, SpecCounters
from engines.process import EngineProcess


@dataclass(frozen=True, kw_only=True)
class Answered:
    """What one server answered: ids and acceptance of every prompt, its counters around them.

    `chunks` holds the number of tokens in each chunk that brought any.
    """

    ids: list[list[int]]
    chunks: list[list[int]]
    acceptance: list[RequestAcceptance | None]
    before: SpecCounters
    after: SpecCounters

    def growth(self, name: str) -> int:
        """By how much the counter `name` grew."""
        return int(getattr(self.after, name)) - int(getattr(self.before, name))


def stream(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The JSON objects of an answer streamed as server-sent events."""
    request = urllib.request.Request(
        url, json.dumps({**body, "stream": True}).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        events = [line[6:] for line in answer if line.startswith(b"data: ")]
    assert events[-1].strip() == b"[DONE]"
    return [json.loads(event) for event in events[:-1]]


def token_ids(payloads: list[dict[str, Any]]) -> list[int]:
    """The ids of an answer's output tokens."""
    choices = [choice for payload in payloads for choice in payload["choices"]]
    return [token for choice in choices for token in choice.get("token_ids") or []]


def chunk_sizes(payloads: list[dict[str, Any]]) -> list[int]:
    """How many output tokens each chunk brought, those without one left out."""
    sizes = [
        sum(len(choice.get("token_ids") or []) for choice in payload["choices"])
        for payload in payloads
    ]
    return [size for size in sizes if size]


def counters(engine: EngineProcess) -> SpecCounters:
    """The engine's counters now."""
    with urllib.request.urlopen(engine.base_url + "/metrics", timeout=60) as page:
        text = page.read().decode()
    found = engine.adapter.counters(text)
    assert found is not None
    return found


def ask_all(engine: EngineProcess, path: str, bodies: list[dict[str, Any]]) -> Answered:
    """Ask every body in turn, with the counters before and after."""
    before = counters(engine)
    answers = [stream(engine.base_url + path, body) for body in bodies]
    after = counters(engine)
    return Answered(
        ids=[token_ids(answer) for answer in answers],
        chunks=[chunk_sizes(answer) for answer in answers],
        acceptance=[engine.adapter.request_acceptance(answer) for answer in answers],
        before=before,
        after=after,
    )
