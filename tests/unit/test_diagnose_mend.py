"""What `--fix` may mend, what it says where it may not, and that nothing is left half written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.diagnose import mend
from harness.diagnose.experiments.work import Options
from harness.diagnose.records import (
    Diagnosis,
    Dossier,
    Expected,
    Length,
    Observed,
    Ranked,
    Subject,
)
from harness.diagnose.story import Outcome
from harness.errors import UsageError
from harness.progress import PlainProgress
from harness.records import DraftCounts

SUBJECT = Subject(engine="vllm", target="/t", drafter="/d", k=3)
PROMPTS = [(1, 2), (3,)]


def ranked(cause: str, score: float = 6.0, **details: str) -> Ranked:
    return Ranked(
        cause=cause,
        title=cause,
        strength="certain",
        score=score,
        evidence_for=(),
        evidence_against=(),
        remedy="do this",
        details=details,
    )


def length(accepted: int) -> Length:
    counts = DraftCounts(drafts=100, drafted=300, accepted=accepted)
    return Length(counts=counts, prompts=9, length=1 + accepted / 100)


def outcome(
    *causes: Ranked, cause: str | None = None, accepted: int = 60, subject: Subject = SUBJECT
) -> Outcome:
    named = cause or (causes[0].cause if causes else "none")
    diagnosis = Diagnosis(
        verdict="so it is",
        cause=named,
        stage=None,
        collapse=named != "none",
        ranked=causes,
        waterfall=(),
    )
    dossier = Dossier(
        subject=subject,
        expected=Expected(acceptance=length(190), proof=1.0),
        observed=Observed(acceptance=length(accepted), temperature=0.0, concurrency=1),
    )
    return Outcome(folder=Path(), dossier=dossier, diagnosis=diagnosis)


def proving(monkeypatch: pytest.MonkeyPatch, *ends: Outcome) -> list[Subject]:
    """Proofs that end so, one after another; whom they were asked of."""
    asked: list[Subject] = []

    def run(subject: Subject, *_: Any, **__: Any) -> Outcome:
        asked.append(subject)
        return ends[len(asked) - 1]

    monkeypatch.setattr(mend, "run", run)
    return asked


def fixed(found: Outcome, out: Path, **options: Any) -> mend.Mended | str:
    return mend.try_to_mend(
        found, PROMPTS, out, progress=PlainProgress(), options=Options(**options)
    )


def test_the_argument_that_asks_for_another_algorithm_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--x", "1", "--speculative-config.method", "eagle", "--y")
    subject = msgspec.structs.replace(SUBJECT, extra_args=words)
    asked = proving(monkeypatch, outcome(accepted=188))
    done = fixed(outcome(ranked("wrong_method"), subject=subject), tmp_path / "fix")
    assert isinstance(done, mend.Mended) and done.proven and done.drafter is None
    assert asked[0].extra_args == ("--x", "1", "--y")
    assert (tmp_path / "fix" / "sets.txt").read_text() == 'engine.extra_args=["--x","1","--y"]\n'
    stored = json.loads((tmp_path / "fix" / "mended.json").read_text())
    assert (stored["before"], stored["after"]) == (60 / 300, 188 / 300)
    assert "proven: 20.0% of the drafts were accepted, now 62.7%" in mend.told(done)


def test_an_argument_that_is_written_down_holds_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--api-key", "sk-secret", "--speculative-algorithm=EAGLE")
    asked = proving(monkeypatch, outcome(accepted=188))
    subject = msgspec.structs.replace(SUBJECT, extra_args=words)
    done = fixed(outcome(ranked("wrong_method"), subject=subject), tmp_path / "fix")
    assert isinstance(done, mend.Mended) and asked[0].extra_args == ("--api-key", "sk-secret")
    written = "".join(p.read_text() for p in (tmp_path / "fix").iterdir())
    assert "engine.extra_args=" in written and "secret" not in written
    assert "secret" not in mend.told(done)


def test_prompts_take_the_other_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proving(monkeypatch, outcome(accepted=100))
    forms = {"form": "raw", "other_form": ((9, 1, 2), (9, 3))}
    done = fixed(outcome(ranked("template")), tmp_path / "fix", **forms)
    assert isinstance(done, mend.Mended)
    assert done.changes[0].sets == ("workload.endpoint=chat",)
    assert not done.proven  # a third of the drafts where nearly two are expected
    only = fixed(outcome(ranked("template")), tmp_path / "other")
    assert isinstance(only, str) and "one form only" in only


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (outcome(ranked("states_zero")), "no checkpoint and no plan mends that"),
        (outcome(cause="unknown"), "no cause is named"),
        (outcome(ranked("rope", -1.0), cause="unknown"), "no cause is named"),
        (outcome(), "no cause is named"),
        (outcome(ranked("lm_head_replaced", channel="replay")), "makes something else of it"),
        (outcome(ranked("wrong_method")), "no argument asks for it"),
    ],
)
def test_what_is_not_in_our_power_is_said_and_nothing_is_written(
    found: Outcome, said: str, tmp_path: Path
) -> None:
    done = fixed(found, tmp_path / "fix")
    assert isinstance(done, str) and said in done
    assert list(tmp_path.iterdir()) == []


def test_a_second_fault_is_mended_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--speculative-algorithm", "EAGLE")
    subject = msgspec.structs.replace(SUBJECT, extra_args=words)
    proving(monkeypatch, outcome(ranked("template")), outcome(accepted=187))
    forms = {"form": "raw", "other_form": ((9,), (8,))}
    done = fixed(outcome(ranked("wrong_method"), subject=subject), tmp_path / "fix", **forms)
    assert isinstance(done, mend.Mended) and done.proven
    assert [c.cause for c in done.changes] == ["wrong_method", "template"]


def test_a_second_fault_that_stays_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = msgspec.structs.replace(SUBJECT, extra_args=("--speculative-algorithm=EAGLE",))
    proving(monkeypatch, outcome(ranked("states_zero")))
    done = fixed(outcome(ranked("wrong_method"), subject=subject), tmp_path / "fix")
    assert isinstance(done, mend.Mended) and not done.proven
    assert done.left == "states_zero" and "no checkpoint" in (done.why_not or "")
    assert "still called: states_zero" in mend.told(done)


def test_a_place_that_cannot_be_written_costs_the_mending_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    done = fixed(outcome(ranked("wrong_method")), tmp_path / "file" / "fix")
    assert done == f"--fix {tmp_path / 'file' / 'fix'}: cannot be written: not a directory"
    subject = msgspec.structs.replace(SUBJECT, extra_args=("--speculative-algorithm=EAGLE",))

    def full(*_: Any, **__: Any) -> Outcome:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mend, "run", full)
    done = fixed(outcome(ranked("wrong_method"), subject=subject), tmp_path / "fix")
    assert isinstance(done, str) and done.endswith("cannot be written: no space left on device")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "fix").mkdir()
    (tmp_path / "fix" / "mine").write_text("x", encoding="utf-8")
    with pytest.raises(UsageError, match="exists already"):
        mend.mend(
            outcome(ranked("rope")),
            PROMPTS,
            tmp_path / "fix",
            progress=PlainProgress(),
            options=Options(),
        )
