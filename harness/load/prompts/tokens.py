"""The target's tokenizer, from its folder: lengths, token ids, chat template. Never a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.errors import UsageError, one_line


class TargetTokenizer:
    """The tokenizer in a checkpoint's folder; special tokens are never added to a text.

    Read when it is first used. Its `tokenizer.json` is read by `tokenizers`; a folder without one,
    and the chat template, need transformers, which imports slowly.
    """

    def __init__(self, folder: Path | None, *, trust_remote_code: bool = False) -> None:
        self._folder = folder
        self._trust = trust_remote_code
        self._read_fast: Any = None
        self._read_whole: Any = None

    def encode(self, text: str) -> list[int]:
        """The text's token ids."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text."""
        fast = self._fast()
        if fast is not None:
            return [e.ids for e in fast.encode_batch(list(texts), add_special_tokens=False)]
        whole = self._whole()
        return [list(whole.encode(text, add_special_tokens=False)) for text in texts]

    def count(self, text: str) -> int:
        """The text's length in tokens."""
        return len(self.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        fast = self._fast()
        if fast is not None:
            return str(fast.decode(list(ids), skip_special_tokens=False))
        return str(self._whole().decode(list(ids), skip_special_tokens=False))

    def plain_ids(self) -> list[int]:
        """Every token id that stands for text, no special or added token, in order."""
        fast = self._fast()
        if fast is not None:
            ids = set(fast.get_vocab(with_added_tokens=False).values())
            added = set(fast.get_added_tokens_decoder())
        else:
            whole = self._whole()
            ids = set(whole.get_vocab().values())
            added = set(whole.all_special_ids) | set(getattr(whole, "added_tokens_decoder", {}))
        return sorted(ids - added)

    def chat_ids(
        self, messages: Sequence[dict[str, Any]], template_kwargs: Mapping[str, Any]
    ) -> list[int]:
        """The token ids of a chat, the template applied up to where the answer begins.

        Raises `UsageError` where there is no template, or it does not take these messages.
        """
        whole = self._whole()
        if not getattr(whole, "chat_template", None):
            raise UsageError(
                f"{self._folder}: the tokenizer has no chat template; "
                "use workload.chat_template=server"
            )
        try:
            text = whole.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **template_kwargs
            )
        except Exception as error:  # a template is a program of its own: it raises anything
            raise UsageError(
                f"{self._folder}: the chat template does not take these messages: "
                f"{one_line(str(error))}"
            ) from None
        return self.encode(str(text))

    def _where(self) -> Path:
        if self._folder is None:
            raise UsageError(
                "workload: prompts are to be counted in the target's tokens, and its tokenizer is "
                "not at hand; give the folder that holds it with --set target.path=DIR"
            )
        return self._folder

    def _fast(self) -> Any:
        file = self._where() / "tokenizer.json"
        if self._read_fast is None and file.is_file():
            from tokenizers import Tokenizer

            try:
                fast = Tokenizer.from_file(str(file))
            except Exception as error:  # the library raises Exception itself
                raise UsageError(f"{file}: not a tokenizer: {one_line(str(error))}") from None
            fast.no_truncation()
            fast.no_padding()
            self._read_fast = fast
        return self._read_fast

    def _whole(self) -> Any:
        if self._read_whole is None:
            folder = self._where()
            if not folder.is_dir():
                raise UsageError(f"{folder}: no such folder; a tokenizer is wanted there")
            from transformers import AutoTokenizer

            try:
                self._read_whole = AutoTokenizer.from_pretrained(
                    str(folder), local_files_only=True, trust_remote_code=self._trust
                )
            except Exception as error:  # code of the checkpoint's own may run here
                hint = "" if self._trust else "; does it need engine.trust_remote_code=true?"
                raise UsageError(
                    f"{folder}: holds no tokenizer that can be read: {one_line(str(error))}{hint}"
                ) from None
        return self._read_whole
