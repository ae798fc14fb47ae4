"""Tells the outcome to a web address. Nothing that goes wrong here may cost the night.

The address and the secret come from the environment, and stand in no message: the address of a
chat's webhook is a secret itself.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from harness.nightly.suite import Webhook

SIGNATURE = "X-Signature-256"
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 30.0
FINAL = frozenset(range(300, 500)) - {408, 425, 429}
"""Answers that another try cannot change."""


def send(
    hook: Webhook,
    findings: Mapping[str, Any],
    text: str,
    *,
    environment: Mapping[str, str] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Post the outcome and say in one line what came of it. Never raises.

    `findings` is the generic form's body, `text` Slack's.
    """
    known = os.environ if environment is None else environment
    url = known.get(hook.url_env, "")
    if not url:
        return f"webhook: not sent, ${hook.url_env} is not set"
    body = msgspec.json.encode({"text": text} if hook.format == "slack" else dict(findings))
    headers = {"Content-Type": "application/json", "User-Agent": "spec-harness"}
    if hook.secret_env is not None:
        secret = known.get(hook.secret_env, "")
        if not secret:
            return f"webhook: not sent, ${hook.secret_env} is not set"
        headers[SIGNATURE] = sign(secret, body)
    said = "nothing was tried"
    for attempt in range(hook.retries + 1):
        if attempt:
            sleep(min(FIRST_WAIT_S * 2 ** (attempt - 1), LONGEST_WAIT_S))
        sent, again, said = _post(url, body, headers, hook.timeout_s)
        if sent:
            return "webhook: sent"
        if not again:
            break
    tries = "once" if attempt == 0 else f"{attempt + 1} times"
    return f"webhook: not sent, tried {tries}: {said}"


def sign(secret: str, body: bytes) -> str:
    """The body's signature: `sha256=` and the HMAC in hexadecimal, as GitHub signs its own."""
    return "sha256=" + hmac.new(os.fsencode(secret), body, hashlib.sha256).hexdigest()


def _post(url: str, body: bytes, headers: dict[str, str], limit_s: float) -> tuple[bool, bool, str]:
    """Whether it was taken, whether another try may help, and what was answered."""
    import httpx

    try:
        # Streamed: the code is all that is wanted, and a body may never end.
        with httpx.stream("POST", url, content=body, headers=headers, timeout=limit_s) as answer:
            code = answer.status_code
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        name = type(error).__name__  # its text may hold the address
        if isinstance(error, httpx.TransportError) and not isinstance(
            error, httpx.UnsupportedProtocol
        ):
            return False, True, name
        return False, False, f"{name}: is it a whole address, https://…?"
    except (OSError, ImportError) as error:  # certificates or a proxy that are not there
        return False, False, f"{type(error).__name__}: look at the variables of proxy and TLS"
    if 200 <= code < 300:
        return True, False, ""
    return False, code not in FINAL, f"HTTP {code}"
