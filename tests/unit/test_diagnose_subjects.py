"""What is to be diagnosed, from the command line's words: mistakes cost no work."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.base import EngineUsageError
from harness.diagnose.subjects import Asked, case_of
from harness.errors import UsageError
from harness.prepare import Request


@pytest.mark.parametrize("config", [None, "[1]"])
def test_a_trained_target_that_is_no_checkpoint_is_told_first(
    config: str | None, tmp_path: Path
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    request = Request(engines=("reference",), variants=("speculative",))
    with pytest.raises((UsageError, EngineUsageError), match=r"config\.json"):
        case_of(Asked(request=request, trained_target=tmp_path))
