"""The story: kept evidence, what is gone on with, what is left out, and how it ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import diagnose_cases as made
import httpx
import msgspec
import pytest

from engines.base import EngineFailed
from engines.catalog import adapter
from engines.process import free_port
from harness.diagnose import story
from harness.diagnose.catalogue import EXPERIMENTS
from harness.diagnose.experiments.asking import spec_of
from harness.diagnose.experiments.starting import started
from harness.diagnose.experiments.work import ROUNDS, Options, Skipped, Work
from harness.diagnose.folders import (
    HOLDER,
    DiagnosisFolder,
    Identity,
    prompts_digest,
    unfinished,
)
from harness.diagnose.records import (
    Audit,
    AuditFinding,
    Controls,
    Diagnosis,
    Dossier,
    Expected,
    Length,
    Observed,
    Subject,
)
from harness.diagnose.subjects import Case, _in_turn, folder_for
from harness.errors import UsageError
from harness.load.prompts.prompt import Prompt
from harness.measure.logprobs import LogprobReader
from harness.progress import PlainProgress
from harness.records import DraftCounts

PROMPTS = [[1, 2, 3], [4, 5]]
SUBJECT = Subject(engine="reference", target="/no/target", drafter="/no/drafter", k=3)


def length(accepted: int, drafts: int = 100) -> Length:
    counts = DraftCounts(drafts=drafts, drafted=3 * drafts, accepted=accepted)
    return Length(counts=counts, prompts=12, length=1 + accepted / drafts)


def diagnosis(**fields: Any) -> Diagnosis:
    base: dict[str, Any] = {"verdict": "so it is", "cause": "none", "stage": None}
    base |= {"collapse": False, "ranked": (), "waterfall": ()}
    return Diagnosis(**base | fields)


class Scripted(Work):
    """Experiments that find what a test says, count themselves, and fail where it says so."""

    finds: ClassVar[dict[str, Any]] = {}
    made: ClassVar[list[str]] = []

    def make(self, name: str) -> Any:
        self.made.append(name)
        found = self.finds.get(name, Skipped("nothing to be had"))
        if isinstance(found, BaseException):
            raise found
        return found


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[Scripted]:
    Scripted.made = []
    Scripted.finds = {
        "audit": Audit(findings=()),
        "expected": Expected(acceptance=length(190), proof=1.0),
        "observed": Observed(acceptance=length(188), temperature=0.0, concurrency=8),
    }
    monkeypatch.setattr(story, "Work", Scripted)
    monkeypatch.setattr("harness.diagnose.verdict.decided", lambda dossier: False)
    monkeypatch.setattr(story, "_pages", lambda *given: {"diagnosis.md": "# so it is\n"})
    return Scripted


def run(folder: Path, **changes: Any) -> story.Outcome:
    return story.run(SUBJECT, PROMPTS, folder, progress=PlainProgress(), options=Options(**changes))


def test_everything_lies_in_the_folder(scripted: type[Scripted], tmp_path: Path) -> None:
    ended = run(tmp_path / "d")
    assert scripted.made == list(EXPERIMENTS)
    assert ended.dossier.observed is not None
    assert ended.dossier.skipped["controls"] == "nothing to be had"
    names = {p.name for p in (tmp_path / "d").iterdir()}
    assert {"subject.json", "dossier.json", "diagnosis.json", "diagnosis.md", "evidence"} <= names
    stored = msgspec.json.decode((tmp_path / "d" / "dossier.json").read_bytes(), type=Dossier)
    assert stored.expected == ended.dossier.expected


def test_no_secret_is_written_down(scripted: type[Scripted], tmp_path: Path) -> None:
    subject = msgspec.structs.replace(
        SUBJECT,
        extra_env={"HF_TOKEN": "hf_secret1", "MODE": "fast"},
        extra_args=("--api-key", "sk-secret2", "--auth-token=secret3", "--plain", "4"),
    )
    ended = story.run(subject, PROMPTS, tmp_path / "d", progress=PlainProgress())
    written = b"".join(p.read_bytes() for p in (tmp_path / "d").rglob("*") if p.is_file())
    assert b"fast" in written and b"--plain" in written
    assert b"secret" not in written
    # What is proven with it afterwards is served as it was.
    assert ended.dossier.subject == subject
    scripted.made.clear()
    story.run(subject, PROMPTS, tmp_path / "d", progress=PlainProgress())
    assert "expected" not in scripted.made


def test_what_was_found_is_not_made_again(scripted: type[Scripted], tmp_path: Path) -> None:
    scripted.finds["observed"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "d")
    assert scripted.made == ["audit", "expected", "observed"]
    (found,) = unfinished(tmp_path)
    assert found[0].path == tmp_path / "d"
    scripted.made.clear()
    scripted.finds["observed"] = Observed(acceptance=length(188), temperature=0.0, concurrency=8)
    ended = run(tmp_path / "d")
    assert scripted.made[0] == "observed"
    assert ended.dossier.expected is not None and ended.dossier.took_s.keys() >= {"expected"}
    assert list(unfinished(tmp_path)) == []


def case(out: Path, **changes: Any) -> Case:
    prompts = tuple(map(tuple, PROMPTS))
    return Case(subject=SUBJECT, prompts=prompts, options=Options(**changes), out=out)


def test_one_that_still_runs_is_not_cut_short(
    scripted: type[Scripted], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "diagnose" / "d"
    scripted.finds["observed"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run(place)
    folder = DiagnosisFolder(place)
    assert folder.held_by() is None and not (place / HOLDER).exists()
    with folder.claimed():
        mine = f"process {os.getpid()}"
        assert folder.held_by() == mine
        with pytest.raises(UsageError, match=f"d: {mine} is making this very diagnosis; wait"):
            folder_for(case(tmp_path), PlainProgress())
        with pytest.raises(UsageError, match=f"{mine} is diagnosing in it"):
            run(place)
        assert folder_for(case(tmp_path, max_tokens=8), PlainProgress()) != place
        said = capsys.readouterr().err
        assert f"of {mine}, which still runs; max_tokens differ" in said
        assert "cut short" not in said
    assert folder_for(case(tmp_path, max_tokens=8), PlainProgress()) != place
    assert "cut short, but max_tokens changed" in capsys.readouterr().err


def test_a_mending_that_was_cut_short_needs_no_second_diagnosis(
    scripted: type[Scripted], tmp_path: Path
) -> None:
    place = tmp_path / "diagnose" / "d"
    run(place)
    assert folder_for(case(tmp_path), PlainProgress()) != place  # it is finished
    assert folder_for(case(tmp_path), PlainProgress(), place) == place
    assert folder_for(case(tmp_path, max_tokens=8), PlainProgress(), place) != place
    assert folder_for(case(tmp_path), PlainProgress(), tmp_path / "gone") != place


def test_a_note_of_a_process_that_was_killed_holds_nothing(
    scripted: type[Scripted], tmp_path: Path
) -> None:
    place = tmp_path / "diagnose" / "d"
    scripted.finds["observed"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run(place)
    (place / HOLDER).write_text("1", encoding="utf-8")
    assert folder_for(case(tmp_path), PlainProgress()) == place
    scripted.finds["observed"] = Observed(acceptance=length(188), temperature=0.0, concurrency=8)
    run(place)
    assert not (place / HOLDER).exists()


class Stopping(PlainProgress):
    """Ends its own process as soon as the experiment `after` is kept."""

    def __init__(self, after: str, number: int) -> None:
        super().__init__()
        self.after, self.number = after, number

    def say(self, text: str) -> None:
        super().say(text)
        if text.startswith(f"{self.after}: done"):
            os.kill(os.getpid(), self.number)


def everything_found() -> dict[str, Any]:
    """A record of every experiment."""
    whole = made.toggled(made.sampled(1.5, 2.5, 2.4, 0.3), "graphs", "drafter_graph", 2, 2, "same")
    return {name: getattr(whole, name) for name in EXPERIMENTS}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_one_that_ends_after_any_experiment_goes_on_behind_it(
    name: str, number: int, scripted: type[Scripted], tmp_path: Path
) -> None:
    scripted.finds = everything_found()
    whole = run(tmp_path / "whole")
    place = tmp_path / "diagnose" / "d"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            story.run(SUBJECT, PROMPTS, place, progress=Stopping(name, number), options=Options())
            code = 0
        except KeyboardInterrupt:
            code = 130
        finally:  # whatever comes, it does not go on with the tests
            os._exit(code)
    wanted = 130 if number == signal.SIGINT else -signal.SIGKILL
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == wanted
    names = list(EXPERIMENTS)
    before, after = names[: names.index(name) + 1], names[names.index(name) + 1 :]
    assert {p.stem for p in (place / "evidence").iterdir()} == set(before)
    assert folder_for(case(tmp_path), PlainProgress()) == place
    scripted.made.clear()
    ended = run(place)
    assert scripted.made == after
    assert ended.diagnosis == whole.diagnosis
    assert msgspec.structs.replace(ended.dossier, took_s={}) == msgspec.structs.replace(
        whole.dossier, took_s={}
    )
    assert list(unfinished(tmp_path / "diagnose")) == []


def test_damaged_evidence_is_made_again(scripted: type[Scripted], tmp_path: Path) -> None:
    run(tmp_path / "d")
    (tmp_path / "d" / "evidence" / "expected.json").write_text("{", encoding="utf-8")
    scripted.made.clear()
    assert run(tmp_path / "d").dossier.expected is not None
    assert "expected" in scripted.made and "observed" not in scripted.made


def test_another_subjects_folder_is_refused(scripted: type[Scripted], tmp_path: Path) -> None:
    run(tmp_path / "d")
    with pytest.raises(UsageError, match="max_tokens"):
        run(tmp_path / "d", max_tokens=8)
    other = msgspec.structs.replace(SUBJECT, k=4)
    with pytest.raises(UsageError, match=r"changed since \(k\)"):
        story.run(other, PROMPTS, tmp_path / "d", progress=PlainProgress())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("x", encoding="utf-8")
    with pytest.raises(UsageError, match="not empty"):
        run(tmp_path / "full")


def test_an_experiment_that_breaks_costs_itself_alone(
    scripted: type[Scripted], tmp_path: Path
) -> None:
    scripted.finds["audit"] = ZeroDivisionError("by nothing")
    scripted.finds["expected"] = EngineFailed("it died")
    scripted.finds["states"] = ConnectionResetError(104, "Connection reset by peer")
    ended = run(tmp_path / "d")
    assert "ZeroDivisionError" in ended.dossier.skipped["audit"]
    assert ended.dossier.skipped["expected"] == "it died"
    assert "reset by peer" in ended.dossier.skipped["states"]
    assert ended.dossier.observed is not None


def test_a_server_that_is_gone_is_told_in_plain_words(
    scripted: type[Scripted], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reading(Scripted):
        def make(self, name: str) -> Any:
            if name == "target":
                with httpx.Client(trust_env=False) as http:
                    LogprobReader(http, f"http://127.0.0.1:{free_port()}", "m").continued([1], 2)
            return super().make(name)

    monkeypatch.setattr(story, "Work", Reading)
    said = run(tmp_path / "d").dossier.skipped["target"]
    assert said == "the server tells no log-probabilities: /generate: Connection refused"


class Dying:
    """A server that is gone as soon as it is asked anything; of one elsewhere that is not seen."""

    def __init__(self, seen: bool = True) -> None:
        self.seen = seen

    def gone(self) -> str | None:
        return "the engine is gone" if self.seen else None

    def ask(self, *_: Any) -> Any:
        raise EngineFailed("no prompt was answered")


@pytest.mark.parametrize("asks", [True, False])
def test_an_engine_that_dies_costs_no_verdict(
    asks: bool, scripted: type[Scripted], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def serving(*_: Any, **__: Any) -> Iterator[Dying]:
        yield Dying()
        raise EngineFailed("was ended by SIGKILL")

    class Asking(Scripted):
        def make(self, name: str) -> Any:
            if name == "observed":
                if asks:
                    return self.round(self._way("alone"), self.questions)
                assert self.server().gone() is not None
            return super().make(name)

    monkeypatch.setattr(story, "Work", Asking)
    monkeypatch.setattr("harness.diagnose.experiments.work.serving", serving)
    ended = run(tmp_path / "d")
    assert ended.failure is not None and DiagnosisFolder(tmp_path / "d").finished
    assert (ended.dossier.observed is None) == asks
    assert ended.exit_code == 3


def test_one_whose_engine_failed_is_gone_on_with(
    scripted: type[Scripted], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its verdict lacks what the engine was needed for: controls lack a part, and are made anew."""

    @contextmanager
    def serving(*_: Any, **__: Any) -> Iterator[Dying]:
        yield Dying()

    class Asking(Scripted):
        def make(self, name: str) -> Any:
            if name == "observed":
                return self.round(self._way("alone"), self.questions)
            return super().make(name)

    place = tmp_path / "diagnose" / "d"
    scripted.finds["controls"] = Controls()
    monkeypatch.setattr(story, "Work", Asking)
    monkeypatch.setattr("harness.diagnose.experiments.work.serving", serving)
    assert run(place).exit_code == 3
    assert folder_for(case(tmp_path), PlainProgress()) == place
    scripted.made.clear()
    assert run(place).exit_code == 3  # it dies again
    assert folder_for(case(tmp_path), PlainProgress()) == place
    assert not {"audit", "expected"} & set(scripted.made)
    monkeypatch.setattr(story, "Work", Scripted)
    scripted.made.clear()
    ended = run(place)
    assert ended.exit_code == 0 and ended.dossier.expected is not None
    assert {"observed", "controls"} <= set(scripted.made)
    assert not {"audit", "expected"} & set(scripted.made)
    assert list(unfinished(tmp_path / "diagnose")) == []
    assert folder_for(case(tmp_path), PlainProgress()) != place


def test_an_interruption_is_answered_before_the_engine_is_waited_for(
    scripted: type[Scripted], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    @contextmanager
    def serving(*_: Any, **__: Any) -> Iterator[Dying]:
        try:
            yield Dying()
        finally:
            told.append("the engine is ended")

    class Stopped(Scripted):
        def make(self, name: str) -> Any:
            if name == "observed":
                self.server()
                raise KeyboardInterrupt
            return super().make(name)

    class Telling(PlainProgress):
        def say(self, text: str) -> None:
            told.append(text)

    monkeypatch.setattr(story, "Work", Stopped)
    monkeypatch.setattr("harness.diagnose.experiments.work.serving", serving)
    progress = Telling()
    with pytest.raises(KeyboardInterrupt), story.telling_what_is_kept(progress):
        story.run(SUBJECT, PROMPTS, tmp_path / "d", progress=progress)
    assert told[-2:] == [story.KEPT, "the engine is ended"]


def test_what_is_done_behind_the_last_experiment_is_named(
    scripted: type[Scripted], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def serving(*_: Any, **__: Any) -> Iterator[Dying]:
        yield Dying(seen=False)

    class Served(Scripted):
        def make(self, name: str) -> Any:
            self.server()
            return super().make(name)

    class Telling(PlainProgress):
        def stage(self, text: str) -> None:
            told.append(text)

    told: list[str] = []
    monkeypatch.setattr(story, "Work", Served)
    monkeypatch.setattr("harness.diagnose.experiments.work.serving", serving)
    story.run(SUBJECT, PROMPTS, tmp_path / "d", progress=Telling())
    assert told[-2:] == ["ending the engine", "concluding"]


def test_a_server_elsewhere_that_never_answers_has_failed(
    scripted: type[Scripted], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def serving(*_: Any, **__: Any) -> Iterator[Dying]:
        yield Dying(seen=False)

    class Asking(Scripted):
        def make(self, name: str) -> Any:
            if name == "observed":
                return self.round(self._way("alone"), self.questions)
            return super().make(name)

    monkeypatch.setattr(story, "Work", Asking)
    monkeypatch.setattr("harness.diagnose.experiments.work.serving", serving)
    ended = run(tmp_path / "d")
    assert (str(ended.failure), ended.exit_code) == ("no prompt was answered", 3)


def test_only_and_skip(scripted: type[Scripted], tmp_path: Path) -> None:
    ended = run(tmp_path / "a", only=("expected",))
    assert scripted.made == ["expected"]
    assert ended.dossier.skipped["observed"] == "left out (--only)"
    scripted.made.clear()
    run(tmp_path / "b", skip=("audit",))
    assert "audit" not in scripted.made


def test_the_rest_is_left_out_once_it_is_decided(
    scripted: type[Scripted], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.diagnose.verdict.decided", lambda dossier: True)
    ended = run(tmp_path / "a")
    assert scripted.made == ["audit", "expected", "observed"]
    assert ended.dossier.skipped["replay"].startswith("not needed")
    assert "replay" in ended.dossier.needless and "observed" not in ended.dossier.needless
    scripted.made.clear()
    run(tmp_path / "b", thorough=True)
    assert scripted.made == list(EXPERIMENTS)


def test_a_full_disk_ends_it(scripted: type[Scripted], tmp_path: Path) -> None:
    scripted.finds["expected"] = OSError(28, "No space left on device")
    with pytest.raises(OSError, match="space"):
        run(tmp_path / "d")
    assert not DiagnosisFolder(tmp_path / "d").finished


def outcome(dossier: Dossier | None = None, failed: bool = False, **told: Any) -> story.Outcome:
    seen = Dossier(
        subject=SUBJECT,
        expected=Expected(acceptance=length(190), proof=1.0),
        observed=Observed(acceptance=length(188), temperature=0.0, concurrency=1),
    )
    return story.Outcome(
        folder=Path(),
        dossier=dossier or seen,
        diagnosis=diagnosis(**told),
        failure=EngineFailed("it died") if failed else None,
    )


@pytest.mark.parametrize(
    ("ended", "code"),
    [
        (outcome(), 0),
        (outcome(cause="rope", collapse=True), 1),
        (outcome(cause="unknown", stage="states"), 1),
        (outcome(cause="unknown"), 4),
        (outcome(failed=True), 3),
        (outcome(Dossier(subject=SUBJECT)), 4),
    ],
)
def test_exit_codes(ended: story.Outcome, code: int) -> None:
    assert ended.exit_code == code


def test_too_few_steps_say_nothing() -> None:
    few = Dossier(subject=SUBJECT, expected=Expected(acceptance=length(9, 10), proof=1.0))
    assert "only 10 verify steps" in (story.void_reason(few) or "")


def test_names_of_experiments_are_checked() -> None:
    story.check_names(["states"], "--only")
    with pytest.raises(UsageError, match="did you mean 'states'"):
        story.check_names(["state"], "--only")


def test_an_identity_says_what_differs() -> None:
    one = Identity(subject=SUBJECT, digests={"target": "a"}, prompts=prompts_digest(PROMPTS))
    other = msgspec.structs.replace(one, digests={"target": "b"}, prompts=prompts_digest([[9]]))
    assert one.differences(one) == []
    assert one.differences(other) == ["the target's files", "the prompts"]


def test_every_category_has_its_turn() -> None:
    prompts = [Prompt(id=str(i), category=c, text="x") for i, c in enumerate("aaabbc")]
    assert [p.id for p in _in_turn(prompts)] == ["0", "3", "5", "1", "4", "2"]


def test_work_without_an_engine_says_so_once(tmp_path: Path) -> None:
    folder = DiagnosisFolder(tmp_path)
    with ExitStack() as stack:
        work = Work(SUBJECT, PROMPTS, folder, PlainProgress(), Options(), stack, None)
        for name in ("expected", "states", "sampling"):
            with pytest.raises(Exception, match=r"."):
                work.make(name)
        with pytest.raises(Skipped, match="no such file"):
            work.known()


DIES = """
import os


def die(engine):
    inner, calls = engine.proposer.propose, []

    def propose(*given, **named):
        calls.append(1)
        if len(calls) > 30:
            os._exit(9)
        return inner(*given, **named)

    engine.proposer.propose = propose
"""


def dying_engine(demo_pair: Path, tmp_path: Path) -> Subject:
    """The demo pair in an engine that dies in the midst of the first or second prompt."""
    (tmp_path / "dies.py").write_text(DIES)
    return Subject(
        engine="reference",
        target=str(demo_pair / "target"),
        drafter=str(demo_pair / "drafter-mla"),
        k=3,
        extra_args=("--plugin", f"{tmp_path / 'dies.py'}:die"),
    )


def looked_at(subject: Subject, demo_pair: Path, tmp_path: Path) -> story.Outcome:
    from diagnose_planted import demo_prompts

    from engines.reference.tokenizer import Tokenizer

    return story.run(
        subject,
        demo_prompts(Tokenizer(demo_pair / "target"), demo_pair, 4),
        tmp_path / "d",
        progress=PlainProgress(),
        options=Options(only=("expected", "observed"), max_tokens=40),
    )


@pytest.mark.parametrize("seen_by", ["the watch", "the client"])
def test_an_engine_that_dies_while_it_serves_costs_what_needs_it(
    seen_by: str, demo_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was found before is concluded from, and the death is told beside it."""
    from harness.load import drive

    monkeypatch.setattr(drive, "WATCH_EVERY_S", 0.001 if seen_by == "the watch" else 3600.0)
    ended = looked_at(dying_engine(demo_pair, tmp_path), demo_pair, tmp_path)
    assert ended.dossier.expected is not None and ended.dossier.observed is None
    assert ended.failure is not None and "exited with code 9" in str(ended.failure)
    assert ended.exit_code == 3
    assert (tmp_path / "d" / "diagnosis.json").is_file()


def test_half_a_round_of_a_server_elsewhere_is_not_kept(demo_pair: Path, tmp_path: Path) -> None:
    """It answered its first prompt and died: on resume that would be taken for the whole."""
    subject = dying_engine(demo_pair, tmp_path)
    spec = spec_of(subject, free_port())
    with started(adapter("reference"), spec, tmp_path, 60.0, lambda line: None) as process:
        process.wait_ready()
        there = msgspec.structs.replace(subject, url=process.base_url, extra_args=())
        ended = looked_at(there, demo_pair, tmp_path)
    assert ended.dossier.observed is None
    assert "does not answer any more" in ended.dossier.skipped["observed"]
    assert DiagnosisFolder(tmp_path / "d").found(ROUNDS, dict[str, Any]) is None


def test_findings_survive_the_folder(tmp_path: Path) -> None:
    folder = DiagnosisFolder(tmp_path)
    finding = AuditFinding(severity="note", code="c", what="w", cause=None)
    folder.keep("audit", Audit(findings=(finding,), aux_layers=(2, 4)), 1.5)
    assert folder.found("audit", Audit) == (Audit(findings=(finding,), aux_layers=(2, 4)), 1.5)
    assert folder.found("states", Audit) is None
