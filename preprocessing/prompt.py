"""From a request's text fields to token ids. No Triton here: model.py translates tensors to and from these functions.

Whatever is wrong with a request raises RequestError, whose text begins with ``[400] `` and names the field, what is
wrong with it and what would be right.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2

Message = dict[str, Any]

LOGIT_BIAS_LIMIT = 100.0
# Of JSON, the gateway's own limit: what takes values apart level by level needs a part of Python's stack for each.
MAX_DEPTH = 200
_MAX_SHOWN = 80  # characters of a wrong value in an error


class RequestError(ValueError):
    """The client sent something that cannot be served."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(f"[400] {field}: {problem}; {remedy}")


# Stands for an answer whose tokens the engine has: what a chat template writes after it is what follows the answer.
_ANSWER = "charoniaXanswerXendsXhere"


@dataclass(frozen=True)
class Prompt:
    """input_ids: at least one token. text: what was tokenized. strip_leading_space: whether the answer is a text of
    its own (a chat turn) or goes on where `text` ends. continuation_ids: what is appended to a session's history in
    place of input_ids; empty where the input is the whole conversation."""

    input_ids: list[int]
    text: str
    strip_leading_space: bool
    continuation_ids: list[int] = field(default_factory=list)


def load_tokenizer(folder: Path) -> Any:
    """The Hugging Face tokenizer of a folder, never from the network."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    settings = folder / "tokenizer_config.json"
    named = settings.is_file() and "tokenizer_class" in json.loads(settings.read_text(encoding="utf-8"))
    if named or (folder / "config.json").is_file():
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)


def decode_utf8(field: str, value: bytes | str) -> str:
    if isinstance(value, str):
        return value
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(field, f"byte {error.start} is not valid UTF-8", "send UTF-8 text") from None


def parse_json(field: str, text: str, remedy: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise RequestError(field, f"not valid JSON ({error})", remedy) from None
    except RecursionError:
        raise _too_deep(field) from None
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inner(outer)]
        if not level:
            return value
    raise _too_deep(field)


def _inner(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _too_deep(field: str) -> RequestError:
    return RequestError(field, f"nested deeper than {MAX_DEPTH} levels", "send values that are nested less deeply")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def parse_messages(text: str) -> list[Message]:
    """A JSON list of chat messages, or one plain string, which is the user's only message.

    Content may be a string, null or a list of OpenAI's text parts, which are joined. A tool call's arguments, a JSON
    string with OpenAI, become an object, which is what chat templates print.
    """
    remedy = 'send a JSON list such as [{"role": "user", "content": "Hello"}], or one plain string, in quotes where it '
    remedy += "could be taken for JSON"
    if not text.strip():
        raise RequestError("messages", "empty", remedy)
    if not _is_json(text):
        return [{"role": "user", "content": text}]
    value = parse_json("messages", text, remedy)
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        kind = "an empty list" if isinstance(value, list) else _shown(value)
        raise RequestError("messages", f"{kind} is no conversation", remedy)
    return [_parse_message(index, message) for index, message in enumerate(value)]


def _is_json(text: str) -> bool:
    """Whether a text is meant as JSON: it begins as a list, an object or a string does, or is a number, true, false or
    null."""
    if text.lstrip().startswith(("[", "{", '"')):
        return True
    try:
        json.loads(text, parse_int=float, parse_constant=_no_json)
    except ValueError:
        return False
    return True


def _no_json(name: str) -> None:
    """For Infinity, -Infinity and NaN, which are no JSON."""
    raise ValueError(name)


def _parse_message(index: int, message: Any) -> Message:
    field = f"messages[{index}]"
    if not isinstance(message, dict):
        raise RequestError(field, f"{_shown(message)} is no object", 'send {"role": ..., "content": ...}')
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise RequestError(f"{field}.role", "missing or no string", 'send "system", "user", "assistant" or "tool"')
    parsed = {**message, "content": _parse_content(f"{field}.content", message.get("content"))}
    if message.get("content") is None and not message.get("tool_calls"):
        raise RequestError(f"{field}.content", "missing", "send the message's text as a string")
    if message.get("tool_calls") is not None:
        parsed["tool_calls"] = _parse_tool_calls(f"{field}.tool_calls", message["tool_calls"])
    return parsed


def _parse_content(field: str, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    remedy = 'send a string or a list of {"type": "text", "text": ...}'
    if not isinstance(content, list):
        raise RequestError(field, f"{_shown(content)} is no text", remedy)
    texts = []
    for number, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RequestError(f"{field}[{number}]", f"a part of type {kind!r} is not understood", remedy)
        texts.append(part["text"])
    return "".join(texts)


def _parse_tool_calls(field: str, calls: Any) -> list[Any]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RequestError(field, "not a list of objects", "send what the model's answer contained")
    parsed = []
    for call in calls:
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            arguments = parse_json(f"{field}.function.arguments", function["arguments"], "send a JSON object")
            call = {**call, "function": {**function, "arguments": arguments}}
        parsed.append(call)
    return parsed


def parse_tools(text: str) -> list[dict[str, Any]]:
    remedy = 'send a JSON list such as [{"type": "function", "function": {"name": ..., "parameters": {...}}}]'
    tools = parse_json("tools", text, remedy)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RequestError("tools", "not a list of objects", remedy)
    return tools


def build_prompt(
    tokenizer: Any, text_input: str | None, messages: str | None, tools: str | None, *, interactive: bool = False
) -> Prompt:
    """Exactly one of text_input and messages. Raw text is encoded as the tokenizer does on its own (with its beginning
    token, if it has one); a chat template writes its special tokens itself. interactive: the input is what is new in a
    session, so it is also given as what follows the session's history."""
    if (text_input is None) == (messages is None):
        problem = "neither was sent" if text_input is None else "both were sent"
        raise RequestError("text_input, messages", problem, "send exactly one of the two")
    if text_input is not None:
        if tools is not None:
            raise RequestError("tools", "they are part of a chat", "send messages in place of text_input")
        if not text_input:
            raise RequestError("text_input", "empty", "send at least one character")
        continuation = encode_inner(tokenizer, "text_input", text_input) if interactive else []
        input_ids = encode(tokenizer, "text_input", text_input, special=True)
        return Prompt(input_ids, text_input, False, continuation)
    assert messages is not None
    conversation = parse_messages(messages)
    given_tools = None if tools is None else parse_tools(tools)
    text = render_chat(tokenizer, conversation, given_tools)
    continuation = []
    if interactive:
        continuation = encode_inner(tokenizer, "messages", render_continuation(tokenizer, conversation))
    return Prompt(encode(tokenizer, "messages", text, special=False), text, True, continuation)


def render_chat(tokenizer: Any, messages: list[Message], tools: list[dict[str, Any]] | None) -> str:
    if tokenizer.chat_template is None:
        raise RequestError(
            "messages", "this model's tokenizer has no chat template", "send text_input, or serve a chat model"
        )
    try:
        return str(
            tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, add_generation_prompt=True)
        )
    except (jinja2.TemplateError, TypeError, KeyError, ValueError, RecursionError) as error:
        raise RequestError(
            "messages", f"the model's chat template refuses them ({error})", "change the roles or their order"
        ) from None


def render_continuation(tokenizer: Any, messages: list[Message]) -> str:
    """What the chat template writes from the end of an assistant's answer on when `messages` follow it: the end of its
    turn, the messages, and the beginning of the next answer. charonia/text/prompts.py does the same for the Python API.

    System messages at the head are left out: they begin a conversation, and the session's has begun.
    """
    new = list(itertools.dropwhile(lambda message: message["role"] == "system", messages))
    if not new:
        raise RequestError("messages", "all of them are the system's", "send one of the user's")

    def after_answer(turns: int) -> str:
        before = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}] * (turns - 1)
        marked = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _ANSWER}]
        parts = render_chat(tokenizer, [*before, *marked, *new], None).split(_ANSWER)
        if len(parts) != 2:
            raise RequestError(
                "interactive",
                "the model's chat template does not show an earlier answer once and as it was",
                "send the whole conversation, without interactive",
            )
        return parts[1]

    text = after_answer(1)
    if after_answer(2) != text:
        raise RequestError(
            "interactive",
            "the model's chat template writes new messages differently after more turns",
            "send the whole conversation, without interactive",
        )
    return text


def encode_inner(tokenizer: Any, field: str, text: str) -> list[int]:
    """Tokens of a text that is not the beginning of one: without what a tokenizer puts before a first word."""
    before = encode(tokenizer, field, "\n", special=False)
    both = encode(tokenizer, field, "\n" + text, special=False)
    if both[: len(before)] == before and len(both) > len(before):
        return both[len(before) :]
    return encode(tokenizer, field, text, special=False)


def encode(tokenizer: Any, field: str, text: str, *, special: bool) -> list[int]:
    try:
        ids = tokenizer(text, add_special_tokens=special, return_attention_mask=False)["input_ids"]
    except UnicodeEncodeError as error:
        raise RequestError(field, f"a lone surrogate at character {error.start}", "send whole characters") from None
    except TypeError:  # the Rust tokenizer's complaint about the same
        raise RequestError(
            field, "text that is not valid Unicode", "send whole characters, no lone surrogates"
        ) from None
    if not ids:
        raise RequestError(field, "no token is left of it", "send a text that is not empty")
    return [int(token) for token in ids]


def encode_bad_words(tokenizer: Any, words: Sequence[str]) -> list[list[int]]:
    """The token sequences that spell each word: at the beginning of a text, after a space, and inside a line.

    A tokenizer may have yet other ways to spell a word (in the middle of another one); those are not found.
    """
    sequences: list[list[int]] = []
    newline = tokenizer("\n", add_special_tokens=False)["input_ids"]
    for index, word in enumerate(words):
        field = f"bad_words[{index}]"
        if not word:
            raise RequestError(field, "empty", "leave it out")
        spellings = [encode(tokenizer, field, word, special=False), encode(tokenizer, field, " " + word, special=False)]
        continued = encode(tokenizer, field, "\n" + word, special=False)
        if continued[: len(newline)] == newline and len(continued) > len(newline):
            spellings.append(continued[len(newline) :])
        sequences.extend(ids for ids in spellings if ids not in sequences)
    return sequences


def pack_bad_words(sequences: Sequence[Sequence[int]]) -> list[list[int]]:
    """[2, n]: row 0 the sequences' ids joined, row 1 their end offsets, padded with -1."""
    ids = [token for sequence in sequences for token in sequence]
    ends: list[int] = []
    for sequence in sequences:
        ends.append((ends[-1] if ends else 0) + len(sequence))
    return [ids, ends + [-1] * (len(ids) - len(ends))]


def parse_logit_bias(text: str) -> tuple[list[int], list[float]]:
    """A JSON object from token id to a bias in [-100, 100]. Whether an id is in the vocabulary, the engine checks."""
    remedy = 'send a JSON object from token id to bias, such as {"42": -100}'
    value = parse_json("logit_bias", text, remedy)
    if not isinstance(value, dict):
        raise RequestError("logit_bias", f"{text[:80]} is no object", remedy)
    ids: list[int] = []
    biases: list[float] = []
    for key, bias in value.items():
        if not key.isascii() or not key.isdigit() or int(key) > 2**31 - 1:
            raise RequestError("logit_bias", f"{key!r} is no token id", remedy)
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not math.isfinite(bias):
            raise RequestError(f"logit_bias[{key}]", f"{_shown(bias)} is no number", "send a number in [-100, 100]")
        if abs(bias) > LOGIT_BIAS_LIMIT:
            raise RequestError(f"logit_bias[{key}]", f"{bias} is out of range", "send a number in [-100, 100]")
        ids.append(int(key))
        biases.append(float(bias))
    return ids, biases
