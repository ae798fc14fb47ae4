"""A plan's secrets: hidden in every place, filled in again from the environment, lost nowhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.secret import HIDDEN
from harness.errors import UsageError
from harness.plan.axes import axes_of
from harness.plan.load import build, parse_set, read_profile
from harness.plan.recorded import recorded_command, recorded_plan, recorded_set
from harness.plan.schema import Plan, as_dict
from harness.plan.secret import filled, hidden, secrets_of
from harness.prepare import Request
from harness.run import plan_of
from harness.sweep import _check_swept

SETS = (
    "engine.extra_env.HF_TOKEN=s3cret-a",
    "engine.extra_env.A=1",
    "engine.env.B_KEY={value = 's3cret-b', why = 'w', variant = 'baseline'}",
    "engine.flags.--admin-api-key={value='s3cret-c', why='w'}",
    "engine.flags.--auth={why='a switch'}",
    "engine.extra_args=--seed,3,--api-key,s3cret-d,s3cret-e",
    'engine.command_prefix=["sshpass", "-p", "s3cret-f", "ssh", "h", "C_KEY=s3cret-g {command}"]',
    "client.headers.Authorization=Bearer s3cret-h",
    "client.headers.X-Tenant=bench",
    "client.headers.X-Odd=Basic s3cret-i",
    "client.proxy=http://user:s3cret-j@proxy:3128",
)
BACK = {
    "HF_TOKEN": "s3cret-a",
    "B_KEY": "s3cret-b",
    "ADMIN_API_KEY": "s3cret-c",
    "API_KEY": "s3cret-d",
    "API_KEY_2": "s3cret-e",
    "SSHPASS": "s3cret-f",
    "C_KEY": "s3cret-g",
    "HEADER_AUTHORIZATION": "Bearer s3cret-h",
    "HEADER_X_ODD": "Basic s3cret-i",
    "PROXY_PASSWORD": "s3cret-j",
}


def plan_with(sets: tuple[str, ...]) -> Plan:
    return build(read_profile("demo"), "vllm", list(sets))


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in BACK:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("item", SETS)
def test_a_set_is_recorded_without_its_secret_and_can_be_read_again(item: str) -> None:
    told = recorded_set(item)
    assert "s3cret" not in told
    assert (HIDDEN in told) is ("s3cret" in item)
    assert (told == item) is ("s3cret" not in item)
    assert parse_set(told)[0] == parse_set(item)[0]
    assert recorded_set(told) == told


def test_whole_tables_are_looked_into() -> None:
    for item in (
        "engine.extra_env={HF_TOKEN='s3cret', A='1'}",
        "client.headers={X-Api-Key='s3cret', A='é'}",
    ):
        told = recorded_set(item)
        assert "s3cret" not in told
        (name,) = [v for k, v in parse_set(told)[1].items() if k == "A"]
        assert name in "1é"


def test_what_is_no_setting_of_a_plan_stays() -> None:
    words = ("harness", "run", "--set", "nonsense", "--set=load.concurrency=1", "HF_TOKEN=word")
    assert recorded_command(words) == words


def test_a_command_is_recorded_without_secrets() -> None:
    words = ["python", "-m", "harness", "run", *(w for s in SETS for w in ("--set", s))]
    words += [f"--set={item}" for item in SETS]
    told = recorded_command(words)
    assert "s3cret" not in " ".join(told)
    assert len(told) == len(words)


@pytest.mark.usefixtures("no_variables")
def test_a_plan_is_filled_in_again_from_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_with(SETS)
    assert set(BACK.values()) <= set(secrets_of(plan))
    assert "s3cret-h" in secrets_of(plan)
    sets = tuple(map(recorded_set, SETS))
    with pytest.raises(UsageError) as refused:
        plan_with(sets)
    assert "\n" not in str(refused.value)
    for name in BACK:
        assert f"{name}=" in str(refused.value)
    for name, value in BACK.items():
        monkeypatch.setenv(name, value)
    assert plan_with(sets) == plan


def test_a_header_that_http_cannot_carry_is_refused_from_the_environment_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HEADER_X_API_KEY", "two\nlines")
    with pytest.raises(UsageError, match="X-Api-Key") as refused:
        plan_with((f"client.headers.X-Api-Key={HIDDEN}",))
    assert "two" not in str(refused.value)


def test_records_of_before_are_compared_as_if_written_now() -> None:
    plan = plan_with(SETS)
    request = Request(engines=("vllm",), sets=SETS, command=("run", "--set", SETS[0]))
    now = plan_of(request, [])
    assert "s3cret" not in json.dumps(now)
    before = {
        "request": {**now["request"], "sets": list(SETS), "command": list(request.command)},
        "models": {},
        "engines": {},
    }
    assert recorded_plan(before) == now
    assert recorded_plan(now) == now
    assert "s3cret" not in json.dumps(hidden(as_dict(plan)))
    assert hidden(hidden(as_dict(plan))) == hidden(as_dict(plan))


def test_a_plan_without_secrets_is_the_same_object() -> None:
    plan = plan_with(("engine.extra_env.A=1", "engine.extra_env.HF_TOKEN="))
    assert filled(plan) is plan
    assert hidden(as_dict(plan)) == as_dict(plan)
    assert secrets_of(plan) == []


@pytest.mark.parametrize(
    "over", ["engine.extra_env.HF_TOKEN=a,b", "client.headers.X-Api-Key=s3cret-a,s3cret-b"]
)
def test_a_secret_cannot_be_swept(over: str) -> None:
    with pytest.raises(UsageError, match="secret") as refused:
        _check_swept(Request(out=Path()), axes_of([over]))
    assert "s3cret" not in str(refused.value)


@given(st.text(max_size=40), st.lists(st.text(max_size=20), max_size=4))
def test_no_text_is_too_odd_to_be_recorded(value: str, words: list[str]) -> None:
    for item in (
        f"engine.extra_env.HF_TOKEN={value}",
        f"engine.extra_args={json.dumps(['--api-key', *words], ensure_ascii=False)}",
    ):
        told = recorded_set(item)
        assert recorded_set(told) == told
