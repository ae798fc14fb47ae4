"""A prompt, whatever it was read or made from."""

from __future__ import annotations

from typing import Any

import msgspec


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt: a chat (`messages`), a raw text (`text`) or its `token_ids`; one of the three.

    `answer` is the right answer where there is one. `turns` are what the user says next in a
    conversation, each after the answer to what was said before. `max_tokens` and `sampling`
    (request fields) go before the plan's. `input_tokens`: its length where it is known.
    `position`: its place in a trace, whose prompts are asked in that order.
    """

    id: str
    category: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    answer: str | None = None
    turns: tuple[dict[str, Any], ...] = ()
    max_tokens: int | None = None
    sampling: dict[str, Any] = {}
    input_tokens: int | None = None
    position: int | None = None


def said_texts(prompt: Prompt) -> str:
    """Every text of a prompt's messages, or its raw text; "" for token ids."""
    if prompt.messages is None:
        return prompt.text or ""
    parts: list[str] = []
    for message in prompt.messages:
        content = message.get("content") or ""
        if isinstance(content, str):
            parts.append(content)
        else:
            parts += [p["text"] for p in content if isinstance(p, dict) and "text" in p]
    return "\n".join(str(part) for part in parts)
