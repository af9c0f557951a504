"""Finds GGUF files in folders."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from charonia.errors import ModelError
from charonia.gguf.reader import shards_of

SUFFIX = ".gguf"
LINK = "weights-{:05}-of-{:05}.gguf"  # in an unpacked folder, to the parts of the model
_MAGIC = b"GGUF"


def model_file(folder: Path) -> Path | None:
    """Return the first file of the model in an unpacked folder; None for other folders."""
    return next(iter(sorted(folder.glob("weights-00001-of-*.gguf"))), None)


def is_gguf(file: Path) -> bool:
    """Whether a file is in GGUF. Ollama's files have no suffix."""
    if file.suffix == SUFFIX:
        return True
    with suppress(OSError), file.open("rb") as stream:
        return stream.read(len(_MAGIC)) == _MAGIC
    return False


def only_model_in(folder: Path) -> Path | None:
    """Return the first file of the only GGUF model in a folder; None if there is none. Raises ModelError if there are
    several models."""
    models = sorted({shards_of(file)[0] for file in folder.glob(f"*{SUFFIX}") if not file.name.startswith("mmproj")})
    if len(models) > 1:
        names = ", ".join(model.name for model in models[:5])
        raise ModelError(f"{folder} has several GGUF models ({names}): name one of the files")
    return models[0] if models else None
