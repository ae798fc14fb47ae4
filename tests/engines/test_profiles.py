"""Every profile passes the parser of each engine it is for, and names what the engine knows.

One process of each engine reads all of them: importing an engine takes as long as all the rest.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from engines import arguments
from engines.base import EngineUsageError
from engines.install import engine_python
from harness.plan.load import build, profile_names, read_profile
from harness.show import Command, show

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

STARTED = [name for name in profile_names() if name != "attach"]
BIG = ("kimi-k2.5", "deepseek")
CPU = {"vllm": "vllm-cpu", "sglang": "sglang-cpu"}
READ = {
    "vllm": """
import dataclasses, json, sys
from vllm import envs
from vllm.config import SpeculativeConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends.registry import AttentionBackendEnum
asked = json.load(sys.stdin)
parser = make_arg_parser(FlexibleArgumentParser())
known = {f.name for f in dataclasses.fields(SpeculativeConfig)}
read = []
for argv in asked["argvs"]:
    args = parser.parse_args(argv)
    validate_parsed_serve_args(args)
    args.model = args.model_tag or args.model
    made = AsyncEngineArgs.from_cli_args(args)
    config = made.speculative_config
    read.append({
        "tensor_parallel": made.tensor_parallel_size, "nodes": made.nnodes,
        "rank": made.node_rank, "model": made.model, "headless": args.headless,
        "unknown": sorted(set(config or {}) - known),
        "k": config and config["num_speculative_tokens"],
        "backends": [getattr(b, "name", b) for b in (
            made.attention_backend, config and config.get("attention_backend")) if b],
        "reasoning_parser": args.reasoning_parser})
print("READ " + json.dumps({
    "read": read,
    "flags": sorted({n for a in parser._actions for n in a.option_strings}),
    "backends": [b.name for b in AttentionBackendEnum],
    "variables": [n for n in asked["variables"] if n in envs.environment_variables]}))
""",
    "sglang": """
import argparse, json, sys
from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs
from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
asked = json.load(sys.stdin)
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
read = []
for argv in asked["argvs"]:
    made = ServerArgs.from_cli_args(parser.parse_args(argv))
    read.append({
        "tensor_parallel": made.tp_size, "nodes": made.nnodes, "rank": made.node_rank,
        "model": made.model_path, "headless": made.node_rank > 0, "unknown": [],
        "k": made.speculative_num_steps,
        "backends": [b for b in (
            made.attention_backend, made.speculative_draft_attention_backend) if b],
        "reasoning_parser": made.reasoning_parser})
print("READ " + json.dumps({
    "read": read,
    "flags": sorted({n for a in parser._actions for n in a.option_strings}),
    "backends": ATTENTION_BACKEND_CHOICES,
    "variables": [n for n in asked["variables"] if hasattr(type(envs), n)]}))
""",
}


def commands(engine: str, demo_pair: Path, folder: Path) -> list[tuple[str, Command]]:
    """What every profile starts on the engine: each variant, each machine.

    Of the large models `folder` stands for the checkpoints: vLLM asks a hub where there is none.
    """
    pair = [f"target.path={demo_pair / 'target'}", f"drafter.path={demo_pair / 'drafter-mla'}"]
    away = [f"target.path={folder}", f"drafter.path={folder}"]
    sets: dict[str, list[str]] = {"demo": [], "model": pair}
    found: list[tuple[str, Command]] = []
    for name in STARTED:
        if engine in read_profile(name).table.get("engines", [engine]):
            shown = show(name, engine, sets.get(name, away))
            found += [(name, command) for command in shown.commands]
    return found


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def told(
    request: pytest.FixtureRequest, demo_pair: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[Any], dict[str, Any]]:
    """An engine's name, each profile's command, and what the engine's own parser made of them."""
    engine = request.param
    try:
        python = engine_python(CPU[engine])
    except EngineUsageError as error:
        pytest.skip(str(error))
    asked = commands(engine, demo_pair, tmp_path_factory.mktemp("model"))
    names = {name for _, c in asked for name in c.env if name.startswith(("VLLM_", "SGLANG_"))}
    done = subprocess.run(
        [python, "-c", READ[engine]],
        input=json.dumps({"argvs": [_own(c) for _, c in asked], "variables": sorted(names)}),
        env=arguments.asking_environment(engine),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.partition("READ ")[2])
    answer["asked"] = names
    return engine, asked, answer


def _own(command: Command) -> list[str]:
    """The words that the parser is given: those behind the module, and behind `serve`."""
    words = list(command.argv[3:])
    return words[1:] if words[0] == "serve" else words


def test_every_profile_passes_the_engines_own_parser(told: tuple[str, list[Any], Any]) -> None:
    engine, asked, answer = told
    assert {name for name, _ in asked} >= {"demo", "model", "llama-3.1-8b"}
    assert {(name.startswith(BIG), c.variant) for name, c in asked} == {
        (big, variant) for big in (True, False) for variant in ("baseline", "speculative")
    }
    for (name, command), read in zip(asked, answer["read"], strict=True):
        plan = build(read_profile(name), engine, [])
        assert read["tensor_parallel"] == plan.engine.tensor_parallel, name
        assert (read["nodes"], read["rank"]) == (plan.engine.nodes, command.node), name
        assert read["headless"] is (command.node > 0), name
        assert read["k"] == (plan.speculative.k if command.variant == "speculative" else None), name
        assert (read["reasoning_parser"] or None) == plan.engine.reasoning_parser, name
        assert set(read["backends"]) <= set(answer["backends"]), name
        assert read["unknown"] == [], name


def test_large_models_pin_the_attention_of_target_and_drafter(
    told: tuple[str, list[Any], Any],
) -> None:
    engine, asked, answer = told
    for (name, command), read in zip(asked, answer["read"], strict=True):
        if name.startswith("kimi"):
            assert len(read["backends"]) == (2 if command.variant == "speculative" else 1), name
            if engine == "vllm" and command.variant == "speculative":
                assert ("MLA" in read["backends"][1]) is ("mla" in name), name


def test_every_variable_is_one_that_the_engine_knows(told: tuple[str, list[Any], Any]) -> None:
    _, _, answer = told
    # Read by SGLang past its own list of variables.
    missing = answer["asked"] - set(answer["variables"]) - {"SGLANG_USE_CPU_ENGINE"}
    assert not missing


def test_the_list_of_flags_is_the_engines(told: tuple[str, list[Any], Any]) -> None:
    engine, _, answer = told
    version = arguments.installed_version(engine, engine_python(CPU[engine]))
    assert version in arguments.SUPPORTED[engine], "the environment has another version"
    kept = arguments.read_list(arguments.LISTS / f"{engine}-{version}.json")
    assert kept == set(answer["flags"]), "run `python -m engines.arguments`"
