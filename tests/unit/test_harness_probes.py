"""What is asked of servers beside the load, and that nothing of it can cost a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness_records import MS, counters, request, timeline
from msgspec import structs

from engines.catalog import adapter
from harness import floor, probes
from harness.analyse.integrity import first_divergence
from harness.errors import UsageError
from harness.load.prompts.datasets import Prompt
from harness.measure.store import RunFolder, to_json
from harness.plan.expand import expand
from harness.plan.schema import (
    CompareSection,
    EngineSection,
    LoadSection,
    Plan,
    SamplingSection,
    TargetSection,
)
from harness.prepare import Prepared
from harness.progress import PlainProgress
from harness.records import VARIANTS, Cell, ParityRecord, RequestRecord
from harness.stored import read_floor, read_golden, read_parity, read_ties

Answer = Callable[[str, dict[str, Any]], tuple[int, Any]]
RIGHT, WRONG = (1, 2, 3, 4), (1, 2, 9, 4)


class Here:
    """A server at an address that nobody listens at."""

    url = urls = "http://server"
    pid = None
    watch = None
    argv: tuple[str, ...] = ()
    phases = ()
    ready_s = None
    log_path = None

    def gone(self) -> str | None:
        return None

    lost = gone


def prepared(plan: Plan | None = None, **fields: Any) -> Prepared:
    plan = plan or Plan(
        load=LoadSection(num_requests=4, concurrency=(1,)), compare=CompareSection(launches=2)
    )
    values: dict[str, Any] = {
        "name": "reference", "adapter": adapter("reference"), "plan": plan, "why": "",
        "target": None, "drafter": None, "urls": {}, "model": "m",
        "prompts": [Prompt(id=f"p{i}", text=f"say {i}") for i in range(4)],
        "cells": expand(plan, "reference", VARIANTS, attached=False),
    }  # fmt: skip
    return Prepared(**{**values, **fields})


def answering(monkeypatch: pytest.MonkeyPatch, answer: Answer) -> list[str]:
    """Every client of the probes is answered so; gives the paths asked."""
    paths: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.path)
        status, told = answer(request.url.path, json.loads(request.content))
        return httpx.Response(status, json=told)

    monkeypatch.setattr(
        probes,
        "plain_client",
        lambda url, client, key: httpx.Client(transport=httpx.MockTransport(handle)),
    )
    return paths


def scoring(best: dict[int, float]) -> Answer:
    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/chat/completions":
            return 200, {"choices": [{}], "prompt_token_ids": [100, 101]}
        prompt = body["prompt"]
        if isinstance(prompt, list):
            assert prompt == [100, 101, 1, 2]  # up to where the answers part
            top = {f"token_id:{t}": p for t, p in best.items()}
        else:
            top = {" a": -0.5}
        tokens, n = next(iter(top)), body["max_tokens"]
        told = {"tokens": [tokens] * n, "token_logprobs": [-0.5] * n, "top_logprobs": [top] * n}
        return 200, {"choices": [{"logprobs": told}]}

    return answer


def save(folder: RunFolder, cell: Cell, wrong: set[int] = frozenset()) -> None:  # type: ignore[assignment]
    records: list[RequestRecord] = [
        request(
            cell_id=cell.cell_id, index=i, prompt_id=f"p{i}", sent_ns=i * MS,
            token_ids=WRONG if i in wrong else RIGHT,
        )
        for i in range(4)
    ]  # fmt: skip
    folder.save_cell(cell.cell_id, records, counters(), timeline(), None)


def turns(ready: Prepared) -> list[Cell]:
    assert [c.variant[0] for c in ready.cells] == ["b", "s", "s", "b"]
    return ready.cells


def test_near_ties_are_asked_of_the_next_baseline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, ready = RunFolder(tmp_path), prepared()
    answering(monkeypatch, scoring({3: -0.3, 9: -0.35, 5: -4.0}))
    first, second, third, fourth = turns(ready)
    save(folder, first)
    probes.ask_ties(ready, Here(), [first], folder)
    save(folder, second, wrong={1, 3})
    probes.ask_ties(ready, Here(), [second], folder)  # a baseline is still to come: not asked
    assert [t.ties for t in read_ties(folder)] == [()]
    save(folder, third)
    save(folder, fourth)
    probes.ask_ties(ready, Here(), [fourth], folder)
    (ties,) = read_ties(folder)
    assert set(ties.cells) == {second.cell_id, third.cell_id}
    assert [(t.cell_id, t.index, t.position) for t in ties.ties] == [
        (second.cell_id, 1, 2), (second.cell_id, 3, 2),
    ]  # fmt: skip
    assert all(t.gap == pytest.approx(0.05) and t.asked == "baseline" for t in ties.ties)
    probes.ask_ties(ready, Here(), [fourth], folder)
    assert read_ties(folder) == [ties]  # each pair is asked about once


def test_the_last_speculative_server_is_asked_where_no_baseline_comes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = Plan(load=LoadSection(num_requests=4), compare=CompareSection(launches=1))
    ready, folder = prepared(plan), RunFolder(tmp_path)
    answering(monkeypatch, scoring({3: -0.3, 5: -7.0}))
    base, speculative = ready.cells
    save(folder, base)
    save(folder, speculative, wrong={0})
    probes.ask_ties(ready, Here(), [speculative], folder)
    (ties,) = read_ties(folder)
    assert [(t.gap, t.asked) for t in ties.ties] == [(pytest.approx(6.7), "speculative")]


def test_a_server_that_tells_nothing_leaves_gaps_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = Plan(load=LoadSection(num_requests=4), compare=CompareSection(launches=1))
    ready, folder = prepared(plan), RunFolder(tmp_path)
    paths = answering(monkeypatch, lambda path, body: (404, {}))
    save(folder, ready.cells[0])
    save(folder, ready.cells[1], wrong={0})
    probes.ask_ties(ready, Here(), ready.cells[1:], folder)
    (ties,) = read_ties(folder)
    assert [t.gap for t in ties.ties] == [None]
    assert paths == ["/v1/chat/completions"]
    warm = prepared(structs.replace(plan, sampling=SamplingSection(temperature=0.5)))
    probes.ask_ties(warm, Here(), ready.cells[1:], RunFolder(tmp_path / "other"))
    assert len(paths) == 1


def test_what_goes_wrong_beside_the_load_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with probes.beside_the_load(PlainProgress()):
        raise KeyError("odd")
    assert "was left out (KeyError: 'odd')" in capsys.readouterr().err
    with pytest.raises(OSError, match="full"), probes.beside_the_load(PlainProgress()):
        raise OSError("full")
    with pytest.raises(KeyboardInterrupt), probes.beside_the_load(PlainProgress()):
        raise KeyboardInterrupt


def test_parity_is_asked_of_each_start_and_of_a_running_server_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, ready = RunFolder(tmp_path), prepared()
    paths = answering(monkeypatch, scoring({}))
    for cell in ready.cells:
        launch = folder.new_launch(f"{cell.variant}-r{cell.repeat}")
        probes.ask_parity(ready, Here(), cell, folder, launch)
    assert len(paths) == 4 * len(probes.PROMPTS)
    found = read_parity(folder)
    assert len(found) == 4
    assert all(len(r.answers) == len(probes.PROMPTS) and r.note is None for r in found)
    attached = prepared(urls={"baseline": Here.url})
    probes.ask_parity(attached, Here(), ready.cells[3], folder, folder.new_launch("again"))
    assert len(paths) == 4 * len(probes.PROMPTS)


def test_a_server_without_log_probabilities_leaves_a_note(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, ready = RunFolder(tmp_path), prepared()
    answering(monkeypatch, lambda path, body: (501, {}))
    probes.ask_parity(ready, Here(), ready.cells[0], folder, folder.new_launch("a"))
    (record,) = read_parity(folder)
    assert record.answers == ()
    assert record.note == "/v1/completions answers 501"


def test_a_plan_may_leave_the_questions_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = Plan(
        load=LoadSection(num_requests=4), compare=CompareSection(launches=1),
        target=TargetSection(ask_logprobs=False),
    )  # fmt: skip
    ready, folder = prepared(plan), RunFolder(tmp_path)
    paths = answering(monkeypatch, scoring({3: -0.3}))
    save(folder, ready.cells[0])
    save(folder, ready.cells[1], wrong={0})
    probes.ask_parity(ready, Here(), ready.cells[0], folder, folder.new_launch("a"))
    probes.ask_ties(ready, Here(), ready.cells[1:], folder)
    assert paths == []
    assert read_parity(folder) == read_ties(folder) == []


def checkpoint(folder: Path, *, weights: bytes = b"w" * 5000, config: str = "{}") -> Path:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "config.json").write_text(config)
    return folder


def test_the_weights_key_knows_weights_and_not_the_config(tmp_path: Path) -> None:
    one = probes.weights_key(checkpoint(tmp_path / "a"))
    assert one is not None
    assert one == probes.weights_key(checkpoint(tmp_path / "b", config='{"rope_theta": 2}'))
    assert one != probes.weights_key(checkpoint(tmp_path / "c", weights=b"v" + b"w" * 4999))
    assert probes.weights_key(None) is None


def golden() -> ParityRecord:
    return ParityRecord(
        engine="reference", variant="baseline", repeat=0, target=None, weights=None, dtype=None,
        answers=(),
    )  # fmt: skip


def test_the_golden_file_is_the_plans_or_the_weights_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(probes, "GOLDEN", tmp_path / "parity")
    target = checkpoint(tmp_path / "target")
    ready = prepared(target=target)
    assert probes.golden_of(ready) is None
    (tmp_path / "parity").mkdir()
    stored = tmp_path / "parity" / f"{probes.weights_key(target)}.json"
    stored.write_bytes(to_json(golden()))
    assert probes.golden_of(ready) == golden()
    folder = RunFolder(tmp_path / "run")
    probes.keep_golden(ready, folder)
    assert read_golden(folder) == {"reference": golden()}
    named = prepared(Plan(target=TargetSection(parity=str(tmp_path / "none.json"))))
    with pytest.raises(UsageError, match=r"none\.json: no such file"):
        probes.golden_of(named)


@pytest.mark.parametrize(
    ("said", "config", "found"),
    [
        ("float16", '{"torch_dtype": "float32"}', "float16"),
        ("auto", '{"torch_dtype": "float32"}', "float32"),
        ("auto", '{"text_config": {"dtype": "bfloat16"}}', "bfloat16"),
        ("auto", "{}", None),
        ("auto", "nonsense", None),
    ],
)
def test_the_precision_served(tmp_path: Path, said: Any, config: str, found: str | None) -> None:
    target = checkpoint(tmp_path / "target", config=config)
    plan = Plan(engine=EngineSection(dtype=said))
    assert probes.dtype_of(prepared(plan, target=target)) == found


def test_the_floor_is_asked_once_in_the_second_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, ready = RunFolder(tmp_path), prepared()
    first, second, third, fourth = turns(ready)
    asked: list[tuple[int | None, list[str]]] = []

    class Driven:
        def __init__(self, records: tuple[RequestRecord, ...]) -> None:
            self.records = records

    def drive(ask: Any, prompts: Any, load: Any, *, cell_id: str, **_: Any) -> Driven:
        asked.append((load.concurrency, [p.id for p in prompts]))
        return Driven(
            tuple(
                request(cell_id=cell_id, index=i, prompt_id=p.id, token_ids=RIGHT)
                for i, p in enumerate(prompts)
            )
        )

    monkeypatch.setattr(floor, "drive", drive)
    for cell in (first, second, third, fourth):
        save(folder, cell)
        floor.ask_again(ready, Here(), [cell], folder, PlainProgress())
    assert asked == [(1, ["p0", "p1", "p2", "p3"]), (4, ["p0", "p1", "p2", "p3"])]
    own, other = read_floor(folder)
    assert own.cell.load == first.load
    assert other.cell.load.concurrency == 4
    assert first_divergence(own.records[:1], other.records[:1]) is None
    floor.ask_again(ready, Here(), [fourth], folder, PlainProgress())
    assert len(asked) == 2
