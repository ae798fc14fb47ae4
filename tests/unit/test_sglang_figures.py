"""What the SGLang adapter reads: phases and failures in a log, counters, a request's figures."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.phases import PhaseTracker
from engines.sglang import SglangAdapter

LOG = """\
[2026-01-01 10:00:00] server_args={'model_path': 'x'}
[2026-01-01 10:00:03] Init parallel begin.
[2026-01-01 10:00:03] Init parallel ends. elapsed=0.02 s
[2026-01-01 10:00:05] Load weight begin. avail mem=20.49 GB
[2026-01-01 10:00:06] Load weight end. elapsed=0.12 s, type=DeepseekV3ForCausalLM
[2026-01-01 10:00:06] Load weight begin. avail mem=20.45 GB
[2026-01-01 10:00:07] Load weight end. elapsed=0.01 s, type=Eagle3DeepseekV2ForCausalLM
[2026-01-01 10:00:07] KV Cache is allocated. dtype: torch.float32, #tokens: 16384
[2026-01-01 10:00:07] Memory pool end. avail mem=20.35 GB
[2026-01-01 10:00:08] Capture draft decode CUDA graph begin. backend=full, bs=[1, 2]
[2026-01-01 10:00:09] Capture draft decode CUDA graph end. elapsed=1.00 s
[2026-01-01 10:00:09] max_total_num_tokens=16384, chunked_prefill_size=4096
[2026-01-01 10:00:09] Engine startup timings (s): load_weight=0.13
[2026-01-01 10:00:10] The server is fired up and ready to roll!
"""


def test_phases_follow_the_log() -> None:
    tracker = PhaseTracker(SglangAdapter.phases)
    for second, line in enumerate(LOG.splitlines(), start=1):
        tracker.feed(line, float(second))
    assert [timing.phase for timing in tracker.timings(None)] == [
        "launch",
        "start_workers",
        "distributed",
        "import_models",
        "load_weights",
        "weights_loaded",
        "load_weights",
        "weights_loaded",
        "kv_cache",
        "memory_pool",
        "graph_capture",
        "graph_captured",
        "scheduler",
        "warmup",
        "ready",
    ]


SCHEDULER_DEATH = """\
[2026-01-01 10:00:01] Responses API disabled: failed (ModuleNotFoundError: No module named 'x')
[2026-01-01 10:00:07] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 6368, in run_scheduler_process
    scheduler.run_event_loop()
RuntimeError: Expected size for first two dimensions of batch2 tensor to be: [4, 128]

[2026-01-01 10:00:07] SIGQUIT received. signum=None, frame=None. It usually means one child failed.
Traceback (most recent call last):
  File "launch_server.py", line 1
EOFError: the pipe closed
"""
CHAINED = """\
Traceback (most recent call last):
  File "hub.py", line 1
huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "hub.py", line 595
OSError: /nowhere is no model
"""


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (
            SCHEDULER_DEATH,
            "RuntimeError: Expected size for first two dimensions of batch2 tensor to be: [4, 128]",
        ),
        (CHAINED, "OSError: /nowhere is no model"),
        (
            "usage: sglang serve [-h]\nsglang serve: error: unrecognized arguments: --bogus 3\n",
            "unrecognized arguments: --bogus 3",
        ),
        (
            "Traceback (most recent call last):\nhub.errors.FieldError: Invalid 'experts':\n"
            "    TypeError: expected int, got NoneType\n",
            "hub.errors.FieldError: Invalid 'experts': TypeError: expected int, got NoneType",
        ),
        (LOG, None),
        ("", None),
    ],
)
def test_failure_cause(log: str, cause: str | None) -> None:
    assert SglangAdapter().failure_cause(log) == cause


METRICS = """\
# HELP sglang:spec_verify_calls_total Number of speculative decoding verification calls.
# TYPE sglang:spec_verify_calls_total counter
sglang:spec_verify_calls_total{engine_type="unified",model_name="m"} 7.0
# HELP sglang:generation_tokens_total x
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{is_streaming="true",model_name="m"} 28.0
sglang:generation_tokens_total{is_streaming="false",model_name="m"} 8.0
# HELP sglang:prompt_tokens_total x
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{is_streaming="true",model_name="m"} 11.0
# HELP sglang:num_requests_total x
# TYPE sglang:num_requests_total counter
sglang:num_requests_total{is_streaming="true",model_name="m"} 2.0
# HELP sglang:num_running_reqs x
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m",pp_rank="0",tp_rank="0",dp_rank="0"} 1.0
sglang:num_running_reqs{model_name="m",pp_rank="0",tp_rank="0",dp_rank="1"} 2.0
sglang:num_running_reqs{model_name="m",pp_rank="0",tp_rank="1",dp_rank="0"} 1.0
# HELP sglang:num_queue_reqs x
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{model_name="m",pp_rank="0",tp_rank="0"} 0.0
"""


def test_counters_sum_labels_and_data_parallel_ranks_only() -> None:
    counters = SglangAdapter().counters(METRICS)
    assert counters is not None
    assert (counters.drafts, counters.generation_tokens, counters.prompt_tokens) == (7, 36, 11)
    assert (counters.requests_finished, counters.running, counters.waiting) == (2, 3, 0)
    assert counters.drafted is None and counters.accepted is None
    assert counters.accepted_per_position is None


def test_data_parallel_attention_is_summed_and_its_ranks_told() -> None:
    # Rank 1 of the tensor-parallel group is the first of data-parallel rank 1.
    text = "".join(
        f'sglang:{name}{{dp_rank="{d}",tp_rank="{t}"}} {value}\n'
        for name, of in (("num_running_reqs", (3, 4)), ("generation_tokens_total", (30, 40)))
        for d, t, value in ((0, 0, of[0]), (1, 1, of[1]), (1, 2, of[1]))
    )
    counters = SglangAdapter().counters(text)
    assert counters is not None
    assert (counters.running, counters.generation_tokens) == (7, 70)
    told = [(r.rank, r.generation_tokens, r.drafts) for r in counters.ranks]
    assert told == [("dp_rank=0", 30, None), ("dp_rank=1", 40, None)]


def test_counters_of_a_baseline_have_no_drafts_and_foreign_text_is_none() -> None:
    adapter = SglangAdapter()
    lines = [line for line in METRICS.splitlines() if "spec_verify" not in line]
    counters = adapter.counters("\n".join(lines) + "\n")
    assert counters is not None and counters.drafts is None
    assert adapter.counters("# TYPE other gauge\nother 1\n") is None


def test_request_fields_ask_for_ids_only_where_they_can_be_streamed() -> None:
    adapter = SglangAdapter()
    assert adapter.request_fields(speculative=False) == {}
    assert adapter.request_fields(speculative=True) == {"return_spec_tokens_details": True}
    assert adapter.request_fields(speculative=False, endpoint="completions") == {
        "return_token_ids": True
    }


def _payloads(details: Any) -> list[dict[str, Any]]:
    return [
        {"choices": [{"text": "a"}], "usage": None},
        {"choices": [], "usage": None, "sglext": {"spec_tokens_details": details}},
        {"choices": [], "usage": {"completion_tokens": 48}},
    ]


def test_request_acceptance_leaves_the_prefills_token_out() -> None:
    # 48 tokens of 38 verify steps: SGLang says length 48/38, the drafts say 1 + 9/38 = 47/38.
    details = {
        "spec_accept_length": 48 / 38,
        "spec_num_correct_drafts": 9,
        "spec_num_proposed_drafts": 114,
        "spec_verify_ct": 38,
        "spec_correct_drafts_histogram": [30, 7, 1],
    }
    found = SglangAdapter().request_acceptance(_payloads(details))
    assert found is not None
    assert (found.drafts, found.drafted, found.accepted) == (38, 114, 9)
    assert found.histogram == (30, 7, 1, 0)
    assert 1 + found.accepted / found.drafts == pytest.approx(47 / 38)
    assert SglangAdapter().request_acceptance(_payloads([details])) == found


@pytest.mark.parametrize("details", [None, {}, [], {"spec_verify_ct": 0}])
def test_request_acceptance_of_an_answer_without_verify_steps_is_none(details: Any) -> None:
    assert SglangAdapter().request_acceptance(_payloads(details)) is None
    assert SglangAdapter().request_acceptance([]) is None


@given(st.integers(1, 8), st.lists(st.integers(0, 8), min_size=1, max_size=50))
def test_request_acceptance_agrees_with_the_steps_it_was_made_of(k: int, steps: list[int]) -> None:
    steps = [min(step, k) for step in steps]
    histogram = [steps.count(j) for j in range(max(steps) + 1)]
    details = {
        "spec_num_correct_drafts": sum(steps),
        "spec_num_proposed_drafts": k * len(steps),
        "spec_verify_ct": len(steps),
        "spec_correct_drafts_histogram": histogram,
    }
    found = SglangAdapter().request_acceptance(_payloads(details))
    assert found is not None and found.histogram is not None
    assert len(found.histogram) == k + 1 and sum(found.histogram) == found.drafts
    assert sum(j * n for j, n in enumerate(found.histogram)) == found.accepted == sum(steps)


def test_a_histogram_that_contradicts_the_steps_is_dropped() -> None:
    details = {"spec_verify_ct": 5, "spec_num_proposed_drafts": 15, "spec_num_correct_drafts": 2}
    found = SglangAdapter().request_acceptance(_payloads(details))
    assert found is not None and found.histogram is None and found.accepted == 2
