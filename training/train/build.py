"""The drafter to train: made for the target, or a checkpoint to go on from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from drafters.checkpoint import load
from drafters.eagle3 import Eagle3Drafter
from drafters.spec import DrafterError, DrafterSpec, RopeSpec
from drafters.validate import check_numbers
from harness.errors import UsageError
from training.heads import TargetFacts, expected_rope, scratch_spec
from training.plan import HeadSection
from training.train.target import TargetTensors

LEAST_COSINE = 0.5  # of a finetuned drafter's own embeddings with the target's
SAMPLED_ROWS = 512


def build(
    section: HeadSection,
    facts: TargetFacts,
    tensors: TargetTensors,
    *,
    aux_layers: Sequence[int],
    kept: Tensor | None,
    seed: int,
) -> Eagle3Drafter:
    """The drafter at the start of training, float32, with what is trained set to be.

    `kept` [D]: the target ids of the draft vocabulary, None: all of them. Raises `UsageError`
    where target, states, vocabulary and checkpoint do not fit each other.
    """
    if section.finetune is None:
        drafter = _from_scratch(section, facts, tensors, tuple(aux_layers), kept, seed)
    else:
        path = Path(section.finetune).expanduser()
        drafter = _from_checkpoint(path, facts, tensors, tuple(aux_layers))
        _check_vocabulary(path, drafter, kept)
    drafter = drafter.float()
    drafter.spec = msgspec.structs.replace(drafter.spec, dtype="float32")
    drafter.reset_rope()
    return set_trained(drafter, section, tensors)


def set_trained(
    drafter: Eagle3Drafter, section: HeadSection, tensors: TargetTensors
) -> Eagle3Drafter:
    """Which parameters are trained; embeddings that are not are the target's own, shared."""
    drafter.requires_grad_(True)
    if section.train_embeddings:
        if not drafter.owns_embeddings:
            own = tensors.embedding.float().clone()
            drafter.embed_tokens.weight = torch.nn.Parameter(own)
            drafter.owns_embeddings = True
    elif not drafter.owns_embeddings:
        drafter.share(embeddings=tensors.embedding.float())
    else:
        drafter.embed_tokens.requires_grad_(False)
    drafter.lm_head.requires_grad_(section.train_lm_head)
    return drafter


def same_rope(one: RopeSpec, other: RopeSpec) -> bool:
    """Whether two rotary embeddings are one; a scaling's two names for its kind count once."""

    def plain(rope: RopeSpec) -> dict[str, object]:
        scaling = dict(rope.scaling or {})
        kind = scaling.pop("rope_type", None) or scaling.pop("type", None)
        scaling.pop("type", None)
        return {**scaling, "kind": kind, "theta": rope.theta}

    return plain(one) == plain(other)


def _from_scratch(
    section: HeadSection,
    facts: TargetFacts,
    tensors: TargetTensors,
    aux_layers: tuple[int, ...],
    kept: Tensor | None,
    seed: int,
) -> Eagle3Drafter:
    """Random matrices of unit gain; the target's embedding, and its head's rows to begin with."""
    whole = kept is None or len(kept) == facts.vocab_size
    spec = scratch_spec(section, facts, aux_layers, facts.vocab_size if kept is None else len(kept))
    try:
        with torch.device("meta"):
            made = Eagle3Drafter(spec)
    except DrafterError as error:
        raise UsageError(f"drafter: {error}") from None
    made.share(embeddings=tensors.embedding.float())
    return _filled(made, spec, tensors, None if whole else kept, seed)


def _filled(
    made: Eagle3Drafter,
    spec: DrafterSpec,
    tensors: TargetTensors,
    kept: Tensor | None,
    seed: int,
) -> Eagle3Drafter:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in list(made.named_parameters()):
        owner = made.get_submodule(name.rpartition(".")[0])
        if name == "embed_tokens.weight":
            continue
        if name == "lm_head.weight":
            value = (tensors.lm_head if kept is None else tensors.lm_head[kept]).float().clone()
        elif parameter.dim() == 2:
            value = torch.empty(parameter.shape)
            torch.nn.init.normal_(value, std=parameter.shape[1] ** -0.5, generator=generator)
        else:
            value = torch.ones(parameter.shape)
        owner.weight = torch.nn.Parameter(value)
    made.reset_rope()
    if made.d2t is not None and kept is not None:
        made.d2t = torch.zeros(spec.draft_vocab_size, dtype=torch.int64)
        made.t2d = torch.zeros(spec.vocab_size, dtype=torch.bool)
        made.set_vocabulary(kept)
    return made


def _from_checkpoint(
    path: Path, facts: TargetFacts, tensors: TargetTensors, aux_layers: tuple[int, ...]
) -> Eagle3Drafter:
    try:
        drafter = load(path, facts.folder)
        check_numbers(path, facts.folder)
    except DrafterError as error:
        raise UsageError(f"drafter.finetune: {error}") from None
    spec = drafter.spec
    for what, has, wants in (
        ("target_hidden_size", spec.target_hidden_size, facts.hidden_size),
        ("vocab_size", spec.vocab_size, facts.vocab_size),
    ):
        if has != wants:
            raise UsageError(
                f"drafter.finetune {path}: its {what} is {has}, the target's {wants}; "
                "it was made for another target"
            )
    if spec.aux_layers != aux_layers:
        raise UsageError(_layers_differ(path, spec.aux_layers, aux_layers))
    if drafter.owns_embeddings:
        _check_embeddings(path, drafter.embed_tokens.weight.detach(), tensors.embedding)
    else:
        drafter.share(embeddings=tensors.embedding.float())
    if not drafter.owns_lm_head:
        rows = tensors.lm_head if drafter.t2d is None else tensors.lm_head[drafter.t2d]
        drafter.lm_head.weight = torch.nn.Parameter(rows.float().clone())
        drafter.owns_lm_head = True
    return drafter


def _check_vocabulary(path: Path, drafter: Eagle3Drafter, kept: Tensor | None) -> None:
    """The checkpoint's draft vocabulary is the one that the stage vocab wrote down."""
    own = None if drafter.t2d is None else drafter.t2d.nonzero().flatten()
    offsets = None if drafter.d2t is None else drafter.d2t + torch.arange(len(drafter.d2t))
    if own is not None and offsets is not None and not torch.equal(own, offsets):
        raise UsageError(
            f"drafter.finetune {path}: d2t and t2d do not say the same draft vocabulary; "
            "see `python -m drafters validate`"
        )
    same = own is kept if own is None or kept is None else torch.equal(own, kept)
    if not same:
        raise UsageError(
            f"drafter.finetune {path}: it drafts {drafter.spec.draft_vocab_size} tokens, the "
            f"stage vocab chose {'all' if kept is None else len(kept)}, not the same ones; run "
            "vocab again with this drafter.finetune"
        )


def _layers_differ(path: Path, own: tuple[int, ...], states: tuple[int, ...]) -> str:
    text = (
        f"drafter.finetune {path}: it takes the hidden states {list(own)}, the states were "
        f"captured at {list(states)}"
    )
    away = {a - b for a, b in zip(own, states, strict=False)}
    if len(own) == len(states) and away in ({1}, {-1}):
        text += " (one off: layer outputs and layer inputs were confused)"
    return f"{text}; capture with --set capture.aux_layers={','.join(map(str, own))}"


def _check_embeddings(path: Path, own: Tensor, target: Tensor) -> None:
    """Refuse embeddings that have nothing to do with the target's: left random, or another's."""
    if own.shape != target.shape:
        return  # a drafter of another width has embeddings of its own
    rows = torch.linspace(0, len(own) - 1, min(SAMPLED_ROWS, len(own))).long()
    cosine = torch.nn.functional.cosine_similarity(own[rows].float(), target[rows].float(), dim=-1)
    mean = float(cosine.mean())
    if not mean > LEAST_COSINE:
        raise UsageError(
            f"drafter.finetune {path}: its embed_tokens have a cosine of {mean:.2f} with the "
            "target's: they were left random or are of another target; remove embed_tokens.weight "
            "from the checkpoint to share the target's"
        )


def rope_in_doubt(drafter: Eagle3Drafter, facts: TargetFacts) -> RopeSpec | None:
    """The target's rotary embedding where the drafter's config says another; else None."""
    wanted = expected_rope(drafter.spec.kind, facts)
    return None if same_rope(drafter.spec.rope, wanted) else wanted
