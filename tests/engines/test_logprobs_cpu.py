"""vLLM and SGLang on the CPU tell the log-probabilities that the checks of the output ask for.

Both variants compute the reference engine's model, and name the tokens after a prefix by their ids.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from engines.base import EngineUsageError, ServeSpec
from engines.catalog import adapter
from engines.install import engine_python
from engines.process import EngineProcess, free_port
from harness.analyse.parity import bound, difference
from harness.measure.logprobs import LogprobReader, gap_of
from harness.probes import PROMPTS, TOKENS
from harness.records import ParityAnswer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

PREFIX = [20, 30, 40, 50, 60, 70]
Told = tuple[list[ParityAnswer], dict[int, float]]


def told(name: str, pair: Path, workdir: Path, *, speculative: bool) -> Told:
    """What one server says of the fixed prompts and of the token after a prefix."""
    spec = ServeSpec(
        target=pair / "target",
        served_name="demo",
        port=free_port(),
        drafter=pair / "drafter-mla" if speculative else None,
        pair_drafter=pair / "drafter-mla",
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=4,
        kv_cache_gib=1.0,
    )
    log_path = workdir / f"{name}-{speculative}.log"
    with EngineProcess(
        adapter(name), spec, workdir=workdir, log_path=log_path, deadline_s=900.0
    ) as engine:
        engine.start()
        engine.wait_ready()
        with httpx.Client() as http:
            reader = LogprobReader(http, engine.base_url, "demo")
            answers = [reader.greedy(title, text, TOKENS) for title, text in PROMPTS.items()]
            return answers, reader.next_token(PREFIX)


@pytest.fixture(scope="module")
def reference(demo_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Told:
    return told("reference", demo_pair, tmp_path_factory.mktemp("reference"), speculative=False)


@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_the_model_is_the_reference_engines(
    name: str, speculative: bool, reference: Told, demo_pair: Path, tmp_path: Path
) -> None:
    try:
        engine_python(f"{name}-cpu")
    except EngineUsageError as error:
        pytest.skip(str(error))
    answers, after = told(name, demo_pair, tmp_path, speculative=speculative)
    mean, _, tokens = difference(answers, reference[0])
    assert tokens > 50
    assert mean is not None
    assert mean < bound("float32")
    best = max(after, key=lambda token: after[token])
    gap = gap_of(reference[1], (best,), bound=0.0)
    assert gap is not None
    assert gap < 0.01
    assert after[best] == pytest.approx(reference[1][best], abs=0.01)
