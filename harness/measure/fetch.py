"""A GET whose cost is bounded, whatever the server does: in bytes and in seconds as a whole."""

from __future__ import annotations

import time

import httpx

MAX_BYTES = 16_000_000


class FetchError(Exception):
    """No whole answer came; the message says why, on one line."""


def fetch(client: httpx.Client, url: str, *, deadline_s: float) -> tuple[int, bytes]:
    """The status and the body of `url`. Raises `FetchError`.

    httpx's own timeouts are for each read alone: a server that drips would never time out.
    """
    end = time.monotonic() + deadline_s
    body = bytearray()
    try:
        with client.stream("GET", url, timeout=deadline_s) as answer:
            for piece in answer.iter_bytes():
                body += piece
                if len(body) > MAX_BYTES:
                    raise FetchError(f"its answer is longer than {MAX_BYTES:,} bytes")
                if time.monotonic() > end:
                    raise FetchError(f"no whole answer within {deadline_s:g} s")
            return answer.status_code, bytes(body)
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, UnicodeError) as error:
        text = str(error) or type(error).__name__
        raise FetchError(text.splitlines()[0]) from None
