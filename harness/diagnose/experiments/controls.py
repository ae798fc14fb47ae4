"""What working and broken look like: a text that repeats itself, a shuffled drafter, other states.

The text is asked of the engine. The two that must fail are walked offline over the target's own
text: they calibrate what is left where nothing fits, and need no start of an engine.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from harness.diagnose.experiments.asking import Question, Server, Telling, Way
from harness.diagnose.experiments.known import Knowledge
from harness.diagnose.experiments.observed import length_in
from harness.diagnose.records import Controls, Length

if TYPE_CHECKING:
    from drafters.eagle3 import Eagle3Drafter
    from training.unroll import Captured

TIMES = 10
MOST_TOKENS = 160
QUESTIONS = 3
SEED = 8


def repeated_questions(
    questions: Sequence[Question], answers: Mapping[str, Sequence[int]]
) -> list[Question]:
    """Prompts in which a question with its own answer comes again and again, then once more.

    Their answers are written there already, which is what a working drafter finds easy.
    """
    found = []
    for question in questions:
        answer = answers.get(question.name, ())
        whole = [*question.token_ids, *answer]
        times = min(TIMES, (MOST_TOKENS - len(question.token_ids)) // max(1, len(whole)))
        if len(answer) > 4 and times >= 2:
            ids = (*(whole * times), *question.token_ids)
            found.append(Question(name=f"again {question.name}", token_ids=tuple(ids)))
    return found[:QUESTIONS]


def controls(
    knowledge: Knowledge | None,
    server: Server | None,
    questions: Sequence[Question],
    progress: Telling,
) -> Controls:
    """What can be had: without a server no repeated text, without knowledge nothing offline."""
    found = Controls()
    if knowledge is not None:
        found = Controls(shuffled_drafter=shuffled(knowledge), foreign_states=foreign(knowledge))
    if server is None or not questions or knowledge is None:
        return found
    asked = server.ask(questions, Way(name="repeating", max_tokens=48), progress)
    return msgspec.structs.replace(found, repeated_text=length_in(asked, knowledge.k))


def shuffled(knowledge: Knowledge) -> Length:
    """The drafter with the columns of its fc in another order: it knows no states."""
    import torch

    drafter = copy.deepcopy(knowledge.drafter)
    order = torch.randperm(
        drafter.fc.weight.shape[1], generator=torch.Generator().manual_seed(SEED)
    )
    drafter.fc.weight = torch.nn.Parameter(drafter.fc.weight[:, order], requires_grad=False)
    return walked(knowledge, drafter, knowledge.captured())


def foreign(knowledge: Knowledge) -> Length:
    """The drafter on the states of the next prompt, row by row."""
    captured = knowledge.captured()
    aux = captured.aux.roll(1, dims=0)
    return walked(knowledge, knowledge.drafter, msgspec.structs.replace(captured, aux=aux))


def walked(knowledge: Knowledge, drafter: Eagle3Drafter, captured: Captured) -> Length:
    """A drafter walked over the knowledge's texts, as an engine would count."""
    from harness.diagnose.experiments.expected import acceptance
    from training.evaluate import draft_everywhere

    return acceptance(knowledge, captured, draft_everywhere(drafter, captured, knowledge.k))
