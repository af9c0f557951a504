"""Sampling defaults from a model's generation_config.json. They become attributes of the model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from charonia import _engine
from charonia.errors import InvalidRequestError, ModelError
from charonia.json_files import read_json

FILE = "generation_config.json"
PREFIX = "default_"


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """Read temperature, top_k and others, with the names of ModelConfig: default_temperature, default_top_k.

    Missing or null keys are omitted; so are all keys if the file is missing. do_sample has no effect: a temperature
    counts even with `do_sample: false`. Raises ModelError for a value that is out of range.
    """
    file = folder / FILE
    content = read_json(file) if file.is_file() else {}
    found: dict[str, Any] = {}
    for field in _engine.config_fields():
        name = field.key.removeprefix(PREFIX)
        value = content.get(name)
        if not (field.model_attribute and field.key.startswith(PREFIX)) or value is None:
            continue
        if name == "top_k" and value == -1:  # vLLM's value for all tokens
            value = 0
        if not _is_valid(field, value):
            kind = "a whole number" if field.kind == "int" else "a number"
            raise ModelError(
                f"{file}: {name} is {value!r} and must be {kind} {field.range}: correct it, or remove it from the file"
            )
        found[field.key] = value
    return found


def _is_valid(field: _engine.ConfigField, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if field.kind == "int" else int | float):
        return False
    try:
        _engine.check_settings({field.key: str(value)})
    except InvalidRequestError:
        return False
    return math.isfinite(value)
