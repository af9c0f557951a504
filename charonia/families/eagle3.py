"""EAGLE-3 heads, which propose tokens for a model (docs/speculation.md): repositories of EAGLE's authors, and of
`speculators`, whose config.json has the layer's settings in transformer_layer_config."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from charonia.errors import ModelError, UnsupportedError
from charonia.families import llama, qwen2
from charonia.families.config_keys import READ_BY_ALL, check_keys
from charonia.families.hf_config import optional, required
from charonia.families.names import Names, family_tensors
from charonia.families.spec import HfConfig, ModelConfig, ModelSpec, TensorMap, TensorPart

OFFSETS = "d2t"  # the tensor with the difference of each draft token and the model's token
_KIND, _LAYER, _LAYERS = "speculators_model_type", "transformer_layer_config", "eagle_aux_hidden_state_layer_ids"
_FAMILY = "EAGLE-3 heads"
_EMBEDDING = "tok_embeddings.weight"
_NAMES = Names(layer="layers.{}.", embedding="embed_tokens", norm="norm", output="lm_head")
_PREFIXES = (("model.midlayer.", "layers.0."), ("midlayer.", "layers.0."), ("model.", ""))
_FLAGS = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
_READ = frozenset({_KIND, _LAYERS, *_FLAGS, "draft_vocab_size", "eagle_config", "speculators_config"})
_READ |= {"target_hidden_size"}
_HARMLESS = frozenset({"embed_requires_grad", "has_no_defaults_at_init", "speculators_version"})
_ONLY: dict[str, Any] = {"num_aux_hidden_states": (3,), "num_hidden_layers": (1,)}


def is_head(config: HfConfig) -> bool:
    """Whether config.json describes a head, and not a model."""
    names = config.get("architectures")
    named = isinstance(names, list) and any("eagle3" in str(name).lower() for name in names)
    return named or _KIND in config or "draft_vocab_size" in config


def describe_head(config: HfConfig, model_name: str) -> ModelSpec:
    """Map config.json to the engine's description. Raises UnsupportedError and ModelError as families.describe()."""
    if config.get(_KIND, "eagle3") != "eagle3":
        raise UnsupportedError(f"config.json: {_KIND} {config[_KIND]!r} is not supported; supported: 'eagle3'")
    layer = config.get(_LAYER) or {}
    if not isinstance(layer, dict):
        raise ModelError(f"config.json: {_LAYER} {layer!r} must be an object")
    inner = config.get("eagle_config") or {}
    if not isinstance(inner, dict):
        raise ModelError(f"config.json: eagle_config {inner!r} must be an object")
    inner_flags = {key: value for key, value in inner.items() if key in _FLAGS}
    flat = {**inner_flags, **layer, **{key: value for key, value in config.items() if key != _LAYER}}
    if _LAYER in config:
        flat["model_type"] = layer.get("model_type", "llama")
    bases = {name: family for family in (llama.FAMILY, qwen2.QWEN3) for name in family.model_types}
    base = bases.get(str(flat.get("model_type", "llama")))
    if base is None:
        raise UnsupportedError(
            f"config.json: model_type {flat['model_type']!r} is not supported for {_FAMILY}; supported: "
            f"{', '.join(sorted(bases))}"
        )
    read = (READ_BY_ALL | base.keys | _READ) - _ONLY.keys()
    unknown = check_keys(flat, read, base.harmless | _HARMLESS, _FAMILY, {**base.only, **_ONLY})
    described = base.describe({**flat, "num_hidden_layers": 1, "tie_word_embeddings": False})
    flags = {name: optional(flat, name, False) for name in _FLAGS}
    if flags["fc_norm"] and flags["norm_before_fc"]:
        raise UnsupportedError(
            "config.json: fc_norm and norm_before_fc are both true, and a head has one of the two norms"
        )
    vocab, hidden = described.config.vocab_size, described.config.hidden_units
    layers = _layers(flat, inner)
    model = replace(
        described.config,
        model_name=model_name,
        model_family="eagle3",
        target_model=_verifier(config),
        target_hidden_units=required({"target_hidden_size": hidden, **_given(flat)}, "target_hidden_size"),
        target_layers=layers,
        draft_vocab_size=required({"draft_vocab_size": vocab, **_given(flat)}, "draft_vocab_size"),
        norm_before_residual=flags["norm_before_residual"],
        norm_output=flags["norm_output"],
        fused_norm="parts" if flags["fc_norm"] else "whole" if flags["norm_before_fc"] else "none",
    )
    notes = [f"config.json has unknown keys, which are ignored: {', '.join(unknown)}"] if unknown else []
    if not layers:
        notes.append(
            f"config.json has no {_LAYERS}: {model_name} is assumed to read layers 2, n / 2 and n - 3 of n layers. If "
            "it was trained with other layers, few of its proposals are accepted"
        )
    elif layers[0] == 1:
        notes.append(
            f"{_LAYERS} {list(layers)} are taken as the inputs of these layers. If they are outputs, few proposals are "
            f"accepted: write {[one + 1 for one in layers]}"
        )
    ignored = (OFFSETS, "t2d", "verifier_lm_head.", "verifier_norm.")
    return ModelSpec(model, _tensors(model), prefixes=_PREFIXES, ignored=ignored, notes=tuple(notes))


def _verifier(config: HfConfig) -> str:
    """Return the hub id or folder of the model that the head was trained for; "" if config.json does not say."""
    found: Any = config
    for key in ("speculators_config", "verifier", "name_or_path"):
        found = found.get(key) if isinstance(found, dict) else None
    if not isinstance(found, str) or not found.isprintable():
        return ""
    # Folder of the hub's cache: models--owner--name/snapshots/<commit>
    cached = re.search(r"models--([^/]+)/snapshots/[^/]+/?$", found)
    return cached[1].replace("--", "/") if cached else found.rstrip("/")


def _given(config: HfConfig) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not None}


def with_own_embedding(spec: ModelSpec, tensors: Collection[str]) -> ModelSpec:
    """Return the spec of a head without an embedding, if the files have none: then the head reads the model's. Raises
    UnsupportedError for a head without an output layer."""
    output = spec.tensors["output.weight"][0].name
    if output not in tensors:
        raise UnsupportedError(
            f"tensor {output} is missing: a head that uses the output layer of the model is not supported"
        )
    if spec.tensors[_EMBEDDING][0].name in tensors:
        return spec
    return replace(spec, tensors={name: parts for name, parts in spec.tensors.items() if name != _EMBEDDING})


def _layers(config: HfConfig, inner: HfConfig) -> tuple[int, ...]:
    """Return the layers of the model whose inputs the head reads; empty: config.json does not say. inner: its
    eagle_config."""
    for key, value in inner.items():
        if key not in (_LAYERS, "use_aux_hidden_state", *_FLAGS) or (
            key == "use_aux_hidden_state" and value is not True
        ):
            raise UnsupportedError(f"config.json: eagle_config.{key} {value!r} is not supported for {_FAMILY}")
    layers = config.get(_LAYERS) or inner.get(_LAYERS) or []
    if not isinstance(layers, list) or not all(type(one) is int and one >= 0 for one in layers):
        raise ModelError(f"config.json: {_LAYERS} {layers!r} must be a list of layer indices")
    if len(layers) not in (0, 3):
        raise UnsupportedError(f"config.json: {_LAYERS} {layers} must have 3 layers")
    if not config.get(_LAYERS) and layers and layers[0] == 1:
        raise UnsupportedError(
            f"config.json: eagle_config.{_LAYERS} {layers} has two meanings: the inputs of these layers, or their "
            f"outputs. In a copy of the folder, write the inputs as {_LAYERS} into config.json, outside of "
            f"eagle_config: {[one + 1 for one in layers]} if the head was trained with SpecForge, {layers} if its "
            "program means inputs"
        )
    return tuple(layers)


def _tensors(model: ModelConfig) -> TensorMap:
    """Return the tensors of a head by their canonical names (docs/contracts.md)."""
    hidden, qkv = model.hidden_units, "layers.0.attention.w_qkv.0.weight"
    out = family_tensors(model, _NAMES)
    joined = tuple(replace(part, shape=(part.shape[0], 2 * hidden)) for part in out[qkv])
    of_embedding = out.pop("layers.0.attention_norm.weight")
    target = model.target_hidden_units
    norms = {
        "none": (),
        "whole": (TensorPart("input_norm.weight", (3 * target,)),),
        "parts": tuple(TensorPart(f"fc_norm.{index}.weight", (target,)) for index in range(3)),
    }[model.fused_norm]
    return {
        **out,
        **({"fused_norm.weight": norms} if norms else {}),
        qkv: joined,
        "output.weight": (TensorPart("lm_head.weight", (model.draft_vocab_size, hidden)),),
        "fc.weight": (TensorPart("fc.weight", (hidden, 3 * target)),),
        "enorm.weight": of_embedding,
        "hnorm.weight": (TensorPart("layers.0.hidden_norm.weight", (hidden,)),),
    }
