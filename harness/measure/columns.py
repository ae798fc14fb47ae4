"""Columns of many values: integers, lists, names, texts and counts of draft tokens.

Each keeps apart what is not known from what is 0. `take` gives some rows, `join` puts columns one
after another, `python` gives plain values back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from harness.records import DraftCounts

if TYPE_CHECKING:
    import pyarrow as pa

Integers = NDArray[np.int64]
Codes = NDArray[np.int32]
Packed = NDArray[np.signedinteger[Any]]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
TEXTS_AT_ONCE = 65_536
"""Rows of text compared in one go: more may exceed what one Arrow array can hold."""


def constant(value: Any, size: int, dtype: Any) -> NDArray[Any]:
    """`size` times the same value, in the memory of one."""
    return np.broadcast_to(np.array(value, dtype), (size,))


def taken(values: NDArray[Any], rows: Integers) -> NDArray[Any]:
    """`values[rows]`; what is constant stays so."""
    if len(values) and values.strides == (0,):
        return np.broadcast_to(values[0], (len(rows),))
    return values[rows]


def joined(parts: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    """Arrays one after another; none make an empty one."""
    if not parts:
        return np.zeros(0, dtype)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def packed(values: Packed) -> Packed:
    """The same integers in as few bytes each as they need."""
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    for kind in (np.int8, np.int16, np.int32):
        if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max:
            return values.astype(kind)
    return values


@dataclass(frozen=True, slots=True)
class Ints:
    """One integer a row, 0 where it is not `known`; `truth`: of true and false."""

    values: Integers
    known: Bools
    truth: bool = False

    @classmethod
    def of(cls, values: Sequence[int | None], *, truth: bool = False) -> Ints:
        """From plain values."""
        known = np.fromiter((v is not None for v in values), bool, len(values))
        return cls(np.fromiter((v or 0 for v in values), np.int64, len(values)), known, truth)

    @classmethod
    def join(cls, parts: Sequence[Ints]) -> Ints:
        """One after another."""
        values = joined([p.values for p in parts], np.int64)
        truth = bool(parts) and parts[0].truth
        return cls(values, joined([p.known for p in parts], bool), truth)

    def take(self, rows: Integers) -> Ints:
        """These rows."""
        return Ints(taken(self.values, rows), taken(self.known, rows), self.truth)

    def total(self) -> int | None:
        """The sum, or None where a part is not known or there is none."""
        return int(self.values.sum()) if len(self.values) and self.known.all() else None

    def python(self) -> list[Any]:
        """Plain values."""
        values: list[Any] = (self.values.astype(bool) if self.truth else self.values).tolist()
        if self.known.all():
            return values
        return [v if known else None for v, known in zip(values, self.known.tolist(), strict=True)]


@dataclass(frozen=True, slots=True)
class Lists:
    """One list of integers a row: `values[starts[i] : starts[i] + sizes[i]]`, empty if unknown.

    The values may be packed, so that only `flat`, `first` and `last` are safe to reckon with.
    """

    values: Packed
    starts: Integers
    sizes: Integers
    known: Bools

    @classmethod
    def of(cls, lists: Sequence[Sequence[int] | None]) -> Lists:
        """From plain values."""
        sizes = np.fromiter((len(own or ()) for own in lists), np.int64, len(lists))
        every = (value for own in lists for value in own or ())
        values = np.fromiter(every, np.int64, int(sizes.sum()))
        known = np.fromiter((own is not None for own in lists), bool, len(lists))
        return cls(values, np.cumsum(sizes) - sizes, sizes, known)

    @classmethod
    def join(cls, parts: Sequence[Lists]) -> Lists:
        """One after another."""
        sizes = joined([p.sizes for p in parts], np.int64)
        values = joined([p.packed() for p in parts], np.int64)
        known = joined([p.known for p in parts], bool)
        return cls(values, np.cumsum(sizes) - sizes, sizes, known)

    def take(self, rows: Integers) -> Lists:
        """These rows; the values stay where they are."""
        known = taken(self.known, rows)
        return Lists(self.values, taken(self.starts, rows), taken(self.sizes, rows), known)

    def later(self) -> Lists:
        """Each list without its first value."""
        sizes = np.maximum(self.sizes - 1, 0)
        return Lists(self.values, self.starts + (self.sizes > 0), sizes, self.known)

    def head(self, sizes: Integers) -> Lists:
        """The first so many values of each list, which has as many."""
        return Lists(self.values, self.starts, sizes, self.known)

    def first(self) -> Ints:
        """Each list's first value."""
        some = self.sizes > 0
        found = np.zeros(len(some), np.int64)
        found[some] = self.values[self.starts[some]]
        return Ints(found, some)

    def last(self) -> Ints:
        """Each list's last value."""
        some = self.sizes > 0
        found = np.zeros(len(some), np.int64)
        found[some] = self.values[(self.starts + self.sizes)[some] - 1]
        return Ints(found, some)

    def rows(self) -> Integers:
        """Of each value in `flat`, which row it is of."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    def flat(self) -> Integers:
        """The values of all rows in a row."""
        return self.packed().astype(np.int64, copy=False)

    def packed(self) -> Packed:
        """The same as they are kept; no copy where they lie so already."""
        some = self.sizes > 0
        starts, sizes = self.starts[some], self.sizes[some]
        if not len(starts):
            return self.values[:0]
        ends = starts + sizes
        if (starts[1:] == ends[:-1]).all():
            return self.values[starts[0] : ends[-1]]
        if (starts[1:] >= ends[:-1]).all():  # in order, with gaps: a mask is the quicker way
            edges = np.zeros(ends[-1] - starts[0] + 1, np.int8)
            edges[starts - starts[0]] += 1
            edges[ends - starts[0]] -= 1
            inside = np.cumsum(edges[:-1], dtype=np.int8).view(bool)
            return self.values[starts[0] : ends[-1]][inside]
        before = np.cumsum(sizes) - sizes
        return self.values[np.arange(int(sizes.sum())) + np.repeat(starts - before, sizes)]

    def python(self) -> list[Any]:
        """Plain tuples."""
        values = self.flat().tolist()
        ends = np.cumsum(self.sizes).tolist()
        found: list[Any] = []
        begin = 0
        for end, known in zip(ends, self.known.tolist(), strict=True):
            found.append(tuple(values[begin:end]) if known else None)
            begin = end
        return found


@dataclass(frozen=True, slots=True)
class Names:
    """One word a row of words that come again: `names[codes[i]]`, -1 where it is not known."""

    codes: Codes
    names: tuple[str, ...]

    @classmethod
    def of(cls, words: Iterable[str | None]) -> Names:
        """From plain values."""
        numbers: dict[str, int] = {}
        codes = [-1 if w is None else numbers.setdefault(w, len(numbers)) for w in words]
        return cls(np.array(codes, np.int32), tuple(numbers))

    @classmethod
    def join(cls, parts: Sequence[Names]) -> Names:
        """One after another, equal words with one code."""
        if parts and all(p.names == parts[0].names for p in parts):
            return cls(joined([p.codes for p in parts], np.int32), parts[0].names)
        numbers: dict[str, int] = {}
        codes = []
        for part in parts:
            own = [numbers.setdefault(name, len(numbers)) for name in part.names]
            codes.append(np.array([*own, -1], np.int32)[part.codes])
        return cls(joined(codes, np.int32), tuple(numbers))

    @property
    def known(self) -> Bools:
        """Where there is a word."""
        return self.codes >= 0

    def take(self, rows: Integers) -> Names:
        """These rows."""
        return Names(taken(self.codes, rows), self.names)

    def where(self, *words: str) -> Bools:
        """Which rows are one of these words."""
        wanted = np.array([*(name in words for name in self.names), False], bool)
        return wanted[self.codes]

    def mapped(self, change: dict[str, str]) -> Names:
        """The same with some words changed for others."""
        if not any(name in change for name in self.names):
            return self
        numbers: dict[str, int] = {}
        own = [numbers.setdefault(change.get(n, n), len(numbers)) for n in self.names]
        return Names(np.array([*own, -1], np.int32)[self.codes], tuple(numbers))

    def or_else(self, other: Names) -> Names:
        """The other's word where this one has none, or an empty one."""
        if not self.names:
            return other
        missing = ~self.known | self.where("")
        if not missing.any():
            return self
        both = Names.join([self, other])
        mine, theirs = np.split(both.codes, 2)
        return Names(np.where(missing, theirs, mine), both.names)

    def ranked(self) -> Names:
        """The same, words numbered in the order in which they first come, and no others."""
        highest = np.maximum.accumulate(np.append(np.int32(-1), self.codes))
        if highest[-1] == len(self.names) - 1 and (np.diff(highest) <= 1).all():
            return self  # each word that is new has the next number already
        some = self.known
        used, first = np.unique(self.codes[some], return_index=True)
        order = used[np.argsort(first, kind="stable")]
        ranks = np.full(len(self.names) + 1, -1, np.int32)
        ranks[order] = np.arange(len(order))
        return Names(ranks[self.codes], tuple(map(self.names.__getitem__, order.tolist())))

    def python(self) -> list[Any]:
        """Plain words."""
        words: list[str | None] = [*self.names, None]
        return [words[code] for code in self.codes.tolist()]


@dataclass(frozen=True, slots=True)
class Texts:
    """One text a row, as Arrow keeps it: a `pa.ChunkedArray`."""

    arrow: pa.ChunkedArray

    @classmethod
    def of(cls, texts: Sequence[str | None]) -> Texts:
        """From plain values."""
        import pyarrow as pa

        return cls(pa.chunked_array([pa.array(texts, pa.string())]))

    @classmethod
    def join(cls, parts: Sequence[Texts]) -> Texts:
        """One after another."""
        import pyarrow as pa

        return cls(pa.chunked_array([c for p in parts for c in p.arrow.chunks], pa.string()))

    def take(self, rows: Integers) -> Texts:
        """These rows."""
        return Texts(self.arrow.take(rows))

    def filled(self) -> Any:
        """The same with no text where it is not known."""
        import pyarrow.compute as pc

        return pc.fill_null(self.arrow, "")

    def python(self) -> list[Any]:
        """Plain texts."""
        return list(self.arrow.to_pylist())


@dataclass(frozen=True, slots=True)
class Drafts:
    """Counts of draft tokens, one row a request or a part; `told`: the row has any."""

    told: Bools
    drafts: Integers
    drafted: Ints
    accepted: Integers
    per_position: Lists
    past_end: Ints
    steps: Lists

    @classmethod
    def of(cls, counts: Sequence[DraftCounts | None]) -> Drafts:
        """From plain counts."""

        def each(name: str) -> list[Any]:
            return [None if c is None else getattr(c, name) for c in counts]

        return cls(
            told=np.fromiter((c is not None for c in counts), bool, len(counts)),
            drafts=Ints.of(each("drafts")).values,
            drafted=Ints.of(each("drafted")),
            accepted=Ints.of(each("accepted")).values,
            per_position=Lists.of(each("per_position")),
            past_end=Ints.of(each("past_end")),
            steps=Lists.of(each("steps")),
        )

    @classmethod
    def join(cls, parts: Sequence[Drafts]) -> Drafts:
        """One after another."""
        return cls(
            told=joined([p.told for p in parts], bool),
            drafts=joined([p.drafts for p in parts], np.int64),
            drafted=Ints.join([p.drafted for p in parts]),
            accepted=joined([p.accepted for p in parts], np.int64),
            per_position=Lists.join([p.per_position for p in parts]),
            past_end=Ints.join([p.past_end for p in parts]),
            steps=Lists.join([p.steps for p in parts]),
        )

    def take(self, rows: Integers) -> Drafts:
        """These rows."""
        return Drafts(
            told=taken(self.told, rows),
            drafts=taken(self.drafts, rows),
            drafted=self.drafted.take(rows),
            accepted=taken(self.accepted, rows),
            per_position=self.per_position.take(rows),
            past_end=self.past_end.take(rows),
            steps=self.steps.take(rows),
        )

    def python(self) -> list[Any]:
        """Plain counts."""
        rows = zip(
            self.told.tolist(),
            self.drafts.tolist(),
            self.drafted.python(),
            self.accepted.tolist(),
            self.per_position.python(),
            self.past_end.python(),
            self.steps.python(),
            strict=True,
        )
        return [
            DraftCounts(
                drafts=drafts,
                drafted=drafted,
                accepted=accepted,
                per_position=positions,
                past_end=past_end,
                steps=steps,
            )
            if told
            else None
            for told, drafts, drafted, accepted, positions, past_end, steps in rows
        ]


Column = Ints | Lists | Names | Texts | Drafts
