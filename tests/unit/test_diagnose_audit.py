"""The static audit: every finding that loses acceptance points to its cause, and no other does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_folders import (
    DRAFTED,
    HIDDEN,
    VOCAB,
    edit,
    folder_of,
    plain_spec,
    rewrite,
    target_folder,
    tensors_of,
)

from harness.diagnose.causes import CAUSES
from harness.diagnose.experiments import audit as audited
from harness.diagnose.experiments.audit import audit, with_log
from harness.diagnose.records import Audit, Subject


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    """A sound Llama head with its own embedding, served by vLLM."""
    target = target_folder(tmp_path / "target", weights=True)
    drafter = folder_of(plain_spec(), tmp_path / "drafter", embedding=False)
    return Subject(engine="vllm", target=str(target), drafter=str(drafter), k=3)


def causes(found: Audit, severity: str | None = None) -> set[str | None]:
    return {f.cause for f in found.findings if severity in (None, f.severity)}


def changed(subject: Subject, **fields: Any) -> Subject:
    return Subject(**{**{f: getattr(subject, f) for f in Subject.__struct_fields__}, **fields})


def test_every_code_points_to_a_cause_that_there_is() -> None:
    assert set(audited._CAUSES.values()) <= set(CAUSES)
    assert {cause for _, cause in audited._FLAGS} <= set(CAUSES)


def test_a_sound_drafter_points_to_nothing(subject: Subject) -> None:
    found = audit(subject)
    assert causes(found, "error") <= {None}
    assert found.owns_embeddings is False and found.owns_lm_head is True
    assert found.aux_layers == found.engine_layers != None  # noqa: E711
    assert found.embeddings_like_target is None


def test_ids_that_are_missing_and_tables_of_ids(subject: Subject) -> None:
    folder = Path(subject.drafter)
    d2t = tensors_of(folder)["d2t"]
    rewrite(folder, d2t=d2t + torch.arange(DRAFTED))
    assert causes(audit(subject), "error") == {"vocabulary_map"}
    edit(folder, "eagle_aux_hidden_state_layer_ids", "eagle_config", "drafter_format")
    found = audit(subject)
    assert "layers_default" in causes(found, "error")
    assert found.aux_layers is None


IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize("engine", ["vllm", "sglang", "reference"])
@pytest.mark.parametrize(
    ("ids", "cause"), [([1, 3, 4], "layers_shifted"), ([1, 2, 4], "layers_other")]
)
def test_ids_that_are_not_those_of_the_format_are_told(
    subject: Subject, engine: str, ids: list[int], cause: str
) -> None:
    folder = Path(subject.drafter)
    config = json.loads((folder / "config.json").read_text())
    assert config["drafter_format"]["layer_ids"] == [2, 4, 5]
    assert "ids_unlike_format" not in {f.code for f in audit(subject).findings}
    edit(folder, **{IDS: ids, "eagle_config": {**config["eagle_config"], IDS: ids}})
    (found,) = [
        f for f in audit(changed(subject, engine=engine)).findings if f.code == "ids_unlike_format"
    ]
    assert (found.severity, found.cause) == ("warning", cause)
    assert f"{ids}, and drafter_format was written for [2, 4, 5]" in found.what


def test_indices_that_the_ids_do_not_mean_are_told(subject: Subject) -> None:
    folder = Path(subject.drafter)
    mark = json.loads((folder / "config.json").read_text())["drafter_format"]
    edit(folder, drafter_format={**mark, "hidden_states_index": [1, 3, 4]})
    (found,) = [f for f in audit(subject).findings if f.code == "ids_unlike_format"]
    assert "[2, 4, 5] mean the layers [2, 4, 5], drafter_format says [1, 3, 4]" in found.what
    odd: Any
    nameless = {**mark, "layer_ids": ["a"]}
    for odd in ({"layer_ids": "x"}, [], {**mark, "hidden_states_index": [None]}, nameless):
        edit(folder, drafter_format=odd)
        assert "ids_unlike_format" not in {f.code for f in audit(subject).findings}


def test_layers_that_no_translation_makes_an_engine_capture(tmp_path: Path) -> None:
    target = target_folder(tmp_path / "target", weights=True)
    drafter = folder_of(plain_spec(aux_layers=(5, 4, 2)), tmp_path / "drafter", embedding=False)
    served = Subject(engine="vllm", target=str(target), drafter=str(drafter), k=3)
    found = audit(served)
    assert causes(found, "error") == {"layers_other"}
    assert (found.aux_layers, found.engine_layers) == ((5, 4, 2), (2, 4, 5))
    elsewhere = audit(changed(served, engine="reference"))
    assert causes(elsewhere, "error") == set()
    assert elsewhere.engine_layers == (5, 4, 2)


def test_layers_that_sglang_reads_one_later_whatever_is_written(tmp_path: Path) -> None:
    architectures = ["DeepseekV3ForCausalLM"]
    target = target_folder(tmp_path / "target", weights=True, architectures=architectures)
    drafter = folder_of(plain_spec(aux_layers=(1, 2, 3)), tmp_path / "drafter", embedding=False)
    found = audit(Subject(engine="sglang", target=str(target), drafter=str(drafter), k=3))
    assert (found.aux_layers, found.engine_layers) == ((1, 2, 3), (2, 3, 4))
    assert "layers_not_captured" in {f.code for f in found.findings}


def test_damaged_tensors_are_told_apart_from_the_last_norm(subject: Subject) -> None:
    folder = Path(subject.drafter)
    rewrite(folder, **{"norm.weight": torch.zeros(HIDDEN)})
    assert causes(audit(subject), "error") == {"final_norm"}
    fc = tensors_of(folder)["fc.weight"]
    rewrite(folder, **{"fc.weight": torch.full_like(fc, float("nan"))})
    assert causes(audit(subject), "error") == {"final_norm", "tensors_damaged"}


def test_own_embeddings_are_held_against_the_targets(subject: Subject) -> None:
    torch.manual_seed(1)
    rewrite(Path(subject.drafter), **{"embed_tokens.weight": torch.randn(VOCAB, HIDDEN)})
    found = audit(subject)
    assert found.owns_embeddings is True
    assert found.embeddings_like_target is not None and abs(found.embeddings_like_target) < 0.3
    assert "embeddings_replaced" in causes(found)


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"extra_args": ("--speculative-config.method", "eagle")}, "wrong_method"),
        ({"extra_args": ("--speculative-config.method=eagle3",)}, None),
        ({"temperature": 0.7}, "greedy_drafts_sampled"),
        (
            {
                "temperature": 0.7,
                "extra_args": ("--speculative-config.draft_sample_method", "probabilistic"),
            },
            None,
        ),
        ({"extra_args": ("--kv-cache-dtype", "fp8_e4m3")}, "states_noisy"),
        ({"engine": "sglang", "extra_args": ("--enable-two-batch-overlap",)}, "states_skipped"),
    ],
)
def test_arguments_that_cost_acceptance(
    subject: Subject, fields: dict[str, Any], cause: str | None
) -> None:
    told = {
        f.cause for f in audit(changed(subject, **fields)).findings if f.where == "engine arguments"
    }
    assert told == ({cause} if cause else set())


def test_a_server_that_runs_already_was_given_the_folder_as_it_is(subject: Subject) -> None:
    launched = audit(changed(subject, engine="sglang"))
    attached = audit(changed(subject, engine="sglang", url="http://127.0.0.1:1"))
    assert launched.engine_layers == launched.aux_layers
    assert attached.engine_layers != attached.aux_layers  # SGLang counts outputs of layers
    assert "layers_shifted" in causes(attached) and "layers_shifted" not in causes(launched)


def test_the_log_is_held_against_the_checkpoint(subject: Subject) -> None:
    known = audit(subject)
    assert known.aux_layers is not None
    same = with_log(
        known, subject, {"layers": str(known.aux_layers), "lm_head": "the drafter's own"}
    )
    assert same.findings == known.findings
    off = tuple(i + 1 for i in known.aux_layers)
    facts = {"layers": str(off), "lm_head": "shared: the drafter has none", "method": "eagle"}
    told = with_log(same, subject, facts)
    assert told.engine_layers == off
    own = {f.cause for f in told.findings if f.where == audited.LOG}
    assert own == {"layers_shifted", "lm_head_replaced", "wrong_method"}
    assert with_log(told, subject, {"layers": str(known.aux_layers)}).findings == known.findings


def test_a_folder_that_is_broken_is_a_finding(subject: Subject) -> None:
    (Path(subject.drafter) / "config.json").write_text("{", encoding="utf-8")
    found = audit(subject)
    assert causes(found, "error") == {"tensors_damaged"}
    assert found.aux_layers is None and found.engine_layers is None
