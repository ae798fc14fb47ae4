"""`python -m drafters` as a user runs it: exit codes, JSON, large checkpoints, interruptions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from drafter_folders import as_old_trainer, edit, folder_of, plain_spec, target_folder
from typer.testing import CliRunner

from drafters.__main__ import app
from drafters.flat import to_config
from drafters.headers import BYTES
from drafters.shapes import expected_shapes
from drafters.spec import DrafterSpec

REPO = Path(__file__).resolve().parents[2]


class Said(NamedTuple):
    """How a command ended and what it said."""

    returncode: int
    stdout: str
    stderr: str


def run(*arguments: object) -> Said:
    """A command, in this process."""
    done = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    return Said(done.exit_code, done.stdout, done.stderr)


def spawn(*arguments: object) -> subprocess.CompletedProcess[str]:
    """A command as a user types it."""
    command = [sys.executable, "-m", "drafters", *map(str, arguments)]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=600)


def test_the_whole_way_of_a_trainers_folder(tmp_path: Path) -> None:
    """Inspected, refused for its missing ids, converted with them, validated, served layers."""
    folder = as_old_trainer(folder_of(plain_spec(), tmp_path / "4", embedding=False))
    target = target_folder(tmp_path / "t", weights=True)
    told = run("inspect", folder)
    assert told.returncode == 0 and told.stderr == ""
    assert "speculators 0.3 to 0.4" in told.stdout and "not named (3 by the width" in told.stdout
    assert run("validate", folder, "--target", target).returncode == 1
    refused = run("convert", folder, "--to", "vllm", "--out", tmp_path / "v")
    assert (refused.returncode, refused.stdout) == (2, "") and "--layer-ids" in refused.stderr

    ids = ("--layer-ids", "1,3,4")
    for to, written in (("vllm", [2, 4, 5]), ("sglang", [1, 3, 4]), ("speculators", [2, 4, 5])):
        out = tmp_path / to
        made = run("convert", folder, "--to", to, "--out", out, "--target", target, *ids)
        assert made.returncode == 0, made.stderr
        assert made.stdout.splitlines()[-1] == str(out)
        config = json.loads((out / "config.json").read_text())
        eagle = config.get("eagle_config", config)
        assert eagle["eagle_aux_hidden_state_layer_ids"] == written
        checked = run("validate", out, "--target", target, "--json")
        assert checked.returncode == 0, checked.stdout
        seen = json.loads(run("inspect", out, "--target", target, "--json").stdout)
        assert seen["aux_layers"] == [2, 4, 5] and seen["ids_certain"] is True
        if to != "speculators":
            assert [e["right"] for e in seen["engines"] if e["engine"] == to] == [True]


def test_exit_codes_of_validate(tmp_path: Path) -> None:
    folder = folder_of(plain_spec(), tmp_path / "d", embedding=False)
    target = target_folder(tmp_path / "t", weights=True)
    command = ("validate", folder, "--target", target, "--engine", "vllm")
    assert spawn(*command, "--strict").returncode == 0
    edit(folder, rope_theta=9.0)
    assert run(*command).returncode == 0
    strict = run(*command, "--strict", "--json")
    told = json.loads(strict.stdout)
    assert strict.returncode == 1 and told["passed"] is False
    assert [f["code"] for f in told["findings"] if f["severity"] == "warning"] == ["rope_base"]
    nowhere = spawn("validate", tmp_path / "nowhere")
    assert (nowhere.returncode, nowhere.stdout) == (2, "")
    assert nowhere.stderr.startswith("error: ") and nowhere.stderr.count("\n") == 1
    assert run("validate", folder, "--target", tmp_path / "nowhere").returncode == 2


def test_a_table_for_each_family_where_the_target_is_unknown(tmp_path: Path) -> None:
    folder = folder_of(plain_spec(), tmp_path / "d")
    lines = run("inspect", folder).stdout.splitlines()
    table = [line.split() for line in lines if line.strip().startswith(("vLLM", "SGLang"))]
    assert [row[:2] for row in table] == [
        ["vLLM", "any"],
        ["SGLang", "DeepSeek,"],
        ["SGLang", "Llama,"],
    ]
    assert [" ".join(row[-3:]) for row in table][2] == "NOT as trained"
    assert "NOT" not in table[0] + table[1]


KIMI = DrafterSpec(
    kind="llama",
    hidden_size=7168,
    target_hidden_size=7168,
    intermediate_size=18432,
    num_attention_heads=64,
    num_key_value_heads=64,
    head_dim=128,
    vocab_size=163840,
    draft_vocab_size=32000,
    aux_layers=(2, 30, 58),
    dtype="bfloat16",
)


def sparse_checkpoint(folder: Path, spec: DrafterSpec) -> int:
    """A checkpoint of full size whose weights are a hole in the file; returns its bytes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_config(spec)))
    shapes = expected_shapes(spec)
    shapes["embed_tokens.weight"] = (spec.vocab_size, spec.hidden_size)
    shapes["lm_head.weight"] = (spec.draft_vocab_size, spec.hidden_size)
    header: dict[str, Any] = {}
    offset = 0
    for name, shape in shapes.items():
        dtype = "I64" if name == "d2t" else "BF16"
        size = BYTES[dtype]
        for n in shape:
            size *= n
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + offset)
    return offset


MEASURED = """
import resource, subprocess, sys
done = subprocess.run([sys.executable, "-m", "drafters", *sys.argv[1:]], capture_output=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(done.returncode, used.ru_maxrss, used.ru_utime + used.ru_stime)
sys.stderr.write(done.stdout.decode() + done.stderr.decode())
"""


def measured(*arguments: object) -> tuple[int, float, float, str]:
    """Exit code, most memory held (MB), seconds of processor, and what was said."""
    command = [sys.executable, "-c", MEASURED, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=REPO, capture_output=True, text=True, check=True, timeout=900
    )
    code, kilobytes, seconds = done.stdout.split()
    return int(code), int(kilobytes) / 1000, float(seconds), done.stderr


def test_a_checkpoint_of_4_5_gb_is_inspected_from_its_headers(tmp_path: Path) -> None:
    size = sparse_checkpoint(tmp_path / "kimi", KIMI)
    assert size > 4.5e9
    small = sparse_checkpoint(tmp_path / "small", plain_spec())
    assert small < 1e7
    code, _, least, said = measured("inspect", tmp_path / "small")
    assert code == 0, said
    code, memory, processor, said = measured("inspect", tmp_path / "kimi")
    assert code == 0 and "1,190,948,864 without the embedding" in said, said
    # Little more than a small one takes of whatever processor this is.
    assert memory < 300 and processor < 4 * least


@pytest.mark.full
def test_a_checkpoint_of_4_5_gb_is_validated_in_little_memory(tmp_path: Path) -> None:
    sparse_checkpoint(tmp_path / "kimi", KIMI)
    code, memory, _, said = measured("validate", tmp_path / "kimi")
    assert code == 1 and "all_zero" in said  # a hole reads as zeros
    assert memory < 400


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_conversion_that_is_stopped_leaves_no_folder(number: int, tmp_path: Path) -> None:
    sparse_checkpoint(tmp_path / "d", msgspec.structs.replace(KIMI, vocab_size=32000))
    rename_header(tmp_path / "d" / "model.safetensors")
    command = ["convert", tmp_path / "d", "--to", "vllm", "--out", tmp_path / "out"]
    arguments = [sys.executable, "-m", "drafters", *map(str, command)]
    process = subprocess.Popen(arguments, cwd=REPO, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not list(tmp_path.glob(".out.partial-*/*.partial")):
        time.sleep(0.005)
    os.kill(process.pid, number)
    _, said = process.communicate(timeout=300)
    assert process.returncode == {2: 130, 15: 143, 9: -9}[number], said
    assert not (tmp_path / "out").exists() and "Traceback" not in said
    assert bool(list(tmp_path.glob(".out.partial-*"))) is (number == signal.SIGKILL)
    code, memory, _, said = measured(*command)
    assert code == 0 and memory < 400, said
    assert not list(tmp_path.glob(".out.partial-*"))


def rename_header(file: Path) -> None:
    """Give the tensors a prefix that no engine knows, so that they must be written anew."""
    with file.open("r+b") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
        size = file.stat().st_size - 8 - length
        text = json.dumps({f"model.{name}": entry for name, entry in header.items()}).encode()
        text += b" " * (-len(text) % 8)
        stream.seek(0)
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + size)
