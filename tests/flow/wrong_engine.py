"""The reference engine with a planted defect: every Nth verification ends with a wrong token.

python wrong_engine.py N [options of `python -m engines.reference`]
"""

from __future__ import annotations

import sys
from typing import Any

from engines.reference.__main__ import main
from engines.reference.engine import Engine

WRONG = 7


def plant(every: int) -> None:
    """Let each `every`-th verify step put another token in the place of its last one."""
    right = Engine._deliver
    steps = 0

    def deliver(self: Engine, requests: Any, produced: list[list[int]], raw: Any) -> None:
        nonlocal steps
        for row in produced:
            steps += raw.shape[1] > 1
            if raw.shape[1] > 1 and steps % every == 0:
                row[-1] = WRONG if row[-1] != WRONG else WRONG + 1
        right(self, requests, produced, raw)

    Engine._deliver = deliver  # type: ignore[method-assign]


if __name__ == "__main__":
    plant(int(sys.argv.pop(1)))
    sys.exit(main(sys.argv[1:]))
