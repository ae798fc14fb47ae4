"""Whether a server still answers: a death is told the same whoever sees it first."""

from __future__ import annotations

import itertools
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from engines import process as process_module
from engines.base import EngineFailed
from engines.process import EngineProcess
from harness.alive import Attached, Launched
from harness.plan.schema import ClientSection


def dying(monkeypatch: pytest.MonkeyPatch, looks: int, port: int = 1) -> EngineProcess:
    """An engine that is known to be dead from so many looks on; no process behind it."""
    engine = EngineProcess.__new__(EngineProcess)
    seen = itertools.count()
    monkeypatch.setattr(engine, "alive", lambda: next(seen) < looks)
    monkeypatch.setattr(engine, "failure", lambda: EngineFailed("exited with code 9"))
    engine._death, engine.log_path = None, None  # type: ignore[assignment]
    engine.spec = SimpleNamespace(host="127.0.0.1", reach=None, port=port)  # type: ignore[assignment]
    monkeypatch.setattr(process_module.time, "sleep", lambda seconds: None)
    return engine


@pytest.mark.parametrize("looks", [0, 1, 7])
def test_a_death_is_waited_for_after_requests_failed(
    looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Launched(dying(monkeypatch, looks))
    assert (host.gone() is None) == (looks > 0)
    assert host.lost() == "exited with code 9"
    assert str(host.failed("no prompt was answered")) == "exited with code 9"
    assert host.failed("one") is host.failed("other")  # its log is read once


def test_an_engine_that_lives_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Launched(dying(monkeypatch, 10**9))
    clock = itertools.count()
    monkeypatch.setattr(process_module.time, "monotonic", lambda: float(next(clock)))
    assert host.lost() is None
    assert "no prompt was answered; log: " in str(host.failed("no prompt was answered"))


@pytest.mark.parametrize("listens", [True, False])
def test_a_death_that_is_told_late_is_waited_for_where_the_port_is_closed(
    listens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        if not listens:
            listening.close()
        host = Launched(dying(monkeypatch, 10, port))
        clock = itertools.count()
        monkeypatch.setattr(process_module.time, "monotonic", lambda: float(next(clock)))
        assert host.lost() == (None if listens else "exited with code 9")


def test_a_server_elsewhere_is_lost_once_its_port_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        host = Attached(f"http://127.0.0.1:{listening.getsockname()[1]}", ClientSection())
        assert host.lost() is None and host.gone() is None
    lost: Any = host.lost()
    assert "does not answer any more" in lost and host.gone() is None
    assert str(host.failed(lost)).startswith(host.url)


def test_a_death_that_nobody_saw_is_raised_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    Launched(dying(monkeypatch, 10**9)).check()
    with pytest.raises(EngineFailed, match="exited with code 9"):
        Launched(dying(monkeypatch, 0)).check()
