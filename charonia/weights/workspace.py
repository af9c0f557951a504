"""The workspace: its layout, manifest and config.ini, and finding the model that a path names."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from charonia import __version__, _engine, disk
from charonia.errors import ModelError, named_as_given
from charonia.families import Quantization
from charonia.gguf.folder_names import SUFFIX, is_gguf, model_file, only_model_in
from charonia.json_files import read_json
from charonia.weights import hub
from charonia.weights.built_in import SMOLLM2, built_in
from charonia.weights.tensor_parallel import rank_of

FORMAT_VERSION = 3
TRITON_MODELS = ("preprocessing", "engine", "postprocessing", "ensemble")
WEIGHTS = Path("triton_models", "weights")
TOKENIZER = Path("triton_models", "tokenizer")
TOKEN_TABLE = "token_table.safetensors"
TOKEN_SPLIT = "token_split.safetensors"
DRAFT_TOKENS = "draft_tokens.safetensors"  # of an EAGLE-3 head
NOTES = "notes.txt"
# A file that never changes: servers of the workspace hold a lock on it.
LOCKED = Path("triton_models", "ensemble", "config.pbtxt")


@dataclass
class Manifest:
    """manifest.json, which describes the weights folder. See docs/contracts.md."""

    source: str
    ranks: int = 1
    weights: str = ""  # fingerprint of the files in `source`
    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # path -> bytes and, if computed, sha256
    layers: list[dict[str, Any]] = field(default_factory=list)  # the attributes of each layer
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)  # by canonical name
    quality: list[dict[str, Any]] = field(default_factory=list)  # see quality_record.py
    modules: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # see adapted_modules.py
    module_prefixes: list[list[str]] = field(default_factory=list)  # ModelSpec.prefixes
    mtp_layers: list[dict[str, Any]] = field(default_factory=list)  # the MTP layer, if its tensors are there
    kv_cache: dict[str, str] = field(default_factory=dict)  # see cache_warnings.py

    def add(
        self,
        name: str,
        dtype: str,
        shape: Sequence[int],
        parts: Sequence[Mapping[str, Any]] = (),
        how: Quantization | None = None,
    ) -> None:
        """Add a tensor of safetensors' type `dtype`; for a quantised one, `how`, the type of its codes. parts: stacked
        along dimension 0; each has file, name and, if they differ from the file's tensor, dtype, rows and cols. A
        manifest that only describes the size of a model has no parts."""
        rank = rank_of(name)
        self.tensors[name] = {
            **({} if rank is None else {"rank": rank}),
            "dtype": dtype,
            "shape": list(shape),
            **({"quantization": how.entry()} if how else {}),
            **({"parts": list(parts)} if parts else {}),
        }

    def save(self, weights: Path) -> None:
        content = {
            "format_version": FORMAT_VERSION,
            "charonia_version": __version__,
            "source": self.source,
            "ranks": self.ranks,
            "weights": self.weights,
            "files": self.files,
            "layers": self.layers,
            **({"mtp_layers": self.mtp_layers} if self.mtp_layers else {}),
            "tensors": self.tensors,
            **({"kv_cache": self.kv_cache} if self.kv_cache else {}),
            **({"quality": self.quality} if self.quality else {}),
            **({"modules": self.modules, "module_prefixes": self.module_prefixes} if self.modules else {}),
        }
        text = ",\n".join(f"{json.dumps(key)}: {_lines(value)}" for key, value in content.items())
        (weights / "manifest.json").write_text(f"{{\n{text}\n}}\n", encoding="utf-8")


def _lines(value: Any) -> str:
    """Return a value as JSON, with one line for each entry of a list or an object."""
    if isinstance(value, dict):
        entries = [f"{json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items()]
    elif isinstance(value, list):
        entries = [json.dumps(entry) for entry in value]
    else:
        return json.dumps(value)
    first, last = ("{", "}") if isinstance(value, dict) else ("[", "]")
    return "\n  ".join([first, ",\n  ".join(entries)]) + f"\n{last}" if entries else first + last


@dataclass(frozen=True)
class Location:
    """The content of a path: `weights` for a workspace or a weights folder, otherwise a Hugging Face folder."""

    path: Path
    weights: Path | None = None
    tokenizer: Path | None = None  # the folder with tokenizer.json

    @property
    def is_workspace(self) -> bool:
        return self.weights is not None


def locate(model: str | os.PathLike[str]) -> Location:
    """Find out what `model` is: a workspace, its weights folder, a Hugging Face folder, a GGUF file or a hub id
    (downloads it).

    Raises ModelError if it is something else.
    """
    path = existing(model)
    if path is None and hub.is_gguf_id(str(model)):
        file = hub.download_gguf(str(model))
        with named_as_given(file, str(model)):
            return _unpacked(file)
    if path is None:
        return locate(hub.download(str(model)))
    if path.is_file() and is_gguf(path):
        return _unpacked(path)
    if not path.is_dir():
        raise ModelError(
            f"{path} is a file; expected a workspace, a Hugging Face model folder, a GGUF file or a hub id"
        )
    path = path.resolve()
    if (path / WEIGHTS / "manifest.json").is_file():
        return Location(path, path / WEIGHTS, path / TOKENIZER)
    if (path / "manifest.json").is_file():
        tokenizer = path.parent / "tokenizer"
        return Location(path, path, tokenizer if tokenizer.is_dir() else None)
    if (path / "config.json").is_file():
        return Location(path, None, path)
    if gguf := only_model_in(path):
        return _unpacked(gguf)
    raise ModelError(
        f"{path} is neither a workspace (no {WEIGHTS}/manifest.json) nor a Hugging Face model folder (no config.json), "
        f"and has no {SUFFIX} file"
    )


@contextmanager
def located(model: str | os.PathLike[str]) -> Iterator[Location]:
    """Like locate(). Errors of the block name a GGUF file as the user gave it, not the folder with its content."""
    location = locate(model)
    with named_as_given(location.path, str(model)) if model_file(location.path) else contextlib.nullcontext():
        yield location


def _unpacked(gguf: Path) -> Location:
    from charonia.gguf.folder import unpack  # with the settings, which import this module

    folder = unpack(gguf)
    return Location(folder, None, folder)


def existing(model: str | os.PathLike[str]) -> Path | None:
    """Return the path if it exists, or the path of a built-in model of this name; otherwise None. Raises ModelError if
    SmolLM2 has not been downloaded."""
    try:
        path = Path(model).expanduser()
        if path.exists():
            return path
    except (OSError, RuntimeError):  # the name is too long, or the user in ~user does not exist
        return None
    found = built_in(str(model))
    if found is None and str(model) == SMOLLM2:
        raise ModelError("SmolLM2 has not been downloaded: run .venv/bin/python scripts/get_smollm2.py in the checkout")
    return found


_LOOK_S = 1.0  # longer than is_held() takes


def hold(root: Path, until: ExitStack) -> bool:
    """Lock a workspace as served, until `until` is closed or this process ends. Returns False if it does not exist or
    is being removed."""
    deadline = time.monotonic() + _LOOK_S
    while True:
        with ExitStack() as end:
            try:
                file = end.enter_context((root / LOCKED).open("rb"))
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if os.fstat(file.fileno()).st_ino != (root / LOCKED).stat().st_ino:
                    continue  # another workspace has just replaced this one
            except FileNotFoundError:
                return False
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_LOOK_S / 100)  # another process may be in is_held()
                continue
            except OSError:  # a file system without locks
                pass
            if not (root / WEIGHTS / "manifest.json").is_file():
                return False
            until.push(end.pop_all())
            return True


def is_held(root: Path) -> bool:
    """Whether a server uses the workspace; false if this cannot be known."""
    with ExitStack() as end:
        return not _only_here(root, end)


def remove_unheld(root: Path) -> None:
    """Remove a workspace that no server uses."""
    with ExitStack() as end:
        if _only_here(root, end):
            shutil.rmtree(root, ignore_errors=True)


def _only_here(root: Path, until: ExitStack) -> bool:
    """Block hold() in other processes until `until` is closed. Returns False if another process holds the workspace."""
    with contextlib.suppress(OSError):  # an incomplete workspace, or a file system without locks
        file = until.enter_context((root / LOCKED).open("r+b"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def write_config_ini(file: Path, settings: Mapping[str, str]) -> None:
    """Write section [llama] with every key of the engine's table: the given values, otherwise the defaults.

    Raises InvalidRequestError for a key or a value that the table does not allow.
    """
    _engine.check_settings(dict(settings))
    fields = [entry for entry in _engine.config_fields() if not entry.ignored]
    values = {entry.key: settings.get(entry.key, entry.default_value) for entry in fields}
    lines = ["[llama]", "# The model. Written by charonia convert; do not edit."]
    lines += [f"{entry.key} = {values[entry.key]}" for entry in fields if entry.model_attribute]
    lines += ["", "# Inference parameters. Edit these, or set CHARONIA_<KEY> in the environment."]
    for entry in fields:
        if not entry.model_attribute:
            lines += ["", f"# {entry.help}", f"# {entry.range}; default {entry.default_value}"]
            lines.append(f"{entry.key} = {values[entry.key]}")
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def is_head(root: Path) -> bool:
    """Whether a workspace has an EAGLE-3 head, and not a model."""
    return (root / WEIGHTS / DRAFT_TOKENS).is_file()


def model_task(root: Path) -> str:
    """Return what the model of a workspace gives: generate (text), embed or score."""
    return str(_engine.read_config_ini(root / WEIGHTS / "config.ini").get("model_task", "generate"))


def model_attributes() -> set[str]:
    """Return the keys that describe a model. Users cannot set them."""
    return {entry.key for entry in _engine.config_fields() if entry.model_attribute}


@contextmanager
def atomic_folder(destination: Path, force: bool) -> Iterator[Path]:
    """Yield a new folder next to `destination`. It is renamed to `destination` at the end, or removed after an error.

    Raises ModelError if the destination has content and `force` is false, or if it is not a workspace.
    """
    destination = destination.expanduser().absolute()
    occupied = destination.exists() and (not destination.is_dir() or any(destination.iterdir()))
    if occupied and not force:
        raise ModelError(
            f"{destination} exists and is not empty: choose another --dst-path, or replace it with --force"
        )
    if occupied and not (destination / "triton_models").is_dir():
        raise ModelError(
            f"{destination} is not empty and is not a workspace, so --force does not replace it: remove it yourself"
        )
    with disk.explained(destination.parent, str(destination)), _renamed(destination) as temporary:
        yield temporary


@contextmanager
def _renamed(destination: Path) -> Iterator[Path]:
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    try:
        temporary.chmod(0o755)
        yield temporary
        old = Path(f"{temporary}.old")
        if destination.exists():
            destination.rename(old)
        temporary.rename(destination)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sha256(file: Path, progress: Callable[[int], None] = lambda _: None) -> str:
    """Return the file's SHA-256 in hex. progress: called with the number of bytes of each piece that was read."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while piece := stream.read(1 << 24):
            digest.update(piece)
            progress(len(piece))
    return digest.hexdigest()


def write_notes(root: Path, notes: Sequence[str]) -> None:
    """Save warnings about the model in the workspace, one per line. Servers print them at each start."""
    if notes:
        (root / NOTES).write_text("".join(f"{' '.join(note.split())}\n" for note in notes), encoding="utf-8")


def read_notes(root: Path) -> list[str]:
    """Return the warnings that write_notes() saved."""
    file = root / NOTES
    return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []


def read_manifest(weights: Path) -> Manifest:
    """Read manifest.json of a weights folder. A ModelError names the command that fixes the workspace."""
    content = read_json(weights / "manifest.json")
    source, ranks = content.get("source", "MODEL"), content.get("ranks")
    fix = f"run: {convert_command(source, _workspace_of(weights), ranks if isinstance(ranks, int) else 1)}"
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        raise ModelError(f"{weights} has format_version {version}, this version reads {FORMAT_VERSION}: {fix}")
    try:
        return Manifest(
            content["source"],
            content["ranks"],
            content.get("weights", ""),
            content["files"],
            content["layers"],
            content["tensors"],
            content.get("quality", []),
            content.get("modules", {}),
            content.get("module_prefixes", []),
            content.get("mtp_layers", []),
        )
    except KeyError as error:
        raise ModelError(f"{weights / 'manifest.json'} has no {error}: {fix}") from error


def total_bytes(manifest: Manifest) -> int:
    """Return the total size of all files that have a checksum."""
    return sum(entry["bytes"] for entry in manifest.files.values() if "sha256" in entry)


def check(weights: Path, progress: Callable[[int], None] = lambda _: None) -> Iterable[str]:
    """Compare every file with the manifest. Yields one line for each difference, with the command that fixes it."""
    manifest = read_manifest(weights)
    mtp = bool(manifest.mtp_layers)
    fix = f"run: {convert_command(manifest.source, _workspace_of(weights), manifest.ranks, mtp=mtp)}"
    for name, entry in manifest.files.items():
        file = weights / name
        if not file.is_file():
            yield f"{file} is missing: {fix}"
        elif file.stat().st_size != entry["bytes"]:
            yield f"{file} has {file.stat().st_size} bytes, but {entry['bytes']} were written: {fix}"
        elif "sha256" in entry and sha256(file, progress) != entry["sha256"]:
            yield f"{file} has a different SHA-256 than when it was written: {fix}"


def convert_command(source: str, destination: str | Path, ranks: int = 1, *, mtp: bool = False) -> str:
    """Return the command that creates a workspace again."""
    tp = f" --tp {ranks}" if ranks > 1 else ""
    method = " --speculative-method mtp" if mtp else ""
    return f"charonia convert {source} --dst-path {destination}{tp}{method} --force"


def _workspace_of(weights: Path) -> Path:
    return weights.parent.parent if weights.parts[-2:] == WEIGHTS.parts else weights
