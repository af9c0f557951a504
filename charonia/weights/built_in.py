"""The models that a checkout and the container image have under a name: MODEL=smollm2 and MODEL=demo."""

from __future__ import annotations

import contextlib
import difflib
from pathlib import Path

from charonia.errors import ModelError
from charonia.triton_models import source_dir

SMOLLM2, DEMO = "smollm2", "demo"
_PLACES = {SMOLLM2: "smollm2/model.gguf", DEMO: "demo/model"}
_IMAGE = Path("/usr/share/charonia")  # docker/server.Dockerfile


def did_you_mean(name: str) -> str:
    """Return a question about a built-in model with a similar name, for the end of an error; empty if there is none."""
    near = difflib.get_close_matches(name.lower(), _PLACES, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def built_in(name: str) -> Path | None:
    """Return the place of a built-in model; None for another name, and for a model that is not here."""
    if name not in _PLACES:
        return None
    folders = [_IMAGE]
    with contextlib.suppress(ModelError):  # an incomplete installation, which other commands report
        folders.insert(0, source_dir() / "models")
    return next((path for folder in folders if (path := folder / _PLACES[name]).exists()), None)
