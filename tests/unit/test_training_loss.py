"""The trainer's loss, attention and counts, held against the same written out plainly."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drafters.eagle3 import Eagle3Drafter
from drafters.spec import DrafterSpec, MlaDims
from training import trainer
from training import unroll as unrolling
from training.attention import Documents, TttAttention, document_lengths
from training.counts import FIELDS, StepCounts
from training.data import Batch, Document, collate
from training.evaluate import draft_everywhere
from training.loss import target_choice
from training.plan import TrainSection
from training.train.objective import Objective
from training.trainer import (
    Captured,
    TrainSettings,
    drafted_slots,
    drafter_loss,
    loss_slots,
    noisy,
    shift,
    unroll,
    with_choice,
)

VOCABULARY = 23
LLAMA = DrafterSpec(
    kind="llama",
    hidden_size=16,
    target_hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=VOCABULARY,
    draft_vocab_size=VOCABULARY,
    aux_layers=(2, 4, 5),
    max_position_embeddings=64,
)
MLA = msgspec.structs.replace(
    LLAMA,
    kind="mla",
    num_key_value_heads=4,
    mla=MlaDims(
        q_lora_rank=8, kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=6
    ),
)


def drafter_of(spec: DrafterSpec, *, draft_vocabulary: int = VOCABULARY) -> Eagle3Drafter:
    torch.manual_seed(0)
    made = Eagle3Drafter(msgspec.structs.replace(spec, draft_vocab_size=draft_vocabulary))
    if draft_vocabulary < VOCABULARY:
        made.set_vocabulary(torch.arange(VOCABULARY)[1 : draft_vocabulary + 1])
    return made


def captured_of(rows: list[list[tuple[int, int]]], *, pad: int = 0, seed: int = 1) -> Captured:
    """Rows of documents (length, loss_from), with `pad` columns behind the longest row."""
    generator = torch.Generator().manual_seed(seed)

    def ids(n: int) -> list[int]:
        return torch.randint(0, VOCABULARY, (n,), generator=generator).tolist()

    width = max(sum(n for n, _ in row) for row in rows) + pad
    batch = collate(
        [[Document(ids=ids(n), loss_from=start) for n, start in row] for row in rows], width
    )
    shape = batch.ids.shape
    return Captured(
        batch=batch,
        aux=torch.randn(*shape, 48, generator=generator),
        last_normed=torch.randn(*shape, 16, generator=generator) * 2,
    )


HEAD = torch.randn(VOCABULARY, 16, generator=torch.Generator().manual_seed(9))


class PlainAttention:
    """All scores written out under a dense mask; keys repeated for their queries."""

    def __init__(self, documents: Tensor, scale: float) -> None:
        length = documents.shape[1]
        same = documents.unsqueeze(2) == documents.unsqueeze(1)
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        self.mask = torch.zeros(same.shape).masked_fill_(~(same & causal), float("-inf"))
        self.scale = scale
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[2] // k.shape[2]
        q = q.transpose(1, 2)
        self.keys.append(k.repeat_interleave(groups, 2).transpose(1, 2))
        self.values.append(v.repeat_interleave(groups, 2).transpose(1, 2))
        scores = q @ self.keys[0].transpose(2, 3) * self.scale + self.mask.unsqueeze(1)
        own = [(q * key).sum(-1, keepdim=True) * self.scale for key in self.keys[1:]]
        weights = torch.cat((scores, *own), dim=-1).softmax(-1)
        length = scores.shape[-1]
        out = weights[..., :length] @ self.values[0]
        for i, value in enumerate(self.values[1:]):
            out = out + weights[..., length + i].unsqueeze(-1) * value
        return out.transpose(1, 2)


def plain_logits(
    drafter: Eagle3Drafter, captured: Captured, steps: int, *, own_tokens: bool = False
) -> list[Tensor]:
    """Every step's logits [rows, length, D], all slots computed, nothing left out."""
    batch = captured.batch
    attention = PlainAttention(batch.documents, drafter.scale)
    hidden, ids, out = drafter.fuse(captured.aux), shift(batch.ids, 1), []
    for step in range(steps):
        embedded = drafter.embed(ids)
        q, k, v, residual = drafter.project(embedded, hidden, batch.positions + step)
        hidden, normed = drafter.finish(attention(q, k, v), residual)
        out.append(drafter.logits(normed))
        ids = drafter.to_target(out[-1].argmax(-1)) if own_tokens else shift(batch.ids, step + 2)
    return out


def plain_loss(
    drafter: Eagle3Drafter, captured: Captured, asked: TrainSettings
) -> tuple[Tensor, dict[str, list[float]]]:
    """The loss and counts with the target's logits of every slot, one step after the other."""
    wanted = captured.last_normed @ HEAD.T
    choice = wanted.argmax(-1)
    kept = drafter.t2d if drafter.t2d is not None else torch.ones(VOCABULARY, dtype=torch.bool)
    counts: dict[str, list[float]] = {field: [] for field in FIELDS}
    total, weight_sum = torch.zeros(()), 0.0
    run = unbroken = torch.ones_like(captured.batch.loss_mask)
    own = asked.tokens == "own"
    every = plain_logits(drafter, captured, asked.ttt_steps, own_tokens=own)
    for step, logits in enumerate(every):
        judged = drafted_slots(captured.batch, step)
        chosen, aim = shift(choice, step + 1), shift(wanted, step + 1)[..., kept]
        right = drafter.to_target(logits.argmax(-1)) == chosen
        slots = judged & kept[chosen]
        p, log_q = aim[slots].softmax(-1), logits[slots].log_softmax(-1)
        if asked.loss == "hard":
            p = torch.nn.functional.one_hot(kept.cumsum(0)[chosen[slots]] - 1, p.shape[-1]).float()
        losses = -(p * log_q).sum(-1)
        if asked.loss == "kl":
            losses = losses + torch.special.xlogy(p, p).sum(-1)
        weight = asked.step_decay**step
        mean = losses.sum() / slots.sum().clamp_min(1)
        total, weight_sum = total + weight * mean, weight_sum + weight
        run = run & judged
        reached, unbroken = run & unbroken, unbroken & right
        every_one = (run & unbroken).sum()
        row = [losses.sum(), slots.sum(), (judged & ~slots).sum(), judged.sum()]
        row += [(judged & right).sum(), run.sum(), reached.sum(), every_one]
        for field, value in zip(FIELDS, row, strict=True):
            counts[field].append(value.item())
    return total / weight_sum, counts


def gradients(drafter: Eagle3Drafter, loss: Tensor) -> dict[str, Tensor]:
    named = {n: p for n, p in drafter.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {n: g for n, g in zip(named, grads, strict=True) if g is not None}


@st.composite
def batches(draw: Any) -> Captured:
    """Rows of documents with prompts of any length, padded or full, some without loss."""
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        lengths = draw(st.lists(st.integers(1, 14), min_size=1, max_size=4))
        rows.append([(n, draw(st.integers(0, n))) for n in lengths])
    return captured_of(rows, pad=draw(st.integers(0, 3)), seed=draw(st.integers(0, 5)))


@settings(max_examples=24, deadline=None)
@given(
    captured=batches(),
    spec=st.sampled_from([LLAMA, MLA]),
    draft_vocabulary=st.sampled_from([VOCABULARY, 15]),
    loss=st.sampled_from(["soft_cross_entropy", "kl", "hard"]),
    tokens=st.sampled_from(["teacher", "own"]),
    steps=st.integers(1, 8),
)
def test_loss_counts_and_gradients_are_those_of_the_plain_version(
    captured: Captured, spec: DrafterSpec, draft_vocabulary: int, loss: Any, tokens: Any, steps: int
) -> None:
    drafter = drafter_of(spec, draft_vocabulary=draft_vocabulary)
    asked = TrainSettings(
        steps=1, ttt_steps=steps, loss=loss, tokens=tokens, precision="float32"
    )  # fmt: skip
    result = drafter_loss(drafter, captured, HEAD, asked)
    expected, counts = plain_loss(drafter, captured, asked)
    torch.testing.assert_close(result.loss, expected, rtol=1e-5, atol=1e-5)
    for field in FIELDS:
        assert result.counts.get(field) == pytest.approx(counts[field], rel=1e-5, abs=1e-4), field
    if counts["slots"][0]:
        plain = gradients(drafter, expected)
        for name, gradient in gradients(drafter, result.loss).items():
            torch.testing.assert_close(gradient, plain[name], rtol=2e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize("chunk", [1, 300])
def test_the_chunks_of_the_loss_do_not_show(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from training import loss

    captured = captured_of([[(14, 3), (9, 0)], [(17, 8)]], pad=2)
    drafter = drafter_of(LLAMA, draft_vocabulary=15)
    asked = TrainSettings(steps=1, loss="kl")
    whole = drafter_loss(drafter, captured, HEAD, asked)
    expected = gradients(drafter, whole.loss)
    for module in (loss, unrolling):
        monkeypatch.setattr(module, "CHUNK", chunk)
    again = drafter_loss(drafter, captured, HEAD, asked)
    torch.testing.assert_close(again.counts.table, whole.counts.table, rtol=1e-6, atol=1e-5)
    for name, gradient in gradients(drafter, again.loss).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)
    assert torch.equal(
        draft_everywhere(drafter, captured, 2),
        torch.stack([s.tokens for s in unroll(drafter, captured, 2, own_tokens=True)], -1),
    )


@pytest.mark.parametrize("spec", [LLAMA, MLA], ids=["llama", "mla"])
def test_checkpointing_changes_nothing_but_memory(spec: DrafterSpec) -> None:
    captured = captured_of([[(14, 3), (9, 0)], [(17, 8)]])
    drafter = drafter_of(spec)
    kept = drafter_loss(drafter, captured, HEAD, TrainSettings(steps=1, ttt_steps=4))
    asked = TrainSettings(steps=1, ttt_steps=4, gradient_checkpointing=True)
    saved = {"kept": 0, "again": 0}

    def counting(name: str) -> torch.autograd.graph.saved_tensors_hooks:
        def pack(x: Tensor) -> Tensor:
            saved[name] += x.numel()
            return x

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)

    with counting("kept"):
        kept = drafter_loss(drafter, captured, HEAD, TrainSettings(steps=1, ttt_steps=4))
    with counting("again"):
        again = drafter_loss(drafter, captured, HEAD, asked)
    assert torch.equal(again.loss, kept.loss)
    expected = gradients(drafter, kept.loss)
    for name, gradient in gradients(drafter, again.loss).items():
        assert torch.equal(gradient, expected[name]), name
    assert saved["again"] < 0.6 * saved["kept"]


def test_micro_batches_add_up_to_the_whole_batch() -> None:
    rows = [[(14, 3), (9, 0)], [(17, 8), (6, 6)], [(2, 0), (20, 1)]]
    whole = captured_of(rows)
    drafter = drafter_of(LLAMA, draft_vocabulary=15)
    asked = TrainSettings(steps=1, ttt_steps=3)
    expected = drafter_loss(drafter, whole, HEAD, asked)
    parts = [rows_of(whole, slice(i, i + 1)) for i in range(3)]
    parts = [with_choice(part, HEAD, 3) for part in parts]
    slots = torch.stack([loss_slots(drafter, part, 3) for part in parts]).sum(0)
    assert slots.tolist() == expected.counts.get("slots")
    results = [drafter_loss(drafter, p, HEAD, asked, denominators=slots) for p in parts]
    torch.testing.assert_close(sum(r.loss for r in results), expected.loss)
    counts = results[0].counts + results[1].counts + results[2].counts
    torch.testing.assert_close(counts.table, expected.counts.table, rtol=1e-6, atol=1e-5)
    assert counts.loss(asked.step_decay) == pytest.approx(expected.loss.item(), rel=1e-5)
    found = gradients(drafter, sum(r.loss for r in results))  # type: ignore[arg-type]
    for name, gradient in gradients(drafter, expected.loss).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def rows_of(captured: Captured, rows: slice) -> Captured:
    batch = captured.batch
    return Captured(
        batch=Batch(
            ids=batch.ids[rows],
            positions=batch.positions[rows],
            documents=batch.documents[rows],
            loss_mask=batch.loss_mask[rows],
        ),
        aux=captured.aux[rows],
        last_normed=captured.last_normed[rows],
    )


def test_a_known_choice_is_taken_as_it_is() -> None:
    captured = captured_of([[(14, 3)], [(12, 2)]])
    drafter = drafter_of(LLAMA, draft_vocabulary=15)
    asked = TrainSettings(steps=1)
    known = with_choice(captured, HEAD, 3)
    assert with_choice(known, HEAD, 3) is known
    first, second = (drafter_loss(drafter, c, HEAD, asked) for c in (captured, known))
    assert torch.equal(first.counts.table, second.counts.table)
    none = torch.zeros_like(captured.batch.ids)  # token 0 cannot be drafted
    outside = drafter_loss(drafter, msgspec.structs.replace(captured, choice=none), HEAD, asked)
    assert outside.loss.item() == 0
    assert outside.counts.get("slots") == [0, 0, 0]
    assert outside.counts.get("outside") == outside.counts.get("judged")
    assert outside.counts.losses == [None] * 3
    assert outside.counts.loss(0.8) is None


def test_a_batch_without_loss_still_gives_gradients() -> None:
    drafter = drafter_of(MLA)
    result = drafter_loss(drafter, captured_of([[(5, 5), (1, 0)]]), HEAD, TrainSettings(steps=1))
    assert result.loss.item() == 0
    assert result.counts.accuracy == [None] * 3
    grads = gradients(drafter, result.loss)
    assert "fc.weight" in grads and "lm_head.weight" in grads
    assert all(bool((g == 0).all()) for g in grads.values())


def test_conditional_and_marginal_accuracies_by_hand() -> None:
    table = torch.zeros(len(FIELDS), 2, dtype=torch.float64)
    table[FIELDS.index("judged")] = torch.tensor([8.0, 10.0])
    table[FIELDS.index("right")] = torch.tensor([4.0, 5.0])
    table[FIELDS.index("runs")] = torch.tensor([8.0, 6.0])
    table[FIELDS.index("reached")] = torch.tensor([8.0, 3.0])
    table[FIELDS.index("run_right")] = torch.tensor([4.0, 2.0])
    counts = StepCounts(table=table)
    assert counts.accuracy == [0.5, 0.5]
    assert counts.marginal == [0.5, pytest.approx(1 / 3)]
    assert counts.conditional == [0.5, pytest.approx(2 / 3)]


def test_noise_is_drawn_from_the_generator_and_scaled_by_each_state() -> None:
    aux = torch.randn(2, 50, 48) * torch.tensor([1.0, 10.0, 100.0]).repeat_interleave(16)

    def draw(seed: int) -> Tensor:
        return noisy(aux, 3, 0.05, torch.Generator().manual_seed(seed)) - aux

    assert torch.equal(draw(3), draw(3)) and not torch.equal(draw(3), draw(4))
    size = aux.unflatten(-1, (3, 16)).square().mean(-1, keepdim=True).sqrt()
    share = draw(3).unflatten(-1, (3, 16)) / size
    assert 0.049 < share.abs().max() <= 0.0501
    assert share.std() == pytest.approx(0.05 / 3**0.5, rel=0.05)
    assert noisy(aux, 3, 0.0, None) is aux
    drafter, captured = drafter_of(LLAMA), captured_of([[(14, 3)]])
    asked = TrainSettings(steps=1, noise=0.1)
    seeds = (torch.Generator().manual_seed(seed) for seed in (1, 1, 2))
    one, same, other = (drafter_loss(drafter, captured, HEAD, asked, generator=g) for g in seeds)
    assert one.loss.item() == same.loss.item() != other.loss.item()


def test_bfloat16_products_come_near_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = captured_of([[(14, 3), (9, 0)], [(17, 8)]])
    drafter = drafter_of(MLA, draft_vocabulary=15)
    exact = drafter_loss(drafter, captured, HEAD, TrainSettings(steps=1, precision="float32"))
    rough = drafter_loss(drafter, captured, HEAD, TrainSettings(steps=1, precision="bfloat16"))
    assert rough.loss.dtype == torch.float32
    assert rough.loss.item() != exact.loss.item()
    assert rough.loss.item() == pytest.approx(exact.loss.item(), rel=0.02)
    expected = gradients(drafter, exact.loss)
    for name, gradient in gradients(drafter, rough.loss).items():
        near = torch.cosine_similarity(gradient.flatten(), expected[name].flatten(), 0)
        assert gradient.dtype == torch.float32 and near > 0.98, name


def test_the_targets_choice_does_not_come_from_rounded_logits() -> None:
    generator = torch.Generator().manual_seed(2)
    states = torch.randn(400, 64, generator=generator).bfloat16().float()
    head = torch.randn(500, 64, generator=generator).bfloat16().float()
    exact = target_choice(states, head)
    before = torch.backends.mkldnn.matmul.fp32_precision
    with trainer.autocast(torch.device("cpu"), "bfloat16"):
        rough = target_choice(states, head)
    assert torch.equal(exact, (states @ head.T).argmax(-1))
    assert torch.equal(rough, exact)  # what is rounded already is not rounded again
    assert torch.backends.mkldnn.matmul.fp32_precision == before


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunk", [1, 300, 401 * 64, 401 * 500 + 7])
def test_a_choice_out_of_blocks_is_the_argmax_over_all(
    monkeypatch: pytest.MonkeyPatch, precision: str, chunk: int
) -> None:
    generator = torch.Generator().manual_seed(4)
    states = torch.randint(-3, 4, (401, 16), generator=generator).float()
    head = torch.randint(-2, 3, (500, 16), generator=generator).float()  # many ties
    head[250:] = head[:250]  # each likeliest token twice
    monkeypatch.setattr("training.loss.CHUNK", chunk)
    monkeypatch.setattr("training.loss._ROWS", 200)
    with trainer.autocast(torch.device("cpu"), precision):
        found = target_choice(states, head)
    assert torch.equal(found, (states @ head.T).argmax(-1))
    assert found.max() < 250


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [None, 15], ids=["whole", "draft vocabulary"])
def test_a_head_made_once_gives_the_same_bits(precision: str, size: int | None) -> None:
    captured = captured_of([[(14, 3), (9, 0)], [(17, 8)]])
    drafter = drafter_of(LLAMA) if size is None else drafter_of(LLAMA, draft_vocabulary=size)
    asked = TrainSettings(steps=1, precision=precision)  # type: ignore[arg-type]
    once = trainer.target_head(drafter, HEAD)
    assert once.whole is HEAD and once.drafted.shape == (size or HEAD.shape[0], HEAD.shape[1])
    for _ in range(2):
        plain, same = (drafter_loss(drafter, captured, head, asked) for head in (HEAD, once))
        assert torch.equal(plain.loss, same.loss)
        assert torch.equal(plain.counts.table, same.counts.table)
        expected = gradients(drafter, plain.loss)
        for name, gradient in gradients(drafter, same.loss).items():
            assert torch.equal(gradient, expected[name]), name
    half = trainer.target_head(drafter, HEAD.bfloat16())
    assert half.whole.dtype == torch.bfloat16 and half.drafted.dtype == torch.float32


def test_an_objective_makes_its_head_once() -> None:
    objective = Objective(TrainSection(), HEAD, torch.device("cpu"))
    first, other = drafter_of(LLAMA, draft_vocabulary=15), drafter_of(LLAMA)
    made = objective.head(first)
    assert objective.head(first) is made and made.drafted.shape[0] == 15
    assert objective.head(other).drafted.shape[0] == HEAD.shape[0]
    assert torch.equal(objective.head(first).drafted, made.drafted)


@pytest.mark.parametrize(
    ("tiles", "instructions", "precision", "wanted"),
    [
        (False, False, "auto", False),
        (True, False, "auto", True),
        (False, True, "auto", True),
        (True, True, "float32", False),
        (False, False, "bfloat16", True),
    ],
)
def test_bfloat16_is_taken_where_it_is_quick(
    tiles: bool,
    instructions: bool,
    precision: str,
    wanted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trainer, "has_tiles", lambda: tiles)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions, raising=False)
    with trainer.autocast(torch.device("cpu"), precision):
        assert torch.is_autocast_enabled("cpu") is wanted
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == (
            torch.bfloat16 if wanted else torch.float32
        )


@pytest.mark.parametrize("values", [8, 5])
def test_attention_by_hand_equals_the_flash_kernel(values: int) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [7, 1, 12, 11, 3]
    documents = Documents(lengths, torch.device("cpu"))
    at = torch.tensor([2, 3, 6, 7, 9, 20, 21, 30, 33])
    n, m = sum(lengths), at.numel()

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    q, k, v = random(m, 4, 8), random(n, 2, 8), random(n, 2, values)
    own = [(random(m, 2, 8), random(m, 2, values)) for _ in range(2)]
    attention = TttAttention(documents, at, 0.3)
    attention.start(k, v)
    fast, plain = attention(q, own), attention._by_hand(q, own)
    torch.testing.assert_close(fast, plain)
    leaves = [q, k, v, *(x for pair in own for x in pair)]
    back = torch.randn(fast.shape, generator=generator, dtype=torch.float64)
    for a, b in zip(*(torch.autograd.grad(o, leaves, back) for o in (fast, plain)), strict=True):
        torch.testing.assert_close(a, b)


def test_the_gpu_kernels_are_called_as_they_are_declared() -> None:
    """Shapes and arguments only: a meta tensor runs no kernel."""
    documents = Documents([7, 1, 12], torch.device("cpu"))
    documents.edges = documents.edges.to("meta")

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)

    at = torch.tensor([2, 3, 7, 9, 19], device="meta")
    q, k, v = empty(5, 4, 16), empty(20, 2, 16), empty(20, 2, 8)
    own = (empty(5, 2, 16), empty(5, 2, 8))
    attention = TttAttention(documents, at, 0.3)
    attention.start(k, v)
    out = attention(q, [own])
    assert out.shape == (5, 4, 8)
    grads = torch.autograd.grad(out, (q, k, v, *own), torch.empty_like(out))
    assert [g.shape for g in grads] == [x.shape for x in (q, k, v, *own)]


@given(st.lists(st.lists(st.integers(1, 9), max_size=5), min_size=1, max_size=4))
def test_documents_are_found_and_put_back(rows: list[list[int]]) -> None:
    if not any(rows):
        return
    width = max(map(sum, rows))
    batch = collate([[Document(ids=[1] * n, loss_from=0) for n in row] for row in rows], width)
    lengths = document_lengths(batch.documents)
    assert lengths == [n for row in rows for n in row]
    documents = Documents(lengths, torch.device("cpu"))
    x = torch.randn(documents.count, 2, 3)
    assert torch.equal(documents.collect(documents.spread(x)), x)
    everything = torch.arange(documents.count)
    assert torch.equal(documents.collect(documents.place(x, everything), everything), x)
