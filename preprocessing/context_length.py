"""What a model is, found where the engine finds it: how many tokens a sequence may have, which is the engine's setting
session_len, and the types of its weights.

The engine may have room for fewer tokens. It counts every prompt itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from configparser import ConfigParser
from configparser import Error as ConfigError
from pathlib import Path
from typing import Any

_VARIABLE = "CHARONIA_SESSION_LEN"
_PARAMETER = re.compile(r'key\s*:\s*"session_len"\s*,?\s*value\s*:?\s*\{\s*string_value\s*:\s*"(\d+)"', re.DOTALL)


def context_length(weights: Path, engine_config: Path, environment: Mapping[str, str]) -> int | None:
    """session_len by the environment, else by the parameters in the engine's config.pbtxt, else by config.ini in
    `weights`; 0 there: what the model was trained for. None where nothing says it."""
    ini = _section(weights / "config.ini")
    for value in (environment.get(_VARIABLE, ""), _parameter(engine_config), ini.get("session_len", "")):
        if value.strip():
            given = _number(value)
            return given or _number(ini.get("max_position_embeddings", ""))
    return _number(ini.get("max_position_embeddings", ""))


def model_info(weights: Path, limit: int | None) -> dict[str, Any]:
    """What the output `model_info` says: limit, of context_length(), and types as config.ini in `weights` has them."""
    ini = _section(weights / "config.ini")
    types = {key: ini.get(key, "").strip() or None for key in ("weight_type", "data_type")}
    return {"context_length": limit, **types, "group_size": _number(ini.get("group_size", ""))}


def _section(file: Path) -> Mapping[str, str]:
    parser = ConfigParser(interpolation=None, strict=False)
    try:
        parser.read(file, encoding="utf-8")
    except (ConfigError, UnicodeDecodeError, OSError):  # which the engine says
        return {}
    return parser["llama"] if parser.has_section("llama") else {}


def _parameter(config: Path) -> str:
    if not config.is_file():
        return ""
    lines = config.read_text(encoding="utf-8", errors="replace").splitlines()
    found = _PARAMETER.search("\n".join(line for line in lines if not line.lstrip().startswith("#")))
    return found.group(1) if found else ""


def _number(text: str) -> int | None:
    """None for what is none, and for 0."""
    return int(text) or None if text.strip().isdecimal() else None
