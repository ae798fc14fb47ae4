"""What a plan takes, from first principles, and beside the run it is compared with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters.eagle3 import Eagle3Drafter
from drafters.spec import DrafterSpec, MlaDims
from harness.errors import UsageError
from training.estimate import Estimate, activations, estimate, relative_work, sizes_of, state_bytes
from training.estimate_text import amount, duration, estimate_text
from training.heads import groups
from training.original_run import DRAFTER, TOKENS, WHAT, compared
from training.plan import TrainingPlan, plan_names, read_plan

KIMI = "kimi-k2.5-llama"


def of(name: str, *sets: str) -> Estimate:
    return estimate(read_plan(name, list(sets)))


def small(**more: object) -> DrafterSpec:
    spec = DrafterSpec(
        kind="llama",
        hidden_size=16,
        target_hidden_size=16,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        vocab_size=40,
        draft_vocab_size=40,
        aux_layers=(1, 2, 3),
    )
    return msgspec.structs.replace(spec, **more)


@given(
    hidden=st.integers(2, 12).map(lambda n: 2 * n),
    heads=st.integers(1, 4),
    inner=st.integers(1, 40),
    draft=st.integers(1, 40),
    mla=st.booleans(),
    fc_norm=st.booleans(),
)
def test_parameters_are_those_of_the_real_module(
    hidden: int, heads: int, inner: int, draft: int, mla: bool, fc_norm: bool
) -> None:
    dims = MlaDims(
        q_lora_rank=6, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=6
    )
    spec = small(
        kind="mla" if mla else "llama",
        mla=dims if mla else None,
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        draft_vocab_size=draft,
        fc_norm=fc_norm,
    )
    counted = sum(groups(spec).values())
    assert counted == sum(p.numel() for p in Eagle3Drafter(spec).parameters())


def test_the_original_drafter_has_its_reported_parameters() -> None:
    trained = next(c for c in compared() if c.name == "trained parameters")
    assert trained.computed == 1_190_948_864
    assert trained.agrees
    found = of(KIMI)
    assert found.value("trained") == trained.computed
    assert found.value("not trained") == 163_840 * 7168


def test_gaps_to_the_original_run_are_shown_and_not_fitted() -> None:
    by_name = {c.name: c for c in compared()}
    states = by_name["hidden states on disk"]
    assert states.computed == TOKENS * 4 * 7168 * 2 == pytest.approx(992e9, rel=1e-3)
    assert not states.agrees and len(states.readings) >= 3
    assert all(abs(r.value / states.reported - 1) > 0.02 for r in states.readings[:2])
    memory = by_name["GPU memory of the training"]
    low, mixed, full = memory.computed, memory.readings[1].value, memory.readings[2].value
    assert low < memory.reported < mixed < full  # only moments in bfloat16 leave room
    text = estimate_text(of(KIMI), compared())
    assert "+20%: open" in text and "agrees" in text


def test_the_original_run_is_introduced_before_it_is_named() -> None:
    with_it = estimate_text(of(KIMI), compared()).splitlines()
    assert with_it[1] == WHAT and "the original run:" in WHAT and "Kimi-K2.5" in WHAT
    rates_alone = of(KIMI, "estimate.source=our own", "estimate.tokens_per_sample=100")
    assert "original run" not in estimate_text(rates_alone, ())
    assert estimate_text(of(KIMI), ()).splitlines()[1] == WHAT  # its rates are assumed


def test_the_kimi_plans_at_the_original_rates_give_its_times() -> None:
    found = of(KIMI, "train.gradient_checkpointing=false", "estimate.processes=1")
    assert found.value("generate") == pytest.approx(5.3 * 3600, rel=0.01)
    assert found.value("capture") == pytest.approx(17.3e6 / 3165)
    assert found.value("an epoch") == pytest.approx(0.95 * 25.5 * 60, rel=0.01)
    assert relative_work(
        read_plan(KIMI, ["train.gradient_checkpointing=false"]), sizes_of(read_plan(KIMI))
    ) == pytest.approx(1.0)
    assert found.value("states") == pytest.approx(992e9, rel=0.002)
    mla = of("kimi-k2.5-mla")
    assert mla.value("trained") == 896_169_984
    assert mla.value("an epoch") < of(KIMI).value("an epoch")


@pytest.mark.parametrize("name", ["kimi-k2.5-llama", "kimi-k2.5-mla"])
def test_the_kimi_plans_are_estimated_to_their_end(name: str) -> None:
    found = of(name)
    stages = ("generate", "capture", "train", "evaluate", "export")
    assert found.value("time in all") == pytest.approx(sum(found.value(s) for s in stages))
    (evaluate,) = (f for f in found.figures if f.name == "evaluate")
    assert "64 prompts: offline from the captured states, then asked in vllm" in evaluate.how
    assert evaluate.value > 64 * 1730 / 907  # the answers of one engine
    both = of(name, "evaluate.engines=vllm,sglang", "export.load=false")
    assert both.value("evaluate") - evaluate.value == pytest.approx(64 * 1730 / 907)
    assert both.value("export") == 0


def test_fp8_online_and_sharding_do_what_they_should() -> None:
    whole = of(KIMI)
    half = of(KIMI, "capture.dtype=fp8")
    assert 0.5 < half.value("states") / whole.value("states") < 0.505
    online = of(KIMI, "capture.online=true")
    assert online.value("states") == 0
    assert online.value("disk in all") < whole.value("disk in all") - 900e9
    ddp = of(KIMI, "train.parallel=ddp")
    assert ddp.value("moments") == 8 * whole.value("moments")
    assert ddp.value("gradient buckets") == ddp.value("gradients")
    one = of(KIMI, "estimate.processes=1", "estimate.device_gb=16")
    peak = next(f for f in one.figures if f.name == "peak of the training")
    assert "DOES NOT FIT" in peak.how and peak.value > 16e9


def test_the_drafted_rows_of_the_targets_head_are_held_beside_it() -> None:
    found = of(KIMI)
    assert found.value("its drafted rows") == DRAFTER.draft_vocab_size * DRAFTER.hidden_size * 2
    parts = [f.value for f in found.figures if f.section == "memory"]
    assert parts[-1] == pytest.approx(sum(parts[:-1]))
    names = [f.name for f in of(KIMI, "vocab.size=163840").figures]
    assert "the target's head" in names and "its drafted rows" not in names


def test_checkpointing_keeps_less_and_more_steps_more() -> None:
    plan = read_plan(KIMI)
    kept = activations(plan, DRAFTER)[0]

    def changed(**train: object) -> float:
        section = msgspec.structs.replace(plan.train, **train)
        return activations(msgspec.structs.replace(plan, train=section), DRAFTER)[0]

    assert kept < changed(gradient_checkpointing=False)
    assert changed(ttt_steps=1) < kept < changed(ttt_steps=8)
    assert changed(row_tokens=16384) == 2 * kept


def test_the_activations_formula_holds_for_what_torch_keeps() -> None:
    """Every tensor that autograd saves for one row of the real head, counted once, in float32."""
    torch = pytest.importorskip("torch")
    spec = small(hidden_size=64, target_hidden_size=64, intermediate_size=160, head_dim=16,
                 num_key_value_heads=4, vocab_size=90, draft_vocab_size=90)  # fmt: skip
    drafter = Eagle3Drafter(spec)
    slots, seen = 32, {}

    def keep(tensor: object) -> object:
        seen[tensor.data_ptr()] = tensor.untyped_storage().nbytes()  # type: ignore[attr-defined]
        return tensor

    weights = {p.data_ptr() for p in drafter.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = drafter.fuse(torch.randn(1, slots, 3 * 64))
        positions = torch.arange(slots).unsqueeze(0)
        ids = torch.zeros(1, slots, dtype=torch.int64)
        q, k, v, residual = drafter.project(drafter.embed(ids), hidden, positions)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        drafter.finish(mixed.transpose(1, 2), residual)
    saved = sum(size for place, size in seen.items() if place not in weights)
    plan = read_plan(
        "demo", ["train.precision=float32", "train.ttt_steps=1", "train.row_tokens=32"]
    )
    counted = activations(plan, spec)[0]
    assert 0.6 * counted < saved < 1.4 * counted


@pytest.mark.parametrize("name", plan_names())
def test_every_plan_that_comes_with_the_package_is_read(name: str) -> None:
    plan = read_plan(name)
    assert plan.name == name and plan.description


def test_a_target_that_is_nowhere_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"target\.path: not set"):
        from training.targets import target_folder

        target_folder(read_plan(KIMI))
    broken = tmp_path / "sizes.json"
    broken.write_text('{"hidden_size": 64}')
    with pytest.raises(UsageError, match="num_attention_heads"):
        of(KIMI, f"target.sizes={broken}")


def test_the_dry_run_starts_nothing_and_speaks_json(repo: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "training", "pipeline", "--plan", KIMI, "--dry-run", "--json"]
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["plan"] == KIMI and told["original_run"][0]["agrees"] is True
    code = "import sys, training.pipeline, training.estimate; print('torch' in sys.modules)"
    light = subprocess.run([sys.executable, "-c", code], cwd=repo, capture_output=True, text=True)
    assert light.stdout.strip() == "False"


def test_amounts_are_told_in_a_readers_units() -> None:
    assert amount(992.3e9, "bytes") == "992.3 GB"
    assert amount(1.19e9, "parameters") == "1.19 B"
    assert amount(12, "parameters") == "12"
    assert (duration(59), duration(90), duration(5400)) == ("59 s", "1.5 min", "1.50 h")


def test_states_of_a_token() -> None:
    plan = TrainingPlan()
    assert state_bytes(plan, small()) == 4 * 16 * 2 + 8 + 4


@pytest.mark.parametrize(
    ("name", "sets", "said"),
    [
        ("kimi-k2.5-lama", [], "no such plan; did you mean 'kimi-k2.5-llama'?"),
        ("qqqq", [], "no such plan; there are demo, evaluate, kimi-k2.5-llama,"),
        ("demo", ["train.ttt_step=3"], "unknown key 'train.ttt_step'; did you mean 'train.ttt_st"),
        ("demo", ["captur.online=true"], "unknown key 'captur.online'; did you mean 'capture.onl"),
    ],
)
def test_a_misspelt_plan_or_key_is_answered_with_the_nearest(
    name: str, sets: list[str], said: str
) -> None:
    with pytest.raises(UsageError) as error:
        read_plan(name, sets)
    assert said in str(error.value)
