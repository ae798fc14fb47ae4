"""The reference engine's own command line: mistakes are told before weights are read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from reference_models import build_drafter, build_target

from drafters.checkpoint import save
from engines.base import EngineUsageError
from engines.reference.__main__ import check_folders, parse


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    build_target("llama", folder / "target", vocab_size=64)
    for name, size in (("drafter-llama", 64), ("other", 32)):
        save(
            build_drafter("llama", vocab_size=size, draft_vocab_size=size, aux_layers=(0, 1, 2)),
            folder / name,
        )
    return folder


def test_a_pair_that_fits_passes(pair: Path) -> None:
    check_folders(pair / "target", pair / "drafter-llama")
    check_folders(pair / "target", None)


def test_a_wrong_folder_is_told_with_its_option_and_what_lies_beside_it(pair: Path) -> None:
    with pytest.raises(EngineUsageError, match=r"^--model .*nowhere: no such folder;.*wanted$"):
        check_folders(pair / "none" / "nowhere", pair / "drafter-llama")
    with pytest.raises(EngineUsageError, match=r"^--drafter .*drafter: no such .* drafter-llama"):
        check_folders(pair / "target", pair / "drafter")
    with pytest.raises(EngineUsageError, match=r"^--model .*: has no config.json"):
        check_folders(pair, None)


def test_a_drafter_for_another_target_is_told(pair: Path) -> None:
    with pytest.raises(EngineUsageError, match=r"^--drafter: .*vocab"):
        check_folders(pair / "target", pair / "other")


def test_the_folders_are_looked_at_without_loading_torch(pair: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from engines.reference.__main__ import "
        "check_folders; check_folders(*map(Path, sys.argv[1:])); print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(pair / "target"), str(pair / "drafter-llama")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_help_tells_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--port N default: 8000" in text
    assert "1 to 8; default: 3" in text and "default: 16" in text
