"""How many tokens a sequence may have: the engine's setting session_len, found where the engine finds it.

The engine may have room for fewer. It counts every prompt itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from configparser import ConfigParser
from configparser import Error as ConfigError
from pathlib import Path

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
