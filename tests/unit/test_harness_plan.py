"""The plan: strict keys, typed --set, and the order of the cells."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.plan.expand import expand, launches_of, load_points, variant_order
from harness.plan.load import build, merge, parse_set, profile_names, read_profile
from harness.plan.schema import LoadSection, Plan
from harness.plan.strict import known_keys, to_plan

BOTH = ("baseline", "speculative")


def profile(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", profile_names())
@pytest.mark.parametrize("engine", ["reference", "vllm", "sglang", "openai"])
def test_every_built_in_profile_is_valid_for_every_engine(name: str, engine: str) -> None:
    if engine not in read_profile(name).table.get("engines", [engine]):
        with pytest.raises(UsageError, match=f"is for vllm, not {engine}"):
            build(read_profile(name), engine, [])
        return
    plan = build(read_profile(name), engine, [])
    assert expand(plan, engine, BOTH, attached=False)


def test_the_demo_profile_is_float32_greedy_k3() -> None:
    plan = build(read_profile("demo"), "reference", [])
    assert (plan.engine.dtype, plan.sampling.temperature, plan.speculative.k) == ("float32", 0.0, 3)
    assert plan.compare.launches == 4
    assert build(read_profile("demo"), "vllm", []).compare.launches > 2  # two say next to nothing


def test_unknown_profile_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"demmo: no such profile; did you mean 'demo'"):
        read_profile("demmo")


def test_unknown_key_in_a_file_names_file_path_and_nearest(tmp_path: Path) -> None:
    path = profile(tmp_path, "[load]\nconcurency = 4\n")
    with pytest.raises(UsageError) as caught:
        build(read_profile(str(path)), "reference", [])
    message = str(caught.value)
    assert str(path) in message
    assert "'load.concurency'" in message
    assert "did you mean 'load.concurrency'?" in message


def test_unknown_key_in_an_engine_part_is_found(tmp_path: Path) -> None:
    path = profile(tmp_path, "[for.vllm.compare]\nlaunch = 2\n")
    with pytest.raises(UsageError, match=r"compare\.launches"):
        build(read_profile(str(path)), "reference", [])


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ("[speculative]\nk = 0\n", "speculative.k"),
        ("[speculative]\nk = 'three'\n", "'speculative.k': a whole number is wanted"),
        ("[engine]\ndtype = 'float9'\n", "one of auto, float32"),
        ("[load]\nconcurrency = [1, 0]\n", "load.concurrency"),
        ("load = 3\n", "'load' is a table"),
        ('[client]\nheaders = {X = "a\\r\\nEvil: 1"}\n', "client.headers: X"),
        ("[client]\nheaders = {X = 'é'}\n", "client.headers: X: no header of HTTP"),
        ("[client]\nheaders = {'X y' = 'a'}\n", "client.headers: X y"),
        ("[load\n", "not valid TOML"),
    ],
)
def test_wrong_values_name_file_and_key(tmp_path: Path, text: str, needle: str) -> None:
    path = profile(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        build(read_profile(str(path)), "reference", [])
    assert needle in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("item", "key", "value"),
    [
        ("load.concurrency=1,4", "load.concurrency", [1, 4]),
        ("load.concurrency=[1, 4]", "load.concurrency", [1, 4]),
        ("load.concurrency=8", "load.concurrency", [8]),
        ("load.request_rate=2", "load.request_rate", [2.0]),
        ("speculative.k=5", "speculative.k", 5),
        (
            "load.schedule={seconds=3, rate=2}, {seconds=1, rate=0, to=3}",
            "load.schedule",
            [{"seconds": 3.0, "rate": 2.0, "to": None}, {"seconds": 1.0, "rate": 0.0, "to": 3.0}],
        ),
        ("sampling.temperature=0.7", "sampling.temperature", 0.7),
        ("engine.trust_remote_code=true", "engine.trust_remote_code", True),
        ("engine.port=none", "engine.port", None),
        ("target.path=/models/123", "target.path", "/models/123"),
        ("workload.dataset=7", "workload.dataset", "7"),
        ("engine.extra_args=--a,--b=1", "engine.extra_args", ["--a", "--b=1"]),
        ("engine.extra_env.OMP_NUM_THREADS=1", "engine.extra_env.OMP_NUM_THREADS", "1"),
    ],
)
def test_set_takes_the_type_of_its_key(item: str, key: str, value: object) -> None:
    assert parse_set(item) == (key, value)


@pytest.mark.parametrize(
    ("item", "needle"),
    [
        ("load.concurrency", "write it as key=value"),
        ("load.concurency=4", "did you mean 'load.concurrency'"),
        ("concurrency=4", "did you mean 'load.concurrency'"),
        ("load=4", "'load' is a table"),
        ("speculative.k=three", "speculative.k=three: a whole number is wanted"),
        ("speculative.k=0", "speculative.k=0"),
        ("engine.port=99999999", "engine.port"),
        ("engine.trust_remote_code=perhaps", "trust_remote_code"),
        ("load.schedule=[{seconds=3,rate=2}", "each bracket is closed"),
        ("load.schedule=abc", "a list of tables is wanted, such as [{seconds=30, rate=2}"),
        ("load.schedule=[{seconds=3, rte=2}]", "there is no key 'rte'"),
        ("load.schedule=[{seconds=3}]", "'rate' is missing"),
        ("workload.input_tokens={mean=5,dist=normal}", 'in quotes, such as dist="normal"'),
        ("workload.input_tokens=many", "a whole number or a table such as {key=value} is wanted"),
        ("workload.endpoint=speech", "one of chat, completions is wanted"),
    ],
)
def test_set_refuses_in_one_line(item: str, needle: str) -> None:
    with pytest.raises(UsageError) as caught:
        build(read_profile("demo"), "reference", [item])
    assert needle in str(caught.value)
    assert "\n" not in str(caught.value)


def test_set_wins_over_the_engine_part_and_the_profile() -> None:
    plan = build(read_profile("demo"), "vllm", ["compare.launches=5", "load.concurrency=2"])
    assert plan.compare.launches == 5
    assert plan.load.concurrency == (2,)


def test_request_rate_replaces_the_default_concurrency_but_not_a_given_one() -> None:
    assert [p.mode for p in load_points(LoadSection(request_rate=(2.0,)))] == ["open"]
    both = load_points(LoadSection(request_rate=(2.0,), concurrency=(1,)))
    assert [p.mode for p in both] == ["closed", "open"]


def test_count_and_duration_together_are_refused() -> None:
    with pytest.raises(UsageError, match="not both"):
        load_points(LoadSection(num_requests=3, duration_s=1.0))


def test_order_is_abba_with_shared_seeds() -> None:
    plan = build(read_profile("demo"), "reference", ["compare.launches=4"])
    cells = expand(plan, "reference", BOTH, attached=False)
    starts = [group[0].variant[0] for group in launches_of(cells)]
    assert "".join(starts) == "bssbbssb"
    seeds: dict[tuple[int, int, str], set[int]] = {}
    for c in cells:
        seeds.setdefault((c.repeat, c.block, str(c.load)), set()).add(c.seed)
    assert all(len(s) == 1 for s in seeds.values())
    assert len({next(iter(s)) for s in seeds.values()}) == len(seeds)


def test_attached_servers_take_turns_block_by_block() -> None:
    plan = build(read_profile("attach"), "openai", [])
    groups = launches_of(expand(plan, "openai", BOTH, attached=True))
    assert "".join(g[0].variant[0] for g in groups) == "bssbbssb"


@given(st.integers(1, 5), st.integers(1, 4), st.lists(st.integers(1, 64), min_size=1, unique=True))
def test_every_cell_has_its_own_id_and_its_pair(
    launches: int, blocks: int, conc: list[int]
) -> None:
    plan = to_plan(
        {"load": {"concurrency": conc}, "compare": {"launches": launches, "blocks": blocks}}, "here"
    )
    cells = expand(plan, "reference", BOTH, attached=False)
    assert len({c.cell_id for c in cells}) == len(cells) == 2 * launches * blocks * len(conc)
    keys = [(c.repeat, c.block, c.load.concurrency) for c in cells]
    assert all(keys.count(k) == 2 for k in keys)


@given(st.integers(0, 100))
def test_neighbouring_repeats_mirror_each_other(repeat: int) -> None:
    assert variant_order(BOTH, repeat) == tuple(reversed(variant_order(BOTH, repeat + 1)))


def test_merge_changes_neither_side() -> None:
    base, over = {"a": {"x": 1, "y": 2}}, {"a": {"x": 3}}
    assert merge(base, over) == {"a": {"x": 3, "y": 2}}
    assert base == {"a": {"x": 1, "y": 2}}


def test_the_keys_other_tools_use_exist() -> None:
    stay = (
        "target.path drafter.path speculative.k load.concurrency load.request_rate "
        "load.num_requests load.duration_s load.warmup_requests workload.dataset "
        "workload.output_tokens sampling.temperature engine.port"
    )
    assert set(stay.split()) <= set(known_keys())
    assert to_plan({}, "empty") == Plan()


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ("seed = 99999999999999999999999", "'seed'"),
        ("seed = -1", "'seed'"),
        ("[load]\nnum_requests = 99999999999999999999999", "'load.num_requests'"),
        ("[load]\nconcurrency = 1000000000", "load.concurrency"),
        ("[load]\nrequest_rate = inf", "load.request_rate"),
        ("[load]\nrequest_rate = 1e-300", "load.request_rate"),
        ("[load]\ntimeout_s = inf", "'load.timeout_s'"),
        ("[load]\nduration_s = nan", "'load.duration_s'"),
        ("[compare]\nlaunches = 100000", "'compare.launches'"),
        ("[sampling]\ntop_k = -99", "'sampling.top_k'"),
        ('[target]\npath = "a\\u0000b"', "NUL"),
        ('[engine.extra_env]\n"A\\u0000" = "1"', "NUL"),
        ('[engine]\nextra_args = ["--a\\u0000"]', "NUL"),
    ],
)
def test_values_no_machine_can_honour_are_refused(tmp_path: Path, text: str, needle: str) -> None:
    path = profile(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        build(read_profile(str(path)), "reference", [])
    assert needle in str(caught.value)
    assert "\0" not in str(caught.value)


@pytest.mark.parametrize("name", ["/proc/self/mem", "a" * 300 + ".toml", "/", "/dev/null"])
def test_a_profile_that_is_no_readable_file(name: str) -> None:
    with pytest.raises(UsageError, match="--profile"):
        read_profile(name)


def test_a_profile_nested_without_end(tmp_path: Path) -> None:
    path = profile(tmp_path, f"x = {'[' * 5000}{']' * 5000}")
    with pytest.raises(UsageError, match="nested too deep"):
        read_profile(str(path))


def test_a_load_point_given_twice_would_be_one_cell() -> None:
    with pytest.raises(UsageError, match="4 is given twice"):
        load_points(LoadSection(concurrency=(4, 1, 4)))
    with pytest.raises(UsageError, match="given twice"):
        load_points(LoadSection(request_rate=(1.0000001, 1.0000002)))


def test_an_open_loop_of_more_requests_than_a_cell_holds() -> None:
    with pytest.raises(UsageError, match="at most"):
        load_points(LoadSection(request_rate=(1e5,), duration_s=1e6))


def test_an_entry_of_a_free_table_needs_a_name() -> None:
    with pytest.raises(UsageError, match="a name is wanted"):
        parse_set("engine.extra_env.=1")


def test_no_concurrency_needs_another_load() -> None:
    demo = read_profile("demo")
    with pytest.raises(UsageError, match="no load is left"):
        build(demo, "reference", ["load.concurrency=none"])
    for other in ("load.request_rate=2", "load.trace=t.jsonl", "load.arrival=burst"):
        assert build(demo, "reference", ["load.concurrency=none", other]).load.concurrency is None
    assert build(demo, "reference", ["load.concurrency=none", "load.concurrency=2"])
