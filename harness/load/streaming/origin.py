"""Where a server is, read from what the user typed."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from harness.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a server is: `prefix` is the path before `/v1` and the like."""

    scheme: str
    host: str
    port: int
    prefix: str

    @classmethod
    def parse(cls, url: str) -> Origin:
        """Read a server's root, with or without `/v1`. Raises `UsageError`."""
        wrong = UsageError(f"--url {url}: not a URL such as http://127.0.0.1:8000")
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            (parts.hostname or "").encode("idna")
        except ValueError:  # UnicodeError too
            raise wrong from None
        try:
            port = parts.port
        except ValueError:
            port = 0
        if port == 0:
            raise UsageError(f"--url {url}: the port is not a number from 1 to 65535")
        host = parts.hostname
        if parts.scheme not in ("http", "https") or not host or not url.isprintable():
            raise wrong
        if " " in host or parts.username is not None or parts.query or parts.fragment:
            raise UsageError(
                f"--url {url}: give the server's root alone, such as http://127.0.0.1:8000"
            )
        return cls(
            scheme=parts.scheme,
            host=host,
            port=port or (443 if parts.scheme == "https" else 80),
            prefix=parts.path.rstrip("/").removesuffix("/v1"),
        )

    @classmethod
    def several(cls, urls: str) -> list[Origin]:
        """Read the roots of one server's replicas, joined by commas. Raises `UsageError`."""
        found = [cls.parse(url.strip()) for url in urls.split(",")]
        if len({origin.root for origin in found}) < len(found):
            raise UsageError(f"--url {urls}: names a replica twice")
        return found

    @property
    def authority(self) -> str:
        """Host and port as a URL and the `Host` header write them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def root(self) -> str:
        """The server's root as a URL without a slash at its end."""
        return f"{self.scheme}://{self.authority}{self.prefix}"
