"""Access to the Hugging Face hub: downloads a model's files, or only their headers."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from charonia.disk import is_full_or_read_only, nearest, reason, require_space
from charonia.errors import ModelError
from charonia.gguf.folder_names import SUFFIX
from charonia.gguf.reader import stem_of
from charonia.weights.built_in import did_you_mean

if TYPE_CHECKING:
    from charonia.weights.checkpoint import TensorInfo

_OF_SENTENCES = ["modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", "*_*/config.json"]
_QUANTISED = ["quantize_config.json", "quant_config.json", "hf_quant_config.json"]
_CONFIG = ["config.json", "generation_config.json", *_QUANTISED, *_OF_SENTENCES]
_TOKENIZER = ["tokenizer*", "vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json", "*.tiktoken"]
_FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.tiktoken", "*.txt", "*.jinja"]
_BIN = "pytorch_model*.bin"
_ADAPTER = ["adapter_config.json", "adapter_model.*"]
# Copies of the weights in other formats, which GPT-OSS and Mistral have. A star also matches folders.
_COPIES = ["*/*.safetensors", "consolidated*.safetensors"]
_REVISION = re.compile(r"[A-Za-z0-9_][\w.-]*(?:/[\w.-]+)*", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


def parse_id(model: str) -> tuple[str, str | None]:
    """Split owner/name or owner/name@revision into owner/name and the revision: a branch, a tag, a commit, or None for
    the main branch."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    repository, at, revision = model.partition("@")
    wrong = f"{model} does not exist, and {model!r} is not a hub id (owner/name or owner/name@revision)"
    parts = repository.split("/")
    if len(parts) != 2 or not all(parts) or parts[0] in (".", "..", "~"):
        raise ModelError(wrong + did_you_mean(model))
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ModelError(f"{wrong}: {_reason(error)}") from None
    if at and not _REVISION.fullmatch(revision):
        raise ModelError(f"{wrong}: {revision!r} is not a valid name of a branch, tag or commit")
    return repository, revision if at else None


def is_gguf_id(model: str) -> bool:
    """Whether the text is owner/name:FILE or owner/name:TYPE, which names a GGUF file of the hub."""
    repository, colon, file = model.rpartition(":")
    return bool(colon and file) and "/" in repository


def download_gguf(model: str) -> Path:
    """Download the parts of a GGUF file that are not in the hub's cache, and return the first part.

    model: owner/name:TYPE such as owner/name:Q4_K_M, or owner/name:FILE; with a revision, owner/name@revision:TYPE.
    """
    identifier, _, wanted = model.rpartition(":")
    repository, revision = parse_id(identifier)
    with _explained(model):
        files = choose_gguf(model, _gguf_names(repository, revision), wanted)
        return _snapshot(repository, revision, files) / files[0]


def _gguf_names(repository: str, revision: str | None) -> list[str]:
    """Return the names of the GGUF files on the hub; without a connection, of those in the cache."""
    import huggingface_hub

    try:
        asked: dict[str, Any] = {"revision": revision, "allow_patterns": f"*{SUFFIX}", "dry_run": True}
        return [one.filename for one in huggingface_hub.snapshot_download(repository, **asked)]
    except huggingface_hub.errors.DryRunError:  # there is no connection, or no such model
        cached = Path(huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=[]))
        return [file.relative_to(cached).as_posix() for file in cached.rglob(f"*{SUFFIX}")]


def choose_gguf(model: str, names: list[str], wanted: str) -> list[str]:
    """Return the files of the GGUF model that has this name or whose name ends with this type; several if it is split.

    Raises ModelError if there is none, or more than one.
    """
    found = _by_stem(names)
    by_name = [files for files in found.values() if wanted in (files[0], Path(files[0]).name)]
    ending = re.compile(rf"(?:.*[-./])?{re.escape(wanted)}", re.IGNORECASE)
    chosen = by_name or [files for stem, files in found.items() if ending.fullmatch(stem)]
    if len(chosen) == 1:
        return chosen[0]
    listed = ", ".join(Path(stem).name for stem in found) or "none"
    why = "several GGUF files end with" if chosen else "no GGUF file ends with"
    raise ModelError(f"{model}: {why} {wanted!r}; the repository has {listed}. Name one of them, with {SUFFIX}")


def _by_stem(names: list[str]) -> dict[str, list[str]]:
    """Return the files of each GGUF model."""
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.endswith(SUFFIX) and not Path(name).name.startswith("mmproj"):
            found.setdefault(str(Path(name).with_name(stem_of(Path(name)))), []).append(name)
    return found


def _check_gguf(model: str, revision: str) -> None:
    """Raise ModelError with the types of the GGUF files, if the repository has some."""
    stems = list(_by_stem(_gguf_names(parse_id(model)[0], revision)))
    if not stems:
        return
    types = [re.split("[-.]", Path(stem).name)[-1] for stem in stems]
    listed = [
        one if types.count(one) == 1 else Path(stem).name + SUFFIX for stem, one in zip(stems, types, strict=True)
    ]
    raise ModelError(
        f"{model} has GGUF files: name one of them, as in {model}:{listed[0]}; the repository has {', '.join(listed)}"
    )


def pinned_id(model: str, folder: Path) -> str | None:
    """Return owner/name@commit of the files in `folder`, which were downloaded for `model`. None if `model` already has
    the commit, or if the folder is not in the hub's cache."""
    if folder.parent.name != "snapshots" or not _COMMIT.fullmatch(folder.name) or Path(model).expanduser().exists():
        return None
    pinned = f"{parse_id(model)[0]}@{folder.name}"
    return pinned if pinned != model else None


def download(model: str) -> Path:
    """Download the model's files that are not in the hub's cache, and return the folder in the cache.

    All functions here raise ModelError if `model` is not a hub id, if the hub does not have it, or cannot be reached.
    """
    repository, revision = parse_id(model)
    with _explained(model):
        folder = _snapshot(repository, revision, _FILES)
        if not any(folder.glob("*.safetensors")):
            # Uses the same commit, because the branch may have changed since.
            folder = _snapshot(repository, folder.name, [*_FILES, _BIN])
            if not any(folder.glob(_BIN)):
                _check_gguf(model, folder.name)
    return folder


def download_adapter(adapter: str) -> Path:
    """Download the files of a LoRA adapter that are not in the hub's cache, and return the folder in the cache."""
    repository, revision = parse_id(adapter)
    with _explained(adapter):
        return _snapshot(repository, revision, _ADAPTER)


def _snapshot(repository: str, revision: str | None, patterns: list[str]) -> Path:
    """Download the files that are not in the cache. Raises ModelError if the disk has no room for them."""
    import huggingface_hub
    from huggingface_hub.constants import HF_HUB_CACHE

    chosen: dict[str, Any] = {"revision": revision, "allow_patterns": patterns, "ignore_patterns": _COPIES}
    # Without a connection the files of the cache are used, and their sizes are not needed.
    with contextlib.suppress(huggingface_hub.errors.DryRunError):
        planned = huggingface_hub.snapshot_download(repository, **chosen, dry_run=True)
        needed = sum(one.file_size or 0 for one in planned if one.will_download)
        require_space(nearest(Path(HF_HUB_CACHE)), needed, f"the download of {repository}")
    return Path(huggingface_hub.snapshot_download(repository, **chosen))


def download_config(model: str, *, tokenizer: bool = False) -> Path:
    """Return the folder of the hub's cache with config.json and, if the model has them, generation_config.json, the
    quantisation files of older models, and sentence-transformers' files. tokenizer: also with the tokenizer's files."""
    import huggingface_hub

    repository, revision = parse_id(model)
    with _explained(model):
        patterns = _CONFIG + (_TOKENIZER if tokenizer else [])
        folder = Path(huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=patterns))
        if not (folder / "config.json").is_file():
            _check_gguf(model, folder.name)
        return folder


def read_headers(model: str, folder: Path) -> dict[str, TensorInfo] | None:
    """Return the tensors of the model's safetensors files. None for a model with .bin files only, which have no header.

    folder: the result of `download_config`. Local weights are read from there; otherwise the hub sends only the
    headers, about 100 kB per file.
    """
    import huggingface_hub
    from huggingface_hub.errors import NotASafetensorsRepoError

    from charonia.weights.checkpoint import gptq_shards, gptq_stem, open_checkpoint

    try:
        return open_checkpoint(folder).tensors
    except ModelError:  # not downloaded, or not completely
        pass
    api = huggingface_hub.HfApi()
    repository, _ = parse_id(model)
    with _explained(model):
        try:
            files = api.get_safetensors_metadata(repository, revision=folder.name).files_metadata
        except NotASafetensorsRepoError:
            names = api.list_repo_files(repository, revision=folder.name)
            if any(Path(name).match(_BIN) for name in names):
                return None
            old = gptq_stem(folder, names)
            files = {
                name: api.parse_safetensors_file_metadata(repository, name, revision=folder.name)
                for name in (gptq_shards(old, names) if old else ())
            }
            if files:
                return _tensors_of(folder, files)
            _check_gguf(model, folder.name)
            raise ModelError(
                f"{model} has no weights on the hub: expected model.safetensors, model.safetensors.index.json or "
                "pytorch_model.bin"
            ) from None
    return _tensors_of(folder, files)


def _tensors_of(folder: Path, files: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """files: the headers from huggingface_hub, by file name."""
    from charonia.weights.checkpoint import TensorInfo

    return {
        name: TensorInfo(name, folder / file, tensor.dtype, tuple(tensor.shape))
        for file, header in files.items()
        for name, tensor in header.tensors.items()
    }


@contextmanager
def _explained(model: str) -> Iterator[None]:
    """Translate errors of huggingface_hub into a ModelError with the reason and advice."""
    from huggingface_hub import errors

    missing = f"{model} does not exist here, and"
    login = "log in with `hf auth login` or set HF_TOKEN"
    try:
        yield
    except ModelError:
        raise
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{missing} on the hub it is gated: accept its terms on its page with an account, and {login}"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"{missing} the hub has no model of that name that you may read: check the name; for a private one {login}"
        ) from error
    except errors.RevisionNotFoundError as error:
        repository, revision = parse_id(model)
        raise ModelError(
            f"{missing} the hub's {repository} has no revision {revision}: name a branch, a tag or a full commit"
        ) from error
    except errors.SafetensorsParsingError as error:
        raise ModelError(f"a file of {model} on the hub is not a safetensors file: {_reason(error)}") from error
    except Exception as error:  # huggingface_hub changed its HTTP client twice, and each has its own errors
        if isinstance(error, OSError) and is_full_or_read_only(error):
            raise ModelError(f"{model} cannot be downloaded: {reason(error)}, or set HF_HOME", 503) from error
        raise ModelError(
            f"{missing} it cannot be downloaded from the hub ({_reason(error)}): check the network, HF_ENDPOINT and "
            "HF_HUB_OFFLINE, or name a folder with the model's files",
            503,
        ) from error


def _reason(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
