"""The built-in prompt set: enough of it, varied, well formed, and its answers right."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest

from harness.load.prompts.datasets import BUILTIN as PATH

CATEGORIES = {
    "chat", "code", "mathematics", "reasoning", "long-context", "summarising", "extraction",
    "creative", "language", "multi-turn",
}  # fmt: skip
SCRIPTS = {
    "Chinese": r"[\u4e00-\u9fff]{8}",
    "Japanese": r"[\u3040-\u30ff]",
    "Arabic": r"[\u0600-\u06ff]{4}",
    "Hindi": r"[\u0900-\u097f]{4}",
    "Korean": r"[\uac00-\ud7af]{2}",
    "Russian": r"[\u0400-\u04ff]{4}",
    "German": r"\b(Schreibe|Erkläre|Mein)\b",
    "French": r"\b(Quelle|équipe)\b",
    "Spanish": r"[¿]",
    "Portuguese": r"\binstaladora\b",
}


@pytest.fixture(scope="module")
def prompts() -> list[dict[str, Any]]:
    return [json.loads(line) for line in PATH.read_text("utf-8").splitlines()]


def test_size_and_identity(prompts: list[dict[str, Any]]) -> None:
    assert PATH.stat().st_size < 300_000
    assert len(prompts) >= 96
    ids = [p["id"] for p in prompts]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[a-z-]+-\d\d", i) for i in ids)


def test_every_line_has_the_fields_of_the_format(prompts: list[dict[str, Any]]) -> None:
    for prompt in prompts:
        assert set(prompt) - {"answer"} == {"id", "category", "messages"}
        roles = [m["role"] for m in prompt["messages"]]
        assert roles == [("user", "assistant")[i % 2] for i in range(len(roles))]
        assert roles[-1] == "user"
        for message in prompt["messages"]:
            assert set(message) == {"role", "content"}
            assert message["content"] == message["content"].strip() != ""


def test_categories_are_all_there_and_mixed(prompts: list[dict[str, Any]]) -> None:
    sizes = Counter(p["category"] for p in prompts)
    assert set(sizes) == CATEGORIES
    assert min(sizes.values()) >= 6
    assert len({p["category"] for p in prompts[:10]}) == 10


def test_no_two_prompts_are_alike(prompts: list[dict[str, Any]]) -> None:
    texts = [p["messages"][0]["content"] for p in prompts]
    starts = Counter(" ".join(text.split()[:5]).lower() for text in texts)
    assert max(starts.values()) <= 1, starts.most_common(3)
    told = [text.partition("\n\nReply with ")[0].lower() for text in texts]
    words = [set(re.findall(r"\w{4,}", text)) for text in told]
    for i, a in enumerate(words):
        for b in words[:i]:
            assert len(a & b) < 0.3 * max(1, len(a | b))


def test_languages(prompts: list[dict[str, Any]]) -> None:
    texts = [p["messages"][0]["content"] for p in prompts if p["category"] == "language"]
    for language, pattern in SCRIPTS.items():
        assert any(re.search(pattern, text) for text in texts), language


def test_long_contexts_are_long_and_multi_turns_turn(prompts: list[dict[str, Any]]) -> None:
    for prompt in prompts:
        length = sum(len(m["content"]) for m in prompt["messages"])
        if prompt["category"] == "long-context":
            assert 4000 < length < 15_000
        else:
            assert length < 2500
        assert (len(prompt["messages"]) > 1) == (prompt["category"] == "multi-turn")


def staircase(steps: int) -> int:
    a, b = 1, 1
    for _ in range(steps - 1):
        a, b = b, a + b
    return b


def test_answers_of_mathematics_are_right(prompts: list[dict[str, Any]]) -> None:
    """Each worked out another way than by reading the file."""
    worked = {
        "A train leaves": 80 * (21 / 60) / (120 - 80) * 60,
        "How many different ways are there to seat": 5 * 4 * 3 * 2,
        "What is the remainder": (2**100 + 1) % 25,
        "A rectangle has": next(w * (13 - w) for w in range(1, 13) if w**2 + (13 - w) ** 2 == 97),
        "A jacket costs": 120 * 0.8 * 0.875,
        "A bag holds": 5 + 4 + 2,
        "I climb a staircase": staircase(9),
        "Find the sum": sum(n for n in range(1, 10**4) if (n * n + 8 * n + 15) % (n + 1) == 0),
        "In a triangle": 4 * (425.25 / 84) ** 0.5,
        "For which positive real": 3,  # a double root at x = 1: 1 - 3 + k - 1 = 0
        "A shop sells": 102 / 3 * 2 + 51 * 4 + 34,
    }
    known = [p for p in prompts if "answer" in p and "/" not in p["answer"]]
    assert len(known) == len(worked)
    for prompt in known:
        text = prompt["messages"][0]["content"]
        (value,) = [v for start, v in worked.items() if text.startswith(start)]
        assert float(prompt["answer"]) == pytest.approx(value)
        assert "nothing else" in text.splitlines()[-1]


def test_no_address_of_a_real_site_or_person(prompts: list[dict[str, Any]]) -> None:
    everything = PATH.read_text("utf-8")
    assert "http" not in everything.replace("`requests", "")
    assert not re.search(r"[\w.]+@[\w.]+\.\w+", everything)
    for address in re.findall(r"\b\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}\b", everything):
        assert address.startswith(("192.0.2.", "198.51.100.", "203.0.113.")), address
