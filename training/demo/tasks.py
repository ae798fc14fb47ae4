"""Small tasks with one right answer: a question, the working, the answer.

Every generator draws from the `random.Random` it is given and from nothing else. The working is
terse on purpose: nearly every token of it is a result, which is what makes the text neither
trivial nor hopeless to draft.
"""

# ruff: noqa: SIM905 (a list of words reads better as text)
from __future__ import annotations

from collections.abc import Callable
from random import Random

import msgspec


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One question with its working and its answer; `checked` False where any answer will do."""

    category: str
    prompt: str
    reasoning: str
    answer: str
    checked: bool = True


ANIMALS = "fox owl bear crow wolf frog goat duck".split()
FRUIT = "apple pear plum fig".split()
GOODS = "lamp rope coin drum ring key".split()
NAMES = "Ana Ben Dan Eva Kim Leo Mia Sam".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December".split()
)
LETTERS = "abcdefgh"


def _turn(category: str, prompt: str, reasoning: str, answer: object) -> Turn:
    return Turn(category=category, prompt=prompt, reasoning=reasoning, answer=str(answer))


def addition(rng: Random) -> Turn:
    """Column addition, right to left, of two numbers of two digits."""
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    units = a % 10 + b % 10
    carry = "+1" if units > 9 else ""
    tens = a // 10 + b // 10 + units // 10
    steps = f"{a % 10}+{b % 10}={units} {a // 10}+{b // 10}{carry}={tens}"
    ask = rng.choice(("What is {} + {}?", "Add {} and {}.", "{} plus {}?"))
    return _turn("arithmetic", ask.format(a, b), f"{a}+{b}: {steps}", a + b)


def subtraction(rng: Random) -> Turn:
    """Column subtraction, right to left, of two numbers of two digits; nothing is borrowed."""
    tens, units = sorted(rng.choices(range(1, 10), k=2)), sorted(rng.choices(range(10), k=2))
    a, b = tens[1] * 10 + units[1], tens[0] * 10 + units[0]
    steps = f"{units[1]}-{units[0]}={units[1] - units[0]} {tens[1]}-{tens[0]}={tens[1] - tens[0]}"
    ask = rng.choice(("What is {} - {}?", "{} minus {}?"))
    return _turn("arithmetic", ask.format(a, b), f"{a}-{b}: {steps}", a - b)


def multiplication(rng: Random) -> Turn:
    """Two small numbers, by counting up in steps of one of them."""
    a, b = rng.randint(2, 9), rng.randint(2, 5)
    steps = " ".join(str(a * i) for i in range(1, b + 1))
    ask = rng.choice(("What is {} * {}?", "{} times {}?", "Multiply {} by {}."))
    return _turn("arithmetic", ask.format(a, b), f"{a}*{b}: {steps}", a * b)


def sorting(rng: Random) -> Turn:
    """Numbers of one digit, up or down."""
    count = rng.randint(3, 4)
    numbers = rng.sample(range(1, 10), count)
    down = rng.random() < 0.3
    ordered = sorted(numbers, reverse=down)
    ask = "Sort from high to low: {}" if down else rng.choice(("Sort: {}", "Put in order: {}"))
    listed = " ".join(map(str, numbers))
    ends = f"from {ordered[0]} to {ordered[-1]}"
    return _turn("sorting", ask.format(listed), f"{listed}: {ends}", " ".join(map(str, ordered)))


def letter_count(rng: Random) -> Turn:
    """How many letters a spelled word has, by a running count."""
    word = [rng.choice(LETTERS) for _ in range(rng.randint(2, 6))]
    steps = " ".join(f"{letter}{i}" for i, letter in enumerate(word, 1))
    ask = rng.choice(("How many letters: {}?", "Count the letters in {}."))
    return _turn("counting", ask.format(" ".join(word)), steps, len(word))


def item_count(rng: Random) -> Turn:
    """How many animals are in a list, by a running count."""
    items = [rng.choice(ANIMALS) for _ in range(rng.randint(2, 5))]
    steps = ", ".join(f"{item} {i}" for i, item in enumerate(items, 1))
    return _turn("counting", f"How many animals: {' '.join(items)}?", steps, len(items))


def units(rng: Random) -> Turn:
    """A compound length, time or weight in its small unit."""
    big, small, factor = rng.choice((("m", "cm", 100), ("kg", "g", 1000)))
    a, b = rng.randint(1, 9), rng.randint(11, 59)
    ask = rng.choice(("How many {s} is {a} {b} {n} {s}?", "Convert {a} {b} {n} {s} to {s}."))
    prompt = ask.format(a=a, b=big, n=b, s=small)
    return _turn(
        "units", prompt, f"{a}*{factor}={a * factor} {a * factor}+{b}={a * factor + b}",
        f"{a * factor + b} {small}",
    )  # fmt: skip


def calendar(rng: Random) -> Turn:
    """The day or month some steps after another, counted out."""
    cycle, noun = rng.choice(((DAYS, "day"), (MONTHS, "month")))
    start, steps = rng.randrange(len(cycle)), rng.randint(2, 5)
    passed = [cycle[(start + i) % len(cycle)] for i in range(1, steps + 1)]
    told = ", ".join(f"{i} {name}" for i, name in enumerate(passed, 1))
    ask = rng.choice(("Which {n} is {k} {n}s after {s}?", "{k} {n}s after {s}?"))
    return _turn("dates", ask.format(n=noun, k=steps, s=cycle[start]), told, passed[-1])


def table(rng: Random) -> Turn:
    """Look up the first or the last price of a short list."""
    goods = rng.sample(FRUIT + GOODS, rng.randint(2, 3))
    prices = [rng.randint(1, 9) for _ in goods]
    listed = ", ".join(f"{g} {p}" for g, p in zip(goods, prices, strict=True))
    place, at = rng.choice((("first", 0), ("last", -1)))
    prompt = f"Prices: {listed}. The {place} price?"
    return _turn("table", prompt, f"{listed}: {goods[at]} {prices[at]}", prices[at])


def sequence(rng: Random) -> Turn:
    """Counting on from a number in equal steps."""
    start, step, count = rng.randint(1, 9), rng.randint(2, 5), rng.randint(2, 4)
    after = [str(start + step * i) for i in range(1, count + 1)]
    steps = f"{start} +{step}: {' '.join(after)}"
    prompt = f"Count on from {start} by {step}, {count} times."
    return _turn("sequence", prompt, steps, after[-1])


def loop_code(rng: Random) -> Turn:
    """What a short loop prints, by tracing its variable."""
    var = rng.choice("abnstxy")
    value, step, times = rng.randint(0, 9), rng.randint(2, 5), rng.randint(2, 4)
    code = f"{var} = {value}\nfor i in range({times}):\n    {var} += {step}\nprint({var})"
    trace = " ".join(str(value + step * i) for i in range(times + 1))
    return _turn(
        "code", f"What is printed?\n{code}", f"{var}={value} +{step}: {trace}", value + step * times
    )


def write_code(rng: Random) -> Turn:
    """A one-line function from its description."""
    var, name = rng.choice("abnstxy"), rng.choice("calc work step apply".split())
    k, (word, op) = rng.randint(2, 99), rng.choice(
        (("adds", "+"), ("subtracts", "-"), ("multiplies by", "*"), ("divides by", "//"))
    )  # fmt: skip
    prompt = f"Write {name}({var}) that {word} {k}."
    return _turn(
        "code", prompt, f"{word} is {op}", f"def {name}({var}):\n    return {var} {op} {k}"
    )


# (generator, weight); the weights make the mix of the training text and of the prompts.
TASKS: tuple[tuple[Callable[[Random], Turn], float], ...] = (
    (addition, 13),
    (subtraction, 7),
    (multiplication, 3),
    (sorting, 6),
    (letter_count, 2),
    (item_count, 2),
    (units, 3),
    (calendar, 4),
    (table, 3),
    (sequence, 4),
    (loop_code, 4),
    (write_code, 2),
)
