"""Files that are broken, hostile or no files at all: one line each, never a traceback."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from drafter_folders import as_old_trainer, edit, folder_of, plain_spec, target_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from drafters.__main__ import app
from drafters.headers import read_header, read_json
from drafters.spec import DrafterError


def run(*arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command; an exception other than an exit is raised."""
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def header(entries: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def tensor(shape: Any, offsets: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"fc.weight": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


HEADERS: dict[str, bytes] = {
    "empty": b"",
    "short": b"\x01\x02",
    "huge": header(b"{}", length=2**62),
    "beyond the format's limit": header(b"{}", length=10**9),
    "no json": header(b"\xff\xfe{"),
    "deep": header(b'{"a":' * 50_000),
    "a list": header([1, 2]),
    "negative shape": header(tensor([-2, -2], [0, 16]), b"x" * 16),
    "negative offsets": header(tensor([2, 2], [-16, 0]), b"x" * 16),
    "backwards": header(tensor([0], [16, 0]), b"x" * 16),
    "fractions": header(tensor([2.5, 2], [0, 20]), b"x" * 20),
    "truth for a size": header(tensor([True], [0, 4]), b"x" * 4),
    "other bytes": header(tensor([2, 2], [0, 12]), b"x" * 12),
    "three offsets": header(tensor([2, 2], [0, 16, 32]), b"x" * 32),
    "no offsets": header({"fc.weight": {"dtype": "F32", "shape": [1]}}, b"x" * 4),
    "past the end": header(tensor([2, 2], [0, 16]), b"x" * 15),
    "enormous": header(tensor([2**40, 2**40], [0, 2**82]), b"x"),
}


@pytest.mark.parametrize("name", HEADERS)
@pytest.mark.parametrize("command", ["inspect", "validate", "convert"])
def test_a_damaged_file_of_weights_is_one_line(name: str, command: str, tmp_path: Path) -> None:
    folder = folder_of(plain_spec(), tmp_path / "d")
    (folder / "model.safetensors").write_bytes(HEADERS[name])
    told(folder, command, tmp_path)


def told(folder: Path, command: str, tmp_path: Path) -> str:
    """The one line that a broken folder gets; nothing else appears."""
    more = ["--to", "vllm", "--out", tmp_path / "out"] if command == "convert" else []
    code, out, err = run(command, folder, *more)
    assert not (tmp_path / "out").exists()
    if command == "validate" and code == 1:
        first = out.splitlines()[0]
        assert first.startswith("error") and out.splitlines()[-1].startswith("FAILED")
        return first
    assert (code, out) == (2, ""), (out, err)
    assert err.startswith("error: ") and err.count("\n") == 1, err
    return err


CONFIGS: dict[str, bytes] = {
    "empty": b"",
    "no json": b"{",
    "a list": b"[1]",
    "deep": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "not utf-8": b'{"a": "\xff\xfe"}',
    "numbers for strings": b'{"architectures": 3, "model_type": 4, "eagle_config": 5}',
    "strings for numbers": b'{"hidden_size": "a", "num_attention_heads": [], "vocab_size": {}}',
    "nothing": b"{}",
    "nulls": b'{"hidden_size": null, "eagle_config": null, "architectures": [null]}',
    "a name that steers": b'{"speculators_model_type": "\\u001b[31mred\\nline"}',
    "huge numbers": b'{"hidden_size": 1e400, "num_attention_heads": 1, "vocab_size": 1}',
    "endless number": b'{"hidden_size": ' + b"9" * 5000 + b"}",
    "speculators of nothing": b'{"speculators_model_type": "eagle3"}',
    "lists for dictionaries": (
        b'{"speculators_model_type": "eagle3", "transformer_layer_config": {"hidden_size": []},'
        b'"speculators_config": [1]}'
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("command", ["inspect", "validate", "convert"])
def test_a_damaged_config_is_one_line(name: str, command: str, tmp_path: Path) -> None:
    folder = folder_of(plain_spec(), tmp_path / "d")
    (folder / "config.json").write_bytes(CONFIGS[name])
    line = told(folder, command, tmp_path)
    assert "config.json" in line and "\x1b" not in line


def no_folder(folder: Path) -> Path:
    return folder / "nowhere"


def a_file(folder: Path) -> Path:
    return folder / "config.json"


def empty(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def loop(folder: Path) -> Path:
    (folder / "a").symlink_to(folder / "b")
    (folder / "b").symlink_to(folder / "a")
    return folder / "a"


def looping_weights(folder: Path) -> Path:
    file = folder / "model.safetensors"
    file.unlink()
    file.symlink_to(file)
    return folder


def looping_config(folder: Path) -> Path:
    file = folder / "config.json"
    file.unlink()
    file.symlink_to(file)
    return folder


def folder_for_weights(folder: Path) -> Path:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    return folder


def folder_for_config(folder: Path) -> Path:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    return folder


def pipe_for_weights(folder: Path) -> Path:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    return folder


def pipe_for_config(folder: Path) -> Path:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    return folder


def index_of_elsewhere(folder: Path) -> Path:
    names = {"weight_map": {"fc.weight": "../../etc/passwd"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(names))
    return folder


def index_of_numbers(folder: Path) -> Path:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": 1}}')
    return folder


def too_long(folder: Path) -> Path:
    return folder / ("x" * 5000)


PLACES = [no_folder, a_file, empty, loop, looping_weights, looping_config, folder_for_weights]
PLACES += [folder_for_config, pipe_for_weights, pipe_for_config, index_of_elsewhere]
PLACES += [index_of_numbers, too_long]


@pytest.mark.parametrize("place", PLACES, ids=lambda p: p.__name__)
@pytest.mark.parametrize("command", ["inspect", "validate", "convert"])
def test_what_is_no_checkpoint_is_one_line(place: Any, command: str, tmp_path: Path) -> None:
    folder = place(folder_of(plain_spec(), tmp_path / "d"))
    told(folder, command, tmp_path)


def test_names_cannot_steer_the_terminal(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = folder_of(plain_spec(), tmp_path / "d")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["evil\x1b[2J\nname"] = tensors["norm.weight"].clone()
    save_file(tensors, file)
    edit(folder, hidden_act="si\x1blu\nlu", model_type="x\x07")
    for command in ("inspect", "validate"):
        _, out, err = run(command, folder)
        assert "\x1b" not in out + err and "\x07" not in out + err
    _, out, _ = run("validate", folder)
    assert "tensor_unknown" in out


@pytest.mark.parametrize("broken", ["config", "weights", "tokens"])
def test_a_damaged_target_is_told(broken: str, tmp_path: Path) -> None:
    folder = folder_of(plain_spec(), tmp_path / "d")
    target = target_folder(tmp_path / "t", weights=True)
    if broken == "config":
        (target / "config.json").write_text('{"text_config": {"vocab_size": "many"}}')
    elif broken == "weights":
        (target / "model.safetensors").write_bytes(HEADERS["past the end"])
    else:
        (target / "tokenizer_config.json").write_text('{"added_tokens_decoder": [1]}')
        (target / "tokenizer.json").write_text('{"added_tokens": {"id": 3}}')
        (target / "generation_config.json").write_text("[")
    code, out, err = run("validate", folder, "--target", target)
    assert code in (0, 1, 2) and "Traceback" not in out + err
    if broken == "weights":
        assert "target_weights" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["inspect"], "Missing argument"),
        (["convert", "x"], "Missing option"),
        (["convert", "x", "--to", "gguf", "--out", "y"], "gguf"),
        (["validate", "x", "--engine", "trt"], "trt"),
        (["inspect", "x", "--ids", "mine"], "mine"),
        (["inspect", "x", "--layer-ids", "a,b"], "give numbers"),
        (["inspect", "x", "--layer-ids", "2,,4"], "give numbers"),
        (["inspect", "x", "--layer-ids", "-1"], "give numbers"),
    ],
)
def test_misuse_ends_with_2(arguments: list[str], said: str) -> None:
    code, out, err = run(*arguments)
    assert code == 2 and said in err and out == ""


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)
FLAT_KEYS = [
    *("hidden_size", "eagle_config", "vocab_size", "draft_vocab_size", "architectures"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "rope_scaling", "rope_theta"),
    *("rope_parameters", "dtype", "bos_token_id", "eos_token_id", "target_hidden_size"),
    *("rms_norm_eps", "max_position_embeddings", "drafter_format", "layer_types"),
    *("intermediate_size", "norm_before_fc", "num_aux_hidden_states", "model_type"),
    *("eagle_aux_hidden_state_layer_ids", "kv_lora_rank", "num_hidden_layers", "logit_scale"),
]
LIBRARY_KEYS = [
    *("speculators_version", "speculators_config", "transformer_layer_config", "auto_map"),
    *("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "norm_before_residual"),
    *("speculators_model_type", "target_hidden_size"),
]


@given(
    data=st.data(),
    library=st.booleans(),
    command=st.sampled_from(["inspect", "validate", "convert"]),
)
@settings(max_examples=60, deadline=None)
def test_no_config_crashes_a_command(
    data: st.DataObject, library: bool, command: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    work = tmp_path_factory.mktemp("fuzz")
    folder = folder_of(plain_spec(), work / "d")
    if library:
        as_old_trainer(folder)
    keys = st.sampled_from(LIBRARY_KEYS if library else FLAT_KEYS)
    changes = data.draw(st.dictionaries(keys, json_values, min_size=1, max_size=3))
    edit(folder, **changes)
    target = target_folder(work / "t")
    more = ["--to", "sglang", "--out", work / "out"] if command == "convert" else []
    code, out, err = run(command, folder, "--target", target, *more)
    assert code in (0, 1, 2)
    assert err.count("\n") <= 12 and "Traceback" not in err + out


@given(changes=st.dictionaries(st.sampled_from(FLAT_KEYS), json_values, min_size=1, max_size=3))
@settings(max_examples=40, deadline=None)
def test_no_targets_config_crashes_a_command(
    changes: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    work = tmp_path_factory.mktemp("fuzz")
    folder = folder_of(plain_spec(), work / "d")
    target = target_folder(work / "t", **changes)
    code, out, err = run("validate", folder, "--target", target)
    assert code in (0, 1, 2) and "Traceback" not in err + out


@given(data=st.binary(max_size=200), length=st.one_of(st.none(), st.integers(0, 2**63)))
@settings(max_examples=150, deadline=None)
def test_no_bytes_crash_the_readers(
    data: bytes, length: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("bytes") / "x"
    file.write_bytes(data if length is None else header(data, length=length))
    for reader in (read_header, read_json):
        try:
            assert isinstance(reader(file), dict)
        except DrafterError as error:
            assert str(file) in str(error) and "\n" not in str(error)
