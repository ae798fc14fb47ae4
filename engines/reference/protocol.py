"""Read OpenAI-style request bodies. Whatever cannot be honoured is refused, never ignored."""

from __future__ import annotations

from typing import Any

import msgspec

from engines.reference.engine import Engine
from engines.reference.sampling import SamplingParams
from engines.reference.tokenizer import TemplateError, Tokenizer

# Fields that may be sent as long as they ask for nothing; any value where None is listed.
NEUTRAL: dict[str, tuple[Any, ...] | None] = {
    "user": None,
    "request_id": None,
    "metadata": None,
    "store": None,
    "service_tier": None,
    "priority": None,
    "n": (1, None),
    "best_of": (1, None),
    "echo": (False, None),
    "suffix": (None, ""),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "repetition_penalty": (1, None),
    "logit_bias": (None, {}),
    "use_beam_search": (False, None),
    "response_format": (None, {"type": "text"}),
    "tools": (None, []),
    "tool_choice": (None, "none"),
    "spaces_between_special_tokens": (True, None),
}
# fmt: off
SHARED = frozenset({
    "model", "stream", "stream_options", "max_tokens", "temperature", "top_p", "top_k", "min_p",
    "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "logprobs", "prompt_logprobs",
    "skip_special_tokens", "include_stop_str_in_output", "return_token_ids",
    "return_tokens_as_token_ids", "add_special_tokens",
})
# fmt: on
COMPLETION_FIELDS = SHARED | {"prompt"}
CHAT_FIELDS = SHARED | {
    "messages",
    "max_completion_tokens",
    "top_logprobs",
    "add_generation_prompt",
    "chat_template_kwargs",
    "continue_final_message",
}


class RequestError(ValueError):
    """A request that cannot be served: message, the field at fault, the HTTP status."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.status = param, status


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A request as the engine and the formatting of its answer need it."""

    prompt: list[int]
    params: SamplingParams
    model: str
    chat: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    tokens_as_ids: bool


class Body:
    """Typed access to the fields of a JSON body; a wrong type names the field."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def number(self, name: str, default: float, *, low: float, high: float) -> float:
        """A number within low..high."""
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RequestError(f"{name} must be a number, not {value!r}", param=name)
        if not low <= value <= high:
            raise RequestError(f"{name} must be within {low} and {high}, not {value}", param=name)
        return float(value)

    def integer(self, name: str, *, low: int, high: int = 2**63) -> int | None:
        """A whole number of at least `low`, or None."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise RequestError(f"{name} must be a whole number, not {value!r}", param=name)
        if not low <= value <= high:
            raise RequestError(f"{name} must be within {low} and {high}, not {value}", param=name)
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise RequestError(f"{name} must be true or false, not {value!r}", param=name)
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        """A string or a list of strings, none of them empty."""
        value = self.values.get(name)
        found = [value] if isinstance(value, str) else (value or [])
        if not isinstance(found, list) or not all(isinstance(s, str) and s for s in found):
            raise RequestError(f"{name} must be a non-empty string or a list of them", param=name)
        return tuple(found)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """A list of token ids."""
        value = self.values.get(name) or []
        if not isinstance(value, list) or not all(type(i) is int for i in value):
            raise RequestError(f"{name} must be a list of token ids", param=name)
        return tuple(value)


def read_job(values: Any, engine: Engine, name: str, *, chat: bool) -> Job:
    """A body of /v1/chat/completions (`chat`) or /v1/completions as a Job. Raises RequestError."""
    if not isinstance(values, dict):
        raise RequestError("the body must be a JSON object")
    _check_fields(values, CHAT_FIELDS if chat else COMPLETION_FIELDS)
    model = values.get("model")
    if model not in (None, name):
        raise RequestError(f"The model `{model}` does not exist.", param="model", status=404)
    assert engine.tokenizer is not None
    body = Body(values)
    # A text beyond any doubt too long is refused without the seconds that its tokens would take.
    most = 4 * engine.tokenizer.longest_token * engine.max_len
    if chat:
        prompt = _chat_prompt(body, engine.tokenizer, most)
    else:
        prompt = _text_prompt(body, engine.tokenizer, engine.model.config.vocab_size, most)
    if prompt is None or not engine.fits(len(prompt)):
        size = "more" if prompt is None else f"{len(prompt)} tokens"
        raise RequestError(
            f"This model's maximum context length is {engine.max_len} tokens. The prompt has "
            f"{size}; it must have at least 1 and leave room for 1 more.",
            param="messages" if chat else "prompt",
        )
    stream = body.flag("stream")
    params = _sampling(body, chat=chat, room=engine.max_len - len(prompt))
    if stream and params.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    usage, continuous = _stream_options(values.get("stream_options"), stream)
    return Job(
        prompt=prompt,
        params=params,
        model=name,
        chat=chat,
        stream=stream,
        include_usage=usage,
        continuous_usage=continuous,
        return_token_ids=body.flag("return_token_ids"),
        tokens_as_ids=body.flag("return_tokens_as_token_ids"),
    )


def _check_fields(values: dict[str, Any], known: frozenset[str]) -> None:
    for field, value in values.items():
        if field in known:
            continue
        if field not in NEUTRAL:
            raise RequestError(f"the reference engine does not know the field {field}", param=field)
        allowed = NEUTRAL[field]
        if allowed is not None and value not in allowed:
            raise RequestError(
                f"the reference engine does not support {field}={value!r}; leave it out",
                param=field,
            )


def _sampling(body: Body, *, chat: bool, room: int) -> SamplingParams:
    longest = body.integer("max_tokens", low=1)
    if chat:
        longest = body.integer("max_completion_tokens", low=1) or longest or room
    top_k = body.integer("top_k", low=-1) or 0
    return SamplingParams(
        max_tokens=min(longest or 16, room),
        temperature=body.number("temperature", 1.0, low=0, high=100),
        top_p=body.number("top_p", 1.0, low=1e-9, high=1),
        top_k=max(top_k, 0),
        min_p=body.number("min_p", 0.0, low=0, high=1),
        seed=body.integer("seed", low=-(2**63)),
        stop=body.strings("stop"),
        stop_token_ids=body.token_ids("stop_token_ids"),
        ignore_eos=body.flag("ignore_eos"),
        min_tokens=body.integer("min_tokens", low=0) or 0,
        logprobs=_chat_logprobs(body) if chat else body.integer("logprobs", low=0, high=100),
        prompt_logprobs=body.integer("prompt_logprobs", low=0, high=100),
        skip_special_tokens=body.flag("skip_special_tokens", True),
        include_stop=body.flag("include_stop_str_in_output"),
    )


def _chat_logprobs(body: Body) -> int | None:
    if not body.flag("logprobs"):
        if body.values.get("top_logprobs"):
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        return None
    return body.integer("top_logprobs", low=0, high=100) or 0


def _stream_options(options: Any, stream: bool) -> tuple[bool, bool]:
    if options is None:
        return False, False
    if not stream:
        raise RequestError("stream_options needs stream: true", param="stream_options")
    if not isinstance(options, dict):
        raise RequestError("stream_options must be an object", param="stream_options")
    unknown = set(options) - {"include_usage", "continuous_usage_stats"}
    if unknown:
        raise RequestError(f"stream_options has no {unknown.pop()}", param="stream_options")
    body = Body(options)
    usage = body.flag("include_usage")
    return usage, usage and body.flag("continuous_usage_stats")


def _text_prompt(body: Body, tokenizer: Tokenizer, vocab_size: int, most: int) -> list[int] | None:
    """The prompt's tokens; None for a text of more than `most` characters."""
    prompt = body.values.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise RequestError("one prompt a request; send several requests", param="prompt")
        prompt = prompt[0]
    if isinstance(prompt, str):
        if len(prompt) > most:
            return None
        return tokenizer.encode(prompt, special=body.flag("add_special_tokens", True))
    if isinstance(prompt, list) and all(type(i) is int for i in prompt):
        strange = [i for i in prompt if not 0 <= i < vocab_size]
        if strange:
            raise RequestError(f"token id {strange[0]} is outside the vocabulary", param="prompt")
        return prompt
    raise RequestError("prompt must be a string or a list of token ids", param="prompt")


def _chat_prompt(body: Body, tokenizer: Tokenizer, most: int) -> list[int] | None:
    """The rendered messages' tokens; None for a text of more than `most` characters."""
    messages = body.values.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a non-empty list", param="messages")
    plain = [_plain_message(message) for message in messages]
    extra = body.values.get("chat_template_kwargs") or {}
    if not isinstance(extra, dict):
        raise RequestError("chat_template_kwargs must be an object", param="chat_template_kwargs")
    if body.flag("continue_final_message"):
        raise RequestError(
            "continue_final_message is not supported", param="continue_final_message"
        )
    generate = body.flag("add_generation_prompt", True)
    try:
        text = tokenizer.render(plain, **{"add_generation_prompt": generate, **extra})
    except TemplateError as error:
        raise RequestError(str(error), param="messages") from error
    if len(text) > most:
        return None
    return tokenizer.encode(text, special=body.flag("add_special_tokens", False))


def _plain_message(message: Any) -> dict[str, Any]:
    """A message with its content as one string, as text-only templates expect it."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError("every message needs a role", param="messages")
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) != len(parts):
            raise RequestError("only text parts are supported in a message", param="messages")
        content = "\n".join(texts)
    if content is not None and not isinstance(content, str):
        raise RequestError("a message's content must be text", param="messages")
    return {**message, "content": content}
