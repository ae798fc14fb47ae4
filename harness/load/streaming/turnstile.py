"""Spreads the work of many requests that begin or end at once over turns of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque

EACH_TURN = 4
"""Some tenths of a millisecond of work, after which arrivals have their turn to be stamped."""


class Turnstile:
    """Lets a few coroutines on in each turn of the event loop, first come first served.

    A burst of requests that are built in one turn would hold up the stamps of all that arrives
    meanwhile: the client would report its own work as the server's latency.
    """

    def __init__(self, each_turn: int = EACH_TURN) -> None:
        self._loop = asyncio.get_running_loop()
        self._each_turn = each_turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._scheduled = False

    async def enter(self) -> None:
        """Wait for this coroutine's turn."""
        waiter = self._loop.create_future()
        self._waiting.append(waiter)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turn)
        await waiter

    def _turn(self) -> None:
        let_on = 0
        while self._waiting and let_on < self._each_turn:
            waiter = self._waiting.popleft()
            if not waiter.done():  # cancelled meanwhile
                waiter.set_result(None)
                let_on += 1
        self._scheduled = bool(self._waiting)
        if self._scheduled:
            self._loop.call_soon(self._turn)
