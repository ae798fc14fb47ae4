"""Whether an answer is the right one: tolerant of how it is written, never of what it says."""

from __future__ import annotations

import re
from decimal import Decimal

THINK_END = "</think>"
NUMBER = re.compile(r"[+-]?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?")
SENTENCE = re.compile(
    r"(?:(?:so|thus|therefore|hence),?\s+)?(?:the\s+)?(?:final\s+|correct\s+)?answer"
    r"\s*(?:is\s*:?|:|=)\s*(?P<said>.+)",
    re.IGNORECASE,
)
GSM8K_MARK = "####"
WRAPPERS = (("**", "**"), ("__", "__"), ("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"),
            ("`", "`"), (r"\boxed{", "}"), (r"\text{", "}"), ('"', '"'))  # fmt: skip
LONGEST_NUMBER = 1000


def answer_begins(text: str) -> int:
    """Where the answer begins in a text that may hold its thinking too: behind the last tag."""
    end = text.rfind(THINK_END)
    return 0 if end < 0 else end + len(THINK_END)


def is_correct(text: str | None, answer: str | None) -> bool | None:
    """Whether the text after the thinking gives the answer; None where there is nothing to judge.

    Right is: the same text, letter case, spaces and markup (`**42**`, `$42$`, `\\boxed{42}`, a full
    stop at the end) apart; or else what the last `\\boxed{}` holds; or else, for a number, what a
    last line such as "The answer is 42." or "#### 42" says. Numbers are equal by value.
    """
    if answer is None or text is None:
        return None
    said = text[answer_begins(text) :]
    if "<think>" in said:
        return False  # cut while it was thinking: whatever stands there is no answer yet
    if _same(said, answer):
        return True
    boxed = last_boxed(said)
    if boxed is not None:
        return _same(boxed, answer)
    if _number(answer) is None:
        return False
    lines = said.strip().splitlines()
    last = _bare(lines[-1]) if lines else ""
    if last.startswith(GSM8K_MARK):
        return _same(last.removeprefix(GSM8K_MARK), answer)
    sentence = SENTENCE.fullmatch(last)
    return sentence is not None and _same(sentence["said"], answer)


def last_boxed(text: str) -> str | None:
    r"""What the last `\boxed{…}` holds, braces inside it balanced; None where there is none."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    begin = start + len(r"\boxed{")
    depth = 1
    for at in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[begin:at]
    return None


def _same(said: str, answer: str) -> bool:
    one, other = _bare(said), _bare(answer)
    if one == other:
        return bool(one) or said.strip() == answer.strip()
    numbers = _number(one), _number(other)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return _latex(one) == _latex(other) != ""


def _bare(text: str) -> str:
    """Without what only dresses it, in one letter case."""
    bare = " ".join(text.split()).casefold().replace("\u2212", "-")
    while True:
        before = bare
        if bare.endswith(".") and not bare.endswith(".."):
            bare = bare[:-1].rstrip()
        for left, right in WRAPPERS:
            inner = bare[len(left) : len(bare) - len(right)]
            whole = len(bare) > len(left) + len(right) and bare.startswith(left)
            if whole and bare.endswith(right) and _one_piece(inner, left, right):
                bare = inner.strip()
        if bare == before:
            return bare


def _one_piece(inner: str, left: str, right: str) -> bool:
    r"""Whether the wrapper around `inner` is one and not the ends of two: `$4$ or $2$`."""
    if right != "}":
        return left not in inner and right not in inner
    depth = 0
    for char in inner:
        depth += {"{": 1, "}": -1}.get(char, 0)
        if depth < 0:
            return False
    return depth == 0


def _number(text: str) -> Decimal | None:
    bare = _bare(text).removeprefix("\\$").removeprefix("$").replace("\\!", "").strip()
    if len(bare) > LONGEST_NUMBER or not bare.isascii() or not NUMBER.fullmatch(bare):
        return None
    return Decimal(bare.replace(",", ""))


def _latex(text: str) -> str:
    """A formula without what does not change what it says."""
    for long, short in (("\\dfrac", "\\frac"), ("\\tfrac", "\\frac")):
        text = text.replace(long, short)
    text = re.sub(r"\\(left|right)(?![a-z])", "", text)
    text = re.sub(r"\\[,;: ]", " ", text.replace("\\!", ""))
    return re.sub(r"(?<![0-9a-z]) +| +(?![0-9a-z])", "", text)
