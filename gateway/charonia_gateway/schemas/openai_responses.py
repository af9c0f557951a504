"""OpenAI's Responses. Fields have OpenAI's names. A field that this server does not support is rejected by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, ClassVar, get_args

from charonia_client import GenerateRequest, Guide
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from charonia_gateway.schemas.fields import (
    CACHE_SALT,
    OBJECT,
    THINKING_BUDGET,
    TOOL_LIST,
    CacheSalt,
    Effort,
    allowed_tools,
    check_allowed,
    check_function,
    check_names,
    function_list,
    function_name,
    refused,
    unsupported,
    wrong,
    wrong_value,
)
from charonia_gateway.schemas.media import name_replaced
from charonia_gateway.schemas.requests import INT32, engine_top_p
from charonia_gateway.schemas.response_input import input_items, offered_name
from charonia_gateway.schemas.structured import refuse_guides

MAX_METADATA = 16
_EFFORTS = get_args(Effort)
_SUMMARIES = ("auto", "concise", "detailed")
# Fields of other routes that change a response, and the fields of this route that replace them.
_REPLACED = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "stop": "max_output_tokens, or stop to /v1/chat/completions",
}
# The allowed fields of a format, by its type. Other fields could constrain the response, so they are rejected.
_FORMAT = {
    "text": ("type",),
    "json_object": ("type",),
    "json_schema": ("type", "name", "schema", "description", "strict"),
}
_ENCRYPTED = "reasoning.encrypted_content"  # here reasoning is plain text within its item
_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (_LOGPROBS, _ENCRYPTED)


def _text(value: Any) -> Any:
    """Check `text` and its fields."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise wrong('send {"format": ...}')
    if misplaced := next((name for name in ("type", "schema", "json_schema") if name in value), None):
        raise wrong(f'{misplaced} is next to format, where it has no effect: send {{"format": {{"type": ...}}}}')
    form = value.get("format")
    if form is None:
        return value
    if not isinstance(form, dict) or form.get("type") not in ("text", "json_object", "json_schema"):
        raise wrong('format: send {"type": "text"}, json_object or json_schema')
    if misplaced := next((name for name in form if name not in _FORMAT[form["type"]]), None):
        raise wrong(
            f"format: {misplaced[:64]} does not belong to type {form['type']!r} here: to give a schema, send "
            '{"type": "json_schema", "name": ..., "schema": {...}}'
        )
    if form["type"] == "json_schema" and not (
        isinstance(form.get("schema"), dict) and isinstance(form.get("name"), str)
    ):
        raise wrong("format: json_schema needs a name and a schema, which is an object")
    return value


def _tools(value: Any) -> list[dict[str, Any]] | None:
    if value is None:
        return None
    tools = function_list(value)
    check_names(_checked_names(tools, ""))
    return tools


def _checked_names(tools: list[Any], namespace: str) -> Iterator[str]:
    """Check the functions, and yield the names under which the model sees them."""
    for number, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(kind, str):
            raise wrong(f'tool {number} has no type: send {{"type": "function", "name": ..., "parameters": ...}}')
        if kind != "function" and kind.startswith("function"):
            raise wrong(f'tool {number} is of type {kind[:40]!r}: send "function"')
        if kind == "namespace" and not namespace:
            yield from _checked_names(
                function_list(tool.get("tools")), function_name(f"namespace {number}", tool.get("name"))
            )
        if kind != "function":
            continue  # OpenAI's own tools
        if "name" not in tool and isinstance(tool.get("function"), dict):
            raise wrong(
                f"tool {number} is in the form of /v1/chat/completions: here a function's name and parameters are not "
                'within function; send {"type": "function", "name": ..., "parameters": ...}'
            )
        name = function_name(f"function {number}", tool.get("name"))
        check_function(name, tool)
        yield offered_name(namespace, name)


def _tool_choice(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        _, tools = allowed_tools(value)
        if any(not isinstance(tool, dict) or not isinstance(tool.get("type"), str) for tool in tools):
            raise wrong('allowed_tools: a tool has no type: send {"type": "function", "name": ...}')
        if not _allowed_names(value):
            raise wrong('allowed_tools: none of its tools is a function: send {"type": "function", "name": ...}')
        return value
    named = isinstance(value, dict) and value.get("type") == "function" and isinstance(value.get("name"), str)
    if value not in (None, "auto", "none", "required") and not named:
        raise wrong_value(
            'send "auto", "none", "required", {"type": "function", "name": ...} or {"type": "allowed_tools", "mode": '
            '..., "tools": [...]}'
        )
    return value


def _allowed_names(choice: dict[str, Any]) -> list[str]:
    """The names of the functions in allowed_tools. OpenAI's own tools have no effect there, as in `tools`."""
    return [str(tool.get("name")) for tool in choice["tools"] if tool["type"] == "function"]


def _reasoning(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("effort") not in (None, *_EFFORTS):
        raise wrong(f"effort: send one of {', '.join(_EFFORTS)}")
    if any(value.get(name) not in (None, *_SUMMARIES) for name in ("summary", "generate_summary")):
        raise wrong(f"summary: send one of {', '.join(_SUMMARIES)}")
    return value


def _include(value: Any) -> Any:
    if value is not None and (not isinstance(value, list) or any(name not in _INCLUDED for name in value)):
        raise wrong(f"nothing more can be included: leave include out, or send some of {', '.join(_INCLUDED)}")
    return value


def _truncation(value: Any) -> Any:
    if value not in (None, "disabled"):
        raise wrong('a conversation that does not fit is rejected, not truncated: send "disabled"')
    return value


def checked_metadata(value: dict[str, str] | None) -> dict[str, str] | None:
    if value is not None and (
        len(value) > MAX_METADATA or any(len(key) > 64 or len(text) > 512 for key, text in value.items())
    ):
        raise wrong(f"send at most {MAX_METADATA} keys of 64 and values of 512 characters")
    return value


class ResponsesRequest(BaseModel):
    """POST /v1/responses"""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    operation: ClassVar[str] = "chat"
    timings: ClassVar[None] = None  # no field of this route

    model: str = Field(description="a name that /v1/models lists")
    input: Annotated[
        list[dict[str, Any]],
        BeforeValidator(input_items),
        WithJsonSchema({"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "minItems": 1}]}),
    ] = Field(description="the new part of the conversation: the user's text, or messages, calls and their outputs")
    instructions: str | None = Field(None, description="the system message, for this response only")
    previous_response_id: str | None = Field(
        None, min_length=1, max_length=200, description="id of a stored response whose conversation is continued"
    )
    store: bool | None = Field(
        None, description="store the response and its conversation for a limited time; default: false"
    )
    max_output_tokens: int | None = Field(None, ge=1, le=INT32, description="maximum tokens of the response")
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy; unset: the model's default")
    top_p: float | None = Field(None, ge=0, le=1)
    stream: bool | None = Field(None, description="server-sent events")
    metadata: Annotated[dict[str, str] | None, AfterValidator(checked_metadata)] = Field(
        None, description="returned with the response"
    )
    text: Annotated[Any, BeforeValidator(_text), OBJECT] = Field(
        None, description="`format` of type text, json_object or json_schema"
    )
    truncation: Annotated[Any, BeforeValidator(_truncation), WithJsonSchema({"enum": ["disabled", None]})] = None
    tools: Annotated[list[dict[str, Any]] | None, BeforeValidator(_tools), TOOL_LIST] = Field(
        None, description="functions that the model may call, in the format of its chat template"
    )
    tool_choice: Annotated[
        Any,
        BeforeValidator(_tool_choice),
        WithJsonSchema({"anyOf": [{"enum": ["auto", "none", "required", None]}, {"type": "object"}]}),
    ] = None
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most")
    reasoning: Annotated[Any, BeforeValidator(_reasoning), OBJECT] = Field(
        None, description="`effort` is a variable of the chat template; none also sets enable_thinking = false"
    )
    thinking_budget: int | None = Field(None, ge=0, le=INT32, description=THINKING_BUDGET)
    max_tool_calls: Annotated[Any, refused("this server calls no tools: leave max_tool_calls out")] = None
    include: Annotated[
        Any,
        BeforeValidator(_include),
        WithJsonSchema({"anyOf": [{"type": "array", "items": {"enum": list(_INCLUDED)}}, {"type": "null"}]}),
    ] = Field(None, description=f"`{_LOGPROBS}`; or `{_ENCRYPTED}`, which has no effect")
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description=f"number of most likely tokens per position; needs include = [`{_LOGPROBS}`]"
    )
    cache_salt: CacheSalt = Field(None, description=CACHE_SALT)
    background: bool | None = Field(
        None,
        description="return immediately, and generate the response in the background; GET /v1/responses/{id} returns "
        "it. It is stored",
    )
    conversation: Annotated[Any, refused("there are no conversations: send previous_response_id")] = None
    prompt: Annotated[Any, refused("there are no stored prompts: send instructions and input")] = None
    context_management: Annotated[Any, refused("this server does not shorten conversations: leave it out")] = None
    moderation: Annotated[Any, refused("this server does not moderate: leave it out")] = None

    @model_validator(mode="after")
    def _consistent(self) -> ResponsesRequest:
        refuse_guides(self.model_extra, 'send text = {"format": {"type": "json_schema", "name": ..., "schema": {...}}}')
        for name, remedy in _REPLACED.items():
            if (self.model_extra or {}).get(name) not in (None, []):
                raise wrong(f"{name} is not a field of this route: send {remedy}")
        last = [item for item in self.input if item["type"] != "ignored"][-1]
        if last["type"] == "function_call":
            raise wrong("input: the last item is a call: also send its function_call_output")
        if last["type"] == "reasoning" or last.get("role") == "assistant":
            raise wrong(
                "input: the last message is the assistant's: end with the user's message, or send "
                "continue_final_message = true to /v1/chat/completions"
            )
        if self.background and self.store is False:
            raise wrong("background = true needs a stored response: send store = true, or leave store out")
        if self.top_logprobs and not self.with_logprobs:
            raise wrong(f"top_logprobs needs include = [{_LOGPROBS!r}]")
        forced = self.tool_choice not in (None, "auto", "none")
        if forced and not self.functions():
            raise wrong("tool_choice needs tools")
        names = [one["function"]["name"] for one in self.functions() or ()]
        if forced and self._allows:
            check_allowed(_allowed_names(self.tool_choice), names)
        elif isinstance(self.tool_choice, dict) and self.tool_choice["name"] not in names:
            raise wrong(f"tool_choice: there is no function {self.tool_choice['name'][:64]!r} in tools")
        return self

    @property
    def with_logprobs(self) -> bool:
        return _LOGPROBS in (self.include or ())

    @property
    def is_stored(self) -> bool:
        return bool(self.store or self.background)

    @property
    def _allows(self) -> bool:
        """Whether tool_choice is allowed_tools."""
        return isinstance(self.tool_choice, dict) and self.tool_choice["type"] == "allowed_tools"

    @property
    def _engine_tool_choice(self) -> Any:
        """tool_choice in the form of chat completions."""
        if not isinstance(self.tool_choice, dict):
            return self.tool_choice
        names = _allowed_names(self.tool_choice) if self._allows else [self.tool_choice["name"]]
        named = [{"type": "function", "function": {"name": name}} for name in names]
        if not self._allows:
            return named[0]
        return {"type": "allowed_tools", "allowed_tools": {"mode": self.tool_choice["mode"], "tools": named}}

    @property
    def engine_names(self) -> dict[str, str]:
        """This request's names for fields of the engine, where they differ."""
        return {
            "guided_decoding_guide": "text.format",
            "max_tokens": "max_output_tokens",
            "messages": "input",
            "logprobs": "top_logprobs",
        }

    @property
    def guide(self) -> Guide | None:
        form = (self.text or {}).get("format") or {}
        if form.get("type") == "json_schema":
            return Guide("json_schema", json.dumps(form["schema"], ensure_ascii=False))
        return Guide("json") if form.get("type") == "json_object" else None

    def functions(self) -> list[dict[str, Any]] | None:
        """`tools` in the form of chat completions. None if no tool may be called."""
        if not self.tools or self.tool_choice == "none":
            return None
        fields = ("description", "parameters", "strict")
        return [
            {
                "type": "function",
                "function": {"name": name, **{key: tool[key] for key in fields if tool.get(key) is not None}},
            }
            for name, (_, tool) in self.offered().items()
        ] or None

    def offered(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """The functions by the names that the model sees, each with its namespace, or with an empty text."""
        return {
            offered_name(space, tool["name"]): (space, tool)
            for outer in self.tools or ()
            for space, tool in (
                [(outer["name"], inner) for inner in outer["tools"]] if outer["type"] == "namespace" else [("", outer)]
            )
            if tool["type"] == "function"
        }

    @cached_property
    def ignored_parts(self) -> list[str]:
        """The tools and input items that this server does not support, and the parts of items that are not text."""
        tools = self.tools or ()
        found = unsupported("tools", (tool["type"] for tool in tools), ("function", "namespace"))
        for at, tool in enumerate(tools):
            inner = tool["tools"] if tool["type"] == "namespace" else ()
            found += unsupported(f"tools[{at}].tools", (one["type"] for one in inner))
        found += unsupported("input", (item.get("ignored") for item in self.input), (None,))
        return found + name_replaced("input", (item.get("media", ()) for item in self.input))

    def template_variables(self) -> dict[str, Any] | None:
        effort = (self.reasoning or {}).get("effort")
        variables: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
        if effort == "none":
            variables["enable_thinking"] = False
        if self.thinking_budget is not None:
            variables["thinking_budget"] = self.thinking_budget
        return variables or None

    def _with_instructions(self, conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add `instructions` to the conversation. It has at most one system message, because some chat templates reject
        more."""
        if not self.instructions:
            return conversation
        has_system = conversation[0]["role"] == "system"
        texts = [self.instructions, *(message["content"] for message in conversation[:has_system])]
        return [{"role": "system", "content": "\n\n".join(texts)}, *conversation[has_system:]]

    def engine_request(
        self, conversation: list[dict[str, Any]], session_id: str | None, *, reasons: bool
    ) -> GenerateRequest:
        """Build the engine's request. conversation: all messages, including the new ones, without the instructions.
        reasons: the model's responses may contain reasoning, which is returned separately."""
        tools = self.functions()
        return GenerateRequest(
            messages=self._with_instructions(conversation),
            tools=tools,
            tool_choice=self._engine_tool_choice if tools and self.tool_choice != "auto" else None,
            parallel_tool_calls=self.parallel_tool_calls if tools else None,
            chat_template_kwargs=self.template_variables(),
            guide=self.guide,
            parsed=True if tools or reasons else None,
            session_id=session_id,
            cache_salt=self.cache_salt,
            max_tokens=self.max_output_tokens,
            thinking_budget=self.thinking_budget,
            temperature=self.temperature,
            top_p=engine_top_p(self.top_p),
            stream=bool(self.stream or self.background),
            logprobs=(self.top_logprobs or 0) if self.with_logprobs else None,
        )
