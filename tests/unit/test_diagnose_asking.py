"""What an engine's log says, what its requests accepted, and what that adds up to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.diagnose.experiments.asking import Answered, Asked, Question, Way, answered
from harness.diagnose.experiments.lengths import length_of, parts_of, share_of
from harness.diagnose.experiments.log_facts import log_facts
from harness.diagnose.experiments.observed import accepted_steps, observe
from harness.diagnose.experiments.toggles import compared, judged
from harness.records import DraftCounts, RequestRecord

VLLM = """\
(EngineCore pid=1) INFO [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: \
model='/m', speculative_config=SpeculativeConfig(method='eagle3', model='/d', num_spec_tokens=3)
(EngineCore pid=1) WARNING [vllm.py:725] Model Runner V2 requires Triton; using the V1 model \
runner instead.
(Worker pid=2) INFO [cpu.py:175] Using CPU_MLA backend.
(Worker pid=2) INFO [llm_base_proposer.py:1440] Detected EAGLE model without its own embed_tokens \
in the checkpoint. Sharing target model embedding weights with the draft model.
(Worker pid=2) INFO [llm_base_proposer.py:1541] Detected EAGLE model with distinct lm_head \
weights. Keeping separate lm_head weights from the target model.
(Worker pid=2) INFO [gpu_model_runner.py:5243] Using auxiliary layers from speculative config: \
(2, 4, 5)
"""
SGLANG = """\
[2026-11-29 23:08:34] server_args={'model_path': '/m', 'speculative_algorithm': 'EAGLE3', \
'speculative_num_steps': 3, 'disable_radix_cache': True, 'kv_cache_dtype': 'auto'}
"""


def test_vllms_log_says_layers_what_is_shared_and_the_method() -> None:
    facts = log_facts(VLLM)
    assert facts["layers"] == "(2, 4, 5)"
    assert facts["embeddings"] == "shared: the drafter has none"
    assert facts["lm_head"] == "the drafter's own"
    assert (facts["method"], facts["k"], facts["runner"]) == ("eagle3", "3", "V1")


def test_sglangs_log_says_the_algorithm_and_the_cache() -> None:
    facts = log_facts(SGLANG)
    assert (facts["method"], facts["k"]) == ("EAGLE3", "3")
    assert facts["prefix_cache"] == "off: radix cache disabled is True"
    assert "layers" not in facts


@pytest.mark.parametrize("whose", ["config", "model"])
def test_vllms_second_runner_says_its_layers_in_other_words(whose: str) -> None:
    line = f"INFO [eagle3_utils.py:27] Using Eagle3 auxiliary layers from {whose}: (2, 4, 5)\n"
    assert log_facts(line)["layers"] == "(2, 4, 5)"


@pytest.mark.parametrize(
    "said",
    [
        "Using CPU_MLA backend.",
        "Using AttentionBackendEnum.CPU_MLA backend.",
        "Using CPU_MLA attention backend out of potential backends: ['CPU_MLA', 'TRITON_MLA'].",
    ],
)
def test_every_wording_of_vllms_attention_is_read(said: str) -> None:
    assert log_facts(f"(Worker pid=2) INFO [cuda.py:507] {said}\n")["attention"] == "CPU_MLA"


def test_weights_that_sglang_leaves_out_are_told_but_for_the_trainers_own() -> None:
    line = "[2026-11-30 15:55:02] Eagle3 MLA: skipping unexpected weight {}\n"
    assert "unknown_weights" not in log_facts(line.format("t2d"))
    facts = log_facts(line.format("t2d") + line.format("midlayer.extra_norm.weight"))
    assert facts["unknown_weights"] == "midlayer.extra_norm.weight"


def test_ranks_that_disagree_on_sharing_are_told_both() -> None:
    other = VLLM.replace("with distinct lm_head", "with lm_head identical")
    assert log_facts(VLLM + other)["lm_head"] == "shared: equal to the target's | the drafter's own"


@given(st.text(max_size=400))
def test_no_log_is_too_strange(text: str) -> None:
    assert all(isinstance(value, str) for value in log_facts(text).values())


def one(question: str, steps: tuple[int, ...], k: int = 3, **fields: Any) -> Answered:
    """An answer whose steps accepted so many, as an engine would tell it."""
    counts = DraftCounts(
        drafts=len(steps),
        drafted=k * len(steps),
        accepted=sum(steps),
        per_position=tuple(sum(n > i for n in steps) for i in range(k)),
        past_end=0,
    )
    tokens = tuple(range(1 + sum(steps) + len(steps)))
    known: dict[str, Any] = {"prompt_tokens": 4, "token_ids": tokens, "counts": counts}
    return Answered(request=f"r{question}{steps}", question=question, steps=steps, **known | fields)


def asked(*answers: Answered, counters: DraftCounts | None = None, **way: Any) -> Asked:
    return Asked(way=Way(name="alone", **way), answers=answers, counters=counters)


def traced(*valid: int, first: int = 5) -> list[Any]:
    """A prefill, then decode steps of so many valid rows."""
    steps = [SimpleNamespace(kind="prefill", valid=first)]
    return [*steps, *(SimpleNamespace(kind="decode", valid=n) for n in valid)]


def test_what_an_engine_accepted_by_its_own_word() -> None:
    rounds = [
        asked(one("a", (3, 0, 2)), one("b", (0, 1))),
        asked(one("a", (3, 0, 2)), concurrency=4),
    ]
    found = observe(rounds, k=3, own={"a": tuple(range(9)), "b": (1, 2)})
    assert found.acceptance.counts.drafts == 8
    assert found.acceptance.length == pytest.approx(1 + 11 / 8)
    assert found.acceptance.low is not None and found.acceptance.low < 1 + 11 / 8
    assert found.first_step is not None and (found.first_step.hits, found.first_step.of) == (2, 3)
    assert found.later_steps is not None and (found.later_steps.hits, found.later_steps.of) == (
        3,
        5,
    )
    assert found.concurrency == 4
    assert found.identical is not None and (found.identical.hits, found.identical.of) == (2, 3)
    assert found.counted_otherwise is None
    assert sum(part.of for part in found.by_position) == 8


def test_counters_that_say_other_than_the_requests_are_told() -> None:
    counters = DraftCounts(drafts=5, drafted=15, accepted=14)
    found = observe([asked(one("a", (3, 0, 2)), one("b", (0, 1)), counters=counters)], k=3)
    assert found.acceptance.counts.accepted == 14
    assert found.counted_otherwise is not None and found.counted_otherwise.accepted == 6


def test_counts_that_the_text_contradicts_are_told() -> None:
    answer = one("a", (1,) * 40)
    half = DraftCounts(drafts=40, drafted=120, accepted=20, past_end=0)
    found = observe([asked(Answered(**{**_fields(answer), "counts": half}))], k=3)
    assert found.counted_otherwise is not None and found.counted_otherwise.accepted == 40


def test_counts_that_the_trace_contradicts_are_told() -> None:
    answer = one("a", (0,) * 40, token_ids=())
    steps = {answer.request: traced(*(4,) * 39)}
    found = observe([asked(answer)], k=3, traces=steps)
    assert found.counted_otherwise is not None and found.counted_otherwise.accepted == 117


def test_a_trace_that_ends_a_step_early_contradicts_nothing() -> None:
    answer = one("a", (3,) * 10)
    steps = {answer.request: traced(*(4,) * 9)}
    assert accepted_steps(steps[answer.request]) == (3,) * 9
    assert observe([asked(answer)], k=3, traces=steps).counted_otherwise is None


def test_a_trace_that_lost_its_last_files_is_told_and_counts_for_nothing() -> None:
    whole, cut, gone = (one(name, (3,) * 10) for name in "abc")
    short = one("d", (), token_ids=(5,))  # its first token ended it: nothing was drafted for it
    steps = {whole.request: traced(*(4,) * 9), cut.request: traced(*(4,) * 8)}
    found = observe([asked(whole, cut, gone, short)], k=3, traces=steps)
    assert found.untraced == 2 and found.counted_otherwise is None
    assert observe([asked(whole)], k=3, traces=steps).untraced == 0
    assert observe([asked(whole)], k=3).untraced is None
    # Steps that nobody but the trace tells are those of whole traces alone.
    bare = [Answered(**{**_fields(a), "steps": None, "counts": None}) for a in (whole, cut)]
    counts = observe([asked(*bare)], k=3, traces=steps).acceptance.counts
    assert (counts.drafts, counts.accepted) == (9, 27)


def test_an_engine_that_counts_nothing_is_counted_by_its_trace() -> None:
    answer = one("a", (2, 1, 0), counts=None)
    bare = Answered(**{**_fields(answer), "steps": None})
    found = observe([asked(bare)], k=3, traces={answer.request: traced(3, 2, 1)})
    assert (found.acceptance.counts.drafts, found.acceptance.counts.accepted) == (3, 3)


def _fields(answer: Answered) -> dict[str, Any]:
    return {name: getattr(answer, name) for name in Answered.__struct_fields__}


def record(**fields: Any) -> RequestRecord:
    base: dict[str, Any] = dict.fromkeys(RequestRecord.__struct_fields__)
    base |= {"cell_id": "c", "index": 0, "prompt_id": "p", "chunk_ns": (), "status": "ok"}
    base |= {"turn": 0, "worker": 0, "tries": 1}
    return RequestRecord(**base | fields)


def test_steps_come_of_chunks_where_they_add_up_to_the_counts() -> None:
    counts = DraftCounts(drafts=2, drafted=6, accepted=3)
    question = Question(name="q", token_ids=(1, 2))
    whole = record(chunk_tokens=(1, 3, 2), acceptance=counts, token_ids=(1,) * 6)
    assert answered(whole, question, "r").steps == (2, 1)
    merged = record(chunk_tokens=(1, 5), acceptance=counts, token_ids=(1,) * 6)
    assert answered(merged, question, "r").steps is None


def test_a_failed_request_keeps_its_reason() -> None:
    lost = record(status="failed", error="HTTP 500")
    found = answered(lost, Question(name="q", token_ids=(1,)), "r")
    assert found.error == "HTTP 500"
    assert asked(found).ok == ()


def test_shares_and_lengths_of_nothing() -> None:
    assert share_of([]) is None
    assert parts_of([], 3) == ()
    assert length_of({}, k=3).length is None


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), min_size=1, max_size=60))
def test_a_share_lies_within_its_interval(trials: list[tuple[str, bool]]) -> None:
    found = share_of(trials)
    assert found is not None and found.share is not None
    assert found.of == len(trials)
    assert found.low is not None and found.high is not None
    assert -1e-9 <= found.low <= found.share <= found.high <= 1 + 1e-9


@given(st.lists(st.floats(0, 1e6), max_size=50), st.integers(1, 5))
def test_parts_hold_every_trial_once(places: list[float], parts: int) -> None:
    found = parts_of([(place, "a", True) for place in places], parts)
    assert sum(part.of for part in found) == len(places)


def many(high: int, low: int, count: int = 12) -> Asked:
    return asked(*(one(f"{i:02d}", (high, low, high, low)) for i in range(count)))


def test_an_ab_tells_which_accepts_more() -> None:
    better, worse = many(3, 2), many(1, 0)
    assert judged(worse, better) == "b"
    assert judged(better, worse) == "a"
    assert judged(better, better) == "same"
    toggle = compared("graphs", ("on", "off"), (worse, better), k=3, cause="drafter_graph")
    assert (toggle.verdict, toggle.cause) == ("b", "drafter_graph")
    assert toggle.length_a.length == pytest.approx(1.5)


def test_an_ab_of_two_questions_says_nothing() -> None:
    assert judged(many(3, 3, 2), many(0, 0, 2)) == "undecided"
    noisy = asked(*(one(f"{i:02d}", (3 if i % 2 else 0,) * 4) for i in range(12)))
    assert judged(noisy, asked(*(one(f"{i:02d}", (1,) * 4) for i in range(12)))) == "undecided"
