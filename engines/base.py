"""The contract between the harness and an inference engine. Standard library only.

An engine is described by an `Adapter`: it turns one neutral `ServeSpec` into a command line
(`Launch`), knows the engine's start-up phases by its log lines, and reads the engine's own
figures of acceptance. It never starts anything itself: `engines.process` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


class EngineError(Exception):
    """Base of the errors engines raise; the message is one line."""


class EngineUsageError(EngineError):
    """The specification cannot be served: what, where, what to do (exit code 2)."""


class EngineFailed(EngineError):
    """The engine's process failed (exit code 3).

    `phase` is the start-up phase it was in ("serving" afterwards), `cause` the engine's own first
    error line where one was found, `kind` what sort of failure that is where it is known
    (`engines.signatures.Kind`), `log_path` the full log, `tail` its last relevant lines.
    """

    def __init__(
        self,
        message: str,
        *,
        phase: str | None = None,
        cause: str | None = None,
        kind: str | None = None,
        log_path: Path | None = None,
        tail: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.phase = phase
        self.cause = cause
        self.kind = kind
        self.log_path = log_path
        self.tail = tail


@dataclass(frozen=True, kw_only=True)
class ServeSpec:
    """What to serve, said without any engine's words.

    `drafter` None is the baseline. `pair_drafter` is then the drafter of the variant it is compared
    with, for engines that must serve both by the same kernels. `k` counts draft tokens a verify
    step (chain drafting). `forced_length` None: drafts are verified; else a step is made to yield
    so many tokens on average, and the output is wrong by design. `max_num_seqs`, `kv_cache_gib` and
    `threads` None leave the engine's default. `temperature` is the highest that requests will ask
    for. `command_prefix` starts the command elsewhere (`engines.prefix`), and `reach` is the host
    name by which the server is then reached; None: by `host`. `extra_args` and `extra_env` come
    from the profile and are passed on as they are, last.

    `nodes` above 1: the command is that of node `node_rank` of a deployment that meets at `head`
    (host:port of the first node, which serves). `python` None: that of the engine's environment.
    `as_given`: the drafter's folder is what the engine is to be given, and nothing is written.
    """

    target: Path
    served_name: str
    port: int
    drafter: Path | None = None
    pair_drafter: Path | None = None
    k: int = 3
    forced_length: float | None = None
    dtype: str = "auto"
    max_model_len: int = 2048
    max_num_seqs: int | None = 16
    kv_cache_gib: float | None = None
    tensor_parallel: int = 1
    device: str = "cpu"
    host: str = "127.0.0.1"
    seed: int = 0
    temperature: float = 0.0
    threads: int | None = None
    trust_remote_code: bool = False
    reasoning_parser: str | None = None
    command_prefix: tuple[str, ...] = ()
    reach: str | None = None
    extra_args: tuple[str, ...] = ()
    extra_env: Mapping[str, str] = field(default_factory=dict)
    nodes: int = 1
    node_rank: int = 0
    head: str | None = None
    python: Path | None = None
    as_given: bool = False

    def head_address(self) -> tuple[str, str]:
        """Host and port of the first node. Raises `EngineUsageError` where they are not said."""
        host, _, port = (self.head or "").rpartition(":")
        if not host or not port.isdigit():
            raise EngineUsageError(
                f"engine.head={self.head or ''}: with engine.nodes = {self.nodes} the first node's "
                "address is wanted, as host:port"
            )
        return host, port


def check_forced(spec: ServeSpec) -> None:
    """Raise `EngineUsageError` where no verify step of `k` drafts can yield `forced_length`."""
    if spec.forced_length is not None and not 1 <= spec.forced_length <= spec.k + 1:
        raise EngineUsageError(
            f"speculative.forced_length {spec.forced_length:g}: with k = {spec.k} a verify step "
            f"yields 1 to {spec.k + 1} tokens"
        )


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A command ready to be started: `env` is added to (and overrides) the harness's own."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path | None = None


@dataclass(frozen=True, kw_only=True)
class PhaseMark:
    """A log line that matches `pattern` (a regular expression) means that `phase` has begun."""

    phase: str
    pattern: str


@dataclass(frozen=True, kw_only=True)
class PhaseUse:
    """What an engine's processes used in one start-up phase, by samples; None: cannot be had.

    `read_bytes`, `written_bytes`: of storage. `read_call_bytes`: what read calls gave, from the
    page cache, pipes and sockets too; what is mapped shows in neither unless it comes from storage.
    `network_bytes`: of the whole machine, loopback left out. `rss_bytes`: the most of all processes
    together, pages that they share counted for each. `gpu_bytes`: the most by which the GPUs' used
    memory lay above that at the launch.
    """

    cpu_s: float
    rss_bytes: int
    read_bytes: int | None = None
    written_bytes: int | None = None
    read_call_bytes: int | None = None
    network_bytes: int | None = None
    gpu_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class PhaseTiming:
    """One start-up phase as it went: seconds since the launch; `end_s` None if never ended.

    `progress`: the last count of a progress bar in it, such as graphs captured of all.
    `weight_bytes`: the size of the checkpoint that was loaded in it.
    """

    phase: str
    start_s: float
    end_s: float | None
    progress: tuple[int, int] | None = None
    weight_bytes: int | None = None
    use: PhaseUse | None = None


@dataclass(frozen=True, kw_only=True)
class RankCounters:
    """One data-parallel rank's share of the counters, to see a rank that is missing or restarted.

    `rank` is the label that names it, such as `engine=0`. `created_s`: when its counters were made
    (Unix time, seconds), where the engine says so.
    """

    rank: str
    drafts: int | None = None
    accepted: int | None = None
    generation_tokens: int | None = None
    created_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class SpecCounters:
    """An engine's speculative counters at one moment, summed over all its ranks.

    Ranks that serve different requests are summed; ranks that repeat the same figure (tensor and
    pipeline parallel) are taken once. `accepted_per_position[i]` counts the drafts whose token i
    was accepted (unconditional). None: the engine does not publish that figure.
    `accepted_past_end` counts the accepted tokens that stood behind a request's end.
    `generation_tokens` counts every output token of every client, `requests_finished` every
    finished request; with them other clients' traffic shows. `running` and `waiting` are requests
    at that moment. `process_start_s`: when the server's process began (Unix time, seconds).
    """

    drafts: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    accepted_per_position: tuple[int, ...] | None = None
    generation_tokens: int | None = None
    prompt_tokens: int | None = None
    requests_finished: int | None = None
    running: int | None = None
    waiting: int | None = None
    accepted_past_end: int | None = None
    process_start_s: float | None = None
    ranks: tuple[RankCounters, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RequestAcceptance:
    """One request's acceptance as the engine itself told it, its known biases corrected.

    `histogram[j]` is the number of verify steps that accepted exactly j draft tokens
    (length k + 1), `steps[i]` how many step i accepted, `past_end` how many of the accepted tokens
    stood behind the request's end and are no output. None where the engine does not tell.
    """

    drafts: int
    drafted: int | None
    accepted: int
    histogram: tuple[int, ...] | None = None
    steps: tuple[int, ...] | None = None
    past_end: int | None = None


class Adapter(Protocol):
    """What every engine must answer. Implementations hold no state and start nothing."""

    name: str
    """The engine's name on the command line: `reference`, `vllm`, `sglang`, `openai`."""
    phases: tuple[PhaseMark, ...]
    """Start-up phases in their usual order."""
    ready_path: str
    """GET path that answers 200 once requests are served."""
    metrics_path: str | None
    """GET path of the Prometheus text, or None."""

    def environment(self, spec: ServeSpec) -> str | None:
        """The engine environment that serves `spec`; None: there is none of its own."""

    def check(self, spec: ServeSpec) -> None:
        """Raise `EngineUsageError` if the engine is not installed or cannot serve `spec`."""

    def launch(self, spec: ServeSpec, workdir: Path) -> Launch:
        """The command for `spec`; small files (a translated drafter) go to `workdir`."""

    def failure_cause(self, log_text: str) -> str | None:
        """The one line of the log that tells why the engine failed, or None."""

    def counters(self, metrics_text: str) -> SpecCounters | None:
        """Read the speculative counters from the engine's metrics text."""

    def request_fields(self, *, speculative: bool, endpoint: str = "chat") -> Mapping[str, Any]:
        """Extra fields for a request to `endpoint` ("chat" or "completions"), such as those that
        ask for token ids and for the request's acceptance."""

    def request_acceptance(self, payloads: list[dict[str, Any]]) -> RequestAcceptance | None:
        """One request's acceptance from the JSON objects of its answer (chunks, in order)."""
