"""The suite file is read strictly: every mistake is one line with the nearest known key."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nightly_points import write_suite

from engines.catalog import names
from harness.errors import HarnessError, UsageError
from harness.nightly.suite import (
    Suite,
    arguments_of,
    check_plans,
    digest_of,
    read_suite,
)

WHOLE = """
name = "kimi"
results = "out"
time_budget_min = 240
confirm_blocks = 6
watch = ["output_tokens_per_s"]

[webhook]
url_env = "NIGHTLY_URL"
secret_env = "NIGHTLY_SECRET"
format = "slack"

[control]
env = {SPEC_HARNESS_PYTHON_VLLM = "/opt/good/bin/python"}

[[gates]]
metric = "acceptance_length"
min = 2.0

[[entries]]
name = "chat"
profile = "demo"
workload = "builtin"
set = ["load.concurrency=8"]
variants = ["speculative"]
priority = 2
minutes = 15

[[entries.gates]]
metric = "startup_s"
max = 300
"""


def test_a_whole_suite_is_read(tmp_path: Path) -> None:
    loaded = read_suite(write_suite(tmp_path, WHOLE))
    (entry,) = loaded.suite.entries
    assert loaded.suite.webhook is not None and loaded.suite.webhook.format == "slack"
    assert [g.metric for g in loaded.gates(entry)] == ["acceptance_length", "startup_s"]
    assert loaded.accepted == tmp_path / "suite.accepted.toml"
    assert arguments_of(loaded, entry) == (
        *("--profile", "demo", "--set", "workload.dataset=builtin"),
        *("--set", "load.concurrency=8", "--variants", "speculative"),
    )
    check_plans(loaded, names())


def test_the_name_of_a_suite_is_its_files(tmp_path: Path) -> None:
    loaded = read_suite(write_suite(tmp_path, '[[entries]]\nname = "a"'))
    assert loaded.suite.name == "suite"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('time_budget = 5\n[[entries]]\nname = "a"', "did you mean 'time_budget_min'?"),
        ('[[entry]]\nname = "a"', "did you mean 'entries'?"),
        ('[[entries]]\nname = "a"\nprofil = "demo"', "entries]] 'a': unknown key 'profil'"),
        ('[[entries]]\nprofile = "demo"', "[[entries]] 1: 'name' is missing"),
        ('[[entries]]\nname = "A b"', "lower-case letters"),
        ('[[entries]]\nname = "a"\n[[entries]]\nname = "a"', "two entries are called 'a'"),
        ('name = "x"', "no [[entries]]"),
        ('[[entries]]\nname = "a"\n[[gates]]\nmetric = "x"', "gates]] 1 (x): it asks for nothing"),
        ('[[entries]]\nname = "a"\n[[gates]]\nmetrik = "x"', "did you mean 'metric'?"),
        ('[[entries]]\nname = "a"\n[[gates]]\nmetric = "x"\nmin = 3\nmax = 2', "min 3 is above"),
        ('[[entries]]\nname = "a"\n[webhook]\nurl = "http://x"', "unknown key 'url'"),
        ('[[entries]]\nname = "a"\n[webhook]\nurl_env = "https://x/y"', "not its value"),
        ('[[entries]]\nname = "a"\n[[gates]]\nmetric = "x"\nmin = nan', "min: nan is no bound"),
        ('[[entries]]\nname = "a"\n[[gates]]\nmetric = "x"\nmax = inf', "max: inf is no bound"),
        ('[[entries]]\nname = "a"\nminutes = "long"', "'minutes': a number is wanted"),
        ('[[entries]]\nname = "a"\nvariants = ["spec"]', "did you mean 'speculative'?"),
        (
            '[[entries]]\nname = "a"\n[[gates]]\nmetric = "acceptance_lenght"\nmin = 2',
            "[[gates]] 1: no figure is called 'acceptance_lenght'; did you mean 'acceptance_",
        ),
        (
            '[[entries]]\nname = "a"\n[[entries.gates]]\nmetric = "ttft_s"\nmax = 2',
            "[[entries]] 'a', gate 1: no figure is called 'ttft_s'; did you mean 'ttft_s.",
        ),
        ('[[entries]]\nname = "a"\n[[gates]]\nmetric = "tfft_*"\nmax = 2', "did you mean 'ttft_s."),
        ('[[entries]]\nname = "a"\n[[gates]]\nmetric = "zzzz"\nmax = 2', "docs/history.md"),
        (
            'watch = ["tpot_s.maen"]\n[[entries]]\nname = "a"',
            "watch: no figure is called 'tpot_s.maen'; did you mean 'tpot_s.mean'?",
        ),
        ('watch = ["tpot_s.*"]\n[[entries]]\nname = "a"', "watch: no figure is called 'tpot_s.*'"),
        ('entries = 3', "write each as a table of its own, [[entries]]"),
        ('confirm_blocks = 0\n[[entries]]\nname = "a"', "'confirm_blocks'"),
        ("name = ", "not valid TOML"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_names_it(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        read_suite(write_suite(tmp_path, text))
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert "suite.toml" in str(error.value)


@pytest.mark.parametrize(
    "metric",
    ["ttft_s.*", "*", "per_position.2", "per_position.*", "startup_s.load_weights", "startup_s.l*"],
)
def test_a_gate_may_be_of_any_figure_that_a_run_can_have(tmp_path: Path, metric: str) -> None:
    text = f'[[entries]]\nname = "a"\n[[gates]]\nmetric = "{metric}"\nmax = 2'
    assert read_suite(write_suite(tmp_path, text)).suite.gates[0].metric == metric


def test_a_wrong_plan_is_told_before_anything_runs(tmp_path: Path) -> None:
    text = '[[entries]]\nname = "a"\nset = ["load.concurency=8"]'
    with pytest.raises(UsageError, match=r"entry 'a'.*load\.concurrency"):
        check_plans(read_suite(write_suite(tmp_path, text)), names())
    text = '[[entries]]\nname = "a"\nprofile = "dmo"'
    with pytest.raises(UsageError, match="did you mean 'demo'"):
        check_plans(read_suite(write_suite(tmp_path, text)), names())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ('engine = "vlm"', "entry 'a': no engine 'vlm'; did you mean 'vllm'?"),
        ('[control]\nroot = "nowhere"', "nowhere is no checkout of the harness"),
        ('[control]\nenv = {"A=B" = "x"}', "env: 'A=B' is no name of a variable"),
    ],
)
def test_what_would_be_noticed_hours_later_is_told_before(
    tmp_path: Path, more: str, said: str
) -> None:
    with pytest.raises(UsageError) as error:
        check_plans(read_suite(write_suite(tmp_path, f'[[entries]]\nname = "a"\n{more}')), names())
    assert said in str(error.value) and "suite.toml" in str(error.value)


def test_a_workload_of_any_length_is_no_file(tmp_path: Path) -> None:
    text = f'[[entries]]\nname = "a"\nworkload = "{"w" * 5000}"'
    loaded = read_suite(write_suite(tmp_path, text))
    assert arguments_of(loaded, loaded.suite.entries[0])[-1].endswith("www")


def test_files_are_seen_from_the_suites_folder(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text("[load]\nconcurrency = [2]\n")
    (tmp_path / "mine.jsonl").write_text('{"prompt": "hello"}\n')
    text = '[[entries]]\nname = "a"\nprofile = "own.toml"\nworkload = "mine.jsonl"'
    loaded = read_suite(write_suite(tmp_path, text))
    told = arguments_of(loaded, loaded.suite.entries[0])
    assert str(tmp_path / "own.toml") in told
    assert f"workload.dataset={tmp_path / 'mine.jsonl'}" in told


def test_what_is_measured_has_a_digest_of_its_own(tmp_path: Path) -> None:
    def digest(text: str) -> str:
        loaded = read_suite(write_suite(tmp_path, text))
        return digest_of(loaded, loaded.suite.entries[0])

    plain = digest('[[entries]]\nname = "a"')
    assert digest('[[entries]]\nname = "a"\npriority = 3\nminutes = 4') == plain
    assert digest('[[entries]]\nname = "a"\nset = ["seed=1"]') != plain
    own = '[[entries]]\nname = "a"\nprofile = "own.toml"'
    (tmp_path / "own.toml").write_text("seed = 1\n")
    first = digest(own)
    (tmp_path / "own.toml").write_text("seed = 2\n")
    assert digest(own) != first


@given(st.text(max_size=200))
def test_no_text_breaks_the_reading(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.mktemp("suite")
    try:
        path = write_suite(folder, text)
    except UnicodeEncodeError:
        return
    try:
        assert isinstance(read_suite(path).suite, Suite)
    except HarnessError as error:
        assert "\n" not in str(error)
