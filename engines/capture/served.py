"""Hidden states from an engine that is served: started, asked, and its files read."""

from __future__ import annotations

import contextlib
import json
import shutil
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.base import Adapter, EngineFailed, EngineUsageError, ServeSpec
from engines.capture.base import CaptureSpec, RowStates
from engines.capture.target import (
    CaptureTarget,
    capture_target,
    check_layers,
    inner_layers,
    side_by_side,
)
from engines.process import DEATH_SEEN_S, EngineProcess, free_port

if TYPE_CHECKING:
    from torch import Tensor

PLUGIN = Path(__file__).with_name("plugin")
REQUEST_TIMEOUT_S = 1800.0
SERVED_NAME = "target"


class ServedCapturer:
    """The base of the served sources; `_ask` is theirs.

    A request is a prompt of the whole sample with one token to generate. `_ask` returns once the
    states of it are on disk and gives [T, n + 1, H] beside the token ids the engine was fed.
    """

    name = "served"
    last_is_normed = True
    headroom = 1
    """Positions that a sample must leave free: the token to generate, and what the engine keeps."""

    def __init__(
        self, spec: CaptureSpec, adapter: Adapter, args: tuple[str, ...], env: dict[str, str]
    ) -> None:
        self.spec = spec
        self.facts: CaptureTarget = capture_target(spec.target)
        check_layers(spec.aux_layers, self.facts)
        self.layers = inner_layers(spec.aux_layers, self.facts.layers)
        if spec.max_length + self.headroom > self.facts.max_positions:
            raise EngineUsageError(
                f"{spec.target}: samples of {spec.max_length} tokens, but {self.name} takes "
                f"{self.facts.max_positions - self.headroom} of the target's "
                f"{self.facts.max_positions} positions: lower capture.max_length"
            )
        self.folder = states_folder(spec)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.engine = EngineProcess(
            adapter,
            _serve_spec(spec, spec.max_length + self.headroom, args, env),
            workdir=spec.workdir,
            log_path=spec.workdir / f"{adapter.name}.log",
            deadline_s=spec.startup_deadline_s,
            on_phase=spec.on_phase,
        )
        self._embedding: Tensor | None = None
        self._norm: Tensor | None = None
        try:
            self.engine.start()
            self.engine.wait_ready()
            self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        """What is still to be said to the started engine."""

    def _ask(self, token_ids: Sequence[int], request: str) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def capture(self, rows: Sequence[Sequence[int]]) -> list[RowStates]:
        """All rows at once; the engine batches them as it likes."""
        names = [f"capture-{uuid.uuid4().hex}" for _ in rows]
        with ThreadPoolExecutor(max_workers=len(rows)) as pool:
            asked = list(pool.map(self._ask, rows, names))
        return [
            self._row(row, *found, name=name)
            for row, found, name in zip(rows, asked, names, strict=True)
        ]

    def close(self) -> None:
        """End the engine and remove what it had left to be read."""
        self.engine.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _row(self, row: Sequence[int], seen: Tensor, states: Tensor, *, name: str) -> RowStates:
        from engines.capture.target import final_norm

        wanted = (len(row), len(self.layers) + 1, self.facts.hidden_size)
        if tuple(states.shape) != wanted or len(seen) != len(row):
            raise EngineFailed(
                f"{self.name} gave states {list(states.shape)} and {len(seen)} token ids for a "
                f"sample of {len(row)} tokens ({name}), wanted {list(wanted)}; "
                f"log: {self.engine.log_path}",
                log_path=self.engine.log_path,
            )
        last = states[:, -1]
        if not self.last_is_normed:
            if self._norm is None:
                self._norm = self.facts.norm()
            last = final_norm(last, self._norm, self.facts.norm_eps).to(states.dtype)
        captured = {layer: states[:, i] for i, layer in enumerate(self.layers)}
        aux = side_by_side(
            self.spec.aux_layers, captured, embeddings=self._embeddings(seen), last_normed=last
        )
        return RowStates(token_ids=seen, aux=aux, last_normed=last.clone())

    def _embeddings(self, token_ids: Tensor) -> Tensor | None:
        if 0 not in self.spec.aux_layers:
            return None
        if self._embedding is None:
            self._embedding = self.facts.embedding()
        return self._embedding[token_ids]

    def _post(
        self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """One request's JSON answer. Raises `EngineFailed` with the engine's own words."""
        request = urllib.request.Request(
            self.engine.base_url + path,
            json.dumps(body).encode(),
            {"content-type": "application/json", **(headers or {})},
        )
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:
                told: dict[str, Any] = json.load(answer)
                return told
        except urllib.error.HTTPError as error:
            said = error.read(2000).decode("utf-8", "replace")
            raise EngineFailed(
                f"{self.name} refused {path} with {error.code}: {' '.join(said.split())[:300]}; "
                f"log: {self.engine.log_path}",
                log_path=self.engine.log_path,
            ) from None
        except (OSError, ValueError):
            raise self.engine.death(DEATH_SEEN_S) or self.engine.failure() from None


def states_folder(spec: CaptureSpec) -> Path:
    """Where the engine lays the states of a request until they are read."""
    return spec.workdir.absolute() / "handed-over"


def read_chunks(folder: Path, request: str, tokens: int) -> tuple[Tensor, Tensor]:
    """Token ids [T] and states [T, n + 1, H] of a request from the plugin's files, which go.

    Of a chunk that was computed again (a preempted request) the later file replaced the earlier.
    """
    import torch
    from safetensors.torch import load

    ids: list[Tensor] = []
    states: list[Tensor] = []
    row = 0
    for path in sorted(folder.glob(f"*{request}*.safetensors")):
        first_row = int(path.name.split(".")[-2])
        if first_row == row < tokens:
            chunk = load(path.read_bytes())
            ids.append(chunk["token_ids"])
            states.append(chunk["states"])
            row += len(chunk["token_ids"])
        path.unlink()
    if not ids:
        raise EngineFailed(f"no hidden states of request {request} came into {folder}")
    return torch.cat(ids), torch.cat(states)


def _serve_spec(
    spec: CaptureSpec, positions: int, args: tuple[str, ...], env: dict[str, str]
) -> ServeSpec:
    return ServeSpec(
        target=spec.target,
        served_name=SERVED_NAME,
        port=free_port(),
        dtype=spec.dtype,
        max_model_len=positions,
        max_num_seqs=spec.batch,
        kv_cache_gib=spec.kv_cache_gib,
        tensor_parallel=spec.tensor_parallel,
        device=spec.device,
        threads=spec.threads,
        trust_remote_code=spec.trust_remote_code,
        extra_args=(*args, *spec.extra_args),
        extra_env={**env, **spec.extra_env},
    )


@contextlib.contextmanager
def removed(path: Path) -> Iterator[Path]:
    """Remove a file that was handed over, however the block ends."""
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
