"""Write answers in OpenAI's form, with vLLM's names for what OpenAI does not have.

`token_ids`, `prompt_token_ids`, `prompt_logprobs`, `stop_reason` and `metrics` stand where vLLM
0.32 puts them. `metrics.speculative_decoding` is always given when drafts are made.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

from engines.reference.protocol import Job
from engines.reference.request import Delta, Request
from engines.reference.sampling import TokenLogprob
from engines.reference.tokenizer import Tokenizer

Json = dict[str, Any]


def error_body(message: str, *, kind: str, status: int, param: str | None = None) -> Json:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def speculative_metrics(request: Request) -> Json | None:
    """One request's acceptance as vLLM's `--per-request-spec-decode-metrics detailed` tells it.

    Accepted counts hold, as vLLM's do, what was dropped behind the request's end; how many those
    were is told beside them (`num_accepted_past_end_tokens`).
    """
    log = request.drafts
    if log is None:
        return None
    steps, accepted, drafted = len(log.accepted), sum(log.accepted), sum(log.proposed)
    return {
        "mean_acceptance_length": 1 + accepted / steps if steps else None,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_histogram": log.histogram(),
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": log.k,
        "per_step_accepted": log.accepted,
        "per_step_drafted": log.proposed,
        "num_accepted_past_end_tokens": log.past_end,
    }


class Answer:
    """Formats one request's answer, whole or in chunks."""

    def __init__(self, job: Job, request: Request, tokenizer: Tokenizer) -> None:
        self.job, self.request, self.tokenizer = job, request, tokenizer
        kind = ("chatcmpl", "chat.completion") if job.chat else ("cmpl", "text_completion")
        self.id = f"{kind[0]}-{uuid.uuid4().hex}"
        self.object = kind[1] + (".chunk" if job.chat and job.stream else "")
        self.created = int(time.time())
        self._tokens = self._offset = 0
        self._began = False

    def whole(self) -> Json:
        """The answer of a finished request that was not streamed."""
        request, job = self.request, self.job
        choice: Json = {
            "index": 0,
            "logprobs": self._logprobs(request.logprobs),
            "finish_reason": request.finish_reason,
            "stop_reason": request.stop_reason,
            "token_ids": request.output if job.return_token_ids else None,
        }
        prompt = {
            "prompt_logprobs": self._prompt_logprobs(),
            "prompt_token_ids": job.prompt if job.return_token_ids else None,
        }
        if job.chat:
            choice["message"] = {"role": "assistant", "content": request.text}
            body = self._frame([choice], **prompt)
        else:
            body = self._frame([{**choice, "text": request.text, **prompt}])
        body["usage"] = self._usage(len(request.output))
        body["metrics"] = self._metrics()
        return body

    def chunks(self, delta: Delta) -> list[Json]:
        """The chunks of one delta: one, before it the role in a chat's first."""
        job = self.job
        out = []
        self._tokens += len(delta.token_ids)
        choice: Json = {
            "index": 0,
            "logprobs": self._logprobs(delta.logprobs),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if job.return_token_ids:
            choice["token_ids"] = delta.token_ids
        first = not self._began
        self._began = True
        prompt = {"prompt_token_ids": job.prompt} if first and job.return_token_ids else {}
        if job.chat:
            if first:
                role = {"role": "assistant", "content": ""}
                opening = {"index": 0, "delta": role, "logprobs": None, "finish_reason": None}
                out.append(self._with_usage(self._frame([opening], **prompt), 0))
            choice["delta"] = {"content": delta.text}
            out.append(self._with_usage(self._frame([choice]), self._tokens))
        else:
            body = self._frame([{**choice, "text": delta.text, **prompt}])
            out.append(self._with_usage(body, self._tokens))
        return out

    def closing(self) -> list[Json]:
        """The usage chunk, if it was asked for."""
        if not self.job.include_usage:
            return []
        body = self._frame([])
        body["usage"] = self._usage(self._tokens)
        metrics = self._metrics()
        if metrics is not None:
            body["metrics"] = metrics
        return [body]

    def _frame(self, choices: list[Json], **more: Any) -> Json:
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.job.model,
            "choices": choices,
            **more,
        }

    def _with_usage(self, body: Json, tokens: int) -> Json:
        if self.job.continuous_usage:
            body["usage"] = self._usage(tokens)
        return body

    def _usage(self, tokens: int) -> Json:
        prompt = len(self.job.prompt)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
        }

    def _metrics(self) -> Json | None:
        speculative = speculative_metrics(self.request)
        return None if speculative is None else {"speculative_decoding": speculative}

    def _name(self, token: int) -> str:
        if self.job.tokens_as_ids:
            return f"token_id:{token}"
        return self.tokenizer.decode([token], skip_special=False)

    def _logprobs(self, scored: list[TokenLogprob] | None) -> Json | None:
        if self.job.params.logprobs is None or scored is None:
            return None
        if self.job.chat:
            return {"content": [self._chat_entry(s) for s in scored]}
        names = [self._name(s.token) for s in scored]
        offsets = []
        for name in names:
            offsets.append(self._offset)
            self._offset += len(name)
        return {
            "text_offset": offsets,
            "token_logprobs": [s.logprob for s in scored],
            "tokens": names,
            "top_logprobs": [
                {self._name(t): p for t, p in [(s.token, s.logprob), *s.top]} for s in scored
            ],
        }

    def _chat_entry(self, scored: TokenLogprob) -> Json:
        def entry(token: int, logprob: float) -> Json:
            name = self._name(token)
            return {"token": name, "logprob": logprob, "bytes": list(name.encode())}

        top = [entry(token, logprob) for token, logprob in scored.top]
        return {**entry(scored.token, scored.logprob), "top_logprobs": top}

    def _prompt_logprobs(self) -> list[Json | None] | None:
        scores = self.request.prompt_logprobs
        if scores is None:
            return None
        return [None if score is None else self._prompt_entry(score) for score in scores]

    def _prompt_entry(self, scored: TokenLogprob) -> Json:
        ranked = [(t, p, rank) for rank, (t, p) in enumerate(scored.top, 1)]
        return {
            str(token): {
                "logprob": logprob,
                "rank": rank,
                "decoded_token": self.tokenizer.decode([token], skip_special=False),
            }
            for token, logprob, rank in [(scored.token, scored.logprob, scored.rank), *ranked]
        }
