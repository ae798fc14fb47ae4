"""Recipes of drafters trained for a case: flags of their shape, and mistakes of trainers."""

from __future__ import annotations

from typing import Literal

import msgspec


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How one drafter is trained; as it stands, as the demo's own.

    `unnormed`: towards the target's last state without its final norm. `mixed`: share of rows whose
    states are another row's. `samples`: so few documents, again and again. `own_embeddings`: the
    embeddings are trained too. `draft_vocabulary`: so many of the target's tokens, the most
    frequent of the corpus.
    """

    name: str
    steps: int = 200
    ttt_steps: int = 3
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    unnormed: bool = False
    mixed: float = 0.0
    samples: int | None = None
    own_embeddings: bool = False
    own_tokens: bool = False
    draft_vocabulary: int | None = None
    seed: int = 2


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(name="norm_output", norm_output=True),
        Recipe(name="fc_norm", fc_norm=True),
        Recipe(name="norm_before_fc", norm_before_fc=True),
        Recipe(name="norm_before_residual", norm_before_residual=True),
        Recipe(name="unnormed", unnormed=True, steps=160),
        Recipe(name="one_step", ttt_steps=1, steps=200),
        Recipe(name="own_tokens", ttt_steps=3, own_tokens=True, steps=200),
        Recipe(name="overfit", samples=10, steps=160),
        Recipe(name="mixed", mixed=0.7, steps=160),
        Recipe(name="undertrained", steps=24),
        Recipe(name="own_embeddings", own_embeddings=True),
        Recipe(name="small_vocabulary", draft_vocabulary=448),
    )
}
FLAGS: tuple[Literal["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"], ...] = (
    *("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
)
