"""How the harness starts the reference engine and reads its figures."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines.arguments import check_names, flag_name
from engines.base import (
    EngineUsageError,
    Launch,
    PhaseMark,
    RequestAcceptance,
    ServeSpec,
    SpecCounters,
    check_forced,
)
from engines.vllm import read_counters, read_request_acceptance

_LINE = r"^\[reference\s+[\d.]+s\] "
_EXCEPTION = re.compile(r"^[\w.]*(?:Error|Exception|Interrupt)\b.*", re.MULTILINE)


class ReferenceAdapter:
    """The embedded engine, run by the harness's own interpreter."""

    name = "reference"
    phases = (
        PhaseMark(phase="config", pattern=_LINE + "reading config"),
        PhaseMark(phase="load_target", pattern=_LINE + "loading target"),
        PhaseMark(phase="load_drafter", pattern=_LINE + "loading drafter"),
        PhaseMark(phase="cache", pattern=_LINE + "allocating cache"),
        PhaseMark(phase="ready", pattern=_LINE + "ready"),
    )
    ready_path = "/health"
    metrics_path: str | None = "/metrics"

    def environment(self, spec: ServeSpec) -> str | None:
        """None: the harness's own."""
        return None

    def check(self, spec: ServeSpec) -> None:
        """Raise EngineUsageError for what can be seen wrong without loading weights."""
        from engines.reference.__main__ import flag_names
        from engines.reference.config import read_config

        asked = [name for name in map(flag_name, spec.extra_args) if name is not None]
        check_names(asked, flag_names(), "the reference engine")
        config = read_config(spec.target)
        if spec.tensor_parallel != 1:
            raise EngineUsageError("the reference engine runs on one device: tensor_parallel = 1")
        if spec.max_model_len > config.max_positions:
            raise EngineUsageError(
                f"engine.max_model_len={spec.max_model_len}: {spec.target} has "
                f"{config.max_positions} positions; set a smaller one"
            )
        if spec.drafter is None:
            return
        if not 1 <= spec.k <= 8:
            raise EngineUsageError(
                f"speculative.k={spec.k}: the reference engine drafts 1 to 8 tokens"
            )
        check_forced(spec)
        _check_drafter(spec.drafter, spec.target)

    def launch(self, spec: ServeSpec, workdir: Path) -> Launch:
        """`python -m engines.reference …`; nothing is written to `workdir`."""
        python = str(spec.python or sys.executable)
        argv = [python, "-m", "engines.reference", "--model", str(spec.target)]
        argv += ["--served-model-name", spec.served_name]
        argv += ["--host", spec.host, "--port", str(spec.port), "--dtype", spec.dtype]
        argv += ["--device", spec.device, "--max-model-len", str(spec.max_model_len)]
        argv += ["--seed", str(spec.seed)]
        if spec.max_num_seqs is not None:
            argv += ["--max-num-seqs", str(spec.max_num_seqs)]
        if spec.drafter is not None:
            argv += ["--drafter", str(spec.drafter), "--k", str(spec.k)]
            if spec.forced_length is not None:
                argv += ["--forced-length", f"{spec.forced_length:g}"]
        if spec.threads is not None:
            argv += ["--threads", str(spec.threads)]
        if spec.trust_remote_code:
            argv.append("--trust-remote-code")
        env = {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", **spec.extra_env}
        return Launch(
            argv=(*argv, *spec.extra_args), env=env, cwd=Path(__file__).resolve().parents[2]
        )

    def failure_cause(self, log_text: str) -> str | None:
        """The engine's own error line, else the last exception of a traceback."""
        own = re.search(r"^\[reference\] error: (.*)$", log_text, re.MULTILINE)
        if own:
            return own.group(1)
        raised = _EXCEPTION.findall(log_text)
        return raised[-1] if raised else None

    def counters(self, metrics_text: str) -> SpecCounters | None:
        """The engine publishes its counters under vLLM's names; None where the text has none."""
        return read_counters(metrics_text)

    def request_fields(self, *, speculative: bool, endpoint: str = "chat") -> Mapping[str, Any]:
        """Token ids in the answer; the acceptance comes without asking."""
        return {"return_token_ids": True}

    def request_acceptance(self, payloads: list[dict[str, Any]]) -> RequestAcceptance | None:
        """From `metrics.speculative_decoding`, in vLLM's form, of the last chunk that has it."""
        return read_request_acceptance(payloads)


def _check_drafter(drafter: Path, target: Path) -> None:
    from drafters.spec import DrafterError
    from drafters.validate import check_fit

    try:
        check_fit(drafter, target)
    except DrafterError as error:
        raise EngineUsageError(str(error)) from error
