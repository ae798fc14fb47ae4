"""The engine as the truth: equal to transformers, whatever is batched and drafted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from reference_models import (
    END,
    ScriptedProposer,
    build_drafter,
    build_target,
    byte_tokenizer,
    greedy,
    load_target,
    prompts,
)

from engines.base import EngineUsageError
from engines.reference.adapter import ReferenceAdapter
from engines.reference.answers import speculative_metrics
from engines.reference.draft import EagleProposer
from engines.reference.engine import Engine
from engines.reference.request import Delta, Request
from engines.reference.sampling import SamplingParams
from engines.reference.tokenizer import Tokenizer
from harness.analyse.requests import past_end
from harness.measure.columns import Drafts, Ints
from harness.measure.told import read_acceptance_of

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
LENGTHS = (1, 2, 17, 40, 90)


class Pair:
    """transformers' model and the engine's, with greedy answers to five prompts."""

    def __init__(self, family: str, folder: Any) -> None:
        changes = {"vocab_size": 300} if family == "bytes" else {}
        self.theirs = build_target("llama" if family == "bytes" else family, folder, **changes)
        self.ours = load_target(folder)
        self.prompts = prompts(*LENGTHS)
        self.answers = [greedy(self.theirs, p, 24, eos_token_id=None) for p in self.prompts]
        self.by_prompt = {tuple(p): a for p, a in zip(self.prompts, self.answers, strict=True)}

    def engine(self, proposer: Any = None, **more: Any) -> Engine:
        options = {"max_len": 256, "slots": 4, "tokenizer": None, **more}
        return Engine(self.ours, proposer=proposer, **options)

    def scripted(self, k: int, right: Callable[[int], int], **more: Any) -> Engine:
        return self.engine(ScriptedProposer(k, self.by_prompt, right), **more)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    return {
        family: Pair(family, tmp_path_factory.mktemp(family)) for family in ("llama", "deepseek")
    }


@pytest.fixture(scope="module")
def llama(pairs: dict[str, Pair]) -> Pair:
    return pairs["llama"]


def _eagle(kind: str, k: int, **more: Any) -> EagleProposer:
    return EagleProposer(build_drafter(kind, **more), k=k, slots=4, length=256, vocab_size=97)


def _counter(engine: Engine, name: str) -> dict[str, float]:
    lines = engine.metrics.text().decode().splitlines()
    samples = (line.rsplit(" ", 1) for line in lines if line.startswith(name))
    return {series: float(value) for series, value in samples}


def _total(engine: Engine, name: str) -> int:
    return int(sum(_counter(engine, name).values()))


@pytest.mark.parametrize("family", ["llama", "deepseek"])
def test_greedy_equals_transformers_alone_and_batched(pairs: dict[str, Pair], family: str) -> None:
    pair = pairs[family]
    for prompt, answer in zip(pair.prompts, pair.answers, strict=True):
        assert pair.engine().generate([prompt], GREEDY)[0].output == answer
    # five prompts in four slots: the last waits and joins a running batch
    done = pair.engine().generate(pair.prompts, GREEDY)
    assert [r.output for r in done] == pair.answers


@pytest.mark.parametrize("family", ["llama", "deepseek"])
@pytest.mark.parametrize("kind", ["llama", "mla"])
@pytest.mark.parametrize("k", range(1, 9))
def test_greedy_with_a_drafter_equals_transformers(
    pairs: dict[str, Pair], family: str, kind: str, k: int
) -> None:
    pair = pairs[family]
    done = pair.engine(_eagle(kind, k)).generate(pair.prompts, GREEDY)
    assert [r.output for r in done] == pair.answers
    alone = pair.engine(_eagle(kind, k)).generate(pair.prompts[2:3], GREEDY)
    assert alone[0].output == pair.answers[2]
    # batching changes no draft either
    assert alone[0].drafts is not None and done[2].drafts is not None
    assert alone[0].drafts.accepted == done[2].drafts.accepted


@pytest.mark.parametrize("family", ["llama", "deepseek"])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_partly_right_drafts_leave_the_output_as_it_is(
    pairs: dict[str, Pair], family: str, k: int
) -> None:
    pair = pairs[family]
    for right in (lambda _: k, lambda step: step % (k + 1), lambda _: 0):
        engine = pair.scripted(k, right)
        done = engine.generate(pair.prompts, GREEDY)
        assert [r.output for r in done] == pair.answers
        for request in done:
            log = request.drafts
            assert log is not None
            whole = log.accepted[:-1]  # the last step is cut by max_tokens
            assert whole == [min(right(step), k) for step in range(len(whole))]
            # every token is the prefill's, an accepted draft or a verify step's own, which the
            # last step loses where it is cut
            given = sum(log.accepted) - log.past_end
            lost = 1 + given + len(log.accepted) - len(request.output)
            assert lost == 1 if log.past_end else lost in (0, 1)


def test_the_drafter_sees_what_an_offline_walk_sees(llama: Pair) -> None:
    """Drafts of the engine equal the drafter run by hand over the whole sequence, each step."""
    drafter = build_drafter("llama")
    prompt = llama.prompts[2]
    seen: list[list[int]] = []

    class Spy(EagleProposer):
        def propose(self, *args: Any) -> Any:
            drafts, chances = super().propose(*args)
            seen.append(drafts[0].tolist())
            return drafts, chances

    spy = Spy(drafter, k=3, slots=4, length=256, vocab_size=97)
    request = llama.engine(spy).generate([prompt], GREEDY)[0]
    tokens = prompt + request.output
    aux = llama.engine().capture(tokens, drafter.spec.aux_layers).flatten(1)
    assert request.drafts is not None
    end = len(prompt) + 1  # tokens known when the step drafts
    for drafts, accepted in zip(seen, request.drafts.accepted, strict=True):
        assert drafts == _draft_by_hand(drafter, tokens[:end], aux[: end - 1], 3)
        end += accepted + 1


def _draft_by_hand(drafter: Any, tokens: list[int], aux: torch.Tensor, k: int) -> list[int]:
    """No cache: the whole sequence again for each draft (hidden of the target, then its own)."""
    hidden = drafter.fuse(aux)
    ids = torch.tensor(tokens[1:])
    drafts: list[int] = []
    for _ in range(k):
        q, key, value, residual = drafter.project(
            drafter.embed(ids), hidden, torch.arange(len(ids))
        )
        group = q.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, key) * drafter.scale
        causal = torch.ones(len(ids), len(ids)).tril().bool()
        weights = scores.masked_fill(~causal, -torch.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, value)
        recurrent, normed = drafter.finish(mixed, residual)
        drafts.append(int(drafter.to_target(drafter.logits(normed[-1]).argmax())))
        hidden = torch.cat((hidden, recurrent[-1:]))
        ids = torch.cat((ids, torch.tensor(drafts[-1:])))
    return drafts


def test_a_stop_token_inside_an_accepted_run_ends_it_there(llama: Pair) -> None:
    prompt, answer = llama.prompts[2], llama.answers[2]
    stop = answer[6]
    at = answer.index(stop)
    params = SamplingParams(max_tokens=24, temperature=0, stop_token_ids=(stop,), ignore_eos=True)
    engine = llama.scripted(8, lambda _: 8)
    request = engine.generate([prompt], params)[0]
    assert request.output == answer[: at + 1]
    assert (request.finish_reason, request.stop_reason) == ("stop", stop)
    # prefill gave token 0, the one verify step tokens 1 to 8 and its own: cut behind `at`
    assert request.drafts is not None
    assert request.drafts.accepted == [8] and request.drafts.past_end == 8 - at
    assert _total(engine, "vllm:spec_decode_num_accepted_tokens_total") == 8
    assert _total(engine, "reference:spec_decode_num_accepted_past_end_tokens_total") == 8 - at
    assert _total(engine, "vllm:spec_decode_num_draft_tokens_total") == 8
    assert _total(engine, "vllm:spec_decode_num_drafts_total") == 1
    assert _total(engine, "vllm:generation_tokens_total") == at + 1


def test_the_models_end_token_has_no_stop_reason_and_ignore_eos_passes_it(llama: Pair) -> None:
    prompt, answer = llama.prompts[3], llama.answers[3]
    engine = llama.scripted(3, lambda _: 3)
    engine.end_ids = frozenset([answer[4]])
    at = answer.index(answer[4])
    params = SamplingParams(max_tokens=24, temperature=0)
    request = engine.generate([prompt], params)[0]
    assert request.output == answer[: at + 1]
    assert (request.finish_reason, request.stop_reason) == ("stop", None)
    engine = llama.scripted(3, lambda _: 3)
    engine.end_ids = frozenset([answer[4]])
    assert engine.generate([prompt], GREEDY)[0].output == answer


def test_min_tokens_forbids_the_end_until_then(llama: Pair) -> None:
    prompt, answer = llama.prompts[3], llama.answers[3]
    params = SamplingParams(max_tokens=24, temperature=0, min_tokens=10)
    outputs = []
    for proposer in (None, ScriptedProposer(3, llama.by_prompt, lambda _: 3)):
        engine = llama.engine(proposer)
        engine.end_ids = frozenset([answer[4]])
        outputs.append(engine.generate([prompt], params)[0].output)
        assert answer[4] not in outputs[-1][:10]
    assert outputs[0] == outputs[1]


def test_the_context_ends_a_request_by_length(llama: Pair) -> None:
    for engine in (
        llama.engine(max_len=100),
        llama.scripted(8, lambda _: 8, max_len=100),
    ):
        request = engine.generate([llama.prompts[4]], GREEDY)[0]  # 90 tokens of prompt
        assert request.output == llama.answers[4][:10]
        assert request.finish_reason == "length"
    with pytest.raises(ValueError, match="does not fit"):
        llama.engine(max_len=90).generate([llama.prompts[4]], GREEDY)


@pytest.mark.parametrize("k", [0, 3])
def test_logprobs_equal_transformers(pairs: dict[str, Pair], k: int) -> None:
    pair = pairs["deepseek"]
    prompt, answer = pair.prompts[3], pair.answers[3]
    params = SamplingParams(
        max_tokens=24, temperature=0, ignore_eos=True, logprobs=4, prompt_logprobs=2
    )
    engine = pair.scripted(k, lambda step: step % 4) if k else pair.engine()
    request = engine.generate([prompt], params)[0]
    with torch.no_grad():
        logits = pair.theirs(torch.tensor([prompt + answer])).logits[0]
    expected = logits.log_softmax(-1)
    for index, scored in enumerate(request.logprobs):
        row = expected[len(prompt) - 1 + index]
        assert scored.token == answer[index] and scored.rank == 1
        assert scored.logprob == pytest.approx(float(row[scored.token]), abs=1e-4)
        best = row.topk(4)
        assert [t for t, _ in scored.top] == best.indices.tolist()
        assert [p for _, p in scored.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert len(request.logprobs) == 24
    assert request.prompt_logprobs is not None and request.prompt_logprobs[0] is None
    assert len(request.prompt_logprobs) == len(prompt)
    for index, score in enumerate(request.prompt_logprobs[1:], 1):
        assert score is not None and score.token == prompt[index]
        row = expected[index - 1]
        assert score.logprob == pytest.approx(float(row[prompt[index]]), abs=1e-4)
        assert score.rank == int((row > row[prompt[index]]).sum()) + 1


def test_a_long_prompt_goes_through_in_chunks(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.reference.engine.PREFILL_CHUNK", 13)
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, prompt_logprobs=0)
    engine = llama.engine(_eagle("llama", 3))
    request = engine.generate([llama.prompts[4]], params)[0]
    assert request.output == llama.answers[4]
    assert request.prompt_logprobs is not None
    tokens = [s.token for s in request.prompt_logprobs if s is not None]
    assert tokens == llama.prompts[4][1:]


def test_counters_are_the_sums_of_the_requests_own_figures(llama: Pair) -> None:
    engine = llama.scripted(3, lambda step: (3, 1, 2, 0)[step % 4])
    done = engine.generate(llama.prompts, GREEDY)
    logs = [r.drafts for r in done if r.drafts is not None]
    accepted = [a for log in logs for a in log.accepted]
    base = "vllm:spec_decode_num"
    assert _total(engine, f"{base}_drafts_total") == len(accepted) > 20
    assert _total(engine, f"{base}_draft_tokens_total") == 3 * len(accepted)
    assert _total(engine, f"{base}_accepted_tokens_total") == sum(accepted)
    by_position = _counter(engine, f"{base}_accepted_tokens_per_pos")
    for position in range(3):
        value = next(v for key, v in by_position.items() if f'position="{position}"' in key)
        assert value == sum(a > position for a in accepted)
    histograms = [log.histogram() for log in logs]
    assert sum(map(sum, histograms)) == len(accepted)
    assert sum(j * n for h in histograms for j, n in enumerate(h)) == sum(accepted)
    assert _total(engine, "vllm:generation_tokens_total") == sum(len(r.output) for r in done)
    assert _total(engine, "vllm:prompt_tokens_total") == sum(LENGTHS)
    length = 'vllm:request_success_total{engine="0",finished_reason="length"'
    assert _total(engine, length) == 5


def test_what_stood_behind_the_end_follows_from_the_counts(llama: Pair) -> None:
    """The rule that is used for engines that do not tell it, held against one that does."""
    engine = llama.scripted(3, lambda _: 3)
    seen = set()
    for tokens in range(1, 14):
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        (done,) = engine.generate([llama.prompts[2]], params)
        payload = {"metrics": {"speculative_decoding": speculative_metrics(done)}}
        told = read_acceptance_of(ReferenceAdapter(), [payload])
        assert told is not None and told.past_end is not None
        silent = msgspec.structs.replace(told, past_end=None)
        found = past_end(Drafts.of([silent]), Ints.of([len(done.output)]))
        assert found.python() == [told.past_end]
        seen.add(told.past_end)
    assert seen == {0, 1, 2}


def test_a_cancelled_request_frees_its_slot(llama: Pair) -> None:
    engine = llama.engine(_eagle("mla", 2), slots=2)
    requests = [Request(p, GREEDY) for p in llama.prompts[:4]]
    for request in requests:
        engine.submit(request)
    engine.step()
    assert engine.running == requests[:2] and list(engine.waiting) == requests[2:]
    engine.cancel(requests[0])
    engine.cancel(requests[2])
    engine.step()
    assert engine.running == [requests[1], requests[3]]
    assert requests[0].finish_reason == requests[2].finish_reason == "abort"
    while not all(r.finished for r in requests):
        engine.step()
    # the survivors, one of them moved into the hole, are undisturbed
    assert requests[1].output == llama.answers[1]
    assert requests[3].output == llama.answers[3]
    assert _total(engine, 'vllm:request_success_total{engine="0",finished_reason="abort"') == 2
    assert _total(engine, "vllm:num_requests_running") == 0


def test_deltas_carry_whole_steps_and_add_up(llama: Pair) -> None:
    deltas: list[Delta] = []
    engine = llama.scripted(3, lambda _: 3)
    request = Request(llama.prompts[2], GREEDY, on_delta=deltas.append)
    engine.submit(request)
    while not request.finished:
        engine.step()
    assert [t for d in deltas for t in d.token_ids] == llama.answers[2]
    assert [len(d.token_ids) for d in deltas] == [1, 4, 4, 4, 4, 4, 3]
    assert [d.finish_reason for d in deltas] == [None] * 6 + ["length"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Tokenizer]:
    folder = tmp_path_factory.mktemp("bytes")
    pair = Pair("bytes", folder)
    byte_tokenizer(folder)
    return pair, Tokenizer(folder)


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_inside_an_accepted_run(written: Any, k: int, include: bool) -> None:
    pair, tokenizer = written
    # make the model write this text: an oracle cannot, so the scripted answer is the model's own
    prompt, answer = pair.prompts[3], pair.answers[3]
    text = tokenizer.decode(answer)
    stop = text[5:7]
    cut = text.index(stop)
    params = SamplingParams(
        max_tokens=24, temperature=0, ignore_eos=True, stop=(stop,), include_stop=include
    )
    proposer = ScriptedProposer(k, pair.by_prompt, lambda _: k) if k else None
    deltas: list[Delta] = []
    engine = pair.engine(proposer, tokenizer=tokenizer)
    request = Request(prompt, params, tokenizer=tokenizer, on_delta=deltas.append)
    engine.submit(request)
    while not request.finished:
        engine.step()
    expected = text[: cut + (len(stop) if include else 0)]
    assert request.text == expected == "".join(d.text for d in deltas)
    assert (request.finish_reason, request.stop_reason) == ("stop", stop)
    assert request.output == answer[: len(request.output)]
    assert stop in tokenizer.decode(request.output)
    assert stop not in tokenizer.decode(request.output[:-1])
    if request.drafts is not None:
        log = request.drafts
        given = sum(log.accepted) - log.past_end
        lost = 1 + given + len(log.accepted) - len(request.output)
        assert lost == 1 if log.past_end else lost in (0, 1)


def test_an_end_token_is_in_the_ids_but_not_in_the_text(written: Any) -> None:
    pair, tokenizer = written
    engine = pair.engine(tokenizer=tokenizer)
    answer = pair.answers[3]
    engine.end_ids = frozenset([answer[3]])
    request = engine.generate([pair.prompts[3]], SamplingParams(max_tokens=9, temperature=0))[0]
    at = answer.index(answer[3])
    assert request.output == answer[: at + 1]
    assert request.text == tokenizer.decode(answer[:at])
    assert END not in request.output


def test_a_drafter_with_too_few_positions_is_refused() -> None:
    drafter = build_drafter("llama", max_position_embeddings=128)
    with pytest.raises(EngineUsageError, match="--max-model-len 128"):
        EagleProposer(drafter, k=3, slots=2, length=256, vocab_size=97)


def test_a_failure_ends_every_request_and_is_kept(llama: Pair) -> None:
    engine = llama.engine()
    deltas: list[Delta] = []
    request = Request(llama.prompts[0], GREEDY, on_delta=deltas.append)
    engine.submit(request)
    engine.model = None  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        engine.run()
    assert engine.failure is not None and "AttributeError" in engine.failure
    assert [d.finish_reason for d in deltas] == ["error"]
    late = Request(llama.prompts[0], GREEDY, on_delta=deltas.append)
    engine.submit(late)
    assert late.finish_reason == "error"


@pytest.mark.parametrize("length", [1.0, 2.5, 4.0])
def test_forced_acceptance_reaches_the_length_whatever_the_drafts_are(
    llama: Pair, length: float
) -> None:
    engine = llama.scripted(3, lambda step: 0, forced_length=length)  # no draft is right
    drafts = [r.drafts for r in engine.generate(llama.prompts, GREEDY)]
    steps = [n for log in drafts if log is not None for n in log.accepted]
    assert sum(steps) / len(steps) + 1 == pytest.approx(length, abs=0.3)
    assert set(steps) <= {int(length) - 1, math.ceil(length) - 1}
