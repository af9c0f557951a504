"""Loads and copies a model's tokenizer: whatever makes token ids and the table of their bytes must agree."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from charonia.errors import ModelError
from charonia.json_files import read_json
from charonia.text import prompt_ids, tiktoken_vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TOKENIZER_FILES = (
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
    """As prompt_ids.py does it, and Qwen 1's vocabulary, which a workspace has as tokenizer.json.

    Raises ModelError when there is none or when an old tokenizer.model cannot be converted.
    """
    if not (folder / "tokenizer.json").is_file() and (folder / tiktoken_vocabulary.FILE).is_file():
        return tiktoken_vocabulary.load_tiktoken(folder, chat=_is_chat(folder))
    try:
        return prompt_ids.load_tokenizer(folder)
    except prompt_ids.TokenizerError as error:
        raise ModelError(str(error)) from error


def _is_chat(folder: Path) -> bool:
    """Qwen 1 says in generation_config.json which of its models chat."""
    file = folder / "generation_config.json"
    return file.is_file() and read_json(file).get("chat_format") == "chatml"


def copy_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerFast, destination: Path) -> None:
    """Writes a `tokenizer` folder that AutoTokenizer loads to an equal tokenizer, without code of the model's."""
    destination.mkdir(parents=True, exist_ok=True)
    if (folder / "tokenizer.json").is_file() and not prompt_ids.has_own_code(folder):
        for name in TOKENIZER_FILES:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, destination / name)
        templates = folder / "additional_chat_templates"
        if templates.is_dir():
            shutil.copytree(templates, destination / templates.name)
        if not (destination / "tokenizer_config.json").is_file():
            tokenizer.save_pretrained(destination)
        return
    tokenizer.save_pretrained(destination)
