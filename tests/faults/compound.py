"""Two faults at once: the second is planted over what the first one left."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from faults.pair import Pair
from faults.records import Compound, Fault, Planted

_PAIRS: tuple[tuple[str, str], ...] = (
    ("layers_plus_one", "states_zero_decode"),
    ("layers_minus_one", "states_noisy"),
    ("layers_other", "tokens_unshifted"),
    ("layers_order", "refused"),
    ("layers_default", "recurrence_lost"),
    ("d2t_other_vocabulary", "residual_missing"),
    ("d2t_neighbours", "states_stale"),
    ("embeddings_random", "stale_inputs"),
    ("embeddings_random", "miscounted"),
    ("norm_before_residual_on", "drafts_swapped"),
    ("norm_output_on", "states_other_request"),
    ("norm_output_on", "prompt_cache_lost"),
    ("fc_norm_added", "states_moved"),
    ("rope_theta", "states_scaled"),
    ("tensors_noised", "refused"),
    ("trained_one_step", "tokens_unshifted"),
    ("trained_little", "states_zero_prefill"),
    ("fc_permuted", "positions_restarted"),
    ("trained_unnormed", "states_branch"),
    ("lm_head_stored", "prefix_reuse"),
)


def compounds(faults: Iterable[Fault]) -> dict[str, Compound]:
    """The pairs by name, `first+second`. The first is of a checkpoint, the second a plugin's."""
    by_name = {fault.name: fault for fault in faults}
    return {
        f"{first}+{second}": Compound(
            name=f"{first}+{second}",
            first=first,
            second=second,
            plant=_both(by_name[first], by_name[second]),
        )
        for first, second in _PAIRS
    }


def _both(first: Fault, second: Fault) -> Any:
    def plant(pair: Pair, folder: Path, seed: int, severity: float) -> Planted:
        one = first.plant(pair, folder / "first", seed, first.severities[0])
        two = second.plant(pair, folder / "second", seed, second.severities[0])
        assert one.plugin is None and two.drafter == pair.drafter, "they are planted in one place"
        return two.changed(
            target=one.target,
            drafter=one.drafter,
            trained_target=one.trained_target,
            trained_on=one.trained_on,
        )

    return plant
