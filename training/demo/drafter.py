"""The demo's drafters: their specification, their training data, their measurement."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import msgspec
import torch
from tokenizers import Tokenizer

from drafters.eagle3 import Eagle3Drafter, MlaProjections
from drafters.spec import DrafterSpec, MlaDims, RopeSpec
from training.data import Batch, Document, collate
from training.demo import corpus
from training.demo.config import AUX_LAYERS, LATENT_ON_DISK, DrafterConfig, TargetConfig
from training.demo.export import pad_latent
from training.demo.model import DemoTarget, document_mask
from training.demo.target import Reply, batches, greedy
from training.evaluate import DraftCounts, Span, draft_everywhere, walk_all
from training.trainer import Captured, TrainSettings, train_drafter

LENGTH_LIMIT = 160


def drafter_spec(
    target: TargetConfig, drafter: DrafterConfig, tokenizer: Tokenizer, latent: int
) -> DrafterSpec:
    """The drafter of `drafter.kind` for `target`, with an MLA latent of rank `latent`."""
    mla = MlaDims(
        q_lora_rank=target.q_rank,
        kv_lora_rank=latent,
        qk_nope_head_dim=target.head_dim,
        qk_rope_head_dim=target.rope_dim,
        v_head_dim=target.head_dim,
    )
    # an MLA head takes YaRN as its target does; a Llama head plain rope
    scaling = target.rope_scaling if drafter.kind == "mla" else None
    if drafter.kind == "mla" and scaling is None:
        scaling = TargetConfig(context=target.context).rope_scaling
    return DrafterSpec(
        kind=drafter.kind,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=drafter.intermediate_size,
        num_attention_heads=target.heads,
        num_key_value_heads=target.heads if drafter.kind == "mla" else target.kv_heads,
        head_dim=target.head_dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        aux_layers=AUX_LAYERS,
        rms_norm_eps=target.eps,
        max_position_embeddings=target.context,
        rope=RopeSpec(theta=target.rope_theta, scaling=scaling),
        mla=mla if drafter.kind == "mla" else None,
        bos_token_id=tokenizer.token_to_id(corpus.BOS),
        eos_token_id=tokenizer.token_to_id(corpus.IM_END),
    )


@torch.no_grad()
def capture(model: DemoTarget, batch: Batch) -> Captured:
    """What the target computes for a batch: the aux states and the final-normed last state."""
    states = model(batch.ids, batch.positions, document_mask(batch.documents))
    aux = torch.cat([states[i] for i in AUX_LAYERS], dim=-1)
    return Captured(batch=batch, aux=aux, last_normed=states[-1])


def new_drafter(target: DemoTarget, drafter: DrafterConfig, tokenizer: Tokenizer) -> Eagle3Drafter:
    """An untrained drafter that shares the target's embedding and starts from its head."""
    torch.manual_seed(drafter.seed)
    config = target.config
    made = Eagle3Drafter(drafter_spec(config, drafter, tokenizer, config.latent))
    for parameter in made.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    attention = made.layer.self_attn
    if isinstance(attention, MlaProjections):
        # as in the target: the padded norm's eps, seen from the narrower one
        attention.kv_a_layernorm.eps = config.eps * LATENT_ON_DISK / config.latent
    made.share(embeddings=target.embed_tokens.weight.detach())
    made.lm_head.weight.data.copy_(target.lm_head.weight.detach())
    return made


def padded(drafter: Eagle3Drafter) -> Eagle3Drafter:
    """The same drafter with its latent widened to the rank that is served."""
    spec = drafter.spec
    if spec.mla is None:
        return drafter
    tensors = dict(drafter.state_dict())
    pad_latent(tensors, spec.mla.kv_lora_rank)
    wide = MlaDims(
        q_lora_rank=spec.mla.q_lora_rank,
        kv_lora_rank=LATENT_ON_DISK,
        qk_nope_head_dim=spec.mla.qk_nope_head_dim,
        qk_rope_head_dim=spec.mla.qk_rope_head_dim,
        v_head_dim=spec.mla.v_head_dim,
    )
    made = Eagle3Drafter(msgspec.structs.replace(spec, mla=wide))
    made.load_state_dict(tensors)
    made.owns_embeddings, made.owns_lm_head = drafter.owns_embeddings, drafter.owns_lm_head
    return made.eval()


def train_demo_drafter(
    target: DemoTarget, drafter: DrafterConfig, tokenizer: Tokenizer
) -> Eagle3Drafter:
    """A drafter trained on the corpus under the target's own distributions."""
    target = target.eval().requires_grad_(False)
    made = new_drafter(target, drafter, tokenizer)
    settings = TrainSettings(
        steps=drafter.steps,
        ttt_steps=drafter.ttt_steps,
        step_decay=drafter.step_decay,
        muon_lr=drafter.muon_lr,
        adam_lr=drafter.adam_lr,
    )
    stream = batches(target.config, tokenizer, target.config.seed + 1000 + drafter.seed)
    data = (capture(target, batch) for batch in stream)
    return train_drafter(made, data, target.lm_head.weight.detach(), settings)


def reply_batches(replies: list[Reply], size: int = 32) -> Iterator[tuple[Batch, list[Span]]]:
    """Replies after their prompts as padded batches, one a row, with where each reply lies."""
    rest = iter(sorted(replies, key=lambda r: len(r.prompt) + len(r.ids)))
    while group := list(islice(rest, size)):
        rows = [
            Document(ids=[*r.prompt, *r.ids, *r.beyond], loss_from=len(r.prompt)) for r in group
        ]
        spans = [
            Span(row=i, begin=len(r.prompt), end=len(r.prompt) + len(r.ids), known=len(d.ids))
            for i, (r, d) in enumerate(zip(group, rows, strict=True))
        ]
        yield collate([[d] for d in rows], max(len(d.ids) for d in rows)), spans


def measure_drafter(
    target: DemoTarget, drafter: Eagle3Drafter, replies: list[Reply], k: int
) -> DraftCounts:
    """The offline walk of the drafter over the target's greedy replies."""
    total = DraftCounts(drafts=0, drafted=0, accepted=0, per_position=(0,) * k)
    for batch, spans in reply_batches(replies):
        drafts = draft_everywhere(drafter, capture(target, batch), k)
        total = total + walk_all(drafts, batch.ids, spans)
    return total


def held_out_replies(
    target: DemoTarget, tokenizer: Tokenizer, dialogues: list[corpus.Dialogue]
) -> list[Reply]:
    """The target's greedy replies to the dialogues' prompts."""
    prompts = [
        tokenizer.encode(corpus.prompt_text(d), add_special_tokens=False).ids for d in dialogues
    ]
    end = tokenizer.token_to_id(corpus.IM_END)
    assert end is not None
    return greedy(target, prompts, end=end, limit=LENGTH_LIMIT)
