"""Describes a model from the same sources as the engine: the longest sequence in tokens (the setting session_len), the
longest guide, the types of the weights, and the defaults of sampling parameters.

The engine may have memory for fewer tokens. It checks the length of every prompt itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from configparser import ConfigParser
from configparser import Error as ConfigError
from pathlib import Path
from typing import Any

# generated: engine settings, from definitions/ by `make generate`
# default: maximum bytes of the schema, expression or grammar of a request with structured output
GUIDE_MAX_BYTES = 65536
# end of generated: engine settings
# generated: sampling defaults, from definitions/ by `make generate`
DEFAULT_SAMPLING: dict[str, float] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
# end of generated: sampling defaults
_ROUNDED_TYPES = {"fp8": "fp8", "w8a8": "int8", "w8a16": "int8", "w4a16": "int4"}  # by the setting quantization
_PARAMETER = r'key\s*:\s*"{}"\s*,?\s*value\s*:?\s*\{{\s*string_value\s*:\s*"([^"]*)"'


def context_length(weights: Path, engine_config: Path, environment: Mapping[str, str]) -> int | None:
    """The engine's session_len. If it is 0, the length from the training of the model. None if unknown."""
    given = setting("session_len", weights, engine_config, environment)
    return _number(given) or _number(config_section(weights / "config.ini").get("max_position_embeddings", ""))


def model_task(weights: Path) -> str:
    """The task of the model: generate, embed or score. "" if unknown."""
    return config_section(weights / "config.ini").get("model_task", "").strip()


def guide_max_bytes(weights: Path, engine_config: Path, environment: Mapping[str, str]) -> int:
    """The engine's setting guide_max_bytes."""
    return _number(setting("guide_max_bytes", weights, engine_config, environment)) or GUIDE_MAX_BYTES


def model_info(weights: Path, engine_config: Path, environment: Mapping[str, str], limit: int | None) -> dict[str, Any]:
    """The output `model_info`: `limit` from context_length(), the task, the types and the size of the vocabulary in
    config.ini of `weights`, and the engine's defaults of sampling parameters."""
    ini = config_section(weights / "config.ini")
    types = {key: ini.get(key, "").strip() or None for key in ("weight_type", "data_type")}
    quantization = setting("quantization", weights, engine_config, environment).strip() or "none"
    if quantization in _ROUNDED_TYPES:  # the engine rounds the weights while it loads them
        types = {"weight_type": _ROUNDED_TYPES[quantization], "data_type": types["data_type"] or types["weight_type"]}
    off = setting("generation_config", weights, engine_config, environment).strip() == "none"
    sampling = {
        name: default if off else type(default)(ini.get(f"default_{name}", default))
        for name, default in DEFAULT_SAMPLING.items()
    }
    sizes = {key: _number(ini.get(key, "")) for key in ("group_size", "vocab_size")}
    return {
        "context_length": limit,
        "task": model_task(weights) or None,
        **types,
        **sizes,
        "quantization": quantization,
        "default_sampling_parameters": sampling,
    }


def setting(key: str, weights: Path, engine_config: Path, environment: Mapping[str, str]) -> str:
    """A setting from the environment, else from the parameters in the engine's config.pbtxt, else from config.ini in
    `weights`. "" if none of them has it."""
    ini = config_section(weights / "config.ini")
    given = (environment.get(f"CHARONIA_{key.upper()}", ""), _parameter(engine_config, key), ini.get(key, ""))
    return next((value for value in given if value.strip()), "")


def config_section(file: Path) -> Mapping[str, str]:
    parser = ConfigParser(interpolation=None, strict=False)
    try:
        parser.read(file, encoding="utf-8")
    except (ConfigError, UnicodeDecodeError, OSError):  # the engine reports the error
        return {}
    return parser["llama"] if parser.has_section("llama") else {}


def _parameter(config: Path, key: str) -> str:
    if not config.is_file():
        return ""
    lines = config.read_text(encoding="utf-8", errors="replace").splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    found = re.search(_PARAMETER.format(key), text, re.DOTALL)
    return found.group(1) if found else ""


def _number(text: str) -> int | None:
    """The number, or None for 0 and for a text that is not a number."""
    return int(text) or None if text.strip().isdecimal() else None
