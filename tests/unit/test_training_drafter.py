"""The drafter's trainer and its offline walk, held against plain step-by-step arithmetic."""

from __future__ import annotations

import msgspec
import pytest
import torch

from drafters.eagle3 import Eagle3Drafter
from drafters.spec import DrafterSpec, MlaDims
from training.data import Batch, Document, collate, pack
from training.evaluate import (
    DraftCounts,
    Span,
    draft_everywhere,
    proof_share,
    walk,
    walk_all,
)
from training.loss import restrict
from training.trainer import (
    Captured,
    TrainSettings,
    drafted_slots,
    drafter_loss,
    shift,
    train_drafter,
    unroll,
)

LLAMA = DrafterSpec(
    kind="llama",
    hidden_size=16,
    target_hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=30,
    draft_vocab_size=30,
    aux_layers=(2, 4, 5),
    max_position_embeddings=64,
)
MLA = msgspec.structs.replace(
    LLAMA,
    kind="mla",
    num_key_value_heads=4,
    mla=MlaDims(
        q_lora_rank=8, kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8
    ),
)


def batch_of(lengths: list[list[int]], width: int, *, loss_from: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(0)
    rows = [
        [
            Document(
                ids=torch.randint(0, 30, (n,), generator=generator).tolist(), loss_from=loss_from
            )
            for n in row
        ]
        for row in lengths
    ]
    return collate(rows, width)


def captured(batch: Batch, seed: int = 1) -> Captured:
    generator = torch.Generator().manual_seed(seed)
    shape = batch.ids.shape
    return Captured(
        batch=batch,
        aux=torch.randn(*shape, 48, generator=generator),
        last_normed=torch.randn(*shape, 16, generator=generator),
    )


def step_by_step(
    drafter: Eagle3Drafter, ids: list[int], aux: torch.Tensor, slot: int, k: int
) -> list[int]:
    """Draft k tokens after `slot` with a growing cache, one query at a time, as an engine does."""
    keys, values = [], []
    hidden, normed = None, None

    def attend(q: torch.Tensor) -> torch.Tensor:
        heads = q.shape[-2]
        k_all, v_all = torch.cat(keys), torch.cat(values)
        groups = heads // k_all.shape[1]
        k_all, v_all = (z.repeat_interleave(groups, 1) for z in (k_all, v_all))
        weights = (torch.einsum("qhd,shd->hqs", q, k_all) * drafter.scale).softmax(-1)
        return torch.einsum("hqs,shd->qhd", weights, v_all)

    for t in range(slot + 1):
        q, key, value, residual = drafter.project(
            drafter.embed(torch.tensor([ids[t + 1]])), drafter.fuse(aux[t : t + 1]),
            torch.tensor([t]),
        )  # fmt: skip
        keys.append(key)
        values.append(value)
        hidden, normed = drafter.finish(attend(q), residual)
    out = []
    for step in range(1, k + 1):
        assert hidden is not None and normed is not None
        token = drafter.to_target(drafter.logits(normed).argmax(-1))
        out.append(int(token))
        q, key, value, residual = drafter.project(
            drafter.embed(token), hidden, torch.tensor([slot + step])
        )
        keys.append(key)
        values.append(value)
        hidden, normed = drafter.finish(attend(q), residual)
    return out


@pytest.mark.parametrize("spec", [LLAMA, MLA], ids=["llama", "mla"])
@torch.no_grad()
def test_drafting_everywhere_equals_drafting_with_a_cache(spec: DrafterSpec) -> None:
    torch.manual_seed(0)
    drafter = Eagle3Drafter(spec).eval()
    data = captured(batch_of([[9, 7], [14]], 16))
    drafts = draft_everywhere(drafter, data, 3)
    for row, start, end in ((0, 0, 9), (0, 9, 16), (1, 0, 14)):
        ids = data.batch.ids[row, start:end].tolist()
        aux = data.aux[row, start:end]
        for slot in range(len(ids) - 1):
            expected = step_by_step(drafter, ids, aux, slot, 3)
            assert drafts[row, start + slot].tolist() == expected


@pytest.mark.parametrize("spec", [LLAMA, MLA], ids=["llama", "mla"])
def test_drafting_at_some_slots_is_drafting_everywhere_there(spec: DrafterSpec) -> None:
    torch.manual_seed(0)
    drafter = Eagle3Drafter(spec).eval()
    data = captured(batch_of([[9, 7], [14]], 17))
    everywhere = draft_everywhere(drafter, data, 4)
    some = torch.rand(2, 17) < 0.4
    drafts = draft_everywhere(drafter, data, 4, slots=some)
    real = some & (data.batch.documents >= 0)
    assert torch.equal(drafts[real], everywhere[real])
    assert not drafts[~real].any() and not everywhere[data.batch.documents < 0].any()
    nowhere = draft_everywhere(drafter, data, 2, slots=torch.zeros_like(some))
    assert nowhere.shape == (2, 17, 2) and not nowhere.any()


@torch.no_grad()
def test_documents_do_not_see_each_other() -> None:
    torch.manual_seed(0)
    drafter = Eagle3Drafter(LLAMA).eval()
    data = captured(batch_of([[8, 8]], 16))
    changed = data.aux.clone()
    changed[:, :8] += 1.0
    other = msgspec.structs.replace(data, aux=changed)
    before = [s.logits for s in unroll(drafter, data, 3, own_tokens=False)]
    after = [s.logits for s in unroll(drafter, other, 3, own_tokens=False)]
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[:, 8:], b[:, 8:])
        assert not torch.allclose(a[:, :6], b[:, :6])


def test_drafted_slots_are_those_whose_token_carries_loss() -> None:
    batch = batch_of([[6, 5]], 13, loss_from=3)
    # tokens 3, 4, 5 of the first document and 9, 10 of the second carry loss
    assert drafted_slots(batch, 0)[0].nonzero().flatten().tolist() == [1, 2, 3, 7, 8]
    assert drafted_slots(batch, 1)[0].nonzero().flatten().tolist() == [0, 1, 2, 6, 7]


def test_shift_looks_ahead() -> None:
    x = torch.arange(5).unsqueeze(0)
    assert shift(x, 2)[0, :3].tolist() == [2, 3, 4]
    assert shift(x, 0) is x


def test_small_draft_vocabulary_is_masked_and_mapped() -> None:
    spec = msgspec.structs.replace(LLAMA, draft_vocab_size=10)
    torch.manual_seed(0)
    drafter = Eagle3Drafter(spec)
    kept = torch.arange(0, 30, 3)
    drafter.set_vocabulary(kept)
    logits = torch.randn(4, 30)
    assert torch.equal(restrict(drafter, logits), logits[:, kept])
    data = captured(batch_of([[14]], 14))
    settings = TrainSettings(steps=1)
    result = drafter_loss(drafter, data, torch.randn(30, 16), settings)
    assert torch.isfinite(result.loss)
    for step in unroll(drafter, data, 2, own_tokens=True):
        assert set(step.tokens.flatten().tolist()) <= set(kept.tolist())


def test_cross_entropy_is_the_divergence_and_the_targets_entropy() -> None:
    torch.manual_seed(0)
    drafter = Eagle3Drafter(LLAMA)
    data = captured(batch_of([[14], [11]], 14))
    head = torch.randn(30, 16)
    soft, kl = (
        drafter_loss(drafter, data, head, TrainSettings(steps=1, ttt_steps=1, loss=kind)).loss
        for kind in ("soft_cross_entropy", "kl")
    )
    wanted = (data.last_normed @ head.T)[:, 1:][drafted_slots(data.batch, 0)[:, :-1]]
    entropy = -(wanted.softmax(-1) * wanted.log_softmax(-1)).sum(-1).mean()
    assert kl > 0
    torch.testing.assert_close(soft - kl, entropy)


def test_training_is_deterministic_and_lowers_the_loss(capsys: pytest.CaptureFixture[str]) -> None:
    data = captured(batch_of([[14], [12]], 14))
    head = torch.randn(30, 16, generator=torch.Generator().manual_seed(3))

    def trained() -> tuple[dict[str, torch.Tensor], float, float]:
        torch.manual_seed(5)
        drafter = Eagle3Drafter(MLA)
        settings = TrainSettings(steps=30)
        before = drafter_loss(drafter, data, head, settings).loss.item()
        train_drafter(drafter, iter([data] * 30), head, settings)
        return drafter.state_dict(), before, drafter_loss(drafter, data, head, settings).loss.item()

    first, before, after = trained()
    second, _, _ = trained()
    assert after < before - 0.2
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert "accuracy per TTT step" in capsys.readouterr().err


def test_walk_by_hand() -> None:
    # the reply is tokens 2 … 8 of the row: 5 6 7 8 9 1 2; token 9 is what came after
    ids = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 1, 2, 0]])
    drafts = torch.full((1, 10, 3), 99)
    drafts[0, 1] = torch.tensor([6, 7, 99])  # two accepted; the engine then knows up to token 5
    drafts[0, 4] = torch.tensor([99, 1, 2])  # none accepted, though later ones agree
    drafts[0, 5] = torch.tensor([1, 2, 0])  # three accepted, the last beyond the end
    counts = walk(drafts, ids, Span(row=0, begin=2, end=9, known=10))
    assert counts == DraftCounts(drafts=3, drafted=9, accepted=5, per_position=(2, 2, 1))
    assert counts.acceptance_length == pytest.approx(1 + 5 / 3)
    assert counts.position_rates == pytest.approx((2 / 3, 2 / 3, 1 / 3))
    short = walk(drafts, ids, Span(row=0, begin=2, end=9, known=9))
    assert short.per_position == (2, 2, 0)


def test_walks_pool_counts_and_none_is_not_zero() -> None:
    ids = torch.zeros(2, 6, dtype=torch.int64)
    drafts = torch.zeros(2, 6, 2, dtype=torch.int64)
    spans = [Span(row=r, begin=2, end=6, known=6) for r in (0, 1)]
    one = walk(drafts, ids, spans[0])
    assert walk_all(drafts, ids, spans) == one + one
    empty = walk_all(drafts, ids, [])
    assert empty.acceptance_length is None
    assert empty.acceptance_rate is None
    assert empty.position_rates is None


def test_proof_share_tells_states_of_other_tokens() -> None:
    batch = batch_of([[12]], 12)
    head = torch.eye(30)[:, :30]
    states = torch.nn.functional.one_hot(shift(batch.ids, 1), 30).float()
    good = Captured(batch=batch, aux=torch.zeros(1, 12, 48), last_normed=states)
    assert proof_share(good, head) == 1.0
    swapped = msgspec.structs.replace(good, last_normed=states.flip(1))
    assert proof_share(swapped, head) < 0.6


def test_packing_cuts_nothing_and_keeps_order_of_tokens() -> None:
    documents = [Document(ids=list(range(n, 2 * n)), loss_from=1) for n in (7, 3, 9, 20, 5, 6, 8)]
    endless = iter(documents * 50)
    batches = [next(pack(endless, rows=2, length=16)) for _ in range(3)]
    for batch in batches:
        for row in range(2):
            numbers = batch.documents[row]
            for number in range(int(numbers.max()) + 1):
                at = (numbers == number).nonzero().flatten()
                ids = batch.ids[row, at].tolist()
                assert ids in [d.ids for d in documents]
                assert batch.positions[row, at].tolist() == list(range(len(ids)))
                assert batch.loss_mask[row, at].tolist() == [False] + [True] * (len(ids) - 1)
        assert not batch.loss_mask[batch.documents < 0].any()
