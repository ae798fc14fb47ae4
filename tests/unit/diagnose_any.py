"""Dossiers without sense, and healthy ones that are drawn by chance."""

from __future__ import annotations

import random

import diagnose_cases as made
from hypothesis import strategies as st

from harness.diagnose.causes import CAUSES
from harness.diagnose.readings import AS_DECLARED, READINGS
from harness.diagnose.records import (
    Audit,
    AuditFinding,
    Controls,
    Dossier,
    Expected,
    Fit,
    Length,
    Observed,
    Proportion,
    ReadingFit,
    Replay,
    Sampling,
    SlotFit,
    States,
    Subject,
    TargetParity,
    Toggle,
    Wanted,
)
from harness.records import DraftCounts

FLOATS = st.floats(allow_nan=True, allow_infinity=True) | st.floats(-1, 2)
COUNT = st.integers(0, 60) | st.integers(0, 5000)
PROPORTIONS = st.builds(
    Proportion, hits=COUNT, of=COUNT, low=st.none() | FLOATS, high=st.none() | FLOATS
)
COUNTS = st.builds(
    DraftCounts,
    drafts=COUNT,
    accepted=COUNT,
    per_position=st.none() | st.lists(COUNT, max_size=4).map(tuple),
)
LENGTHS = st.builds(
    Length,
    counts=COUNTS,
    prompts=COUNT,
    length=st.none() | FLOATS,
    low=st.none() | FLOATS,
    high=st.none() | FLOATS,
)
NAMES = st.sampled_from([*READINGS, *made.OTHER_READINGS, "no such reading", "layers (x)"])
FITS = st.builds(
    ReadingFit,
    reading=NAMES,
    agreement=st.none() | PROPORTIONS,
    explains=st.none() | PROPORTIONS,
    by_draft=st.lists(PROPORTIONS, max_size=3).map(tuple),
    acceptance=st.none() | LENGTHS,
    gain=st.none() | FLOATS,
    gain_low=st.none() | FLOATS,
    gain_high=st.none() | FLOATS,
    loss_less=st.none() | FLOATS,
    loss_less_low=st.none() | FLOATS,
)
READING_LISTS = st.lists(FITS, max_size=5).map(tuple)
STATE_NAMES = st.sampled_from(
    [
        *("hidden[3]", "hidden[2]", "normed[3]", "branch[2]", "hidden[3]@-1", "embedding"),
        *("other request", "previous step", "partial[3]", "?", ""),
    ]
)
STATE_FITS = st.builds(Fit, candidate=STATE_NAMES, cosine=FLOATS, scale=FLOATS)
SLOTS = st.builds(
    SlotFit,
    slot=st.integers(0, 3),
    where=st.sampled_from(["prefill", "decode"]),
    batched=st.booleans(),
    rows=COUNT,
    declared=STATE_NAMES,
    best=STATE_FITS,
    as_declared=STATE_FITS,
    zero_share=FLOATS,
    bad_share=FLOATS,
    fits=st.lists(STATE_FITS, max_size=2).map(tuple),
)
PLACES = st.dictionaries(
    st.sampled_from(["prefill", "first decode", "later decode", "batch 1", "batched", "late"])
    | st.sampled_from(["reused prefix", "early", "elsewhere"]),
    PROPORTIONS,
    max_size=5,
)
MAYBE = st.none() | PROPORTIONS
TUPLES = st.lists(PROPORTIONS, max_size=3).map(tuple)
CAUSE = st.none() | st.sampled_from([*CAUSES, "no such cause"])
TEXT = st.text(max_size=12)
TOGGLES = st.builds(
    Toggle,
    what=TEXT | st.just("requests at once"),
    a=TEXT,
    b=TEXT,
    length_a=LENGTHS,
    length_b=LENGTHS,
    verdict=st.sampled_from(["a", "b", "same", "undecided"]),
    cause=CAUSE,
)
FINDINGS = st.builds(
    AuditFinding,
    severity=st.sampled_from(["error", "warning", "note"]),
    code=TEXT | st.just("not_finite"),
    what=TEXT,
    remedy=TEXT,
    cause=CAUSE,
)
DOSSIERS = st.builds(
    Dossier,
    subject=st.builds(
        Subject,
        engine=st.sampled_from(["vllm", "sglang", "reference", "openai"]),
        target=TEXT,
        drafter=TEXT,
        k=st.integers(0, 8),
        dataset=st.none() | st.just("builtin") | TEXT,
        temperature=st.sampled_from([0.0, 0.7]),
        tensor_parallel=st.integers(1, 8),
    ),
    audit=st.none()
    | st.builds(
        Audit,
        findings=st.lists(FINDINGS, max_size=3).map(tuple),
        aux_layers=st.none() | st.lists(st.integers(0, 61), max_size=4).map(tuple),
    ),
    expected=st.none()
    | st.builds(
        Expected,
        acceptance=LENGTHS,
        proof=FLOATS,
        outside_vocabulary=MAYBE,
        without_vocabulary_loss=st.none() | LENGTHS,
        break_even=st.none() | FLOATS,
        degenerate_share=st.none() | FLOATS,
    ),
    observed=st.none()
    | st.builds(
        Observed,
        acceptance=LENGTHS,
        temperature=st.sampled_from([0.0, 0.7]),
        concurrency=COUNT,
        counted_otherwise=st.none() | COUNTS,
        untraced=st.none() | COUNT,
        in_run=st.none() | LENGTHS,
    ),
    target=st.none()
    | st.builds(
        TargetParity,
        prompt_gap=st.none() | FLOATS,
        decode_gap=st.none() | FLOATS,
        rescored_gap=st.none() | FLOATS,
        argmax=MAYBE,
        floor=st.none() | FLOATS,
    ),
    states=st.none()
    | st.builds(
        States, slots=st.lists(SLOTS, max_size=6).map(tuple), bad_by_step=PLACES, floor=FLOATS
    ),
    replay=st.none()
    | st.builds(
        Replay,
        readings=READING_LISTS,
        on_engine_states=LENGTHS,
        proposals=LENGTHS,
        first_call=MAYBE,
        later_calls=MAYBE,
        alone=MAYBE,
        batched=MAYBE,
        by_position=TUPLES,
        verified=MAYBE,
    ),
    wanted=st.none()
    | st.builds(
        Wanted,
        readings=READING_LISTS,
        unnormed_head=MAYBE,
        by_step=TUPLES,
        own_tokens_by_step=TUPLES,
        trained=st.none() | LENGTHS,
        other_target=st.none() | LENGTHS,
    ),
    sampling=st.none()
    | st.builds(
        Sampling,
        temperature=FLOATS,
        observed=LENGTHS,
        implied_sampled=st.none() | FLOATS,
        implied_greedy=st.none() | FLOATS,
        implied_low=st.none() | FLOATS,
        implied_high=st.none() | FLOATS,
        drafts_are_argmax=MAYBE,
    ),
    toggles=st.lists(TOGGLES, max_size=3).map(tuple),
    controls=st.none() | st.builds(Controls, repeated_text=st.none() | LENGTHS),
    skipped=st.dictionaries(st.sampled_from(["states", "replay", "sampling"]), TEXT, max_size=2),
)


def drawn(share: float, of: int, rng: random.Random) -> Proportion:
    return Proportion(hits=sum(rng.random() < share for _ in range(of)), of=of)


def walked(rates: tuple[float, ...], drafts: int, rng: random.Random) -> Length:
    """A walk of so many steps whose drafts are right by chance, with an interval by its steps."""
    taken = []
    for _ in range(drafts):
        draw = rng.random()
        taken.append(sum(draw < rate for rate in rates))
    mean = sum(taken) / drafts
    variance = sum((n - mean) ** 2 for n in taken) / drafts
    half = 1.96 * (max(variance, 0.01) / drafts) ** 0.5
    counts = DraftCounts(
        drafts=drafts,
        accepted=sum(taken),
        per_position=tuple(sum(n > i for n in taken) for i in range(len(rates))),
    )
    value = 1 + mean
    return Length(counts=counts, prompts=12, length=value, low=value - half, high=value + half)


def healthy_by_chance(seed: int) -> Dossier:
    """A short look at a healthy drafter, weak or strong: every figure is drawn."""
    rng = random.Random(seed)
    k, drafts = rng.choice([1, 3, 5, 8]), rng.choice([60, 150, 400])
    first = rng.uniform(0.58, 0.9)
    rates = tuple(first * (0.9 * first) ** i for i in range(k))
    whole = made.healthy(k)
    assert whole.replay and whole.wanted and whole.expected and whole.observed and whole.states
    agree = rng.uniform(0.95, 1.0)
    own = made.agreement(AS_DECLARED, agree)
    fits = [made.times(own, agreement=drawn(agree, k * drafts, rng))]
    fits += [
        made.times(own, reading=name, agreement=drawn(rng.uniform(0.3, agree), k * drafts, rng))
        for name in made.EXECUTION_READINGS
    ]
    readings = [made.reading(AS_DECLARED, rates, rates)]
    for name in made.OTHER_READINGS:
        loss = rng.uniform(0.0, 1.0) * sum(rates)
        gain, spread = rng.gauss(-loss, 0.06), 0.12
        found = made.reading(name, rates, rates)
        ends = {"gain_low": gain - spread, "gain_high": gain + spread}
        readings.append(made.times(found, gain=gain, **ends))
    seen = walked(rates, drafts, rng)
    places = {n: drawn(0.003, 200, rng) for n in whole.states.bad_by_step}
    return made.times(
        whole,
        expected=made.times(
            whole.expected, acceptance=walked(rates, drafts, rng), without_vocabulary_loss=None
        ),
        observed=made.times(whole.observed, acceptance=seen),
        states=made.times(whole.states, bad_by_step=places),
        replay=made.times(
            whole.replay,
            readings=tuple(fits),
            on_engine_states=walked(rates, drafts, rng),
            proposals=seen,
            first_call=drawn(agree, 24, rng),
            later_calls=drawn(agree, drafts, rng),
            alone=drawn(agree, drafts, rng),
            batched=drawn(agree, drafts, rng),
            by_position=tuple(drawn(agree, drafts // 2, rng) for _ in range(3)),
            verified=drawn(0.995, drafts, rng),
        ),
        wanted=made.times(
            whole.wanted,
            readings=tuple(readings),
            unnormed_head=drawn(0.08, rng.choice([5, 13, 60]), rng),
            by_step=tuple(
                drawn(first if i == 0 else 0.9 * first, round(2 * drafts * first**i), rng)
                for i in range(k)
            ),
        ),
    )
