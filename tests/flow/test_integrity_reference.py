"""Defects planted into the embedded engine: each is caught by the check that is made for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engines.process import free_port
from harness.measure.logprobs import LogprobReader
from harness.measure.store import to_json
from harness.probes import PROMPTS, TOKENS
from harness.records import ParityRecord

REPO = Path(__file__).resolve().parents[2]
Serve = Callable[..., str]


@pytest.fixture(scope="module")
def serve() -> Iterator[Serve]:
    """Start an engine by its command; gives its URL once it answers."""
    running: list[subprocess.Popen[bytes]] = []

    def go(*command: str) -> str:
        url = f"http://127.0.0.1:{(port := free_port())}"
        more = ["--served-model-name", "demo", "--port", str(port), "--threads", "1"]
        environment = {**os.environ, "PYTHONPATH": str(REPO)}
        process = subprocess.Popen([sys.executable, *command, *more], cwd=REPO, env=environment)
        running.append(process)
        deadline = time.monotonic() + 600
        while True:
            assert time.monotonic() < deadline
            assert process.poll() is None
            try:
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    return url
            except httpx.TransportError:
                time.sleep(0.1)

    yield go
    for process in running:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def right(serve: Serve, demo_pair: Path) -> str:
    """A server of the demo target without speculation."""
    return serve("-m", "engines.reference", "--model", str(demo_pair / "target"))


def copy_of(target: Path, folder: Path, **changes: Any) -> Path:
    """The same checkpoint with another config."""
    folder.mkdir()
    for file in target.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((target / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def run(out: Path, *more: str) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, "-m", "harness", "run", "--out", str(out), *more]
    command += ["--set", "load.concurrency=4", "--set", "workload.dataset=demo"]
    command += ["--set", "load.allow_client_bound=true"]  # it is not figures that are tested
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=600)
    lines = done.stdout.strip().splitlines()
    assert lines, done.stderr
    return done.returncode, json.loads((Path(lines[-1]) / "summary.json").read_text()), done.stderr


def codes(summary: dict[str, Any]) -> set[str]:
    return {c["code"] for c in summary["cautions"]}


def test_a_wrong_rope_base_is_caught_by_the_golden_file(
    right: str, demo_pair: Path, tmp_path: Path
) -> None:
    with httpx.Client() as http:
        reader = LogprobReader(http, right, "demo")
        answers = tuple(reader.greedy(name, text, TOKENS) for name, text in PROMPTS.items())
    golden = ParityRecord(
        engine="reference", variant="baseline", repeat=0, target=None, weights=None,
        dtype="float32", answers=answers,
    )  # fmt: skip
    (tmp_path / "golden.json").write_bytes(to_json(golden))
    wrong = copy_of(demo_pair / "target", tmp_path / "target", rope_theta=12000.0)
    code, summary, err = run(
        tmp_path, "--variants", "baseline", "--set", f"target.path={wrong}",
        *("--set", f"target.parity={tmp_path / 'golden.json'}", "--set", "load.num_requests=2"),
        *("--set", "compare.launches=1", "--set", "load.warmup_requests=1"),
        *("--set", "workload.output_tokens=16"),
    )  # fmt: skip
    assert code == 4, err
    assert "target_differs" in codes(summary)
    (odd,) = summary["parity"]
    assert odd["against"] == "golden file"
    assert odd["difference"] > 10 * odd["bound"]


def test_a_swapped_model_is_caught(
    serve: Serve, right: str, demo_pair: Path, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    other = copy_of(demo_pair / "target", tmp_path / "target")
    weights = load_file(str(demo_pair / "target" / "model.safetensors"))
    name = next(n for n in sorted(weights) if n.endswith("layers.3.self_attn.o_proj.weight"))
    noise = torch.randn(weights[name].shape, generator=torch.Generator().manual_seed(0))
    weights[name] += 0.1 * weights[name].std() * noise
    (other / "model.safetensors").unlink()
    save_file(weights, str(other / "model.safetensors"), metadata={"format": "pt"})
    swapped = serve("-m", "engines.reference", "--model", str(other))
    code, summary, err = run(
        tmp_path, "--engine", "openai", "--url", f"baseline={right}",
        *("--url", f"speculative={swapped}", "--set", "engine.dtype=float32"),
        *("--set", "load.num_requests=2", "--set", "compare.launches=1"),
        *("--set", "load.warmup_requests=1", "--set", "workload.output_tokens=16"),
    )  # fmt: skip
    assert code == 4, err
    assert "target_differs" in codes(summary)
    assert "target differs" in summary["void"]
    assert [p["variant"] for p in summary["parity"] if p["differs"]] == ["speculative"]


def test_a_wrong_token_in_every_200th_verification_is_caught(
    serve: Serve, right: str, demo_pair: Path, tmp_path: Path
) -> None:
    engine = Path(__file__).with_name("wrong_engine.py")
    wrong = serve(
        str(engine), "200", "--model", str(demo_pair / "target"),
        *("--drafter", str(demo_pair / "drafter-mla")),
    )  # fmt: skip
    code, summary, err = run(
        tmp_path, "--engine", "reference", "--url", f"baseline={right}",
        *("--url", f"speculative={wrong}", "--set", "engine.dtype=float32"),
        *("--set", "load.num_requests=32", "--set", "compare.launches=2"),
        *("--set", "compare.blocks=1"),
    )  # fmt: skip
    assert code == 4, err
    assert "not_lossless" in codes(summary)
    assert "target_differs" not in codes(summary)
    (found,) = summary["integrity"]
    assert found["compared"] == 64
    assert 1 <= found["errors"] == found["diverged"] <= 8
    assert found["near_tie"] == 0
    assert found["floor_compared"] >= 16
    assert found["floor_diverged"] == 0
