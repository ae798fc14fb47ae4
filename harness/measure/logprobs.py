"""What a server says of tokens' log-probabilities: in the way that all engines share, if it can."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec

from harness.measure.fetch import FetchError, fetch
from harness.records import ParityAnswer

TIMEOUT_S = 60.0
TOP = 5
"""Alternatives told with each token of a fixed prompt's answer."""
TOP_AT_A_TIE = 10
AS_ID = "token_id:"
SHAPE_ERRORS = (AttributeError, LookupError, TypeError, ValueError)


class NoLogprobs(Exception):
    """The server does not tell; the message says why, on one line."""


class NoAnswer(NoLogprobs):
    """It does not even answer."""


class LogprobReader:
    """Asks one server. Every method raises `NoLogprobs` where there is no answer of use."""

    def __init__(self, http: httpx.Client, url: str, model: str) -> None:
        self._http = http
        self._url = url
        self._model = model

    def greedy(self, name: str, prompt: str, tokens: int) -> ParityAnswer:
        """The greedy continuation of a text with its log-probabilities."""
        choice = self._completion(prompt, tokens, logprobs=TOP)["choices"][0]
        try:
            told = choice["logprobs"]
            answer = ParityAnswer(
                prompt=name,
                tokens=tuple(str(t) for t in told["tokens"]),
                logprobs=tuple(float(p) for p in told["token_logprobs"]),
                top=tuple(_best(top) for top in told["top_logprobs"]),
            )
        except SHAPE_ERRORS:
            raise NoLogprobs("its answer holds no log-probabilities") from None
        if not answer.tokens or len(answer.tokens) != len(answer.logprobs):
            raise NoLogprobs("its answer holds no log-probabilities")
        if not all(math.isfinite(p) for p in answer.logprobs):
            raise NoLogprobs("its log-probabilities are no finite numbers")
        return answer

    def prompt_ids(self, path: str, body: dict[str, Any]) -> list[int]:
        """The tokens the server makes of a request to `path`."""
        told = self._post(path, {**body, "max_tokens": 1, "return_token_ids": True})
        ids = told.get("prompt_token_ids")
        if ids is None:
            ids = _first_choice(told).get("prompt_token_ids")
        if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
            raise NoLogprobs("it does not tell the prompt's tokens")
        return ids

    def next_token(self, prefix: Sequence[int]) -> dict[int, float]:
        """The likeliest tokens after a prefix of token ids, with their log-probabilities."""
        try:
            body = self._completion(list(prefix), 1, logprobs=TOP_AT_A_TIE)
            best = _best(_first_choice(body)["logprobs"]["top_logprobs"][0])
            if best and all(name.startswith(AS_ID) for name in best):
                return {int(name.removeprefix(AS_ID)): p for name, p in best.items()}
        except (NoLogprobs, *SHAPE_ERRORS):
            pass
        return self._native(prefix)

    def scored(self, ids: Sequence[int]) -> list[float | None]:
        """The log-probability of each token of a text, given those before it; None of the first."""
        try:
            body = self._completion(list(ids), 1, logprobs=1, prompt_logprobs=0)
            entries = _first_choice(body)["prompt_logprobs"]
            found = [None if e is None else _own(e, i) for e, i in zip(entries, ids, strict=True)]
        except (NoLogprobs, *SHAPE_ERRORS):
            told = self._generate(ids, 1, logprob_start_len=0)
            try:
                entries = told["meta_info"]["input_token_logprobs"]
                found = [None if e[0] is None else float(e[0]) for e in entries]
            except SHAPE_ERRORS:
                raise NoLogprobs("it does not score a prompt's tokens") from None
        if len(found) != len(ids) or not all(p is None or math.isfinite(p) for p in found):
            raise NoLogprobs("it does not score every token of a prompt")
        return found

    def continued(self, prefix: Sequence[int], tokens: int) -> tuple[list[int], list[float]]:
        """The greedy continuation of token ids: its ids and their log-probabilities."""
        try:
            told = _first_choice(self._completion(list(prefix), tokens, logprobs=1))["logprobs"]
            names = [str(name) for name in told["tokens"]]
            if names and all(name.startswith(AS_ID) for name in names):
                ids = [int(name.removeprefix(AS_ID)) for name in names]
                return ids, [float(p) for p in told["token_logprobs"]]
        except (NoLogprobs, *SHAPE_ERRORS):
            pass
        body = self._generate(prefix, tokens)
        try:
            entries = body["meta_info"]["output_token_logprobs"]
            return [int(e[1]) for e in entries], [float(e[0]) for e in entries]
        except SHAPE_ERRORS:
            raise NoLogprobs("it names no token ids with its log-probabilities") from None

    def _native(self, prefix: Sequence[int]) -> dict[int, float]:
        """SGLang's own endpoint, which names tokens by their ids."""
        told = self._generate(prefix, 1, top_logprobs_num=TOP_AT_A_TIE)
        try:
            first = told["meta_info"]["output_top_logprobs"][0]
            return {int(entry[1]): float(entry[0]) for entry in first}
        except SHAPE_ERRORS:
            raise NoLogprobs("it names no token ids with its log-probabilities") from None

    def _generate(self, ids: Sequence[int], tokens: int, **more: int) -> dict[str, Any]:
        """An answer of SGLang's own endpoint, with log-probabilities."""
        sampling = {"max_new_tokens": tokens, "temperature": 0}
        asked = {"input_ids": list(ids), "sampling_params": sampling, "return_logprob": True}
        return self._post("/generate", {**asked, **more})

    def _completion(
        self, prompt: str | list[int], tokens: int, *, logprobs: int, **more: int
    ) -> dict[str, Any]:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "logprobs": logprobs,
            **more,
        }
        if not isinstance(prompt, str):
            body["return_tokens_as_token_ids"] = True
        told = self._post("/v1/completions", body)
        _first_choice(told)
        return told

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            status, data = fetch(self._http, self._url + path, deadline_s=TIMEOUT_S, json=body)
            if status != 200:
                raise NoLogprobs(f"{path} answers {status}")
            told = msgspec.json.decode(data)
        except FetchError as error:
            raise NoAnswer(f"{path}: {error}") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise NoLogprobs(f"{path} answers no JSON") from None
        if not isinstance(told, dict):
            raise NoLogprobs(f"{path} answers no JSON object")
        return told


def _first_choice(body: dict[str, Any]) -> dict[str, Any]:
    try:
        choice = body["choices"][0]
    except SHAPE_ERRORS:
        choice = None
    if not isinstance(choice, dict):
        raise NoLogprobs("its answer holds no choice")
    return choice


def _own(entry: dict[str, Any], token: int) -> float:
    """The prompt's token's own log-probability, among the alternatives told with it."""
    return float(entry[str(token)]["logprob"])


def _best(top: Any) -> dict[str, float]:
    return {str(name): float(p) for name, p in (top or {}).items() if math.isfinite(p)}


def gap_of(best: dict[int, float], tokens: Sequence[int], bound: float) -> float | None:
    """How far the least likely of `tokens` lies below the best one, in nats.

    A token that the server does not list lies below all it lists: that is told where it is further
    than `bound`, and is None where it is not.
    """
    if not best:
        return None
    highest, lowest = max(best.values()), min(best.values())
    gaps = [highest - best[t] for t in tokens if t in best]
    if len(gaps) == len(tokens):
        return max(gaps)
    least = max([highest - lowest, *gaps])
    return least if least > bound else None
