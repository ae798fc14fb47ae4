"""Whether anything is wrong at all, and between which two stages."""

from __future__ import annotations

from collections.abc import Sequence

from harness.diagnose.records import Dossier, Point
from harness.diagnose.rules import execution, gap, states, target, training, wanted
from harness.diagnose.rules.measures import FEWEST, FEWEST_STEPS, shorter
from harness.diagnose.rules.weights import STRONG

EXPERIMENTS = ("audit", "expected", "observed", "states", "replay", "wanted", "target")
"""In the order in which they are told as missing."""
NEEDED = ("expected", "observed", "states", "replay", "wanted")
"""What must have been made, or be impossible, before nothing is said to be wrong for good."""
PLENTY = 4 * FEWEST
BETWEEN: dict[gap.Name, str] = {
    "trained": "in how the checkpoint is read",
    "vocabulary": "in how the checkpoint is read",
    "expected": "in how the checkpoint is read",
    "states": "between the target's layers and the drafter's door",
    "execution": "between capture and proposal",
    "verification": "between proposal and acceptance",
    "observed": "between proposal and the counters",
}


def made(dossier: Dossier, name: str) -> bool:
    return getattr(dossier, name) is not None


def not_made(dossier: Dossier) -> list[str]:
    """The experiments that could still be made."""
    return [n for n in wanted_ones(dossier) if not made(dossier, n) and n not in dossier.skipped]


def wanted_ones(dossier: Dossier) -> list[str]:
    """The experiments that can show a fault of this subject."""
    return [*EXPERIMENTS, *(["sampling"] if _asked_sampled(dossier) else [])]


def _asked_sampled(dossier: Dossier) -> bool:
    return gap.sampled(dossier) or dossier.subject.temperature > gap.GREEDY


def under_load(dossier: Dossier) -> bool:
    """Whether surely fewer drafts were accepted in the stored run than on the same server now."""
    observed = dossier.observed
    return observed is not None and shorter(observed.in_run, observed.acceptance, least=0.1)


def looked_at(dossier: Dossier) -> bool:
    """Whether every place was looked at where a fault could be.

    The target too, where the engine's answers are not its own.
    """
    needed = [*NEEDED, *(["sampling"] if _asked_sampled(dossier) else [])]
    if gap.answers_alike(dossier) is False:
        needed.append("target")
    return not set(needed) & set(not_made(dossier)) and (
        made(dossier, "expected") or made(dossier, "observed")
    )


def seen_enough(dossier: Dossier) -> bool:
    """Whether the steps that were walked or observed are enough to find nothing wrong in them."""
    return _walked(dossier, FEWEST_STEPS)


def seen_plenty(dossier: Dossier) -> bool:
    """Whether they are so many that no experiment that is left could find something wrong."""
    return _walked(dossier, PLENTY)


def _walked(dossier: Dossier, steps: int) -> bool:
    walked = [f.acceptance.counts.drafts for f in (dossier.expected, dossier.observed) if f]
    return not walked or max(walked) >= steps


def troubled(dossier: Dossier, found: Sequence[Point]) -> bool:
    """Whether anything was measured that is wrong, and costs something or is plain to see.

    Rows a little off, or a hint of the audit, are no fault where nothing is lost by them.
    """
    strong = [p for p in found if p.weight >= STRONG - 0.5 and p.experiment != "audit"]
    if strong or training.is_low(dossier) or under_load(dossier):
        return True
    if gap.gap(dossier).there is not None:
        by_states = states.is_clean(dossier.states) is False and "states" in gap.losses(dossier)
        return gap.gap(dossier).there is True or by_states or _odd_execution(dossier)
    return states.is_clean(dossier.states) is False or _odd_execution(dossier)


def _odd_execution(dossier: Dossier) -> bool:
    return execution.agrees(dossier.replay) is False


def located(dossier: Dossier) -> str:
    """Between which two stages the fault lies, and where there, as far as that is known."""
    if target.is_right(dossier.target) is False:
        return "in the target itself, before any drafter"
    if dossier.states is not None and states.is_clean(dossier.states) is False:
        where = states.where_bad(dossier.states)
        return BETWEEN["states"] + (f": {where}" if where else "")
    if dossier.replay is not None and execution.agrees(dossier.replay) is False:
        where = execution.where_differs(dossier.replay)
        return f"{BETWEEN['execution']}{', ' + where if where else ''} of the drafter"
    lost = gap.losses(dossier)
    if lost:
        name = max(lost, key=lambda n: (lost[n], n))
        return _between(dossier, name)
    if training.is_low(dossier):
        return "in the drafter: its checkpoint or its training"
    if wanted.better(dossier):
        return BETWEEN["expected"]
    if under_load(dossier):
        return "in what the stored run did otherwise: its prompts, its load or its batches"
    return _no_further(dossier)


def _no_further(dossier: Dossier) -> str:
    if dossier.expected is None:
        return "before the observed acceptance, and nobody looked where: nothing was expected"
    return "between the expected and the observed acceptance, and no further"


def _between(dossier: Dossier, name: gap.Name) -> str:
    """Where a loss lies: the stages between the level before and this one."""
    names = [level.name for level in gap.levels(dossier)]
    before = names[names.index(name) - 1] if name in names[1:] else None
    order: list[gap.Name] = ["expected", "states", "execution", "verification", "observed"]
    if name not in order or before not in order:
        return BETWEEN[name]
    if gap.sampled(dossier):
        return "between the sampled distributions and what was accepted"
    missing = order[order.index(before) + 1 : order.index(name)]
    if "states" in missing or "execution" in missing:
        return _no_further(dossier)
    return BETWEEN[name]
