"""A server that hangs costs a diagnosis one wait, not one for each question."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from harness_scripted import Script, in_thread, stream, whole

from engines.base import EngineFailed
from engines.catalog import adapter
from harness.alive import Attached
from harness.diagnose.experiments.asking import Access, Question, Server, Way
from harness.diagnose.experiments.known import Knowledge
from harness.diagnose.experiments.target import parity
from harness.measure.logprobs import LogprobReader, NoAnswer, NoLogprobs
from harness.plan.schema import ClientSection
from harness.progress import PlainProgress

QUESTIONS = [Question(name=str(i), token_ids=(1, 2, 3)) for i in range(12)]
TEXT = {"choices": [{"index": 0, "text": "x", "token_ids": [4, 5], "finish_reason": "stop"}]}


@contextmanager
def served(script: Script) -> Iterator[Server]:
    """A scripted server, attached to as one that runs already."""
    with in_thread(script) as url:
        host = Attached(url, ClientSection())
        yield Server(adapter("openai"), host, Access(model="m"))


def test_a_server_that_hangs_ends_the_round_and_is_not_asked_again() -> None:
    asked: list[int] = []

    def hanging(number: int, body: dict[str, Any]) -> Any:
        if "prompt" not in body:
            return [whole("404 Not Found", "")]  # it has no counters
        asked.append(number)
        return stream([TEXT], first_s=0.0 if len(asked) < 3 else 600.0)

    way = Way(name="alone", timeout_s=10.0)  # a tenth of which may pass in silence
    with served(hanging) as server:
        with pytest.raises(EngineFailed) as told:
            server.ask(QUESTIONS, way, PlainProgress())
        gone = server.gone()
    said = str(told.value)
    assert "nothing came from the server for 1 s; for a slower engine set load.timeout_s" in said
    assert "\n" not in said
    assert gone == "nothing came from the server for 1 s"
    assert len(asked) <= 3


def test_one_that_refuses_every_question_may_be_asked_others() -> None:
    def refusing(number: int, body: dict[str, Any]) -> Any:
        return [whole("400 Bad Request" if "prompt" in body else "404 Not Found", "")]

    with served(refusing) as server:
        with pytest.raises(EngineFailed, match="requests in a row failed"):
            server.ask(QUESTIONS, Way(name="alone"), PlainProgress())
        assert server.gone() is None


@pytest.mark.parametrize(
    ("longest_s", "concurrency", "timeout_s", "quiet_s"),
    [
        (0.0, 1, 600.0, 60.0),  # nothing is known of it yet
        (2.0, 8, 600.0, 64.0),  # eight first tokens of 2 s, one after another, four times over
        (30.0, 8, 600.0, 600.0),
        (0.0, 1, 3600.0, 360.0),
    ],
)
def test_a_slow_server_may_be_silent_longer(
    longest_s: float, concurrency: int, timeout_s: float, quiet_s: float
) -> None:
    host = Attached("http://127.0.0.1:1", ClientSection())
    server = Server(adapter("openai"), host, Access(model="m"))
    server._longest_s = longest_s
    way = Way(name="w", timeout_s=timeout_s)
    assert server._asking(way, concurrency).quiet_s == quiet_s
    server._compiles = True
    least = min(timeout_s, max(quiet_s, 0.3 * timeout_s))
    assert server._asking(way, concurrency).quiet_s == pytest.approx(least)


@pytest.mark.parametrize(("error", "asks"), [(NoAnswer, 1), (NoLogprobs, 6)])
def test_log_probabilities_are_asked_once_of_a_server_that_does_not_answer(
    error: type[NoLogprobs], asks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 0

    class Reader:
        def continued(self, prefix: list[int], tokens: int) -> None:
            nonlocal count
            count += 1
            raise error("timed out")

    monkeypatch.setattr("harness.diagnose.experiments.target.dtype_of", lambda subject: "float32")
    texts = [SimpleNamespace(prompt=[1], answer=[2])] * 8
    known = cast(Knowledge, SimpleNamespace(subject=None, texts=texts))
    with pytest.raises(NoLogprobs, match="timed out"):
        parity(known, cast(LogprobReader, Reader()))
    assert count == asks
