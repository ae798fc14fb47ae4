"""The JSON files of a checkpoint folder, as every engine and the harness read them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engines.base import EngineUsageError


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, or EngineUsageError saying what is wrong with it."""
    try:
        if path.is_fifo():  # opening one waits for a writer
            raise EngineUsageError(f"{path}: a pipe, not a file; fetch the checkpoint again")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EngineUsageError(f"{path}: no such file; give the folder of a checkpoint") from None
    except (OSError, ValueError, RecursionError) as error:
        raise EngineUsageError(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise EngineUsageError(f"{path}: a JSON object is wanted, not {type(value).__name__}")
    return value


def read_config(folder: Path, what: str) -> dict[str, Any]:
    """config.json of the `what` (target, drafter) in `folder`. Raises EngineUsageError."""
    path = folder / "config.json"
    if not path.exists():
        raise EngineUsageError(
            f"{what} {folder} has no config.json: give the folder of a checkpoint in the "
            "Hugging Face layout"
        )
    return read_json(path)


@contextmanager
def read_as(path: Path, what: str) -> Iterator[None]:
    """A key that is missing in the config at `path`, or holds no such value, is told on one line.

    `what`: whose config it is read as, as "a language model". Raises `EngineUsageError`.
    """
    try:
        yield
    except KeyError as error:
        raise EngineUsageError(
            f"{path}: the key {error} is missing, which {what} has; fetch the checkpoint again"
        ) from error
    except (TypeError, ValueError) as error:
        raise EngineUsageError(f"{path}: cannot be read as {what}: {error}") from error


def check_named(folder: Path, what: str) -> dict[str, Any]:
    """The config, after a look at whether an engine can tell from it which model it is of."""
    config = read_config(folder, what)
    if not config.get("architectures") and not config.get("model_type"):
        raise EngineUsageError(
            f"{folder / 'config.json'}: names neither architectures nor model_type, so that no "
            f"engine can tell what the {what} is; fetch the checkpoint again"
        )
    return config


def drop_nulls(path: Path) -> None:
    """Leave out of a config what is null.

    transformers' typed configs refuse null for some keys (`n_routed_experts` of an MLA drafter),
    and a key that is missing says the same.
    """
    config = {key: value for key, value in read_json(path).items() if value is not None}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
