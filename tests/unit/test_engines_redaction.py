"""Secrets stay out of an engine's log, wherever its output is cut; the engine itself has them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_engines_process import FakeAdapter

from engines.base import EngineFailed, Launch, ServeSpec
from engines.process import EngineProcess, free_port
from engines.secret import HIDDEN, as_written, known_secrets
from engines.supervise import HIDE, Redactor

MARK = b"<hidden>"


def shown(chunks: Sequence[bytes], *values: bytes) -> bytes:
    redactor = Redactor(values, MARK)
    return b"".join([*(redactor.feed(chunk) for chunk in chunks), redactor.end()])


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (b"key s3cret-key!", b"key <hidden>!"),
        (b"s3cret-keys3cret-key", b"<hidden><hidden>"),
        (b"xs3cret-keyx", b"x<hidden>x"),
        (b"s3cret-key-longer s3cret-key-long.", b"<hidden> <hidden>-long."),
        (b"s3cret-key-long", b"<hidden>"),
        (b"hf_x hf_xet hf_x", b"<hidden> hf_xet <hidden>"),  # a short one only as a word
        (b"nothing at all\r", b"nothing at all\r"),
        (b"ends within s3cret-k", b"ends within <hidden>"),
        (b"ends within s3c", b"ends within s3c"),
    ],
)
def test_a_value_is_replaced_wherever_the_stream_is_cut(said: bytes, told: bytes) -> None:
    values = (b"s3cret-key", b"s3cret-key-longer", b"hf_x")
    assert shown([said], *values) == told
    assert shown([bytes([byte]) for byte in said], *values) == told
    for cut in range(len(said)):
        assert shown([said[:cut], said[cut:]], *values) == told


@given(
    parts=st.lists(st.text("ab_ \n", max_size=12)),
    values=st.lists(st.text("ab_", min_size=1, max_size=12), min_size=1, max_size=4),
)
def test_however_it_is_cut_the_same_is_shown(parts: list[str], values: list[str]) -> None:
    chunks, secrets = [p.encode() for p in parts], [v.encode() for v in values]
    told = shown(chunks, *secrets)
    assert told == shown([b"".join(chunks)], *secrets)
    for value in secrets:
        if len(value) >= 8:
            assert value not in told


@given(st.lists(st.binary(max_size=20)))
def test_what_holds_no_secret_is_shown_at_once_and_as_it_is(chunks: list[bytes]) -> None:
    redactor = Redactor([b"\xffno such bytes\xff"], MARK)
    text = b"".join(chunks)
    if b"\xff" not in text:
        assert [redactor.feed(chunk) for chunk in chunks] == chunks
        assert redactor.end() == b""


SERVER = """
    import os, sys, time
    token, key = os.environ["HF_TOKEN"], sys.argv[-1]
    assert token == "planted-" + "token" and key == "planted-" + "key", "not what was given"
    print("HIDE" if any("HIDE" in name for name in os.environ) else "unaware", flush=True)
    sys.stdout.write("the token is plan"); sys.stdout.flush(); time.sleep(0.3)
    print(token[4:], "and the key", repr(key), file=sys.stderr, flush=True)
    print("out of the environment:", os.environ["GIVEN_PASSWORD"])
    print("CAUSE: refused", key, token, "and it's", os.environ["ODD_SECRET"].encode(), flush=True)
    sys.exit(7)
"""


class Telling(FakeAdapter):
    """Its server tells everything that it was told, then dies."""

    def launch(self, spec: ServeSpec, workdir: Path) -> Launch:
        argv = (sys.executable, str(self.script), "--api-key", "planted-key")
        return Launch(argv=argv, env={"HF_TOKEN": "planted-token", "ODD_SECRET": "plan'ted\todd"})


def test_the_log_and_the_error_show_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import textwrap

    monkeypatch.setenv("GIVEN_PASSWORD", "planted-environment")
    # As written in another way, more than one variable can hold.
    monkeypatch.setenv("CERTIFICATE_KEY", 'planted"\n' * 10_000)
    (tmp_path / "server.py").write_text(textwrap.dedent(SERVER))
    log = tmp_path / "engine.log"
    with EngineProcess(
        Telling(tmp_path / "server.py", ""),
        ServeSpec(target=tmp_path, served_name="m", port=free_port()),
        workdir=tmp_path / "work",
        log_path=log,
        deadline_s=120,
    ) as engine:
        engine.start()
        with pytest.raises(EngineFailed) as failed:
            engine.wait_ready()
    text = log.read_text()
    assert "unaware" in text
    assert text.count(HIDDEN) == 6
    for told in (text, str(failed.value), "".join(failed.value.tail)):
        assert "plan" not in told.replace(str(tmp_path), "")
    assert f"refused {HIDDEN} {HIDDEN}" in str(failed.value)
    assert HIDE not in os.environ


def test_without_a_secret_the_engine_writes_its_log_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in os.environ if known_secrets((), {n: os.environ[n]})]:
        monkeypatch.delenv(name)
    assert known_secrets(("serve", "--seed", "3"), {"A": "1"}) == []


def test_what_is_too_common_to_be_a_secret_is_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(command: Sequence[str] = (), **variables: Any) -> list[str]:
        return [v for v in known_secrets(command, variables) if v not in here]

    here = known_secrets((), {})
    assert found(("env", "A_TOKEN=abcd", "serve", "--api-key", "k3y!", "other")) == [
        "abcd", "k3y!", "other",
    ]  # fmt: skip
    assert found(A_TOKEN="abc", B_TOKEN="True", C_AUTH="none", D_KEY=str(tmp_path)) == []
    monkeypatch.setenv("SHORT_TOKEN", "1234567")
    assert found() == []
    monkeypatch.setenv("LONG_TOKEN", "12345678")
    assert found() == ["12345678"]


def test_a_value_is_known_as_others_write_it() -> None:
    assert as_written(["plain"]) == ["plain"]
    written = as_written(["it's\té"])
    assert "it's\\té" in written
    assert re.sub(r"\\u00e9", "é", written[-1]) == "it's\\té"
