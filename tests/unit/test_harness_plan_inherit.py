"""Profiles laid on other profiles, and flags with their reasons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.plan import load
from harness.plan.load import PROFILES, build, merge, profile_names, read_profile, read_toml
from harness.plan.schema import Flag, Plan
from harness.plan.serve import flag_arguments, serve_spec


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.toml").write_text(text)
    return folder


def plan_of(folder: Path, name: str, engine: str = "vllm") -> Plan:
    return build(read_profile(str(folder / f"{name}.toml")), engine, [])


def test_the_later_wins_and_tables_are_laid_on_each_other(tmp_path: Path) -> None:
    write(
        tmp_path,
        one="[speculative]\nk = 1\n[load]\nconcurrency = [1, 2]\nnum_requests = 5",
        two="[speculative]\nk = 2\n[engine]\nmax_num_seqs = 7",
        child='inherits = ["one.toml", "two.toml"]\n[load]\nconcurrency = [9]',
        grandchild='inherits = "child.toml"\n[engine]\ndtype = "float32"',
    )
    plan = plan_of(tmp_path, "grandchild")
    assert plan.name == "grandchild"
    assert (plan.speculative.k, plan.load.concurrency, plan.load.num_requests) == (2, (9,), 5)
    assert (plan.engine.max_num_seqs, plan.engine.dtype) == (7, "float32")


def test_an_engines_part_is_inherited_and_wins_over_what_is_said_for_all(tmp_path: Path) -> None:
    write(
        tmp_path,
        base="[for.vllm.engine]\nmax_num_seqs = 3\n[for.sglang.engine]\nmax_num_seqs = 4",
        child='inherits = "base.toml"\n[engine]\nmax_num_seqs = 5\n[for.sglang.engine]\nport = 9',
    )
    assert plan_of(tmp_path, "child", "vllm").engine.max_num_seqs == 3
    sglang = plan_of(tmp_path, "child", "sglang").engine
    assert (sglang.max_num_seqs, sglang.port) == (4, 9)
    assert plan_of(tmp_path, "child", "reference").engine.max_num_seqs == 5


@pytest.mark.parametrize(
    ("files", "circle"),
    [
        ({"a": 'inherits = "a.toml"'}, "a -> a"),
        ({"a": 'inherits = "b.toml"', "b": 'inherits = ["c.toml"]', "c": 'inherits = "b.toml"'},
         "b -> c -> b"),
    ],
)  # fmt: skip
def test_a_circle_is_refused_in_one_line(
    tmp_path: Path, files: dict[str, str], circle: str
) -> None:
    write(tmp_path, **files)
    with pytest.raises(UsageError) as caught:
        plan_of(tmp_path, "a")
    assert f"goes round in a circle: {circle}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_one_parent_by_two_ways_is_no_circle(tmp_path: Path) -> None:
    write(
        tmp_path,
        top="[speculative]\nk = 5",
        left='inherits = "top.toml"',
        right='inherits = "top.toml"',
        child='inherits = ["left.toml", "right.toml"]',
    )
    assert plan_of(tmp_path, "child").speculative.k == 5


def test_ways_that_double_with_every_level_are_not_all_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels = 24  # 2 ** 24 ways
    write(tmp_path, l0="[speculative]\nk = 5", r0="[load]\nwarmup_requests = 0")
    for i in range(1, levels):
        both = f'inherits = ["l{i - 1}.toml", "r{i - 1}.toml"]\n'
        write(tmp_path, **{f"l{i}": both, f"r{i}": both + f"[speculative]\nk = {i}"})
    read: list[str] = []
    real = load.read_toml

    def counted(path: Path, asked: str) -> dict[str, Any]:
        read.append(path.stem)
        return real(path, asked)

    monkeypatch.setattr(load, "read_toml", counted)
    plan = plan_of(tmp_path, f"l{levels - 1}")
    assert (plan.speculative.k, plan.load.warmup_requests) == (levels - 2, 0)
    assert len(set(read)) == 2 * levels - 1
    assert len(read) < 4 * levels


def test_a_linked_profile_inherits_from_where_the_link_lies(tmp_path: Path) -> None:
    for name, k in (("a", 2), ("b", 4)):
        (tmp_path / name).mkdir()
        write(tmp_path / name, base=f"[speculative]\nk = {k}")
    write(tmp_path / "a", child='inherits = "base.toml"')
    (tmp_path / "b" / "child.toml").symlink_to(tmp_path / "a" / "child.toml")
    write(tmp_path, both='inherits = ["a/child.toml", "b/child.toml"]')
    assert plan_of(tmp_path, "both").speculative.k == 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('inherits = "kimi-k2.5-h20-mla"', "did you mean 'kimi-k2.5-h200-mla'"),
        ('inherits = "parts/8x-h20"', "did you mean 'parts/8x-h200'"),
        ('inherits = "gone.toml"', "inherits: no such file"),
        ("inherits = 3", "the name of a profile, or a list of names"),
        ("inherits = [3]", "the name of a profile, or a list of names"),
        ('inherits = "loop.toml"', "inherits: no such file"),
        ('inherits = "a\\u0000.toml"', "inherits: no such file"),
        (f"engine.{'x.' * 3000}y = 1", "child.toml: nested too deep"),
        ('[engine.env."A B"]\nvalue = "1"\nwhy = "w"', "engine.env: 'A B' is no variable's name"),
        ('[engine.extra_env]\n"A=" = "1"', "engine.extra_env: 'A=' is no variable's name"),
        ('inherits = "wrong.toml"', "wrong.toml: unknown key 'load.concurency'"),
    ],
)
def test_mistakes_are_told_with_the_file_they_stand_in(
    tmp_path: Path, text: str, said: str
) -> None:
    write(tmp_path, wrong="[load]\nconcurency = 1", child=text)
    (tmp_path / "loop.toml").symlink_to("loop.toml")
    with pytest.raises(UsageError) as caught:
        plan_of(tmp_path, "child")
    assert said in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_built_in_profile_can_be_inherited_from_anywhere(tmp_path: Path) -> None:
    write(tmp_path, mine='inherits = "kimi-k2.5-h200-mla"\n[load]\nconcurrency = 2')
    plan = plan_of(tmp_path, "mine", "sglang")
    assert plan.load.concurrency == (2,)
    assert plan.engine.flags["--attention-backend"].value == "fa3"
    assert plan.drafter.model == "lightseekorg/kimi-k2.5-eagle3-mla"


TABLES = st.recursive(
    st.dictionaries(st.sampled_from("abc"), st.integers() | st.lists(st.integers())),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner | st.integers()),
    max_leaves=12,
)


@given(TABLES, TABLES, TABLES)
def test_merging_is_associative_where_kinds_agree(a: Any, b: Any, c: Any) -> None:
    assert merge(a, {}) == a and merge({}, a) == a and merge(a, a) == a
    for key, value in b.items():
        got = merge(a, b)[key]
        assert got == (merge(a.get(key), value) if isinstance(value, dict) and isinstance(
            a.get(key), dict) else value)  # fmt: skip
    assert merge(merge(a, b), c).keys() == {*a, *b, *c}


def test_flags_become_arguments_and_can_be_left_out_again(tmp_path: Path) -> None:
    write(
        tmp_path,
        base="""
[engine.flags]
"--number" = { value = 0.9, why = "w" }
"--switch" = { why = "w" }
"--gone" = { value = "x", why = "w" }
"--drafting" = { value = 3, why = "w", variant = "speculative" }
[engine.env]
"ONE" = { value = "1", why = "w" }
"TWO" = { value = 2, why = "w", variant = "baseline" }
""",
        child="""
inherits = "base.toml"
[engine]
extra_args = ["--mine"]
extra_env = { ONE = "mine" }
flags = { "--gone" = { value = false, why = "not here" } }
""",
    )
    plan = plan_of(tmp_path, "child")
    made = {
        variant: serve_spec(
            plan, variant, target=Path("/t"), drafter=Path("/d"), port=1, max_model_len=2,
            max_num_seqs=None,
        )
        for variant in ("baseline", "speculative")
    }  # fmt: skip
    assert made["baseline"].extra_args == ("--number", "0.9", "--switch", "--mine")
    assert made["speculative"].extra_args == (
        "--number", "0.9", "--switch", "--drafting", "3", "--mine",
    )  # fmt: skip
    assert made["baseline"].extra_env == {"ONE": "mine", "TWO": "2"}
    assert made["speculative"].extra_env == {"ONE": "mine"}
    assert made["baseline"].drafter is None and made["baseline"].pair_drafter == Path("/d")


def test_a_flag_that_is_said_anew_keeps_nothing_of_the_old_one(tmp_path: Path) -> None:
    write(
        tmp_path,
        base='[engine.flags]\n"--x" = { value = 1, why = "w", source = "s", variant = "baseline" }',
        child='inherits = "base.toml"\n[engine.flags]\n"--x" = { value = 2, why = "v" }',
    )
    assert plan_of(tmp_path, "child").engine.flags == {"--x": Flag(value=2, why="v")}
    write(tmp_path, child='inherits = "base.toml"\n[engine.flags]\n"--x" = { value = 2 }')
    with pytest.raises(UsageError, match="'why' is missing"):
        plan_of(tmp_path, "child")


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.text(min_size=1))
def test_a_flags_value_keeps_what_it_says(value: float | int | str) -> None:
    name, text = flag_arguments({"--x": Flag(value=value, why="w")}, "baseline")
    assert name == "--x"
    assert type(value)(text) == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[engine.flags]\n"--x" = { value = 1 }', "'why' is missing"),
        ('[engine.flags]\n"--x" = { why = "" }', "engine.flags"),
        ('[engine.flags]\n"--x" = 1', "engine.flags"),
        ('[engine.flags]\nx = { why = "w" }', "'x' is no flag; write it as '--name'"),
        ('[engine.flags]\n"--x y" = { why = "w" }', "'--x y' is no flag"),
        ('[engine.env]\n"A=B" = { value = "1", why = "w" }', "'A=B' is no variable's name"),
        ('[engine.env]\nA = { why = "w" }', "engine.env.A: give its value as a text"),
        ('[why]\n"engine.dtipe" = "w"', "did you mean 'engine.dtype'"),
        ('engines = ["sglang"]', "this profile is for sglang, not vllm"),
        ('[expect]\nacceptance = [{ dataset = "a", length = 0.5, source = "s" }]', "expect"),
        ('[expect]\nacceptance = [{ dataset = "a", length = 2 }]', "'source' is missing"),
    ],
)
def test_mistakes_in_what_a_profile_adds(tmp_path: Path, text: str, said: str) -> None:
    write(tmp_path, mine=text)
    with pytest.raises(UsageError) as caught:
        plan_of(tmp_path, "mine")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_parts_are_no_profiles() -> None:
    assert not [name for name in profile_names() if "/" in name or name.startswith("8x")]
    used = set()
    for path in PROFILES.rglob("*.toml"):
        names = read_toml(path, str(path)).get("inherits", [])
        used.update([names] if isinstance(names, str) else names)
    parts = {f"parts/{path.stem}" for path in (PROFILES / "parts").glob("*.toml")}
    assert parts <= used


def test_the_pages_example_is_a_profile(tmp_path: Path, repo: Path) -> None:
    page = (repo / "docs" / "profiles.md").read_text(encoding="utf-8")
    write(tmp_path, mine=page.partition("```toml\n")[2].partition("```")[0])
    flags = plan_of(tmp_path, "mine").engine.flags
    assert flags["--language-model-only"].value is False
    assert flags["--gpu-memory-utilization"].source == "our ticket 12"


def test_the_page_lists_every_profile(repo: Path) -> None:
    page = (repo / "docs" / "profiles.md").read_text(encoding="utf-8")
    assert not [name for name in profile_names() if f"`{name}`" not in page]
