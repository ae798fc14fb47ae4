"""What `--fix` may mend, what it says where it may not, and that nothing is left half written."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.diagnose import mend
from harness.diagnose.experiments.work import Options
from harness.diagnose.folders import DiagnosisFolder
from harness.diagnose.records import (
    Diagnosis,
    Dossier,
    Expected,
    Length,
    Observed,
    Ranked,
    Subject,
)
from harness.diagnose.story import Outcome, identity_of
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


@pytest.mark.parametrize("to", ["nowhere", "empty", "fix"])
def test_a_link_is_refused_before_any_work(tmp_path: Path, to: str) -> None:
    """A folder cannot be put in its place: that was found once all was proven."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "fix").symlink_to(to)
    with pytest.raises(UsageError, match="is a link; name a new folder"):
        mend.check_new(tmp_path / "fix")


def test_what_is_in_the_way_of_the_unfinished_is_told_before_any_work(tmp_path: Path) -> None:
    (tmp_path / ".fix.partial").write_text("mine")
    with pytest.raises(UsageError, match=r"\.fix\.partial is in its way"):
        mend.check_new(tmp_path / "fix")
    assert (tmp_path / ".fix.partial").read_text() == "mine"


def test_the_folder_one_is_in_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proving(monkeypatch, outcome(accepted=190))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    done = fixed(outcome(ranked("wrong_method"), subject=ARGUMENT), Path("."))
    assert isinstance(done, mend.Mended), done
    assert (tmp_path / "here" / "mended.json").is_file()


@pytest.mark.parametrize("inside", ["", "new", "a/b", "../other/../d/new"])
def test_a_checkpoint_that_is_diagnosed_is_not_written_into(tmp_path: Path, inside: str) -> None:
    for name in ("t", "d", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("d")
    subject = msgspec.structs.replace(
        SUBJECT, target=str(tmp_path / "t"), drafter=str(tmp_path / "link")
    )
    with pytest.raises(UsageError, match="lies in the drafter's folder"):
        mend.check_apart(tmp_path / "d" / inside, subject)
    with pytest.raises(UsageError, match="lies in the target's folder"):
        mend.check_apart(tmp_path / "t" / "x", subject)
    mend.check_apart(tmp_path / "new", subject)


ARGUMENT = msgspec.structs.replace(SUBJECT, extra_args=("--speculative-algorithm=EAGLE",))
FORMS: dict[str, Any] = {"form": "raw", "other_form": ((9,), (8,))}


class Proofs:
    """Two faults, a proof each; the second is never ended as long as `stopped` is set."""

    def __init__(self) -> None:
        self.stopped: Any = KeyboardInterrupt()
        self.kept: list[bool] = []

    def run(self, subject: Subject, asked: Any, place: Path, **_: Any) -> Outcome:
        place.mkdir(exist_ok=True)
        self.kept.append((place / "evidence").exists())
        (place / "evidence").touch()
        if place.name == "proof-1":
            return outcome(ranked("template"))
        if callable(self.stopped):
            self.stopped()
        if self.stopped is not None:
            raise self.stopped
        return outcome(accepted=187)


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> Proofs:
    found = Proofs()
    monkeypatch.setattr(mend, "run", found.run)
    return found


def two_faults(folder: Path) -> Outcome:
    return msgspec.structs.replace(
        outcome(ranked("wrong_method"), subject=ARGUMENT), folder=folder / "diagnosis"
    )


def cut_short(proofs: Proofs, out: Path, how: str) -> None:
    """A mending that ends in its second proof."""
    if how == "Ctrl-C":
        with pytest.raises(KeyboardInterrupt):
            fixed(two_faults(out.parent), out, **FORMS)
        return
    child = os.fork()
    if child == 0:
        try:
            proofs.stopped = lambda: os.kill(os.getpid(), signal.SIGKILL)
            fixed(two_faults(out.parent), out, **FORMS)
        finally:  # whatever comes, it does not go on with the tests
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("how", ["Ctrl-C", "kill -9"])
def test_a_mending_that_was_cut_short_goes_on(tmp_path: Path, proofs: Proofs, how: str) -> None:
    out = tmp_path / "fix"
    cut_short(proofs, out, how)
    assert not out.exists() and mend.begun(out) == tmp_path / "diagnosis"
    proofs.kept, proofs.stopped = [], None
    done = fixed(two_faults(tmp_path), out, **FORMS)
    assert isinstance(done, mend.Mended) and done.proven
    assert proofs.kept == [True, True]
    assert [c.cause for c in done.changes] == ["wrong_method", "template"]
    assert [p.name for p in tmp_path.iterdir()] == ["fix"]
    assert {p.name for p in out.iterdir()} == {"mended.json", "sets.txt", "proof-1", "proof-2"}


@pytest.mark.parametrize("how", ["Ctrl-C", "kill -9"])
def test_what_is_left_of_another_mending_goes(tmp_path: Path, proofs: Proofs, how: str) -> None:
    out = tmp_path / "fix"
    cut_short(proofs, out, how)
    (tmp_path / ".fix.partial" / "drafter-1").mkdir()
    proofs.kept, proofs.stopped = [], None
    done = fixed(two_faults(tmp_path / "other"), out, **FORMS)
    assert isinstance(done, mend.Mended) and proofs.kept == [False, False]
    assert [p.name for p in tmp_path.iterdir()] == ["fix"]
    assert {p.name for p in out.iterdir()} == {"mended.json", "sets.txt", "proof-1", "proof-2"}


def test_what_is_left_goes_where_nothing_is_to_be_mended(tmp_path: Path, proofs: Proofs) -> None:
    out = tmp_path / "fix"
    cut_short(proofs, out, "kill -9")
    mend.discard(out)
    mend.discard(out)  # nothing is there any more
    assert list(tmp_path.iterdir()) == []


def test_what_a_living_process_writes_is_left_alone(tmp_path: Path, proofs: Proofs) -> None:
    out = tmp_path / "fix"
    cut_short(proofs, out, "Ctrl-C")
    with DiagnosisFolder(tmp_path / ".fix.partial").claimed():
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(UsageError, match=f"fix: process {os.getpid()} is writing it"):
            mend.begun(out)
        mend.discard(out)
        said = fixed(two_faults(tmp_path), out, **FORMS)
        assert isinstance(said, str) and f"process {os.getpid()} is diagnosing in it" in said
        assert sorted(tmp_path.rglob("*")) == before


def test_a_proof_of_another_checkpoint_is_made_anew(tmp_path: Path) -> None:
    options = Options()
    place = tmp_path / "proof-1"
    DiagnosisFolder(place).begin(identity_of(SUBJECT, PROMPTS, options))
    assert mend._proof(place, SUBJECT, PROMPTS, options).is_dir()
    assert not mend._proof(place, ARGUMENT, PROMPTS, options).exists()
