"""The demo's own torch model against transformers' reading of what it exports."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import msgspec
import pytest
import torch

from training.demo import corpus
from training.demo.config import AUX_LAYERS, DrafterConfig, TargetConfig
from training.demo.drafter import capture, measure_drafter, new_drafter, padded, reply_batches
from training.demo.export import export_target, load_target
from training.demo.model import DemoTarget, MixtureOfExperts, document_mask
from training.demo.target import Reply, batches, greedy, target_loss, train_target
from training.demo.tokenizer import train_tokenizer
from training.evaluate import draft_everywhere
from training.optim import Muon, Optimizers, orthogonalise

SMALL = TargetConfig(steps=3, rows=2, row_length=96)


@pytest.fixture(scope="module")
def tokenizer():  # type: ignore[no-untyped-def]
    return train_tokenizer(SMALL.vocab_size, 1, documents=300)


def model_of(kind: str) -> DemoTarget:
    """A random model whose experts are chosen unevenly and whose norms are not all ones."""
    torch.manual_seed(0)
    model = DemoTarget(msgspec.structs.replace(SMALL, kind=kind))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif "down_proj" in name or "o_proj" in name:
            parameter.data *= 8
    for layer in model.layers:
        if isinstance(layer.mlp, MixtureOfExperts):
            layer.mlp.bias += torch.tensor([0.1, 0.0, -0.1, 0.05])
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("kind", ["mla", "llama"])
def test_transformers_computes_the_same(kind: str, tmp_path: Path, tokenizer) -> None:  # type: ignore[no-untyped-def]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = model_of(kind)
    export_target(model, tokenizer, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.randint(0, SMALL.vocab_size, (2, 700), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(700).expand(2, -1)
    states = model(ids, positions, document_mask(torch.zeros_like(ids)))
    with torch.no_grad():
        out = theirs(ids, output_hidden_states=True)
    for ours, other in zip(states, out.hidden_states, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-3, atol=2e-4)
    torch.testing.assert_close(model.logits(states[-1]), out.logits, rtol=1e-3, atol=2e-4)
    chat = AutoTokenizer.from_pretrained(tmp_path)
    (dialogue,) = corpus.held_out_dialogues(4, 1)
    rendered = chat.apply_chat_template(
        dialogue.messages(), add_generation_prompt=True, tokenize=False
    )
    assert rendered == corpus.prompt_text(dialogue)
    assert chat.eos_token == "[EOS]"


def test_config_has_what_the_engines_ask_for(tmp_path: Path, tokenizer) -> None:  # type: ignore[no-untyped-def]
    export_target(model_of("mla"), tokenizer, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    wanted = {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "first_k_dense_replace": 1,
    }
    assert {key: config[key] for key in wanted} == wanted
    assert config["rope_scaling"]["type"] == config["rope_scaling"]["rope_type"] == "yarn"
    ends = json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("[EOS]")]


@pytest.mark.parametrize("kind", ["mla", "llama"])
def test_an_exported_target_reads_back(kind: str, tmp_path: Path, tokenizer) -> None:  # type: ignore[no-untyped-def]
    model = model_of(kind)
    export_target(model, tokenizer, tmp_path)
    again = load_target(tmp_path, model.config)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor)


def test_a_padded_drafter_drafts_the_same(tokenizer) -> None:  # type: ignore[no-untyped-def]
    model = model_of("mla")
    drafter = new_drafter(model, DrafterConfig(kind="mla"), tokenizer).eval()
    wide = padded(drafter)
    assert wide.spec.mla is not None and wide.spec.mla.kv_lora_rank == 512
    batch = next(batches(SMALL, tokenizer, 5))
    data = capture(model, batch)
    assert data.aux.shape[-1] == len(AUX_LAYERS) * SMALL.hidden_size
    assert torch.equal(draft_everywhere(drafter, data, 3), draft_everywhere(wide, data, 3))


def test_greedy_equals_full_passes(tokenizer) -> None:  # type: ignore[no-untyped-def]
    model = model_of("mla")
    prompts = [tokenizer.encode(text).ids for text in ("a b c", "Sort: 3 1 2", "x")]
    end = tokenizer.token_to_id("<|im_end|>")
    for prompt, reply in zip(
        prompts, greedy(model, prompts, end=end, limit=12, beyond=3), strict=True
    ):
        ids = list(prompt)
        for token in [*reply.ids, *reply.beyond]:
            row = torch.tensor([ids])
            mask = document_mask(torch.zeros_like(row))
            state = model(row, torch.arange(len(ids)).unsqueeze(0), mask)[-1]
            assert int(model.logits(state[0, -1]).argmax()) == token
            ids.append(token)


def test_reply_batches_lose_nothing(tokenizer) -> None:  # type: ignore[no-untyped-def]
    replies = [
        Reply(prompt=[1] * (n + 2), ids=[2] * (n + 1), beyond=[3] * 3, ended=True)
        for n in range(70)
    ]
    tokens = 0
    for batch, spans in reply_batches(replies):
        for span in spans:
            assert batch.ids[span.row, span.begin - 1] == 1
            assert set(batch.ids[span.row, span.begin : span.end].tolist()) == {2}
            assert set(batch.ids[span.row, span.end : span.known].tolist()) == {3}
            tokens += span.end - span.begin
    assert tokens == sum(len(r.ids) for r in replies)


def test_counts_of_a_measured_drafter_add_up(tokenizer) -> None:  # type: ignore[no-untyped-def]
    model = model_of("mla")
    drafter = new_drafter(model, DrafterConfig(kind="llama"), tokenizer).eval()
    reply = Reply(prompt=[5, 6, 7], ids=list(range(30)), beyond=[1] * 8, ended=True)
    counts = measure_drafter(model, drafter, [reply], 3)
    assert counts.drafts >= 8
    assert counts.accepted == sum(counts.per_position)
    assert counts.drafted == 3 * counts.drafts


def test_training_is_deterministic(tokenizer, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    first = train_target(SMALL, tokenizer).state_dict()
    second = train_target(SMALL, tokenizer).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    err = capsys.readouterr().err
    assert "step 3/3" in err and "loss" in err and "left" in err


def test_loss_is_that_of_each_document_alone(tokenizer) -> None:  # type: ignore[no-untyped-def]
    model = model_of("mla")
    batch = next(batches(SMALL, tokenizer, 5))
    changed = msgspec.structs.replace(batch, ids=batch.ids.clone())
    changed.ids[batch.documents == 0] = 1  # another first document in each row
    others = batch.documents > 0
    states = [
        model(b.ids, b.positions, document_mask(b.documents))[-1][others] for b in (batch, changed)
    ]
    torch.testing.assert_close(states[0], states[1])
    assert torch.isfinite(target_loss(model, batch)[0])


def test_balance_favours_the_idle_expert() -> None:
    moe = MixtureOfExperts(SMALL)
    moe.load = torch.tensor([1.0, 0.5, 0.5, 0.0])
    moe.balance(0.1)
    assert moe.bias[3] > moe.bias[1] == moe.bias[2] > moe.bias[0]


def test_orthogonalised_matrices_have_even_singular_values() -> None:
    for shape in ((3, 8, 20), (2, 20, 8)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(*shape)).float())
        assert values.min() > 0.5 and values.max() < 1.4


def test_muon_treats_blocks_as_matrices_of_their_own() -> None:
    torch.manual_seed(0)
    whole = torch.nn.Parameter(torch.zeros(12, 6))
    whole.muon_blocks = (2, 0)  # type: ignore[attr-defined]
    parts = [torch.nn.Parameter(torch.zeros(6, 6)) for _ in range(2)]
    gradient = torch.randn(12, 6)
    whole.grad = gradient.clone()
    for part, block in zip(parts, gradient.chunk(2), strict=True):
        part.grad = block.clone()
    Muon([whole], lr=0.1).step()
    Muon(parts, lr=0.1).step()
    torch.testing.assert_close(whole.data, torch.cat([p.data for p in parts]))


def test_every_parameter_is_trained_once() -> None:
    model = DemoTarget(SMALL)
    optimizers = Optimizers(model, muon_lr=0.01, adam_lr=0.01, steps=10)
    trained = [p for part in optimizers.parts for g in part.param_groups for p in g["params"]]
    assert len(trained) == len({id(p) for p in trained}) == len(list(model.parameters()))
    names = {id(p): n for n, p in model.named_parameters()}
    muon = {names[id(p)] for g in optimizers.parts[0].param_groups for p in g["params"]}
    assert not any("embed" in n or "lm_head" in n or "mlp.gate.w" in n for n in muon)
    assert "layers.1.mlp.experts.gate_proj.weight" in muon
    assert len(list(islice(muon, 1))) == 1
