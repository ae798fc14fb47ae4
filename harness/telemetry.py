"""The telemetry of a server's cells: a sampling process beside it, its samples cell by cell."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter_ns
from typing import IO

import msgspec

from harness.measure.series import Row, Series, series_of
from harness.prepare import Prepared, api_key
from harness.sampler import About, Orders

ROOT = Path(__file__).resolve().parents[1]
SAMPLE_S = 10.0
"""How long the sample that was asked for at either end of a window is waited for: one of a page
that does not answer fails sooner, and a process that ended is not waited for."""


class Watch:
    """Samples until it is closed. Never raises: telemetry that fails is missing, and says why.

    For each cell `begin`, then `end` when the load is over, then `series`.
    """

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._files = contextlib.ExitStack()
        self._spool: IO[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._read = 0
        self._missing: dict[str, str] = {}
        self._failed: dict[str, list[str]] = {}
        self._gpus: dict[str, dict[str, object]] = {}
        self._rows: list[Row] = []
        self._latest: dict[str, int] = {}
        self._sources: tuple[str, ...] = ()
        self._begin_ns = self._end_ns = 0
        self._process: subprocess.Popen[bytes] | None = None
        try:
            # Files without a name: after a kill -9 nothing is left of them.
            spool, log = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
            self._spool = self._files.enter_context(spool)
            self._log = self._files.enter_context(log)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "harness.sampler"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=self._spool,
                stderr=self._log,
            )
        except OSError as error:
            self._missing["all"] = f"the sampling process could not be started: {error}"
        # By the pipe, not by arguments or a file: a key may be in it.
        self._write(msgspec.json.encode(orders) + b"\n")

    def begin(self) -> None:
        """A cell's load is about to begin; returns when it was sampled."""
        self._take_in()
        self._failed.clear()  # what failed before is of no cell, or of an earlier one
        self._begin_ns = perf_counter_ns()
        self._write(b"now\n")
        self._await(self._begin_ns)

    def end(self) -> None:
        """It is over."""
        self._end_ns = perf_counter_ns()
        self._write(b"now\n")

    def series(self) -> Series:
        """What was sampled from `begin` to `end`, both ends included."""
        self._await(self._end_ns)
        rows = [row for row in self._rows if row.at_ns >= self._begin_ns]
        self._rows = []
        missing = dict(self._missing)
        for source, whys in self._failed.items():
            missing[source] = f"{len(whys)} readings failed: {whys[-1]}"
        if not rows and "all" not in missing:
            missing["all"] = self._why()
        return series_of(
            rows,
            interval_s=self._orders.interval_s,
            missing=missing,
            gpus=self._gpus,
        )

    def close(self) -> None:
        """End the sampling process."""
        if self._process is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            try:
                self._process.wait(timeout=2.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._files.close()

    def _await(self, at_ns: int) -> None:
        """Until every source was sampled at `at_ns` or later, or `SAMPLE_S` is over."""
        deadline = time.monotonic() + SAMPLE_S
        while True:
            self._take_in()
            known = [self._latest.get(source, 0) for source in self._sources]
            if known and min(known) >= at_ns:
                return
            if time.monotonic() > deadline or not self._alive():
                return
            time.sleep(0.01)

    def _take_in(self) -> None:
        """Read the lines that were written since the last look."""
        whole = _since(self._spool, self._read).rpartition(b"\n")[0]
        if not whole:
            return
        self._read += len(whole) + 1
        for line in whole.split(b"\n"):
            # A line may have been cut by a full disk.
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                self._take_line(line)

    def _take_line(self, line: bytes) -> None:
        if line.startswith(b"["):
            row = msgspec.json.decode(line, type=Row)
            self._rows.append(row)
            self._latest[row.source] = row.at_ns
            return
        about = msgspec.json.decode(line, type=About)
        self._missing |= about.missing
        self._gpus |= about.gpus
        self._sources = about.sources or self._sources
        for source, why in about.failed.items():
            self._latest[source] = about.at_ns
            self._failed.setdefault(source, []).append(why)

    def _alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _why(self) -> str:
        if self._alive():
            return "no sample came in time"
        said = _since(self._log, 0).decode("utf-8", "replace").strip().splitlines()
        return f"the sampling process ended: {said[-1] if said else 'it said nothing'}"

    def _write(self, line: bytes) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # it has ended
                self._process.stdin.write(line)
                self._process.stdin.flush()


def _since(file: IO[bytes] | None, offset: int) -> bytes:
    """What another process wrote behind `offset`; its own place in the file stays where it is."""
    if file is None:
        return b""
    with contextlib.suppress(OSError):
        return os.pread(file.fileno(), os.fstat(file.fileno()).st_size - offset, offset)
    return b""


@contextmanager
def watching(prepared: Prepared, url: str, pid: int | None) -> Iterator[Watch | None]:
    """A watch on a server while the block lasts; None where the plan wants none.

    Of several replicas (their `url`s joined by commas) the gauges are not sampled.
    """
    plan = prepared.plan
    if not plan.telemetry.interval_s:
        yield None
        return
    path = prepared.adapter.metrics_path if "," not in url else None
    watch = Watch(
        Orders(
            interval_s=plan.telemetry.interval_s,
            metrics_url=f"{url}{path}" if path else None,
            client=plan.client,
            api_key=api_key(plan),
            pid=pid,
        )
    )
    try:
        yield watch
    finally:
        watch.close()
