"""The Hugging Face hub: a model's files, or before their download what they say of themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from charonia.errors import ModelError
from charonia.weights.checkpoint import TensorInfo, open_checkpoint

_CONFIG = ["config.json", "generation_config.json"]
_FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.tiktoken", "*.txt", "*.jinja"]
_BIN = "pytorch_model*.bin"


def download(model: str) -> Path:
    """The folder of the hub's cache with all files of the model, which are downloaded where they are not there.

    Raises ModelError, as all functions here do: `model` is no hub id, the hub does not have it or cannot be reached.
    """
    import huggingface_hub

    with _explained(model):
        folder = Path(huggingface_hub.snapshot_download(model, allow_patterns=_FILES))
        if not any(folder.glob("*.safetensors")):
            folder = Path(huggingface_hub.snapshot_download(model, allow_patterns=[*_FILES, _BIN]))
    return folder


def download_config(model: str) -> Path:
    """The folder of the hub's cache with config.json and, where the model has one, generation_config.json."""
    import huggingface_hub

    with _explained(model):
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=_CONFIG))


def read_headers(model: str, folder: Path) -> dict[str, TensorInfo] | None:
    """The tensors of the model's safetensors files; None for a model that has .bin files only, which are read whole or
    not at all.

    folder: of `download_config`. Weights that are there are read there; of others the hub sends the headers alone,
    about 100 kB of each file.
    """
    import huggingface_hub
    from huggingface_hub.errors import NotASafetensorsRepoError

    try:
        return open_checkpoint(folder).tensors
    except ModelError:  # not downloaded, or not all of them
        pass
    api = huggingface_hub.HfApi()
    with _explained(model):
        try:
            files = api.get_safetensors_metadata(model, revision=folder.name).files_metadata
        except NotASafetensorsRepoError:
            if any(Path(name).match(_BIN) for name in api.list_repo_files(model, revision=folder.name)):
                return None
            raise ModelError(
                f"{model} has no weights on the hub: expected model.safetensors, model.safetensors.index.json or "
                "pytorch_model.bin"
            ) from None
    return {
        name: TensorInfo(name, folder / file, tensor.dtype, tuple(tensor.shape))
        for file, header in files.items()
        for name, tensor in header.tensors.items()
    }


@contextmanager
def _explained(model: str) -> Iterator[None]:
    """Says in a ModelError why the hub's library gave up, and what would help."""
    from huggingface_hub import errors

    parts = model.split("/")
    if len(parts) != 2 or not all(parts) or parts[0] in (".", "..", "~"):
        raise ModelError(f"{model} does not exist, and {model!r} is no hub id (owner/name)")
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
    except errors.SafetensorsParsingError as error:
        raise ModelError(f"{model} has a file on the hub that is no safetensors file: {_reason(error)}") from error
    except Exception as error:  # the hub's library has changed its HTTP client twice, each has errors of its own
        raise ModelError(
            f"{missing} it cannot be downloaded from the hub ({_reason(error)}): check the network, HF_ENDPOINT and "
            "HF_HUB_OFFLINE, or name a folder with the model's files"
        ) from error


def _reason(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
