"""Unpacks what a GGUF file has besides weights into a Hugging Face folder with links to the file, so that all commands
use it like any other model folder."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from charonia import disk
from charonia.errors import CharoniaError, ModelError, as_given
from charonia.generation_config import FILE, PREFIX, sampling_defaults
from charonia.gguf.config import generation_config, hf_config
from charonia.gguf.folder_names import LINK, only_model_in
from charonia.gguf.reader import GgufFile, read_gguf, shards_of, stem_of
from charonia.gguf.tokenizer import write_tokenizer
from charonia.settings import read_settings
from charonia.text import sentencepiece_model


def unpack(file: Path) -> Path:
    """Return the folder of a GGUF file under CHARONIA_RUN_DIR; make it if the file or this package has changed.

    Raises ModelError or UnsupportedError if the file cannot be used.
    """
    files = [one.resolve() for one in shards_of(file)]
    cache = read_settings().run_dir.expanduser() / "gguf"
    beside = file.parent.resolve()
    # A file may have several paths with links: other names, and other sampling defaults beside it.
    of_path = hashlib.sha256(os.fsencode(f"{files[0]}\n{beside}\n{_name_of(file)}")).hexdigest()[:8]
    sampling = [beside / FILE] if _is_alone(file) else []
    folder = cache / f"{of_path}-{_fingerprint([*files, *sampling])}" / _name_of(file)
    if folder.is_dir():
        return folder
    with disk.explained(cache, str(folder)):
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".gguf-", dir=cache) as temporary:
            made = Path(temporary, "made")
            (made / folder.name).mkdir(parents=True)
            with _explained(file):
                _write(read_gguf(file), files, sampling_defaults(beside) if sampling else {}, made / folder.name)
            for old in cache.glob(f"{of_path}-*"):
                if old != folder.parent:  # another process may just have made it
                    shutil.rmtree(old, ignore_errors=True)
            try:
                made.rename(folder.parent)
            except OSError:
                if not folder.is_dir():  # otherwise another process has just made it
                    raise
    return folder


def _name_of(file: Path) -> str:
    """Return the name of the model, which is its name for clients."""
    name = stem_of(file)
    return name if name not in ("", ".", "..", "model") else file.absolute().parent.name or "gguf"


def _is_alone(file: Path) -> bool:
    """Whether a folder has no other GGUF model, so that a generation_config.json in it is the model's."""
    with suppress(ModelError):
        return only_model_in(file.parent) == shards_of(file)[0]
    return False


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    """Translate errors about wrong metadata: values may have any type, and `tokenizers` raises Exception. Each error
    names the file."""
    try:
        yield
    except CharoniaError as error:
        text = str(error)
        for part in shards_of(file):
            text = as_given(text, part.resolve(), str(part))
        raise type(error)(text if str(file) in text else f"{file}: {text}", error.status) from error
    except OSError:
        raise
    except Exception as error:
        raise ModelError(
            f"{file} has metadata that cannot be used ({type(error).__name__}: {str(error)[:200]}): download it again, "
            "or use a file of a newer converter"
        ) from error


def _fingerprint(files: list[Path]) -> str:
    """Return digits that change when a file of the model or of this package changes."""
    digest = hashlib.sha256()
    for code in (*sorted(Path(__file__).parent.glob("*.py")), Path(sentencepiece_model.__file__)):
        digest.update(code.read_bytes())
    for file in filter(Path.is_file, files):
        status = file.stat()
        digest.update(f"{file} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def _write(model: GgufFile, files: list[Path], sampling: Mapping[str, Any], folder: Path) -> None:
    """sampling: defaults beside the model, which override the defaults in the file; keys as of sampling_defaults()."""

    def values(name: str) -> list[float]:
        tensor = model.tensors[name]
        if tensor.type != "F32":
            raise ModelError(f"{tensor.file}: tensor {name} is of type {tensor.type}, expected F32")
        with tensor.file.open("rb") as stream:
            stream.seek(tensor.begin)
            return list(array("f", stream.read(tensor.end - tensor.begin)))

    (folder / "config.json").write_text(json.dumps(hf_config(model, values), indent=2), encoding="utf-8")
    beside = {key.removeprefix(PREFIX): value for key, value in sampling.items()}
    if defaults := {**generation_config(model), **beside}:
        (folder / FILE).write_text(json.dumps(defaults), encoding="utf-8")
    write_tokenizer(model.metadata, folder)
    for index, file in enumerate(files):
        (folder / LINK.format(index + 1, len(files))).symlink_to(file)
