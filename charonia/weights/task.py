"""The task of a model: text, embeddings or scores. sentence-transformers' files and config.json name it.

An embedding is the hidden state of the last token after the final norm, or the mean of those of all tokens. A score
comes from an output layer with one or two rows: a classification head, or the rows of the output layer for tokens such
as "no" and "yes".
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from charonia import _engine
from charonia.errors import ModelError, UnsupportedError
from charonia.families import HfConfig, ModelConfig, ModelSpec, TensorPart
from charonia.json_files import read_json

_MODULES = "modules.json"
_OF_SENTENCES = "config_sentence_transformers.json"
_OF_TRANSFORMER = "sentence_bert_config.json"
_POOLING_MODE = "pooling_mode_"  # before the names of pooling; the value says whether it is used
_POOLINGS = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}  # of sentence-transformers, and the engine's
_POOLING_KEYS = {"word_embedding_dimension", "embedding_dimension", "include_prompt", "pooling_mode"}
_SCORE_KEYS = {"true_token_id", "false_token_id", "module_input_name"}
# Keys that are read, or that do not change an embedding or score of a given text.
_SENTENCE_KEYS = {"__version__", "model_type", "prompts", "similarity_fn_name", "default_prompt_name", "activation_fn"}
_TRANSFORMER_KEYS = {"max_seq_length", "transformer_task", "modality_config", "module_output_name", "unpad_inputs"}
# The modules of sentence-transformers, in their order.
_CHAINS = (
    ("Transformer",),
    ("Transformer", "Pooling"),
    ("Transformer", "Pooling", "Normalize"),
    ("Transformer", "LogitScore"),
)
_BARE = re.compile(r"(?!ChatGLM)\w+(?<!LMHead)Model")  # architectures without an output layer
_CLASSIFIER = "ForSequenceClassification"


def setting_of(settings: Mapping[str, str]) -> str:
    """Return the setting `task`. Raises InvalidRequestError for an unknown task."""
    task = settings.get("task", "auto")
    _engine.check_settings({"task": task})
    return task


def with_task(folder: Path, spec: ModelSpec, config: HfConfig, task: str) -> ModelSpec:
    """Return the spec for a task; auto: the task that the files name. Raises UnsupportedError for an embedding or a
    score that the engine does not compute, with the file and its value."""
    if task == "generate":
        return spec
    modules = _modules(folder)
    architecture = str((config.get("architectures") or [""])[0])
    classifies = architecture.endswith(_CLASSIFIER)
    if task == "auto":
        scores = "LogitScore" in modules or classifies
        embeds = "Pooling" in modules or bool(_BARE.fullmatch(architecture))
        if not scores and not embeds:
            return spec
        task = "score" if scores else "embed"
        _check_code(config, architecture, task)
    settings = _sentence_settings(folder)
    spec = _with_transformer(folder / _OF_TRANSFORMER, spec, modules)
    name = settings.get("default_prompt_name")
    prompt = str((settings.get("prompts") or {}).get(name) or "")
    if task == "embed":
        if prompt:
            raise UnsupportedError(
                f"{folder / _OF_SENTENCES}: default_prompt_name {name!r} puts {prompt!r} before every text, which is "
                "not supported: set it to null, and let clients send the prompt in their texts"
            )
        pooling = "last"
        if "Pooling" in modules:
            pooling = _pooling(folder / modules["Pooling"] / "config.json", spec.config.hidden_units)
        normal = "Pooling" not in modules or "Normalize" in modules
        return _without_output(spec, model_task="embed", pooling=pooling, normalize_embedding=normal)
    sigmoid = _has_sigmoid(config, settings)
    spec = replace(spec, instruction=prompt)
    if classifies:
        return _with_head(spec, config, sigmoid)
    tokens = _score_tokens(folder, spec.config, modules.get("LogitScore"))
    own = replace(spec.config, model_task="score", score_labels=len(tokens), score_sigmoid=sigmoid)
    return replace(spec, config=own, score_tokens=tokens)


def with_score_rows(spec: ModelSpec) -> ModelSpec:
    """Return the spec whose output layer has only the rows of `score_tokens`."""
    if not spec.score_tokens:
        return spec
    (whole,) = spec.tensors.get("output.weight", spec.tensors["tok_embeddings.weight"])
    rows = tuple(replace(whole, rows=(token, token + 1)) for token in spec.score_tokens)
    untied = replace(spec.config, tie_word_embeddings=False)
    return replace(spec, config=untied, tensors={**spec.tensors, "output.weight": rows}, tied_output="")


def _modules(folder: Path) -> dict[str, str]:
    """Return the folders of sentence-transformers' modules by their class; empty if there are none."""
    file = folder / _MODULES
    if not file.is_file():
        return {}
    try:
        listed = [(str(one["type"]), str(one["path"])) for one in json.loads(file.read_text(encoding="utf-8"))]
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{file} must be a JSON list of objects with type and path: {error}") from error
    kinds = tuple(name.rpartition(".")[2] for name, _ in listed)
    known = {kind for chain in _CHAINS for kind in chain}
    for (name, _), kind in zip(listed, kinds, strict=True):
        if not name.startswith("sentence_transformers.") or kind not in known:
            raise UnsupportedError(
                f"{file}: the module {name} is not supported; supported: {', '.join(sorted(known))} of "
                "sentence_transformers"
            )
    if kinds not in _CHAINS:
        chains = " or ".join(", ".join(chain) for chain in _CHAINS)
        raise UnsupportedError(
            f"{file}: the modules {', '.join(kinds)} are not supported together; supported: {chains}"
        )
    return {kind: path for kind, (_, path) in zip(kinds, listed, strict=True)}


def _check_code(config: HfConfig, architecture: str, task: str) -> None:
    """Check that the model has transformers' class of its family, which has the name of the model_type. Another class
    may compute attention in both directions."""
    model_type = str(config.get("model_type"))
    named, expected = (text.replace("_", "").lower() for text in (architecture, model_type))
    ending = _CLASSIFIER.lower() if named.endswith(_CLASSIFIER.lower()) else "model"
    is_bare = _BARE.fullmatch(architecture) or architecture.endswith(_CLASSIFIER)
    own = {"AutoModel", f"AutoModel{_CLASSIFIER}"} & set(config.get("auto_map") or ())
    if own or (is_bare and named != expected + ending):
        why = f"auto_map names code of its own for {min(own)}" if own else "it is not a class of that family"
        raise UnsupportedError(
            f"config.json: the architecture {architecture} with model_type {model_type} may compute something else "
            f"than {model_type}, because {why}: set task = {task} if both compute the same"
        )


def _check_keys(file: Path, settings: Mapping[str, Any], known: set[str]) -> None:
    """Raise UnsupportedError for a key that may change results."""
    for key, value in settings.items():
        if key not in known and value:
            raise UnsupportedError(
                f"{file}: the key {key} ({value!r}) is not supported: remove it if it changes no embedding and no score"
            )


def _sentence_settings(folder: Path) -> dict[str, Any]:
    """Return config_sentence_transformers.json; empty if there is none."""
    file = folder / _OF_SENTENCES
    settings = read_json(file) if file.is_file() else {}
    _check_keys(file, settings, _SENTENCE_KEYS)
    return settings


def _with_transformer(file: Path, spec: ModelSpec, modules: Mapping[str, str]) -> ModelSpec:
    """Check the settings of the module Transformer. The notes of the result name a shorter length."""
    settings = read_json(file) if file.is_file() else {}
    _check_keys(file, settings, _TRANSFORMER_KEYS)
    text = (settings.get("modality_config") or {}).get("text")
    wanted = {"method": "forward", "method_output_name": "last_hidden_state" if "Pooling" in modules else "logits"}
    if modules and text and text != wanted:
        raise UnsupportedError(f"{file}: modality_config.text = {text} is not supported; supported: {wanted}")
    longest = settings.get("max_seq_length")
    if not isinstance(longest, int) or longest >= spec.config.max_position_embeddings:
        return spec
    note = (
        f"{file}: sentence-transformers cuts texts to max_seq_length = {longest} tokens, Charonia does not: set "
        f"session_len = {longest} to reject longer texts"
    )
    return replace(spec, notes=(*spec.notes, note))


def _has_sigmoid(config: HfConfig, settings: Mapping[str, Any]) -> bool:
    """Whether a score is the sigmoid of its logit. settings: config_sentence_transformers.json."""
    older = (config.get("sentence_transformers") or {}).get("activation_fn")
    older = older or config.get("sbert_ce_default_activation_function")
    activation = str(settings.get("activation_fn") or older or "Sigmoid")
    package, _, kind = activation.rpartition(".")
    if kind not in ("Sigmoid", "Identity") or not f"{package}.".startswith(("torch.nn.", ".")):
        raise UnsupportedError(
            f"{_OF_SENTENCES} or config.json: activation_fn {activation!r} is not supported; supported: Sigmoid, "
            "Identity"
        )
    return kind == "Sigmoid"


def _pooling(file: Path, hidden: int) -> str:
    settings = read_json(file)
    named = settings.get("pooling_mode")
    modes = [named] if isinstance(named, str) else list(named or [])
    old = {key for key in settings if key.startswith(_POOLING_MODE)}
    _check_keys(file, settings, old | _POOLING_KEYS)
    modes += [key.removeprefix(_POOLING_MODE) for key in sorted(old) if settings[key]]
    if len(set(modes)) != 1 or modes[0] not in _POOLINGS:
        found = ", ".join(map(str, modes)) or "none"
        raise UnsupportedError(f"{file}: pooling {found} is not supported; supported: one of {', '.join(_POOLINGS)}")
    size = settings.get("word_embedding_dimension", settings.get("embedding_dimension", hidden))
    if size != hidden:
        raise ModelError(f"{file}: the embedding has {size} numbers, but config.json says hidden_size {hidden}")
    pooling = _POOLINGS[modes[0]]
    if pooling == "mean" and not settings.get("include_prompt", True):
        raise UnsupportedError(
            f"{file}: include_prompt = false leaves the tokens of prompts out of the mean, which is not supported: set "
            "it to true if texts have no prompt"
        )
    return pooling


def _without_output(spec: ModelSpec, **own: Any) -> ModelSpec:
    """Return the spec without the output layer. Names in the files may lack the prefix of the base model (`model.`)."""
    output = spec.tensors.get("output.weight")
    name = output[0].name if output else spec.tied_output
    ignored = (*spec.ignored, name.removesuffix("weight")) if name else spec.ignored
    tensors = {ours: parts for ours, parts in spec.tensors.items() if ours != "output.weight"}
    base = tensors["tok_embeddings.weight"][0].name.partition(".")[0]
    config = replace(
        spec.config, tie_word_embeddings=False, normalize_output=False, logits_scale=1.0, logit_soft_cap=0.0, **own
    )
    prefixes = (*spec.prefixes, ("", f"{base}."))
    return replace(spec, config=config, tensors=tensors, prefixes=prefixes, ignored=ignored, tied_output="")


def _with_head(spec: ModelSpec, config: HfConfig, sigmoid: bool) -> ModelSpec:
    """Return the spec with a head for sequence classification."""
    labels = config.get("num_labels") or len(config.get("id2label") or "12")  # transformers' default is 2
    if labels != 1:
        raise UnsupportedError(
            f"config.json: a classifier with {labels} labels (num_labels, id2label) is not supported; supported: 1, a "
            "reranker"
        )
    without = _without_output(spec, model_task="score", score_labels=1, score_sigmoid=sigmoid)
    head = (TensorPart("score.weight", (1, spec.config.hidden_units)),)
    return replace(without, tensors={**without.tensors, "output.weight": head}, prefixes=spec.prefixes)


def _score_tokens(folder: Path, config: ModelConfig, module: str | None) -> tuple[int, ...]:
    """Return the tokens whose logits make the score: one, or those for a low and for a high score. module: the folder
    of LogitScore, which names them; None: the tokens are no and yes."""
    if module is not None:
        file = folder / module / "config.json"
        settings = read_json(file)
        _check_keys(file, settings, _SCORE_KEYS)
        if (source := settings.get("module_input_name", "causal_logits")) != "causal_logits":
            raise UnsupportedError(f"{file}: module_input_name {source!r} is not supported; supported: 'causal_logits'")
        given = [settings.get(key) for key in ("false_token_id", "true_token_id")]
        tokens = [token for token in given if token is not None]
        if given[1] is None or not all(isinstance(one, int) and 0 <= one < config.vocab_size for one in tokens):
            raise ModelError(
                f"{file}: true_token_id and false_token_id are {given[::-1]}; they must be token ids below "
                f"{config.vocab_size}"
            )
        return tuple(tokens)
    from charonia.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(folder)
    found = [tokenizer.backend_tokenizer.token_to_id(word) for word in ("no", "yes")]
    if None in found:
        raise UnsupportedError(
            f"{folder}: task = score needs the tokens no and yes in the vocabulary, a 1_LogitScore module that names "
            "other tokens, or a model with the architecture ...ForSequenceClassification"
        )
    return tuple(token for token in found if token is not None)
