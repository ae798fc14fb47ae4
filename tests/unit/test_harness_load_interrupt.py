"""A signal ends a running event loop, wherever in it the signal falls."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from harness.load.interrupt import ENDING, held, run_interruptible


class Terminated(KeyboardInterrupt):
    """What the handler of these tests raises."""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in ENDING}

    def leave(number: int, frame: object) -> None:
        raise Terminated(number)

    for number in ENDING:
        signal.signal(number, leave)
    yield
    assert all(signal.getsignal(number) is leave for number in ENDING)
    for number, handler in before.items():
        signal.signal(number, handler)


class Signals(asyncio.Protocol):
    """Sends itself a signal from within the callback in which the loop swallows exceptions."""

    def __init__(self, number: int) -> None:
        self.number = number

    def data_received(self, data: bytes) -> None:
        signal.raise_signal(self.number)


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_within_a_callback_is_not_lost(number: int) -> None:
    ended: list[str] = []

    async def work() -> None:
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(lambda: Signals(number), sock=ours)
        theirs.send(b"x")
        try:
            await asyncio.sleep(300)
        except asyncio.CancelledError:
            ended.append("tidily")
            raise
        finally:
            transport.close()
            theirs.close()

    with pytest.raises(Terminated) as caught:
        run_interruptible(work())
    assert (caught.value.args, ended) == ((number,), ["tidily"])


def test_a_signal_from_outside_wakes_a_loop_that_waits() -> None:
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.2, lambda: signal.pthread_kill(main, signal.SIGTERM))
    with pytest.raises(Terminated):
        timer.start()
        run_interruptible(asyncio.sleep(300))
    timer.join()


def test_work_that_swallows_its_cancelling_is_ended_all_the_same() -> None:
    async def work() -> str:
        try:
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(300)
        except asyncio.CancelledError:
            return "carried on"
        return "slept"

    with pytest.raises(Terminated):
        run_interruptible(work())


def test_results_and_errors_pass_and_so_does_another_thread() -> None:
    async def give() -> int:
        return 3

    async def fail() -> int:
        raise ValueError("no")

    assert run_interruptible(give()) == 3
    with pytest.raises(ValueError, match="no"):
        run_interruptible(fail())
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(run_interruptible(give())))
    thread.start()
    thread.join()
    assert found == [3]


def test_a_signal_waits_until_what_must_not_be_cut_is_done() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), held():
        signal.raise_signal(signal.SIGINT)
        done.append("saved")
    assert done == ["saved"]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)  # the handler of before is back
