"""A checkpoint that says otherwise than it was trained is read best the way it was trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from diagnose_planted import drafter_of, prompts_of, subject_of, target_engine
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from drafters.checkpoint import save
from drafters.eagle3 import Eagle3Drafter
from engines.reference.engine import Engine
from harness.diagnose.experiments.expected import expect
from harness.diagnose.experiments.figures import length, paired_gain
from harness.diagnose.experiments.known import (
    Knowledge,
    declared,
    hidden_states,
    know,
    loaded_target,
)
from harness.diagnose.experiments.wanted import (
    _other_target,
    _trained,
    layer_readings,
    want,
)
from harness.diagnose.readings import AS_DECLARED, reading_of
from harness.records import DraftCounts
from training.samples import Sample

DRAFTED = 500


@pytest.fixture(scope="module")
def engine(demo_pair: Path) -> Engine:
    torch.set_num_threads(1)
    return target_engine(demo_pair)


@pytest.fixture(scope="module")
def knowledge(demo_pair: Path, engine: Engine) -> Knowledge:
    return know(subject_of(demo_pair), prompts_of(engine, demo_pair, 8), engine=engine)


def reread(knowledge: Knowledge, folder: Path) -> Knowledge:
    """The same texts with the drafter of another folder."""
    subject = msgspec.structs.replace(knowledge.subject, drafter=str(folder))
    drafter, named = declared(subject, knowledge.engine)
    return Knowledge(
        subject=subject,
        engine=knowledge.engine,
        drafter=drafter,
        texts=knowledge.texts,
        layers_named=named,
        greedy=True,
    )


@pytest.mark.parametrize(("cores", "own", "used"), [(2, 2, 1), (8, 4, 4), (8, 8, 7), (1, 1, 1)])
def test_a_core_is_left_to_the_engine_that_is_served(
    cores: int, own: int, used: int, demo_pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads on two cores that an engine works on took forty times as long as one."""
    before = torch.get_num_threads()
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    try:
        torch.set_num_threads(own)
        loaded_target(subject_of(demo_pair), 64)
        assert torch.get_num_threads() == used
    finally:
        torch.set_num_threads(before)


def test_what_is_known_is_what_the_target_computes(knowledge: Knowledge, engine: Engine) -> None:
    model = engine.model
    for text in knowledge.texts[:2]:
        states = text.states
        ids = torch.tensor(text.tokens)
        assert torch.equal(states.inputs[0], model.embedding[ids])
        assert torch.allclose(
            torch.nn.functional.rms_norm(
                states.inputs[-1], (192,), model.norm, model.config.norm_eps
            ),
            states.normed,
            atol=1e-5,
        )
        again = engine.capture(text.tokens, (2, 4, 5))
        assert torch.equal(states.aux((2, 4, 5)), again.flatten(1))
        # what a layer adds is its attention's part and its feed-forward's
        for layer in range(knowledge.layers):
            rest = states.branch(layer) - states.mlp[layer]
            assert 0 < rest.norm() < 3 * states.branch(layer).norm()
        begin = len(text.prompt)
        assert knowledge.choice(states)[begin - 1 : text.end - 1].tolist() == text.answer
    assert not hasattr(engine.model.layers[-1], "kept")  # nothing is left hanging on the model
    longer = hidden_states(engine, knowledge.texts[0].tokens)
    assert torch.equal(longer.inputs, knowledge.texts[0].states.inputs)


def test_a_healthy_drafter_wants_to_be_read_as_declared(knowledge: Knowledge) -> None:
    found = want(knowledge)
    own = next(fit for fit in found.readings if fit.reading == AS_DECLARED)
    assert own.gain == 0 and own.loss == min(fit.loss or 9 for fit in found.readings)
    for fit in found.readings:
        assert fit.gain_low is None or fit.gain_low <= 0.02, fit
        reading_of(fit.reading)
    assert found.unnormed_less is not None and found.unnormed_less < 0
    for kept in (found.without_tokens, found.without_states):
        assert kept is not None and kept.of == found.by_step[0].hits
        assert kept.share is not None and kept.share < 0.7
    expected = expect(knowledge)
    assert own.acceptance == expected.acceptance
    assert expected.proof > 0.99 and expected.without_vocabulary_loss is None
    assert expected.prompt_surprise is not None and expected.prompt_surprise < 0.5
    first = found.by_step[0]
    assert first.of == sum(max(0, len(text.answer) - 1) for text in knowledge.texts)
    assert found.own_tokens_by_step[0].of == 0
    assert found.trained is None and found.other_target is None


Change = Callable[[Eagle3Drafter, Engine], Eagle3Drafter]


def _spec(**fields: object) -> Change:
    def change(drafter: Eagle3Drafter, _: Engine) -> Eagle3Drafter:
        drafter.spec = msgspec.structs.replace(drafter.spec, **fields)
        return drafter

    return change


def _random_embeddings(drafter: Eagle3Drafter, _: Engine) -> Eagle3Drafter:
    table = torch.randn(768, 192, generator=torch.Generator().manual_seed(1)) * 0.02
    drafter.embed_tokens.weight = nn.Parameter(table, requires_grad=False)
    drafter.owns_embeddings = True
    return drafter


def restricted(drafter: Eagle3Drafter) -> Eagle3Drafter:
    """The same drafter with a draft vocabulary of tokens spread over the target's."""
    kept = torch.randperm(768, generator=torch.Generator().manual_seed(3))[:DRAFTED].sort().values
    made = Eagle3Drafter(msgspec.structs.replace(drafter.spec, draft_vocab_size=DRAFTED))
    tensors = {n: t for n, t in drafter.state_dict().items() if n != "lm_head.weight"}
    made.load_state_dict(tensors, strict=False)
    made.lm_head.weight.data.copy_(drafter.lm_head.weight[kept])
    made.set_vocabulary(kept)
    made.owns_embeddings = False
    return made.eval().requires_grad_(False)


def _absolute(drafter: Eagle3Drafter, _: Engine) -> Eagle3Drafter:
    made = restricted(drafter)
    assert made.d2t is not None
    own = torch.arange(DRAFTED)
    made.d2t = torch.minimum(made.d2t + own, 767 - own)
    return made


CHANGED: dict[str, Change] = {
    "layers off by -1 (2, 4, 5)": _spec(aux_layers=(3, 5, 6)),
    "layers off by +1 (2, 4, 5)": _spec(aux_layers=(1, 3, 4)),
    "layers in another order (2, 4, 5)": _spec(aux_layers=(5, 4, 2)),
    "norm_output toggled": _spec(norm_output=True),
    "norm_before_residual toggled": _spec(norm_before_residual=True),
    "target's embeddings": _random_embeddings,
    "d2t": _absolute,
}


EVERY_DAY = ("layers off by -1 (2, 4, 5)", "norm_output toggled", "d2t")


@pytest.mark.parametrize(
    "name",
    [n if n in EVERY_DAY else pytest.param(n, marks=pytest.mark.full) for n in CHANGED],
)
def test_a_wrong_checkpoint_is_read_best_as_it_was_trained(
    knowledge: Knowledge, engine: Engine, demo_pair: Path, tmp_path: Path, name: str
) -> None:
    drafter = CHANGED[name](drafter_of(demo_pair, engine), engine)
    save(drafter, tmp_path / "drafter")
    found = want(reread(knowledge, tmp_path / "drafter"))
    best = found.readings[0]
    assert best.reading.startswith(name), [(f.reading, f.gain) for f in found.readings[:4]]
    assert best.gain is not None and best.gain_low is not None
    assert best.gain > 0.2 and best.gain_low > 0
    healthy = expect(knowledge).acceptance.length
    assert healthy is not None and best.acceptance is not None
    if name != "d2t":
        assert best.acceptance.length == pytest.approx(healthy, abs=0.01)


def test_a_small_vocabulary_costs_what_its_missing_tokens_cost(
    knowledge: Knowledge, engine: Engine, demo_pair: Path, tmp_path: Path
) -> None:
    save(restricted(drafter_of(demo_pair, engine)), tmp_path / "drafter")
    found = expect(reread(knowledge, tmp_path / "drafter"), step_cost=1.7)
    whole = expect(knowledge).acceptance
    assert found.outside_vocabulary is not None and found.outside_vocabulary.hits > 0
    assert found.without_vocabulary_loss is not None and found.break_even == 1.7
    lost, told = found.acceptance.length, found.without_vocabulary_loss.length
    assert lost is not None and told is not None and whole.length is not None
    assert lost < whole.length <= told


def test_a_checkpoint_that_names_no_layers_is_read_with_the_defaults(
    knowledge: Knowledge, demo_pair: Path, tmp_path: Path
) -> None:
    import json
    import shutil

    shutil.copytree(demo_pair / "drafter-mla", tmp_path / "drafter")
    path = tmp_path / "drafter" / "config.json"
    config = json.loads(path.read_text())
    for holder in (config, config["eagle_config"]):
        del holder["eagle_aux_hidden_state_layer_ids"]
    del config["drafter_format"]
    path.write_text(json.dumps(config))
    unnamed = reread(knowledge, tmp_path / "drafter")
    assert not unnamed.layers_named and unnamed.aux_layers == (2, 3, 3)
    assert any(reading.layers == (2, 4, 5) for reading in layer_readings(unnamed))
    assert want(unnamed).readings[0].reading == "other layers (2, 4, 5)"


def test_training_samples_and_another_target_are_walked_too(
    knowledge: Knowledge, demo_pair: Path, tmp_path: Path
) -> None:
    (tmp_path / "samples").mkdir()
    lines = [
        msgspec.json.encode(
            Sample(
                id=str(i),
                prompt_id=str(i),
                token_ids=(*text.prompt, *text.answer),
                loss_from=len(text.prompt),
                text="",
            )
        )
        for i, text in enumerate(knowledge.texts[:3])
    ]
    (tmp_path / "samples" / "samples-00000.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    subject = msgspec.structs.replace(
        knowledge.subject, trained_on=str(tmp_path), trained_target=str(demo_pair / "target")
    )
    told = Knowledge(
        subject=subject,
        engine=knowledge.engine,
        drafter=knowledge.drafter,
        texts=knowledge.texts[:3],
        layers_named=True,
        greedy=True,
    )
    expected = expect(told).acceptance
    trained, other = _trained(told), _other_target(told)
    assert trained is not None and trained.prompts == 3
    # no token beyond the answers is known there: at most k drafts of each are not counted
    assert abs(trained.counts.accepted - expected.counts.accepted) <= 3 * 3
    assert other == expected


counts = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3)), min_size=2, max_size=12)


@given(counts)
def test_a_length_is_the_pooled_one_and_lies_in_its_interval(pairs: list[tuple[int, int]]) -> None:
    told = [
        DraftCounts(drafts=n, drafted=3 * n, accepted=a * n, per_position=(a * n, 0, 0))
        for n, a in pairs
    ]
    found = length(told, 3)
    assert found.length == pytest.approx(
        1 + sum(n * a for n, a in pairs) / sum(n for n, _ in pairs)
    )
    assert found.low is not None and found.high is not None
    assert found.low <= found.length <= found.high


floats = st.floats(0, 100)


@given(st.lists(st.tuples(floats, floats, st.integers(1, 50)), min_size=2, max_size=10))
def test_a_paired_gain_is_antisymmetric_and_zero_of_itself(
    rows: list[tuple[float, float, int]],
) -> None:
    one = [(a, float(n)) for a, _, n in rows]
    two = [(b, float(n)) for _, b, n in rows]
    gain, low, high = paired_gain(one, two)
    back, back_low, back_high = paired_gain(two, one)
    assert gain == pytest.approx(-back)
    assert low is not None and high is not None and back_low is not None and back_high is not None
    assert low == pytest.approx(-back_high) and high == pytest.approx(-back_low)
    assert paired_gain(one, one) == (0, 0, 0)


def test_prompts_without_an_answer_say_nothing_of_a_gain() -> None:
    one, two = [(3.0, 10.0), (4.0, 10.0), (2.0, 10.0)], [(2.0, 10.0), (4.0, 10.0), (1.0, 10.0)]
    nothing = [(0.0, 0.0)] * 13
    assert paired_gain([*one, *nothing], [*two, *nothing]) == paired_gain(one, two)
    assert paired_gain(nothing, nothing) == (0.0, None, None)
