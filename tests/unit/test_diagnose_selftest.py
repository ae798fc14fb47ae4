"""The self-test's cases, what it keeps of them, and its matrix."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from harness.diagnose import digests, mend, planted, selftest
from harness.diagnose.digests import code_digest, mending_digest
from harness.diagnose.experiments.asking import Answered, Asked, Way
from harness.diagnose.folders import DiagnosisFolder
from harness.diagnose.judging import judged, with_fix
from harness.diagnose.matrix import CaseResult, matrix_of, to_markdown
from harness.diagnose.planted import Case, Wanted, cases_of
from harness.diagnose.records import Diagnosis, Dossier, Ranked, Subject
from harness.diagnose.restored import Fixed, Restored, restored, served
from harness.errors import UsageError
from harness.measure.store import held as store_held
from harness.records import DraftCounts

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
    found = judged(case, "reference", DOSSIER, diagnosis(first), "a-b", 2.0)
    found = with_fix(found, case, None, then)
    assert found.first and found.both is both
    matrix = matrix_of("reference", [found], planned=1)
    assert (matrix.both.hits, matrix.both.of) == (int(both is True), int(both is not None))
    assert "the other was called then" in to_markdown(matrix)


def test_what_was_called_after_mending_is_kept_while_the_first_call_stands(
    tmp_path: Path,
) -> None:
    (case,) = cases_of(Wanted(only=("layers_plus_one+states_zero_decode",)))
    evidence = code_digest(case).split("-")[0]
    for name in ("cases", "dossiers"):
        (tmp_path / name).mkdir()
    (tmp_path / "dossiers" / f"{case.name}.json").write_bytes(msgspec.json.encode(DOSSIER))
    for first, kept in (("none", "states_zero"), ("layers_shifted", None)):
        called = diagnosis(called=first)
        found = judged(case, "reference", DOSSIER, called, f"{evidence}-old", 2.0)
        found = with_fix(found, case, None, "states_zero")
        (tmp_path / "cases" / f"{case.name}.json").write_bytes(msgspec.json.encode(found))
        anew = selftest._kept(tmp_path, case, code_digest(case))
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
    evidence, rules = code_digest(CASE).split("-")
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
    for case in cases_of(Wanted(only=("states_zero.1.s1", "layers_order.1.s1"), seeds=2)):
        found = msgspec.structs.replace(result(case, case.cause), code=code_digest(case))
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


def test_seeds_that_were_never_seen_can_be_asked_for() -> None:
    cases = cases_of(Wanted(first_seed=3, seeds=2))
    assert {case.seed for case in cases if case.kind == "fault"} == {3, 4}
    assert {case.seed for case in cases if case.kind != "fault"} == {3}
    assert all(case.name.endswith(f".s{case.seed}") for case in cases)
    assert {case.seed for case in cases if case.mends} == {3}
    found = msgspec.structs.replace(result(cases[0], cases[0].cause), seed=3)
    text = to_markdown(matrix_of("reference", [found], planned=9, first_seed=3))
    assert "--self-test --first-seed 3 --write" in text and "prompts of seed 3" in text


def test_the_matrix_of_other_seeds_is_kept_beside_that_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selftest, "DOCS", tmp_path)
    for engine, first in (("reference", 0), ("reference", 3), ("vllm", 3)):
        selftest._write_docs(matrix_of(engine, [result(CASE)], planned=1, first_seed=first))
    assert {p.name for p in tmp_path.glob("*.md")} == {
        "diagnosis-matrix.md",
        "diagnosis-matrix-from-seed-3.md",
        "diagnosis-matrix-vllm-from-seed-3.md",
    }


def reached(name: str) -> set[str]:
    """The library's files that the evidence of a case depends on."""
    case = next(case for case in cases_of(Wanted(only=(name,), seeds=1)))
    files = digests._reached(frozenset(digests._modules(case.plant)))
    library = digests.CHECKOUT / "tests" / "faults"
    return {str(file.relative_to(library)) for file in files}


def test_a_case_is_made_anew_only_where_what_it_is_planted_by_has_changed() -> None:
    handed = reached("states_zero")
    assert {"engine.py", "planting.py", "pair.py", "hooks/handed.py"} <= handed
    assert not {"checkpoints.py", "healthy.py", "training.py", "library.py"} & handed
    edited = reached("layers_plus_one")  # its closure is of planting, what it calls of checkpoints
    assert {"checkpoints.py", "planting.py", "folders.py"} <= edited
    assert not {"engine.py", "healthy.py", "texts.py", "library.py"} & edited
    assert {"engine.py", "hooks/handed.py", "checkpoints.py", "compound.py"} <= reached(
        "layers_plus_one+states_zero_decode"
    )
    assert "hooks/drafting.py" in reached("embeddings_shared")  # named in a string alone
    assert "trainings.py" in reached("norm_output_off")


def test_every_case_depends_on_the_module_that_it_stands_in() -> None:
    for case in cases_of(Wanted(seeds=1)):
        names = set(digests._modules(case.plant))
        assert any(name.startswith("faults.") for name in names), case.name
        assert digests._reached(frozenset(names)), case.name


def counts(accepted: int, drafts: int = 20) -> DraftCounts:
    return DraftCounts(drafts=drafts, drafted=3 * drafts, accepted=accepted)


def held(difference: float) -> Restored:
    """Two prompts; after is `difference` below the share that is expected."""
    expected = {"000": [counts(40)], "001": [counts(20)]}
    lost = round(60 * difference)
    after = {"000": [counts(40 + lost)], "001": [counts(20 + lost)]}
    found = restored(after, expected, 3)
    assert found is not None
    return found


def test_what_is_accepted_is_held_against_the_same_prompts() -> None:
    same = held(0.0)
    assert (same.difference, same.error) == (0, 0)
    assert same.after.share.share == same.expected.share.share == 0.5
    assert same.after.length.length == 2.5
    less = held(-0.1)  # each prompt as much less: its scatter is not that of the prompts
    assert less.difference == pytest.approx(-0.1) and less.error == pytest.approx(0)
    assert restored({}, {"000": [counts(3)]}, 3) is None
    untold = DraftCounts(drafts=20, accepted=30)  # an engine that does not tell how many it drafted
    one = restored({"000": [untold]}, {"000": [counts(30)]}, 3)
    assert one is not None and one.difference == 0 and one.error is None


def test_what_was_served_is_pooled_by_prompt_over_both_rounds(tmp_path: Path) -> None:
    def asked(name: str, *accepted: int) -> Asked:
        answers = tuple(
            Answered(
                request=f"{name}-{i}",
                question=f"{i:03d}",
                prompt_tokens=1,
                counts=counts(n) if n >= 0 else None,
                error=None if n >= 0 else "lost",
            )
            for i, n in enumerate(accepted)
        )
        return Asked(way=Way(name=name), answers=answers)

    rounds = {"alone": asked("alone", 3, 4, -1), "batched": asked("batched", 5, 6, 7)}
    DiagnosisFolder(tmp_path).keep("asked", {**rounds, "repeated": asked("repeated", 9)}, 0.0)
    told = {name: [c.accepted for c in each] for name, each in served(tmp_path).items()}
    assert told == {"000": [3, 5], "001": [4, 6], "002": [7]}
    assert served(tmp_path / "nothing") == {}


SHIFTED = msgspec.structs.replace(
    CASE,
    name="layers_plus_one.1.s0",
    what="layers_plus_one",
    right=("layers_shifted",),
    cause="layers_shifted",
    mends=True,
    mendable=True,
)


def mended(difference: float | None, *changes: str) -> Fixed:
    return Fixed(
        code=mending_digest(),
        took_s=1.0,
        changes=changes,
        why_not=None if changes else "the checkpoint is right as it is",
        before=0.25,
        held=None if difference is None else held(difference),
    )


def test_the_page_says_what_was_restored_and_what_is_not_in_our_power() -> None:
    right = result(SHIFTED, "layers_shifted")
    engine = msgspec.structs.replace(SHIFTED, what="flag", mendable=False)
    refused = result(engine, "layers_shifted")
    other = msgspec.structs.replace(CASE, mends=True)
    results = [
        msgspec.structs.replace(right, fixed=mended(0.0, "aux_layers: 2 becomes 3")),
        msgspec.structs.replace(right, severity=0.5, fixed=mended(-0.1, "norm")),
        msgspec.structs.replace(refused, fixed=mended(None)),
        result(other, "states_zero"),
        right,  # not tried yet: neither restored nor not
        msgspec.structs.replace(result(SHIFTED, "rope"), what="wrongly_called"),
    ]
    matrix = matrix_of("reference", results, planned=9)
    assert (matrix.restored.hits, matrix.restored.of) == (1, 3)
    assert matrix.beyond == ("flag", "states_zero")
    text = to_markdown(matrix)
    assert "restored to within 2 points: 1 of 3" in text
    assert "not in our power: 2 faults (flag, states_zero)" in text
    row = next(line for line in text.splitlines() if line.startswith("| layers_plus_one | 1 | 25"))
    assert row.endswith("| 50.0%, 2.50 | +0.0 ± 0.0 | aux_layers: 2 becomes 3 |")
    assert "| layers_plus_one | 0.5 | 25.0% |" in text and "| -10.0 ± 0.0 | norm |" in text
    assert "| wrongly_called | 1 | - | - | - | - | not tried: rope was called |" in text


class Heard:
    """Progress that keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    """A case that was kept before `--fix` was tried of any, in the form of that time."""
    case = msgspec.structs.replace(
        SHIFTED,
        plant=lambda pair, folder, seed, severity: SimpleNamespace(
            target="d",
            drafter="d",
            prompts=((1, 2), (3,)),
            k=3,
            temperature=0.0,
            concurrency=2,
            max_tokens=8,
            dtype="auto",
            max_model_len=None,
            plugin=None,
            extra_args=(),
            extra_env={},
            trained_target=None,
            trained_on=None,
            form="templated",
            other_form=(),
            unharmed=None,
        ),
    )
    for name in ("cases", "dossiers"):
        (tmp_path / name).mkdir()
    found = msgspec.structs.replace(result(case, "layers_shifted"), code=code_digest(case))
    form = json.loads(msgspec.json.encode(found))
    for name in ("fixed", "mends", "mendable"):
        del form[name]
    (tmp_path / "cases" / f"{case.name}.json").write_text(json.dumps(form), encoding="utf-8")
    (tmp_path / "dossiers" / f"{case.name}.json").write_bytes(msgspec.json.encode(DOSSIER))
    monkeypatch.setattr(selftest, "cases_of", lambda wanted: [case])
    monkeypatch.setattr("faults.pair.find_pair", lambda kind: None)
    monkeypatch.setattr(selftest.Targets, "engine", lambda self, target: None)

    def diagnosed(*_: Any) -> None:
        raise AssertionError("it is kept")

    monkeypatch.setattr(selftest.Making, "_diagnosed", diagnosed)
    return case


def test_of_a_case_that_was_kept_before_only_the_mending_is_made(
    old: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Path] = []

    def try_to_mend(found: Any, prompts: Any, out: Path, **_: Any) -> mend.Mended:
        tried.append(out)
        change = mend.Change(cause="layers_shifted", changes=("aux_layers: 2 becomes 3",))
        return mend.Mended(
            changes=(change,), drafter="d", before=0.2, expected=0.5, after=0.5, proven=True
        )

    by_prompt = {"000": [counts(40)], "001": [counts(20)]}
    monkeypatch.setattr(mend, "try_to_mend", try_to_mend)
    monkeypatch.setattr(selftest, "served", lambda folder: by_prompt)
    monkeypatch.setattr(selftest, "promised", lambda *_: by_prompt)
    for _ in range(2):  # the second time it is kept
        matrix = selftest.run(Wanted(out=tmp_path), Heard())  # type: ignore[arg-type]
        assert (matrix.restored.hits, matrix.restored.of) == (1, 1)
    assert len(tried) == 1 and not tried[0].parent.exists()
    stored = msgspec.json.decode(
        (tmp_path / "cases" / f"{old.name}.json").read_bytes(), type=CaseResult
    )
    assert stored.fixed is not None
    assert stored.fixed.changes == ("layers_shifted: aux_layers: 2 becomes 3",)


def test_what_is_kept_stands_in_the_matrix_though_there_is_no_time_to_mend_it(
    old: Case, tmp_path: Path
) -> None:
    said = Heard()
    asked = Wanted(out=tmp_path, limit_minutes=1e-9)
    matrix = selftest.run(asked, said)  # type: ignore[arg-type]
    assert said.lines == ["time is up with 1 of 1 cases left; the same command goes on"]
    assert (matrix.done, matrix.restored.of) == (1, 0)


def test_a_refusal_to_mend_is_kept_and_told(
    old: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = Heard()
    monkeypatch.setattr(mend, "try_to_mend", lambda *_, **__: "--fix: it is right as it is")
    matrix = selftest.run(Wanted(out=tmp_path), said)  # type: ignore[arg-type]
    assert (matrix.restored.hits, matrix.restored.of) == (0, 1)  # it was said to be in our power
    assert said.lines[-1] == f"{old.name}: not mended: --fix: it is right as it is"


def test_a_case_that_another_process_is_at_is_left_to_it(
    old: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two self-tests in one folder share the cases; neither keeps the other's hold as a result."""
    planted_in: list[Path] = []
    case = msgspec.structs.replace(old, plant=lambda pair, folder, *_: planted_in.append(folder))
    monkeypatch.setattr(selftest, "cases_of", lambda wanted: [case])
    (tmp_path / "cases" / f"{case.name}.json").unlink()
    work = tmp_path / "work" / f"{case.name}-{code_digest(case).split('-')[0]}"
    work.mkdir(parents=True)
    said = Heard()
    with store_held(work, "nobody else"):
        matrix = selftest.run(Wanted(out=tmp_path), said)  # type: ignore[arg-type]
    assert (matrix.done, matrix.planned) == (0, 1)
    assert said.lines[-1] == f"{case.name}: another process is at it; left to it"
    assert not planted_in and work.is_dir() and not list((tmp_path / "cases").iterdir())


@pytest.mark.full
def test_what_is_in_our_power_is_restored(tmp_path: Path) -> None:
    """On the reference engine, from planting to proof."""
    from harness.progress import PlainProgress

    only = ("layers_plus_one.1.s0", "norm_output_off.1.s0", "prompts_raw.1.s0")
    matrix = selftest.run(Wanted(only=only, seeds=1, out=tmp_path), PlainProgress())
    assert matrix.right
    assert (matrix.restored.hits, matrix.restored.of) == (3, 3), to_markdown(matrix)
