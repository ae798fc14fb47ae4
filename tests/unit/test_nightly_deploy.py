"""The examples for every night: cron, systemd, GitHub Actions, and the suite that they name."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engines.catalog import names
from harness.nightly.suite import check_plans, read_suite

REPO = Path(__file__).resolve().parents[2]
DEPLOY = REPO / "docs" / "deploy"
SUITE = "docs/deploy/nightly-suite.toml"
COMMAND = f".venv/bin/python -m harness nightly --suite {SUITE}"
RANGES = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))


def test_the_suite_can_be_read_and_its_plans_built() -> None:
    loaded = read_suite(REPO / SUITE)
    check_plans(loaded, names())
    assert [e.name for e in loaded.suite.entries] == ["alone", "two-users"]


def cron_fields(line: str) -> tuple[list[str], str]:
    """A crontab's line: its five fields, and its command."""
    *fields, command = line.split(None, 5)
    return fields, command


def fits(field: str, low: int, high: int) -> bool:
    """Whether it is a field of cron's grammar: *, a number, a range, a list, a step."""
    for part in field.split(","):
        found = re.fullmatch(r"(\*|(\d+)(?:-(\d+))?)(?:/([1-9]\d*))?", part)
        if found is None:
            return False
        numbers = [int(n) for n in (found[2], found[3]) if n is not None]
        if any(not low <= n <= high for n in numbers) or numbers != sorted(numbers):
            return False
    return True


@pytest.mark.parametrize("field", ["60", "*/0", "5-2", "a", "", "1,,2"])
def test_the_grammar_refuses_what_is_no_field(field: str) -> None:
    assert not fits(field, 0, 59)


def test_the_crontab_is_one() -> None:
    entries = []
    for line in (DEPLOY / "nightly.cron").read_text().splitlines():
        if not line or line.startswith("#") or re.fullmatch(r'\w+="?[\w/.-]*"?', line):
            continue
        entries.append(cron_fields(line))
    ((fields, command),) = entries
    assert len(fields) == 5
    assert all(fits(f, *bounds) for f, bounds in zip(fields, RANGES, strict=True))
    assert "%" not in command  # cron would end the line there
    assert COMMAND in command


def test_the_units_are_what_systemd_takes(tmp_path: Path) -> None:
    text = (DEPLOY / "spec-harness-nightly.service").read_text()
    assert f"ExecStart=/opt/spec-harness/{COMMAND}\n" in text
    verify = shutil.which("systemd-analyze")
    if verify is None:
        pytest.skip("systemd-analyze is not installed")
    here = text.replace("/opt/spec-harness/.venv/bin/python", sys.executable)
    for name, told in (
        ("spec-harness-nightly.service", here.replace("User=harness", "User=root")),
        ("spec-harness-nightly.timer", (DEPLOY / "spec-harness-nightly.timer").read_text()),
    ):
        (tmp_path / name).write_text(told)
    units = [str(p) for p in sorted(tmp_path.iterdir())]
    done = subprocess.run([verify, "verify", *units], capture_output=True, text=True)
    ours = [line for line in done.stderr.splitlines() if "spec-harness" in line]
    assert ours == [] and done.returncode == 0, done.stderr
    spoilt = tmp_path / "spec-harness-nightly.service"
    spoilt.write_text(here.replace("Type=oneshot", "Type=often"))
    done = subprocess.run([verify, "verify", str(spoilt)], capture_output=True, text=True)
    assert "often" in done.stderr


def schema_says(path: Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("check_jsonschema", reason="the test extra is not installed")
    command = [sys.executable, "-m", "check_jsonschema"]
    command += ["--builtin-schema", "vendor.github-workflows", str(path)]
    return subprocess.run(command, capture_output=True, text=True)


def workflow() -> dict[Any, Any]:
    yaml = pytest.importorskip("yaml", reason="the test extra is not installed")
    told: dict[Any, Any] = yaml.safe_load((DEPLOY / "nightly-workflow.yml").read_text())
    return told


def test_the_workflow_fits_the_schema_of_workflows(tmp_path: Path) -> None:
    done = schema_says(DEPLOY / "nightly-workflow.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    spoilt = tmp_path / "w.yml"
    spoilt.write_text((DEPLOY / "nightly-workflow.yml").read_text().replace("runs-on:", "run-on:"))
    assert schema_says(spoilt).returncode != 0


def test_the_workflow_names_what_there_is() -> None:
    told = workflow()
    (when,) = told[True]["schedule"]  # YAML 1.1 reads `on` as true
    fields, _ = cron_fields(f"{when['cron']} x")
    assert all(fits(f, *bounds) for f, bounds in zip(fields, RANGES, strict=True))
    steps = told["jobs"]["nightly"]["steps"]
    runs = [s["run"] for s in steps if "run" in s]
    assert COMMAND in runs
    assert "$(VENV)/installed:" in (REPO / "Makefile").read_text()
    secrets = [v for s in steps for v in s.get("env", {}).values()]
    assert secrets and all(re.fullmatch(r"\$\{\{ secrets\.\w+ \}\}", s) for s in secrets)


def test_the_page_tells_every_key_and_links_what_there_is() -> None:
    from harness.nightly.suite import Suite

    text = (REPO / "docs" / "nightly.md").read_text()
    for key in Suite.__struct_fields__:
        if key != "description":
            assert f"`{key}`" in text or f"`[{key}]`" in text or f"`[[{key}]]`" in text, key
    for link in re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", text):
        if link != "regressions.md":  # beside it, of the statistics
            assert (REPO / "docs" / link).exists(), link
