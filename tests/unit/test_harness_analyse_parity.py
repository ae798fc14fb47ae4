"""Log-probabilities of fixed prompts: the same model within rounding, or another."""

from __future__ import annotations

import math
from typing import Any

import pytest
from harness_records import cell, request, run_of
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from harness.analyse.data import RunData
from harness.analyse.parity import bound, difference, parity_findings
from harness.analyse.summary import summarise
from harness.records import ParityAnswer, ParityRecord

NAMES = [" the", " a", " one", "."]


def answer(shift: float = 0.0, names: list[str] | None = None, n: int = 8) -> ParityAnswer:
    """Position i's best token has a chance of one half, the next one of a fifth and so on."""
    tops = []
    for i in range(n):
        own = [f"{name}{i}" for name in names or NAMES]
        odds = [math.log(0.5) - shift, math.log(0.2), math.log(0.05), math.log(0.001)]
        tops.append(dict(zip(own, odds, strict=True)))
    return ParityAnswer(
        prompt="prose",
        tokens=tuple(next(iter(top)) for top in tops),
        logprobs=tuple(next(iter(top.values())) for top in tops),
        top=tuple(tops),
    )


def said(variant: Any = "baseline", repeat: int = 0, **fields: Any) -> ParityRecord:
    values: dict[str, Any] = {
        "engine": "reference", "target": "/m/target", "weights": "w", "dtype": "float32",
        "answers": (answer(),),
    }  # fmt: skip
    return ParityRecord(variant=variant, repeat=repeat, **{**values, **fields})


def run(*parity: ParityRecord, golden: ParityRecord | None = None) -> RunData:
    cells = [cell("baseline", 0, [request()]), cell("speculative", 0, [request()])]
    held = {} if golden is None else {"reference": golden}
    return structs.replace(run_of(cells), parity=list(parity), golden=held)


def test_the_same_model_differs_by_nothing_and_noise_by_its_size() -> None:
    assert difference([answer()], [answer()]) == (0.0, 0.0, 24)
    mean, largest, tokens = difference([answer()], [answer(0.3)])
    assert mean == pytest.approx(0.1)
    assert largest == pytest.approx(0.3)
    assert tokens == 24  # tokens with less than 1% are left out
    assert difference([answer()], []) == (None, None, 0)


def test_names_are_read_as_every_engine_writes_them() -> None:
    marked = answer(names=["\u0120the", "\u0120a", "\u2581one", "."])
    assert difference([answer()], [marked]) == (0.0, 0.0, 24)
    other = answer(names=["A", "B", "C", "D"])  # no name is shared: what counts is how likely
    assert difference([answer()], [other]) == (0.0, 0.0, 1)


def test_the_comparison_ends_where_the_answers_part() -> None:
    ours = answer()
    parted = list(ours.tokens)
    parted[2] = " a2"
    tops = [dict(top) for top in ours.top]
    tops[2] = {" a2": math.log(0.9), " the2": math.log(0.05)}
    theirs = ParityAnswer(
        prompt="prose",
        tokens=tuple(parted),
        logprobs=tuple(top[name] for name, top in zip(parted, tops, strict=True)),
        top=tuple(tops),
    )
    mean, largest, tokens = difference([ours], [theirs])
    assert tokens == 6 + 3
    assert largest == pytest.approx(math.log(0.5 / 0.05))
    assert mean is not None
    assert mean > bound(None)


@given(st.floats(-1, 1), st.floats(-1, 1))
def test_the_difference_has_no_direction(one: float, other: float) -> None:
    a, b = [answer(one)], [answer(other)]
    assert difference(a, b) == pytest.approx(difference(b, a))


def test_a_swapped_model_is_found_and_voids_the_run() -> None:
    odd = said("speculative", answers=(answer(0.5),))
    summary = summarise(run(said(), odd))
    assert summary.void is not None
    assert "target differs" in summary.void
    (caution,) = [c for c in summary.cautions if c.code == "target_differs"]
    assert "reference speculative" in caution.text
    assert [f.differs for f in summary.parity] == [True]
    fine = summarise(run(said(), said("speculative")))
    assert fine.void is None
    assert [f.differs for f in fine.parity] == [False]


def test_a_golden_file_finds_a_model_that_is_wrong_on_both_sides() -> None:
    wrong = (answer(0.5),)
    both = [said(answers=wrong), said("speculative", answers=wrong)]
    assert summarise(run(*both)).void is None
    findings = parity_findings(run(*both, golden=said()))
    assert [f.differs for f in findings] == [True, True]
    assert {f.against for f in findings} == {"golden file"}


def test_the_reference_engine_is_the_anchor_of_others() -> None:
    ours = said(dtype="bfloat16")
    theirs = [
        said(engine="vllm", answers=(answer(0.6),)),
        said("speculative", engine="vllm", answers=(answer(0.6),)),
    ]
    findings = parity_findings(structs.replace(run(), parity=[*theirs, ours]))
    assert {(f.engine, f.against) for f in findings} == {("vllm", "reference baseline")}
    assert all(f.differs and f.bound == bound("bfloat16") for f in findings)
    other = [structs.replace(r, weights="x") for r in theirs]  # another checkpoint, on purpose
    findings = parity_findings(structs.replace(run(), parity=[*other, ours]))
    assert {(f.engine, f.against) for f in findings} == {("vllm", "vllm baseline")}


def test_the_looser_precision_sets_the_bound() -> None:
    assert bound("float32", "float32") < bound("float32", "bfloat16") == bound(None)
    noise = said("speculative", dtype="bfloat16", answers=(answer(0.1),))
    assert not parity_findings(run(said(), noise))[0].differs
    strict = structs.replace(noise, dtype="float32")
    assert parity_findings(run(said(), strict))[0].differs


def test_a_server_that_tells_nothing_is_said_to_be_unchecked() -> None:
    mute = said(answers=(), note="/v1/completions answers 404")
    summary = summarise(run(mute))
    (caution,) = [c for c in summary.cautions if c.code == "target_unchecked"]
    assert "404" in caution.text
    assert summary.parity == ()
    assert summary.void is None
    assert "target_unchecked" not in {c.code for c in summarise(run()).cautions}
