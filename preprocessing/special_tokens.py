"""The special tokens of the table of tokens that `charonia convert` writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


def read_special_tokens(file: Path) -> dict[str, int]:
    """Their ids, by how they are written: those that are no part of a text for the engine and for `parsing`, too."""
    tensors = load_file(file)
    raw, offsets = tensors["bytes"].tobytes(), tensors["offsets"]
    found = {}
    for token in np.flatnonzero(tensors["special"]).tolist():
        if text := raw[offsets[token] : offsets[token + 1]].decode("utf-8", "replace"):
            found[text] = token
    return found
