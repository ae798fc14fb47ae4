"""The expectation from captured states beside the reference engine, on the demo pair's drafter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from capture_samples import demo_samples, write_samples
from torch import Tensor

from drafters.checkpoint import load_spec
from engines.reference.config import read_config
from engines.reference.loading import load_engine
from engines.reference.sampling import SamplingParams
from harness.errors import UsageError
from training.capture import stage as capture
from training.evaluate import DraftCounts, draft_everywhere, walk_all
from training.evaluation import stage as evaluate
from training.evaluation.records import Offline
from training.export import evaluated_prompts
from training.files import file_digest, read_record
from training.folders import best_checkpoint, stage_folder
from training.gate import Check, Gate, write_gate
from training.plan import TrainingPlan, read_plan
from training.samples import Sample, read_samples
from training.states import SampleStates
from training.targets import target_digest, target_identity
from training.train.feed import load_row
from training.train.rows import Row
from training.train.serving import _counted
from training.train.validation import spans
from training.unroll import drafted_slots


def plan_for(layers: Sequence[int], *sets: str) -> TrainingPlan:
    more = (
        "generate.max_tokens=40",
        f"capture.aux_layers={','.join(map(str, layers))}",
        "capture.dtype=float32",
        "train.held_out=0.5",
        "evaluate.offline=states",
    )
    return read_plan("demo", [*more, *sets])


def until_end(sample: Sample, ends: Sequence[int]) -> Sample:
    """The sample up to its answer's first end token, as an engine answers."""
    places = (n for n, i in enumerate(sample.token_ids) if n >= sample.loss_from and i in ends)
    end = next(places, len(sample.token_ids))
    return msgspec.structs.replace(sample, token_ids=sample.token_ids[: end + 1])


def training_of(demo_pair: Path, folder: Path, count: int, *sets: str) -> Path:
    """A training of greedy samples and their states whose best is the demo pair's drafter."""
    ends = read_config(demo_pair / "target").eos_token_ids
    samples = [until_end(s, ends) for s in demo_samples(demo_pair, count, tokens=40)]
    write_samples(folder, samples)
    drafter = demo_pair / "drafter-mla"
    assert capture.run(plan_for(load_spec(drafter).aux_layers, *sets), folder).passed
    shutil.copytree(drafter, best_checkpoint(folder))
    output = file_digest(best_checkpoint(folder) / "model.safetensors")
    made = (Check(name="made", passed=True),)
    write_gate(stage_folder(folder, "train"), Gate.of("train", made, output=output, inputs={}))
    return folder


@pytest.fixture(scope="module")
def work(demo_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training_of(demo_pair, tmp_path_factory.mktemp("states") / "training", 24)


def layers_of(work: Path) -> tuple[int, ...]:
    return load_spec(best_checkpoint(work)).aux_layers


def result(work: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((work / "evaluate" / "evaluation.json").read_text())
    return found


def test_the_engine_accepts_what_the_states_foretell_to_the_draft(work: Path) -> None:
    """The answers end k tokens early, so that what lies behind their end is known in both."""
    torch.set_num_threads(1)
    assert evaluate.run(plan_for(layers_of(work)), work).passed
    found = result(work)
    offline, reference = found["rows"]
    for key in ("drafts", "rate", "length", "per_position"):
        assert offline[key] == reference[key]
    assert offline["length"] > 1.5 and reference["verdict"] == "as expected, to the draft"
    assert reference["same_outputs"] == reference["answered"] == 12
    assert found["offline"]["walked_from"] == "states" and found["offline"]["greedy"]
    assert found["offline"]["proof"] > 0.99
    walked = {a["prompt_id"]: a for a in found["offline"]["answers"]}
    for answer in found["online"][0]["answers"]:
        expected = walked[answer["prompt_id"]]
        assert answer["token_ids"] == expected["token_ids"]
        for key in ("drafts", "accepted", "per_position"):
            assert answer["counts"][key] == expected["counts"][key]
    text = (work / "evaluate" / "report.txt").read_text()
    assert "offline: the captured states of the held-out samples: evaluate.offline says" in text


@pytest.mark.full
def test_states_in_8_bits_foretell_what_those_in_16_do(demo_pair: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    lengths = {}
    for dtype in ("bfloat16", "fp8"):
        sets = (f"capture.dtype={dtype}", "evaluate.prompts=48", "evaluate.largest_gap=0.1")
        folder = training_of(demo_pair, tmp_path / dtype, 96, *sets)
        assert evaluate.run(plan_for(layers_of(folder), *sets), folder).passed
        offline = result(folder)["rows"][0]
        assert offline["drafts"] > 300
        lengths[dtype] = offline["length"]
    assert abs(lengths["fp8"] / lengths["bfloat16"] - 1) <= 0.005, lengths


def test_a_target_that_the_engine_does_not_load_is_evaluated_all_the_same(
    work: Path, demo_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its config says INT4, as Kimi-K2.5's does: embedding, head and norm are all that is read."""
    target, other = tmp_path / "target", tmp_path / "training"
    shutil.copytree(demo_pair / "target", target)
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "bits": 4}
    (target / "config.json").write_text(json.dumps(config))
    shutil.copytree(work, other, ignore=shutil.ignore_patterns("evaluate"))
    index = json.loads((other / "states" / "index.json").read_text())
    index["made_from"]["target"] = target_digest(target_identity(target))
    (other / "states" / "index.json").write_text(json.dumps(index))
    sets = (f"target.path={target}", "evaluate.offline=auto", "evaluate.engines=")
    plan = plan_for(layers_of(work), *sets)
    assert evaluate.run(plan, other).passed
    offline = read_record(other / "evaluate" / "offline.json", Offline, "")
    assert offline is not None and offline.walked_from == "states" and offline.greedy
    assert "quantised weights are not served" in offline.why
    assert "quantised weights are not served" in capsys.readouterr().err
    assert "quantised" in (other / "evaluate" / "report.txt").read_text()
    held, expected = evaluated_prompts(plan, other, offline, context=4096)
    first = offline.answers[:8]
    assert [h.prompt_id for h in held] == [w.prompt_id for w in first]
    drafted = sum(w.counts.drafted or 0 for w in first)
    assert expected == pytest.approx(sum(w.counts.accepted for w in first) / drafted)
    assert evaluate.run(plan, other).passed and "finished already" in capsys.readouterr().err
    engine = plan_for(layers_of(work), *sets[:1], "evaluate.offline=engine")
    with pytest.raises(UsageError, match=r"quantised.*evaluate\.offline=states"):
        evaluate.run(engine, other)


def test_states_of_other_layers_or_another_target_are_refused(work: Path, tmp_path: Path) -> None:
    other = tmp_path / "training"
    shutil.copytree(work, other, ignore=shutil.ignore_patterns("evaluate"))
    plan = plan_for(layers_of(work), "evaluate.engines=reference")
    index = other / "states" / "index.json"
    told = json.loads(index.read_text())
    for change, said in (
        ({"made_from": {**told["made_from"], "target": "0" * 64}}, "another target"),
        ({"layout": {**told["layout"], "aux_layers": [1, 2, 3]}}, r"captured were \[1, 2, 3\]"),
    ):
        index.write_text(json.dumps({**told, **change}))
        with pytest.raises(UsageError, match=said):
            evaluate.run(plan, other)
    assert not (other / "evaluate" / "offline.json").exists()


def likeliest(logits: Tensor, params: object) -> Tensor:
    """All probability on the likeliest token: drafts are then taken as vLLM and SGLang do."""
    return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)


def test_sampled_text_is_walked_as_speculative_sampling_accepts(
    demo_pair: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over an engine's own sampled answers the walk finds the engine's own counts."""
    monkeypatch.setattr("engines.reference.draft.distributions", likeliest)
    target, drafter = demo_pair / "target", best_checkpoint(work)
    engine = load_engine(target, drafter=drafter, k=3, max_len=256, slots=8, seed=1)
    prompts = [list(s.token_ids[: s.loss_from]) for s in read_samples(work / "samples")][:8]
    params = SamplingParams(max_tokens=32, temperature=1.0, ignore_eos=True)
    requests = engine.generate(prompts, params)
    layers = (*layers_of(work), engine.model.config.layers)
    found = engine_counts = DraftCounts(drafts=0, drafted=0, accepted=0, per_position=(0,) * 3)
    for prompt, request in zip(prompts, requests, strict=True):
        tokens = prompt + request.output
        states = engine.capture(tokens, layers)
        sample = SampleStates(
            sample_id="s", category=None, token_ids=torch.tensor(tokens), loss_from=len(prompt),
            aux=states[:, :-1].flatten(1), last_normed=states[:, -1],
        )  # fmt: skip
        whole = Row(number=0, indices=(0,), tokens=len(tokens))
        row = load_row(whole, [sample], engine.model.config.vocab_size)
        slots = drafted_slots(row.captured.batch, 0)
        drafts = draft_everywhere(engine.proposer.drafter, row.captured, 3, slots=slots)
        found = found + walk_all(drafts, row.captured.batch.ids, spans(row))
        engine_counts = engine_counts + _counted(request, 3)
    assert found == engine_counts
    assert 0 < found.accepted < found.drafted and found.drafts > 50
