"""Types of fields that have more than one form, each with its check, its text for people and its JSON schema."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    GetJsonSchemaHandler,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, PydanticCustomError

from charonia_gateway.json_values import TOO_MANY, has_too_many_values

MAX_STOPS = 4
# generated: request limits, from definitions/ by `make generate`
# nesting levels of JSON, because recursive functions need Python's stack for each level; the gateway has the same limit
MAX_DEPTH = 200
# number of bad_words of a request, because the engine compares each with the end of every sequence at every step
MAX_BAD_WORDS = 1000
# bytes of all bad words of a request, because tokenizing them takes the time of a prompt that is six times as long
MAX_BAD_WORDS_BYTES = 65536
# bytes of a bad word in UTF-8, because each is tokenized three times; stop words have the same limit
MAX_BAD_WORD_BYTES = 1024
# maximum of each bias in logit_bias; the minimum is the negative value
MAX_LOGIT_BIAS = 100
# end of generated: request limits
# Far above real conversations. The event loop is blocked while it checks a body, so each list has a limit.
MAX_MESSAGES = 10_000
MAX_PARTS = 10_000
MAX_TOOLS = 1_000
_FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]+", re.ASCII)
MAX_VARIABLES = 10_000  # values in the variables of a chat template, at every depth
MAX_BIASES = 1 << 16  # for example all tokens of one script
MAX_SESSION_ID_BYTES = 256
MAX_CACHE_SALT_BYTES = 256
MAX_TOKEN_ID = 2**31 - 1
NO_SESSION = -1


def wrong(message: str) -> PydanticCustomError:
    """An error for a wrong field. `message` says what would be right. Braces in it are literal."""
    return PydanticCustomError("wrong", "{message}", {"message": message})


def wrong_value(message: str) -> PydanticCustomError:
    """Like `wrong`; the error also shows the value."""
    return PydanticCustomError("wrong_value", "{message}", {"message": message})


def refused(why: str) -> BeforeValidator:
    """The check of a field that this server does not support: accepts only null. `why` says what to do."""

    def check(value: Any) -> None:
        if value is not None:
            raise wrong(why)

    return BeforeValidator(check)


def check_arguments(texts: Iterable[str]) -> None:
    """Check the arguments of all calls in one request. They are JSON strings, so the body's limit of values misses
    them."""
    if has_too_many_values([text.encode("utf-8", "surrogatepass") for text in texts]):
        raise wrong(f"the calls' arguments have {TOO_MANY}")


def _texts(value: Any, what: str, limit: int) -> list[str] | None:
    """Check a text or a list of at most `limit` texts."""
    if value is None:
        return None
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise wrong(f"send a string or a list of at most {limit} strings, none of them empty")
    if len(texts) > limit:
        raise wrong(f"{len(texts)} {what} are too many: send at most {limit}")
    return texts


def _stop(value: Any) -> list[str] | None:
    return _texts(value, "stop words", MAX_STOPS)


def _stop_or_end(value: Any) -> list[str] | bool | None:
    return (value or None) if isinstance(value, bool) else _stop(value)


def _bad_words(value: Any) -> list[str] | None:
    texts = _texts(value, "bad words", MAX_BAD_WORDS)
    sizes = [len(text.encode("utf-8", "surrogatepass")) for text in texts or ()]
    if max(sizes, default=0) > MAX_BAD_WORD_BYTES:
        raise wrong(f"a bad word is too long: send at most {MAX_BAD_WORD_BYTES} bytes each")
    if sum(sizes) > MAX_BAD_WORDS_BYTES:
        raise wrong(f"the bad words have {sum(sizes)} bytes in all: send at most {MAX_BAD_WORDS_BYTES}")
    return texts


def _logit_bias(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise wrong('send an object of token ids and biases such as {"50256": -100}')
    if len(value) > MAX_BIASES:
        raise wrong(f"{len(value)} biases are too many: send at most {MAX_BIASES}")
    biases = {}
    for token, bias in value.items():
        if not re.fullmatch(r"\d{1,9}", token, re.ASCII):
            raise wrong(f"{token[:40]!r} is not a token id: keys are whole numbers from 0 on, as strings")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not abs(bias) <= MAX_LOGIT_BIAS:
            raise wrong(f"the bias of token {token} is not a number from -{MAX_LOGIT_BIAS} to {MAX_LOGIT_BIAS}")
        biases[int(token)] = float(bias)
    return biases


def join_parts(texts: Iterable[str], role: str | None) -> str:
    """Join the parts of a message's content. Parts of an assistant's message are pieces of one text. Parts of other
    messages are separate texts, such as documents or tool results."""
    return ("" if role == "assistant" else "\n").join(text for text in texts if text)


def text_of_parts(value: Any, role: str | None = None) -> str | None:
    """A message's content: a string, null, or OpenAI's list of text parts, which are joined as the role requires."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong('send a string or a list of parts {"type": "text", "text": ...}')
    if len(value) > MAX_PARTS:
        raise wrong(f"{len(value)} parts are too many: send at most {MAX_PARTS}")
    texts = []
    for number, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "refusal" and role == "assistant" and isinstance(part.get("refusal"), str):
            texts.append(part["refusal"])
            continue
        if kind != "text" or not isinstance(part.get("text"), str):
            said = f"is of type {kind!r}" if isinstance(kind, str) else "has no type"
            raise wrong(f'part {number} {said[:60]}: this model takes {{"type": "text", "text": ...}} only')
        texts.append(part["text"])
    return join_parts(texts, role)


def _content(value: Any, info: ValidationInfo) -> str | None:
    return text_of_parts(value, info.data.get("role"))


def function_name(what: str, name: Any, limit: int = 64) -> str:
    """Check the name of a function that a model may call. what: the owner of the name, for the error."""
    if isinstance(name, str) and len(name) <= limit and _FUNCTION_NAME.fullmatch(name):
        return name
    right = f"send 1 to {limit} characters of a-z, A-Z, 0-9, _, - and ."
    if name is None:
        raise wrong(f"the name of {what} is missing: {right}")
    if not isinstance(name, str):
        raise wrong(f"the name of {what} is not a string: {right}")
    shown = repr(name) if len(name) <= 80 else f"{name[:80]!r}... ({len(name)} characters)"
    raise wrong(f"the name of {what}, {shown}, is not valid: {right}")


def function_list(value: Any) -> list[Any]:
    """Check that the value is a list of tools. The tools themselves are not checked."""
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise wrong(f"send a list of at most {MAX_TOOLS} functions")
    return value


_FORMS: dict[type, str] = {dict: "an object", str: "a text", bool: "true or false"}


def check_function(name: str, function: dict[str, Any], schema: str = "parameters") -> None:
    """Check the fields of a function. schema: the name of the field with its JSON schema."""
    for field, form in ((schema, dict), ("description", str), ("strict", bool)):
        if not isinstance(function.get(field), form | None):
            raise wrong(f"function {name}: {field} is neither null nor {_FORMS[form]}")
    others = {"parameters", "input_schema"} - {schema}
    if misplaced := next((other for other in others if other in function), None):
        raise wrong(f"function {name}: {misplaced} is called {schema} here")
    if isinstance((function.get(schema) or {}).get("strict"), bool):
        raise wrong(f"function {name}: strict is within {schema}, where it has no effect: send it next to {schema}")


def check_names(names: Iterable[str]) -> None:
    """Check that the functions of one request have different names."""
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise wrong(f"two functions are called {twice!r}: give each function its own name")


def unsupported(field: str, kinds: Iterable[Any], supported: Container[Any] = ("function",)) -> list[str]:
    """Name the entries of other kinds, for a header and the log."""
    return [
        f"{field}[{at}] ({re.sub(r'[^A-Za-z0-9_.+-]', '?', str(kind)[:64])})"
        for at, kind in enumerate(kinds)
        if kind not in supported
    ]


def _tools(value: Any) -> Any:
    if value is None:
        return None
    names = []
    for number, tool in enumerate(function_list(value)):
        kind = tool.get("type") if isinstance(tool, dict) else None
        function = tool.get("function") if isinstance(tool, dict) else None
        if kind == "custom":
            continue
        if kind != "function" or not isinstance(function, dict):
            raise wrong(f'tool {number} is not a function: send {{"type": "function", "function": {{"name": ...}}}}')
        name = function_name(f"function {number}", function.get("name"))
        if misplaced := next((field for field in ("strict", "parameters", "description") if field in tool), None):
            raise wrong(
                f"function {name}: {misplaced} is next to function, where it has no effect: send "
                f'{{"type": "function", "function": {{"name": ..., {misplaced!r}: ...}}}}'.replace("'", '"')
            )
        check_function(name, function)
        names.append(name)
    check_names(names)
    return value


def check_prompt_end(add_generation_prompt: bool | None, continue_final_message: bool | None) -> None:
    """Check the fields that say where the prompt of a chat ends."""
    if add_generation_prompt and continue_final_message:
        raise wrong(
            "add_generation_prompt = true begins a new message, continue_final_message continues the last: "
            "send one of them"
        )


def template_end(add_generation_prompt: bool | None, continue_final_message: bool | None) -> dict[str, Any]:
    """The variables of the chat template that end the prompt."""
    if add_generation_prompt is False and not continue_final_message:
        return {"add_generation_prompt": False}
    return {}


def _tool_choice(value: Any) -> Any:
    """Check tool_choice: a string, or one of OpenAI's objects, which name one function or the allowed ones."""
    if value is None or (isinstance(value, str) and value in ("auto", "none", "required")):
        return value
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        mode, tools = allowed_tools(value.get("allowed_tools"))
        names = [_named_function(tool) for tool in tools]
        if None in names:
            raise wrong(
                f"allowed_tools: entry {names.index(None)} of tools is not a function: send "
                '{"type": "function", "function": {"name": ...}}'
            )
        named = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
    name = _named_function(value)
    if name is None:
        raise wrong_value(
            'send "auto", "none", "required", {"type": "function", "function": {"name": ...}} or {"type": '
            '"allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}'
        )
    return {"type": "function", "function": {"name": name}}


def _named_function(tool: Any) -> str | None:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def allowed_tools(value: Any) -> tuple[str, list[Any]]:
    """Check an object with the mode and the tools of allowed_tools, and return both. Does not check each tool."""
    mode, tools = (value.get("mode"), value.get("tools")) if isinstance(value, dict) else (None, None)
    if mode not in ("auto", "required"):
        raise wrong('allowed_tools: send its mode, "auto" or "required"')
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        raise wrong(f"allowed_tools: send a list of 1 to {MAX_TOOLS} tools, or tool_choice = none to allow no tool")
    return str(mode), tools


def check_allowed(names: Iterable[str], offered: Container[str]) -> None:
    """Check that all names of allowed_tools are names of functions in `tools`."""
    if unknown := next((name for name in names if name not in offered), None):
        raise wrong(f"tool_choice: allowed_tools names {unknown[:64]!r}, which is not a function in tools")


def _template_variables(value: dict[str, Any]) -> dict[str, Any]:
    left: list[Any] = [value]
    count = 0
    while left:
        outer = left.pop()
        inner = outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ()
        count += len(inner)
        if count > MAX_VARIABLES:
            raise wrong(f"too many values: send at most {MAX_VARIABLES}, at all depths together")
        left.extend(inner)
    return value


def _text_modality(value: Any) -> Any:
    if value not in (None, ["text"]):
        raise wrong('answers are text: send ["text"], or leave it out')
    return value


def _prompt(value: Any) -> list[str] | list[list[int]]:
    """A text, several texts, a list of token ids, or several such lists."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(prompt, str) for prompt in value):
            return value
        if type(value[0]) is int:
            return [token_ids(value)]
        if all(isinstance(prompt, list) and prompt for prompt in value):
            return [token_ids(prompt) for prompt in value]
    raise wrong("send a string, a list of strings, a list of token ids or a list of such lists, none of them empty")


def token_ids(value: Any) -> list[int]:
    """Check a list of token ids. The server checks whether they are in the vocabulary."""
    if not isinstance(value, list):
        raise wrong("send a list of token ids")
    for position, token in enumerate(value):
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            raise wrong(f"entry {position} is not a token id: send only whole numbers from 0 on")
    return value


def _session_id(value: Any) -> str | None:
    """Return a session id as a string. LMDeploy's clients send whole numbers; -1 means no session."""
    if value is None or (isinstance(value, int) and value == NO_SESSION):
        return None
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise wrong("send a string or a whole number, or -1 for none")
    return _short_text(str(value), MAX_SESSION_ID_BYTES)


def _cache_salt(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise wrong("send a string that is not empty, or leave it out")
    return _short_text(value, MAX_CACHE_SALT_BYTES)


def _short_text(text: str, most_bytes: int) -> str:
    text = text[: most_bytes + 1]
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise wrong("it has a lone surrogate: send whole characters") from None
    if size > most_bytes:
        raise wrong(f"it is too long: send at most {most_bytes} bytes")
    return text


class OrText:
    """Adds a plain string to a field's JSON schema. The field has a check that converts the string."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        other = handler(schema)
        return {"anyOf": [_STRING, *other.get("anyOf", [other])]}


def _schema(*forms: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [*forms, {"type": "null"}]})


_STRING = {"type": "string"}
_STRINGS = {"type": "array", "items": {"type": "string"}}

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]  # OpenAI's values of reasoning effort
Stop = Annotated[list[str] | None, BeforeValidator(_stop), _schema(_STRING, {**_STRINGS, "maxItems": MAX_STOPS})]
StopOrEnd = Annotated[
    bool | list[str] | None,
    BeforeValidator(_stop_or_end),
    _schema({"type": "boolean"}, _STRING, {**_STRINGS, "maxItems": MAX_STOPS}),
]
BadWords = Annotated[
    list[str] | None, BeforeValidator(_bad_words), _schema(_STRING, {**_STRINGS, "maxItems": MAX_BAD_WORDS})
]
LogitBias = Annotated[
    dict[int, float] | None,
    BeforeValidator(_logit_bias),
    _schema(
        {
            "type": "object",
            "additionalProperties": {"type": "number", "minimum": -MAX_LOGIT_BIAS, "maximum": MAX_LOGIT_BIAS},
            "maxProperties": MAX_BIASES,
        }
    ),
]
Content = Annotated[
    str | None,
    BeforeValidator(_content),
    _schema(_STRING, {"type": "array", "items": {"type": "object"}, "maxItems": MAX_PARTS}),
]
TOOL_LIST = _schema({"type": "array", "items": {"type": "object"}, "maxItems": MAX_TOOLS})
OBJECT = _schema({"type": "object"})
TemplateVariables = Annotated[dict[str, Any], AfterValidator(_template_variables)]
Tools = Annotated[list[dict[str, Any]] | None, BeforeValidator(_tools), TOOL_LIST]
ToolChoice = Annotated[
    str | dict[str, Any] | None,
    BeforeValidator(_tool_choice),
    _schema({"enum": ["auto", "none", "required"]}, {"type": "object"}),
]
_NULL = WithJsonSchema({"type": "null"})
Functions = Annotated[None, refused("it is the older form of tools: send tools"), _NULL]
FunctionCall = Annotated[None, refused("it is the older form of tool_choice: send tool_choice"), _NULL]
OfChat = Annotated[None, refused("tools are part of a chat: send it to /v1/chat/completions, or leave it out"), _NULL]
Audio = Annotated[None, refused("answers are text: leave it out"), _NULL]
TextModality = Annotated[
    list[str] | None, BeforeValidator(_text_modality), _schema({"type": "array", "items": {"const": "text"}})
]
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}}
TokenIds = Annotated[list[int], PlainValidator(token_ids), WithJsonSchema(_TOKENS)]
_SOME = {"minItems": 1}
Prompt = Annotated[
    list[str] | list[list[int]],
    PlainValidator(_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                _STRING,
                {**_STRINGS, **_SOME},
                {**_TOKENS, **_SOME},
                {"type": "array", "items": {**_TOKENS, **_SOME}, **_SOME},
            ]
        }
    ),
]
ChatTemplate = Annotated[Any, refused("the model's own chat template is used: leave chat_template out")]
SessionId = Annotated[str | None, BeforeValidator(_session_id), _schema(_STRING, {"type": "integer"})]
CacheSalt = Annotated[
    str | None,
    BeforeValidator(_cache_salt),
    _schema({**_STRING, "minLength": 1, "maxLength": MAX_CACHE_SALT_BYTES}),
]
ADD_GENERATION_PROMPT = "false: the prompt ends after the last message, without the beginning of a new one"
CONTINUE_FINAL_MESSAGE = "true: the last message is the assistant's, and the response continues its text"
THINKING_BUDGET = "most tokens of reasoning; then the engine ends it, and the content follows"
CACHE_SALT = "the request finds only those cache entries that requests with the same salt computed"
