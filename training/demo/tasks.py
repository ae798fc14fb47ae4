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


ANIMALS = "fox owl bear crow hare mole wolf deer frog goat duck swan lynx toad crab seal".split()
FRUIT = "apple pear plum fig lime peach grape melon".split()
GOODS = "lamp rope coin drum ring bell cup key map boot hat pen".split()
NAMES = (
    "Ana Bo Cara Dan Eli Fay Gus Hana Ivo Jon Kim Leo Mira Nils Ona Pia Rui Sam Tess Uma".split()
)
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December".split()
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def _turn(category: str, prompt: str, reasoning: str, answer: object) -> Turn:
    return Turn(category=category, prompt=prompt, reasoning=reasoning, answer=str(answer))


def addition(rng: Random) -> Turn:
    """Column addition, right to left, of two numbers of two or three digits."""
    digits = rng.choice((2, 2, 3))
    low, high = 10 ** (digits - 1), 10**digits - 1
    a, b = rng.randint(low, high), rng.randint(low, high)
    carry, steps = 0, []
    for x, y in zip(reversed(str(a)), reversed(str(b)), strict=True):
        total = int(x) + int(y) + carry
        steps.append(f"{x}+{y}{'+1' if carry else ''}={total}")
        carry = total // 10
    ask = rng.choice(("What is {} + {}?", "Add {} and {}.", "{} plus {}?"))
    return _turn("arithmetic", ask.format(a, b), " ".join(steps), a + b)


def subtraction(rng: Random) -> Turn:
    """Column subtraction with borrowing, of two numbers of two digits."""
    b, a = sorted(rng.sample(range(10, 100), 2))
    units, tens = a % 10 - b % 10, a // 10 - b // 10
    if units < 0:
        steps = f"1{a % 10}-{b % 10}={units + 10} {a // 10}-1-{b // 10}={tens - 1}"
    else:
        steps = f"{a % 10}-{b % 10}={units} {a // 10}-{b // 10}={tens}"
    ask = rng.choice(("What is {} - {}?", "{} minus {}?"))
    return _turn("arithmetic", ask.format(a, b), steps, a - b)


def multiplication(rng: Random) -> Turn:
    """A number of two digits times one digit, by parts."""
    a, b = rng.randint(11, 49), rng.randint(2, 6)
    tens, units = a // 10 * 10, a % 10
    steps = f"{tens}*{b}={tens * b} {units}*{b}={units * b} {tens * b}+{units * b}={a * b}"
    ask = rng.choice(("What is {} * {}?", "{} times {}?", "Multiply {} by {}."))
    return _turn("arithmetic", ask.format(a, b), steps, a * b)


def chain(rng: Random) -> Turn:
    """A few operations one after another on a small number."""
    value = rng.randint(2, 15)
    told, steps = [f"Start with {value}."], [str(value)]
    for _ in range(rng.randint(2, 4)):
        if value <= 20 and rng.random() < 0.3:
            value *= 2
            told.append("Double it.")
        elif value > 9 and rng.random() < 0.5:
            step = rng.randint(2, 9)
            value -= step
            told.append(f"Take away {step}.")
        else:
            step = rng.randint(2, 9)
            value += step
            told.append(f"Add {step}.")
        steps.append(str(value))
    return _turn("chain", " ".join(told), ", ".join(steps), value)


def sorting(rng: Random) -> Turn:
    """Numbers of two digits, up or down; the harder lists share their tens."""
    count = rng.randint(3, 5)
    if rng.random() < 0.7:
        numbers = [t * 10 + rng.randint(0, 9) for t in rng.sample(range(1, 10), count)]
    else:
        numbers = rng.sample(range(10, 100), count)
    down = rng.random() < 0.3
    ordered = sorted(numbers, reverse=down)
    ask = "Sort from high to low: {}" if down else rng.choice(("Sort: {}", "Put in order: {}"))
    tens = " ".join(str(n // 10) for n in ordered)
    return _turn(
        "sorting", ask.format(" ".join(map(str, numbers))), tens, " ".join(map(str, ordered))
    )


def extreme(rng: Random) -> Turn:
    """The largest or smallest of a few numbers."""
    numbers = rng.sample(range(10, 100), rng.randint(3, 5))
    word, best = rng.choice((("largest", max(numbers)), ("smallest", min(numbers))))
    listed = ", ".join(map(str, numbers))
    running, steps = numbers[0], []
    for n in numbers[1:]:
        running = max(running, n) if word == "largest" else min(running, n)
        steps.append(str(running))
    return _turn("sorting", f"Which is the {word}: {listed}?", " ".join(steps), best)


def letter_count(rng: Random) -> Turn:
    """How often a letter stands in a spelled word, by a running count."""
    wanted = rng.choice(LETTERS)
    others = rng.sample(LETTERS, 4)
    word = [wanted if rng.random() < 0.4 else rng.choice(others) for _ in range(rng.randint(4, 8))]
    count, steps = 0, []
    for letter in word:
        count += letter == wanted
        steps.append(f"{letter}{count}")
    ask = rng.choice(("How many {} in {}?", "Count the letter {} in {}."))
    return _turn("counting", ask.format(wanted, " ".join(word)), " ".join(steps), count)


def item_count(rng: Random) -> Turn:
    """How many of one kind are in a list of animals."""
    kinds = rng.sample(ANIMALS, 3)
    items = [rng.choice(kinds) for _ in range(rng.randint(4, 7))]
    wanted = rng.choice(kinds)
    count, steps = 0, []
    for item in items:
        count += item == wanted
        steps.append(f"{item} {count}")
    return _turn(
        "counting", f"How many times {wanted}: {' '.join(items)}?", ", ".join(steps), count
    )


def reverse(rng: Random) -> Turn:
    """A spelled word backwards."""
    word = rng.sample(LETTERS, rng.randint(3, 6))
    ask = rng.choice(("Reverse: {}", "Spell backwards: {}"))
    return _turn(
        "string",
        ask.format(" ".join(word)),
        f"{len(word)} letters, ends in {word[-1]}",
        " ".join(reversed(word)),
    )


def replace(rng: Random) -> Turn:
    """One letter of a spelled word replaced by another."""
    word = [rng.choice("abcdefg") for _ in range(rng.randint(4, 7))]
    old, new = rng.choice(word), rng.choice("uvwxyz")
    places = [str(i + 1) for i, letter in enumerate(word) if letter == old]
    result = " ".join(new if letter == old else letter for letter in word)
    return _turn(
        "string",
        f"Replace {old} by {new} in {' '.join(word)}",
        f"{old} at {' '.join(places)}",
        result,
    )


def units(rng: Random) -> Turn:
    """A compound length, time or weight in its small unit."""
    big, small, factor = rng.choice((("h", "min", 60), ("m", "cm", 100), ("kg", "g", 1000)))
    a, b = rng.randint(1, 9), rng.randint(1, 59)
    ask = rng.choice(("How many {s} is {a} {b} {n} {s}?", "Convert {a} {b} {n} {s} to {s}."))
    prompt = ask.format(a=a, b=big, n=b, s=small)
    return _turn(
        "units", prompt, f"{a}*{factor}={a * factor} {a * factor}+{b}={a * factor + b}",
        f"{a * factor + b} {small}",
    )  # fmt: skip


def calendar(rng: Random) -> Turn:
    """The day or month some steps after or before another, counted out."""
    cycle, noun = rng.choice(((DAYS, "day"), (MONTHS, "month")))
    start, steps = rng.randrange(len(cycle)), rng.randint(2, 6)
    way, word = rng.choice(((1, "after"), (-1, "before")))
    passed = [cycle[(start + way * i) % len(cycle)] for i in range(1, steps + 1)]
    told = ", ".join(f"{i} {name}" for i, name in enumerate(passed, 1))
    ask = rng.choice(("Which {n} is {k} {n}s {w} {s}?", "{k} {n}s {w} {s}?"))
    return _turn("dates", ask.format(n=noun, k=steps, w=word, s=cycle[start]), told, passed[-1])


def clock(rng: Random) -> Turn:
    """A time of day some minutes later."""
    hour, minute, later = rng.randint(1, 11), rng.randint(10, 59), rng.randint(10, 49)
    prompt = f"It is {hour}:{minute:02d}. And {later} min later?"
    total = minute + later
    steps = f"{minute}+{later}={total}"
    if total >= 60:
        steps += f" {total}-60={total - 60} {hour}+1={hour + 1}"
        hour, total = hour + 1, total - 60
    return _turn("dates", prompt, steps, f"{hour}:{total:02d}")


def table(rng: Random) -> Turn:
    """Look up one price, or the sum of two, in a short list."""
    goods = rng.sample(FRUIT + GOODS, rng.randint(3, 5))
    price = {g: rng.randint(2, 30) for g in goods}
    listed = ", ".join(f"{g} {p}" for g, p in price.items())
    a, b = rng.sample(goods, 2)
    if rng.random() < 0.4:
        return _turn("table", f"Prices: {listed}. Price of {a}?", f"{a} {price[a]}", price[a])
    steps = f"{a} {price[a]}, {b} {price[b]}, {price[a]}+{price[b]}={price[a] + price[b]}"
    return _turn("table", f"Prices: {listed}. {a} and {b}?", steps, price[a] + price[b])


def ages(rng: Random) -> Turn:
    """Who is older, and by how much: two look-ups and a difference."""
    people = rng.sample(NAMES, 3)
    age = dict(zip(people, rng.sample(range(10, 60), 3), strict=True))
    listed = ", ".join(f"{n} is {a}" for n, a in age.items())
    older, younger = sorted(rng.sample(people, 2), key=lambda n: -age[n])
    gap = age[older] - age[younger]
    return _turn(
        "table", f"{listed}. {older} is how much older than {younger}?",
        f"{older} {age[older]}, {younger} {age[younger]}, {age[older]}-{age[younger]}={gap}", gap,
    )  # fmt: skip


def sequence(rng: Random) -> Turn:
    """The next two numbers of an arithmetic sequence."""
    start, step, count = rng.randint(1, 20), rng.randint(2, 9), rng.randint(3, 4)
    seen = [start + step * i for i in range(count)]
    after = [seen[-1] + step, seen[-1] + 2 * step]
    return _turn(
        "sequence", f"Continue: {' '.join(map(str, seen))}",
        f"{seen[1]}-{seen[0]}={step} {seen[-1]}+{step}={after[0]} {after[0]}+{step}={after[1]}",
        f"{after[0]} {after[1]}",
    )  # fmt: skip


def loop_code(rng: Random) -> Turn:
    """What a short loop prints, by tracing its variable."""
    var = rng.choice("abnstxy")
    value, step, times = rng.randint(0, 9), rng.randint(2, 6), rng.randint(2, 5)
    code = f"{var} = {value}\nfor i in range({times}):\n    {var} += {step}\nprint({var})"
    trace = " ".join(str(value + step * i) for i in range(times + 1))
    return _turn("code", f"What is printed?\n{code}", trace, value + step * times)


def write_code(rng: Random) -> Turn:
    """A one-line function from its description."""
    var, name = rng.choice("abnstxy"), rng.choice("calc work step next_value apply".split())
    k, (word, op) = rng.randint(2, 99), rng.choice(
        (("adds", "+"), ("subtracts", "-"), ("multiplies by", "*"), ("divides by", "//"))
    )  # fmt: skip
    prompt = f"Write {name}({var}) that {word} {k}."
    return _turn(
        "code", prompt, f"{word} is {op}", f"def {name}({var}):\n    return {var} {op} {k}"
    )


# (generator, weight); the weights make the mix of the training text and of the prompts.
TASKS: tuple[tuple[Callable[[Random], Turn], float], ...] = (
    (addition, 6),
    (subtraction, 4),
    (multiplication, 5),
    (chain, 6),
    (sorting, 6),
    (extreme, 4),
    (letter_count, 4),
    (item_count, 4),
    (reverse, 3),
    (replace, 3),
    (units, 4),
    (calendar, 4),
    (clock, 4),
    (table, 6),
    (ages, 4),
    (sequence, 4),
    (loop_code, 4),
    (write_code, 3),
)
