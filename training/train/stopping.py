"""SIGTERM and SIGINT: the update under way is finished and kept, then the training ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from training.train.parallel import World, total


class Stop:
    """Whether the training was asked to stop. A second signal ends it at once.

    `tell` hears in one line that the first one was received; it is called by the signal's handler.
    """

    def __init__(self, tell: Callable[[str], None] = lambda text: None) -> None:
        self.asked = False
        self.tell = tell

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals over for the block (in the main thread; elsewhere nothing is done)."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        kinds = (signal.SIGTERM, signal.SIGINT)
        before = {kind: signal.getsignal(kind) for kind in kinds}

        def ask(number: int, frame: FrameType | None) -> None:
            self.asked = True
            for kind, handler in before.items():
                signal.signal(kind, handler)
            self.tell(
                f"train: {signal.Signals(number).name} received: the update or validation under "
                "way ends, a checkpoint keeps what was learnt, then the training stops; a second "
                "signal stops it at once, without one"
            )

        for kind in kinds:
            signal.signal(kind, ask)
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)

    def agreed(self, world: World) -> bool:
        """Whether any process was asked to; all ask this at the same place."""
        return total([float(self.asked)], world)[0] > 0
