"""Judging answers: tolerant of how they are written, never of what they say."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from harness.load.prompts.correct import is_correct, last_boxed


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("hm</think> 42 \n", "42", True),
        ("a</think>b</think>Yes", "yes", True),
        ("41", "42", False),
        ("anything", None, None),
        (None, "42", None),
        ("", "42", False),
        ("**42**", "42", True),
        ("$42$.", "42", True),
        ("\\(42\\)", "42", True),
        ("So it is \\boxed{42}.", "42", True),
        ("First \\boxed{42}, no: \\boxed{41}", "42", False),
        ("The answer is 42.", "42", True),
        ("Work.\n\nThus, the final answer is: **42**.", "42", True),
        ("6 * 7 = 42\n#### 42", "42", True),
        ("**The answer is 42.**", "42", True),
        ("The answer is 42 or 43.", "42", False),
        ("The answer is not 42.", "42", False),
        ("I doubt that the answer is 42.", "42", False),
        ("The answer is 42.\nNo, it is 41.", "42", False),
        ("The answer is 42.5.", "42", False),
        ("<think>The answer is 42.", "42", False),
        ("1,234", "1234", True),
        ("$1,234.50", "1234.5", True),
        ("1,2", "12", False),
        ("12,34", "1234", False),
        ("10,\\!000", "10000", True),
        ("\u221242", "-42", True),
        ("042", "42", True),
        ("4.20", "4.2", True),
        ("Sunday.", "Sunday", True),
        ("The answer is Sunday.", "Sunday", False),
        ("\\boxed{\\dfrac{1}{2}}", "\\frac{1}{2}", True),
        ("\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}", "\\left(3, \\frac{\\pi}{2}\\right)", True),
        ("$4$ or $2$", "42", False),
        ("8 5 3 2", "8532", False),
        ("\\boxed{4", "4", False),
    ],
)
def test_correctness(text: str | None, answer: str | None, right: bool | None) -> None:
    assert is_correct(text, answer) is right


FORMS = (
    "{}", "**{}**", "${}$", "\\boxed{{{}}}", "$\\boxed{{{}}}$.", "The answer is {}.", "#### {}",
    "Hence, the correct answer is **{}**.", "It is 7 of 9.\n\nAnswer: ${}$", "</think>\n{}.",
    "**The final answer: \\({}\\)**", "`{}`",
)  # fmt: skip
NUMBERS = st.one_of(
    st.integers(-(10**9), 10**9).map(str),
    st.decimals(-(10**6), 10**6, places=2, allow_nan=False, allow_infinity=False).map(str),
    st.integers(-(10**9), 10**9).map(lambda n: f"{n:,}"),
)


@given(NUMBERS, st.sampled_from(FORMS))
def test_a_right_number_is_right_in_every_form(number: str, form: str) -> None:
    assert is_correct(form.format(number), number)
    assert is_correct(form.format(number), number.replace(",", ""))


@given(NUMBERS, NUMBERS, st.sampled_from(FORMS))
def test_a_wrong_number_is_wrong_in_every_form(said: str, answer: str, form: str) -> None:
    assume(float(said.replace(",", "")) != float(answer.replace(",", "")))
    assert is_correct(form.format(said), answer) is False


@given(st.integers(0, 9999), st.text(min_size=1, max_size=4), st.booleans())
def test_a_number_with_more_digits_around_it_is_wrong(number: int, more: str, front: bool) -> None:
    assume(any(c.isdigit() or c.isalpha() for c in more))
    said = f"{more}{number}" if front else f"{number}{more}"
    assume(said.strip().lstrip("+0") != str(number).lstrip("0"))
    tail = more.strip().rstrip(".")
    assume(not (tail.startswith(".") and not tail[1:].strip("0")))  # 4.00 is 4
    assert is_correct(said, str(number)) is False


@given(st.text(max_size=60), st.text(max_size=20))
def test_any_text_is_judged(text: str, answer: str) -> None:
    assert is_correct(text, answer) in (True, False)
    if answer.strip() and "think>" not in answer:
        assert is_correct(answer, answer)


@given(st.recursive(st.sampled_from(["", "a", "1"]), lambda s: s.map(lambda t: "{" + t + "}b")))
def test_what_a_box_holds_is_found_whole(inner: str) -> None:
    assert last_boxed(f"x \\boxed{{0}} y \\boxed{{{inner}}} z") == inner
