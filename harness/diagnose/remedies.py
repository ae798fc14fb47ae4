"""The remedy of a cause as an exact change, and what a tool needs to make it.

`details_of` gives it under these keys, as far as they are known: `reading` (the name of the reading
that the drafter was trained for, or that the engine makes), `channel` ("wanted": held against the
target's text, "replay": against the engine's proposals, "states": seen in the states handed over),
`declared_layers`, `trained_layers`, `served_layers` (transformers' indices, comma-separated), and
`audit` (the audit's own remedy).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from harness.diagnose.causes import CAUSES
from harness.diagnose.records import Dossier
from harness.diagnose.rules import execution, naming, states, wanted

UNNAMED = "the engine (name it with --engine)"
"""A server that runs already, and does not say which engine it is."""
FLAGS = ("norm_output", "norm_before_residual")
"""Causes that are a switch of the checkpoint's config of the same name."""
BUILTIN = "builtin"
"""The plan's name of the small mix of prompts that is asked where nobody names others."""
OWN_PROMPTS = "ask the prompts that the drafter is for (--set workload.dataset=FILE)"
PRONOUNS = {"it", "them", "the", "a", "to"}
"""Words without which two alternatives are compared."""


def details_of(dossier: Dossier, cause: str) -> dict[str, str]:
    """What is known of a cause that its remedy needs."""
    found = dict(_reading(dossier, cause))
    if cause in naming.LAYERS:
        found |= _layers(dossier, cause)
    audit = _audit(dossier, cause)
    if audit:
        found["audit"] = audit
    return found


def _reading(dossier: Dossier, cause: str) -> dict[str, str]:
    """The reading that points to the cause, and what it was held against."""
    for fit in wanted.better(dossier):
        if wanted.cause_in(dossier, fit) == cause:
            return {"reading": fit.reading, "channel": "wanted"}
    for fit in execution.better(dossier.replay) if dossier.replay is not None else []:
        if naming.cause_of_reading(fit.reading) == cause:
            return {"reading": fit.reading, "channel": "replay"}
    return {}


def _layers(dossier: Dossier, cause: str) -> dict[str, str]:
    """The layers that the checkpoint states, those it was trained on, those that were served."""
    found: dict[str, str] = {}
    declared = wanted.declared_layers(dossier)
    if declared is not None:
        found["declared_layers"] = listed(declared)
    for fit in wanted.better(dossier):
        reading = naming.reading_of(fit.reading)
        if wanted.cause_in(dossier, fit) == cause and reading is not None and reading.layers:
            found["trained_layers"] = listed(reading.layers)
            break
    served = states.served_layers(dossier)
    if served is not None and served[0] != served[1]:
        found["served_layers"] = listed(served[1])
        found.setdefault("channel", "states")
    return found


def _audit(dossier: Dossier, cause: str) -> str:
    findings = [] if dossier.audit is None else dossier.audit.findings
    told = sorted(f.remedy for f in findings if f.cause == cause and f.remedy)
    return "; ".join(dict.fromkeys(told))


def listed(layers: Sequence[int]) -> str:
    return ",".join(map(str, layers))


def remedy_of(dossier: Dossier, cause: str, details: dict[str, str]) -> str:
    """The remedy with the names and numbers of this case; `details` as of `details_of`."""
    change = _change(dossier, cause, details)
    told = CAUSES[cause].remedy if change is None else change
    if is_of_the_text(cause) and asked_builtin(dossier):
        told = f"{OWN_PROMPTS}; {told}"
    for advice in details.get("audit", "").split("; "):
        new = _unsaid(advice, told)
        told = f"{told}; {new}" if new else told
    return told


def is_of_the_text(cause: str) -> bool:
    """Whether a cause says what the drafter is on the prompts that were asked, and on no others."""
    return CAUSES[cause].family == "trained_badly"


def asked_builtin(dossier: Dossier) -> bool:
    """Whether the prompts are those that are asked where nobody names others."""
    return dossier.subject.dataset == BUILTIN


def prompts_of(dossier: Dossier) -> str:
    """The prompts that were asked, in words."""
    asked = dossier.subject.dataset
    if asked is None:
        return "the prompts that were asked"
    return "the built-in mix of prompts" if asked_builtin(dossier) else f"the prompts of {asked}"


def _unsaid(advice: str, told: str) -> str:
    """The alternatives of an advice that were not told already, if in other words."""
    words = _words(told)
    return ", or ".join(a for a in advice.split(", or ") if not _words(a) <= words)


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower())) - PRONOUNS


def _change(dossier: Dossier, cause: str, details: dict[str, str]) -> str | None:
    """The exact change; None where the cause's own text says all there is."""
    engine = UNNAMED if dossier.subject.engine == "openai" else dossier.subject.engine
    trained, served = details.get("trained_layers"), details.get("served_layers")
    declared = details.get("declared_layers", "nothing of them")
    if trained is not None:
        return (
            f"write the layers {_spaced(trained)} (transformers' hidden_states) into the "
            f"checkpoint, as {engine} counts them, where it says {_spaced(declared)}"
        )
    if served is not None:
        return (
            f"{engine} hands over the layers {_spaced(served)} where {_spaced(declared)} are "
            f"meant: write the ids so that {engine} reads {_spaced(declared)}"
        )
    reading, channel = details.get("reading"), details.get("channel")
    if channel == "replay" and CAUSES[cause].stage == "checkpoint":
        return (
            f'{engine} runs the drafter with "{reading}", whatever its checkpoint says: '
            f"{CAUSES[cause].remedy}, or choose a version of {engine} that follows the checkpoint"
        )
    if channel == "wanted" and cause in FLAGS:
        return f"set {cause} in the drafter's config.json to the other value: so it was trained"
    if channel == "wanted":
        return f'{CAUSES[cause].remedy} (the text asks for "{reading}")'
    return None


def _spaced(layers: str) -> str:
    return layers.replace(",", ", ")
