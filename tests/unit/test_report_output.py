"""The report's section on output says which checks were made and what they found."""

from __future__ import annotations

import msgspec
from msgspec import structs
from report_run import summary

from harness.findings import Degenerate, EngineIntegrity, ParityFinding, Summary
from harness.records import DraftCounts
from harness.report.output import output_rows

GREEDY = EngineIntegrity(
    engine="reference", compared=24, diverged=4, near_tie=3, errors=1, floor_compared=20,
    floor_diverged=1, floor_loads_compared=20, floor_loads_diverged=2, p_value=0.3,
)  # fmt: skip
PARITY = ParityFinding(
    engine="reference", variant="speculative", repeat=0, against="golden file", difference=0.4,
    largest=1.8, tokens=90, bound=0.01, differs=True,
)  # fmt: skip


def found(whole: Summary) -> dict[str, str]:
    return {check: text for _, check, text in output_rows(whole)}


def test_every_check_has_its_row() -> None:
    rows = found(structs.replace(summary(), integrity=(GREEDY,), parity=(PARITY,)))
    assert rows["speculative against baseline"] == "4 of 24 outputs differ, 3 near-ties, 1 error"
    assert rows["baseline against itself"].startswith("1 of 20 prompts differ")
    assert "p = 0.3" in rows["baseline against itself"]
    assert rows["baseline in other batches"] == "2 of 20 prompts differ"
    assert "another model, 0.40 nats on average of 90" in rows["computes the right model"]


def test_starts_that_agree_stand_in_one_row_and_others_each() -> None:
    same = structs.replace(PARITY, differs=False, difference=0.002)
    worst = structs.replace(same, repeat=1, difference=0.004, tokens=80)
    unheard = structs.replace(PARITY, repeat=3, difference=None, differs=False)
    other = structs.replace(same, variant="baseline", repeat=2, difference=0.00001)
    parity = (same, worst, structs.replace(PARITY, repeat=2), unheard, other)
    asked = (EngineIntegrity(engine="reference"),)
    told = structs.replace(summary(), integrity=asked, parity=parity)
    rows = [text for _, _, text in output_rows(told)]
    assert rows == [
        "speculative, start 3, against golden file: another model, 0.40 nats on average of 90 "
        "tokens (allowed 0.01)",
        "speculative, start 4, against golden file: nothing could be compared",
        "speculative, 2 starts, against golden file: the same, at most 0.0040 nats on average of "
        "80 tokens (allowed 0.01)",
        "baseline, start 3, against golden file: the same, below 0.0001 nats on average of 90 "
        "tokens (allowed 0.01)",
    ]


def test_what_was_not_asked_is_not_said() -> None:
    unknown = structs.replace(GREEDY, near_tie=None, errors=None, floor_compared=0)
    rows = found(structs.replace(summary(), integrity=(unknown,)))
    assert "not known which are near-ties" in rows["speculative against baseline"]
    assert "baseline against itself" not in rows
    assert output_rows(summary()) == []
    sampled = EngineIntegrity(engine="reference", sampling_p=0.5, sampling_prompts=30)
    assert list(found(structs.replace(summary(), integrity=(sampled,)))) == [
        "sampled tokens and lengths"
    ]


def test_degenerate_answers_are_told_with_their_acceptance() -> None:
    part = Degenerate(
        judged=10, degenerate=2, tokens=1000, degenerate_tokens=300,
        acceptance_degenerate=DraftCounts(drafts=10, accepted=30),
        acceptance_healthy=DraftCounts(drafts=10, accepted=10),
    )  # fmt: skip
    whole = summary()
    cells = tuple(
        structs.replace(c, degenerate=part if c.variant == "speculative" else None)
        for c in whole.cells
    )
    rows = found(structs.replace(whole, cells=cells, integrity=(GREEDY,)))
    text = rows["degenerate answers"]
    count = sum(c.variant == "speculative" and c.engine == "reference" for c in cells)
    assert text.startswith(f"speculative: {2 * count} of {10 * count}")
    assert "4.00 in them, 2.00 in the others" in text


def test_the_new_fields_survive_the_disk() -> None:
    whole = structs.replace(summary(), integrity=(GREEDY,), parity=(PARITY,))
    assert msgspec.json.decode(msgspec.json.encode(whole), type=Summary) == whole
