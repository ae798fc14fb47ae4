"""Each request's own counts of draft tokens as columns, from the engine or from the client.

Everything about acceptance that has an interval or a split is computed from these columns; one
row is one request that was answered whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from harness.findings import StepSource
from harness.measure.columns import Drafts, Ints
from harness.measure.metrics import chunk_steps
from harness.measure.table import RequestTable
from harness.records import DraftCounts, RequestRecord

Counts = NDArray


def own_counts(records: Sequence[RequestRecord]) -> Drafts:
    """What the engine told of each request; an answer of one token had no step to tell of."""
    table = RequestTable.of(records)
    counts, tokens = table.drafts, table.ints("output_tokens")
    nothing = ~counts.told & tokens.known & (tokens.values <= 1)
    if not nothing.any():
        return counts
    return replace(
        counts,
        told=counts.told | nothing,
        drafted=Ints(counts.drafted.values, counts.drafted.known | nothing),
        per_position=replace(counts.per_position, known=counts.per_position.known | nothing),
    )


def cut_tokens(counts: Drafts, tokens: Ints) -> Ints:
    """Tokens of each request's last verify step that were cut off at its end.

    The prefill gives the first token and a step one more than it accepted, so that the steps made
    drafts + accepted tokens and the answer holds output `tokens` - 1 of them. Not known where that
    does not come out: a count is missing, steps were made without a draft, or counts go on past the
    end.
    """
    cut = counts.drafts + counts.accepted - (tokens.values - 1)
    counted = counts.told & tokens.known & (tokens.values >= 1)
    return Ints(cut, counted & (cut >= 0) & (cut <= each_drafted_a_step(counts)))


def past_end(counts: Drafts, tokens: Ints) -> Ints:
    """Accepted draft tokens behind each request's end: told by the engine, or from what was cut.

    What is cut off first is the step's bonus token, which is no draft token.
    """
    cut, told = cut_tokens(counts, tokens), counts.past_end
    values = np.where(told.known, told.values, np.maximum(0, cut.values - 1))
    return Ints(values, told.known | cut.known)


def each_drafted_a_step(counts: Drafts) -> Counts:
    """k of each row: draft tokens a verify step, as the counts tell; 0 where they do not.

    Draft tokens that a grammar forbids leave the drafted count, so that positions may tell more.
    """
    drafted = np.where(counts.drafted.known, counts.drafted.values, 0)
    mean = np.rint(drafted / np.maximum(counts.drafts, 1)).astype(np.int64)
    return np.maximum(np.where(counts.drafts > 0, mean, 0), counts.per_position.sizes)


def drafted_a_step(counts: DraftCounts) -> int:
    """The same of one count."""
    return int(each_drafted_a_step(Drafts.of([counts]))[0])


class Columns(msgspec.Struct, frozen=True, kw_only=True):
    """One row a request. `positions[:, i]`: steps that accepted at least to i; None: not told.

    `cluster` numbers the prompts from 0: requests of one prompt are one cluster. `output` is
    `accepted` without what stood behind the end, -1 where that is not known.
    """

    source: StepSource
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
        return np.bincount(self.cluster, weights=values, minlength=int(self.cluster.max()) + 1)


def columns(records: Sequence[RequestRecord]) -> Columns | None:
    """The engine's figures where it told them of every request, else the client's, else None."""
    table = RequestTable.of(records)
    if not len(table):
        return None
    counts = own_counts(table)
    if counts.told.all() and counts.drafts.any():
        return _engine(table, counts)
    return _client(table)


def clusters(table: RequestTable) -> Counts:
    """Each request's cluster: its prompt's, or its conversation's."""
    return cluster_names(table)[0]


def cluster_names(table: RequestTable) -> tuple[Counts, tuple[str, ...]]:
    """Each request's cluster, numbered as they first come, and what each is called."""
    found = table.names("conversation").or_else(table.names("prompt_id")).ranked()
    return found.codes, found.names


def _engine(table: RequestTable, counts: Drafts) -> Columns:
    behind = past_end(counts, table.ints("output_tokens"))
    return Columns(
        source="per_request",
        drafts=counts.drafts,
        accepted=counts.accepted,
        drafted=counts.drafted.values if counts.drafted.known.all() else None,
        positions=_positions(counts),
        output=np.where(behind.known, counts.accepted - behind.values, -1),
        cluster=clusters(table),
    )


def _positions(counts: Drafts) -> Counts | None:
    """One column a position, requests that told of fewer filled up with zeros."""
    told = counts.per_position
    if (~told.known & (counts.drafts > 0)).any():
        return None
    found = np.zeros((len(told.sizes), int(told.sizes.max())), np.int64)
    found[np.arange(found.shape[1]) < told.sizes[:, None]] = told.flat()
    return found


def _client(table: RequestTable) -> Columns | None:
    """Every chunk after a request's first taken as a verify step."""
    found = chunk_steps(table)
    if found is None or not len(found[1]):
        return None
    n = len(table)
    drafts, steps = found
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
        cluster=clusters(table),
    )
