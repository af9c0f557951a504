"""Converts a request's text fields to token ids. Independent of Triton: model.py converts tensors for these functions.

A wrong request raises PromptError. prompt_ids.py converts texts, messages and words to token ids; the Python API also
uses it. `charonia convert` puts a copy of it next to this file.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from prompt_ids import (
    MAX_LOGIT_BIAS,
    Encoded,
    PromptError,
    WriteCalls,
    check_variables,
    encode_chat,
    encode_ids,
    encode_pair,
    encode_text,
    parse_json,
    show,
)


def decode_utf8(field: str, value: bytes | str) -> str:
    if isinstance(value, str):
        return value
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(field, f"byte {error.start} is not valid UTF-8", "send UTF-8 text") from None


def parse_messages(text: str) -> list[Any]:
    """Parse a JSON list of chat messages, or one plain string, which is the user's only message."""
    remedy = 'send a JSON list such as [{"role": "user", "content": "Hello"}], or one plain string, in quotes if it '
    remedy += "could be taken for JSON"
    if not text.strip():
        raise PromptError("messages", "empty", remedy)
    if not _is_json(text):
        return [{"role": "user", "content": text}]
    value = parse_json("messages", text, remedy)
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        kind = "an empty list" if isinstance(value, list) else show(value)
        raise PromptError("messages", f"{kind} is not a conversation", remedy)
    return value


def _is_json(text: str) -> bool:
    """Whether a text is meant as JSON: it begins like a list, an object or a string, or is a number, true, false or
    null."""
    if text.lstrip().startswith(("[", "{", '"')):
        return True
    try:
        json.loads(text, parse_int=float, parse_constant=_reject_constant)
    except ValueError:
        return False
    return True


def _reject_constant(name: str) -> None:
    """Reject Infinity, -Infinity and NaN, which are not JSON."""
    raise ValueError(name)


def build_prompt(
    tokenizer: Any,
    text_input: str | None,
    messages: str | None,
    tools: str | None,
    variables: str | None = None,
    *,
    token_ids: Sequence[int] | None = None,
    special: bool | None = None,
    with_text: bool = False,
    interactive: bool = False,
    limit: int | None = None,
    continues: bool = False,
    unseen_tools: bool = False,
    write_calls: WriteCalls | None = None,
) -> Encoded:
    """Build the prompt from exactly one of text_input, token_ids and messages. The other fields are JSON. variables:
    variables of the chat template. special: whether the tokenizer adds special tokens around a text; None: only to
    text_input. with_text: also return the text of token_ids. interactive: the input is the new part of a session, so it
    is also returned as a continuation of the session's history. limit: the context's length; a longer text is not
    tokenized completely. continues: the last message is the beginning of the response. unseen_tools, write_calls:
    as in encode_chat."""
    given = [text_input is not None, token_ids is not None, messages is not None]
    if sum(given) != 1:
        problem = f"the request has {sum(given)} of them" if any(given) else "none was sent"
        raise PromptError("text_input, prompt_token_ids, messages", problem, "send exactly one of the three")
    if messages is None and tools is not None:
        raise PromptError("tools", "they are part of a chat", "send messages in place of a text or token ids")
    if messages is None and variables is not None:
        problem = "they are part of a chat"
        raise PromptError("chat_template_kwargs", problem, "send messages in place of a text or token ids")
    if messages is None and continues:
        raise PromptError("continue_final_message", "there are no messages", "leave it out: a text is always continued")
    if token_ids is not None:
        return encode_ids(tokenizer, "prompt_token_ids", token_ids, with_text=with_text, interactive=interactive)
    if text_input is not None:
        if not text_input:
            raise PromptError("text_input", "empty", "send at least one character")
        return encode_text(
            tokenizer, "text_input", text_input, special=special is not False, interactive=interactive, limit=limit
        )
    assert messages is not None
    conversation = parse_messages(messages)
    given_tools = None if tools is None else parse_json("tools", tools, "send a JSON list of objects")
    given_variables = None
    if variables is not None:
        given_variables = check_variables(parse_json("chat_template_kwargs", variables, "send a JSON object"))
    return encode_chat(
        tokenizer,
        conversation,
        given_tools,
        special=special is True,
        interactive=interactive,
        limit=limit,
        variables=given_variables,
        continues=continues,
        unseen_tools=unseen_tools,
        write_calls=write_calls,
    )


def build_pooled(
    tokenizer: Any,
    text_input: str | None,
    messages: str | None,
    token_ids: Sequence[int] | None,
    limit: int | None,
) -> Encoded:
    """Build the input of an embedding or a score from one of these: a text, token ids, or messages with a query and a
    document."""
    given = [text_input is not None, token_ids is not None, messages is not None]
    if sum(given) != 1:
        problem = f"the request has {sum(given)} of them"
        raise PromptError("text_input, prompt_token_ids, messages", problem, "send exactly one of the three")
    if token_ids is not None:
        return encode_ids(tokenizer, "prompt_token_ids", token_ids)
    if messages is not None:
        return encode_pair(tokenizer, parse_messages(messages), limit)
    if not text_input:
        raise PromptError("text_input", "empty", "send at least one character")
    return encode_text(tokenizer, "text_input", text_input, limit=limit)


def token_strings(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """The tokens as spelled in the vocabulary; "" for an id without an entry."""
    names = iter(tokenizer.convert_ids_to_tokens([token for token in token_ids if token >= 0]))
    return [(next(names) or "") if token >= 0 else "" for token in token_ids]


def tokenizer_info(tokenizer: Any) -> dict[str, Any]:
    """Information for clients that tokenize by themselves, with names as in tokenizer_config.json."""
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    tokens = {name: None if getattr(tokenizer, name) is None else str(getattr(tokenizer, name)) for name in names}
    return {
        "tokenizer_class": type(tokenizer).__name__,
        **tokens,
        "chat_template": tokenizer.chat_template,
    }


def pack_token_lists(sequences: Sequence[Sequence[int]]) -> list[list[int]]:
    """Pack lists of ids as [2, n]: row 0 has the joined lists, row 1 their end offsets, padded with -1."""
    ids = [token for sequence in sequences for token in sequence]
    ends: list[int] = []
    for sequence in sequences:
        ends.append((ends[-1] if ends else 0) + len(sequence))
    return [ids, ends + [-1] * (len(ids) - len(ends))]


def parse_logit_bias(text: str) -> tuple[list[int], list[float]]:
    """Parse a JSON object from token ids to biases in [-100, 100]. The engine checks whether an id is in the
    vocabulary."""
    remedy = 'send a JSON object from token id to bias, such as {"42": -100}'
    value = parse_json("logit_bias", text, remedy)
    if not isinstance(value, dict):
        raise PromptError("logit_bias", f"{text[:80]} is not an object", remedy)
    ids: list[int] = []
    biases: list[float] = []
    for key, bias in value.items():
        # At most ten digits: Python converts very long numbers neither to an int nor to a float.
        if not re.fullmatch(r"0*\d{1,10}", key, re.ASCII) or int(key[-10:]) > 2**31 - 1:
            raise PromptError("logit_bias", f"{show(key)} is not a token id", remedy)
        wrong = isinstance(bias, bool) or not isinstance(bias, int | float)
        allowed = f"send a number in [-{MAX_LOGIT_BIAS}, {MAX_LOGIT_BIAS}]"
        if wrong or (isinstance(bias, float) and not math.isfinite(bias)):
            raise PromptError(f"logit_bias[{key}]", f"{show(bias)} is not a number", allowed)
        if abs(bias) > MAX_LOGIT_BIAS:
            raise PromptError(f"logit_bias[{key}]", f"{show(bias)} is out of range", allowed)
        ids.append(int(key))
        biases.append(float(bias))
    return ids, biases
