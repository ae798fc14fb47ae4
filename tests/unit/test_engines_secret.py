"""What records of a command leave out, and that they leave out nothing else."""

from __future__ import annotations

import pytest

from engines.secret import HIDDEN, command_without_secrets


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
    ],
)
def test_the_rest_of_a_command_stays_as_it_is(words: tuple[str, ...]) -> None:
    assert command_without_secrets(words) == words
