"""`--slo` on the command line."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.plan.levels import slo_sets
from harness.plan.load import Source, build
from harness.plan.schema import SloSection

EMPTY = Source(name="t", where="t.toml", table={})


@pytest.mark.parametrize(
    ("items", "slo"),
    [
        (["ttft=0.2,tpot=0.05"], SloSection(ttft_s=0.2, tpot_s=0.05)),
        (["ttft=200ms", "e2el=3s"], SloSection(ttft_s=0.2, e2el_s=3.0)),
        ([" TTFT = 1.5 S , tpot_s=5e-2"], SloSection(ttft_s=1.5, tpot_s=0.05)),
        ([], SloSection()),
    ],
)
def test_levels_become_keys_of_the_plan(items: list[str], slo: SloSection) -> None:
    assert build(EMPTY, "reference", slo_sets(items)).slo == slo


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ("itl=0.1", "no level 'itl'; there are ttft, tpot, e2el"),
        ("ttft", "write it as ttft=0.2"),
        ("", "write it as"),
        ("ttft=0.2,", "write it as"),
        ("ttft=", "no time above 0"),
        ("ttft=fast", "no time above 0"),
        ("ttft=0", "no time above 0"),
        ("ttft=-1", "no time above 0"),
        ("ttft=nan", "no time above 0"),
        ("ttft=9e999", "no time above 0"),
        ("ttft=1,ttft=2", "given twice"),
    ],
)
def test_a_slip_is_one_line(item: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as told:
        slo_sets([item])
    assert "\n" not in str(told.value)


@given(st.text(max_size=30))
def test_no_text_is_a_crash(text: str) -> None:
    with contextlib.suppress(UsageError):
        slo_sets([text])


@given(st.floats(1e-4, 1e5))
def test_seconds_and_milliseconds_agree(seconds: float) -> None:
    (one,), (other,) = slo_sets([f"ttft={seconds!r}"]), slo_sets([f"ttft={1000 * seconds!r}ms"])
    assert float(other.partition("=")[2]) == pytest.approx(float(one.partition("=")[2]))
