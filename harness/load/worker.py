"""`python -m harness.load.worker SLICE RECORDS BOARD`: one load generating process.

It says on the board when it is ready, begins at the common start, and writes its record file. A
line on standard input is the reason to end early; its end without a line means that whoever asked
for the load is gone, and so is the worker.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from harness.load.limits import raise_file_limit
from harness.load.slices import Board, Slice, Yield, read_slice, write

POLL_S = 0.001


def main(arguments: list[str]) -> int:
    """Do the slice."""
    slice_path, out, board_path = (Path(a) for a in arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the parent's to answer
    raise_file_limit()
    work = read_slice(slice_path)
    board = Board(board_path, work.share.workers)
    import uvloop

    write(out, uvloop.run(_work(work, board)))
    return 0


async def _work(work: Slice, board: Board) -> Yield:
    from harness.load.drive import drive_slice
    from harness.load.schedule.executors import Stop

    stop = Stop()
    loop = asyncio.get_running_loop()
    loop.add_reader(0, _read_orders, stop)
    worker = work.share.worker
    board.ready(worker)
    while board.start_ns == 0:
        await asyncio.sleep(POLL_S)
    return await drive_slice(
        work, stop, lambda tally: board.tell(worker, tally), start_ns=board.start_ns
    )


def _read_orders(stop: object) -> None:
    from harness.load.schedule.executors import Stop

    assert isinstance(stop, Stop)
    said = os.read(0, 65536).decode("utf-8", "replace").strip()
    if not said:
        os._exit(1)
    stop.set(said)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
