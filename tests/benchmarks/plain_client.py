"""The streaming client one writes first, on httpx or aiohttp; run in an environment of its own.

    python plain_client.py httpx|aiohttp URL STREAMS PROMPTS OUT

Closed loop over the prompts of a JSONL file. Stamps are taken where such clients take them: in the
coroutine that reads the lines. Writes mean TTFT, p99 gap and the number of whole answers to OUT.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

PATH = "/v1/chat/completions"
Stream = Callable[[dict[str, Any]], AsyncIterator[str | bytes]]


@asynccontextmanager
async def with_httpx(url: str, streams: int) -> AsyncIterator[Stream]:
    """Lines of a streamed answer by httpx."""
    import httpx

    limits = httpx.Limits(max_connections=streams, max_keepalive_connections=streams)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=600) as client:

        async def lines(body: dict[str, Any]) -> AsyncIterator[str | bytes]:
            async with client.stream("POST", PATH, json=body) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    yield line

        yield lines


@asynccontextmanager
async def with_aiohttp(url: str, streams: int) -> AsyncIterator[Stream]:
    """Lines of a streamed answer by aiohttp."""
    import aiohttp

    connector = aiohttp.TCPConnector(limit=streams)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as client:

        async def lines(body: dict[str, Any]) -> AsyncIterator[str | bytes]:
            async with client.post(PATH, json=body) as response:
                response.raise_for_status()
                async for line in response.content:
                    yield line

        yield lines


async def ask(lines: Stream, prompt: str, max_tokens: int) -> list[float]:
    """One request; when it was sent, then when each of its chunks came."""
    body = {
        "model": "scripted",
        "messages": [{"role": "user", "content": prompt}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": max_tokens,
    }
    stamps = [perf_counter()]
    async for raw in lines(body):
        line = raw.decode() if isinstance(raw, bytes) else raw
        if line.startswith("data: {") and json.loads(line[6:])["choices"]:
            stamps.append(perf_counter())
    return stamps


async def run(name: str, url: str, streams: int, prompts: list[str]) -> list[list[float]]:
    """Every prompt's stamps."""
    waiting: Iterator[str] = iter(prompts)
    done: list[list[float]] = []

    async def sender(lines: Stream) -> None:
        for prompt in waiting:
            done.append(await ask(lines, prompt, 1000))

    opened = {"httpx": with_httpx, "aiohttp": with_aiohttp}[name]
    async with opened(url, streams) as lines:
        senders: list[Awaitable[None]] = [sender(lines) for _ in range(streams)]
        await asyncio.gather(*senders)
    return done


def main() -> None:
    """Run, and write the figures."""
    name, url, streams, file, out = sys.argv[1:]
    texts = Path(file).read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(text)["prompt"] for text in texts]
    try:
        import uvloop
    except ImportError:
        done = asyncio.run(run(name, url, int(streams), prompts))
    else:
        done = uvloop.run(run(name, url, int(streams), prompts))
    first = [stamps[1] - stamps[0] for stamps in done]
    gaps = sorted(b - a for s in done for a, b in pairwise(s[1:]))
    figures = {
        "ttft_ms": 1e3 * sum(first) / len(first),
        "gap_p99_ms": 1e3 * gaps[int(0.99 * (len(gaps) - 1))],
        "requests": len(done),
    }
    Path(out).write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
