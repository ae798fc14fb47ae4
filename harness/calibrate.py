"""The story of a calibration: our client and a bare protocol, held against a server's own record.

At each load both ask the scripted server the same requests, in turn (ours, bare, bare, ours, …), so
that whatever else the machine does falls on both. A client's error is what it reports less what the
server's record of the very same request says: no client can do better than to report the server.
"""

from __future__ import annotations

import gc
import os
import platform
import resource
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from harness.errors import UsageError
from harness.load.drive import drive
from harness.load.limits import raise_file_limit
from harness.load.prompts.datasets import Prompt
from harness.load.scripted.bare import run_bare
from harness.load.scripted.client_error import (
    ClientName,
    ClientResult,
    Once,
    noted_of,
    pooled,
    well_counted,
)
from harness.load.scripted.process import ScriptedServer, scripted_server
from harness.load.scripted.script import Script
from harness.load.streaming.client import Asking
from harness.plan.schema import SamplingSection
from harness.records import LoadPoint
from harness.report.width import output_width
from harness.report.words import DASH

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA_VERSION = "1.0"
MAX_TTFT_RATIO = 1.5
TTFT_FLOOR_S = 0.0003
MAX_GAP_EXCESS_S = 0.002
SPARE_S = 60.0
"""Over a load's own length, before it is given up."""
SPARE_FILES = 100

Tell = Callable[[str], None]


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """What to calibrate with: closed loops of `streams` streams at `script`'s pace.

    `rounds`: how often each client has each load. `workers`: our client's processes; None: as many
    as a run would take.
    """

    streams: tuple[int, ...] = (50, 200, 400)
    requests_per_stream: int = 6
    rounds: int = 2
    workers: int | None = None
    script: Script = Script()


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A calibration's outcome. `failures`: bounds that our client did not keep; none: it is fit."""

    schema_version: str
    calibration: Calibration
    machine: dict[str, Any]
    results: tuple[ClientResult, ...]
    failures: tuple[str, ...]


def calibrate(calibration: Calibration, tell: Tell) -> Report:
    """Run every load and judge our client by the bounds at the top of this module.

    Raises `UsageError` where the machine cannot hold a load's connections.
    """
    most = raise_file_limit() - SPARE_FILES
    if max(calibration.streams) > most:
        raise UsageError(
            f"--streams {max(calibration.streams)}: a process may have {most} connections here; "
            "raise the limit on open files (ulimit -Hn), or ask for fewer streams"
        )
    machine = describe_machine()
    results: list[ClientResult] = []
    for streams in calibration.streams:
        rounds: dict[ClientName, list[Once]] = {"ours": [], "bare": []}
        for turn in range(calibration.rounds):
            order: tuple[ClientName, ...] = ("ours", "bare") if turn % 2 == 0 else ("bare", "ours")
            for client in order:
                tell(f"{streams} streams, {client}, round {turn + 1} of {calibration.rounds}")
                rounds[client].append(one_round(calibration, streams, client))
        results += [pooled(client, streams, done) for client, done in rounds.items()]
    return Report(
        schema_version=SCHEMA_VERSION,
        calibration=calibration,
        machine=machine,
        results=tuple(results),
        failures=tuple(failures(results)),
    )


def one_round(calibration: Calibration, streams: int, client: ClientName) -> Once:
    """One client at one load, against a server of its own."""
    asked = streams * calibration.requests_per_stream
    gc.collect()  # what the last round left
    with scripted_server(calibration.script) as server:
        if client == "bare":
            return bare_round(calibration, server, streams, asked)
        return our_round(calibration, server, streams, asked)


def bare_round(calibration: Calibration, server: ScriptedServer, streams: int, asked: int) -> Once:
    """The yardstick's round."""
    script = calibration.script
    run = run_bare(
        server.host,
        server.port,
        streams=streams,
        requests=asked,
        max_tokens=script.output_tokens,
        timeout_s=calibration.requests_per_stream * script.service_s + SPARE_S,
    )
    record = server.record()
    return Once(
        noted=run.requests,
        served=record.requests,
        asked=asked,
        cpu_s=run.cpu_s,
        server_cpu_s=record.cpu_s,
        wall_s=run.wall_s,
    )


def our_round(calibration: Calibration, server: ScriptedServer, streams: int, asked: int) -> Once:
    """Our client's round, driven as a run drives it."""
    script = calibration.script
    asking = Asking(
        url=server.url,
        model=script.model,
        endpoint="chat",
        max_tokens=script.output_tokens,
        sampling=SamplingSection(),
        timeout_s=script.service_s + SPARE_S,
        extra={"return_token_ids": True},
    )
    prompts = [Prompt(id=str(i), text=f"#{i}") for i in range(asked)]
    load = LoadPoint(mode="closed", concurrency=streams, num_requests=asked)
    more: dict[str, Any] = {}
    if calibration.workers is not None:
        more["workers"] = calibration.workers
    begun, cpu = time.perf_counter(), cpu_time()
    driven = drive(
        asking, prompts, load, cell_id="calibrate", seed=0, engine_gone=lambda: None, **more
    )
    cpu_s, wall_s = cpu_time() - cpu, time.perf_counter() - begun
    record = server.record()
    ok = [r for r in driven.records if r.status == "ok"]
    errors = [r.error for r in driven.records if r.error is not None]
    return Once(
        noted=[note for r in ok if (note := noted_of(r)) is not None],
        served=record.requests,
        asked=asked,
        cpu_s=cpu_s,
        server_cpu_s=record.cpu_s,
        wall_s=wall_s,
        miscounted=sum(not well_counted(r, script) for r in ok),
        first_error=errors[0] if errors else driven.interrupted,
    )


def cpu_time() -> float:
    """CPU seconds of this process and of every child that has ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def failures(results: Sequence[ClientResult]) -> list[str]:
    """The bounds that our client did not keep, one line each with the numbers."""
    said: list[str] = []
    bare = {result.streams: result for result in results if result.client == "bare"}
    for ours in results:
        if ours.client == "ours":
            said += [f"{ours.streams} streams: {line}" for line in judged(ours, bare[ours.streams])]
    return said


def judged(ours: ClientResult, bare: ClientResult) -> list[str]:
    """What is wrong with one load's result."""
    said: list[str] = []
    if ours.lost:
        why = f", the first with: {ours.first_error}" if ours.first_error else ""
        said.append(f"{ours.lost} of {ours.requests} requests lost{why}")
    if ours.miscounted:
        said.append(f"the tokens of {ours.miscounted} answers are counted wrong")
    off, yardstick = ours.ttft_s.error.mean, bare.ttft_s.error.mean
    if off is None or yardstick is None:
        said.append("no answer to judge the client by")
        return said
    allowed = MAX_TTFT_RATIO * max(yardstick, 0.0) + TTFT_FLOOR_S
    if off > allowed:
        said.append(
            f"mean TTFT is {1e3 * off:.2f} ms off; {1e3 * allowed:.2f} ms are allowed "
            f"({MAX_TTFT_RATIO:g} x the bare protocol's {1e3 * yardstick:.2f} ms, and "
            f"{1e3 * TTFT_FLOOR_S:g} ms)"
        )
    gap, bare_gap = ours.icl_s.reported.p99, bare.icl_s.reported.p99
    if gap is not None and bare_gap is not None and gap > bare_gap + MAX_GAP_EXCESS_S:
        said.append(
            f"p99 gap between chunks is {1e3 * gap:.2f} ms, over {1e3 * MAX_GAP_EXCESS_S:g} ms "
            f"more than the bare protocol's {1e3 * bare_gap:.2f} ms"
        )
    return said


def describe_machine() -> dict[str, Any]:
    """What the figures depend on, and how busy the machine was before the first load."""
    import uvloop

    return {
        "cpus": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "uvloop": uvloop.__version__,
        "load_average_before": round(os.getloadavg()[0], 2),
    }


def print_report(report: Report) -> None:
    """The table on standard output: plain text, in colour on a terminal."""
    import io
    import sys

    from rich.console import Console

    parts = [table_of(report), *ratios(report.results)]
    if sys.stdout.isatty():
        Console(highlight=False).print(*parts, sep="\n")
        return
    sink = io.StringIO()
    plain = Console(file=sink, width=output_width(), color_system=None, highlight=False)
    plain.print(*parts, sep="\n")
    print("\n".join(line.rstrip() for line in sink.getvalue().splitlines()))


def table_of(report: Report) -> Table:
    """Two rows a load: our client and the bare protocol."""
    from rich import box
    from rich.table import Table

    script, machine = report.calibration.script, report.machine
    title = (
        f"{script.chunks} chunks an answer, the first after {script.first_ms:g} ms, then one each "
        f"{script.gap_ms:g} ms; {machine['cpus']} CPUs, load {machine['load_average_before']:g}"
    )
    table = Table(
        title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1), pad_edge=False
    )
    table.add_column("streams", justify="right")
    table.add_column("client", no_wrap=True)
    heads = ["chunks\nper s", "TTFT\nms", "true\nms", "off\nmean", "off\np99"]
    heads += ["gap p99\nms", "true\nms", "E2E off\nmean", "CPU µs\na chunk", "lost"]
    for head in heads:
        table.add_column(head, justify="right")
    for result in report.results:
        ttft, gap, whole = result.ttft_s, result.icl_s, result.e2el_s
        table.add_row(
            str(result.streams) if result.client == "ours" else "",
            result.client,
            shown(result.chunks_per_s, digits=0),
            *(in_ms(v) for v in (ttft.reported.mean, ttft.true.mean)),
            *(in_ms(v) for v in (ttft.error.mean, ttft.error.p99)),
            *(in_ms(v) for v in (gap.reported.p99, gap.true.p99)),
            in_ms(whole.error.mean),
            shown(result.cpu_us_per_chunk, digits=1),
            str(result.lost),
        )
    return table


def ratios(results: Sequence[ClientResult]) -> list[str]:
    """Our client over the bare protocol, one line a load."""
    lines: list[str] = []
    bare = {result.streams: result for result in results if result.client == "bare"}
    for ours in results:
        if ours.client == "ours":
            base = bare[ours.streams]
            off = over(ours.ttft_s.error.mean, base.ttft_s.error.mean)
            cpu = over(ours.cpu_us_per_chunk, base.cpu_us_per_chunk)
            lines.append(
                f"{ours.streams} streams: TTFT error {off} the bare protocol's, CPU per chunk {cpu}"
            )
    return lines


def over(part: float | None, whole: float | None) -> str:
    """A ratio as `1.23 x`; a dash where it has no meaning."""
    if part is None or whole is None or whole <= 0:
        return DASH
    return f"{part / whole:.2f} x"


def in_ms(seconds: float | None) -> str:
    """Milliseconds with four digits or so; a dash where there is none."""
    if seconds is None:
        return DASH
    value = 1e3 * seconds
    return f"{value:.{2 if abs(value) < 100 else 1 if abs(value) < 1000 else 0}f}"


def shown(value: float | None, *, digits: int) -> str:
    """A number as the table shows it; a dash where there is none."""
    return DASH if value is None else f"{value:.{digits}f}"
