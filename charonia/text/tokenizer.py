"""Loads a model's tokenizer, always the same way: whatever makes token ids and the table of their bytes must agree."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from charonia.errors import ModelError
from charonia.text import tiktoken_vocabulary
from charonia.weights.checkpoint import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_NAMES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",  # AutoTokenizer decides by it too
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The fast tokenizer of a Hugging Face folder or of a workspace's `tokenizer` folder. Runs no code of the model's.

    Raises ModelError when there is none or when an old tokenizer.model cannot be converted.
    """
    # Its advice on missing frameworks is not for people who serve: neither PyTorch nor another one is needed.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer, LlamaTokenizerFast, PreTrainedTokenizerFast

    has_fast = (folder / "tokenizer.json").is_file()
    if not has_fast and (folder / tiktoken_vocabulary.FILE).is_file():
        return tiktoken_vocabulary.load_tiktoken(folder, chat=_is_chat(folder))
    if not has_fast and not any((folder / name).is_file() for name in ("tokenizer.model", "vocab.json")):
        raise ModelError(f"{folder} has no tokenizer: expected tokenizer.json or tokenizer.model")
    needs_own_code = "auto_map" in _tokenizer_config(folder)
    try:
        tokenizer: Any
        if not needs_own_code:
            tokenizer = AutoTokenizer.from_pretrained(folder, use_fast=True, trust_remote_code=False)
        elif has_fast:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        else:
            tokenizer = LlamaTokenizerFast.from_pretrained(folder)
    except ImportError as error:
        raise ModelError(
            f"{folder} has only an old tokenizer.model, and converting it needs two packages: "
            f"pip install sentencepiece protobuf ({error})"
        ) from error
    except Exception as error:  # transformers raises whatever its parts raise
        hint = "" if has_fast else "; if packages are missing: pip install sentencepiece protobuf"
        raise ModelError(f"the tokenizer in {folder} cannot be loaded: {error}{hint}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelError(
            f"{folder} has only a slow tokenizer ({type(tokenizer).__name__}); a tokenizer.json is needed: "
            "convert it with transformers' save_pretrained, or pip install sentencepiece protobuf"
        )
    return tokenizer


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    return read_json(file) if file.is_file() else {}


def _is_chat(folder: Path) -> bool:
    """Qwen 1 says in generation_config.json which of its models chat."""
    file = folder / "generation_config.json"
    return file.is_file() and read_json(file).get("chat_format") == "chatml"


def copy_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerFast, destination: Path) -> None:
    """Writes a `tokenizer` folder that AutoTokenizer loads to an equal tokenizer, without code of the model's."""
    destination.mkdir(parents=True, exist_ok=True)
    if (folder / "tokenizer.json").is_file() and "auto_map" not in _tokenizer_config(folder):
        for name in _NAMES:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, destination / name)
        templates = folder / "additional_chat_templates"
        if templates.is_dir():
            shutil.copytree(templates, destination / templates.name)
        if not (destination / "tokenizer_config.json").is_file():
            tokenizer.save_pretrained(destination)
        return
    tokenizer.save_pretrained(destination)
