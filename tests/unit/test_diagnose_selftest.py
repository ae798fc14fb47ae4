"""The self-test's cases, what it keeps of them, and its matrix."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from harness.diagnose import planted, selftest
from harness.diagnose.matrix import CaseResult, matrix_of, to_markdown
from harness.diagnose.planted import Case, Wanted, cases_of
from harness.diagnose.records import Diagnosis, Dossier, Ranked, Subject
from harness.diagnose.selftest import code_digest, judged
from harness.errors import UsageError

CASE = Case(
    name="states_zero.1.s0",
    kind="fault",
    what="states_zero",
    pair="mla",
    plant=None,
    seed=0,
    severity=1.0,
    right=("states_zero",),
    cause="states_zero",
)
DOSSIER = Dossier(subject=Subject(engine="reference", target="t", drafter="d", k=3))


def diagnosis(*causes: str, called: str | None = None) -> Diagnosis:
    ranked = tuple(
        Ranked(
            cause=cause,
            title=cause,
            strength="likely",
            score=1.0,
            evidence_for=(),
            evidence_against=(),
        )
        for cause in causes
    )
    return Diagnosis(
        verdict="",
        cause=called or (causes[0] if causes else "none"),
        stage=None,
        collapse=bool(causes),
        ranked=ranked,
        waterfall=(),
    )


def result(case: Case, *causes: str, called: str | None = None) -> CaseResult:
    return judged(case, "reference", DOSSIER, diagnosis(*causes, called=called), "a-b", 2.0)


def test_a_case_is_right_by_its_first_cause_and_told_by_its_first_three() -> None:
    right = result(CASE, "states_zero", "positions")
    third = result(CASE, "positions", "rope", "states_zero")
    wrong = result(CASE, "positions", "rope", "recurrence", "states_zero")
    assert (right.first, right.among_three) == (True, True)
    assert (third.first, third.among_three) == (False, True)
    assert (wrong.first, wrong.among_three) == (False, False)


def test_a_healthy_case_is_right_only_where_nothing_is_called() -> None:
    healthy = msgspec.structs.replace(CASE, kind="healthy", right=("none",), cause="none")
    matrix = matrix_of("reference", [result(healthy), result(healthy, "positions")], planned=3)
    assert (matrix.healthy.hits, matrix.healthy.of) == (1, 2)
    assert not matrix.right
    assert matrix.confusion == {"none": {"none": 1, "positions": 1}}


def test_the_matrix_counts_what_was_called_instead() -> None:
    results = [result(CASE, "states_zero"), result(CASE, "rope"), result(CASE, called="unknown")]
    matrix = matrix_of("reference", results, planned=9)
    assert (matrix.first.hits, matrix.first.of, matrix.unknown) == (1, 3, 1)
    assert matrix.rows[0].otherwise == {"rope": 1, "unknown": 1}
    assert matrix.confusion["states_zero"] == {"states_zero": 1, "rope": 1, "unknown": 1}
    text = to_markdown(matrix)
    assert "3 of 9 done" in text
    assert "seconds a case: 2 in the median, 2 at most" in text
    assert 'otherwise: "unknown" 1, "none" 0, a wrong name 1' in text
    assert "| states_zero | 1 | states_zero | 1/3 | 1/3 | rope 1, unknown 1 | 2 |" in text


def test_cases_of_the_first_seed_come_first_and_cheap_ones_before_dear_ones() -> None:
    cases = cases_of(Wanted(seeds=2))
    order = [(case.seed, case.weight) for case in cases]
    assert order == sorted(order)
    assert len({case.name for case in cases}) == len(cases)
    assert {case.kind for case in cases} == {"fault", "healthy", "compound"}


def test_a_pattern_takes_cases_by_their_fault_or_their_whole_name() -> None:
    by_fault = cases_of(Wanted(only=("states_zero",), seeds=3))
    assert {case.what for case in by_fault} == {"states_zero"}
    assert len(by_fault) == 6  # two severities, three seeds
    one = cases_of(Wanted(only=("states_zero.1.s0", "healthy.mla_k3.s0")))
    assert [case.name for case in one] == ["states_zero.1.s0", "healthy.mla_k3.s0"]
    with pytest.raises(UsageError, match="no such case"):
        cases_of(Wanted(only=("states_zeros",)))


@pytest.mark.parametrize(
    ("first", "then", "both"),
    [
        ("layers_shifted", "states_zero", True),
        ("states_zero", "layers_shifted", True),
        ("layers_shifted", "none", False),
        ("layers_shifted", "layers_order", False),
        ("layers_shifted", None, None),  # what was called first is not in our power
    ],
)
def test_of_two_faults_the_other_is_to_be_called_once_one_is_mended(
    first: str, then: str | None, both: bool | None
) -> None:
    (case,) = cases_of(Wanted(only=("layers_plus_one+states_zero_decode",)))
    assert len(case.parts) == 2 and set(case.right) == {c for part in case.parts for c in part}
    found = judged(case, "reference", DOSSIER, diagnosis(first), "a-b", 2.0, then)
    assert found.first and found.both is both
    matrix = matrix_of("reference", [found], planned=1)
    assert (matrix.both.hits, matrix.both.of) == (int(both is True), int(both is not None))
    assert "the other was called then" in to_markdown(matrix)


def test_what_was_called_after_mending_is_kept_while_the_first_call_stands(
    tmp_path: Path,
) -> None:
    (case,) = cases_of(Wanted(only=("layers_plus_one+states_zero_decode",)))
    evidence = code_digest().split("-")[0]
    for name in ("cases", "dossiers"):
        (tmp_path / name).mkdir()
    (tmp_path / "dossiers" / f"{case.name}.json").write_bytes(msgspec.json.encode(DOSSIER))
    for first, kept in (("none", "states_zero"), ("layers_shifted", None)):
        found = judged(
            case,
            "reference",
            DOSSIER,
            diagnosis(called=first),
            f"{evidence}-old",
            2.0,
            "states_zero",
        )
        (tmp_path / "cases" / f"{case.name}.json").write_bytes(msgspec.json.encode(found))
        anew = selftest._kept(tmp_path, case, code_digest())
        assert anew is not None and (anew.called, anew.then) == ("none", kept)


def test_only_what_an_engine_can_have_is_planted_there() -> None:
    named = {case.what for case in cases_of(Wanted(engine="vllm", seeds=1))}
    assert "layers_unnamed" in named
    assert "states_zero" not in named


def test_without_a_checkout_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planted, "CHECKOUT", tmp_path)
    with pytest.raises(UsageError, match="works in a checkout"):
        planted.library()


def test_a_kept_case_is_judged_anew_where_only_the_rules_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evidence, rules = code_digest().split("-")
    for name in ("cases", "dossiers"):
        (tmp_path / name).mkdir()
    (tmp_path / "dossiers" / f"{CASE.name}.json").write_bytes(msgspec.json.encode(DOSSIER))

    def keep(code: str) -> None:
        found = msgspec.structs.replace(result(CASE, "rope"), code=code)
        (tmp_path / "cases" / f"{CASE.name}.json").write_bytes(msgspec.json.encode(found))

    today = f"{evidence}-{rules}"
    keep(today)
    kept = selftest._kept(tmp_path, CASE, today)
    assert kept is not None
    assert kept.called == "rope"
    keep(f"{evidence}-older")
    anew = selftest._kept(tmp_path, CASE, today)
    assert anew is not None
    assert anew.called != "rope"  # nothing is known in this dossier
    assert anew.code == today
    keep(f"older-{rules}")
    assert selftest._kept(tmp_path, CASE, today) is None


def test_what_is_kept_in_the_docs_is_of_all_that_was_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selftest, "DOCS", tmp_path / "docs")
    (tmp_path / "docs").mkdir()
    (tmp_path / "cases").mkdir()
    code = code_digest()
    for case in cases_of(Wanted(only=("states_zero.1.s1", "layers_order.1.s1"), seeds=2)):
        found = msgspec.structs.replace(result(case, case.cause), code=code)
        (tmp_path / "cases" / f"{case.name}.json").write_bytes(msgspec.json.encode(found))
    asked = Wanted(only=("states_zero.1.s1",), seeds=2, out=tmp_path, write=True)

    class Quiet:
        def say(self, text: str) -> None:
            raise AssertionError(text)  # both are kept: nothing is made

    matrix = selftest.run(asked, Quiet())  # type: ignore[arg-type]
    assert (matrix.done, matrix.planned) == (1, 1)
    kept = (tmp_path / "docs" / "diagnosis-matrix.md").read_text()
    planned = len(cases_of(Wanted(seeds=2)))
    assert f"cases: 2 of {planned} done, 2 distinct faults, prompts of seed 1" in kept
