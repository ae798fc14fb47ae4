"""The trace of the reference engine with the demo pair: every row, every count, every proposal."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.base import EngineUsageError, ServeSpec
from engines.reference.__main__ import main
from engines.reference.engine import Engine
from engines.reference.loading import load_engine
from engines.reference.request import Request
from engines.reference.sampling import SamplingParams
from engines.trace.base import TraceStep
from engines.trace.launch import traced
from engines.trace.plugin.trace_files import CallFiles, Handed, load_functions
from engines.trace.read import client_id, read_trace, read_whole
from engines.trace.reference import trace_to_folder, trace_to_memory

LENGTHS = (7, 3, 23, 600, 12, 40)
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(demo_pair: Path) -> Engine:
    return load_engine(
        demo_pair / "target",
        drafter=demo_pair / "drafter-mla",
        dtype="float32",
        max_len=1024,
        slots=4,
    )


@pytest.fixture
def fresh(engine: Engine) -> Any:
    """The engine as it was loaded, whatever a test hangs onto it."""
    proposer, on_close = engine.proposer, engine.on_close
    yield engine
    engine.proposer, engine.on_close = proposer, on_close


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(5, 700, (n,), generator=generator).tolist() for n in lengths]


def serve(engine: Engine, params: list[SamplingParams] | None = None) -> list[Request]:
    """Requests that end at different times, more than there are slots."""
    chosen = params or [replace_tokens(GREEDY, 24 - 3 * i) for i in range(len(LENGTHS))]
    requests = [
        Request(prompt, each, tokenizer=engine.tokenizer, stream=False, name=f"r{i}")
        for i, (prompt, each) in enumerate(zip(prompts(), chosen, strict=False))
    ]
    for request in requests:
        engine.submit(request)
    while not all(request.finished for request in requests):
        engine.step()
    return requests


def replace_tokens(params: SamplingParams, count: int) -> SamplingParams:
    return type(params)(**{**_fields(params), "max_tokens": count})


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.__struct_fields__}


def assert_whole(engine: Engine, request: Request, steps: list[TraceStep]) -> None:
    """Every fed token once and in order, its states, and the engine's own counts."""
    assert [step.step for step in steps] == list(range(len(steps)))
    text = request.prompt + request.output
    first = steps[0]
    assert (first.kind, first.valid) == ("prefill", len(request.prompt))
    assert all(step.kind == "decode" for step in steps[1:])
    positions = torch.cat([step.positions[: step.valid] for step in steps]).tolist()
    assert positions == list(range(len(positions)))
    ids = torch.cat([step.token_ids[: step.valid] for step in steps]).tolist()
    known = min(len(ids), len(text))
    assert ids[:known] == text[:known]
    assert request.drafts is not None
    # the last token of all is fed to nobody, unless it was a draft that was accepted
    assert len(ids) - (len(text) - 1 + request.drafts.past_end) in (0, 1)
    assert [step.valid - 1 for step in steps[1:]] == request.drafts.accepted
    for before, step in itertools.pairwise(steps):
        assert step.token_ids.tolist() == [before.next_token, *before.drafts.tolist()]
    with torch.inference_mode():
        aux_layers = engine.proposer.aux_layers  # type: ignore[union-attr]
        wanted = engine.capture(ids, aux_layers).flatten(1)
    found = torch.cat([step.aux[: step.valid] for step in steps])
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_every_row_and_count_is_the_engines(fresh: Engine) -> None:
    plain = [request.output for request in serve(fresh)]
    steps = trace_to_memory(fresh)
    requests = serve(fresh)
    assert [request.output for request in requests] == plain
    assert set(steps) == {request.name for request in requests}
    for request in requests:
        assert_whole(fresh, request, steps[request.name])
    # requests came and went: slots moved, and calls were shared
    batches = {step.batch for found in steps.values() for step in found}
    assert batches >= {1, 4}


def test_the_drafts_are_the_drafters_own(fresh: Engine) -> None:
    """Proposed again offline, one request alone, from the rows in the trace."""
    from engines.reference.draft import EagleProposer

    drafter = fresh.proposer
    assert isinstance(drafter, EagleProposer)
    steps = trace_to_memory(fresh)
    serve(fresh)
    for found in steps.values():
        for i, step in enumerate(found):
            if i == 0:
                assert step.next_token is not None
                with torch.inference_mode():
                    drafter.begin(0, [*step.token_ids.tolist(), step.next_token], step.aux)
            else:
                following = [*step.token_ids[1 : step.valid].tolist(), step.next_token]
                tokens = torch.zeros(1, drafter.k + 1, dtype=torch.int64)
                tokens[0, : step.valid] = torch.tensor(following)
                with torch.inference_mode():
                    drafter.record(
                        [int(step.positions[0])], [step.valid - 1], tokens, step.aux[None]
                    )
            if len(step.drafts):
                with torch.inference_mode():
                    again, _ = drafter.propose(1, None, None)
                assert again[0].tolist() == step.drafts.tolist()


def test_sampled_requests_are_traced_as_greedy_ones(fresh: Engine) -> None:
    warm = SamplingParams(max_tokens=20, temperature=1.0, seed=3, ignore_eos=True)
    plain = [request.output for request in serve(fresh, [warm] * 3 + [GREEDY] * 3)]
    steps = trace_to_memory(fresh)
    requests = serve(fresh, [warm] * 3 + [GREEDY] * 3)
    assert [request.output for request in requests] == plain
    for request in requests:
        assert_whole(fresh, request, steps[request.name])


def test_a_cancelled_request_keeps_the_steps_it_made(fresh: Engine) -> None:
    steps = trace_to_memory(fresh)
    long = replace_tokens(GREEDY, 200)
    requests = [Request(p, long, name=f"c{i}") for i, p in enumerate(prompts((9, 30, 14)))]
    for request in requests:
        fresh.submit(request)
    for _ in range(4):
        fresh.step()
    fresh.cancel(requests[0])
    for _ in range(3):
        fresh.step()
    for request in requests[1:]:
        fresh.cancel(request)
    fresh.step()
    for request in requests:
        assert request.finish_reason == "abort"
        assert_whole(fresh, request, steps[request.name])


def test_a_request_of_one_token_asks_the_drafter_for_nothing(fresh: Engine) -> None:
    steps = trace_to_memory(fresh)
    fresh.generate(prompts((9,)), replace_tokens(GREEDY, 1))
    assert steps == {}


def test_a_folder_holds_what_memory_holds(fresh: Engine, tmp_path: Path) -> None:
    memory = trace_to_memory(fresh)
    trace_to_folder(fresh, tmp_path / "trace")
    serve(fresh)
    read = read_trace(tmp_path / "trace")
    assert read_whole(tmp_path / "trace").problems == ()
    assert set(read) == set(memory)
    for name, found in read.items():
        for step, kept in zip(found, memory[name], strict=True):
            assert_same(step, kept)
    assert not list((tmp_path / "trace").glob("*.partial"))


def assert_same(a: TraceStep, b: TraceStep) -> None:
    for name in ("request", "step", "call", "batch", "kind", "valid", "next_token"):
        assert getattr(a, name) == getattr(b, name), name
    for name in ("positions", "token_ids", "aux", "drafts"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name


def test_a_damaged_file_costs_its_own_call(fresh: Engine, tmp_path: Path) -> None:
    trace_to_folder(fresh, tmp_path)
    serve(fresh)
    whole = read_whole(tmp_path)
    files = sorted(tmp_path.glob("*.safetensors"))
    files[1].write_bytes(files[1].read_bytes()[:-40])
    files[3].write_bytes(b"no tensors")
    files[5].write_bytes(b"")
    lost = {1, 3, 5}
    damaged = read_whole(tmp_path)
    assert len(damaged.problems) == 3
    assert {problem.split(":")[0] for problem in damaged.problems} == {files[i].name for i in lost}
    for name, steps in whole.steps.items():
        kept = [step for step in steps if step.call not in lost]
        for a, b in zip(kept, damaged.steps.get(name, []), strict=True):
            assert_same(a, b)


def test_a_request_with_a_step_missing_is_left_out_and_told(tmp_path: Path) -> None:
    files = CallFiles(str(tmp_path))
    none = torch.empty(0, dtype=torch.int64)
    for _ in range(3):
        files([_handed("a", none), _handed("b", none)], 2)
    files([_handed("b", none)], 1)
    said: list[str] = []
    assert {name: len(s) for name, s in read_trace(tmp_path, said.append).items()} == {
        "a": 3,
        "b": 4,
    }
    assert said == []
    last, damaged = sorted(tmp_path.iterdir())[2:0:-1]
    last.unlink()  # the engine's own disk was full: a's last steps, and one of b's in the middle
    assert set(read_trace(tmp_path, said.append)) == {"a"}
    assert "1 requests with steps missing" in said[0]
    damaged.write_bytes(damaged.read_bytes()[:-4])
    assert set(read_trace(tmp_path, said.append)) == {"a"}
    assert "1 files of the trace cannot be read" in said[1] and damaged.name in said[1]
    sorted(tmp_path.iterdir())[0].unlink()
    with pytest.raises(EngineUsageError, match="no trace of a drafter can be read"):
        read_trace(tmp_path)


def test_a_folder_without_a_readable_call_is_told(tmp_path: Path) -> None:
    with pytest.raises(EngineUsageError, match="no such folder"):
        read_trace(tmp_path / "nowhere")
    with pytest.raises(EngineUsageError, match="wrote no call"):
        read_trace(tmp_path)
    (tmp_path / "x.safetensors").write_bytes(b"12345678")
    with pytest.raises(EngineUsageError, match=r"x\.safetensors"):
        read_trace(tmp_path)


@settings(max_examples=25)
@given(data=st.data())
def test_any_call_comes_back_as_it_was_written(data: Any, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("calls")
    files = CallFiles(str(folder))
    width = data.draw(st.integers(1, 5))
    written = []
    for _ in range(data.draw(st.integers(1, 4))):
        parts = [_drawn(data, f"r{i}", width) for i in range(data.draw(st.integers(1, 4)))]
        batch = data.draw(st.integers(len(parts), 9))
        files(parts, batch)
        written.append((parts, batch))
    read = read_whole(folder)
    assert read.problems == ()
    for call, (parts, batch) in enumerate(written):
        for part in parts:
            (step,) = [s for s in read.steps[part.request] if s.call == call]
            assert (step.batch, step.kind, step.valid) == (batch, part.kind, part.valid)
            assert step.next_token == part.next_token
            assert torch.equal(step.aux, part.aux.float())
            for name in ("positions", "token_ids", "drafts"):
                assert torch.equal(getattr(step, name), getattr(part, name))


def _drawn(data: Any, request: str, width: int) -> Handed:
    rows = data.draw(st.integers(1, 6))
    start = data.draw(st.integers(0, 10_000))
    return Handed(
        request=request,
        kind=data.draw(st.sampled_from(["prefill", "decode"])),
        positions=torch.arange(start, start + rows),
        token_ids=torch.randint(0, 163_840, (rows,)),
        aux=torch.randn(rows, width).to(torch.bfloat16),
        valid=data.draw(st.integers(0, rows)),
        next_token=data.draw(st.none() | st.integers(0, 163_839)),
        drafts=torch.randint(0, 163_840, (data.draw(st.integers(0, 4)),)),
    )


def test_drafts_that_come_later_are_joined_to_their_step(tmp_path: Path) -> None:
    """As SGLang makes them: handed over in one batch, answered in another, or never."""
    files = CallFiles(str(tmp_path))
    none = torch.empty(0, dtype=torch.int64)
    first = [_handed("cmpl-a-0-8f0a1b2c", none), _handed("b", none)]
    files(first, 2)
    files([_handed("c", none)], 1)
    files.answer(["b", "c", "cmpl-a-0-8f0a1b2c"], torch.tensor([[1, 2], [3, 4], [5, 6]]))
    files([_handed("b", none)], 1)
    whole = read_whole(tmp_path)
    assert whole.problems == ()
    told = {name: [s.drafts.tolist() for s in steps] for name, steps in whole.steps.items()}
    assert told == {"a": [[5, 6]], "b": [[1, 2], []], "c": [[3, 4]]}
    assert [step.batch for step in whole.steps["b"]] == [3, 1]
    (answer,) = tmp_path.glob("*-drafts.safetensors")
    answer.write_bytes(b"gone")
    damaged = read_whole(tmp_path)
    assert len(damaged.problems) == 1
    assert [len(step.drafts) for step in damaged.steps["b"]] == [0, 0]


def _handed(request: str, drafts: torch.Tensor) -> Handed:
    return Handed(
        request=request,
        kind="decode",
        positions=torch.arange(3),
        token_ids=torch.arange(3),
        aux=torch.zeros(3, 2),
        valid=1,
        next_token=7,
        drafts=drafts,
    )


class Scaled:
    """A fault as a plugin plants it: what the drafter is handed, spoiled on the way to it."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.k, self.aux_layers = inner, inner.k, inner.aux_layers

    def begin(self, slot: int, tokens: list[int], aux: Any) -> None:
        self.inner.begin(slot, tokens, aux * 3)

    def record(self, starts: Any, accepted: Any, tokens: Any, aux: Any) -> None:
        self.inner.record([0] * len(starts), accepted, tokens, aux * 3)

    def move(self, source: int, target: int) -> None:
        self.inner.move(source, target)

    def propose(self, rows: int, params: Any, uniform: Any) -> Any:
        drafts, chances = self.inner.propose(rows, params, uniform)
        return (drafts + 1) % 700, chances


def test_a_plugins_wrapper_lies_outside_the_door(fresh: Engine) -> None:
    """The states are the spoiled ones, tokens and positions the engine's, drafts the drafter's."""
    fresh.proposer = Scaled(fresh.proposer)
    steps = trace_to_memory(fresh)
    (request,) = fresh.generate(prompts((11,)), GREEDY)
    found = steps[request.name]
    ids = torch.cat([step.token_ids[: step.valid] for step in found]).tolist()
    text = request.prompt + request.output
    assert ids[: len(text)] == text[: len(ids)]
    positions = torch.cat([step.positions[: step.valid] for step in found]).tolist()
    assert positions == list(range(len(ids)))
    wanted = fresh.capture(ids, fresh.proposer.aux_layers).flatten(1)
    aux = torch.cat([step.aux[: step.valid] for step in found])
    torch.testing.assert_close(aux, wanted * 3, atol=1e-3, rtol=1e-4)
    for before, step in itertools.pairwise(found):
        assert step.token_ids[1:].tolist() == ((before.drafts + 1) % 700).tolist()


def test_requests_that_began_before_the_trace_are_left_out(fresh: Engine) -> None:
    early = [Request(p, GREEDY, name=f"early{i}") for i, p in enumerate(prompts((9, 30)))]
    for request in early:
        fresh.submit(request)
    fresh.step()
    steps = trace_to_memory(fresh)
    late = Request(prompts((14,))[0], GREEDY, name="late")
    fresh.submit(late)
    while not all(r.finished for r in (*early, late)):
        fresh.step()
    assert set(steps) == {"late"}
    assert_whole(fresh, late, steps["late"])


@pytest.mark.parametrize(
    ("engine_id", "client"),
    [
        ("cmpl-q-17-0-8f0a1b2c", "q-17"),
        ("cmpl-q-17-3-8f0a1b2c", "q-17"),
        ("chatcmpl-run/0.5-1-8f0a1b2c", "run/0.5-1"),
        ("reference-1", "reference-1"),
    ],
)
def test_the_clients_id_is_found_in_the_engines(engine_id: str, client: str) -> None:
    assert client_id(engine_id) == client


def test_a_plugin_that_cannot_be_called_is_told(tmp_path: Path) -> None:
    good = tmp_path / "good.py"
    good.write_text("def mark(subject):\n    subject.append(1)\n")
    seen: list[int] = []
    for function in load_functions(f"{good}:mark;{good}:mark"):
        function(seen)
    assert seen == [1, 1]
    (tmp_path / "bad.py").write_text("import no_such_module_at_all\n")
    for named, words in (
        (f"{good}", "FILE.py:FUNCTION"),
        (f"{tmp_path / 'none.py'}:f", "there is no file"),
        (f"{good}:other", "has no function other"),
        (f"{tmp_path / 'bad.py'}:f", "cannot be imported"),
    ):
        with pytest.raises(ValueError, match=words):
            load_functions(named)


def test_the_command_line_refuses_what_it_cannot_trace(
    demo_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["--model", str(demo_pair / "target"), "--port", "0", "--max-num-seqs", "1"]
    assert main([*base, "--trace", str(tmp_path)]) == 2
    assert "--drafter" in capsys.readouterr().err
    assert main([*base, "--plugin", "nowhere.py:f"]) == 2
    assert "there is no file" in capsys.readouterr().err
    plugin = tmp_path / "raises.py"
    plugin.write_text("def f(engine):\n    engine.no_such_thing()\n")
    assert main([*base, "--plugin", f"{plugin}:f"]) == 2
    said = capsys.readouterr().err
    assert "--plugin f failed: AttributeError" in said and f"{plugin}, line 2" in said
    assert "Traceback" not in said


def test_each_engine_is_told_in_its_own_way(tmp_path: Path) -> None:
    spec = ServeSpec(target=tmp_path, served_name="m", port=1, drafter=tmp_path)
    folder = tmp_path / "trace"
    assert traced("reference", spec, folder).extra_args == ("--trace", str(folder))
    own = replace(spec, extra_env={"PYTHONPATH": "/own", "A": "1"}, extra_args=("--x",))
    vllm = traced("vllm", own, folder)
    assert vllm.extra_args == ("--x", "--worker-extension-cls", "trace_vllm.VllmTrace")
    assert vllm.extra_env["A"] == "1"
    paths = vllm.extra_env["PYTHONPATH"].split(os.pathsep)
    assert (Path(paths[0]) / "trace_files.py").is_file()
    assert paths[1:] == ["/own"]
    sglang = traced("sglang", spec, folder)
    assert str(folder) in sglang.extra_args[-1]
    assert len(sglang.extra_env["PYTHONPATH"].split(os.pathsep)) == 2
    with pytest.raises(EngineUsageError, match="writes no trace"):
        traced("openai", spec, folder)
    with pytest.raises(EngineUsageError, match="name the drafter"):
        traced("vllm", replace(spec, drafter=None), folder)
