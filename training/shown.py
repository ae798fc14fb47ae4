"""What a stage prints when it ends: its gate as a list or as JSON, and its folder."""

from __future__ import annotations

import sys
from pathlib import Path

from training.files import record_bytes
from training.gate import Gate, check_line

REPORT = "report.txt"
"""What a stage has to tell beside its gate, shown before it."""


def show_gate(gate: Gate, folder: Path, *, as_json: bool) -> None:
    """Results go to standard output, its last line the stage's folder.

    With `as_json` standard output holds the gate alone, and the folder goes to standard error.
    """
    if as_json:
        sys.stdout.write(record_bytes(gate).decode())
        print(folder, file=sys.stderr, flush=True)
    else:
        report = folder / REPORT
        sys.stdout.write(report.read_text(encoding="utf-8") if report.is_file() else "")
        sys.stdout.write(gate_text(gate))
        print(folder)
    sys.stdout.flush()


def gate_text(gate: Gate) -> str:
    """One line a check, and one for the gate."""
    lines = [f"  {check_line(check)}" for check in gate.checks]
    verdict = "passed" if gate.passed else "did not pass"
    return "\n".join([f"{gate.stage}: the gate {verdict}", *lines]) + "\n"
