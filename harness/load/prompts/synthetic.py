"""Made prompts, exact in the target's tokens: words, random tokens, and a trace's lengths."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from harness.errors import UsageError
from harness.load.prompts.lengths import draw_lengths, longest
from harness.load.prompts.prompt import Prompt
from harness.load.prompts.tokens import TargetTokenizer
from harness.plan.schema import WorkloadSection

DEFAULT_PROMPTS = 256
TRIES = 200
FRESH_TRIES = 20
TAIL = 24
"""Tokens at a text's end that are sought piece by piece."""
ANCHOR = 32
"""Characters before the tail: a tokenizer may join the tail's beginning to them."""
HEAD_ROUNDS = 12
FILLERS = (" a", "a", " I", ".", ",", " 1", "1", "x", " x", "!", "?", "-", " -", "e", "s")
_WORDS = (
    "about above across after again air all almost along also always among animal answer any "
    "area around art autumn away back bank base bear beautiful because become bed been before "
    "began begin behind below between big bird black blue board boat body book both bottom "
    "box bread bridge bright bring brother brown build bus busy call came can car care carry "
    "case cat change children city class clean clear close cloud coast cold colour come "
    "common cook cool corner could country course cover cross cut dance dark daughter day "
    "deep desk did different dinner do dog door down draw dream dress drink drive dry during "
    "each early earth east easy eat egg end enough even evening every example eye face fact "
    "fall family far farm fast father feel feet few field fill find fine fire first fish "
    "floor flower fly follow food foot for forest form found four free fresh friend from "
    "front fruit full game garden gave get girl give glass go gold good grass great green "
    "grew ground group grow had half hand happy hard has have head hear heart heat heavy help "
    "here high hill hold home horse hot hour house how hundred ice idea if in inside iron "
    "island it job just keep kind king kitchen knew know lake land language large last late "
    "laugh learn leave left less letter life light line list listen little live long look "
    "lost lot loud love low lunch made make man many map mark market may mean meat meet men "
    "middle milk mind minute money month moon more morning most mother mountain mouth move "
    "much music must name near need never new next night no north nose not note nothing now "
    "number of off often old on once one only open or order other our out over own page paint "
    "paper part pass past pay people piece place plain plan plant play point poor put "
    "question quick quiet rain ran reach read ready real red rest rich ride right river road "
    "rock room round run salt same sand saw say school sea second see seed seem send set "
    "seven several shape she ship shop short should show side silver sing sister sit six sky "
    "sleep slow small snow so soft some song soon sound south space speak spring stand star "
    "start stay step still stone stood stop store story street strong such summer sun sure "
    "swim table take talk tall tea teach tell ten than that the their them then there these "
    "they thing think this those though thousand three through time to today together told "
    "too took top town trade train travel tree true try turn two under until up us use very "
    "village voice wait walk wall want war warm was wash watch water way we week well went "
    "were west what wheel when where which while white who whole why wide wild will wind "
    "window winter wish with woman wood word work world would write year yellow yes yet you "
    "young your "
)
WORDS = tuple(_WORDS.split())


class Making(msgspec.Struct, frozen=True, kw_only=True):
    """What made prompts have in common. `as_ids`: they are sent as token ids, not as a text."""

    tokens: TargetTokenizer
    rng: random.Random
    as_ids: bool
    random_ids: tuple[int, ...] | None = None
    """The ids that random tokens are drawn from; None: words."""
    per_word: float = 1.0
    """Tokens of a word, on average."""


class Prefix(msgspec.Struct, frozen=True, kw_only=True):
    """A beginning that prompts share."""

    ids: tuple[int, ...] = ()
    text: str = ""


def make_prompts(
    workload: WorkloadSection, tokens: TargetTokenizer, *, seed: int, count: int | None = None
) -> list[Prompt]:
    """`synthetic` (words) or `random` (token ids) prompts of `workload.input_tokens`.

    `check_made` has looked at the plan. Raises `UsageError` where no such text is found.
    """
    assert workload.input_tokens is not None
    rng = random.Random(f"{seed}-{workload.dataset}")
    number = count or workload.num_prompts or DEFAULT_PROMPTS
    lengths = draw_lengths(workload.input_tokens, number, rng)
    return make_of_lengths(workload, tokens, lengths, rng)


def make_of_lengths(
    workload: WorkloadSection,
    tokens: TargetTokenizer,
    lengths: Sequence[int],
    rng: random.Random,
) -> list[Prompt]:
    """Prompts of exactly these lengths, in order, with the plan's share of common prefixes."""
    as_ids = workload.endpoint == "completions" and workload.chat_template == "server"
    ids = _drawable(tokens, as_ids=as_ids) if workload.dataset == "random" else None
    per_word = 1.0 if ids is not None else tokens.count(" ".join(WORDS)) / len(WORDS)
    making = Making(tokens=tokens, rng=rng, as_ids=as_ids, random_ids=ids, per_word=per_word)
    prefixes = _prefixes(workload, making)
    name = "random" if ids is not None else "synthetic"
    made: list[Prompt] = []
    seen: set[tuple[int, ...] | str] = set()
    for number, length in enumerate(lengths):
        shared = bool(prefixes) and rng.random() < workload.prefix_reuse
        prefix = prefixes[rng.randrange(len(prefixes))] if shared else Prefix()
        # A prompt shorter than the prefix would have nothing of its own: it gets one token.
        length = max(length, workload.prefix_tokens + 1) if prefixes else length
        for _ in range(FRESH_TRIES):
            body = make_exact(making, length, prefix)
            if body not in seen:
                break
        seen.add(body)
        made.append(
            Prompt(
                id=f"{name}-{number:06d}",
                category=name,
                text=body if isinstance(body, str) else None,
                token_ids=body if isinstance(body, tuple) else None,
                input_tokens=length,
            )
        )
    return made


def make_exact(making: Making, length: int, prefix: Prefix) -> str | tuple[int, ...]:
    """A text, or token ids, of exactly `length` tokens that begins with the prefix's own tokens."""
    if making.as_ids and making.random_ids is not None:
        rest = length - len(prefix.ids)
        return (*prefix.ids, *making.rng.choices(making.random_ids, k=rest))
    for attempt in range(TRIES):
        # A tokenizer that joins words across a space seldom does so across a line's end.
        start = f"{prefix.text}\n" if prefix.text and attempt % 2 else prefix.text
        text = _exact_text(making, length, start)
        if text is None or text != text.strip():  # what a chat template strips is not counted
            continue
        ids = tuple(making.tokens.encode(text))
        if ids[: len(prefix.ids)] == prefix.ids:
            return ids if making.as_ids else text
    raise UsageError(
        f"workload.input_tokens: no text of exactly {length} tokens was found for this tokenizer; "
        "use workload.endpoint=completions with workload.dataset=random, which sends token ids"
    )


def _exact_text(making: Making, length: int, start: str) -> str | None:
    """One attempt: words until little is lacking, then small pieces; None where that fails.

    The tail is sought by itself, so that a long text is counted a few times and not at each piece.
    """
    head = _head(making, length - TAIL, start)
    lacking = length - making.tokens.count(head)
    anchor = head[-ANCHOR:]
    base, tail = making.tokens.count(anchor), ""
    while lacking > 0:
        now = making.tokens.count(anchor + tail) - base
        if now == lacking:
            break
        longer = _longer(making, anchor, tail, base + lacking)
        if longer is None:
            return None
        tail = longer
    text = head + tail
    return text if making.tokens.count(text) == length else None


def _head(making: Making, length: int, start: str) -> str:
    """`start` and words behind it, at most `length` tokens and not much less, if it leaves any."""
    head = start
    for _ in range(HEAD_ROUNDS):
        now = making.tokens.count(head)
        if now > length:
            body = head[len(start) :]
            over = max(1, len(body) * (now - length) // max(1, now))
            kept = body[: len(body) - over].rpartition(" ")[0]
            if not kept:
                return start
            head = start + kept
            continue
        number = int((length - now) / making.per_word)
        if number < 1:
            break
        head = f"{head} {_words(making, number)}".lstrip()
    return head if making.tokens.count(head) <= length else start


def _longer(making: Making, anchor: str, tail: str, most: int) -> str | None:
    """The tail and one piece more, where a piece fits into `most` tokens of anchor and tail."""
    now = making.tokens.count(anchor + tail)
    words = [f" {_words(making, 1)}" for _ in range(4)]
    for piece in (*words, *making.rng.sample(FILLERS, len(FILLERS))):
        step = tail + (piece if anchor or tail else piece.lstrip())
        if now < making.tokens.count(anchor + step) <= most:
            return step
    return None


def _words(making: Making, number: int) -> str:
    if making.random_ids is None:
        return " ".join(making.rng.choices(WORDS, k=number))
    return making.tokens.decode(making.rng.choices(making.random_ids, k=number)).strip()


def _drawable(tokens: TargetTokenizer, *, as_ids: bool) -> tuple[int, ...]:
    """Ids that random tokens are drawn from; for a text only those that are whole characters."""
    ids = tokens.plain_ids()
    if not as_ids:
        ids = [i for i in ids if _is_text(tokens.decode([i]))]
    if not ids:
        raise UsageError("workload.dataset=random: the target's tokenizer has no token of text")
    return tuple(ids)


def _is_text(text: str) -> bool:
    return bool(text.strip()) and "\ufffd" not in text and text.isprintable()


def _prefixes(workload: WorkloadSection, making: Making) -> list[Prefix]:
    if workload.prefix_tokens == 0:
        return []
    made: list[Prefix] = []
    for _ in range(workload.prefix_groups):
        body = make_exact(making, workload.prefix_tokens, Prefix())
        if isinstance(body, str):
            made.append(Prefix(text=body, ids=tuple(making.tokens.encode(body))))
        else:
            made.append(Prefix(ids=body, text=making.tokens.decode(body)))
    return made


def check_made(workload: WorkloadSection, context: int | None) -> None:
    """Raise `UsageError` where made prompts cannot be as long as the plan says."""
    if workload.input_tokens is None:
        raise UsageError(
            f"workload.dataset={workload.dataset}: say how long its prompts are, for example "
            "--set workload.input_tokens=512"
        )
    most = longest(workload.input_tokens)
    if workload.prefix_tokens and most is not None and most <= workload.prefix_tokens:
        raise UsageError(
            f"workload.prefix_tokens={workload.prefix_tokens}: prompts are at most {most} tokens "
            "long, the prefix among them; raise workload.input_tokens or lower the prefix"
        )
    if context is not None and most is not None and most >= context:
        raise UsageError(
            f"workload.input_tokens: prompts of up to {most} tokens do not fit the context of "
            f"{context} with room for an answer; lower it or raise engine.max_model_len"
        )
