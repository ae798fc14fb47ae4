"""Text to tokens and back: the checkpoint's tokenizer, its chat template, incremental decoding."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from engines.base import EngineUsageError
from engines.checkpoint import read_json

REPLACEMENT = "\ufffd"  # what a decoder shows for bytes that are no complete character


class TemplateError(ValueError):
    """The chat template is missing, broken or refuses the messages; one line."""


class Tokenizer:
    """A checkpoint's tokenizer: `tokenizer.json` where there is one, else through transformers.

    transformers takes seconds to import, so it is asked only for tokenizers that need its code.
    """

    def __init__(self, folder: Path, *, trust_remote_code: bool = False) -> None:
        self.folder = folder
        self._fast: Any = None
        self._slow: Any = None
        path = folder / "tokenizer.json"
        try:
            if path.exists():
                from tokenizers import Tokenizer as FastTokenizer

                self._fast = FastTokenizer.from_file(str(path))
            else:
                from transformers import AutoTokenizer

                self._slow = AutoTokenizer.from_pretrained(
                    str(folder), local_files_only=True, trust_remote_code=trust_remote_code
                )
        except Exception as error:  # the libraries raise bare Exceptions
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise EngineUsageError(
                f"{folder}: no usable tokenizer: {reason}; fetch the tokenizer's files again"
            ) from error

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids of `text`; `special` adds what the tokenizer puts around a text (as bos)."""
        if self._fast is not None:
            return list(self._fast.encode(text, add_special_tokens=special).ids)
        return list(self._slow.encode(text, add_special_tokens=special))

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; incomplete characters show as U+FFFD."""
        if self._fast is not None:
            return str(self._fast.decode(list(ids), skip_special_tokens=skip_special))
        return str(self._slow.decode(list(ids), skip_special_tokens=skip_special))

    @cached_property
    def longest_token(self) -> int:
        """The length of the longest token, in characters of its written form."""
        tokenizer = self._fast if self._fast is not None else self._slow
        return max(map(len, tokenizer.get_vocab()), default=1)

    def render(self, messages: list[dict[str, Any]], /, **variables: Any) -> str:
        """The chat template's text for `messages`. Raises TemplateError."""
        import jinja2

        names = {"add_generation_prompt": True, **self._special_tokens, **variables}
        try:
            return str(self._template.render(messages=messages, **names))
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise TemplateError(f"the chat template refuses the messages: {error}") from error

    @cached_property
    def _settings(self) -> dict[str, Any]:
        path = self.folder / "tokenizer_config.json"
        return read_json(path) if path.exists() else {}

    @cached_property
    def _special_tokens(self) -> dict[str, str]:
        found = {}
        for name, value in self._settings.items():
            if name.endswith("_token") and isinstance(value, str | dict):
                found[name] = value if isinstance(value, str) else str(value.get("content", ""))
        return found

    @cached_property
    def _template(self) -> Any:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> NoReturn:
            raise jinja2.TemplateError(message)

        def to_json(value: Any, indent: int | None = None) -> str:
            return json.dumps(value, ensure_ascii=False, indent=indent)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return environment.from_string(self._template_text())

    def _template_text(self) -> str:
        path = self.folder / "chat_template.jinja"
        if path.exists():
            return path.read_text(encoding="utf-8")
        template = self._settings.get("chat_template")
        if isinstance(template, list):  # several, by name
            named = {item.get("name"): item.get("template") for item in template}
            template = named.get("default")
        if not isinstance(template, str):
            raise TemplateError(f"{self.folder} has no chat template; use /v1/completions")
        return template


class Detokenizer:
    """Turns a growing list of tokens into text piece by piece.

    A piece never ends inside a character: bytes of an incomplete one wait for the rest. Decoding
    starts a few tokens back, as some tokenizers decode a token differently at the start.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special
        self._ids: list[int] = []
        self._start = 0  # decoding begins here
        self._done = 0  # tokens whose text was given out

    def push(self, ids: Sequence[int]) -> str:
        """Add tokens; the text that became complete."""
        self._ids.extend(ids)
        return self._advance(final=False)

    def finish(self) -> str:
        """The rest, with U+FFFD for what never became a character."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        if self._done == len(self._ids):
            return ""
        known = self._tokenizer.decode(self._ids[self._start : self._done], skip_special=self._skip)
        text = self._tokenizer.decode(self._ids[self._start :], skip_special=self._skip)
        if not final and (text.endswith(REPLACEMENT) or len(text) < len(known)):
            return ""
        self._start, self._done = self._done, len(self._ids)
        return text[len(known) :]
