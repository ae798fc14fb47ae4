"""A drafter with one thing otherwise.

`alter` makes of a reading what it changes in the drafter (a copy that shares all weights which
stay) or in its states; `running` does what it changes in the steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafters.eagle3 import Eagle3Drafter, LlamaProjections, MlaProjections
from drafters.layers import RMSNorm
from drafters.spec import RopeSpec
from harness.diagnose.experiments.otherwise import STATES, States
from harness.diagnose.readings import Reading

if TYPE_CHECKING:
    from harness.diagnose.experiments.known import Knowledge

MOST_WORK = 10**11
"""Products that comparing two heads row by row may cost."""
ALIKE = 0.5


@dataclass(frozen=True, kw_only=True)
class Altered:
    """How a reading is run: its drafter, and what is otherwise around it, by the reading's name."""

    reading: Reading
    drafter: Eagle3Drafter
    states: States | None = None

    @property
    def name(self) -> str:
        return self.reading.name


def alter(reading: Reading, knowledge: Knowledge) -> Altered | None:
    """None where the reading is the checkpoint's own, or means nothing for this drafter."""
    drafter = knowledge.drafter
    if reading.by == "drafter" and reading.cause is not None:
        changed = _copied(drafter)
        if not _CHANGES[reading.name](changed, knowledge):
            return None
        return Altered(reading=reading, drafter=changed)
    if reading.by == "states" and reading.layers is None and reading.name in STATES:
        states = STATES[reading.name](knowledge)
        return None if states is None else Altered(reading=reading, drafter=drafter, states=states)
    return Altered(reading=reading, drafter=drafter)


def _copied(drafter: Eagle3Drafter) -> Eagle3Drafter:
    """The same weights in a module of its own, whose parts may be replaced."""
    made = copy.copy(drafter)
    made._modules = dict(drafter._modules)
    made._buffers = dict(drafter._buffers)
    made._parameters = dict(drafter._parameters)
    return made


# -- the drafter: each changes the copy and says whether that made a difference -----------------

Change = Callable[[Eagle3Drafter, "Knowledge"], bool]


def _flag(name: str) -> Change:
    def change(made: Eagle3Drafter, _: Knowledge) -> bool:
        made.spec = msgspec.structs.replace(made.spec, **{name: not getattr(made.spec, name)})
        return True

    return change


def _ones(size: int, like: RMSNorm) -> RMSNorm:
    norm = RMSNorm(size, like.eps).to(like.weight.device, like.weight.dtype)
    return norm.requires_grad_(False)


def _no_input_norm(made: Eagle3Drafter, _: Knowledge) -> bool:
    had = made.input_norm is not None or made.fc_norm is not None
    made.input_norm = made.fc_norm = None
    return had


def _input_norm_of_ones(made: Eagle3Drafter, _: Knowledge) -> bool:
    if made.input_norm is None:
        return False
    made.input_norm = _ones(made.fc.in_features, made.norm)
    return True


def _input_norm_added(made: Eagle3Drafter, knowledge: Knowledge) -> bool:
    if made.input_norm is not None or made.fc_norm is not None:
        return False
    made.input_norm = _ones(made.fc.in_features, made.norm)
    return True


def _fc_norm_of_ones(made: Eagle3Drafter, _: Knowledge) -> bool:
    if made.fc_norm is None:
        return False
    made.fc_norm = _fc_norms(made)
    return True


def _fc_norm_added(made: Eagle3Drafter, _: Knowledge) -> bool:
    if made.input_norm is not None or made.fc_norm is not None:
        return False
    made.fc_norm = _fc_norms(made)
    return True


def _fc_norms(made: Eagle3Drafter) -> nn.ModuleList:
    spec = made.spec
    return nn.ModuleList(_ones(spec.target_hidden_size, made.norm) for _ in spec.aux_layers)


def _linear(weight: Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made


def _target_head(*, first: bool) -> Change:
    def change(made: Eagle3Drafter, knowledge: Knowledge) -> bool:
        theirs = knowledge.engine.model.head.weight.t()  # [V, H]
        mine = made.lm_head.weight
        if theirs.shape[1] != mine.shape[1] or (first and made.t2d is None):
            return False
        rows = theirs[: mine.shape[0]] if first or made.t2d is None else theirs[_kept(made)]
        if torch.equal(rows.to(mine.dtype), mine):
            return False
        made.lm_head = _linear(rows.to(mine.dtype).contiguous())
        return True

    return change


def _kept(made: Eagle3Drafter) -> Tensor:
    """The target's ids of the draft vocabulary, whatever the table holds."""
    ids = made.to_target(torch.arange(made.spec.draft_vocab_size))
    return ids.clamp(0, made.spec.vocab_size - 1)


def _target_embeddings(made: Eagle3Drafter, knowledge: Knowledge) -> bool:
    theirs, mine = knowledge.engine.model.embedding, made.embed_tokens.weight
    if theirs.shape != mine.shape or torch.equal(theirs.to(mine.dtype), mine):
        return False
    made.embed_tokens = nn.Embedding.from_pretrained(theirs.detach().to(mine.dtype))
    return True


def _table(to_target: Callable[[Eagle3Drafter], Tensor]) -> Change:
    """`to_target`: the target's id of each draft id, [D]."""

    def change(made: Eagle3Drafter, _: Knowledge) -> bool:
        if made.d2t is None:
            return False
        ids = to_target(made)
        offsets = ids - torch.arange(ids.numel(), device=ids.device)
        if torch.equal(offsets, made.d2t):
            return False
        made.d2t = offsets
        return True

    return change


def _from_t2d(made: Eagle3Drafter) -> Tensor:
    """As the mask of kept tokens says, where it keeps as many as there are draft ids."""
    assert made.t2d is not None and made.d2t is not None
    kept = made.t2d.nonzero().flatten()
    own = made.to_target(torch.arange(made.d2t.numel()))
    return kept if kept.numel() == own.numel() else own


def _from_head(made: Eagle3Drafter, knowledge: Knowledge) -> bool:
    """Each draft id stands for the target's token whose head row is most like its own.

    Heads are trained from the target's rows. Rows that are like none of them say nothing.
    """
    theirs, mine = knowledge.engine.model.head.weight.t(), made.lm_head.weight
    work = theirs.shape[0] * mine.numel()
    if made.d2t is None or theirs.shape[1] != mine.shape[1] or work > MOST_WORK:
        return False
    alike = F.normalize(mine, dim=1) @ F.normalize(theirs.to(mine.dtype), dim=1).t()  # [D, V]
    most, ids = alike.max(1)
    if most.median() < ALIKE:
        return False
    return _table(lambda _: ids)(made, knowledge)


def _rope(change_spec: Callable[[RopeSpec, Knowledge], RopeSpec]) -> Change:
    def change(made: Eagle3Drafter, knowledge: Knowledge) -> bool:
        rope = change_spec(made.spec.rope, knowledge)
        if rope == made.spec.rope:
            return False
        before, scale = made.rope_cos, made.scale
        made.spec = msgspec.structs.replace(made.spec, rope=rope)
        made.reset_rope()
        return scale != made.scale or not torch.equal(before, made.rope_cos)

    return change


def _theta(theta: float) -> Change:
    return _rope(lambda rope, _: msgspec.structs.replace(rope, theta=theta))


def _target_rope(_: RopeSpec, knowledge: Knowledge) -> RopeSpec:
    config = knowledge.engine.model.config
    return RopeSpec(theta=config.rope_theta, scaling=config.rope_scaling)


def _without_mscale(made: Eagle3Drafter, _: Knowledge) -> bool:
    before = made.scale
    made.__class__ = _PlainScale
    return bool(made.scale != before)


def _other_pairs(made: Eagle3Drafter, _: Knowledge) -> bool:
    """Rotate neighbours where halves were, or the reverse: the rows of q and k change places."""
    layer = copy.copy(made.layer)
    layer._modules = dict(layer._modules)
    attention = copy.copy(layer.self_attn)
    attention._modules = dict(attention._modules)
    if isinstance(attention, MlaProjections):
        dims = attention.dims
        first = "q_proj" if dims.q_lora_rank is None else "q_b_proj"
        swaps = [
            (first, dims.qk_nope_head_dim, dims.qk_rope_head_dim),
            ("kv_a_proj_with_mqa", dims.kv_lora_rank, dims.qk_rope_head_dim),
        ]
    else:
        assert isinstance(attention, LlamaProjections)
        swaps = [("q_proj", 0, attention.dim), ("k_proj", 0, attention.dim)]
    for name, plain, rotary in swaps:
        order = torch.arange(rotary)
        half = order.view(2, -1).t().flatten() if made.spec.mla else order.view(-1, 2).t().flatten()
        rows = torch.cat((torch.arange(plain), plain + half))
        weight = getattr(attention, name).weight.unflatten(0, (-1, plain + rotary))
        attention._modules[name] = _linear(weight[:, rows].flatten(0, 1))
    layer._modules["self_attn"] = attention
    made.layers = nn.ModuleList([layer])
    return True


def _final_norm(of: Callable[[Eagle3Drafter, Knowledge], Tensor | None]) -> Change:
    def change(made: Eagle3Drafter, knowledge: Knowledge) -> bool:
        weight = of(made, knowledge)
        mine = made.norm.weight
        if weight is None or weight.shape != mine.shape or torch.equal(weight, mine):
            return False
        norm = _ones(mine.shape[0], made.norm)
        norm.weight = nn.Parameter(weight.to(mine.dtype), requires_grad=False)
        made.norm = norm
        return True

    return change


def _by_head(made: Eagle3Drafter, _: Knowledge) -> Tensor:
    """The norm's weights that make every column of the head, weighed by them, of one size.

    A head is trained behind its norm, and takes back what that weighs unevenly: where weights of
    the norm were lost, their columns still stand out.
    """
    size = made.lm_head.weight.norm(dim=0).clamp_min(1e-12)  # [H]
    return (made.norm.weight.abs() * size).median() / size


class _PlainScale(Eagle3Drafter):
    @property
    def scale(self) -> float:
        if self.spec.mla is None:
            return super().scale
        dims = self.spec.mla
        return float((dims.qk_nope_head_dim + dims.qk_rope_head_dim) ** -0.5)


class _Finish(Eagle3Drafter):
    """`finish` with the residual in these places only."""

    attention, mlp, carried = True, True, True

    def finish(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.layer
        hidden = layer.self_attn.o_proj(attended.flatten(-2))
        if self.attention:
            hidden = hidden + residual
        added = layer.mlp(layer.post_attention_layernorm(hidden))
        whole = hidden + added if self.mlp else added
        normed = self.norm(whole)
        if self.spec.norm_output:
            return normed, normed
        return (whole if self.carried else added), normed


class _NoAttentionResidual(_Finish):
    attention = False


class _NoMlpResidual(_Finish):
    mlp = False


class _NoResidual(_Finish):
    attention = mlp = False


class _NotCarried(_Finish):
    carried = False


def _as(kind: type[Eagle3Drafter]) -> Change:
    def change(made: Eagle3Drafter, _: Knowledge) -> bool:
        made.__class__ = kind
        return True

    return change


_CHANGES: dict[str, Change] = {
    "norm_output toggled": _flag("norm_output"),
    "norm_before_residual toggled": _flag("norm_before_residual"),
    "input norm dropped": _no_input_norm,
    "input norm of ones": _input_norm_of_ones,
    "input norm added": _input_norm_added,
    "fc norm of ones": _fc_norm_of_ones,
    "fc norm added": _fc_norm_added,
    "target's lm_head": _target_head(first=False),
    "target's lm_head, first rows": _target_head(first=True),
    "target's embeddings": _target_embeddings,
    "d2t absolute": _table(lambda made: made.d2t.clone()),  # type: ignore[union-attr]
    "d2t ignored": _table(lambda made: torch.arange(made.spec.draft_vocab_size)),
    "d2t as t2d says": _table(_from_t2d),
    "d2t as the head's rows say": _from_head,
    "rope scaling dropped": _rope(lambda rope, _: RopeSpec(theta=rope.theta)),
    "rope without mscale": _without_mscale,
    "target's rope": _rope(_target_rope),
    "rope theta 10000": _theta(1e4),
    "rope theta 50000": _theta(5e4),
    "rope theta 500000": _theta(5e5),
    "rope theta 1000000": _theta(1e6),
    "rope theta 5000000": _theta(5e6),
    "rope pairs the other way": _other_pairs,
    "final norm of ones": _final_norm(lambda made, _: torch.ones_like(made.norm.weight)),
    "target's final norm": _final_norm(lambda _, known: known.engine.model.norm),
    "final norm as the head's columns say": _final_norm(_by_head),
    "attention without residual": _as(_NoAttentionResidual),
    "mlp without residual": _as(_NoMlpResidual),
    "layer without residual": _as(_NoResidual),
    "recurrent state without residual": _as(_NotCarried),
}
