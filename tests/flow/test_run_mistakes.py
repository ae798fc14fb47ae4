"""Every mistake of the user: exit code 2, one clear line, nothing written, nothing started."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from harness import cli
from harness.errors import UsageError
from harness.load.prompts.datasets import allot, read_jsonl

HEADER = b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
WEIGHTS = len(HEADER).to_bytes(8, "little") + HEADER + bytes(4)


def run_cli(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["harness", *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
    shown = capsys.readouterr()
    assert isinstance(left.value.code, int)
    return left.value.code, shown.out, shown.err


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder with a config and no weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"model_type": "llama", "hidden_size": 8, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def mistakes(tmp_path: Path) -> list[tuple[list[str], str]]:
    typo = tmp_path / "typo.toml"
    typo.write_text("[speculative]\nkk = 3\n")
    odd = tmp_path / "odd.toml"
    odd.write_text("[for.vlm.load]\nnum_requests = 3\n")
    return [
        (["run", "--engine", "vlm"], "did you mean 'vllm'"),
        (["run", "--set", "load.concurency=1"], "did you mean 'load.concurrency'"),
        (["run", "--set", "speculative.k=zero"], "speculative.k=zero"),
        (["run", "--set", "speculative.k"], "key=value"),
        (["run", "--profile", "demmo"], "did you mean 'demo'"),
        (["run", "--profile", "none/such.toml"], "no such file"),
        (["run", "--profile", str(typo)], f"{typo}: unknown key 'speculative.kk'"),
        (["run", "--variants", "fast"], "--variants fast"),
        (["run", "--url", "http://127.0.0.1:1"], "nothing answers there"),
        (["run", "--url", "fast=http://127.0.0.1:1"], "baseline or speculative"),
        (["run", "--url", "http://a", "--url", "http://b"], "several servers"),
        (["run", "--url", "ftp://a"], "not a URL"),
        (["run", "--engine", "openai"], "give its --url"),
        (["run", "--engine", "vllm", "--engine", "sglang", "--url", "http://a"], "one --engine"),
        (["run", "--set", "target.path=/no/such/model"], "/no/such/model"),
        (
            ["run", "--variants", "baseline", "--set", "target.path=/no/such"],
            "target.path=/no/such: no",
        ),
        (["run", "--set", "drafter.path=/no/drafter"], "drafter.path=/no/drafter: no such folder"),
        (["run", "--profile", "model"], "target.path is not set; give --set target.path=DIR"),
        (["run", "--set", "drafter.path=none", "--variants", "speculative"], "drafter.path=none"),
        (["run", "--set", "load.concurrency=none"], "load.concurrency=none: no load is left"),
        (["run", "--set", "workload.dataset=no.jsonl"], "no such file"),
        (["run", "--set", "workload.dataset=random"], "workload.input_tokens=512"),
        (["run", "--set", "load.num_requests=1", "--set", "load.duration_s=1"], "not both"),
        (["run", "--nonsense"], "--nonsense"),
        (["report", str(tmp_path)], "not a run's folder"),
        (["analyse", str(tmp_path)], "is this the folder of a run"),
        (["resume", str(tmp_path / "none")], "is this the folder of a run"),
        (["engines", "show", "demo", "--engine", "vlm"], "did you mean 'vllm'"),
        (["run", "--set", "engine.extra_args=--dtipe,float32"], "did you mean --dtype?"),
        (["run", "--profile", "kimi-k2.5-h200-mla", "--engine", "vllm"], "moonshotai/Kimi-K2.5"),
        (["frobnicate"], "frobnicate"),
        (["run", "--set", "target=x", "--set", "target.path=/a"], "'target' is a table"),
        (["run", "--set", "target.path=/a", "--set", "target=x"], "'target' is a table"),
        (["run", "--set", "target.path=/a", "--set", "target.path.x=1"], "unknown key"),
        (["run", "--set", "target.path=~nobody-here/x"], "cannot be a path"),
        (["run", "--set", "target.path=" + "a" * 300], "cannot be a path"),
        (["run", "--set", "workload.dataset=" + "a" * 300], "no such file"),
        (["run", "--url", "http://.."], "not a URL"),
        (["run", "--url", "http://[::1"], "not a URL"),
        (["run", "--url", "http://" + "a" * 300], "not a URL"),
        (["run", "--url", "http://127.0.0.1:0"], "the port"),
        (["run", "--url", "http://a b/"], "the server's root alone"),
        (["run", "--url", "http://u:p@127.0.0.1:1"], "the server's root alone"),
        (["run", "--profile", str(odd)], "did you mean 'vllm'"),
        (["run", "--set", "name=\udcff"], "not UTF-8"),
    ]


@pytest.mark.parametrize("number", range(45))
def test_a_mistake_is_one_line_and_exit_code_2(
    number: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every = mistakes(tmp_path)
    assert len(every) == 45
    arguments, needle = every[number]
    if arguments[0] == "run":
        arguments = [*arguments, "--out", str(tmp_path / "out")]
    code, out, err = run_cli(arguments, capsys, monkeypatch)
    told = [line for line in err.splitlines() if line.startswith("harness:")]
    assert code == 2, err
    assert len(told) == 1, err
    assert needle in told[0]
    assert "Traceback" not in err
    assert out == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("part", ["", "/below", "/below/deeper"])
def test_a_place_for_results_that_cannot_be_is_refused_first(
    part: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").write_text("in the way")
    out = f"{tmp_path / 'file'}{part}"
    code, _, err = run_cli(["run", "--engine", "vlm", "--out", out], capsys, monkeypatch)
    assert code == 2
    assert err.startswith(f"harness: --out {out}: {tmp_path / 'file'} is not a folder")
    long = str(tmp_path / ("n" * 300))
    code, _, err = run_cli(["run", "--engine", "vlm", "--out", long], capsys, monkeypatch)
    assert (code, "--out" in err) == (2, True)


@pytest.mark.parametrize("key", ["", " \n", "a\nb", "k\u0416"])
def test_a_key_that_is_no_key_is_refused(
    key: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("A_KEY", key)
    arguments = ["run", "--url", "http://127.0.0.1:1", "--set", "engine.api_key_env=A_KEY"]
    code, _, err = run_cli([*arguments, "--out", str(tmp_path / "o")], capsys, monkeypatch)
    assert (code, "A_KEY" in err) == (2, True)
    assert not key.strip() or key not in err


def test_missing_weights_are_named(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = ["run", "--variants", "baseline", "--set", f"target.path={checkpoint}"]
    arguments += ["--out", str(tmp_path / "out")]
    code, _, err = run_cli(arguments, capsys, monkeypatch)
    assert code == 2
    assert "model.safetensors: missing" in err

    shards = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(shards))
    (checkpoint / "one.safetensors").write_bytes(b"")
    code, _, err = run_cli(arguments, capsys, monkeypatch)
    assert code == 2
    assert "two.safetensors: missing, 1 of 2" in err


def test_a_missing_tokenizer_is_named(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    garbled(checkpoint, "model.safetensors", WEIGHTS)
    arguments = ["run", "--variants", "baseline", "--set", f"target.path={checkpoint}"]
    arguments += ["--out", str(tmp_path / "out")]
    code, _, err = run_cli(arguments, capsys, monkeypatch)
    assert (code, f"{checkpoint / 'tokenizer.json'}: missing" in err) == (2, True), err
    assert not (tmp_path / "out").exists()

    garbled(checkpoint, "tiktoken.model", b"")
    for more in ([], ["--set", 'engine.extra_args=["--tokenizer", "/elsewhere"]']):
        _, _, err = run_cli([*arguments, *more], capsys, monkeypatch)
        assert "json: missing" not in err
        (checkpoint / "tiktoken.model").unlink(missing_ok=True)


def garbled(folder: Path, name: str, data: bytes) -> None:
    (folder / name).write_bytes(data)


@pytest.mark.parametrize(
    ("name", "data", "needle"),
    [
        ("config.json", b"[]", "a JSON object is wanted"),
        ("config.json", b"\xff\xfe", "cannot be read"),
        ("config.json", b'{"a":' * 100_000, "cannot be read"),
        ("model.safetensors", b"", "is cut off"),
        ("model.safetensors", b"x" * 1000, "is cut off"),
        ("model.safetensors", (100_000).to_bytes(8, "little") + b"[" * 100_100, "damaged header"),
        ("model.safetensors", (9).to_bytes(8, "little") + b"[1, 2, 3]", "damaged header"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": 3}}', "not an index"),
        ("model.safetensors.index.json", b"[" * 100_000, "not an index"),
    ],
)
def test_a_damaged_checkpoint_is_named_before_anything_starts(
    name: str,
    data: bytes,
    needle: str,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    garbled(checkpoint, "model.safetensors", WEIGHTS)
    garbled(checkpoint, name, data)
    arguments = ["run", "--variants", "baseline", "--set", f"target.path={checkpoint}"]
    arguments += ["--out", str(tmp_path / "out")]
    code, _, err = run_cli(arguments, capsys, monkeypatch)
    (line,) = [text for text in err.splitlines() if text.startswith("harness:")]
    assert (code, needle in line, "Traceback" in err) == (2, True, False), err
    assert str(checkpoint) in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt":',
        "[" * 100_000,
        '{"messages": [{"role": 3, "content": "x"}]}',
        '{"messages": [{"role": "user", "content": 3}]}',
        '{"messages": [{"role": "user", "content": null}]}',
        '{"prompt": "\\ud800"}',
        "\0",
    ],
)
def test_a_bad_line_of_a_data_set_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "good"}\n' + line + "\n")
    with pytest.raises(UsageError, match=r"prompts\.jsonl, line 2"):
        read_jsonl(path)


def test_odd_but_good_lines_of_a_data_set(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    parts = [{"type": "text", "text": "hi"}]
    rows = [
        {"prompt": "a", "category": 7, "id": 10**18},
        {"messages": [{"role": "user", "content": parts}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": []}]},
    ]
    lines = "\r\n".join(json.dumps(row) for row in rows)
    path.write_bytes(b"\xef\xbb\xbf" + lines.encode() + b"\r\n\r\n")
    prompts = read_jsonl(path)
    assert (prompts[0].category, prompts[0].id) == ("7", str(10**18))
    warm = allot(prompts, warmup=9, needs=[3], seed=0).warmup
    first = next(p for p in warm if p.messages and isinstance(p.messages[0]["content"], list))
    assert first.messages is not None
    assert first.messages[0]["content"][-1] == parts[0]
    assert "Warm up. None" not in str(warm)


def test_a_port_in_use_is_seen_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        arguments = ["run", "--set", f"engine.port={port}", "--out", str(tmp_path / "out")]
        code, _, err = run_cli(arguments, capsys, monkeypatch)
    assert code == 2
    assert f"port {port}" in err
    assert "in use" in err


def test_help_and_engines_list(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = run_cli(["--help"], capsys, monkeypatch)
    assert code == 0
    assert "resume" in out
    code, out, _ = run_cli(["engines", "list"], capsys, monkeypatch)
    assert code == 0
    assert "reference" in out
    code, out, _ = run_cli(["engines", "show", "demo", "--plan"], capsys, monkeypatch)
    assert code == 0
    assert json.loads(out)["speculative"]["k"] == 3
