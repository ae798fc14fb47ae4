"""Generate against a scripted server: ids or text, faults and their retry, changed plans."""

from __future__ import annotations

import errno
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from harness_scripted import RESET, SSE_HEAD, Step, chunked, event, token, whole
from training_samples import FORGETFUL, TEMPLATE, target
from training_server import by_ids, in_words, prompts, running, said

from engines.base import EngineFailed, EngineUsageError
from engines.secret import HIDDEN
from harness.errors import GateFailed, UsageError
from training.folders import stage_folder
from training.gate import Gate
from training.generate import stage
from training.generate.shards import ShardWriter
from training.generate.text import read_text
from training.plan import read_plan
from training.samples import Sample, read_samples

COUNT = 6


class Case:
    """A target of text alone, six prompts, and a folder to work in."""

    def __init__(self, root: Path, template: str = FORGETFUL) -> None:
        self.root, self.work = root, root / "work"
        self.target = target(root / "target", template)
        self.text = read_text(self.target)
        prompts(root / "prompts.jsonl", COUNT)

    @property
    def folder(self) -> Path:
        return stage_folder(self.work, "generate")

    def run(self, url: str, *more: str) -> Gate:
        sets = [f"target.path={self.target}", f"workload.dataset={self.root / 'prompts.jsonl'}"]
        sets += [f"generate.url={url}", "generate.engine=vllm", "generate.concurrency=3"]
        return stage.run(read_plan("demo", [*sets, *more]), self.work)

    def samples(self) -> list[Sample]:
        return list(read_samples(self.folder))

    def told(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def checks(gate: Gate) -> dict[str, Any]:
    return {check.name: check.value for check in gate.checks}


def test_ids_of_prompt_and_answer_are_the_servers_own(case: Case) -> None:
    def answer(number: int, body: dict[str, Any]) -> Sequence[Step]:
        assert body["return_token_ids"] and body["max_tokens"] == 160 and "seed" not in body
        own = case.text.prompt_ids(body["messages"], {})
        return by_ids(case.text, said(body), prompt_token_ids=[7, *own])

    with running(answer) as (url, _):
        gate = case.run(url)
    assert [s.id for s in case.samples()] == [f"p{i}#0" for i in range(COUNT)]
    for number, one in enumerate(case.samples()):
        assert one.token_ids[0] == 7 and one.text == f"{_plain(number)}<|end|>"
        assert one.answer_ids == tuple(case.text.encode(one.text))
        assert (one.reasoning, one.finish_reason) == (f"a {number}", "stop")
        assert (one.ids_from, one.agrees, one.greedy) == ("server", True, True)
    assert checks(gate)["prompts are the template's"] == 0.0  # a 7 before each: told, not refused
    assert case.told("manifest.json")["counts"]["kept"] == COUNT


def _plain(number: int) -> str:
    return said({"messages": [{"content": str(number)}]})


@pytest.mark.parametrize("template", [FORGETFUL, TEMPLATE])
@pytest.mark.parametrize("field", [True, False])
def test_without_ids_they_are_made_from_the_text(
    tmp_path: Path, template: str, field: bool
) -> None:
    case = Case(tmp_path, template)
    kept = template == TEMPLATE  # the template keeps the thinking, its white space is its own

    def exact(number: int) -> str:
        thought, answer = _plain(number).split("</think>")
        return f"<think>\n{thought}\n</think>\n\n{answer}" if kept else _plain(number)

    def answer(number: int, body: dict[str, Any]) -> Sequence[Step]:
        assert "return_token_ids" not in body
        thought, text = said(body).split("</think>")
        of = int("".join(c for c in body["messages"][-1]["content"] if c.isdigit()))
        count = len(case.text.encode(exact(of) + "<|end|>"))
        inline = f"{thought}</think>{text}"
        return in_words(text, thought, count) if field else in_words(inline, None, count)

    with running(answer) as (url, _):
        gate = case.run(url, "generate.engine=openai")
    for number, one in enumerate(case.samples()):
        assert one.text == exact(number) + "<|end|>" and one.ids_from == "text" and one.agrees
        assert one.answer_ids == tuple(case.text.encode(one.text))
    assert checks(gate)["text gives the ids"] == checks(gate)["tokens agree with the server"] == 1


def test_a_servers_count_that_is_another_fails_the_round_trip(case: Case) -> None:
    def answer(number: int, body: dict[str, Any]) -> Sequence[Step]:
        thought, text = said(body).split("</think>")
        return in_words(text, thought, 999)

    with (
        running(answer) as (url, _),
        pytest.raises(GateFailed, match=r"tokens agree with the server 0 \(wanted >= 0.95\)"),
    ):
        case.run(url, "generate.engine=openai")
    assert len(case.samples()) == COUNT


def test_a_failed_request_is_asked_again_by_the_next_run(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(number: int, body: dict[str, Any]) -> Sequence[Step]:
        good = by_ids(case.text, said(body))
        faults: dict[int, Sequence[Step]] = {
            0: [whole("500 Internal Server Error", '{"error": {"message": "no luck"}}')],
            1: [*good[:3], RESET],
            2: [SSE_HEAD, chunked(event(token([5], "x"))), chunked(b"data: {\n\n"), *good[-2:]],
        }
        return faults.get(number, good)

    with running(answer) as (url, seen):
        with pytest.raises(GateFailed, match=r"failed share 0.5 \(wanted <= 0.05\): 3 of 6"):
            case.run(url)
        assert len(case.samples()) == 3 and len(case.told("failures.json")) == 3
        assert "HTTP 500: no luck" in case.told("failures.json").values()
        first = _bodies(seen.bodies)
        case.run(url)  # asks what is missing and nothing else
        again = _bodies(seen.bodies)[len(first) :]
        assert len(again) == 3 and sorted(set(again)) == sorted(again)
        assert [s.index for s in case.samples()] == list(range(COUNT))
        asked = len(seen.bodies)
        gate = case.run(url)
    assert len(seen.bodies) == asked and gate.passed
    assert "nothing to do" in capsys.readouterr().err


def _bodies(bodies: Sequence[dict[str, Any]]) -> list[str]:
    return [body["messages"][-1]["content"] for body in bodies if body]


def test_interrupted_runs_give_the_digest_of_a_whole_one(case: Case, tmp_path: Path) -> None:
    other = Case(tmp_path / "other")

    def failing(number: int, body: dict[str, Any]) -> Sequence[Step]:
        good = by_ids(case.text, said(body))
        return [*good[:3], RESET] if number in (1, 4) else good

    with running(failing) as (url, _):
        with pytest.raises(GateFailed):
            case.run(url)
        gate = case.run(url)
    with running(lambda number, body: by_ids(other.text, said(body))) as (url, _):
        assert other.run(url, "generate.concurrency=1").output == gate.output


def test_a_server_that_only_fails_is_given_up_and_what_is_there_kept(case: Case) -> None:
    def answer(number: int, body: dict[str, Any]) -> Sequence[Step]:
        if number < 2:
            return by_ids(case.text, said(body))
        return [whole("400 Bad Request", '{"error": {"message": "too long"}}')]

    prompts(case.root / "prompts.jsonl", 40)
    with (
        running(answer) as (url, _),
        pytest.raises(EngineFailed, match="2 of 40 samples are kept, run the same command"),
    ):
        case.run(url)
    assert not (case.folder / "gate.json").exists() and len(case.samples()) == 2


def test_another_plan_never_mixes_with_what_was_begun(case: Case) -> None:
    with running(lambda number, body: by_ids(case.text, said(body))) as (url, seen):
        case.run(url)
        for change, told in [
            ("sampling.temperature=0.7", r"sampling.temperature 0.0 -> 0.7"),
            ("generate.max_tokens=99", r"generate.max_tokens 160 -> 99"),
            ("engine.dtype=float32", r"engine.dtype auto -> float32"),
        ]:
            with pytest.raises(UsageError, match=told + "; give another --out, or remove"):
                case.run(url, change)
        case.run(url, "generate.concurrency=1", "generate.timeout_s=5")  # only how, not what
        asked = len(seen.bodies)
        prompts(case.root / "prompts.jsonl", COUNT + 1)
        with pytest.raises(UsageError, match=r"the prompts of workload\.dataset are others"):
            case.run(url)
        prompts(case.root / "prompts.jsonl", COUNT)
        config = json.loads((case.target / "config.json").read_text())
        (case.target / "config.json").write_text(json.dumps({**config, "rope_theta": 5}))
        with pytest.raises(UsageError, match="the target's config changed"):
            case.run(url)
    assert len(seen.bodies) == asked


def test_another_limit_judges_again_and_asks_nothing(case: Case) -> None:
    def answer(number: int, body: dict[str, Any]) -> Sequence[Step]:
        return by_ids(case.text, said(body), finish="length" if number == 0 else "stop")

    with running(answer) as (url, seen):
        with pytest.raises(GateFailed, match="truncated share"):
            case.run(url, "generate.most_truncated=0.1", "generate.concurrency=1")
        asked = _bodies(seen.bodies)
        gate = case.run(url, "generate.most_truncated=0.2")
        assert _bodies(seen.bodies) == asked and gate.passed
        assert [s.index for s in case.samples()] == [1, 2, 3, 4, 5]
        assert case.run(url, "generate.most_truncated=0.9").output == gate.output


def test_more_samples_than_prompts_come_with_seeds(case: Case) -> None:
    def answer(number: int, body: dict[str, Any]) -> Sequence[Step]:
        assert body["temperature"] == 0.7
        return by_ids(case.text, f"{said(body)} {body['seed']}")

    with running(answer) as (url, seen):
        case.run(url, "generate.samples=15", "sampling.temperature=0.7")
        with pytest.raises(UsageError, match=r"set sampling\.temperature"):
            case.run(url, "generate.samples=15")
    assert [s.index for s in case.samples()] == list(range(15))
    assert sorted(body["seed"] for body in seen.bodies if body) == list(range(15))
    assert not any(s.greedy for s in case.samples())


def test_every_turn_of_a_conversation_is_a_sample_and_it_goes_on_where_it_stopped(
    case: Case,
) -> None:
    rows = [{"id": f"c{i}", "turns": [f"number {i}1 ?", f"number {i}2 ?"]} for i in range(3)]
    (case.root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def answer(number: int, body: dict[str, Any]) -> Sequence[Step]:
        good = by_ids(case.text, said(body))
        return [*good[:3], RESET] if number == 3 else good  # a second turn

    with running(answer) as (url, seen):
        with pytest.raises(GateFailed, match="failed share"):
            case.run(url, "workload.multi_turn=true", "generate.concurrency=1")
        before = len(seen.bodies)
        case.run(url, "workload.multi_turn=true")
        (asked,) = [body for body in seen.bodies[before:] if body]
    samples = case.samples()
    assert [s.id for s in samples] == [f"c{i}#0{t}" for i in range(3) for t in ("", ".1")]
    for one in samples[1::2]:
        assert one.messages is not None
        answers = [m["content"] for m in one.messages if m["role"] == "assistant"]
        first = next(s for s in samples if s.id == one.id.removesuffix(".1"))
        assert answers == [first.answer]
    assert len(asked["messages"]) == 3


def test_an_answer_of_nothing_is_a_sample_that_the_gate_counts(case: Case) -> None:
    def answer(number: int, body: dict[str, Any]) -> Sequence[Step]:
        thought, text = said(body).split("</think>")
        return in_words("", None, None) if number == 0 else in_words(text, thought, None)

    with running(answer) as (url, _):
        gate = case.run(url, "generate.engine=openai", "generate.most_empty=0.5")
    assert checks(gate)["empty share"] == pytest.approx(1 / 6) and len(case.samples()) == 5


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("workload.ignore_eos=true", "answers would go on behind their end"),
        ("target.path=/nowhere", "target /nowhere has no config.json"),
        ("target.served_name=another", "serves scripted, not target.served_name=another"),
        ("generate.url=ftp://x", "ftp"),
        ("engine.api_key_env=NO_SUCH_KEY", "the environment has no key in NO_SUCH_KEY"),
    ],
)
def test_what_cannot_be_asked_is_one_line(case: Case, change: str, told: str) -> None:
    with (
        running(lambda number, body: by_ids(case.text, said(body))) as (url, seen),
        pytest.raises((UsageError, EngineUsageError), match=told) as error,
    ):
        case.run(url, change)
    assert "\n" not in str(error.value) and not _bodies(seen.bodies)


def test_openai_needs_a_url(case: Case) -> None:
    sets = [f"target.path={case.target}", "generate.engine=openai", "workload.dataset=builtin"]
    with pytest.raises(UsageError, match=r"give its generate\.url"):
        stage.run(read_plan("demo", sets), case.work)
    assert not case.work.exists()


def test_a_damaged_shard_is_told_and_nothing_is_asked(case: Case) -> None:
    with running(lambda number, body: by_ids(case.text, said(body))) as (url, seen):
        case.run(url)
        (shard,) = case.folder.glob("samples-*.jsonl")
        lines = shard.read_bytes().splitlines(keepends=True)
        shard.write_bytes(lines[0][:20] + b"\n" + b"".join(lines[1:]))
        (case.folder / "gate.json").unlink()
        asked = len(seen.bodies)
        with pytest.raises(UsageError, match=r"samples-00000.jsonl, line 1: not a sample"):
            case.run(url)
    assert len(seen.bodies) == asked


def test_a_full_disk_keeps_what_is_there_and_the_next_run_goes_on(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, number = ShardWriter.append, iter(range(100))

    def append(self: ShardWriter, sample: Sample) -> None:
        if next(number) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        written(self, sample)

    with running(lambda number, body: by_ids(case.text, said(body))) as (url, _):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
            patch.setattr(ShardWriter, "append", append)
            case.run(url, "generate.concurrency=1")
        assert len(case.samples()) == 3
        assert case.run(url).passed and len(case.samples()) == COUNT


def test_a_plan_that_gave_no_sample_yet_may_change(case: Case) -> None:
    def refusing(number: int, body: dict[str, Any]) -> Sequence[Step]:
        return [whole("400 Bad Request", '{"error": {"message": "no"}}')]

    with running(refusing) as (url, _), pytest.raises(GateFailed, match="failed share"):
        case.run(url)
    with running(lambda number, body: by_ids(case.text, said(body))) as (url, _):
        assert case.run(url, "generate.max_tokens=99").passed
    assert case.told("made_from.json")["made"]["plan"]["generate"]["max_tokens"] == 99


def test_secrets_are_not_written_down_and_another_key_changes_nothing(case: Case) -> None:
    def asked(key: str) -> tuple[str, ...]:
        argument = f'engine.extra_args=["--api-key", "{key}", "--max-tokens", "7"]'
        prefix = f'engine.command_prefix=["env", "A_KEY={key}"]'
        table = f"engine.env.B_TOKEN={{value = '{key}', why = 'w'}}"
        told = f"engine.extra_env.HF_TOKEN={key}", "engine.extra_env.TOKENIZERS=2", argument
        return (*told, prefix, table)

    with running(lambda number, body: by_ids(case.text, said(body))) as (url, seen):
        case.run(url, *asked("hush-hush"))
        case.run(url, *asked("another"))
    assert len(_bodies(seen.bodies)) == COUNT
    for path in case.folder.iterdir():
        assert b"hush-hush" not in path.read_bytes(), path
    engine = case.told("made_from.json")["made"]["plan"]["engine"]
    assert engine["extra_env"]["TOKENIZERS"] == "2" and engine["extra_args"][2:] == [
        "--max-tokens",
        "7",
    ]
    assert engine["command_prefix"][0] == "env" and engine["env"]["B_TOKEN"]["why"] == "w"


def test_a_folder_with_a_key_in_it_can_still_be_gone_on_with(case: Case) -> None:
    prefix = 'engine.command_prefix=["env", "A_KEY=hush-hush"]'
    with running(lambda number, body: by_ids(case.text, said(body))) as (url, seen):
        case.run(url, prefix)
        record = case.folder / "made_from.json"
        record.write_text(record.read_text().replace(HIDDEN, "hush-hush"))
        assert "hush-hush" in record.read_text()
        case.run(url, prefix)
    assert len(_bodies(seen.bodies)) == COUNT


def test_samples_that_changed_since_their_gate_are_made_anew(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(lambda number, body: by_ids(case.text, said(body))) as (url, seen):
        before = case.run(url)
        shard = case.folder / "samples-00000.jsonl"
        shard.write_bytes(b"".join(shard.read_bytes().splitlines(keepends=True)[1:]))
        again = case.run(url)
    assert again.output == before.output and len(_bodies(seen.bodies)) == COUNT + 1
    assert "changed since they passed their gate" in capsys.readouterr().err
