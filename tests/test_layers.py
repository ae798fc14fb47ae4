"""Imports obey the layers of the architecture: data moves right, imports point left.

plan -> engines -> load -> measure -> analyse -> report | diagnose, and training -> drafters ->
engines beside it. Stages share only `harness.records` and `harness.findings`; only the
stories know every stage.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
PACKAGES = ("harness", "engines", "drafters", "training")
STORIES = (
    *("run", "prepare", "serving", "attach", "resume", "sweep", "capacity", "calibrate"),
    *("doctor", "precision", "pace", "probes", "floor", "stored", "show", "choose"),
    *("telemetry", "sampler", "compare"),
    *("nightly.story", "nightly.changed", "nightly.bisect", "nightly.candidates"),
    *("diagnose.story", "diagnose.mend", "diagnose.selftest", "diagnose.subjects"),
)
COMMANDS = (
    *("cli", "cli_compare", "cli_diagnose", "cli_engines", "cli_exchange", "cli_history"),
    *("cli_nightly",),
)
SHARED = ("harness.records", "harness.findings", "harness.errors")
LEAVES = (*SHARED, "engines.base", "drafters.spec")

# module prefix -> the module prefixes of ours it may import; the longest prefix that fits counts
ALLOWED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(LEAVES, LEAVES),
    "drafters": ("drafters",),
    "engines": ("engines", "drafters.spec", "drafters.formats"),
    "engines.reference": ("engines", "drafters"),
    "training": (
        *("training", "drafters", "engines", "harness.alive", "harness.load", "harness.plan"),
        *("harness.analyse.degenerate", "harness.measure", "harness.ending", *SHARED),
    ),
    "harness.alive": (
        *("engines.base", "engines.process", "harness.load.streaming", "harness.plan.schema"),
    ),
    "harness.ending": ("engines.base", "drafters.spec", "harness.options", *SHARED),
    "harness.options": SHARED,
    "harness.plan": ("harness.plan", "engines.base", "engines.secret", *SHARED),
    "harness.load": ("harness.load", "harness.plan.schema", "engines.secret", *SHARED),
    "harness.measure": ("harness.measure", "engines.base", *SHARED),
    "harness.analyse": (
        *("harness.analyse", "harness.measure.columns", "harness.measure.metrics"),
        *("harness.measure.slo", "harness.measure.steady", "harness.measure.table"),
        *("harness.measure.series", "harness.measure.hardware", *SHARED),
    ),
    "harness.exchange": (
        *("harness.exchange", "harness.history", "harness.measure.definitions"),
        *("harness.measure.store", *SHARED),
    ),
    "harness.report": (
        *("harness.report", "harness.analyse", "harness.measure.columns"),
        *("harness.measure.metrics", "harness.measure.parquet", "harness.measure.series"),
        *("harness.measure.hardware", "harness.measure.shape", "harness.plan.recorded", *SHARED),
    ),
    "harness.nightly": (
        *("harness.nightly", "harness.history", "harness.analyse", "harness.report"),
        *("harness.measure", "harness.plan", "engines.console", *SHARED),
    ),
    "harness.history": (
        *("harness.history", "harness.analyse", "harness.measure", "harness.plan.points"),
        *("harness.report.words", *SHARED),
    ),
    "harness.doctoring": (
        *("harness.doctoring", "engines", "drafters", "harness.load.prompts.tokens", *SHARED),
    ),
    "harness.diagnose": ("harness.diagnose", "harness.analyse", *SHARED),
    "harness.diagnose.folders": ("harness.diagnose", "harness.measure.store", *SHARED),
    "harness.diagnose.page": ("harness.diagnose", "harness.report", "harness.analyse", *SHARED),
    # The drafter is run as the trainer runs it: that is what an engine is held against.
    "harness.diagnose.experiments": (
        *("harness.diagnose", "engines", "drafters", "harness.alive", "harness.load"),
        "harness.measure",
        *("harness.analyse", "harness.plan.schema", "training", *SHARED),
    ),
}
EVERYTHING = tuple(PACKAGES)


def modules() -> list[tuple[str, Path]]:
    """Every module of ours by dotted name."""
    found = []
    for package in PACKAGES:
        for file in sorted((REPO / package).rglob("*.py")):
            parts = file.relative_to(REPO).with_suffix("").parts
            if "sgl_kernel" not in parts:  # a module for another environment, not ours to layer
                found.append((".".join(parts).removesuffix(".__init__"), file))
    return found


def imports(file: Path) -> set[str]:
    """Every module a file imports, anywhere in it, `from x import y` told as x.y."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import; write the whole name"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def fits(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def knows_every_stage(module: str) -> bool:
    """The command line and the stories, by their whole names: `harness.run`, not `x.y.run`."""
    return module in {f"harness.{name}" for name in (*STORIES, *COMMANDS, "__main__")}


def allowed(module: str) -> tuple[str, ...]:
    """The prefixes a module may import."""
    if knows_every_stage(module):
        return EVERYTHING
    best = max((p for p in ALLOWED if fits(module, (p,))), key=len, default=None)
    return ALLOWED[best] if best else (module.split(".")[0],)


@pytest.mark.parametrize(("module", "file"), modules(), ids=lambda value: str(value)[-40:])
def test_imports_point_left(module: str, file: Path) -> None:
    ours = {name for name in imports(file) if name.split(".")[0] in PACKAGES}
    wrong = sorted(name for name in ours if not fits(name, allowed(module)))
    assert not wrong, f"{module} may not import {wrong}"


@pytest.mark.parametrize("leaf", LEAVES)
def test_leaves_need_the_standard_library_and_msgspec_only(leaf: str) -> None:
    file = REPO / (leaf.replace(".", "/") + ".py")
    outside = {
        name.split(".")[0]
        for name in imports(file)
        if name.split(".")[0] not in (*sys.stdlib_module_names, *PACKAGES, "msgspec")
    }
    assert not outside


@pytest.mark.parametrize(
    ("module", "exempt"),
    [
        ("harness.run", True),
        ("harness.cli", True),
        ("harness.load.run", False),
        ("harness.run.part", False),
        ("engines.prepare", False),
        ("training.__main__", False),
        ("harness", False),
    ],
)
def test_only_the_stories_themselves_know_every_stage(module: str, exempt: bool) -> None:
    assert knows_every_stage(module) is exempt
    assert (allowed(module) == EVERYTHING) is exempt


def test_only_the_command_line_and_stories_import_a_story() -> None:
    names = tuple(f"harness.{story}" for story in STORIES)
    for module, file in modules():
        if knows_every_stage(module):
            continue
        assert not [name for name in imports(file) if fits(name, names)], module


def test_no_module_imports_an_engine_library() -> None:
    for module, file in modules():
        assert not {name.split(".")[0] for name in imports(file)} & {"vllm", "sglang"}, module


def test_init_files_are_empty() -> None:
    for _, file in modules():
        if file.name == "__init__.py":
            assert not file.read_text().strip(), f"{file} must stay empty"


@pytest.mark.parametrize(
    "module", ["harness.cli", "engines.catalog", "training.__main__", "drafters.__main__"]
)
def test_nothing_heavy_is_imported_before_it_is_needed(module: str) -> None:
    heavy = "{'torch', 'transformers', 'pandas', 'matplotlib', 'scipy', 'numpy', 'pyarrow'}"
    code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
