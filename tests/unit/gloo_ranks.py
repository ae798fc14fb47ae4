"""Real ranks that meet over gloo, and then wait: their environment, and how a test awaits that.

A rank's program is run with this folder in its path and calls `tell_once_in` before it waits.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import time
from pathlib import Path

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",  # else gloo looks up the host's name, which may take long
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), sysconfig.get_paths()["purelib"]]),
}


def tell_once_in(folder: str, rank: int, *functions: str) -> None:
    """Leave a file in `folder` once the main thread stands in one of `functions`."""
    main = threading.main_thread().ident
    assert main is not None

    def look() -> None:
        while sys._current_frames()[main].f_code.co_name not in functions:
            time.sleep(0.05)
        Path(folder, f"waits-{rank}").touch()

    threading.Thread(target=look, daemon=True).start()


def await_ranks(folder: Path, world: int) -> None:
    """Until all ranks wait where they are meant to, however long they took to get there."""
    end = time.monotonic() + 300
    while len(list(folder.glob("waits-*"))) < world:
        assert time.monotonic() < end, f"only {sorted(folder.glob('waits-*'))} wait"
        time.sleep(0.05)
