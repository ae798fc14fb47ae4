"""`engines show`: the printed text is the command, and every word of it has its reason."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.base import EngineUsageError
from harness.errors import UsageError
from harness.plan.load import profile_names, read_profile
from harness.prepare import Request, prepare
from harness.show import Command, Shown, Words, plan_of, render_text, show

BIG = [name for name in profile_names() if name not in ("attach", "demo", "model")]
ECHO = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
CASES = [(n, e) for n in BIG for e in ("vllm", "sglang") if not n.endswith("ray") or e == "vllm"]


@pytest.fixture(autouse=True)
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEC_HARNESS_VENVS", str(tmp_path / "none"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run_script(text: str, python: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """What a shell makes of the printed text, an echo in the place of the engine's Python."""
    echo = f"{shlex.quote(sys.executable)} -S -c {shlex.quote(ECHO)}"
    assert f"\n    {python}" in text
    script = text.replace(f"\n    {python}", f"\n    {echo} {python}")
    env = {"PATH": os.environ["PATH"]}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    argv, seen = json.loads(done.stdout)
    return tuple(argv), seen


@pytest.mark.parametrize(("name", "engine"), CASES)
def test_every_word_of_every_profile_has_its_reason(name: str, engine: str) -> None:
    shown = show(name, engine, [])
    assert shown.versions and shown.description
    for command in shown.commands:
        words = [*command.arguments, *command.variables]
        assert not [w.words[0] for w in words if len(w.why) < 10]
        assert command.argv == (*command.program, *(x for w in command.arguments for x in w.words))
        assert command.env == dict(w.words for w in command.variables)
    assert max(len(line) for line in render_text(shown).splitlines() if "#" in line) <= 100


@pytest.mark.parametrize(("name", "engine"), [("kimi-k2.5-sm120-mla", "vllm"), CASES[3], CASES[-1]])
def test_the_text_is_a_script_that_starts_exactly_that(name: str, engine: str) -> None:
    for variant in ("baseline", "speculative"):
        shown = show(name, engine, ["target.path=/a b/'c' $HOME"], (variant,), node=0)
        (command,) = shown.commands
        argv, env = run_script(render_text(shown), command.argv[0])
        assert argv == command.argv
        assert {**env, **command.env} == env


@settings(max_examples=25)
@given(
    st.lists(
        st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), max_size=4
    ),
    st.text(max_size=300),
)
def test_any_word_and_any_reason_survive_the_shell(words: list[str], why: str) -> None:
    argv = ("/bin/python", "--flag", *words)
    argument = Words(words=argv[1:], why=why)
    command = Command(
        variant="baseline", node=0, argv=argv, env={}, cwd=None, program=argv[:1],
        arguments=(argument,), variables=(Words(words=("X", "".join(words)), why=why),),
    )  # fmt: skip
    blank = show("kimi-k2.5-h200-mla", "vllm", [], ("baseline",))
    shown = Shown(
        profile="p", description=why, engine="vllm", versions=(), environment=None, notes=(why,),
        commands=(command,), expect=blank.expect, plan=blank.plan,
    )  # fmt: skip
    seen, env = run_script(render_text(shown), "/bin/python")
    assert seen == argv
    assert env["X"] == "".join(words)


def test_what_is_missing_here_is_said() -> None:
    shown = show("kimi-k2.5-sm120-mla", "vllm", [])
    said = "\n".join(shown.notes)
    assert "target.path=DIR, the folder of moonshotai/Kimi-K2.5" in said
    assert "drafter.path=DIR, the folder of lightseekorg/kimi-k2.5-eagle3-mla" in said
    assert "environment vllm is not installed" in said
    assert shown.commands[0].argv[0].endswith("/none/.venvs/vllm/bin/python")


def test_several_machines_have_a_command_each() -> None:
    shown = show("kimi-k2.5-2x8-h100-mla", "sglang", ["engine.head=10.0.0.1:5000"])
    assert [(c.variant, c.node) for c in shown.commands] == [
        ("baseline", 0), ("baseline", 1), ("speculative", 0), ("speculative", 1),
    ]  # fmt: skip
    ranks = [c.argv[c.argv.index("--node-rank") + 1] for c in shown.commands]
    assert ranks == ["0", "1", "0", "1"]
    assert "# baseline, machine 1 of 2" in render_text(shown)
    with pytest.raises(UsageError, match="numbered 0 to 1"):
        show("kimi-k2.5-2x8-h100-mla", "sglang", [], node=2)


def test_what_is_set_by_hand_says_so() -> None:
    sets = ['engine.extra_args=["--attention-backend", "CUTLASS_MLA"]', "engine.extra_env.A=1"]
    (command,) = show("kimi-k2.5-b200-mla", "vllm", sets, ("baseline",)).commands
    found = {w.words: w.why for w in (*command.arguments, *command.variables)}
    assert found["--attention-backend", "FLASHINFER_MLA"] == "the same further down wins"
    assert found["--attention-backend", "CUTLASS_MLA"] == "asked for in engine.extra_args"
    assert found["A", "1"] == "asked for in engine.extra_env"


@pytest.mark.parametrize(
    ("profile", "engine", "said"),
    [
        ("attach", "vllm", "the servers run already"),
        ("demo", "openai", "the servers run already"),
        ("model", "vllm", "target.path is not set"),
        ("demo", "vllm", "demo pair is still to be made"),
        ("kimi-k2.5-2x8-h100-mla-ray", "sglang", "is for vllm, not sglang"),
    ],
)
def test_what_cannot_be_shown(profile: str, engine: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        show(profile, engine, [])


def test_a_run_needs_to_know_where_a_public_model_lies() -> None:
    request = Request(engines=("vllm",), profile="kimi-k2.5-h200-mla")
    with pytest.raises(UsageError, match=r"target\.path=DIR \(moonshotai/Kimi-K2\.5\)"):
        prepare(request, "vllm")


def test_a_run_does_not_start_several_machines(tmp_path: Path) -> None:
    request = Request(
        engines=("vllm",),
        profile="kimi-k2.5-2x8-h100-mla",
        sets=(f"target.path={tmp_path}", f"drafter.path={tmp_path}"),
    )
    with pytest.raises(
        UsageError, match=r"engine\.nodes = 2: several machines are started by hand"
    ):
        prepare(request, "vllm")


def test_a_misspelt_flag_stops_a_run_before_it_is_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPEC_HARNESS_PYTHON_VLLM", sys.executable)
    monkeypatch.setattr("harness.prepare.check_checkpoint", lambda *_: None)
    monkeypatch.setattr("harness.prepare.check_tokenizer", lambda *_: None)
    monkeypatch.setattr("harness.prepare.check_fit", lambda *_: None)
    request = Request(
        engines=("vllm",),
        profile="kimi-k2.5-h200-mla",
        sets=(
            f"target.path={tmp_path}",
            f"drafter.path={tmp_path}",
            'engine.extra_args=["--attention-bakend", "TRITON_MLA"]',
        ),
    )
    with pytest.raises(EngineUsageError, match="did you mean --attention-backend"):
        prepare(request, "vllm")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_misspelt_flag_is_not_shown_as_a_command(engine: str) -> None:
    with pytest.raises(EngineUsageError, match="did you mean --attention-backend"):
        show("kimi-k2.5-h200-mla", engine, ["engine.extra_args=--attention-bakend=x"])


def test_a_part_for_no_engine_is_refused_as_at_a_run(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('inherits = "demo"\n[for.vlm.engine]\nport = 1\n')
    with pytest.raises(UsageError, match=r"\[for\.vlm\].*did you mean 'vllm'"):
        plan_of(str(mine), "vllm", [])


def test_the_acceptance_to_expect_is_printed() -> None:
    text = render_text(show("kimi-k2.5-sm120-llama", "sglang", []))
    assert "# gsm8k, k = 3: 3.201 (model card of lightseekorg/kimi-k2.5-eagle3)" in text
    assert "engine.startup_deadline_s = 3600.0: one team waited" in text


def test_every_kimi_profile_says_what_to_expect() -> None:
    for name in BIG:
        plan = show(name, "vllm", []).plan
        assert bool(plan.expect.acceptance) == (not name.startswith("deepseek"))
        assert all(f.source for f in plan.expect.acceptance)
        assert read_profile(name).table["description"]
