"""Keys given in every place: the engine gets them, the run's folder never holds one."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from engines.secret import HIDDEN

REPO = Path(__file__).resolve().parents[2]
PLANTED = "planted-"
"""Every secret begins so, and nothing else does."""
SITE = """
    # The engine takes --api-key as vLLM does, and tells all that it was given.
    import argparse, hashlib, os, sys

    begin = argparse.ArgumentParser.__init__

    def init(self, *given, **named):
        begin(self, *given, **named)
        if named.get("prog") == "python -m engines.reference":
            self.add_argument("--api-key")

    argparse.ArgumentParser.__init__ = init
    if "engines.reference" in sys.orig_argv:
        print("non-default args:", sys.orig_argv, file=sys.stderr)
        print(dict(os.environ), flush=True)
        given = [os.environ[name] for name in ("HF_TOKEN", "WANDB_API_KEY", "AUTH_TOKEN")]
        given.append(sys.orig_argv[sys.orig_argv.index("--api-key") + 1])
        for value in given:
            print("digest", hashlib.sha256(value.encode()).hexdigest(), flush=True)
"""
PROFILE = """
    inherits = "demo"
    name = "with-keys"
    [engine.env.WANDB_API_KEY]
    value = "planted-profile"
    why = "so that it is told"
"""
SETS = {
    "engine.extra_env.HF_TOKEN": "planted-set",
    "engine.extra_args": '["--api-key", "planted-argument"]',
    "engine.command_prefix": '["env", "AUTH_TOKEN=planted-prefix"]',
    "client.headers.Authorization": "Bearer planted-header",
    "client.headers.X-Api-Key": "planted-second",
    "load.num_requests": "2",
    "load.concurrency": "1",
    "load.warmup_requests": "0",
    "compare.launches": "1",
    "load.allow_client_bound": "true",
}
BACK = {
    "HF_TOKEN": "planted-set",
    "API_KEY": "planted-argument",
    "AUTH_TOKEN": "planted-prefix",
    "HEADER_AUTHORIZATION": "Bearer planted-header",
    "HEADER_X_API_KEY": "planted-second",
}
GIVEN = ("planted-set", "planted-profile", "planted-prefix", "planted-argument")


def harness(tmp_path: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    here = {name: value for name, value in os.environ.items() if name not in BACK}
    return subprocess.run(
        [sys.executable, "-m", "harness", *words],
        cwd=REPO,
        env={**here, "PYTHONPATH": str(tmp_path / "site"), **more},
        capture_output=True,
        text=True,
        timeout=600,
    )


def shows(folder: Path) -> list[str]:
    """The files that hold a secret."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [str(path) for path in files if PLANTED.encode() in path.read_bytes()]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(textwrap.dedent(SITE))
    (tmp_path / "keys.toml").write_text(textwrap.dedent(PROFILE))
    return tmp_path


def test_no_file_of_a_run_holds_a_key_and_it_can_be_gone_on_with(place: Path) -> None:
    sets = [word for key, value in SETS.items() for word in ("--set", f"{key}={value}")]
    profile = str(place / "keys.toml")
    environment = {"LAUNCH_PASSWORD": "planted-environment"}
    words = ("run", "--profile", profile, "--variants", "baseline", "--out", str(place / "out"))
    ran = harness(place, *words, *sets, **environment)
    assert ran.returncode in (0, 4), ran.stderr
    (folder,) = (place / "out").glob("*/")
    assert shows(folder) == []
    (cell, *_) = sorted((folder / "cells").glob("*"))
    log = (cell / "engine.log").read_text()
    for value in GIVEN:  # the engine was started with the very value
        assert f"digest {hashlib.sha256(value.encode()).hexdigest()}" in log
    for told in (log, (folder / "report.md").read_text(), (folder / "report.html").read_text()):
        assert HIDDEN in told
    assert f"'engine.extra_env.HF_TOKEN={HIDDEN}'" in (folder / "report.md").read_text()

    shutil.rmtree(cell)
    before = (folder / "manifest.json").read_bytes()
    refused = harness(place, "resume", str(folder), **environment)
    assert refused.returncode == 2
    assert len(refused.stderr.splitlines()) == 1
    for name in BACK:
        assert name in refused.stderr
    assert not cell.exists()
    resumed = harness(place, "resume", str(folder), **BACK, **environment)
    assert resumed.returncode in (0, 4), resumed.stderr
    assert cell.exists()
    assert (folder / "manifest.json").read_bytes() == before
    assert shows(folder) == []


def test_a_start_that_fails_tells_no_key(place: Path) -> None:
    sets = ["--set", "engine.extra_env.HF_TOKEN=planted-set", "--variants", "baseline"]
    with open(place / "site" / "sitecustomize.py", "a") as file:
        file.write(
            "\nif 'engines.reference' in sys.orig_argv:\n"
            "    sys.exit('[reference] error: refused ' + os.environ['HF_TOKEN'])\n"
        )
    more = ["--set", "engine.extra_args=--api-key,planted-argument"]
    more += ["--set", "engine.env.WANDB_API_KEY={value='planted-table', why='w'}"]
    more += ["--set", "engine.command_prefix=env,AUTH_TOKEN=planted-prefix"]
    failed = harness(place, "run", "--out", str(place / "out"), *sets, *more)
    assert failed.returncode == 3
    assert f"refused {HIDDEN}" in failed.stderr
    assert PLANTED not in failed.stdout + failed.stderr
    assert shows(place / "out") == []
