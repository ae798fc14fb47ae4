"""The server that answers: an engine started from the plan, or one that runs already."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import msgspec

from engines.base import Adapter
from engines.catalog import adapter as adapter_named
from engines.checkpoint import read_json
from engines.process import EngineProcess
from harness.alive import Attached, Launched
from harness.errors import UsageError, one_line
from harness.load.streaming.origin import Origin
from harness.load.streaming.plain import plain_client
from harness.load.streaming.pool import check_client
from training.launch import serve_spec, start_teller
from training.plan import TrainingPlan
from training.targets import LONGEST_CONTEXT

ASK_S = 10.0


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """A server that answers.

    `host` tells where it is, and whether it still answers. `context`: the most tokens of prompt and
    answer, None: it does not say.
    """

    name: str
    model: str
    adapter: Adapter
    version: str | None
    context: int | None
    host: Launched | Attached


def api_key(plan: TrainingPlan) -> str | None:
    """The key from the environment variable that the plan names. Raises `UsageError`."""
    name = plan.engine.api_key_env
    if name is None:
        return None
    key = os.environ.get(name, "").strip()
    if not (key and key.isascii() and key.isprintable()):
        raise UsageError(f"engine.api_key_env: the environment has no key in {name}")
    return key


def own_context(target: Path) -> int | None:
    """The model's own longest context; None where its config does not say."""
    config = read_json(target / "config.json")
    inner = config.get("text_config")
    told = (inner if isinstance(inner, dict) and inner else config).get("max_position_embeddings")
    return told if type(told) is int and told > 0 else None


def context_for(plan: TrainingPlan, target: Path, wanted: int) -> int:
    """The context to start an engine with: the plan's, else what the longest request needs.

    `wanted`: tokens of the longest prompt and its answer. Never more than the model's own.
    """
    own = own_context(target) or max(wanted, LONGEST_CONTEXT)
    return plan.engine.max_model_len or min(own, max(wanted, LONGEST_CONTEXT))


def check_server(plan: TrainingPlan) -> Adapter:
    """The engine's adapter. Raises `UsageError` where the plan's server cannot be asked at all."""
    check_client(plan.client)
    api_key(plan)
    adapter = adapter_named(plan.generate.engine)
    if plan.generate.url is not None:
        Origin.parse(plan.generate.url)
    elif plan.generate.engine == "openai":
        raise UsageError(
            "generate.engine=openai: such a server is not started here; give its generate.url"
        )
    return adapter


@contextmanager
def serving(plan: TrainingPlan, target: Path, context: int, folder: Path) -> Iterator[Server]:
    """The plan's server; one that is started here logs into `folder` and is gone afterwards.

    Raises `UsageError`, `EngineUsageError` or `EngineFailed` where it cannot be had.
    """
    adapter = check_server(plan)
    if plan.generate.url is not None:
        yield _attached(plan, adapter)
        return
    spec = serve_spec(plan, target, context)
    with EngineProcess(
        adapter,
        spec,
        workdir=folder / "engine",
        log_path=folder / "engine.log",
        deadline_s=plan.engine.startup_deadline_s,
        patience=plan.engine.stall_patience,
        on_phase=start_teller("generate", adapter.name),
    ) as process:
        process.start()
        process.wait_ready()
        yield Server(
            name=adapter.name,
            model=spec.served_name,
            adapter=adapter,
            version=_own_version()
            if adapter.name == "reference"
            else _version(plan, process.base_url, None),
            context=context,
            host=Launched(process),
        )


def _attached(plan: TrainingPlan, adapter: Adapter) -> Server:
    """A server that someone else runs. Raises `UsageError` where no fitting model answers."""
    assert plan.generate.url is not None
    root = Origin.parse(plan.generate.url).root
    key = api_key(plan)
    told = _get(plan, root, "/v1/models", key)
    if isinstance(told, str):
        raise UsageError(
            f"generate.url={root}: /v1/models: {told}; is an OpenAI-compatible server running there"
            "? (engine.api_key_env names the variable with a key)"
        )
    rows = told.get("data")
    models = [m for m in rows if isinstance(m, dict)] if isinstance(rows, list) else []
    names = [str(model.get("id")) for model in models]
    wanted = plan.target.served_name or (names[0] if names else None)
    if wanted is None or wanted not in names:
        serves = f"serves {', '.join(names)}" if names else "serves no model"
        raise UsageError(
            f"generate.url={root}: {one_line(serves)}"
            + (f", not target.served_name={wanted}" if wanted else "")
        )
    said = models[names.index(wanted)].get("max_model_len")
    context = plan.engine.max_model_len or (said if type(said) is int and said > 0 else None)
    return Server(
        name=adapter.name,
        model=wanted,
        adapter=adapter,
        version=_version(plan, root, key),
        context=context,
        host=Attached(root, plan.client),
    )


def _get(plan: TrainingPlan, root: str, path: str, key: str | None) -> dict[str, Any] | str:
    """The JSON object at a path of the server, or what is wrong."""
    try:
        with plain_client(root, plan.client, key) as client:
            answer = client.get(root + path, timeout=ASK_S)
        if answer.status_code != 200:
            return f"HTTP {answer.status_code}"
        value = msgspec.json.decode(answer.content)
    except httpx.HTTPError as error:
        return one_line(str(error) or type(error).__name__, 160)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "the answer is no JSON"
    return value if isinstance(value, dict) else "the answer is no JSON object"


def _own_version() -> str | None:
    """Of the embedded engine, which is a part of this package; None where that is not installed."""
    try:
        return metadata.version("spec-harness")
    except metadata.PackageNotFoundError:
        return None


def _version(plan: TrainingPlan, root: str, key: str | None) -> str | None:
    """The engine's version as it tells it; None where it does not."""
    for path in ("/version", "/server_info"):
        told = _get(plan, root, path, key)
        if isinstance(told, dict) and isinstance(told.get("version"), str):
            return one_line(told["version"], 80)
    return None
