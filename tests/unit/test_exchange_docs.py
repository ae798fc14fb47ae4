"""docs/exchange.md: its commands run as they stand, and it names what the code reads and writes."""

from __future__ import annotations

import re
import shlex
import signal
import sys
from pathlib import Path

import pytest
from exchange_files import aiperf, vllm, write
from history_runs import write_one

from harness import cli
from harness.exchange.exporting import FORMATS
from harness.exchange.recognise import KNOWN
from harness.exchange.records import Import
from harness.exchange.tables import COLUMNS
from harness.exchange.tools import aiperf as aiperf_tool
from harness.exchange.tools import guidellm, sglang_bench, vllm_bench

PAGE = Path(__file__).resolve().parents[2] / "docs" / "exchange.md"
TEXT = PAGE.read_text(encoding="utf-8")
COMMANDS = re.findall(r"^python -m harness (.+)$", TEXT, re.MULTILINE)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the page's commands name."""
    write(tmp_path / "night.json", vllm())
    write(tmp_path / "artifacts" / "profile_export_aiperf.json", aiperf())
    write_one(tmp_path / "results", "20260101-000000-reference-ab12")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_its_commands_run_as_they_stand(
    command: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = shlex.split(command.replace(" --since 30d", ""))
    monkeypatch.setattr(sys, "argv", ["harness", *words])
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with pytest.raises(SystemExit) as left:
            cli.main()
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)
    assert left.value.code == 0


def test_it_has_commands_of_both_kinds() -> None:
    assert {command.partition(" ")[0] for command in COMMANDS} == {"import", "export"}


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(FORMATS, id="formats"),
        pytest.param(COLUMNS, id="columns"),
        pytest.param(Import.__struct_fields__, id="fields of import.json"),
        pytest.param([*vllm_bench.LATENCIES.values(), *vllm_bench.PLAIN.values()], id="vllm"),
        pytest.param([*sglang_bench.LATENCIES.values(), *sglang_bench.PLAIN.values()], id="sglang"),
        pytest.param(
            [
                *(name for name, _ in guidellm.LATENCIES.values()),
                *(*guidellm.RATES.values(), *guidellm.SUMS.values()),
            ],
            id="guidellm",
        ),
        pytest.param([*aiperf_tool.LATENCIES.values(), *aiperf_tool.PLAIN.values()], id="aiperf"),
    ],
)
def test_it_names_everything(names: list[str]) -> None:
    missing = [name for name in names if f"`{name}`" not in TEXT]
    assert not missing


def test_it_names_every_metric_that_an_import_makes() -> None:
    metrics = {
        *(*vllm_bench.LATENCIES, *vllm_bench.PLAIN, *sglang_bench.LATENCIES, *sglang_bench.PLAIN),
        *(*guidellm.LATENCIES, *guidellm.RATES, *guidellm.SUMS),
        *(*aiperf_tool.LATENCIES, *aiperf_tool.PLAIN),
    }
    assert not [metric for metric in metrics if f"`{metric}`" not in TEXT]


def test_the_tools_that_are_known_are_those_of_the_page() -> None:
    for word in ("vLLM", "SGLang", "GuideLLM", "AIPerf", "pytest-benchmark"):
        assert word in KNOWN and f"| {word}" in TEXT
