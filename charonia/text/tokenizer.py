"""Loads and copies a model's tokenizer, so that token ids and the table of token bytes always agree."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from charonia.errors import ModelError
from charonia.json_files import read_json
from charonia.text import prompt_ids, sentencepiece_model, tiktoken_vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_FILES = (
    "added_tokens.json",
    TEMPLATE_FILE,
    "chat_template.json",
    "config.json",  # prompt_ids.py reads the model's type in it
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)


# Short texts that tokenizers treat differently: spaces, digits, capitals, accents, code, scripts, composed characters.
PROBES = (
    "Hello world",
    " two  spaces\tand a tab\n\n  lines \n",
    "In 2023, 1234567 of 3.14159",
    "HelloWorld camelCase don't I'LL",
    "def f(x):\r\n    return x**2  # //;;",
    "na\u00efve cafe\u0301 \ufb01 \u00bd",
    "敏捷的棕色狐狸 ひらがな 한국어",
    "Быстрая лиса, الثعلب البني, नमस्ते, สวัสดี",
    "\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308",
)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load a tokenizer as prompt_ids.py does. Also converts Qwen 1's vocabulary and SentencePiece's tokenizer.model,
    which a workspace stores as tokenizer.json.

    Raises ModelError if there is no tokenizer, or one that cannot be loaded or converted.
    """
    pieces = folder / sentencepiece_model.FILE
    try:
        if not (folder / "tokenizer.json").is_file():
            if (folder / tiktoken_vocabulary.FILE).is_file():
                return tiktoken_vocabulary.load_tiktoken(folder, chat=_is_chat(folder))
            if pieces.is_file() and (model := sentencepiece_model.read_model(pieces)):
                return sentencepiece_model.load_sentencepiece(folder, model)
        return prompt_ids.load_tokenizer(folder)
    except prompt_ids.TokenizerError as error:
        raise ModelError(str(error)) from error


def source_notes(folder: Path, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Return notes about files next to tokenizer.json that give other token ids: tokenizer_config.json, the class that
    transformers chooses, tokenizer.model. Each note says which one Charonia uses. `tokenizer`: of the folder."""
    from tokenizers import Tokenizer

    if not (folder / "tokenizer.json").is_file():
        return []
    used, described = tokenizer.backend_tokenizer, Tokenizer.from_file(str(folder / "tokenizer.json"))
    described.no_truncation()
    described.no_padding()
    if difference := _difference(used, described):
        return [f"{folder}: tokenizer.json has a wrong split pattern, so Charonia uses Tekken's pattern: {difference}"]
    notes = []
    if used.encode("").ids != described.encode("").ids:
        notes.append(f"{folder}: Charonia follows add_bos_token of tokenizer_config.json, not tokenizer.json")
    others: dict[str, Tokenizer] = {}
    with contextlib.suppress(Exception), _transformers_silent():  # transformers may raise any error
        by_class = prompt_ids.load_by_class(folder)
        others[f"transformers' {type(by_class).__name__}"] = by_class.backend_tokenizer
    pieces = folder / sentencepiece_model.FILE
    with contextlib.suppress(ModelError):
        if pieces.is_file() and (model := sentencepiece_model.read_model(pieces)):
            others[pieces.name] = sentencepiece_model.convert(model, legacy=True)
    for name, other in others.items():
        if difference := _difference(used, other):
            notes.append(f"{folder}: Charonia uses tokenizer.json, but {name} differs from it: {difference}")
    return notes


@contextlib.contextmanager
def _transformers_silent() -> Iterator[None]:
    """Suppress transformers' warnings about config files, because Charonia checks the fields that it reads."""
    from transformers.utils import logging as theirs

    level = theirs.get_verbosity()
    theirs.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        theirs.set_verbosity(level)


def _difference(used: Tokenizer, other: Tokenizer) -> str:
    """Return the first of PROBES that the two encode differently, with its ids; empty if there is none."""
    for text in PROBES:
        ours, theirs = (one.encode(text, add_special_tokens=False).ids for one in (used, other))
        if ours != theirs:
            return f"{text!r} has the token ids {prompt_ids.show(ours)}, not {prompt_ids.show(theirs)}"
    return ""


def end_of(tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> int | None:
    """Return the id of the tokenizer's eos_token; None if it has none, or one that the model cannot generate."""
    end = tokenizer.eos_token_id
    return end if isinstance(end, int) and 0 <= end < vocab_size else None


def _is_chat(folder: Path) -> bool:
    """Whether a Qwen 1 model is a chat model, according to its generation_config.json."""
    file = folder / "generation_config.json"
    return file.is_file() and read_json(file).get("chat_format") == "chatml"


def replace_chat_template(tokenizer: PreTrainedTokenizerFast, file: Path) -> None:
    """Raises ModelError for an unusable file."""
    try:
        prompt_ids.set_chat_template(tokenizer, file)
    except prompt_ids.TokenizerError as error:
        raise ModelError(str(error)) from error


def copy_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerFast, destination: Path) -> None:
    """Write a `tokenizer` folder that prompt_ids.py loads to an equal tokenizer, without code of the model."""
    destination.mkdir(parents=True, exist_ok=True)
    if (folder / "tokenizer.json").is_file() and not prompt_ids.has_own_code(folder):
        for name in TOKENIZER_FILES:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, destination / name)
        templates = folder / "additional_chat_templates"
        if isinstance(tokenizer.chat_template, dict) and templates.is_dir():
            shutil.copytree(templates, destination / templates.name)
        if isinstance(tokenizer.chat_template, str):  # a file that a user can edit
            (destination / TEMPLATE_FILE).write_text(tokenizer.chat_template, encoding="utf-8")
        if not (destination / "tokenizer_config.json").is_file():
            tokenizer.save_pretrained(destination)
        return
    tokenizer.save_pretrained(destination)
