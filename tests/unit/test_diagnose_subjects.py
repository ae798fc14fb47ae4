"""What is to be diagnosed, from the command line's words: mistakes cost no work."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engines.base import EngineUsageError
from harness.diagnose import subjects
from harness.diagnose.folders import Identity
from harness.diagnose.records import Dossier, Subject
from harness.diagnose.subjects import Asked, case_of
from harness.diagnose.verdict import conclude
from harness.diagnose.view import view_of
from harness.errors import UsageError
from harness.prepare import Request


@pytest.mark.parametrize("config", [None, "[1]"])
def test_a_trained_target_that_is_no_checkpoint_is_told_first(
    config: str | None, tmp_path: Path
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    request = Request(engines=("reference",), variants=("speculative",))
    with pytest.raises((UsageError, EngineUsageError), match=r"config\.json"):
        case_of(Asked(request=request, trained_target=tmp_path))


def test_samples_that_are_not_there_are_told_first(tmp_path: Path) -> None:
    request = Request(engines=("reference",), variants=("speculative",))
    for inner in (tmp_path, tmp_path / "samples"):
        inner.mkdir(exist_ok=True)
        with pytest.raises(UsageError, match=r"--trained-on .*holds no samples"):
            case_of(Asked(request=request, trained_on=tmp_path))
    sample = '{"id": "a", "prompt_id": "a", "token_ids": [1, 2], "loss_from": 1, "text": "b"}\n'
    (tmp_path / "samples" / "samples-00000.jsonl").write_text(sample)
    wrong = msgspec.structs.replace(request, profile="nosuch")
    with pytest.raises(UsageError, match="nosuch"):  # the samples are passed
        case_of(Asked(request=wrong, trained_on=tmp_path))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'{"id": "a", "pro\n', "line 1: not a sample"),
        (
            b'{"id": "a", "prompt_id": "a", "token_ids": [1], "loss_from": 0, "te',
            "holds no samples",
        ),
        (b"", "holds no samples"),
    ],
)
def test_damaged_training_samples_are_told_before_anything_is_asked(
    text: bytes, said: str, tmp_path: Path
) -> None:
    """Met in the middle they would cost the experiment that reads them."""
    (tmp_path / "samples-00000.jsonl").write_bytes(text)
    with pytest.raises(UsageError, match=said) as raised:
        case_of(Asked(request=Request(engines=("reference",)), trained_on=tmp_path))
    assert str(raised.value).startswith(f"--trained-on {tmp_path}")


@pytest.mark.parametrize(
    ("says", "engine", "told"),
    [
        ("vllm", "vllm", "http://h:1: it says that it is vllm; --engine names another"),
        (None, "openai", "http://h:1: does not say which engine it is"),
    ],
)
def test_the_engine_behind_a_url_is_taken_by_its_own_word(
    says: str | None, engine: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subjects, "served_by", lambda request, root: says)
    request, line = subjects._recognised(Request(engines=(), urls={"speculative": "http://h:1/"}))
    assert request.engines == (engine,)
    assert told in line


def test_which_prompts_are_asked_is_said_and_is_no_other_question() -> None:
    subject = Subject(engine="reference", target="/t", drafter="/d", k=3)
    assert subject.asked == ""
    named = msgspec.structs.replace(subject, dataset="demo", prompts=12)
    assert named.asked == "12 prompts of demo"
    one, other = (Identity(subject=s, digests={}, prompts="p") for s in (subject, named))
    assert one.differences(other) == []
    dossier = Dossier(subject=named)
    assert "12 prompts of demo" in view_of(dossier, conclude(dossier)).meta
