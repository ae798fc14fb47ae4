"""`python -m harness.sampler`: samples a server's gauges, the GPUs and the host.

A process of its own, at a low priority, so that it never holds the interpreter that stamps the
requests. Standard input brings one line of JSON, the `Orders`; every further line asks for a
sample at once; its end means that nobody reads any more. Each sample is a line of JSON on standard
output, a file that has no name: however the reader ends, nothing of it is left.
Times are `perf_counter_ns`, which on Linux is one clock for all processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from engines.gauges import read_gauges
from harness.errors import HarnessError, one_line
from harness.measure.fetch import FetchError, fetch
from harness.measure.hardware import Gpus, Host, load_nvml
from harness.measure.series import Row
from harness.plan.schema import ClientSection

NICENESS = 10
FETCH_S = 5.0
TREE_EVERY_S = 10.0
"""How often the engine's processes are looked for: that walks through every process there is."""


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What to sample. `metrics_url` None: the server publishes nothing.

    `pid`: of the process that the engine's are below; None: it was not started here.
    """

    interval_s: float
    metrics_url: str | None
    client: ClientSection = ClientSection()
    api_key: str | None = None
    pid: int | None = None


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What is told once: why a source says nothing, and the GPUs' names.

    `failed`: why a reading of a source at `at_ns` gave nothing, told each time. `sources`: all that
    will speak, told when they have begun.
    """

    missing: dict[str, str] = {}
    failed: dict[str, str] = {}
    at_ns: int = 0
    sources: tuple[str, ...] = ()
    gpus: dict[str, dict[str, Any]] = {}


class Spool:
    """Standard output: a file of lines that another process reads while it grows."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)  # what a library prints is no sample
        self._lock = threading.Lock()

    def tell(self, what: Row | About) -> None:
        """Add one line, whole."""
        line = msgspec.json.encode(what) + b"\n"
        with self._lock:
            self._file.write(line)


class Ticker:
    """Calls `sample` every `interval_s` and whenever it is asked to, on a thread of its own.

    `failed` is told what a sample raised; the next one has its turn.
    """

    def __init__(
        self, sample: Callable[[], None], interval_s: float, failed: Callable[[Exception], None]
    ) -> None:
        self._sample, self._interval_s, self._failed = sample, interval_s, failed
        self._asked = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def now(self) -> None:
        """Sample at once."""
        self._asked.set()

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            self._asked.wait(max(0.0, due - time.monotonic()))
            self._asked.clear()
            try:
                self._sample()
            except Exception as error:  # one source must not end without a word
                with contextlib.suppress(OSError):  # a full disk cannot be told
                    self._failed(error)
            if time.monotonic() >= due:  # what was missed is left out, not made up for
                late = time.monotonic() - due
                due += self._interval_s * (1 + late // self._interval_s)


class Hardware:
    """Host and GPUs into the spool."""

    def __init__(self, spool: Spool, pid: int | None) -> None:
        self._spool, self._pid = spool, pid
        self._host = Host()
        nvml, why = load_nvml()
        self._gpus: Gpus | None = None
        if nvml is not None:
            try:
                self._gpus = Gpus(nvml)
            except nvml.NVMLError as error:  # a GPU that is lost, or not allowed
                why = f"NVIDIA's library answers: {error}"
        self._pids: frozenset[int] = frozenset()
        self._looked = -TREE_EVERY_S
        spool.tell(
            About(
                missing={} if why is None else {"gpu": why},
                gpus={} if self._gpus is None else self._gpus.describe(),
            )
        )

    @property
    def sources(self) -> tuple[str, ...]:
        """Those that rows will come of."""
        return ("host",) if self._gpus is None else ("host", "gpu")

    def sample(self) -> None:
        """One row of the host, one of each GPU."""
        at_ns = time.perf_counter_ns()
        self._spool.tell(Row(at_ns, "host", "", self._host.read()))
        if self._gpus is None:
            return
        for index, values in self._gpus.read(self._engine_pids()).items():
            self._spool.tell(Row(at_ns, "gpu", index, values))

    def _engine_pids(self) -> frozenset[int]:
        import psutil

        if self._pid is not None and time.monotonic() - self._looked >= TREE_EVERY_S:
            self._looked = time.monotonic()
            with contextlib.suppress(psutil.Error):
                below = psutil.Process(self._pid).children(recursive=True)
                self._pids = frozenset(process.pid for process in below)
        return self._pids


class Server:
    """A server's gauges into the spool."""

    def __init__(self, spool: Spool, orders: Orders) -> None:
        from harness.load.streaming.plain import plain_client

        assert orders.metrics_url is not None
        self._spool, self._url = spool, orders.metrics_url
        self._http = plain_client(self._url, orders.client, orders.api_key)

    def sample(self) -> None:
        """One row; a page that cannot be read gives none, and the reason is told."""
        at_ns = time.perf_counter_ns()
        try:
            status, body = fetch(self._http, self._url, deadline_s=FETCH_S)
            values = read_gauges(body.decode("utf-8", "replace")) if status == 200 else {}
            why = "no gauges on the page" if status == 200 else f"HTTP {status}"
        except FetchError as error:
            values, why = {}, one_line(str(error), 160)
        if values:
            # the moment in the middle: when the server wrote the page
            middle = (at_ns + time.perf_counter_ns()) // 2
            self._spool.tell(Row(middle, "engine", "", values))
            return
        self._spool.tell(About(failed={"engine": why}, at_ns=at_ns))


def main() -> int:
    """Sample until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the parent's to answer
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    orders = msgspec.json.decode(sys.stdin.buffer.readline(), type=Orders)
    spool = Spool()

    def ticking(source: str, sample: Callable[[], None]) -> Ticker:
        def failed(error: Exception) -> None:
            why = one_line(f"{type(error).__name__}: {error}", 160)
            spool.tell(About(failed={source: why}))

        return Ticker(sample, orders.interval_s, failed)

    hardware = Hardware(spool, orders.pid)
    sources, tickers = hardware.sources, [ticking("machine", hardware.sample)]
    if orders.metrics_url is None:
        spool.tell(About(missing={"engine": "no metrics page, or several replicas"}))
    else:
        try:
            tickers.append(ticking("engine", Server(spool, orders).sample))
            sources = (*sources, "engine")
        except HarnessError as error:
            spool.tell(About(missing={"engine": str(error)}))
    spool.tell(About(sources=sources))
    for _ in sys.stdin.buffer:
        for ticker in tickers:
            ticker.now()
    os._exit(0)  # the threads may be waiting for a server that is gone


if __name__ == "__main__":
    sys.exit(main())
