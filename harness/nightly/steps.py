"""One run of a night: which entry's, of what kind, and by which version of the harness."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from harness.nightly.measuring import Launch
from harness.nightly.records import Attempt, EntryState
from harness.nightly.suite import Entry, Loaded, control_root

Kind = Literal["first", "fresh", "control"]


def control_of(loaded: Loaded) -> Launch:
    """How the good version is called that suspects are set beside."""
    given = loaded.suite.control
    if given is None:
        return Launch()
    root = control_root(loaded, given) or Launch().root
    return Launch(root=root, environment=given.env)


def joined(parts: Iterable[dict[str, tuple[float, ...]]]) -> dict[str, tuple[float, ...]]:
    """Several runs' blocks behind each other."""
    found: dict[str, tuple[float, ...]] = {}
    for part in parts:
        for name, values in part.items():
            found[name] = (*found.get(name, ()), *values)
    return found


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One run of an entry: the night's own, or the `number`th (from 1) of those after it."""

    entry: Entry
    kind: Kind
    number: int

    @property
    def name(self) -> str:
        """As its log is called."""
        own = self.entry.name
        return own if self.kind == "first" else f"{own}.{self.kind}-{self.number}"

    def with_attempt(self, state: EntryState, attempt: Attempt) -> EntryState:
        """The entry's state with this run in its place."""
        if self.kind == "first":
            return msgspec.structs.replace(state, attempt=attempt)
        ran = state.fresh if self.kind == "fresh" else state.control
        ran = (*ran[: self.number - 1], attempt)
        if self.kind == "fresh":
            return msgspec.structs.replace(state, fresh=ran)
        return msgspec.structs.replace(state, control=ran)
