"""What the history holds: one scalar of one run, and the series that such scalars form.

`points_of` in `harness.history.points` makes them of a run's summary and manifest. Units and
missing values are those of `harness.records`; names of metrics are those of `summary.json`, with a
dot where a figure has parts: `output_tokens_per_s`, `ttft_s.p50`, `startup_s`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from harness.records import Record

PointVariant = Literal["baseline", "speculative", "ratio"]
POINT_VARIANTS: tuple[PointVariant, ...] = ("baseline", "speculative", "ratio")
NO_LOAD = "all"
"""The load of a figure that is of no load, such as the seconds of a start."""


class SeriesKey(NamedTuple):
    """What the points of one series have in common; one metric followed from run to run.

    `profile` is its name, and behind it in brackets what was set otherwise and moves figures:
    `demo [speculative.k=5]`. A run outside a suite has None there.
    """

    suite: str | None
    profile: str | None
    engine: str
    variant: PointVariant
    workload: str
    load: str
    metric: str


class Point(Record, frozen=True, kw_only=True):
    """One scalar of one run.

    `variant` "ratio": speculative over baseline; `better` then says which way the ratio is wanted.
    `load`: short, such as `c8` or `q2.5`; `NO_LOAD` where a figure is of none. `drafter` and
    `target` are digests, None where not known (a baseline has no drafter). `n`: over how many
    starts, blocks or requests the interval is taken. `settings`: what was set beside the profile
    and moves figures. `folder`: the run's, below the results' root; None outside of a history.
    `void`: the run's numbers prove nothing, and no series holds them.
    """

    run_id: str
    created: str
    engine: str
    variant: PointVariant
    workload: str
    load: str
    metric: str
    value: float | None
    unit: str
    better: Literal["higher", "lower"] | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    n: int | None = None
    profile: str | None = None
    drafter: str | None = None
    target: str | None = None
    git_commit: str | None = None
    engine_version: str | None = None
    source: str = "run"
    suite: str | None = None
    settings: str = ""
    drafter_name: str | None = None
    target_name: str | None = None
    folder: str | None = None
    void: bool = False

    @property
    def key(self) -> SeriesKey:
        """The series that the point belongs to."""
        profile = self.profile
        if self.settings:
            profile = f"{profile or ''} [{self.settings}]".strip()
        return SeriesKey(
            suite=self.suite,
            profile=profile,
            engine=self.engine,
            variant=self.variant,
            workload=self.workload,
            load=self.load,
            metric=self.metric,
        )


class Labels(Record, frozen=True, kw_only=True):
    """`labels.json` of a run's folder: what is said of a run that no measurement says.

    `suite`: whose series its points belong to. `pinned`: why the run must not be pruned; None
    where it may be.
    """

    suite: str | None = None
    pinned: str | None = None
