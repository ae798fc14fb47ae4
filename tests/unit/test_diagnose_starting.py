"""A drafter that is not translated is served as it is; what else is refused stays refused."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engines.base import EngineUsageError, Launch, ServeSpec
from engines.process import free_port
from harness.diagnose.experiments.starting import started


class Picky:
    """Stands for an adapter; what it starts does nothing but sleep."""

    phases: Sequence[Any] = ()
    ready_path = "/health"
    metrics_path = None

    def __init__(self, name: str, *, installed: bool = True) -> None:
        self.name, self.installed = name, installed
        self.asked: list[bool] = []

    def environment(self, spec: ServeSpec) -> str | None:
        return None

    def check(self, spec: ServeSpec) -> None:
        if not self.installed:
            raise EngineUsageError("not installed")

    def launch(self, spec: ServeSpec, workdir: Path) -> Launch:
        self.asked.append(spec.as_given)
        if not spec.as_given:
            raise EngineUsageError("it names no layers")
        return Launch(argv=(sys.executable, "-c", "import time; time.sleep(60)"), env={})


def spec_in(folder: Path) -> ServeSpec:
    return ServeSpec(target=folder, served_name="target", port=free_port(), drafter=folder, k=3)


def test_what_cannot_be_translated_is_served_as_it_is(tmp_path: Path) -> None:
    adapter, said = Picky("vllm"), list[str]()
    with started(adapter, spec_in(tmp_path), tmp_path, 60, said.append) as process:  # type: ignore[arg-type]
        assert process.alive() and process.spec.as_given
    assert adapter.asked == [False, True]
    assert said[0] == "the drafter is served as it is: it names no layers"


@pytest.mark.parametrize(
    ("adapter", "why"),
    [(Picky("reference"), "no layers"), (Picky("vllm", installed=False), "not installed")],
)
def test_whatever_else_is_refused_stays_refused(adapter: Picky, why: str, tmp_path: Path) -> None:
    told = pytest.raises(EngineUsageError, match=why)
    with told, started(adapter, spec_in(tmp_path), tmp_path, 60, lambda _: None):  # type: ignore[arg-type]
        pass
