"""What a start-up phase used, and how far a phase is: from samples and log lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.activity import ProcessUse, Sample
from engines.base import PhaseMark, PhaseUse
from engines.ledger import PhaseLedger, added
from engines.phases import PhaseTracker, weights_size, with_weights
from engines.sglang import SglangAdapter
from engines.vllm import VllmAdapter


def sample(
    at_s: float,
    each: dict[int, ProcessUse],
    *,
    rss: int = 0,
    network: int | None = None,
    gpu: int | None = None,
) -> Sample:
    return Sample(
        at_s=at_s,
        processes=frozenset(each),
        cpu_s=sum(u.cpu_s for u in each.values()),
        io_bytes=0,
        log_bytes=0,
        gpu_bytes=None,
        each={(pid, 1.0): use for pid, use in each.items()},
        rss_bytes=rss,
        network_bytes=network,
        gpu_used_bytes=gpu,
    )


def used(cpu_s: float, read: int | None = 0) -> ProcessUse:
    return ProcessUse(cpu_s=cpu_s, read_bytes=read, written_bytes=0, read_call_bytes=0)


def test_differences_are_credited_to_the_phase_they_span() -> None:
    ledger = PhaseLedger()
    ledger.feed(sample(0, {}, network=100, gpu=1000), 0)
    ledger.feed(sample(1, {7: used(1.0, 10)}, rss=50, network=130, gpu=1000), 0)
    ledger.feed(sample(2, {7: used(1.5, 500), 8: used(2.0, 5)}, rss=90, network=130, gpu=4000), 1)
    ledger.feed(sample(3, {8: used(2.25, 6)}, rss=70, network=131, gpu=3000), 1)  # 7 has ended
    launch, load = ledger.use(0), ledger.use(1)
    assert launch is not None
    assert load is not None
    assert (launch.cpu_s, launch.read_bytes, launch.network_bytes) == (1.0, 10, 30)
    assert (load.cpu_s, load.read_bytes, load.network_bytes) == (2.75, 496, 1)
    assert (launch.rss_bytes, load.rss_bytes) == (50, 90)
    assert (launch.gpu_bytes, load.gpu_bytes) == (0, 3000)
    assert ledger.use(2) is None


def test_a_counter_that_cannot_be_read_makes_its_total_unknown_and_no_other() -> None:
    ledger = PhaseLedger()
    ledger.feed(sample(0, {}), 0)
    ledger.feed(sample(1, {7: used(1.0, None)}, rss=1), 0)
    ledger.feed(sample(2, {7: used(2.0, 8)}, rss=1), 0)
    use = ledger.use(0)
    assert use == PhaseUse(
        cpu_s=2.0, rss_bytes=1, read_bytes=None, written_bytes=0, read_call_bytes=0
    )


def test_an_engine_that_has_gone_adds_nothing() -> None:
    ledger = PhaseLedger()
    ledger.feed(sample(0, {7: used(1.0)}), 0)
    ledger.feed(sample(1, {}), 0)
    assert ledger.use(0) is None


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(0, 3)), min_size=2, max_size=40))
def test_nothing_is_lost_between_phases(steps: list[tuple[float, int]]) -> None:
    ledger, total = PhaseLedger(), 0.0
    ledger.feed(sample(0, {}), 0)
    for number, (cpu_s, phase) in enumerate(steps):
        total += cpu_s
        ledger.feed(sample(number + 1, {7: used(total)}, rss=1), phase)
    whole = added(ledger.use(phase) for phase in range(4))
    assert whole is not None
    assert whole.cpu_s == pytest.approx(total)


VLLM_LOG = """\
(APIServer pid=1) INFO 11-03 [model.py:1] Resolved architecture: LlamaForCausalLM
(EngineCore pid=2) INFO 11-03 [core.py:1] Initializing a V1 LLM engine (v0.32.0)
(Worker_TP0 pid=3) INFO 11-03 [parallel_state.py:1] world_size=2 rank=0 local_rank=0
(Worker_TP0 pid=3) INFO 11-03 [runner.py:1] Starting to load model /m
(Worker_TP0 pid=3) Loading safetensors checkpoint shards:  50% Completed | 2/4 [00:01<00:01,  1.9it/s]
(Worker_TP0 pid=3) Loading safetensors checkpoint shards: 100% Completed | 4/4 [00:02<00:00,  1.9it/s]
(Worker_TP0 pid=3) INFO 11-03 [loader.py:1] Loading weights took 2.10 seconds
(Worker_TP0 pid=3) INFO 11-03 [runner.py:1] Loading drafter model...
(Worker_TP0 pid=3) Loading safetensors checkpoint shards: 100% Completed | 1/1 [00:02<00:00,  1.9it/s]
(Worker_TP0 pid=3) INFO 11-03 [loader.py:1] Loading weights took 0.10 seconds
(Worker_TP0 pid=3) Capturing CUDA graphs (decode, FULL):  45%|████▌     | 30/67 [00:05<00:06,  5.9it/s]
"""  # noqa: E501
SGLANG_LOG = """\
[2026-01-02 10:00:00 TP0] Load weight begin. avail mem=90.00 GB
Multi-thread loading shards: 100% Completed | 30/30 [00:22<00:00,  1.3it/s]
[2026-01-02 10:00:30 TP0] Load weight end. elapsed=22.00 s
[2026-01-02 10:00:31 TP0] Load weight begin. avail mem=20.00 GB
[2026-01-02 10:00:32 TP0] Load weight end. elapsed=1.00 s
[2026-01-02 10:00:40 TP0] Capture cuda graph begin. This can take up to several minutes.
Capturing batches (bs=8 avail_mem=9.71 GB):  25%|██▌       | 2/8 [00:01<00:04,  1.4it/s]
"""


def followed(marks: tuple[PhaseMark, ...], log: str) -> PhaseTracker:
    tracker = PhaseTracker(marks)
    for second, line in enumerate(log.splitlines()):
        tracker.feed(line, float(second + 1))
    return tracker


def test_progress_and_weights_of_vllms_phases() -> None:
    tracker = followed(VllmAdapter.phases, VLLM_LOG)
    assert tracker.said == "capture_graphs 30 of 67"
    phases = with_weights(tracker.timings(99.0), 4000, 300)
    loads = [p for p in phases if p.phase == "load_weights"]
    assert [(p.progress, p.weight_bytes) for p in loads] == [((4, 4), 4000), ((1, 1), 300)]
    assert sum((p.end_s or 0) - p.start_s for p in phases) == 99.0
    assert [p.progress for p in phases if p.phase == "distributed"] == [None]


def test_progress_and_weights_of_sglangs_phases() -> None:
    tracker = followed(SglangAdapter.phases, SGLANG_LOG)
    assert tracker.said == "graph_capture 2 of 8"
    phases = with_weights(tracker.timings(None), 500, 20)
    loads = [p for p in phases if p.phase == "load_weights"]
    assert [(p.progress, p.weight_bytes) for p in loads] == [((30, 30), 500), (None, 20)]


def test_a_drafter_that_has_a_phase_of_its_own() -> None:
    marks = (
        PhaseMark(phase="load_target", pattern="a"),
        PhaseMark(phase="load_drafter", pattern="b"),
    )
    timings = followed(marks, "a\nb\n").timings(9.0)
    assert [p.weight_bytes for p in with_weights(timings, 10, 3)] == [None, 10, 3]
    assert [p.weight_bytes for p in with_weights(timings, 10, None)] == [None, 10, None]


def test_the_size_of_a_checkpoint_is_that_of_its_weights(tmp_path: Path) -> None:
    for name, size in (("a.safetensors", 10), ("b.safetensors", 5), ("pytorch_model.bin", 99)):
        (tmp_path / name).write_bytes(bytes(size))
    assert weights_size(tmp_path) == 15
    assert weights_size(tmp_path / "none") is None
    assert weights_size(None) is None
