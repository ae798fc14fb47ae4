"""The figures of the training run that this pipeline replaces, beside what the formulas give.

Its drafter: a Llama head of 64 key heads for Kimi-K2.5, finetuned in place, 32,000 draft tokens.
Where a figure and a formula differ, the readings that would explain the difference are named, each
with what it would give; none is taken.
"""

from __future__ import annotations

import msgspec

from drafters.spec import DrafterSpec
from training.heads import groups, work_per_token

WHAT = (
    "the original run: the training of a Llama head for Kimi-K2.5 that this pipeline replaces "
    "(10,000 samples, 17.3 M tokens, 5 epochs)"
)
"""Which run it is, in one line; where it was made is told by `plan.EstimateSection`."""
VOCAB, HIDDEN, LAYERS = 163_840, 7_168, 61
TOKENS, EPOCHS = 17.3e6, 5
EPOCH_S, VALIDATION_S = 25.5 * 60, 5.5 * 60
DRAFTER = DrafterSpec(
    kind="llama",
    hidden_size=HIDDEN,
    target_hidden_size=HIDDEN,
    intermediate_size=18_432,
    num_attention_heads=64,
    num_key_value_heads=64,
    head_dim=128,
    vocab_size=VOCAB,
    draft_vocab_size=32_000,
    aux_layers=(2, 30, 58),
)


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What one more assumption would give."""

    assumption: str
    value: float
    unit: str


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of the run, the formula's, whether they agree to 2%, and readings of the gap."""

    name: str
    unit: str
    reported: float
    computed: float
    how: str
    readings: tuple[Reading, ...] = ()

    @property
    def agrees(self) -> bool:
        """Within 2 per cent."""
        return abs(self.computed / self.reported - 1) <= 0.02


def is_kimi(hidden_size: int, layers: int) -> bool:
    """Whether a plan's target is the run's, by its sizes."""
    return (hidden_size, layers) == (HIDDEN, LAYERS)


def compared() -> tuple[Compared, ...]:
    """Each figure that a formula can give."""
    parts = groups(DRAFTER)
    embedding = parts["embed_tokens"]
    trained = sum(parts.values()) - embedding
    return (
        _trained(trained, embedding),
        _states(),
        *_checkpoint(trained, embedding),
        _memory(trained, embedding),
        _schedule(),
    )


def _trained(trained: int, embedding: int) -> Compared:
    fewer = 2 * (64 - 8) * 128 * 2 * HIDDEN
    return Compared(
        name="trained parameters",
        unit="parameters",
        reported=1.19e9,
        computed=trained,
        how="fc, attention with 64 key heads, feed-forward, norms, lm_head of 32,000; no embedding",
        readings=(
            Reading(assumption="with 8 key heads", value=trained - fewer, unit="parameters"),
            Reading(
                assumption="with the embedding trained",
                value=trained + embedding,
                unit="parameters",
            ),
        ),
    )


def _states() -> Compared:
    each = 4 * HIDDEN * 2
    return Compared(
        name="hidden states on disk",
        unit="bytes",
        reported=828e9,
        computed=TOKENS * each,
        how="17.3 M tokens x 4 states x 7,168 x 2 B",
        readings=(
            Reading(assumption="828 GB meant GiB", value=828 * 2**30, unit="bytes"),
            Reading(
                assumption="the last state not stored: 3 a token",
                value=TOKENS * 3 * HIDDEN * 2,
                unit="bytes",
            ),
            Reading(
                assumption="828 GB hold so many tokens of 4 states",
                value=828e9 / each,
                unit="tokens",
            ),
            Reading(
                assumption="which is so many samples of 1,730 tokens",
                value=828e9 / each / 1730,
                unit="samples",
            ),
        ),
    )


def _checkpoint(trained: int, embedding: int) -> tuple[Compared, ...]:
    weights, moments = (trained + embedding) * 2, trained * 2 * 2
    return (
        Compared(
            name="model.safetensors",
            unit="bytes",
            reported=4.5e9,
            computed=weights,
            how="trained parameters and the embedding in bfloat16",
            readings=(
                Reading(assumption="4.5 GB meant GiB", value=4.5 * 2**30, unit="bytes"),
                Reading(assumption="without the embedding", value=trained * 2, unit="bytes"),
            ),
        ),
        Compared(
            name="optimizer_state_dict.pt",
            unit="bytes",
            reported=4.5e9,
            computed=moments,
            how="two moments of the trained parameters in bfloat16",
            readings=(
                Reading(assumption="4.5 GB meant GiB", value=4.5 * 2**30, unit="bytes"),
                Reading(assumption="moments in float32", value=2 * moments, unit="bytes"),
            ),
        ),
    )


def _memory(trained: int, embedding: int) -> Compared:
    head = VOCAB * HIDDEN * 2
    low = trained * 2 * 4 + embedding * 2 + head
    mixed = trained * (2 + 2 + 8) + embedding * 2 + head
    return Compared(
        name="GPU memory of the training",
        unit="bytes",
        reported=17.7e9,
        computed=low,
        how="weights, gradients, both moments in bfloat16, embedding, the target's head; without "
        "activations",
        readings=(
            Reading(
                assumption="what that leaves for activations", value=17.7e9 - low, unit="bytes"
            ),
            Reading(assumption="the same with moments in float32", value=mixed, unit="bytes"),
            Reading(
                assumption="float32 weights, gradients and moments",
                value=mixed + trained * 4,
                unit="bytes",
            ),
        ),
    )


def _schedule() -> Compared:
    return Compared(
        name="training",
        unit="seconds",
        reported=2.6 * 3600,
        computed=EPOCHS * (EPOCH_S + VALIDATION_S),
        how="5 x (25.5 min + 5.5 min of validation)",
        readings=(
            Reading(
                assumption="the arithmetic of 17.3 M tokens, 3 TTT steps, in 25.5 min",
                value=TOKENS * work_per_token(DRAFTER, 3, VOCAB) / EPOCH_S,
                unit="operations a second",
            ),
        ),
    )
