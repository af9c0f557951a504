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

if TYPE_CHECKING:
    from charonia.weights.checkpoint import TensorInfo

_CONFIG = ["config.json", "generation_config.json", "quantize_config.json", "quant_config.json"]
_FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.tiktoken", "*.txt", "*.jinja"]
_BIN = "pytorch_model*.bin"
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
        raise ModelError(wrong)
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ModelError(f"{wrong}: {_reason(error)}") from None
    if at and not _REVISION.fullmatch(revision):
        raise ModelError(f"{wrong}: {revision!r} is not a valid name of a branch, tag or commit")
    return repository, revision if at else None


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
    return folder


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


def download_config(model: str) -> Path:
    """Return the folder of the hub's cache with config.json and, if the model has them, generation_config.json and the
    quantisation files of older models."""
    import huggingface_hub

    repository, revision = parse_id(model)
    with _explained(model):
        return Path(huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=_CONFIG))


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
