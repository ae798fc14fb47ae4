"""The target's text: tokenizer, chat template, end and think tokens; answers parted and rebuilt.

Thinking may reach a client as a field of its own or between think tokens, and the tokens of an
answer as ids or as text alone. Whichever it is, one answer gives the same parts here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from engines.base import EngineUsageError
from engines.checkpoint import read_json
from engines.reference.tokenizer import REPLACEMENT, TemplateError, Tokenizer
from harness.errors import UsageError

THINK = "<think>"
THINK_END = "</think>"
OPENED_WITHIN = 8
"""A think token among so many of a prompt's last tokens means that the answer begins in thought."""
PROBE = "thought or said"
"""Put into the template in place of thinking and answer, to see whether it keeps both."""
Messages = Sequence[Mapping[str, Any]]


class Parts(NamedTuple):
    """An answer's text with all markup, its thinking (None: there is none) and what it answers."""

    text: str
    reasoning: str | None
    answer: str | None


def end_token_ids(folder: Path) -> tuple[int, ...]:
    """The ids that end an answer, as the target's generation config and config say; sorted.

    Raises `UsageError` where neither names one.
    """
    config = read_json(folder / "config.json")
    inner = config.get("text_config")
    told = [config, inner if isinstance(inner, dict) else {}]
    if (folder / "generation_config.json").is_file():
        told.append(read_json(folder / "generation_config.json"))
    ids: set[int] = set()
    for one in told:
        said = one.get("eos_token_id")
        ids.update(i for i in (said if isinstance(said, list) else [said]) if type(i) is int)
    if not ids:
        raise UsageError(
            f"{folder / 'config.json'}: names no eos_token_id, and so does no "
            "generation_config.json beside it; add the id that ends an answer"
        )
    return tuple(sorted(ids))


def vocab_size(folder: Path) -> int:
    """Rows of the target's embeddings. Raises `UsageError` where its config does not say."""
    config = read_json(folder / "config.json")
    inner = config.get("text_config")
    size = (inner if isinstance(inner, dict) and inner else config).get("vocab_size")
    if type(size) is not int or size < 1:
        raise UsageError(f"{folder / 'config.json'}: vocab_size is {size!r}, not a number")
    return size


class TargetText:
    """Texts and token ids of the target in `folder`. Raises `UsageError`, `EngineUsageError`."""

    def __init__(self, folder: Path, *, trust_remote_code: bool = False) -> None:
        self.folder = folder
        self.tokenizer = Tokenizer(folder, trust_remote_code=trust_remote_code)
        self.end_ids = frozenset(end_token_ids(folder))

    @cached_property
    def think_ids(self) -> tuple[int | None, int | None]:
        """The ids that open and close thinking; None for one that is no single token."""
        found = [self.tokenizer.encode(word, special=False) for word in (THINK, THINK_END)]
        first, last = (ids[0] if len(ids) == 1 else None for ids in found)
        return first, last

    @cached_property
    def _end_texts(self) -> list[str]:
        return [text for i in sorted(self.end_ids) if (text := self.decode([i]))]

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """The text's ids; `special`: with what the tokenizer puts around a text."""
        return self.tokenizer.encode(text, special=special)

    def decode(self, ids: Sequence[int]) -> str:
        """The ids' text, markup included."""
        return self.tokenizer.decode(ids, skip_special=False)

    def render(self, messages: Messages, variables: Mapping[str, Any], *, answer: bool) -> str:
        """The chat as text; `answer`: up to where the answer begins. Raises `UsageError`."""
        told = {**variables, "add_generation_prompt": answer}
        try:
            return self.tokenizer.render([dict(m) for m in messages], **told)
        except TemplateError as error:
            raise UsageError(f"{self.folder}: {error}") from None

    def prompt_ids(self, messages: Messages, variables: Mapping[str, Any]) -> list[int]:
        """The ids of a chat up to where the answer begins. Raises `UsageError`."""
        return self.encode(self.render(messages, variables, answer=True))

    def opened(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the prompt ends within a thought that the answer is to go on with."""
        first, last = self.think_ids
        tail = list(prompt_ids[-OPENED_WITHIN:])
        if first is None:
            return self.decode(tail).rstrip().endswith(THINK)
        behind = tail[::-1]
        return first in behind and last not in behind[: behind.index(first)]

    def parts(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> Parts:
        """The parts of an answer by its ids; a thought that was never closed has no answer."""
        body = list(answer_ids)
        if body and body[-1] in self.end_ids:
            body.pop()
        whole = self.decode(answer_ids)
        said = self.decode(body)
        before, closed, after = said.partition(THINK_END)
        if closed or self.opened(prompt_ids) or said.startswith(THINK):
            reasoning = before.removeprefix(THINK)
            return Parts(whole, reasoning, after if closed else None)
        return Parts(whole, None, said)

    def gives(self, answer_ids: Sequence[int], served: str) -> bool:
        """Whether ids give the text a server sent, whatever markup and spaces it left out."""
        own = self.tokenizer.decode(answer_ids, skip_special=True)
        return self._bare(own) == self._bare(served)

    def _bare(self, text: str) -> str:
        for word in (THINK, THINK_END, REPLACEMENT, *self._end_texts):
            text = text.replace(word, "")
        return re.sub(r"\s+", "", text)

    def rebuilt(
        self,
        prompt: tuple[Sequence[int], Messages | None, Mapping[str, Any]],
        served: tuple[str, str | None],
        finish_reason: str | None,
        count: int | None,
    ) -> list[int]:
        """The answer's ids from the (text, reasoning) a server sent: as near as text comes to them.

        `prompt`: its ids, messages and the template's variables. Of the ways to wrap thinking and
        answer, the first whose tokens are as many as the server counted (`count`) is taken, else
        the chat template's own way, which is the first.
        """
        prompt_ids, messages, variables = prompt
        ways = self._wrapped(prompt_ids, messages, variables, served)
        if finish_reason == "length":
            ways = [self._unended(way) for way in ways]
        tokens = [self.encode(way) for way in dict.fromkeys(ways)]
        return next((ids for ids in tokens if len(ids) == count), tokens[0])

    def _wrapped(
        self,
        prompt_ids: Sequence[int],
        messages: Messages | None,
        variables: Mapping[str, Any],
        served: tuple[str, str | None],
    ) -> list[str]:
        """Every way the answer may have been written, the likeliest first, each with its end."""
        text, reasoning = served
        opened = self.opened(prompt_ids)
        templated = None
        end = self._end_texts[0] if self._end_texts else ""
        if messages is not None:
            templated = self._templated(messages, variables, text, reasoning)
            end = self._ending(messages, variables) or end
        if reasoning is not None:
            thought = ("" if opened else THINK) + reasoning
            plain = [f"{thought}{THINK_END}{text}{end}"]
            if not text:
                plain.insert(0, thought + end)  # cut, or ended, before the thought was closed
        elif opened:
            plain = [f"{THINK_END}{text}{end}", text + end]
        else:
            plain = [text + end]
        if templated is None:
            return plain
        # A thought is wrapped as the template does; without one there is nothing to wrap.
        return [templated, *plain] if reasoning is not None and text else [*plain, templated]

    def _templated(
        self, messages: Messages, variables: Mapping[str, Any], text: str, reasoning: str | None
    ) -> str | None:
        """The answer as the chat template writes it in a history; None where it leaves some out."""
        if reasoning is not None:
            probe = self._tail(messages, variables, PROBE, PROBE)
            if probe is None or probe.count(PROBE) != 2:
                return None
        tail = self._tail(messages, variables, text, reasoning)
        if tail is None or text.strip() not in tail:
            return None
        at = len(tail) if not text.strip() else tail.rindex(text.strip()) + len(text.strip())
        ends = [(tail.index(e, at), e) for e in self._end_texts if e in tail[at:]]
        if not ends:
            return None
        where, word = min(ends)
        return tail[: where + len(word)]

    def _tail(
        self, messages: Messages, variables: Mapping[str, Any], text: str, reasoning: str | None
    ) -> str | None:
        """What the template writes of an answer behind the prompt's text."""
        message = {"role": "assistant", "content": text}
        if reasoning is not None:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        try:
            prompt = self.render(messages, variables, answer=True)
            whole = self.render([*messages, message], variables, answer=False)
        except UsageError:
            return None
        return whole[len(prompt) :] if whole.startswith(prompt) else None

    def _ending(self, messages: Messages, variables: Mapping[str, Any]) -> str | None:
        """The end token that the template writes behind an answer."""
        try:
            whole = self.render(
                [*messages, {"role": "assistant", "content": "x"}], variables, answer=False
            )
        except UsageError:
            return None
        found = [(whole.rfind(text), text) for text in self._end_texts if text in whole]
        return max(found)[1] if found else None

    def _unended(self, text: str) -> str:
        """Without the end token that a cut answer never came to."""
        for end in self._end_texts:
            text = text.removesuffix(end)
        return text


def read_text(folder: Path, *, trust_remote_code: bool = False) -> TargetText:
    """The target's text. Raises `UsageError` where its folder holds no tokenizer or config."""
    try:
        return TargetText(folder, trust_remote_code=trust_remote_code)
    except EngineUsageError as error:
        raise UsageError(str(error)) from None
