"""Dossiers as the experiments make them: of a healthy drafter, and of each cause that is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from harness.diagnose.readings import AS_DECLARED
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

LAYERS = (3, 31, 59)
"""Of a target with 61 layers, in transformers' index."""
DRAFTS = 1200
GOOD = (0.70, 0.47, 0.31)
"""Unconditional rates by position of a drafter of K2.5 on chat: published are 2.3 to 3.5 tokens."""
ROWS = 300


def times(value: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(value, **changes)


def some(share: float, of: int = DRAFTS) -> Proportion:
    return Proportion(hits=round(share * of), of=of)


def length(rates: Sequence[float], drafts: int = DRAFTS, spread: float = 0.08) -> Length:
    """An acceptance with these unconditional rates, and an interval by prompt of 12 prompts."""
    positions = tuple(round(r * drafts) for r in rates)
    counts = DraftCounts(
        drafts=drafts,
        drafted=drafts * len(rates),
        accepted=sum(positions),
        per_position=positions,
    )
    value = 1 + sum(positions) / drafts
    return Length(counts=counts, prompts=12, length=value, low=value - spread, high=value + spread)


def scaled(factor: float) -> tuple[float, ...]:
    return tuple(r * factor for r in GOOD)


def reading(name: str, rates: Sequence[float], base: Sequence[float] = GOOD) -> ReadingFit:
    """A reading that is accepted so on the target's text; the gain is paired by prompt."""
    gain = sum(rates) - sum(base)
    spread = 0.03 + 0.1 * abs(gain)
    return ReadingFit(
        reading=name,
        acceptance=length(rates),
        gain=gain,
        gain_low=gain - spread,
        gain_high=gain + spread,
    )


def agreement(name: str, share: float, by_draft: Sequence[float] | None = None) -> ReadingFit:
    of_each = by_draft or (share,) * 3
    return ReadingFit(
        reading=name,
        agreement=some(sum(of_each) / len(of_each), 3 * DRAFTS),
        by_draft=tuple(some(s) for s in of_each),
    )


OTHER_READINGS = (
    *("norm_output toggled", "norm_before_residual toggled", "target's lm_head"),
    *("target's embeddings", "d2t absolute", "rope theta 50000", "target's final norm"),
    *("input norm added", "layers off by +1 (4, 32, 60)", "layers off by -1 (2, 30, 58)"),
    *("layers by default (2, 30, 58)", "layers in another order (59, 31, 3)"),
    *("other layers (3, 31, 40)", "states under their layers' norms", "states moved by +1"),
    *("tokens not shifted", "states without residual"),
)
EXECUTION_READINGS = (
    *("norm_output toggled", "norm_before_residual toggled", "target's lm_head"),
    *("target's embeddings", "d2t absolute", "rope theta 50000", "tokens not shifted"),
    *("layer without residual", "recurrent state zero", "positions frozen in drafting"),
    *("positions doubled in drafting", "first token fed again", "states of the previous call"),
    *("cache not overwritten", "cache of the prompt zero", "another request's proposals"),
)


def slot(number: int, where: str, batched: bool, layer: int, **changes: Any) -> SlotFit:
    own = Fit(candidate=f"hidden[{layer}]", cosine=0.9996, scale=1.0)
    near = Fit(candidate=f"hidden[{layer - 1}]", cosine=0.93, scale=1.02)
    made = SlotFit(
        slot=number,
        where=where,  # type: ignore[arg-type]
        batched=batched,
        rows=ROWS,
        declared=own.candidate,
        best=own,
        as_declared=own,
        zero_share=0.0,
        bad_share=0.003,
        fits=(own, near),
    )
    return times(made, **changes)


def states(
    change: Callable[[SlotFit], SlotFit] = lambda s: s,
    layers: Sequence[int] = LAYERS,
    **places: float,
) -> States:
    """Every slot in prefill and decode, alone and batched, each put through `change`."""
    slots = [
        change(slot(i, where, batched, layer))
        for i, layer in enumerate(layers)
        for where in ("prefill", "decode")
        for batched in (False, True)
    ]
    names = ("prefill", "first decode", "later decode", "batch 1", "batched", "early", "late")
    bad = {n: places.get(n.replace(" ", "_"), 0.003) for n in (*names, "reused prefix")}
    return States(
        slots=tuple(slots),
        matrix_rows=tuple(f"slot {i}" for i in range(3)),
        matrix_columns=tuple(f"hidden[{i}]" for i in range(62)),
        matrix=tuple(tuple(0.9 ** abs(i - layer) for i in range(62)) for layer in LAYERS),
        bad_by_step={name: some(share, 600) for name, share in bad.items()},
        floor=0.998,
    )


def bad(
    candidate: str | None,
    cosine: float = 0.9995,
    *,
    own: float = 0.6,
    scale: float = 1.0,
    share: float = 0.99,
    zero: float = 0.0,
) -> Callable[[SlotFit], SlotFit]:
    """Rows that are another candidate's; `{}` in its name is the declared layer. None: declared."""

    def change(was: SlotFit) -> SlotFit:
        layer = int(was.declared[7:-1])
        name = was.declared if candidate is None else candidate.format(layer, layer - 1, layer + 1)
        best = Fit(candidate=name, cosine=own if candidate is None else cosine, scale=scale)
        declared = Fit(candidate=was.declared, cosine=own, scale=scale)
        return times(
            was,
            best=best,
            as_declared=declared,
            bad_share=share,
            zero_share=zero,
            fits=(best, declared, *was.fits),
        )

    return change


def only(which: Callable[[SlotFit], bool], change: Callable[[SlotFit], SlotFit]) -> Any:
    return lambda s: change(s) if which(s) else s


def healthy(k: int = 3) -> Dossier:
    """A drafter that is served as it was trained, all experiments made."""
    expected = length(GOOD)
    return Dossier(
        subject=Subject(engine="vllm", target="target", drafter="drafter", k=k),
        audit=Audit(findings=(), aux_layers=LAYERS, engine_layers=LAYERS),
        expected=Expected(
            acceptance=expected,
            proof=0.999,
            outside_vocabulary=some(0.02),
            without_vocabulary_loss=length((0.71, 0.48, 0.32)),
            break_even=2.2,
            degenerate_share=0.0,
        ),
        observed=Observed(
            acceptance=length((0.69, 0.46, 0.305)),
            temperature=0.0,
            concurrency=4,
            first_step=some(0.7, 48),
            later_steps=some(0.69),
        ),
        target=TargetParity(
            prompt_gap=0.01, decode_gap=0.012, rescored_gap=0.01, argmax=some(0.999, 180), floor=0.1
        ),
        states=states(),
        replay=Replay(
            readings=(
                agreement(AS_DECLARED, 0.985, (0.99, 0.985, 0.98)),
                *(agreement(name, 0.6, (0.8, 0.55, 0.45)) for name in EXECUTION_READINGS),
            ),
            on_engine_states=length(GOOD),
            proposals=length((0.695, 0.465, 0.31)),
            first_call=some(0.98, 48),
            later_calls=some(0.99),
            alone=some(0.985),
            batched=some(0.985),
            by_position=(some(0.985, 800), some(0.985, 800)),
            verified=some(0.998),
        ),
        wanted=Wanted(
            readings=(
                reading(AS_DECLARED, GOOD),
                *(reading(name, scaled(0.55)) for name in OTHER_READINGS),
            ),
            unnormed_head=some(0.03, 400),
            by_step=(some(0.70), some(0.67, 840), some(0.66, 560)),
            own_tokens_by_step=(some(0.70), some(0.1, 360), some(0.05, 300)),
        ),
        controls=Controls(repeated_text=length((0.98, 0.97, 0.96))),
    )


def lose(found: Dossier, stage: str, factor: float = 0.3) -> Dossier:
    """The drafts lost from a stage on: `expected`, `states`, `execution` or `verification`."""
    less = length(scaled(factor))
    order = ("expected", "states", "execution", "verification")
    after = order[order.index(stage) :]
    assert found.expected and found.replay and found.observed
    replay = found.replay
    if "states" in after:
        replay = times(replay, on_engine_states=less)
    if "execution" in after:
        replay = times(replay, proposals=less)
    expected = found.expected
    if "expected" in after:
        expected = times(expected, acceptance=less, without_vocabulary_loss=None)
    observed = times(found.observed, acceptance=less)
    controls = Controls(repeated_text=length([factor * 0.98] * 3))
    return times(found, expected=expected, replay=replay, observed=observed, controls=controls)


def handed(change: Callable[[SlotFit], SlotFit], factor: float = 0.3, **places: float) -> Dossier:
    """Wrong states, seen where they are handed over."""
    whole = dict.fromkeys(("prefill", "first_decode", "later_decode", "batch_1", "batched"), 0.99)
    found = states(change, LAYERS, **(places or whole))
    return times(lose(healthy(), "states", factor), states=found)


def trained_for(name: str, factor: float = 0.3, **changes: Any) -> Dossier:
    """A checkpoint that says other than the drafter was trained for; `name`: the right reading."""
    found = lose(healthy(), "expected", factor)
    low = scaled(factor)
    names = [n for n in OTHER_READINGS if n != name]
    fits = (
        reading(name, GOOD, low),
        reading(AS_DECLARED, low, low),
        *(reading(n, scaled(factor * 0.7), low) for n in names),
    )
    assert found.wanted
    first = low[0] if "norm_output" not in name else GOOD[0]
    by_step = (some(first), some(0.25, 400), some(0.2, 100))
    return times(found, wanted=times(found.wanted, readings=fits, by_step=by_step), **changes)


def engine_runs(
    name: str, own: Sequence[float] = (0.35, 0.3, 0.25), factor: float = 0.4, **changes: Any
) -> Dossier:
    """An engine that runs the drafter otherwise; `name`: the reading that proposes as it does."""
    found = lose(healthy(), "execution", factor)
    assert found.replay
    names = [n for n in EXECUTION_READINGS if n != name]
    fits = (
        agreement(name, 0.985),
        agreement(AS_DECLARED, 0.0, own),
        *(agreement(n, sum(own) / 3 * 0.8) for n in names),
    )
    return times(found, replay=times(found.replay, readings=fits, **changes))


def differs(own: Sequence[float], factor: float = 0.5, **changes: Any) -> Dossier:
    """An engine whose proposals no reading explains."""
    found = lose(healthy(), "execution", factor)
    assert found.replay
    mean = sum(own) / 3
    fits = (
        agreement(AS_DECLARED, 0.0, own),
        *(agreement(n, mean * 0.8) for n in EXECUTION_READINGS),
    )
    return times(found, replay=times(found.replay, readings=fits, **changes))


def badly_trained(rates: Sequence[float] = (0.2, 0.05, 0.01), **changes: Any) -> Dossier:
    """A drafter that predicts badly however it is read."""
    found = lose(healthy(), "expected", 1.0)
    low = length(rates)
    assert found.expected and found.observed and found.wanted and found.replay
    fits = (
        reading(AS_DECLARED, rates, rates),
        *(reading(n, [r * 0.8 for r in rates], rates) for n in OTHER_READINGS),
    )
    by_step = (
        some(rates[0]),
        some(rates[1] / rates[0], round(rates[0] * DRAFTS)),
        some(rates[2] / rates[1], round(rates[1] * DRAFTS)),
    )
    wanted = times(found.wanted, readings=fits, by_step=by_step, own_tokens_by_step=())
    return times(
        found,
        expected=times(found.expected, acceptance=low),
        observed=times(found.observed, acceptance=low),
        replay=times(found.replay, on_engine_states=low, proposals=low),
        wanted=times(wanted, **changes),
    )


def audited(found: Dossier, cause: str, severity: str = "error", **changes: Any) -> Dossier:
    finding = AuditFinding(
        severity=severity,  # type: ignore[arg-type]
        code="found",
        what=f"a thing about {cause}",
        remedy="the audit's remedy",
        cause=cause,
    )
    assert found.audit
    audit = times(found.audit, findings=(*found.audit.findings, finding), **changes)
    return times(found, audit=audit)


def sampled(seen: float, drawn: float, likeliest: float, argmax: float) -> Dossier:
    """A subject served at a temperature; greedily all is well."""
    found = healthy()
    own = likeliest if argmax > 0.95 else drawn
    rates = [(seen - 1) / 3] * 3
    sampling = Sampling(
        temperature=0.8,
        observed=length(rates),
        implied_sampled=drawn,
        implied_greedy=likeliest,
        implied_low=own - 0.06,
        implied_high=own + 0.06,
        drafts_are_argmax=some(argmax, 900),
    )
    return times(found, subject=times(found.subject, temperature=0.8), sampling=sampling)


def toggled(found: Dossier, what: str, cause: str, a: float, b: float, verdict: str) -> Dossier:
    toggle = Toggle(
        what=what,
        a="as served",
        b="otherwise",
        length_a=length(scaled(a)),
        length_b=length(scaled(b)),
        verdict=verdict,  # type: ignore[arg-type]
        cause=cause,
    )
    return times(found, toggles=(*found.toggles, toggle))


def _decode(s: SlotFit) -> bool:
    return s.where == "decode"


def _counting() -> Dossier:
    found = healthy()
    assert found.observed
    told = times(
        found.observed,
        acceptance=length((0.3, 0.2, 0.1)),
        counted_otherwise=length((0.69, 0.46, 0.305)).counts,
    )
    return times(found, observed=told)


def _verification() -> Dossier:
    found = lose(healthy(), "verification", 0.5)
    return times(found, replay=times(found.replay, verified=some(0.7)))


def _target() -> Dossier:
    found = handed(bad(None, own=0.9, scale=1.0), 0.5)
    wrong = TargetParity(
        prompt_gap=0.4, decode_gap=0.6, rescored_gap=0.02, argmax=some(0.7, 180), floor=0.1
    )
    return times(found, target=wrong)


def _partial() -> Dossier:
    found = handed(bad(None, own=0.88, scale=0.6))
    return times(found, subject=times(found.subject, tensor_parallel=8))


def _degenerate() -> Dossier:
    found = audited(badly_trained((0.4, 0.25, 0.15)), "degenerate_text")
    assert found.expected
    return times(found, expected=times(found.expected, degenerate_share=0.8))


def _no_layers() -> Dossier:
    found = trained_for("other layers (3, 31, 59)")
    assert found.audit
    default = (2, 30, 58)
    audit = times(found.audit, aux_layers=None, engine_layers=default)
    found = times(found, audit=audit, states=states(layers=default))
    return audited(found, "layers_default", "warning")


def _wrong_method() -> Dossier:
    found = differs((0.05, 0.02, 0.01), 0.0)
    return audited(found, "wrong_method")


def one_slot(named: bool) -> Dossier:
    """As vLLM and SGLang run EAGLE over an EAGLE-3 head: it is handed the last normed state."""
    found = times(
        lose(healthy(), "states", 0.2),
        states=states(bad("normed[61]", own=0.5), LAYERS[:1]),
    )
    return audited(found, "wrong_method", "error") if named else found


CASES: dict[str, Callable[[], Dossier]] = {
    "layers_shifted": lambda: trained_for("layers off by +1 (4, 32, 60)"),
    "layers_default": _no_layers,
    "layers_order": lambda: trained_for("layers in another order (59, 31, 3)"),
    "layers_other": lambda: trained_for("other layers (3, 31, 40)"),
    "vocabulary_map": lambda: trained_for("d2t absolute", 0.02),
    "lm_head_replaced": lambda: engine_runs("target's lm_head"),
    "embeddings_replaced": lambda: engine_runs("target's embeddings"),
    "norm_before_residual": lambda: engine_runs("norm_before_residual toggled"),
    "input_norm": lambda: trained_for("input norm added", 0.6),
    "norm_output": lambda: trained_for("norm_output toggled", 0.6),
    "rope": lambda: trained_for("rope theta 50000", 0.8),
    "final_norm": lambda: trained_for("target's final norm"),
    "tensors_damaged": lambda: audited(badly_trained(), "tensors_damaged"),
    "wrong_method": _wrong_method,
    "trained_without_norm": lambda: badly_trained((0.40, 0.2, 0.1), unnormed_head=some(0.55, 500)),
    "trained_one_step": lambda: badly_trained((0.68, 0.2, 0.04)),
    "trained_on_mixed_states": lambda: badly_trained(),
    "overfit": lambda: badly_trained(trained=length((0.93, 0.9, 0.85))),
    "undertrained": lambda: badly_trained(),
    "other_target": lambda: badly_trained(other_target=length(GOOD)),
    "target_computed_wrong": _target,
    "states_zero": lambda: handed(bad(None, own=0.0, scale=0.0, zero=0.99), 0.05),
    "states_stale": lambda: handed(
        only(_decode, bad("previous step")), first_decode=0.98, later_decode=0.98, batched=0.6
    ),
    "states_moved": lambda: handed(bad("hidden[{0}]@-1")),
    "states_other_request": lambda: handed(
        only(lambda s: s.batched, bad("other request")), batched=0.97
    ),
    "states_scaled": lambda: handed(bad(None, own=0.9997, scale=2.827)),
    "states_normed": lambda: handed(bad("normed[{0}]", own=0.8)),
    "states_without_residual": lambda: handed(bad("branch[{1}]", own=0.4)),
    "states_partial_sums": _partial,
    "states_noisy": lambda: handed(bad(None, own=0.95, scale=1.02), 0.7),
    "states_skipped": lambda: handed(
        bad("previous step", share=0.4), 0.6, first_decode=0.4, later_decode=0.4
    ),
    "prefix_reuse": lambda: handed(
        only(lambda s: s.where == "prefill", bad(None, own=0.9996, share=0.3, zero=0.0)),
        0.7,
        reused_prefix=0.97,
        prefill=0.3,
    ),
    "token_shift": lambda: engine_runs("tokens not shifted"),
    "positions": lambda: engine_runs("positions frozen in drafting", (0.99, 0.7, 0.6), 0.8),
    "residual_missing": lambda: engine_runs("layer without residual"),
    "kv_not_overwritten": lambda: engine_runs("cache not overwritten", (0.95, 0.93, 0.9), 0.92),
    "drafter_cache": lambda: differs(
        (0.5, 0.45, 0.4), first_call=some(0.99, 96), later_calls=some(0.5)
    ),
    "drafter_graph": lambda: toggled(
        differs((0.99, 0.3, 0.2)), "CUDA graphs", "drafter_graph", 0.5, 1.0, "b"
    ),
    "proposals_other_request": lambda: engine_runs(
        "another request's proposals", alone=some(0.985), batched=some(0.1)
    ),
    "recurrence": lambda: engine_runs("recurrent state zero", (0.99, 0.4, 0.3), 0.6),
    "strict_rejection": lambda: sampled(1.5, 2.3, 2.25, 0.3),
    "greedy_drafts_sampled": lambda: sampled(1.75, 2.3, 1.76, 0.999),
    "verification": _verification,
    "counting": _counting,
    "template": lambda: toggled(
        badly_trained((0.45, 0.25, 0.12)), "chat template", "template", 0.5, 1.0, "b"
    ),
    "degenerate_text": _degenerate,
}
"""A typical dossier of each cause, every experiment made."""
