"""Loads and copies a model's tokenizer, so that token ids and the table of token bytes always agree."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from charonia.errors import ModelError, UnsupportedError
from charonia.families import ModelSpec, text_part
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


def prepare_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerFast, spec: ModelSpec) -> None:
    """Add what the texts of an embedding or of a score need: the end token that only tokenizer_config.json adds, and a
    reranker's chat template with its default instruction. folder: of the model.

    Raises ModelError if a needed template or token is missing, and UnsupportedError for a classification head that
    transformers applies to another token than the last one.
    """
    if spec.config.model_task == "generate":
        return
    _add_end(folder, tokenizer)
    template = tokenizer.chat_template
    if spec.score_tokens and not prompt_ids.has_pair_template(tokenizer):
        if (family := spec.config.model_family) != "qwen3":
            raise ModelError(
                "a score from tokens needs a chat template with the roles query and document, and family "
                f"{family} has none: convert the model with --chat-template FILE"
            )
        template = prompt_ids.QWEN3_PAIRS
    if spec.instruction:
        if not isinstance(template, str) or not (spec.score_tokens or prompt_ids.has_pair_template(tokenizer)):
            raise ModelError(
                f"default_prompt_name of config_sentence_transformers.json sets the instruction {spec.instruction!r}, "
                "and the chat template has no roles query and document: set it to null"
            )
        template = _with_instruction(template, spec.instruction)
    tokenizer.chat_template = template
    config = read_json(folder / "config.json")
    padding = config.get("pad_token_id", text_part(config).get("pad_token_id"))
    if spec.config.model_task == "score" and not spec.score_tokens and padding is not None:
        pair = [{"role": role, "content": "a"} for role in ("query", "document")]
        if prompt_ids.encode_pair(tokenizer, pair).token_ids[-1] == padding:
            raise UnsupportedError(
                f"{folder}: each pair of texts ends with token {padding}, which is pad_token_id of config.json: "
                "transformers applies the classification head to the token before it, which is not supported"
            )


def _add_end(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Add the end token to texts if tokenizer_config.json has add_eos_token and tokenizer.json adds no token after a
    text. As with add_bos_token, transformers followed it before version 5. A text that is continued has no end token.
    """
    file = folder / "tokenizer_config.json"
    settings = read_json(file) if file.is_file() else {}
    follows = prompt_ids.class_name(settings) in prompt_ids.BEGINNING_CLASSES
    if not follows or settings.get("add_eos_token") is not True or tokenizer.eos_token_id is None:
        return
    backend = tokenizer.backend_tokenizer
    bare, full = (backend.encode("a", add_special_tokens=special).ids for special in (False, True))
    if bare[-1:] != full[-1:]:
        return
    before = full[: len(full) - len(bare)]
    if before not in ([], [tokenizer.bos_token_id]):
        raise ModelError(f"{file}: add_eos_token needs a tokenizer.json that adds only bos_token; it adds {before}")
    bos, eos = (
        (str(tokenizer.bos_token), before[0]) if before else None,
        (str(tokenizer.eos_token), int(tokenizer.eos_token_id)),
    )
    backend.post_processor = prompt_ids.around_texts(bos, eos)


def _with_instruction(template: str, instruction: str) -> str:
    """Add a default instruction, a message with the role system, to a chat template."""
    message = f'[{{"role": "system", "content": {json.dumps(instruction, ensure_ascii=False)}}}]'
    has_one = 'messages | selectattr("role", "equalto", "system") | list'
    return f"{{%- set messages = messages if {has_one} else {message} + messages -%}}\n{template}"


def copy_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerFast, destination: Path, *, ends: bool = False) -> None:
    """Write a `tokenizer` folder that prompt_ids.py loads to an equal tokenizer, without code of the model.
    ends: whether prepare_tokenizer() may have added an end token."""
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
        if ends:
            described = read_json(folder / "tokenizer.json")
            described["post_processor"] = json.loads(tokenizer.backend_tokenizer.to_str())["post_processor"]
            (destination / "tokenizer.json").write_text(json.dumps(described, ensure_ascii=False), encoding="utf-8")
        return
    tokenizer.save_pretrained(destination)
