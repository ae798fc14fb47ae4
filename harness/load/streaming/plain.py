"""A plain HTTP client for what is not load: the server's models, its counters."""

from __future__ import annotations

import httpx

from harness.load.streaming.origin import Origin
from harness.load.streaming.pool import proxy_for, tls_context
from harness.plan.schema import ClientSection


def plain_client(url: str, client: ClientSection, api_key: str | None) -> httpx.Client:
    """Reaches the server at `url` just as the load does. Raises `UsageError`."""
    origin = Origin.parse(url)
    proxy = proxy_for(origin.scheme, origin.host, client.proxy)
    headers = dict(client.headers)
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    through = None
    if proxy is not None:
        allowed = {"Proxy-Authorization": proxy.authorization} if proxy.authorization else {}
        through = httpx.Proxy(f"http://{proxy.host}:{proxy.port}", headers=allowed)
    secure = origin.scheme == "https"
    return httpx.Client(
        trust_env=False,
        headers=headers,
        proxy=through,
        verify=tls_context(client.verify_tls, client.ca_file) if secure else False,
    )
