"""A checkpoint's numbers, read by memory map a piece at a time, without torch.

Pages are given back after each piece, so that memory stays small whatever the checkpoint's size.
numpy is imported only where numbers are read.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from drafters.headers import TensorHeader
from drafters.spec import DrafterError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

PIECE = 1 << 22  # elements read at once
_NUMPY = {"BOOL": "?", "U8": "u1", "I8": "i1", "I32": "<i4", "I64": "<i8", "BF16": "<u2"}
_NUMPY |= {"F16": "<f2", "F32": "<f4", "F64": "<f8"}
FLOATS = ("F16", "BF16", "F32", "F64")


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor's numbers in brief. `nan`, `inf`: how many; the rest over the finite ones.

    `low`, `high`, `mean_abs`: None where nothing is finite.
    """

    nan: int
    inf: int
    low: float | None
    high: float | None
    mean_abs: float | None

    @property
    def constant(self) -> bool:
        """Whether every element is the same finite number."""
        return not self.nan and not self.inf and self.low is not None and self.low == self.high


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """How the rows of a matrix are spread, from a sample of them.

    `spread`: standard deviation of the rows' squared norms over their mean. `spread_if_drawn`:
    the same of rows whose elements are drawn independently from one distribution of this kurtosis,
    as an embedding is before training: sqrt((kurtosis - 1) / width).
    """

    spread: float
    spread_if_drawn: float

    @property
    def looks_drawn(self) -> bool:
        """Whether the rows look drawn at random. Training spreads them: tokens differ in use."""
        return self.spread < 1.5 * self.spread_if_drawn


@contextmanager
def mapped(header: TensorHeader) -> Iterator[Array]:
    """The tensor's elements [n] as stored (bf16 as unsigned 16-bit), read as they are touched.

    Raises DrafterError where the file cannot be read or the type has no numbers here.
    """
    import numpy as np

    kind = _NUMPY.get(header.dtype)
    if kind is None:
        raise DrafterError(f"{header.file}: a tensor of type {header.dtype} is not read")
    if header.elements == 0:
        yield np.zeros(0, kind)
        return
    start = header.begin - header.begin % mmap.ALLOCATIONGRANULARITY
    try:
        with header.file.open("rb") as stream:
            memory = mmap.mmap(
                stream.fileno(), header.end - start, offset=start, access=mmap.ACCESS_READ
            )
    except (OSError, ValueError) as error:
        raise DrafterError(f"{header.file} cannot be read: {error}") from None
    try:
        yield np.frombuffer(memory, kind, count=header.elements, offset=header.begin - start)
    finally:
        _forget(memory)


def _forget(memory: mmap.mmap) -> None:
    try:
        memory.close()
    except BufferError:  # an array over it is still alive; it closes with that
        return


def pieces(header: TensorHeader) -> Iterator[Array]:
    """The tensor as stored, flat, in pieces of at most `PIECE` elements, each a copy."""
    with mapped(header) as flat:
        for begin in range(0, len(flat), PIECE):
            yield flat[begin : begin + PIECE].copy()
            owner = flat.base
            if isinstance(owner, memoryview) and isinstance(owner.obj, mmap.mmap):
                owner.obj.madvise(mmap.MADV_DONTNEED)


def to_float(raw: Array, dtype: str) -> Array:
    """Stored numbers -> float32, same shape."""
    import numpy as np

    if dtype == "BF16":
        widened: Array = (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return widened
    return raw.astype(np.float32)


def stats(header: TensorHeader) -> Stats:
    """Look at every element once."""
    import numpy as np

    nan = inf = count = 0
    low, high, total = math.inf, -math.inf, 0.0
    for raw in pieces(header):
        piece = to_float(raw, header.dtype)
        least, most = float(piece.min()), float(piece.max())
        if not (math.isfinite(least) and math.isfinite(most)):
            nan += int(np.isnan(piece).sum())
            inf += int(np.isinf(piece).sum())
            piece = piece[np.isfinite(piece)]
            if piece.size == 0:
                continue
            least, most = float(piece.min()), float(piece.max())
        low, high = min(low, least), max(high, most)
        total += float(np.abs(piece).sum(dtype=np.float64))
        count += piece.size
    if count == 0:
        return Stats(nan=nan, inf=inf, low=None, high=None, mean_abs=None)
    return Stats(nan=nan, inf=inf, low=low, high=high, mean_abs=total / count)


class Ones(msgspec.Struct, frozen=True, kw_only=True):
    """Elements that are exactly 1, those beside it by a few of bfloat16's steps, and the others.

    `off`: the median distance from 1 of all that are not 1; None where all are.
    """

    exact: int
    beside: int
    others: int
    off: float | None

    @property
    def lost(self) -> bool:
        """Whether the ones were never trained, or lost: a trained weight is seldom exactly 1.

        Where rounding makes ones of trained weights, more are beside 1 than on it; where training
        hardly moved any, the others are near it.
        """
        return self.exact >= 8 and self.exact > 3 * self.beside and (self.off or 0.0) > 0.1


def ones_of(header: TensorHeader) -> Ones:
    """Look for ones in a vector."""
    import numpy as np

    with mapped(header) as flat:
        off = np.abs(to_float(flat, header.dtype) - 1.0)
    exact, near = int((off == 0).sum()), int((off <= 0.03).sum())
    rest = off[off > 0]
    return Ones(
        exact=exact,
        beside=near - exact,
        others=off.size - near,
        off=float(np.median(rest)) if rest.size else None,
    )


def integers(header: TensorHeader) -> Array:
    """A table of whole numbers or booleans [n], whole in memory, as int64."""
    import numpy as np

    with mapped(header) as flat:
        return flat.astype(np.int64)


def rows_of(header: TensorHeader, which: Array) -> Array:
    """The rows `which` [m] of a matrix [n, width] -> float32 [m, width]."""
    with mapped(header) as flat:
        matrix = flat.reshape(header.shape)
        return to_float(matrix[which], header.dtype)


def sample(count: int, most: int = 1024) -> Array:
    """Up to `most` row numbers, evenly spaced over `count` rows."""
    import numpy as np

    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))


def spread_of(rows: Array) -> Rows | None:
    """How rows [m, width] are spread; None where there are too few, or they are zero."""
    import numpy as np

    if len(rows) < 16 or not np.isfinite(rows).all():
        return None
    squares = rows.astype(np.float64) ** 2
    mean = float(squares.mean())
    if mean == 0:
        return None
    kurtosis = float((squares**2).mean()) / mean**2
    norms = squares.sum(-1)
    drawn = math.sqrt(max(kurtosis - 1, 1e-9) / rows.shape[1])
    return Rows(spread=float(norms.std() / norms.mean()), spread_if_drawn=drawn)


class Likeness(msgspec.Struct, frozen=True, kw_only=True):
    """Two matrices, row by row. `equal`: every element, to the coarser type's rounding.

    `cosine`: mean over the sampled rows that have a direction; None where none has.
    """

    equal: bool
    cosine: float | None


def likeness(ours: TensorHeader, theirs: TensorHeader, rows: Array | None = None) -> Likeness:
    """Compare matrices [n, width]; `rows` [n]: which of theirs stand beside ours (None: the same).

    A sample is looked at first; only where it is equal the whole is.
    """
    import numpy as np

    which = sample(ours.shape[0])
    a = rows_of(ours, which)
    b = rows_of(theirs, which if rows is None else rows[which])
    norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    useful = (norms > 0) & np.isfinite(norms)
    cosines = (a[useful] * b[useful]).sum(-1) / norms[useful]
    cosine = float(cosines.mean()) if cosines.size else None
    rounding = max(_rounding(ours.dtype), _rounding(theirs.dtype))
    equal = _same(a, b, rounding if ours.dtype != theirs.dtype else 0.0)
    if equal and len(which) < ours.shape[0]:
        step = max(1, PIECE // ours.shape[1])
        for begin in range(0, ours.shape[0], step):
            piece = np.arange(begin, min(begin + step, ours.shape[0]))
            other = piece if rows is None else rows[piece]
            tolerance = rounding if ours.dtype != theirs.dtype else 0.0
            if not _same(rows_of(ours, piece), rows_of(theirs, other), tolerance):
                return Likeness(equal=False, cosine=cosine)
    return Likeness(equal=equal, cosine=cosine)


def _rounding(dtype: str) -> float:
    return {"BF16": 2**-8, "F16": 2**-11}.get(dtype, 2**-24)


def _same(a: Array, b: Array, tolerance: float) -> bool:
    import numpy as np

    if tolerance == 0:
        return bool(np.array_equal(a, b))
    return bool((np.abs(a - b) <= tolerance * np.maximum(np.abs(a), np.abs(b))).all())
