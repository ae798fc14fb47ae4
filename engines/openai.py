"""Any running OpenAI-compatible server: attached to, never started.

Its counters are read where it publishes them under vLLM's names; where it does not, acceptance
can only be seen by the client.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines.base import (
    EngineUsageError,
    Launch,
    PhaseMark,
    RequestAcceptance,
    ServeSpec,
    SpecCounters,
)
from engines.vllm import read_counters, read_request_acceptance

_ATTACH = "the engine openai is not started, it is attached to: give --url"


class OpenAIAdapter:
    """The contract's reading half; `check` and `launch` say that there is no other."""

    name = "openai"
    phases: tuple[PhaseMark, ...] = ()
    ready_path = "/v1/models"
    metrics_path: str | None = "/metrics"

    def environment(self, spec: ServeSpec) -> str | None:
        return None

    def check(self, spec: ServeSpec) -> None:
        raise EngineUsageError(_ATTACH)

    def launch(self, spec: ServeSpec, workdir: Path) -> Launch:
        raise EngineUsageError(_ATTACH)

    def failure_cause(self, log_text: str) -> str | None:
        return None

    def counters(self, metrics_text: str) -> SpecCounters | None:
        """Counters under vLLM's names; None where the text has none."""
        return read_counters(metrics_text)

    def request_fields(self, *, speculative: bool, endpoint: str = "chat") -> Mapping[str, Any]:
        """Nothing beyond the API: a strict server refuses fields it does not know."""
        return {}

    def request_acceptance(self, payloads: list[dict[str, Any]]) -> RequestAcceptance | None:
        """What a server tells in vLLM's form, without having been asked."""
        return read_request_acceptance(payloads)
