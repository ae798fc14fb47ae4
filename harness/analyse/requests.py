"""Each request's own counts of draft tokens as columns, from the engine or from the client.

Everything about acceptance that has an interval or a split is computed from these columns; one
row is one request that was answered whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Literal

import msgspec

from harness.measure.metrics import LONGEST_STEP
from harness.records import DraftCounts, RequestRecord

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Counts = NDArray

NOTHING = DraftCounts(drafts=0, drafted=0, accepted=0, per_position=())


def own_counts(r: RequestRecord) -> DraftCounts | None:
    """What the engine told of a request; an answer of one token had no verify step to tell of."""
    if r.acceptance is None and r.output_tokens is not None and r.output_tokens <= 1:
        return NOTHING
    return r.acceptance


def cut_tokens(r: RequestRecord) -> int | None:
    """Tokens of a request's last verify step that were cut off at its end.

    The prefill gives the first token and a step one more than it accepted, so that the steps made
    drafts + accepted tokens and the answer holds output_tokens - 1 of them. None where that does
    not come out: a count is missing, steps were made without a draft, or counts go on past the end.
    """
    counts = own_counts(r)
    if counts is None or r.output_tokens is None or r.output_tokens < 1:
        return None
    cut = counts.drafts + counts.accepted - (r.output_tokens - 1)
    return cut if 0 <= cut <= drafted_a_step(counts) else None


def past_end(r: RequestRecord) -> int | None:
    """Accepted draft tokens behind a request's end: told by the engine, or from what was cut.

    What is cut off first is the step's bonus token, which is no draft token.
    """
    counts = own_counts(r)
    if counts is not None and counts.past_end is not None:
        return counts.past_end
    cut = cut_tokens(r)
    return None if cut is None else max(0, cut - 1)


def drafted_a_step(counts: DraftCounts) -> int:
    """k: draft tokens a verify step, as the counts tell; 0 where they do not.

    Draft tokens that a grammar forbids leave the drafted count, so that positions may tell more.
    """
    mean = round(counts.drafted / counts.drafts) if counts.drafted and counts.drafts else 0
    return max(mean, len(counts.per_position or ()))


class Columns(msgspec.Struct, frozen=True, kw_only=True):
    """One row a request. `positions[:, i]`: steps that accepted at least to i; None: not told.

    `cluster` numbers the prompts from 0: requests of one prompt are one cluster. `output` is
    `accepted` without what stood behind the end, -1 where that is not known.
    """

    source: Literal["per_request", "client"]
    drafts: Counts
    accepted: Counts
    drafted: Counts | None
    positions: Counts | None
    output: Counts
    cluster: Counts

    @property
    def longest(self) -> int | None:
        """Tokens a verify step can give; None where that is not known."""
        if self.positions is None or self.source == "client" or not self.positions.shape[1]:
            return None
        return int(self.positions.shape[1]) + 1

    def summed(self, values: Counts) -> Counts:
        """`values` of each request, added up for each cluster."""
        import numpy as np

        return np.bincount(self.cluster, weights=values, minlength=int(self.cluster.max()) + 1)


def columns(records: Sequence[RequestRecord]) -> Columns | None:
    """The engine's figures where it told them of every request, else the client's, else None."""
    if not records:
        return None
    told = [own_counts(r) for r in records]
    known = [c for c in told if c is not None]
    if len(known) == len(told) and any(c.drafts for c in known):
        return _engine(records, known)
    return _client(records)


def clusters(records: Sequence[RequestRecord]) -> Counts:
    """Each request's cluster: its prompt's, or its conversation's."""
    import numpy as np

    numbers: dict[str, int] = {}
    names = (r.conversation or r.prompt_id for r in records)
    rows = (numbers.setdefault(name, len(numbers)) for name in names)
    return np.fromiter(rows, dtype=np.int64, count=len(records))


def _engine(records: Sequence[RequestRecord], told: list[DraftCounts]) -> Columns:
    import numpy as np

    def column(values: Iterable[int | None]) -> Counts:
        """-1 where a value is not told."""
        known = (-1 if v is None else v for v in values)
        return np.fromiter(known, np.int64, len(told))

    drafts, accepted = column(c.drafts for c in told), column(c.accepted for c in told)
    drafted = column(c.drafted for c in told)
    tokens = column(r.output_tokens for r in records)
    widths = column(None if c.per_position is None else len(c.per_position) for c in told)
    said = column(c.past_end for c in told)
    mean = np.where((drafted > 0) & (drafts > 0), drafted / np.maximum(drafts, 1), 0)
    # As `past_end`, for all requests at once.
    k = np.maximum(np.rint(mean).astype(np.int64), widths)
    cut = drafts + accepted - (tokens - 1)
    known = (tokens >= 1) & (cut >= 0) & (cut <= k)
    behind = np.where(said >= 0, said, np.where(known, np.maximum(0, cut - 1), -1))
    return Columns(
        source="per_request",
        drafts=drafts,
        accepted=accepted,
        drafted=drafted if (drafted >= 0).all() else None,
        positions=_positions(told, drafts, widths),
        output=np.where(behind >= 0, accepted - behind, -1),
        cluster=clusters(records),
    )


def _positions(told: list[DraftCounts], drafts: Counts, widths: Counts) -> Counts | None:
    """One column a position, requests that told of fewer filled up with zeros."""
    import numpy as np

    if ((widths < 0) & (drafts > 0)).any():
        return None
    longest = max(0, int(widths.max()))
    found = np.zeros((len(told), longest), np.int64)
    sizes = np.maximum(widths, 0)
    values = chain.from_iterable(c.per_position or () for c in told)
    found[np.arange(longest) < sizes[:, None]] = np.fromiter(values, np.int64, int(sizes.sum()))
    return found


def chunks_of(records: Sequence[RequestRecord]) -> tuple[Counts, Counts, Counts] | None:
    """Of each request its number of chunks and its first's tokens; of all later chunks the tokens.

    None where the server told no tokens a chunk, or where chunks are of another making than
    verify steps.
    """
    import numpy as np

    n = len(records)
    rows = [r.chunk_tokens for r in records]
    if not n or None in rows:
        return None
    known = [row or () for row in rows]
    sizes = np.fromiter(map(len, known), np.int64, n)
    tokens = np.fromiter(chain.from_iterable(known), np.int64, int(sizes.sum()))
    begins = np.cumsum(sizes) - sizes
    some = sizes > 0
    first = np.zeros(n, np.int64)
    first[some] = tokens[begins[some]]
    steps = tokens[later_ones(sizes)]
    return None if len(steps) and int(steps.max()) > LONGEST_STEP else (sizes, first, steps)


def later_ones(sizes: Counts) -> Counts:
    """Of all chunks in a row, which are not the first of their request."""
    import numpy as np

    later = np.ones(int(sizes.sum()), bool)
    begins = np.cumsum(sizes) - sizes
    later[begins[sizes > 0]] = False
    return later


def _client(records: Sequence[RequestRecord]) -> Columns | None:
    """Every chunk after a request's first taken as a verify step."""
    import numpy as np

    found = chunks_of(records)
    if found is None or not len(found[2]):
        return None
    n = len(records)
    sizes, _, steps = found
    drafts = np.maximum(0, sizes - 1)
    row = np.repeat(np.arange(n), drafts)
    accepted = np.bincount(row, weights=steps - 1, minlength=n).astype(np.int64)
    longest = int(steps.max()) - 1
    at_least = [np.bincount(row[steps > i + 1], minlength=n) for i in range(longest)]
    return Columns(
        source="client",
        drafts=drafts,
        accepted=accepted,
        drafted=None,
        positions=np.stack(at_least, axis=1) if at_least else np.zeros((n, 0), np.int64),
        output=accepted,
        cluster=clusters(records),
    )
