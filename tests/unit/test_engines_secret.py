"""What records of a command leave out, and that they leave out nothing else."""

from __future__ import annotations

import pytest

from engines.secret import HIDDEN, command_without_secrets, in_command, is_secret, variable_of


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "--api-key", "s3cret", "--seed", "3"),
        ("serve", "--api-key=s3cret"),
        ("serve", "--its.api-key=s3cret and more"),
        ("env", "HF_TOKEN=s3cret", "A=1", "serve"),
        ("docker", "run", "-i", "-e", "HF_TOKEN=s3cret", "image"),
        ("docker", "run", "-i", "--env=HF_TOKEN=s3cret", "image"),
        ("docker", "run", "-i", "-eHF_TOKEN=s3cret", "image"),
        ("ssh", "host", "env 'HF_TOKEN=s3cret more' python3 -c 'print(1)' --api-key s3cret"),
        ("serve", "--api-key", "s3cret", "s3cret2", "--seed", "3"),
        ("sshpass", "-p", "s3cret", "ssh", "-p", "22", "host"),
        ("/usr/bin/sshpass", "-v", "-P", "word:", "-ps3cret", "ssh", "host"),
        ("ssh", "host", "sh -c 'HF_TOKEN=s3cret serve --api-key=s3cret' > \"$HOME/log\""),
    ],
)
def test_a_secret_is_left_out_of_a_command(words: tuple[str, ...]) -> None:
    told = command_without_secrets(words)
    assert "s3cret" not in " ".join(told)
    assert HIDDEN in " ".join(told)
    assert len(told) == len(words)
    assert command_without_secrets(told) == told


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "--max-total-tokens", "4096", "--kv-cache-dtype=fp8", "A=1"),
        ("serve", "--speculative-config", '{"method": "eagle3", "model": "/a b"}'),
        ("python3", "-c", "x = 'it'\nprint(x)", "don't", ""),
        ("ssh", "-p", "22", "host", "HF_TOKEN=$HF_TOKEN {command} --api-key ${KEY} > log 2>&1"),
        ("env", "HF_TOKEN=", "docker", "run", "-i", "-e", "HF_TOKEN", "image"),
    ],
)
def test_the_rest_of_a_command_stays_as_it_is(words: tuple[str, ...]) -> None:
    assert command_without_secrets(words) == words


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("env", "HF_TOKEN=a", "B_KEY=b", "serve", "--api-key", "c"), "HF_TOKEN B_KEY API_KEY"),
        (("serve", "--api-key", "a", "b", "c"), "API_KEY API_KEY_2 API_KEY_3"),
        (("docker", "-eHF_TOKEN=a", "--env=my_key=b", "--hf-token=c"), "HF_TOKEN my_key HF_TOKEN"),
        (("sshpass", "-p", "a", "ssh", "h", "X_KEY=b {command} > 'a b'"), "SSHPASS X_KEY"),
    ],
)
def test_a_hidden_secret_is_asked_back_by_its_variable(words: tuple[str, ...], names: str) -> None:
    given: list[str] = []

    def back(name: str, value: str) -> str:
        assert value == HIDDEN
        return wanted.pop(0)

    def take(name: str, value: str) -> str:
        given.append(value)
        told.append(name)
        return HIDDEN

    told: list[str] = []
    hidden = in_command(words, take)
    assert told == names.split()
    wanted = list(given)
    assert in_command(hidden, back) == words


def test_what_is_filled_in_is_quoted_for_the_shell_that_reads_it() -> None:
    words = ("ssh", "host", "HF_TOKEN=a serve > log")
    filled = in_command(command_without_secrets(words), lambda name, value: "it's $a b")
    assert filled == ("ssh", "host", """HF_TOKEN='it'"'"'s $a b' serve > log""")


def test_names_of_secrets() -> None:
    assert is_secret("HF_TOKEN")
    assert is_secret("--api-key")
    assert not is_secret("TOKENIZERS_PARALLELISM")
    assert not is_secret("--max-num-batched-tokens")
    assert variable_of("--api-key") == "API_KEY"
    assert variable_of("--its.api-key") == "ITS_API_KEY"
