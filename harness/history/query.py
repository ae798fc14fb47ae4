"""What may be asked of the history: filters over runs and over figures.

They are decided on the few identities of an index, never point by point.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from harness.errors import UsageError
from harness.history.index import What, Who
from harness.history.points import utc_text
from harness.records import Record

AGO = re.compile(r"(\d+(?:\.\d+)?)\s*(h|d|w)", re.ASCII)
HOURS = {"h": 1.0, "d": 24.0, "w": 168.0}


class Query(Record, frozen=True, kw_only=True):
    """Every filter that is given must hold; of several texts for one filter any.

    `metric`: its name, or what stands before its dot (`ttft_s` for `ttft_s.p50`). `drafter` and
    `target`: the checkpoint's name, or its digest's beginning. `commit`: its beginning. `since`
    and `until`: ISO moments in UTC; until is not included. `void`: also runs that prove nothing.
    """

    engine: tuple[str, ...] = ()
    variant: tuple[str, ...] = ()
    profile: tuple[str, ...] = ()
    drafter: tuple[str, ...] = ()
    target: tuple[str, ...] = ()
    metric: tuple[str, ...] = ()
    load: tuple[str, ...] = ()
    workload: tuple[str, ...] = ()
    suite: tuple[str, ...] = ()
    source: tuple[str, ...] = ()
    run: tuple[str, ...] = ()
    commit: str | None = None
    since: str | None = None
    until: str | None = None
    void: bool = True

    def who(self, who: Who) -> bool:
        """Whether points of this run may be among the answers."""
        return (
            (self.void or not who.void)
            and (not self.profile or who.profile in self.profile)
            and (not self.suite or who.suite in self.suite)
            and (not self.source or who.source in self.source)
            and (not self.run or who.run_id in self.run or who.folder in self.run)
            and _is(self.drafter, who.drafter_name, who.drafter)
            and _is(self.target, who.target_name, who.target)
            and (self.commit is None or (who.git_commit or "").startswith(self.commit))
            and (self.since is None or who.created >= self.since)
            and (self.until is None or who.created < self.until)
        )

    def what(self, what: What) -> bool:
        """Whether this figure may be among the answers."""
        return (
            (not self.engine or what.engine in self.engine)
            and (not self.variant or what.variant in self.variant)
            and (not self.load or what.load in self.load)
            and (not self.workload or what.workload in self.workload)
            and (
                not self.metric
                or what.metric in self.metric
                or what.metric.partition(".")[0] in self.metric
            )
        )


def _is(wanted: tuple[str, ...], name: str | None, digest: str | None) -> bool:
    return not wanted or any(w == name or (digest or "").startswith(w) for w in wanted if w)


def moment(option: str, text: str, now: datetime) -> str:
    """A date, a moment, or how long ago (`7d`, `12h`, `2w`), as ISO text. Raises `UsageError`."""
    ago = AGO.fullmatch(text.strip())
    try:
        if ago is None:
            return utc_text(text.strip())
        told = now - timedelta(hours=float(ago[1]) * HOURS[ago[2]])
        return told.astimezone(UTC).isoformat(timespec="seconds")
    except (UsageError, OverflowError):
        raise UsageError(
            f"{option} {text}: give a date such as 2026-11-30, or how long ago, such as 7d"
        ) from None
