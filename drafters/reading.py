"""A drafter's folder, whatever its format: what it is and how its layer ids are to be read.

Reads config.json and the headers of the weights, no weights and no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from drafters.flat import (
    MARK,
    eagle_config,
    marked_indices,
    rope_of,
    spec_of,
    text_config,
    written_ids,
)
from drafters.headers import TensorHeader, read_headers, read_json
from drafters.ids import CONVENTIONS, MEANING, Convention, Family, family_of, to_index
from drafters.spec import DrafterError, DrafterSpec
from drafters.speculators import counts_outputs, hoisted, is_speculators

Format = Literal["flat", "flat-midlayer", "speculators", "speculators-0.3"]
FORMAT_NAMES: dict[Format, str] = {
    "flat": "flat, tensors named layers.0.* (vLLM, SGLang, and ours)",
    "flat-midlayer": "flat, tensors named midlayer.* (SpecForge, SGLang, vLLM)",
    "speculators": "speculators 0.5 or newer",
    "speculators-0.3": "speculators 0.3 to 0.4",
}
_LEGACY_NORMS = {"aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1."}
_LEGACY_NORMS["aux_norm_high."] = "fc_norm.2."
# targets that are known by the size of their vocabulary alone: DeepSeek-V3 and R1, Kimi-K2
_DEEPSEEK_VOCABULARIES = (129280, 163840)


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the target model: `config` is its language model's part."""

    path: Path
    config: dict[str, Any]
    architecture: str

    @property
    def family(self) -> Family:
        """Under which of SGLang's rules it falls."""
        return family_of(self.architecture)

    @property
    def layers(self) -> int | None:
        """Its number of layers; None where the config does not say."""
        count = self.config.get("num_hidden_layers")
        return count if type(count) is int else None


class Stated(msgspec.Struct, frozen=True, kw_only=True):
    """What the user says about a folder that does not say it itself.

    `ids`: in which convention its layer ids are counted; `layers`: the ids, where it names none.
    """

    ids: Convention | None = None
    layers: tuple[int, ...] | None = None


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A drafter's folder as it was read.

    `config` is config.json as it stands, `flat` the same with speculators' layer hoisted.
    `tensors` have neutral names (`layers.0.*`, `fc_norm.i`, no `model.`), `stored` maps these to
    the names on disk. `ids` are the layer ids as written (or as the user stated), None where
    there are none: then `spec.aux_layers` is empty. `why` says what decided the convention, and
    `certain` whether that is more than an assumption. `notes`: what else had to be assumed.
    """

    path: Path
    format: Format
    config: dict[str, Any]
    flat: dict[str, Any]
    tensors: dict[str, TensorHeader]
    stored: dict[str, str]
    spec: DrafterSpec
    ids: tuple[int, ...] | None
    convention: Convention
    why: str
    certain: bool
    family: Family | None
    notes: tuple[str, ...] = ()

    @property
    def num_aux(self) -> int:
        """How many aux states the fc layer takes, by its own shape."""
        width = self.spec.target_hidden_size
        fc = self.tensors.get("fc.weight")
        if fc is None or len(fc.shape) != 2 or fc.shape[1] % width:
            return len(self.spec.aux_layers)
        return fc.shape[1] // width

    def has(self, name: str) -> bool:
        """Whether the tensor of this neutral name is stored."""
        return name in self.tensors


def read_target(path: Path) -> Target:
    """A target's config. Raises DrafterError."""
    config = read_json(path / "config.json")
    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else ""
    text = text_config(config)
    wrong = wrong_layers(text) or wrong_number(text)
    if wrong is not None:
        raise DrafterError(f"{path / 'config.json'}: {wrong}")
    try:
        rope_of(text)
    except (TypeError, ValueError) as error:
        raise DrafterError(f"{path / 'config.json'}: its rope cannot be read: {error}") from None
    return Target(path=path, config=text, architecture=str(first))


def wrong_layers(config: Mapping[str, Any]) -> str | None:
    """What is wrong with a model's number of layers; None where it is right, or not said."""
    layers = config.get("num_hidden_layers")
    if type(layers) is int and layers < 1:
        return f"num_hidden_layers is {layers}: a model has one layer or more; fetch it again"
    return None


def wrong_number(config: Mapping[str, Any]) -> str | None:
    """What is wrong with a model's rotary embedding or norm; None where they can be read.

    Readers pass over a scaling that is no object and a base of 0, and take none and the default.
    """
    ropes = {key: config[key] for key in ("rope_scaling", "rope_parameters") if key in config}
    for key, value in ropes.items():
        if value is not None and not isinstance(value, dict):
            return f"{key} is {repr(value)[:60]}, not an object"
    places = {"": config, **{f"{key}.": value or {} for key, value in ropes.items()}}
    told = (
        _wrong_value(where + key, held[key], or_zero=key == "rms_norm_eps")
        for where, held in places.items()
        for key in ("rope_theta", "rms_norm_eps")
        if held.get(key) is not None
    )
    return next(filter(None, told), None)


def _wrong_value(key: str, value: Any, *, or_zero: bool) -> str | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        return f"{key}: {str(error)[:120]}"
    right = 0 < number < float("inf") or (or_zero and number == 0)
    return None if right else f"{key} is {repr(value)[:60]}, not a positive number"


def read_folder(
    path: Path, target: Target | None = None, stated: Stated | None = None
) -> Checkpoint:
    """Read a drafter's folder in any of the formats. Raises DrafterError, one line.

    A folder without layer ids is read too (`ids` None), so that it can be looked at.
    """
    where = path / "config.json"
    if path.is_dir() and not where.exists():
        _point_at_epochs(path)
    config = read_json(where)
    tensors, stored = neutral_names(read_headers(path), path)
    try:
        return _checkpoint(path, config, tensors, stored, target, stated or Stated())
    except DrafterError as error:
        raise DrafterError(f"{where}: {error}") from None
    except KeyError as error:
        raise DrafterError(f"{where}: the key {error} is missing") from None
    except (TypeError, ValueError, AttributeError, OverflowError, IndexError) as error:
        raise DrafterError(f"{where}: {error}") from None


def _point_at_epochs(path: Path) -> None:
    """A trainer's output holds one folder an epoch: say which to give."""
    epochs = sorted((p.name for p in path.iterdir() if (p / "config.json").is_file()), key=len)
    if epochs:
        raise DrafterError(
            f"{path} has no config.json, but {', '.join(epochs[:5])} in it have: give one of them"
        )


def _checkpoint(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, TensorHeader],
    stored: dict[str, str],
    target: Target | None,
    stated: Stated,
) -> Checkpoint:
    old, why_old, sure = counts_outputs(config, (path / "config.py").is_file())
    midlayer = any("midlayer." in name for name in stored.values())
    form: Format = "flat-midlayer" if midlayer else "flat"
    notes: list[str] = []
    if is_speculators(config):
        form = "speculators-0.3" if old else "speculators"
        flat = hoisted(config)
        if "norm_before_residual" not in config:
            notes.append(
                "norm_before_residual is not written: the speculators library takes False, which "
                "is taken here, vLLM takes True"
            )
    else:
        flat = dict(config)
    refuse_unknown(flat, tensors)
    family = target.family if target else family_hint(config, flat, tensors)
    ids = written_ids(flat) or stated.layers
    convention, why, certain = _convention(form, flat, ids, family, stated, (why_old, sure))
    indices: tuple[int, ...] = ()
    if ids:
        marked = marked_indices(flat, ids) if stated.ids is None else None
        layers = target.layers if target else None
        indices = marked or to_index(convention, ids, family, layers)
    spec = spec_of(flat, tensors, indices)
    if convention == "specforge" and stated.ids == "specforge":
        spec = _specforge_norm(spec, flat)
    return Checkpoint(
        path=path,
        format=form,
        config=config,
        flat=flat,
        tensors=tensors,
        stored=stored,
        spec=spec,
        ids=ids,
        convention=convention,
        why=why,
        certain=certain,
        family=family,
        notes=tuple(notes),
    )


def neutral_names(
    headers: Mapping[str, TensorHeader], where: Path
) -> tuple[dict[str, TensorHeader], dict[str, str]]:
    """Tensors by neutral name, and for each the name on disk. Raises DrafterError on a clash."""
    tensors: dict[str, TensorHeader] = {}
    stored: dict[str, str] = {}
    for name, header in headers.items():
        neutral = neutral_name(name)
        if neutral in stored:
            raise DrafterError(f"{where}: tensors {stored[neutral]} and {name} are both {neutral}")
        tensors[neutral], stored[neutral] = header, name
    return tensors, stored


def neutral_name(name: str) -> str:
    """`model.midlayer.x` -> `layers.0.x`; the older names of fc_norm -> `fc_norm.i`."""
    name = name.removeprefix("model.")
    if name.startswith("midlayer."):
        return "layers.0." + name.removeprefix("midlayer.")
    for old, new in _LEGACY_NORMS.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def family_hint(
    config: Mapping[str, Any], flat: Mapping[str, Any], tensors: Mapping[str, TensorHeader]
) -> Family | None:
    """The target's family as far as the drafter's own folder shows it."""
    model = str(flat.get("model_type", ""))
    if is_speculators(config):
        names = ((config.get("speculators_config") or {}).get("verifier") or {}).get(
            "architectures"
        )
        return family_of(str(names[0])) if isinstance(names, list) and names else None
    mla = "layers.0.self_attn.kv_a_proj_with_mqa.weight" in tensors
    if mla or model.startswith(("kimi", "deepseek")):
        return "deepseek"
    return "deepseek" if flat.get("vocab_size") in _DEEPSEEK_VOCABULARIES else None


def refuse_unknown(flat: Mapping[str, Any], tensors: Mapping[str, TensorHeader]) -> None:
    """Raise DrafterError for what is written and has no place in a `DrafterSpec`."""
    if (wrong := wrong_number(flat)) is not None:
        raise DrafterError(wrong)
    layers = flat.get("num_hidden_layers", 1)
    if any(name.startswith("layers.") and not name.startswith("layers.0.") for name in tensors):
        raise DrafterError("the head has several decoder layers: only heads of one are read")
    if layers != 1:
        raise DrafterError(f"num_hidden_layers is {layers}: only heads of one layer are read")
    for key in ("attention_bias", "mlp_bias", "bias", "quantization_config"):
        if flat.get(key):
            raise DrafterError(f"{key} is set: only heads without biases, unquantised, are read")
    if flat.get("logit_scale", 1.0) not in (1, None):
        raise DrafterError(f"logit_scale is {flat['logit_scale']}: only 1 is read")
    if "sliding_attention" in (flat.get("layer_types") or ()):
        raise DrafterError("layer_types names a sliding window: only full attention is read")
    if flat.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise DrafterError("partial_rotary_factor is set: only whole heads are rotated here")
    if eagle_config(flat).get("use_aux_hidden_state") is False:
        raise DrafterError("use_aux_hidden_state is false: that is no EAGLE-3 drafter")


def _convention(
    form: Format,
    flat: Mapping[str, Any],
    ids: Sequence[int] | None,
    family: Family | None,
    stated: Stated,
    told: tuple[str, bool],
) -> tuple[Convention, str, bool]:
    """How the ids are counted, what decides it, and whether that is certain."""
    if stated.ids is not None:
        if stated.ids not in CONVENTIONS:
            raise DrafterError(f"--ids {stated.ids}: known are {', '.join(CONVENTIONS)}")
        return stated.ids, "as stated by --ids", True
    if ids and marked_indices(flat, tuple(ids)) is not None:
        reader: Convention = "sglang" if flat[MARK].get("ids_for") == "sglang" else "vllm"
        return reader, f"as the folder says itself, with the indices, in {MARK}", True
    if form == "speculators-0.3":
        return "speculators-0.3", f"{told[0]}: before 0.5 an id is a layer's output", told[1]
    if form == "speculators":
        return "vllm", f"{told[0]}: from 0.5 on ids are vLLM's", told[1]
    if form == "flat":
        return "vllm", "flat with layers.0.* names: assumed to be written for vLLM", False
    if not ids:
        return "sglang", "midlayer.* names: assumed to be written for SGLang", False
    if ids[0] == 1:
        why = "a list that begins with 1, as SpecForge writes and SGLang reads on every target"
        return "sglang", f"midlayer.* names and {why}", False
    if family is None:
        why = "midlayer.* names, target unknown: assumed as SGLang reads Llama-type targets"
        return "specforge", f"{why}; name the target with --target, or state --ids", False
    return "sglang", f"midlayer.* names: assumed to be written for SGLang, {family} target", False


def _specforge_norm(spec: DrafterSpec, flat: Mapping[str, Any]) -> DrafterSpec:
    """SpecForge's `norm_output` means a norm before lm_head, always on in an EAGLE-3 head."""
    if flat.get("norm_output") is False:
        raise DrafterError(
            "norm_output is false in SpecForge's sense (no norm before lm_head): no engine has that"
        )
    return msgspec.structs.replace(spec, norm_output=False)


def describe_ids(checkpoint: Checkpoint) -> str:
    """One sentence on the ids: as written, how counted, and why."""
    if checkpoint.ids is None:
        return (
            f"not written; {FORMAT_NAMES[checkpoint.format]} would count: "
            + (MEANING[checkpoint.convention])
        )
    assumed = "" if checkpoint.certain else "assumed; "
    return f"{list(checkpoint.ids)} in {MEANING[checkpoint.convention]} ({assumed}{checkpoint.why})"
