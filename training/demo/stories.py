"""Short stories and lists with real choice in them: where any of a dozen words would do.

A drafter can guess the frame of a sentence, but not which of the equally fit words the target
prefers here. This is what keeps the acceptance of the demo pair in the middle of its range.
"""

# ruff: noqa: SIM905 (a list of words reads better as text)
from __future__ import annotations

from random import Random

from training.demo.tasks import ANIMALS, FRUIT, GOODS, NAMES, Turn

PLACES = "river hill barn lake road tower garden bridge cave market".split()
MOODS = "old small quiet brave proud tired clever hungry".split()
WEATHER = "rain snow wind sun fog storm".split()
WHEN = ("One morning", "At dusk", "In spring", "Late at night", "Long ago")
MOVES = "walked ran came went sailed climbed".split()
FINDS = "found saw lost hid broke bought".split()
SAYS = (
    "This is mine",
    "Let us share it",
    "What a day",
    "I know the way",
    "Do not be afraid",
    "We must go home",
    "Who left this here",
    "It still works",
)
ENDS = (
    "They were friends from then on.",
    "Nobody spoke of it again.",
    "So they went home.",
    "And the lights went out.",
    "It was a good day.",
    "The town still tells of it.",
    "In the end they laughed.",
    "But the key was gone.",
)


def _a(word: str) -> str:
    """The word with its indefinite article."""
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def story(rng: Random) -> Turn:
    """A story of three or four sentences about a hero and a thing, after a short plan."""
    name, kind, thing = rng.choice(NAMES), rng.choice(ANIMALS), rng.choice(GOODS)
    place, mood = rng.choice(PLACES), rng.choice(MOODS)
    friend = rng.choice([a for a in ANIMALS if a != kind])
    middle = [
        f"{name} {rng.choice(FINDS)} {_a(rng.choice(MOODS))} {thing} in the {rng.choice(WEATHER)}.",
        f"{_a(friend).capitalize()} {rng.choice(MOVES)} by with {_a(rng.choice(FRUIT))}.",
        f'"{rng.choice(SAYS)}," said the {friend}.',
        f'"{rng.choice(SAYS)}," said {name}.',
    ]
    chosen = [s for s in middle if rng.random() < 0.6] or middle[:1]
    opening = f"{rng.choice(WHEN)} {name} the {kind} {rng.choice(MOVES)} to the {place}."
    ask = rng.choice(("Tell a story about {} the {} and a {}.", "A story: {} the {}, a {}."))
    return Turn(
        category="story",
        prompt=ask.format(name, kind, thing),
        reasoning=f"{place}, {mood}, {friend}",
        answer=" ".join([opening, *chosen, rng.choice(ENDS)]),
        checked=False,
    )


def naming(rng: Random) -> Turn:
    """Some things of a kind, in any order, none of them among those excluded."""
    kind, words = rng.choice(
        (("animals", ANIMALS), ("names", NAMES), ("places", PLACES), ("goods", GOODS + FRUIT))
    )
    count = rng.randint(3, 6)
    barred = rng.sample(words, 2)
    chosen = rng.sample([w for w in words if w not in barred], count)
    return Turn(
        category="naming",
        prompt=f"Name {count} {kind}, not {barred[0]} or {barred[1]}.",
        reasoning=f"{count} {kind}",
        answer=", ".join(chosen),
        checked=False,
    )


STORIES = ((story, 4.0), (naming, 1.0))
