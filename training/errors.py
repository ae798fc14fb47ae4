"""What can go wrong in training beside a user's mistake or a failed gate (`harness.errors`)."""

from __future__ import annotations

from harness.errors import HarnessError


class TrainingError(HarnessError):
    """A stage cannot go on: a damaged shard, a full disk, a loss that is no number.

    Exit code 3; the message is one line and says what was kept.
    """

    exit_code = 3
