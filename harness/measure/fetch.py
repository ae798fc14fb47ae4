"""A request whose cost is bounded, whatever the server does: in bytes and in seconds altogether."""

from __future__ import annotations

import re
import time
from typing import Any

import httpx

MAX_BYTES = 16_000_000
_NUMBER = re.compile(r"^\[Errno -?\d+\] ")


class FetchError(Exception):
    """No whole answer came; the message says why, on one line."""


def fetch(
    client: httpx.Client, url: str, *, deadline_s: float, json: Any = None
) -> tuple[int, bytes]:
    """The status and the body of `url`, to which `json` is posted if it is given.

    Raises `FetchError`. httpx's own timeouts are for each read alone: a server that drips would
    never time out.
    """
    end = time.monotonic() + deadline_s
    body = bytearray()
    method = "GET" if json is None else "POST"
    try:
        with client.stream(method, url, json=json, timeout=deadline_s) as answer:
            for piece in answer.iter_bytes():
                body += piece
                if len(body) > MAX_BYTES:
                    raise FetchError(f"its answer is longer than {MAX_BYTES:,} bytes")
                if time.monotonic() > end:
                    raise FetchError(f"no whole answer within {deadline_s:g} s")
            return answer.status_code, bytes(body)
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, UnicodeError) as error:
        text = str(error) or type(error).__name__
        raise FetchError(_NUMBER.sub("", text.splitlines()[0])) from None
