"""What the system allows a process that opens many connections."""

from __future__ import annotations

import resource

UNLIMITED = 1_000_000


def raise_file_limit() -> int:
    """Let this process open as many files and sockets as it may have; how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = UNLIMITED if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft
