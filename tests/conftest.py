"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

# No test asserts a time: a busy machine takes ten times as long. Every day the same examples are
# tried, so that what fails is the change's doing; the full run draws others each time.
hypothesis.settings.register_profile(
    "anew", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile(
    "every_day", hypothesis.settings.get_profile("anew"), derandomize=True
)
hypothesis.settings.load_profile("every_day")

REPO = Path(__file__).resolve().parents[1]

# A shell's background job ignores Ctrl-C, and so would every process that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # torch's threads beside an engine's


@pytest.fixture(scope="session")
def repo() -> Path:
    """The checkout's root."""
    return REPO


@pytest.fixture(scope="session")
def make_pair() -> Callable[..., Path]:
    """Make (or find) a demo pair: `make_pair(target="mla", drafter="llama")` -> its folder."""

    def make(target: str = "mla", drafter: str = "mla") -> Path:
        command = [sys.executable, "-m", "training", "demo"]
        command += ["--target", target, "--drafter", drafter]
        result = subprocess.run(
            command, cwd=REPO, stdout=subprocess.PIPE, text=True, check=True, timeout=7200
        )
        return Path(result.stdout.strip().splitlines()[-1])

    return make


@pytest.fixture(scope="session")
def demo_pair(make_pair: Callable[..., Path]) -> Path:
    """The default demo pair's folder: `target`, `drafter-mla`, `prompts.jsonl`."""
    return make_pair()


def pytest_configure(config: pytest.Config) -> None:
    """Choose the examples before any test is read."""
    if "full" in (config.getoption("-m") or ""):
        hypothesis.settings.load_profile("anew")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a test draws without a seed of its own depends on it alone, not on those before it."""
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the long tests out unless `-m` asks for them."""
    if "full" in (config.getoption("-m") or ""):
        return
    skip = pytest.mark.skip(reason="long: run `make test-full`")
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker(skip)
