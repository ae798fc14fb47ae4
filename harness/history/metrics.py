"""The names that a run's figures can have."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

from harness.history.figures import GAUGES, LAGS, LATENCIES, PARTS, RATES, SHARES

EXAMPLES = (
    *RATES,
    *(f"{name}.{part}" for name in (*LATENCIES, *LAGS) for part in PARTS),
    *SHARES,
    *("requests_failed_share", "requests_dropped", "requests_late"),
    *("acceptance_length", "acceptance_rate", "per_position.0", "per_position_conditional.0"),
    *("relative_step_cost", "diverged_share", "integrity_errors_share", "parity"),
    *("degenerate_share", "startup_s", "startup_rss_bytes", "startup_gpu_bytes"),
    *("preemptions", "prefix_hit_rate", "joules_per_output_token"),
    *(f"{where}.{name}.{part}" for where, name, part, _, _ in GAUGES),
)
"""All of them, but that of the numbered ones the first stands for all, and phases are left out."""
OPEN = re.compile(r"(per_position|per_position_conditional)\.\d+|startup_s\..+")
"""Those that are as many as an engine has: positions of drafts, and phases of its start."""
STEMS = ("per_position.", "per_position_conditional.", "startup_s.")
WILD = re.compile(r"[*?\[]")


def can_be(name: str, *, patterns: bool = True) -> bool:
    """Whether some run can have a figure of that name.

    `patterns`: the name may hold `*`, `?` and `[...]`, which one of them has to fit.
    """
    wild = WILD.search(name) if patterns else None
    if wild is None:
        return name in EXAMPLES or OPEN.fullmatch(name) is not None
    before = name[: wild.start()]
    return any(fnmatchcase(known, name) for known in EXAMPLES) or before.startswith(STEMS)
