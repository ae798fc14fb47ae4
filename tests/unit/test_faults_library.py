"""The library of faults: what is in it, and that what is planted costs what it should."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from faults.engine import EXECUTION, SERVING, STATES
from faults.library import COMPOUND, FAULTS, HEALTHY
from faults.measure import ERRORS, LEAST, ORDINARY, accepted, accepted_by_prompt, cost, share
from faults.pair import Pair
from faults.planting import healthy
from faults.records import Fault, Planted, Variant

from harness.diagnose.causes import CAUSES
from harness.diagnose.restored import WITHIN

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
QUICK = ("layers_plus_one", "states_zero", "tokens_unshifted", "refused", "miscounted")
FEW = 8
"""Prompts in the everyday tests."""
SEEDS = (0, 1, 2)
GREEDY = [variant for name, variant in HEALTHY.items() if "temperature" not in name]
"""A walk over sampled text does not say what is accepted."""


@pytest.fixture(scope="module")
def pair(demo_pair: Path) -> Pair:
    return Pair(kind="mla", folder=demo_pair)


@pytest.fixture(scope="module")
def usual(pair: Pair) -> float:
    return share(accepted(few(healthy(pair, 0))))


def few(planted: Planted) -> Planted:
    return planted.changed(prompts=planted.prompts[:FEW])


def test_there_are_enough_faults_and_their_causes_are_known() -> None:
    on = {
        engine: [f for f in FAULTS.values() if engine in f.engines]
        for engine in ("reference", "vllm", "sglang")
    }
    assert len(FAULTS) >= 30
    assert len(on["reference"]) >= 24
    assert min(len(on["vllm"]), len(on["sglang"])) >= 12
    assert {f.cause for f in FAULTS.values()} <= set(CAUSES)
    assert {cause for f in FAULTS.values() for cause in f.also} <= set(CAUSES)
    assert all(f.name == name for name, f in FAULTS.items())


def test_there_are_enough_healthy_variants_and_pairs_of_faults() -> None:
    assert len(HEALTHY) >= 40
    assert {v.kind for v in HEALTHY.values()} == {"mla", "llama"}
    for engine in ("vllm", "sglang"):
        assert sum(engine in v.engines for v in HEALTHY.values()) >= 10
    assert len(COMPOUND) >= 20


def test_a_right_answer_is_the_cause_or_one_that_nothing_tells_from_it() -> None:
    fault = FAULTS["states_stale"]
    assert {"states_stale", "states_skipped"} <= fault.right  # one family
    assert "states_zero" not in fault.right
    assert "tensors_damaged" in FAULTS["fc_norm_dropped"].right  # told in `also`


@pytest.mark.parametrize("name", QUICK)
def test_what_is_planted_costs_acceptance(
    name: str, pair: Pair, usual: float, tmp_path: Path
) -> None:
    fault = FAULTS[name]
    planted = few(fault.plant(pair, tmp_path, 0, fault.severities[0]))
    assert share(accepted(planted)) < usual - fault.costs


def test_a_hook_leaves_nothing_behind(pair: Pair, usual: float, tmp_path: Path) -> None:
    for name in ("refused", "target_rope", "states_branch"):
        accepted(few(FAULTS[name].plant(pair, tmp_path / name, 0, 1.0)))
    assert share(accepted(few(healthy(pair, 0)))) == usual


def test_the_cost_of_a_fault_is_paired_by_prompt(pair: Pair, tmp_path: Path) -> None:
    right = few(healthy(pair, 0))
    nothing = cost([(right, right)])
    assert (nothing.share, nothing.errors) == (0, None) and 0.6 < nothing.first < 1
    refused = cost([(right, few(FAULTS["refused"].plant(pair, tmp_path, 0, 1.0)))])
    assert 0.3 < refused.share < 0.8 and refused.errors is not None and refused.errors > ERRORS
    assert refused.first == pytest.approx(nothing.first, abs=0.05)  # the first draft is not refused


@pytest.mark.parametrize("name", ["mla_own_embeddings", "mla_turned", "mla_uneven_norm"])
def test_a_drafter_made_equal_by_algebra_is_accepted_alike(
    name: str, pair: Pair, usual: float, tmp_path: Path
) -> None:
    planted = few(HEALTHY[name].plant(pair, tmp_path, 0, 1.0))
    assert planted.drafter != pair.drafter
    # sums in another order: a near-tie may fall otherwise
    assert share(accepted(planted)) == pytest.approx(usual, abs=0.02)


def test_a_turned_target_answers_alike_and_hands_over_other_states(
    pair: Pair, usual: float, tmp_path: Path
) -> None:
    from faults.measure import as_served

    from engines.reference.sampling import SamplingParams

    planted = few(FAULTS["target_turned"].plant(pair, tmp_path, 0, 1.0))
    answers = []
    for case in (planted, few(healthy(pair, 0))):
        with as_served(case) as engine:
            prompts = [list(p) for p in case.prompts]
            done = engine.generate(prompts, SamplingParams(max_tokens=32, temperature=0.0))
        answers.append([request.output for request in done])
    same = sum(a == b for a, b in zip(*answers, strict=True))
    assert same >= FEW - 1
    assert share(accepted(planted)) < usual - 0.1


@pytest.mark.full
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "fault",
    [fault for fault in FAULTS.values() if "reference" in fault.engines],
    ids=lambda fault: fault.name,
)
def test_every_fault_costs_what_it_is_said_to(fault: Fault, seed: int, tmp_path: Path) -> None:
    from faults.pair import find_pair

    pair = find_pair(fault.kind)
    found = []
    for severity in fault.severities:
        planted = fault.plant(pair, tmp_path / f"{severity:g}", seed, severity)
        right = healthy(pair, seed, k=planted.k, temperature=planted.temperature)
        if fault.way != "prompts":
            right = right.changed(prompts=planted.prompts)
        found.append(share(accepted(right)) - share(accepted(planted)))
        assert planted.unharmed is not None or not fault.mendable
    assert found[0] >= fault.costs
    assert found[-1] > 0


@pytest.mark.full
@pytest.mark.parametrize("variant", GREEDY, ids=lambda variant: variant.name)
def test_no_healthy_variant_is_accepted_less_than_it_should_be(
    variant: Variant, tmp_path: Path
) -> None:
    """What the engine accepts of it is what the trainer's own walk over its answers expects."""
    from faults.expected import expected
    from faults.pair import find_pair

    planted = variant.plant(find_pair(variant.kind), tmp_path, 0, 1.0)
    served = share(accepted(planted))
    assert served == pytest.approx(share(expected(planted)), abs=0.03)


def test_every_way_of_the_engine_has_faults() -> None:
    assert min(map(len, (STATES, EXECUTION, SERVING))) >= 5


@pytest.mark.parametrize("kind", ["zero", "scaled", "moved", "noisy"])
def test_a_share_of_the_rows_is_spoiled(kind: str) -> None:
    import torch
    from faults.hooks.foreign import Spoil

    states = torch.randn(400, 12)
    wrong = (Spoil(kind, 0.4, 0)(states) != states).any(-1)
    assert 100 < int(wrong.sum()) < 220
    assert torch.equal(Spoil(kind, 0.0, 0)(states), states)


def test_a_hook_of_vllm_changes_what_its_drafter_is_handed() -> None:
    import torch
    from faults.hooks.foreign import spoil_vllm, swap_vllm

    class Drafter:
        def propose(self, *, target_hidden_states: torch.Tensor) -> torch.Tensor:
            return target_hidden_states[:2].long()

    class Runner:
        drafter = Drafter()

    rows = torch.arange(6.0).view(2, 3) + 1
    spoil_vllm(Runner, kind="scaled", share=1.0, seed=0)
    assert Runner.drafter.propose(target_hidden_states=rows).tolist() == [[8, 16, 24], [32, 40, 48]]
    swap_vllm(Runner, share=1.0, seed=0)
    assert Runner.drafter.propose(target_hidden_states=rows).tolist() == [[32, 40, 48], [8, 16, 24]]


@pytest.mark.full
@pytest.mark.parametrize(
    "fault",
    [fault for fault in FAULTS.values() if "reference" in fault.engines],
    ids=lambda fault: fault.name,
)
def test_at_every_severity_a_fault_costs_more_than_chance(fault: Fault, tmp_path: Path) -> None:
    """The rule by which severities are chosen; docs/faults.md tells it."""
    from faults.pair import find_pair

    pair = find_pair(fault.kind)
    for severity in fault.severities:
        cases = []
        for seed in SEEDS:
            planted = fault.plant(pair, tmp_path / f"{severity:g}-{seed}", seed, severity)
            right = healthy(
                pair,
                seed,
                count=len(planted.prompts),
                k=planted.k,
                temperature=planted.temperature,
            )
            if fault.way != "prompts":
                right = right.changed(prompts=planted.prompts)
            cases.append((right, planted))
        found = cost(cases)
        assert found.share >= LEAST, (severity, found)
        assert found.errors is not None and found.errors >= ERRORS, (severity, found)
        assert not fault.by_quality or found.first < ORDINARY, (severity, found)


@pytest.mark.full
def test_a_lost_norm_before_fc_is_restored_by_ones(tmp_path: Path) -> None:
    """`--fix` cannot know the norm that was trained, which is nearly one everywhere."""
    from faults.pair import find_pair
    from safetensors.torch import load_file, save_file

    from harness.diagnose.experiments.figures import paired

    fault, as_trained, by_ones = FAULTS["norm_before_fc_dropped"], [], []
    for seed in range(6):
        right = fault.plant(find_pair(fault.kind), tmp_path / f"{seed}", seed, 1.0).unharmed
        assert right is not None
        other = tmp_path / f"ones-{seed}"
        shutil.copytree(right.drafter, other)
        tensors = load_file(other / "model.safetensors")
        tensors["input_norm.weight"] = torch.ones_like(tensors["input_norm.weight"])
        save_file(tensors, other / "model.safetensors", {"format": "pt"})
        for side, planted in ((as_trained, right), (by_ones, right.changed(drafter=other))):
            logs = accepted_by_prompt(planted)
            side += [(float(sum(log)), float(planted.k * len(log))) for log in logs]
    found = paired(by_ones, as_trained)
    assert len(by_ones) == 96 and found.error is not None
    assert abs(found.gain) < WITHIN and found.error < 0.01, found


def test_the_docs_tell_of_every_known_cause_what_plants_it() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Which known causes")[2]
    rows = [line.split("|")[1:5] for line in section.partition("\n## ")[0].splitlines()]
    rows = [row for row in rows if len(row) == 4 and row[0].strip() not in ("#", "---")]
    assert [row[0].strip() for row in rows if row[0].strip()] == [str(n) for n in range(1, 30)]
    named = [(name, star) for row in rows for name, star in re.findall(r"`(\w+)`(\*?)", row[2])]
    names = [name for name, _ in named]
    assert len(set(names)) == len(names) and set(names) == set(FAULTS)
    assert {name for name, star in named if star} == {n for n, f in FAULTS.items() if f.emulated}
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row[3])} <= {*FAULTS, *HEALTHY}
    for row in rows:  # what is not planted says why
        assert row[2].strip() != "not planted" or row[3].strip()


def test_what_a_case_is_without_its_fault_is_told_where_it_can_be_mended(
    pair: Pair, tmp_path: Path
) -> None:
    for name in (
        "layers_plus_one",
        "layers_default",
        "norm_output_on",
        "prompts_raw",
        "vllm_method",
    ):
        planted = FAULTS[name].plant(pair, tmp_path / name, 0, 1.0)
        right = planted.unharmed
        assert right is not None and right.unharmed is None, name
        assert right.form == "templated" and right.extra_args == (), name
        assert len(right.prompts) == len(planted.prompts) and right != planted, name
        harmed = {"drafter", "prompts", "extra_args"}
        assert any(getattr(right, field) != getattr(planted, field) for field in harmed), name
