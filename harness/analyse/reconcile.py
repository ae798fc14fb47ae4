"""The three sources of a cell's acceptance held against each other, known differences allowed for.

What each counts, and what it may differ by, stands in docs/acceptance.md.
"""

from __future__ import annotations

import numpy as np

from harness.analyse.data import CellData
from harness.analyse.doubts import counter_cautions, counters_doubted
from harness.analyse.requests import cut_tokens, drafted_a_step, own_counts
from harness.findings import Acceptance, Caution, MergedChunks
from harness.measure.metrics import acceptance_length
from harness.records import DraftCounts

SAME_STEPS = 0.01
"""Of acceptance length, and of drafts: counters and requests count the same steps."""
CLIENT = UNENDED = 0.05
MERGED = 0.05
"""A larger share of merged chunks makes the client's figures those of another unit than steps."""


def acceptance_cautions(data: CellData, acceptance: Acceptance | None) -> list[Caution]:
    """Everything odd about a cell's counters and its acceptance."""
    sources = {} if acceptance is None else acceptance.sources
    found = counter_cautions(data, sources)
    if data.cell.variant == "baseline":
        return found
    if acceptance is None:
        found.append(
            Caution(
                code="acceptance_unknown",
                text="no source tells how many draft tokens were accepted",
                advice="Switch on the engine's metrics, or its per-request figures.",
            )
        )
        return found
    more = (
        _idle(data, acceptance),
        _part_told(data),
        _merged(acceptance.merged),
        _disagree(data, acceptance),
    )
    return [*found, *(c for c in more if c is not None)]


def _idle(data: CellData, acceptance: Acceptance) -> Caution | None:
    """Whether the drafter never drafted. An answer of one token comes from the prefill alone."""
    longer = int((data.ok.ints("output_tokens").values > 1).sum())
    if acceptance.drafts or not longer:
        return None
    return Caution(
        code="nothing_drafted",
        text=f"no verify step was made in {longer} answers of several tokens",
        advice=(
            "The drafter was not used: see whether the server drafts at all, and whether it stops "
            "at this load."
        ),
    )


def _part_told(data: CellData) -> Caution | None:
    told = data.ok.drafts.told
    silent = int((~told & (data.ok.ints("output_tokens").values > 1)).sum())
    if not told.any() or not silent:
        return None
    return Caution(
        code="per_request_incomplete",
        text=f"{silent} of {len(data.ok)} answers came without the engine's own figures",
        advice="Those of the rest are left out, as a sum of a part is none of the whole.",
    )


def _merged(merged: MergedChunks | None) -> Caution | None:
    if merged is None or merged.share is None or merged.share <= MERGED:
        return None
    of = f"{merged.merged} of {merged.steps} verify steps came joined to another"
    if merged.steps is None:
        of = f"{merged.merged} of {merged.chunks} chunks hold more tokens than one verify step can"
    return Caution(
        code="chunks_merged",
        text=f"{of} ({merged.share:.1%}): the client's chunks are not verify steps here",
        advice=(
            "The engine or a proxy joins what waits to be sent; gaps between chunks and the "
            "client's acceptance are of several steps. Read the engine's own figures."
        ),
    )


def disagreements(acceptance: Acceptance, *, whole: bool = True) -> list[str]:
    """What the sources say where they differ beyond what their definitions allow.

    Counters and per-request figures count the same drafts: 1% of acceptance length is allowed, 5%
    where requests did not end (not `whole`), whose steps only the counters know. The client sees
    runs cut at a stop: 5%; steps that came merged are measured, and told apart.
    """
    lengths = {name: _length(counts) for name, counts in acceptance.sources.items()}
    believed = lengths.get(acceptance.source)
    if believed is None:
        return []
    same = SAME_STEPS if whole else UNENDED
    allowed = {"counters": same, "per_request": same, "client": CLIENT}
    if acceptance.merged is not None and (acceptance.merged.share or 0) > MERGED:
        del allowed["client"]
    return [
        f"{name} {length:.3f}"
        for name, length in lengths.items()
        if length is not None and name in allowed and abs(length / believed - 1) > allowed[name]
    ]


def _length(counts: DraftCounts | None) -> float | None:
    return None if counts is None else acceptance_length(counts)


def _disagree(data: CellData, acceptance: Acceptance) -> Caution | None:
    whole = data.whole
    odd = disagreements(acceptance, whole=whole)
    odd = odd or (_other_steps(data, acceptance) if whole else [])
    if not odd or _explained(data, acceptance, odd):
        return None
    said = "; ".join(
        f"{name} {_said(acceptance.sources.get(name))}"
        for name in ("counters", "per_request", "client")
    )
    if acceptance.sources.get("counters") is None and counted_steps(data) is not None:
        said += f"; the counters tell {counted_steps(data)} verify steps"
    return Caution(
        code="acceptance_sources_disagree",
        text=f"the sources of acceptance length disagree: {said}; believed: {acceptance.source}",
        advice=f"Likely reason: {_reason(data, acceptance)}.",
    )


def _said(counts: DraftCounts | None) -> str:
    length = _length(counts)
    if counts is None or length is None:
        return "not told"
    return f"{length:.3f} ({counts.accepted} accepted in {counts.drafts} drafts)"


def _other_steps(data: CellData, acceptance: Acceptance) -> list[str]:
    """Counters and requests that agree in length and still are of other steps.

    SGLang's counters tell verify steps and no accepted tokens: of them only these can be compared.
    """
    counted, told = counted_steps(data), acceptance.sources.get("per_request")
    if counted is None or told is None or not told.drafts:
        return []
    if abs(counted / told.drafts - 1) <= SAME_STEPS:
        return []
    return [f"counters {counted} drafts", f"per_request {told.drafts} drafts"]


def counted_steps(data: CellData) -> int | None:
    """Verify steps by the server's counters, also where it counts nothing else of them."""
    counters = data.counters
    if counters.delta is not None:
        return counters.delta.drafts
    if counters.problem is not None or counters.before is None or counters.after is None:
        return None
    before, after = counters.before.get("drafts") or 0, counters.after.get("drafts")
    if not isinstance(before, int) or not isinstance(after, int) or after < before:
        return None
    return after - before


def _explained(data: CellData, acceptance: Acceptance, odd: list[str]) -> bool:
    """Whether the client alone is off, by what was cut at the answers' ends and by merged chunks.

    What was cut must come out as at most k tokens a request; the counters alone tell it only in
    all. Merged chunks are measured (`Acceptance.merged`): there must be no more chunks than steps.
    """
    client, counted = acceptance.sources.get("client"), acceptance.sources.get("counters")
    told = acceptance.sources.get("per_request")
    if client is None or not all(o.startswith("client") for o in odd):
        return False
    if told is not None:
        cuts = cut_tokens(own_counts(data.ok), data.ok.ints("output_tokens"))
        return bool(cuts.known.all()) and client.drafts <= told.drafts
    tokens = data.ok.ints("output_tokens")
    if counted is None or len(data.ok) != len(data.records) or not tokens.known.all():
        return False
    cut = counted.drafts + counted.accepted - int((np.maximum(tokens.values, 1) - 1).sum())
    within = 0 <= cut <= drafted_a_step(counted) * len(data.ok)
    return within and client.drafts <= counted.drafts


def _reason(data: CellData, acceptance: Acceptance) -> str:
    """The likeliest of what makes sources differ, by what else is known of the cell."""
    sources, counters = acceptance.sources, data.counters
    counted, client = sources.get("counters"), sources.get("client")
    if counters_doubted(data, sources):
        return "the counters are wrong or of more than this load, as the other caution says"
    if counted is not None and len(data.ok) != len(data.records):
        return "counters also count the steps of requests that failed or were cut short"
    if counted is not None and not (counters.settled and counters.settled_before):
        return "the counters were read while they were still moving"
    believed = sources.get(acceptance.source)
    if client is not None and believed is not None and client.drafts > believed.drafts:
        return (
            "there were more chunks than verify steps, so that steps were made without a draft, "
            "or one step's tokens came in several chunks"
        )
    if client is not None and believed is not None and client.drafts < believed.drafts:
        return "several verify steps came in one chunk"
    return "accepted runs cut at the answers' ends, which the engine counts and no client sees"
