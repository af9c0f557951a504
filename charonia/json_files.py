"""Reads JSON files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from charonia.errors import ModelError


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ModelError if the file is missing or contains something else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{file} is missing") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} must contain a JSON object")
    return content
