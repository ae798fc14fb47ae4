"""The readings of a drafter: as its checkpoint says, or with one thing otherwise.

Held against an engine's proposals, the reading that gives the same tokens names what the engine
did. Held against the target's own text, the one that is accepted more than the checkpoint's names
what the drafter was trained for. `experiments.altered` runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

AS_DECLARED = "as declared"

By = Literal["drafter", "states", "tokens", "steps", "cache", "batch"]
"""What is otherwise: the drafter's weights or flags, the states it is handed, the tokens it is fed,
what is carried from one draft step to the next, the keys that its cache holds, or whose
proposals these are."""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run a drafter. `cause`: the one of `causes.CAUSES` that it points to.

    `layers`: the aux layers in its place, in transformers' index, for readings of other layers.
    """

    name: str
    cause: str | None
    by: By
    layers: tuple[int, ...] | None = None


_KNOWN: tuple[tuple[By, str | None, tuple[str, ...]], ...] = (
    ("drafter", None, (AS_DECLARED,)),
    ("drafter", "norm_output", ("norm_output toggled",)),
    ("drafter", "norm_before_residual", ("norm_before_residual toggled",)),
    (
        "drafter",
        "input_norm",
        (
            *("input norm dropped", "input norm of ones", "input norm added"),
            *("fc norm of ones", "fc norm added"),
        ),
    ),
    (
        "drafter",
        "lm_head_replaced",
        ("target's lm_head", "target's lm_head, first rows"),
    ),
    ("drafter", "embeddings_replaced", ("target's embeddings",)),
    (
        "drafter",
        "vocabulary_map",
        ("d2t absolute", "d2t ignored", "d2t as t2d says", "d2t as the head's rows say"),
    ),
    (
        "drafter",
        "rope",
        (
            *("rope scaling dropped", "rope without mscale", "target's rope"),
            *("rope theta 10000", "rope theta 50000", "rope theta 500000", "rope theta 1000000"),
            *("rope theta 5000000", "rope pairs the other way"),
        ),
    ),
    (
        "drafter",
        "final_norm",
        ("final norm of ones", "target's final norm", "final norm as the head's columns say"),
    ),
    (
        "drafter",
        "residual_missing",
        (
            *("attention without residual", "mlp without residual", "layer without residual"),
            "recurrent state without residual",
        ),
    ),
    (
        "states",
        "states_normed",
        ("states under the final norm", "states under their layers' norms"),
    ),
    (
        "states",
        "states_without_residual",
        ("states without residual", "states of the feed-forward part alone"),
    ),
    ("states", "states_scaled", ("states doubled", "states halved", "states scaled as routed")),
    ("states", "states_moved", ("states moved by +1", "states moved by -1")),
    ("tokens", "token_shift", ("tokens not shifted", "tokens shifted twice")),
    (
        "steps",
        "recurrence",
        ("fused state fed again", "recurrent state zero", "first state fed again"),
    ),
    (
        "steps",
        "positions",
        (
            *("positions frozen in drafting", "positions doubled in drafting"),
            *("positions restarted at each call", "positions of a call frozen"),
            *("positions ahead by one in decode", "positions zero in decode"),
            "positions zero from the prompt's last token on",
            "positions restarted from the prompt's last token on",
        ),
    ),
    (
        "steps",
        "drafter_graph",
        (
            *(
                "first token fed again",
                "tokens of the previous call",
                "states of the previous call",
            ),
            "states and tokens of the previous call",
        ),
    ),
    ("cache", "kv_not_overwritten", ("cache not overwritten", "cache overwritten at its end only")),
    (
        "cache",
        "drafter_cache",
        ("cache of the prompt zero", "cache of the prompt unseen", "cache of another's prompt"),
    ),
    ("batch", "proposals_other_request", ("another request's proposals",)),
)

READINGS: dict[str, Reading] = {
    name: Reading(name=name, cause=cause, by=by) for by, cause, names in _KNOWN for name in names
}
"""Every reading but those of other layers, which depend on the target's depth."""

_LAYERS = {
    "layers off by +1": "layers_shifted",
    "layers off by -1": "layers_shifted",
    "layers by default": "layers_default",
    "layers in another order": "layers_order",
    "layers as SGLang reads them": "layers_shifted",
    "layers as vLLM reads them": "layers_shifted",
    "other layers": "layers_other",
}


def layers_reading(kind: str, layers: Sequence[int]) -> Reading:
    """The reading with the aux states of `layers`; `kind` is a key of `_LAYERS`."""
    listed = ", ".join(map(str, layers))
    return Reading(
        name=f"{kind} ({listed})", cause=_LAYERS[kind], by="states", layers=tuple(layers)
    )


def reading_of(name: str) -> Reading:
    """The reading of that name, those of other layers too. Raises KeyError for none."""
    if name in READINGS:
        return READINGS[name]
    kind, _, listed = name.removesuffix(")").partition(" (")
    return layers_reading(kind, [int(i) for i in listed.split(",")])
