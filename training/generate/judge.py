"""The gate of generate: what is wrong with samples, how many are, and which are left out."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from harness.errors import UsageError
from training.files import write_record
from training.gate import Check
from training.generate.collect import variables_of
from training.generate.meter import Pace
from training.generate.text import TargetText
from training.generate.wanted import Wanted
from training.plan import GenerateSection, TrainingPlan
from training.samples import DROPPED, Sample, read_samples

FAULTS = ("truncated", "empty", "degenerate", "misplaced", "duplicate")
"""What a sample may be left out for, in the order in which one reason is named of several."""
CUT = ("length", "abort")
MOST_ENCODED = 2000
"""Samples, evenly spread, whose text is tokenised again: of very many that would take minutes."""


class Found(msgspec.Struct, kw_only=True):
    """What was counted over the samples. `faults` holds every reason of every sample."""

    samples: int = 0
    faults: Counter[str] = msgspec.field(default_factory=Counter)
    dropped: dict[str, str] = msgspec.field(default_factory=dict)
    finish_reasons: Counter[str] = msgspec.field(default_factory=Counter)
    categories: Counter[str] = msgspec.field(default_factory=Counter)
    ids_from: Counter[str] = msgspec.field(default_factory=Counter)
    prompt_tokens: int = 0
    answer_tokens: int = 0
    kept_tokens: int = 0
    kept_answer_tokens: int = 0
    decoded: int = 0
    encoded: int = 0
    encoded_of: int = 0
    agreeing: int = 0
    agreeing_of: int = 0
    templated: int = 0
    templated_of: int = 0
    output: str = ""

    @property
    def kept(self) -> int:
        """Samples that are not left out."""
        return self.samples - len(self.dropped)


def faults_of(sample: Sample, text: TargetText) -> list[str]:
    """What is wrong with one sample by itself, in the order of `FAULTS`."""
    from harness.analyse.degenerate import LEAST_TOKENS, in_circles

    ids = sample.answer_ids
    found = []
    if sample.finish_reason in CUT:
        found.append("truncated")
    if not (sample.answer or "").strip() and sample.finish_reason not in CUT:
        found.append("empty")
    if len(ids) >= LEAST_TOKENS and in_circles(ids, sample.finish_reason):
        found.append("degenerate")
    if misplaced(sample, text):
        found.append("misplaced")
    return found


def misplaced(sample: Sample, text: TargetText) -> bool:
    """Whether an end or think token stands where none belongs, or is missing where one does.

    An answer that stopped ends with an end token, and none stands before that. A thought that was
    opened is closed, unless it was cut; nothing is opened or closed twice.
    """
    ids = sample.answer_ids
    if not ids:
        return False
    if any(i in text.end_ids for i in ids[:-1]):
        return True
    if sample.finish_reason == "stop" and ids[-1] not in text.end_ids:
        return True
    first, last = text.think_ids
    if first is None or last is None:
        return False
    opened = text.opened(sample.token_ids[: sample.loss_from])
    opens, closes = ids.count(first) + opened, ids.count(last)
    if opens > 1 or closes > opens:
        return True
    if first in ids and ids.index(first) > (ids.index(last) if last in ids else 0) > 0:
        return True
    return opens > closes and sample.finish_reason not in CUT


def examine(folder: Path, text: TargetText, plan: TrainingPlan, wanted: Sequence[Wanted]) -> Found:
    """Look at every sample of the folder, and write down which are left out.

    Raises `UsageError` where a shard is damaged.
    """
    (folder / DROPPED).unlink(missing_ok=True)
    found = Found()
    asked = {one.id: one for one in wanted}
    every = max(1, len(asked) // MOST_ENCODED)
    seen: set[bytes] = set()
    pace = Pace("generate: judged", len(asked))
    for number, sample in enumerate(read_samples(folder)):
        pace.step()
        if sample.id not in asked:
            raise UsageError(
                f"{folder}: holds sample {sample.id!r}, which the plan does not ask for; give "
                "another --out, or remove that folder"
            )
        reasons = faults_of(sample, text)
        key = hashlib.sha256(msgspec.json.encode(sample.token_ids)).digest()
        if key in seen:
            reasons.append("duplicate")
        seen.add(key)
        _count(found, sample, reasons, keep_truncated=plan.generate.keep_truncated)
        _round_trip(found, sample, text, encode=number % every == 0)
        _template(found, sample, text, variables_of(asked[sample.id].prompt, plan))
    write_record(folder / DROPPED, found.dropped)
    found.output = digest(read_samples(folder))
    return found


def digest(samples: Iterable[Sample]) -> str:
    """Of samples in order: the same whenever, and in however many runs, they were made."""
    whole = hashlib.sha256()
    for _ in hashed(samples, whole):
        pass
    return whole.hexdigest()


def hashed(samples: Iterable[Sample], whole: hashlib._Hash) -> Iterator[Sample]:
    """The samples as they come, each added to the digest first."""
    for sample in samples:
        whole.update(msgspec.json.encode(sample) + b"\n")
        yield sample


def _count(found: Found, sample: Sample, reasons: list[str], *, keep_truncated: bool) -> None:
    found.samples += 1
    found.faults.update(reasons)
    found.finish_reasons[sample.finish_reason or "none"] += 1
    found.ids_from[sample.ids_from] += 1
    found.prompt_tokens += sample.loss_from
    found.answer_tokens += len(sample.answer_ids)
    keep = keep_truncated and sample.answer_ids  # cut before its first token it is no answer
    against = [one for one in reasons if not (one == "truncated" and keep)]
    if against:
        found.dropped[sample.id] = against[0]
    else:
        found.categories[sample.category or "none"] += 1
        found.kept_tokens += len(sample.token_ids)
        found.kept_answer_tokens += len(sample.answer_ids)
    if sample.agrees is not None:
        found.agreeing_of += 1
        found.agreeing += sample.agrees


def _round_trip(found: Found, sample: Sample, text: TargetText, *, encode: bool) -> None:
    found.decoded += text.decode(sample.answer_ids) == sample.text
    if encode:
        found.encoded_of += 1
        found.encoded += tuple(text.encode(sample.text)) == sample.answer_ids


def _template(found: Found, sample: Sample, text: TargetText, variables: Mapping[str, Any]) -> None:
    """Whether the prompt's ids are what the target folder's chat template gives."""
    if sample.messages is None:
        return
    own = text.prompt_ids(sample.messages, variables)
    found.templated_of += 1
    found.templated += tuple(own) == sample.token_ids[: sample.loss_from]


def checks_of(
    found: Found, limits: GenerateSection, wanted: int, failures: Mapping[str, str]
) -> tuple[Check, ...]:
    """The gate's checks; shares are of the samples that were answered.

    `failures`: why samples are missing, by id; the commonest reason is told.
    """
    n = found.samples
    most = {
        "truncated": (limits.most_truncated, "raise generate.max_tokens (a new --out)"),
        "empty": (limits.most_empty, "look at those prompts and at the chat template"),
        "degenerate": (limits.most_degenerate, "give prompts that fit the target's template"),
        "misplaced": (limits.most_misplaced, "look at the server's template and stop tokens"),
        "duplicate": (limits.most_duplicate, "leave doubled prompts out, or raise temperature"),
    }
    failed = wanted - n
    why = Counter(failures.values()).most_common(1)
    again = "run the same command again to retry" + (f" (mostly: {why[0][0]})" if why else "")
    return (
        Check(
            name="kept samples",
            passed=found.kept >= limits.least_samples,
            value=found.kept,
            limit=limits.least_samples,
            relation=">=",
            advice="ask more prompts, or see what was left out",
        ),
        _most("failed", failed, wanted, (limits.most_failed, again)),
        *(_most(name, found.faults[name], n, most[name]) for name in FAULTS),
        _least("ids give the text", found.decoded, n, 1.0),
        _least(
            "tokens agree with the server",
            found.agreeing,
            found.agreeing_of,
            limits.least_round_trip,
            advice="is target.path the tokenizer of the model that the server serves?",
        ),
        _least("text gives the ids", found.encoded, found.encoded_of, None),
        _least("prompts are the template's", found.templated, found.templated_of, None),
    )


def _most(name: str, count: int, of: int, limit: tuple[float, str]) -> Check:
    share = count / of if of else None
    return Check(
        name=f"{name} share",
        passed=share is not None and share <= limit[0],
        value=share,
        limit=limit[0],
        relation="<=",
        reason=f"{count} of {of}" if of else "there are no samples",
        advice=f"{limit[1]}, or allow more with generate.most_{name}",
    )


def _least(name: str, count: int, of: int, limit: float | None, *, advice: str = "") -> Check:
    """A share that must be at least `limit`; None, or nothing to measure: it is only told."""
    share = count / of if of else None
    return Check(
        name=name,
        passed=share is None or limit is None or share >= limit,
        value=share,
        limit=limit,
        relation=">=" if limit is not None else "",
        reason=f"{count} of {of}" if of else "nothing to measure it by",
        advice=advice,
    )
