"""Whose results a file holds: told by what is in it, never by its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from harness.errors import UsageError, one_line
from harness.exchange.reading import Document
from harness.exchange.records import Foreign
from harness.exchange.tools import aiperf, guidellm, pytest_benchmark, sglang_bench, vllm_bench


class Tool(NamedTuple):
    """One kind of file. `shown`: as a message names it; `name`: as a point's source names it."""

    name: str
    shown: str
    recognise: Callable[[Document], bool]
    convert: Callable[[Sequence[Document]], list[Foreign]]


AIPERF_RECORDS = Tool(
    aiperf.NAME, aiperf.RECORDS_SHOWN, aiperf.recognise_record, aiperf.convert_records
)
AIPERF = Tool(aiperf.NAME, aiperf.SHOWN, aiperf.recognise, aiperf.convert)
TOOLS = (
    Tool(vllm_bench.NAME, vllm_bench.SHOWN, vllm_bench.recognise, vllm_bench.convert),
    Tool(sglang_bench.NAME, sglang_bench.SHOWN, sglang_bench.recognise, sglang_bench.convert),
    Tool(guidellm.NAME, guidellm.SHOWN, guidellm.recognise, guidellm.convert),
    AIPERF,
    AIPERF_RECORDS,
    Tool(
        pytest_benchmark.NAME,
        pytest_benchmark.SHOWN,
        pytest_benchmark.recognise,
        pytest_benchmark.convert,
    ),
)
KNOWN = "; ".join([*(tool.shown for tool in TOOLS), "points that `export` wrote"])


def tool_of(found: Sequence[Document], path: Path) -> Tool:
    """The tool that wrote every document. Raises `UsageError`: what was seen, what is known."""
    tools = [_tool(document) for document in found]
    first = tools[0]
    for i, tool in enumerate(tools):
        if tool is None or tool is not first:
            which = f"result {i + 1} of {len(found)}: " if len(found) > 1 else ""
            if tool is not None and first is not None:
                seen = f"{tool.shown} behind {first.shown}"
                raise UsageError(f"{path}: {which}{seen}; import one tool's results at a time")
            raise UsageError(
                f"{path}: {which}no known result; it has {_seen(found[i])}. Known: {KNOWN}"
            )
    assert first is not None
    return first


def _tool(document: Document) -> Tool | None:
    return next((tool for tool in TOOLS if tool.recognise(document)), None)


def _seen(document: Document) -> str:
    keys = list(document)
    if not keys:
        return "no keys"
    more = f" and {len(keys) - 6} more" if len(keys) > 6 else ""
    return f"the keys {one_line(', '.join(keys[:6]), 120)}{more}"
