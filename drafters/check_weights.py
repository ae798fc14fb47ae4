"""A drafter's numbers: broken, dead or untrained tensors, the draft vocabulary, and what it shares.

Every weight is read once, a piece at a time (`drafters.weights`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from drafters.findings import Finding, Severity
from drafters.headers import TensorHeader, read_headers
from drafters.reading import Checkpoint, Target
from drafters.spec import DrafterError
from drafters.weights import (
    FLOATS,
    Stats,
    integers,
    likeness,
    ones_of,
    rows_of,
    sample,
    spread_of,
    stats,
)

if TYPE_CHECKING:
    from drafters.weights import Array

Watch = Callable[[str, int], None]
"""Told each tensor's name and bytes before it is read."""
_UNRELATED = 0.2  # mean cosine of rows below which two embeddings have nothing in common
_SANE_NORM = (1e-3, 1e3)
_LATENT_NORMS = ("q_a_layernorm.weight", "kv_a_layernorm.weight")
"""Latents are padded to the width that kernels know; the padding's weights are 1 for good."""


def check_weights(checkpoint: Checkpoint, watch: Watch) -> Iterator[Finding]:
    """NaN and infinities, tensors of one value, norms out of all proportion."""
    for name, header in sorted(checkpoint.tensors.items()):
        if header.dtype not in FLOATS or header.elements == 0:
            continue
        watch(name, header.end - header.begin)
        yield from _one(name, header)


def _one(name: str, header: TensorHeader) -> Iterator[Finding]:
    found = stats(header)
    make = _maker(header)
    if found.nan or found.inf:
        yield make(
            "error",
            "not_finite",
            f"tensor {name} holds {found.nan} NaN and {found.inf} infinite of {header.elements}",
            "one of them spoils every draft",
            "take an earlier checkpoint; look for the spike in the training's log",
        )
    if found.constant and header.elements > 1:
        yield from _constant(name, found, make)
    elif _is_norm(name) and found.mean_abs is not None:
        low, high = _SANE_NORM
        largest = max(abs(found.low or 0.0), abs(found.high or 0.0))
        if found.mean_abs < low or largest > high:
            yield make(
                "error",
                "norm_out_of_range",
                f"norm {name} has weights from {found.low:.3g} to {found.high:.3g}, mean "
                f"{found.mean_abs:.3g}",
                f"trained norms lie between {low:g} and {high:g}",
                "take an earlier checkpoint, or look for what was stored in its place",
            )
        elif not name.endswith(_LATENT_NORMS) and (ones := ones_of(header)).lost:
            yield make(
                "warning",
                "norm_partly_one",
                f"norm {name} is exactly 1 in {ones.exact} of {header.elements} places, and the "
                f"others are {ones.off:.2g} off 1 in the middle",
                "a trained weight is seldom exactly 1: these were lost, or never trained",
                "take an earlier checkpoint, or copy this one again",
            )


def _constant(
    name: str, found: Stats, make: Callable[[Severity, str, str, str, str], Finding]
) -> Iterator[Finding]:
    if _is_norm(name) and found.low == 1.0:
        yield make(
            "note",
            "norm_untrained",
            f"norm {name} is 1 everywhere",
            "as before training: it was frozen, or never trained",
            "",
        )
        return
    zero = found.low == 0.0
    yield make(
        "error",
        "all_zero" if zero else "constant",
        f"tensor {name} is {'zero' if zero else f'{found.low:g}'} everywhere",
        "it was never written, or lost on the way",
        "copy the checkpoint again, or take an earlier one",
    )


def _is_norm(name: str) -> bool:
    return "norm" in name


def _maker(header: TensorHeader) -> Callable[[Severity, str, str, str, str], Finding]:
    def make(severity: Severity, code: str, what: str, why: str, remedy: str) -> Finding:
        return Finding(
            severity=severity, code=code, where=str(header.file), what=what, why=why, remedy=remedy
        )

    return make


class Vocabulary:
    """What the tables d2t and t2d say. `kept`: target ids by draft id [D], None if unusable."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.findings: list[Finding] = []
        self.kept: Array | None = None
        d2t, t2d = checkpoint.tensors.get("d2t"), checkpoint.tensors.get("t2d")
        spec = checkpoint.spec
        if d2t is None or d2t.shape != (spec.draft_vocab_size,):
            return  # missing and misshapen tensors are told by their headers
        try:
            table = integers(d2t)
            in_draft = None if t2d is None or t2d.shape != (spec.vocab_size,) else integers(t2d)
        except DrafterError as error:
            self._add(d2t, "error", "table_unread", str(error))
            return
        self._look(table, in_draft, spec.vocab_size, d2t)

    def _look(self, table: Array, in_draft: Array | None, vocab: int, d2t: TensorHeader) -> None:
        import numpy as np

        kept = table + np.arange(len(table))
        marked = None if in_draft is None else np.flatnonzero(in_draft)
        if _absolute(table, kept, marked, vocab):
            self._add(
                d2t,
                "error",
                "d2t_absolute",
                "d2t holds target ids, not offsets",
                "engines add the draft id to it, so that every proposal is another token",
                "store d2t[i] - i",
            )
            return
        increasing = bool((np.diff(kept) > 0).all())
        if not increasing:
            at = int(np.flatnonzero(np.diff(kept) <= 0)[0])
            self._add(
                d2t,
                "error",
                "d2t_order",
                f"d2t is not strictly increasing: draft ids {at} and {at + 1} are target ids "
                f"{int(kept[at])} and {int(kept[at + 1])}",
                "two draft tokens must not stand for one, and t2d lists them in order",
                "rebuild the tables from the draft vocabulary",
            )
        if len(kept) and (int(kept.min()) < 0 or int(kept.max()) >= vocab):
            self._add(
                d2t,
                "error",
                "d2t_range",
                f"d2t names target ids from {int(kept.min())} to {int(kept.max())} of a vocabulary "
                f"of {vocab}",
                "an engine would stop, or write beside its logits",
                "rebuild the tables from the draft vocabulary",
            )
            return
        if increasing:
            self.kept = kept
        if marked is not None:
            self._compare(kept, marked, d2t)

    def _compare(self, kept: Array, marked: Array, d2t: TensorHeader) -> None:
        """The target ids that d2t names beside those that t2d marks."""
        import numpy as np

        named = np.unique(kept)
        if np.array_equal(named, marked):
            return
        differ = len(np.setxor1d(named, marked))
        self._add(
            d2t,
            "error",
            "t2d_disagrees",
            f"t2d marks {len(marked)} tokens, d2t names {len(named)}, and {differ} are in one of "
            "them only",
            "the head's rows belong to one of the two",
            "take both from the run that trained the head",
        )

    def _add(
        self, header: TensorHeader, severity: Severity, code: str, what: str, why: str = "",
        remedy: str = "",
    ) -> None:  # fmt: skip
        self.findings.append(_maker(header)(severity, code, what, why, remedy))


def _absolute(table: Array, kept: Array, marked: Array | None, vocab: int) -> bool:
    """Whether a d2t holds the target ids themselves."""
    import numpy as np

    if len(table) < 2 or not bool((np.diff(table) > 0).all()) or int(table[0]) < 0:
        return False  # offsets of an increasing vocabulary repeat wherever neighbours are kept
    if int(table[-1]) >= vocab:
        return False
    if marked is not None:
        return bool(np.array_equal(table, marked)) and not np.array_equal(kept, marked)
    # without t2d: as offsets the same numbers would leave the vocabulary
    return int(kept[-1]) >= vocab


def check_ends(checkpoint: Checkpoint, vocabulary: Vocabulary) -> Iterator[Finding]:
    """Whether the end token can be proposed at all."""
    import numpy as np

    end = checkpoint.spec.eos_token_id
    if vocabulary.kept is None or end is None or end in np.asarray(vocabulary.kept):
        return
    yield _maker(checkpoint.tensors["d2t"])(
        "warning",
        "end_not_drafted",
        f"the end token {end} is not in the draft vocabulary",
        "the last step of every answer cannot be drafted",
        "keep the end token when the vocabulary is chosen",
    )


def check_sharing(
    checkpoint: Checkpoint, target: Target | None, vocabulary: Vocabulary, watch: Watch
) -> Iterator[Finding]:
    """The drafter's embedding and head beside the target's, and what engines do with them."""
    embedding = checkpoint.tensors.get("embed_tokens.weight")
    theirs: dict[str, TensorHeader] = {}
    if target is not None:
        try:
            theirs = read_headers(target.path)
        except DrafterError as error:
            yield Finding(
                severity="note",
                code="target_weights",
                where=str(target.path),
                what="embedding and head were not compared with the target's",
                why=str(error),
            )
    if embedding is not None and len(embedding.shape) == 2 and embedding.dtype in FLOATS:
        watch("embed_tokens.weight beside the target's", 0)
        other = _by_suffix(theirs, "embed_tokens.weight")
        yield from _embedding(checkpoint, embedding, other)
    head = checkpoint.tensors.get("lm_head.weight")
    other = _by_suffix(theirs, "lm_head.weight") or _by_suffix(theirs, "embed_tokens.weight")
    if head is not None and other is not None:
        watch("lm_head.weight beside the target's", 0)
        yield from _head(head, other, vocabulary)


def _by_suffix(tensors: dict[str, TensorHeader], suffix: str) -> TensorHeader | None:
    names = sorted((n for n in tensors if n == suffix or n.endswith("." + suffix)), key=len)
    found = tensors[names[0]] if names else None
    return found if found and found.dtype in FLOATS and len(found.shape) == 2 else None


def _embedding(
    checkpoint: Checkpoint, ours: TensorHeader, theirs: TensorHeader | None
) -> Iterator[Finding]:
    make = _maker(ours)
    spread = spread_of(rows_of(ours, sample(ours.shape[0])))
    drawn = spread is not None and spread.looks_drawn
    if theirs is None or theirs.shape != ours.shape:
        if drawn:
            yield make(
                "warning",
                "embedding_random",
                "embed_tokens looks as drawn at random: its rows are all as long as one another",
                "training spreads them; vLLM would use it, SGLang puts the target's in its place",
                "compare it with the target's (--target), or export without it",
            )
        return
    found = likeness(ours, theirs)
    if found.equal:
        yield make(
            "note",
            "embedding_shared",
            "embed_tokens equals the target's",
            "vLLM and SGLang share the target's: it takes room on disk only",
            "",
        )
    elif drawn and (found.cosine is None or found.cosine < _UNRELATED):
        yield make(
            "error",
            "embedding_random",
            f"embed_tokens looks as drawn at random (mean cosine to the target's "
            f"{_number(found.cosine)}, rows all as long as one another)",
            "vLLM would use it; SGLang puts the target's in its place, and hides it",
            "export the embedding it was trained with, or leave it out",
        )
    else:
        unrelated = found.cosine is None or found.cosine < _UNRELATED
        yield make(
            "warning",
            "embedding_differs",
            f"embed_tokens is not the target's (mean cosine {_number(found.cosine)})",
            "vLLM uses the drafter's, SGLang puts the target's in its place"
            if checkpoint.spec.target_hidden_size == checkpoint.spec.hidden_size
            else "vLLM and SGLang use the drafter's",
            "make sure that it was trained: a drafter's embedding is usually the target's"
            if unrelated
            else "serve it with vLLM",
        )


def _head(ours: TensorHeader, theirs: TensorHeader, vocabulary: Vocabulary) -> Iterator[Finding]:
    make = _maker(ours)
    if ours.shape[1] != theirs.shape[1]:
        return
    rows = vocabulary.kept
    if rows is None and ours.shape[0] != theirs.shape[0]:
        return
    if rows is not None and (len(rows) != ours.shape[0] or int(rows.max()) >= theirs.shape[0]):
        return
    found = likeness(ours, theirs, rows)
    if found.equal:
        share = "vLLM shares the target's" if rows is None else "neither engine shares it"
        yield make(
            "note",
            "head_equal",
            "lm_head equals the target's rows of the draft vocabulary",
            f"it was frozen in training; {share}",
            "",
        )
    else:
        yield make(
            "note",
            "head_differs",
            f"lm_head is not the target's (mean cosine {_number(found.cosine)})",
            "it was trained; vLLM and SGLang use the drafter's",
            "",
        )


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
