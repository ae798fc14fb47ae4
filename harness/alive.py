"""Whether a server still answers, and what it died of: one started here, or one elsewhere.

A client sees that its requests fail; what of, only the server's process or its port can tell.
"""

from __future__ import annotations

import socket
from pathlib import Path

from engines.base import EngineFailed
from engines.process import DEATH_SEEN_S, EngineProcess
from harness.load.streaming.connection import describe
from harness.load.streaming.origin import Origin
from harness.load.streaming.pool import proxy_for
from harness.plan.schema import ClientSection


class Launched:
    """An engine of our own, whose process is watched."""

    def __init__(self, process: EngineProcess) -> None:
        self._process = process
        self.url = self.urls = process.base_url
        self.log_path: Path | None = process.log_path

    def gone(self) -> str | None:
        """What the engine died of, None while it lives."""
        return _told(self._process.death())

    def lost(self) -> str | None:
        """The same, asked once after requests failed: their engine may be about to die."""
        return _told(self._process.death(DEATH_SEEN_S))

    def check(self) -> None:
        """Raise what it died of, where nobody saw it die."""
        death = self._process.death()
        if death is not None:
            raise death

    def failed(self, reason: str) -> EngineFailed:
        """The error to end with: what it died of, else `reason`."""
        return self._process.death() or EngineFailed(
            f"{reason}; log: {self.log_path}", phase="serving", log_path=self.log_path
        )


class Attached:
    """A server that someone else runs, or replicas of one: no process to watch and no log."""

    log_path: Path | None = None

    def __init__(self, urls: str, client: ClientSection) -> None:
        self._origins = Origin.several(urls)
        self.url = self._origins[0].root
        self.urls = ",".join(origin.root for origin in self._origins)
        self._client = client

    def gone(self) -> str | None:
        """Never: nothing is seen of it between requests."""
        return None

    def lost(self) -> str | None:
        """Why it does not answer any more, asked once after requests failed."""
        for origin in self._origins:
            if proxy_for(origin.scheme, origin.host, self._client.proxy) is not None:
                continue  # the proxy answers whether the server does or not
            try:
                socket.create_connection((origin.host, origin.port), timeout=5.0).close()
            except OSError as error:
                which = "" if len(self._origins) == 1 else f" at {origin.root}"
                return f"the server{which} does not answer any more: {describe(error)}"
        return None

    def failed(self, reason: str) -> EngineFailed:
        """The error to end with."""
        return EngineFailed(f"{self.urls}: {reason}", phase="serving")


def _told(death: EngineFailed | None) -> str | None:
    return None if death is None else str(death)
