"""What `--over` says: values, settings, and the mistakes that are told before anything starts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.plan.axes import axes_of, settings_of, split


def test_every_combination_is_a_setting_and_load_points_are_none() -> None:
    axes = axes_of(
        [
            "speculative.k=1,3",
            "load.concurrency=1,4",
            "sampling.temperature=0,0.7",
            "load.retries=1",
        ]
    )
    settings = settings_of(axes)
    assert [s.name for s in settings] == [
        f"k={k}, temperature={t}, retries=1" for k in (1, 3) for t in ("0", "0.7")
    ]
    assert settings[1].choice == ("speculative.k=1",)
    assert settings[1].condition == ("sampling.temperature=0.7", "load.retries=1")
    assert settings[1].run == "runs/k1-temperature0.7-retries1"


def test_values_that_say_the_same_are_one() -> None:
    axes = axes_of(["speculative.forced_length=2,2.0,3", "load.concurrency=1,1,4"])
    assert [axis.values for axis in axes] == [("2", "3"), ("1", "4")]


def test_load_points_alone_are_one_setting() -> None:
    (only,) = settings_of(axes_of(["load.request_rate=1,2"]))
    assert (only.name, only.sets) == ("as planned", ())


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "say what to sweep"),
        (["speculative.k"], "write it as key=value"),
        (["speculative.k="], "write it as key=value"),
        (["=3"], "write it as key=value"),
        (["speculative.kk=3"], "--over speculative.kk=3: unknown key"),
        (["speculative.k=3,0"], "--over speculative.k=0"),
        (["speculative.k=3", "speculative.k=4"], "given twice"),
        (["speculative=3"], "is a table"),
        (["compare.launches=1,3"], "how the sweep itself is measured"),
        (["engine.port=8000,8001"], "where a server listens"),
    ],
)
def test_mistakes_are_one_line(items: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message) as told:
        axes_of(items)
    assert "\n" not in str(told.value)


def test_too_many_settings_are_refused() -> None:
    many = ",".join(map(str, range(101)))
    with pytest.raises(UsageError, match="101 settings"):
        settings_of(axes_of([f"seed={many}"]))


def test_values_that_are_lists_keep_their_commas_and_doubles_go() -> None:
    assert split('["--a","b"],[]') == ['["--a","b"]', "[]"]
    (axis,) = axes_of(["speculative.k= 3, 3 ,5"])
    assert axis.values == ("3", "5")


@given(st.text(max_size=40))
def test_nothing_is_lost_in_splitting(raw: str) -> None:
    assert ",".join(split(raw)) == raw


def test_folders_differ_where_names_slug_alike() -> None:
    settings = settings_of(axes_of(["drafter.path=a/b,a+b"]))
    assert len({s.run for s in settings}) == 2
    assert all(s.run.startswith("runs/patha-b") for s in settings)
