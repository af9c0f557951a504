"""Anthropic's Messages. Fields have Anthropic's names. A field that this server does not support is rejected by
name."""

from __future__ import annotations

import itertools
import json
import re
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from charonia_client import GenerateRequest, Guide, TokenizeRequest
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from charonia_gateway.schemas.fields import (
    CACHE_SALT,
    MAX_MESSAGES,
    MAX_PARTS,
    OBJECT,
    TOOL_LIST,
    CacheSalt,
    check_function,
    check_names,
    function_list,
    function_name,
    join_parts,
    refused,
    text_of_parts,
    unsupported,
    wrong,
    wrong_value,
)
from charonia_gateway.schemas.media import NAME_MEDIA, media_of, name_replaced
from charonia_gateway.schemas.requests import INT32, engine_top_p
from charonia_gateway.schemas.structured import refuse_guides
from charonia_gateway.schemas.turns import Turns

MAX_STOP_SEQUENCES = 64
MIN_BUDGET = 1024  # Anthropic's limit
_MAX_NAME = 128  # characters of a tool's name
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_ROLE_OF = {"tool_use": "assistant", "thinking": "assistant", "redacted_thinking": "assistant", "tool_result": "user"}
# Start of the first block in Claude Code's system prompt. The block differs in each request, so no prompt would be
# found in the prefix cache.
_BILLING = "x-anthropic-billing-header:"


# Tools that Anthropic's servers run, as web_search_20250305 and mcp_toolset, and their blocks.
_SERVERS_TOOL = re.compile(r"\w+_\d{8}|mcp_\w+", re.ASCII)
_SERVERS_BLOCK = re.compile(r"(server|mcp)_tool_use|\w+_tool_result", re.ASCII)
# The required fields of each supported block.
_BLOCKS: dict[str, dict[str, type]] = {
    "text": {"text": str},
    "thinking": {"thinking": str},
    "redacted_thinking": {},
    "tool_use": {"id": str, "name": str, "input": dict},
    "tool_result": {"tool_use_id": str},
}


def _stop_sequences(value: Any) -> Any:
    texts = isinstance(value, list) and all(isinstance(text, str) and text for text in value)
    if value is not None and (not texts or len(value) > MAX_STOP_SEQUENCES):
        raise wrong(f"send a list of at most {MAX_STOP_SEQUENCES} strings, none of them empty")
    return value


def _system(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(_BILLING):
        return value.partition("\n")[2]
    if isinstance(value, list):
        kept = [part for part in value if not (isinstance(part, dict) and str(part.get("text")).startswith(_BILLING))]
        return text_of_parts(kept)
    return text_of_parts(value)


def _blocks(value: Any, info: ValidationInfo) -> list[dict[str, Any]]:
    """Check a message's content: a text, or content blocks. Keep only the fields of a block that are used."""
    if value is None and info.data.get("role") == "assistant":
        return []
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise wrong("send a text, or a list of content blocks")
    if len(value) > MAX_PARTS:
        raise wrong(f"{len(value)} content blocks are too many: send at most {MAX_PARTS}")
    return [_block(number, block) for number, block in enumerate(value)]


def _block(number: int, block: Any) -> dict[str, Any]:
    kind = block.get("type") if isinstance(block, dict) else None
    needs = _BLOCKS.get(kind) if isinstance(kind, str) else None
    if needs is None and isinstance(kind, str) and _SERVERS_BLOCK.fullmatch(kind):
        return {"type": "ignored", "ignored": kind}
    if needs is None:
        said = f"is of type {kind!r}" if isinstance(kind, str) else "has no type"
        raise wrong(f"part {number} {said[:60]}: this model takes text, tool_use, tool_result and thinking")
    if kind == "tool_use" and block.get("input") is None:
        block = {**block, "input": {}}
    for name, form in needs.items():
        if not isinstance(block.get(name), form):
            what = "an object" if form is dict else "a text"
            raise wrong(f"part {number}, of type {kind!r}: its {name} is missing, or is not {what}")
    kept = {"type": kind, **{name: block[name] for name in needs}}
    if kind == "tool_result":
        kept["text"] = text_of_parts(block.get("content")) or ""
        kept["is_error"] = block.get("is_error") is True
    return kept


def _thinking(value: Any) -> Any:
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("enabled", "adaptive", "between_tools", "disabled"):
        types = '{"type": "adaptive"}, {"type": "between_tools"} or {"type": "disabled"}'
        raise wrong_value(f'send {types}, or {{"type": "enabled", "budget_tokens": ...}}')
    budget = value.get("budget_tokens")
    if kind == "enabled" and (type(budget) is not int or not MIN_BUDGET <= budget <= INT32):
        raise wrong_value(f"budget_tokens must be a whole number from {MIN_BUDGET} to {INT32}")
    if value.get("display") not in (None, "summarized", "omitted"):
        raise wrong('display: send "summarized" or "omitted"')
    return value


def _tools(value: Any) -> list[dict[str, Any]] | None:
    """Return the tools as functions in OpenAI's form, which chat templates expect."""
    if value is None:
        return None
    tools = [_function(number, tool) for number, tool in enumerate(function_list(value))]
    check_names(one["function"]["name"] for one in tools if one["type"] == "function")
    return tools


def _function(number: int, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise wrong(f'tool {number} is not an object: send {{"name": ..., "input_schema": ...}}')
    if (kind := tool.get("type")) not in (None, "custom"):
        if isinstance(kind, str) and _SERVERS_TOOL.fullmatch(kind):
            return {"type": kind}
        raise wrong(f'tool {number} is of type {str(kind)[:40]!r}: send {{"name": ..., "input_schema": ...}}')
    name = function_name(f"tool {number}", tool.get("name"), _MAX_NAME)
    schema, description = tool.get("input_schema"), tool.get("description")
    if not isinstance(schema, dict):
        raise wrong(f"tool {name}: input_schema is missing, or is not an object")
    check_function(name, tool, "input_schema")
    function: dict[str, Any] = {
        "name": name,
        **({"description": description} if description else {}),
        "parameters": schema,
    }
    if tool.get("strict") is True:
        function["strict"] = True
    return {"type": "function", "function": function}


def _tool_choice(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if value is not None and kind not in ("auto", "any", "tool", "none"):
        raise wrong_value('send {"type": "auto"}, "any" or "none", or {"type": "tool", "name": ...}')
    if kind == "tool" and not isinstance(value.get("name"), str):
        raise wrong("name is missing: send the name of the tool that is to be called")
    return value


def _format(value: Any) -> Any:
    fits = isinstance(value, dict) and value.get("type") == "json_schema" and isinstance(value.get("schema"), dict)
    fits = fits and "json_schema" not in value
    if value is not None and not fits:
        raise wrong('send {"type": "json_schema", "schema": {...}}')
    return value


def _output_config(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise wrong('send an object with "format" or "effort"')
    if misplaced := next((name for name in ("type", "schema", "json_schema") if name in value), None):
        raise wrong(
            f"{misplaced} is next to format, where it has no effect: send "
            '{"format": {"type": "json_schema", "schema": {...}}}'
        )
    if value.get("effort") not in (None, *_EFFORTS):
        raise wrong(f"effort: send one of {', '.join(_EFFORTS)}")
    _format(value.get("format"))
    return value


_TEXT_OR_OBJECTS = [{"type": "string"}, {"type": "array", "items": {"type": "object"}, "maxItems": MAX_PARTS}]


class AnthropicMessage(BaseModel):
    """One turn."""

    model_config = ConfigDict(extra="ignore", strict=True)

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[dict[str, Any]], BeforeValidator(_blocks), WithJsonSchema({"anyOf": _TEXT_OR_OBJECTS})] = (
        Field(description="a text, or blocks of type text, tool_use, tool_result, thinking and redacted_thinking")
    )

    @model_validator(mode="after")
    def _belongs_to_role(self) -> AnthropicMessage:
        for number, block in enumerate(self.content):
            if (role := _ROLE_OF.get(block["type"], self.role)) != self.role:
                raise wrong(f"part {number} is of type {block['type']!r}, which belongs to the role {role!r}")
        return self

    def add_to(self, turns: Turns) -> None:
        """Add the blocks to the turns. Consecutive texts are joined."""
        texts: list[str] = []
        for block in self.content:
            match block["type"]:
                case "text":
                    texts.append(block["text"])
                case "thinking":
                    turns.think(block["thinking"])
                case "tool_use":
                    turns.call(block["id"], block["name"], block["input"])
                case "tool_result":
                    if texts:
                        turns.say(self.role, join_parts(texts, self.role))
                        texts = []
                    text = block["text"]
                    turns.result(block["tool_use_id"], f"Error: {text}" if block["is_error"] else text)
                # A redacted thought cannot be read here.
        if texts or not self.content:
            turns.say(self.role, join_parts(texts, self.role))


class CountTokensRequest(BaseModel):
    """POST /v1/messages/count_tokens"""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    operation: ClassVar[str] = "tokenize"
    timings: ClassVar[None] = None  # not a field of Anthropic's API

    model: str = Field(description="a name that /v1/models lists")
    messages: Annotated[
        list[AnthropicMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES), NAME_MEDIA
    ]
    system: Annotated[
        str | None, BeforeValidator(_system), WithJsonSchema({"anyOf": [*_TEXT_OR_OBJECTS, {"type": "null"}]})
    ] = Field(None, description="a text, or text blocks, which are joined")
    tools: Annotated[list[dict[str, Any]] | None, BeforeValidator(_tools), TOOL_LIST] = Field(
        None, description="name, description, input_schema, strict; tools that Anthropic's servers run are ignored"
    )
    tool_choice: Annotated[Any, BeforeValidator(_tool_choice), OBJECT] = Field(
        None, description="auto, any, none, or tool with its name; disable_parallel_tool_use"
    )
    thinking: Annotated[Any, BeforeValidator(_thinking), OBJECT] = Field(
        None, description="enabled, adaptive or disabled; budget_tokens: then the engine ends the thinking"
    )
    output_config: Annotated[Any, BeforeValidator(_output_config), OBJECT] = Field(
        None, description="`format` of type json_schema; `effort`, a variable of the chat template"
    )
    output_format: Annotated[Any, BeforeValidator(_format), OBJECT] = Field(
        None, description="older form of output_config.format"
    )

    @model_validator(mode="after")
    def _consistent(self) -> CountTokensRequest:
        refuse_guides(
            self.model_extra, 'send output_config = {"format": {"type": "json_schema", "schema": {...}}} only'
        )
        choice = (self.tool_choice or {}).get("type")
        if self.continues:
            self._check_begun(choice)
        if choice in ("any", "tool") and not self.functions:
            raise wrong("tool_choice needs tools")
        if choice == "tool" and self.tool_choice["name"] not in (one["function"]["name"] for one in self.functions):
            raise wrong(f"tool_choice: there is no tool {self.tool_choice['name'][:128]!r} in tools")
        if self.output_format and (self.output_config or {}).get("format"):
            raise wrong("output_format: output_config.format has the same meaning; send one of them")
        return self

    def _check_begun(self, choice: str | None) -> None:
        """Check the last messages if they are the beginning of the response. The rules are Anthropic's."""
        begun = "messages: the last message is the assistant's, which begins the response"
        last = list(itertools.takewhile(lambda message: message.role == "assistant", reversed(self.messages)))
        if len(last) == len(self.messages):
            raise wrong(f"{begun}: send the user's message before it")
        if any(block["type"] != "text" for message in last for block in message.content):
            raise wrong(f"{begun}: it must be text; after a call send the tool_result")
        text = self.conversation[-1]["content"]
        if not text or text != text.rstrip():
            raise wrong(f"{begun}: its text must not be empty, and must not end with white space")
        if self.shows_thinking:
            raise wrong(f"{begun}: reasoning comes before a response; leave out thinking or the message")
        if choice in ("any", "tool"):
            raise wrong(f"{begun}: tool_choice requires a call instead; send auto")
        if self.guide_field:
            raise wrong(
                f"{begun}: {self.guide_field} constrains the whole response; leave out the field or the message"
            )

    @property
    def continues(self) -> bool:
        """Whether the last message is the beginning of the response."""
        return self.messages[-1].role == "assistant"

    @property
    def guide_field(self) -> str | None:
        """The field that constrains the response, if there is one."""
        if self.output_format:
            return "output_format"
        return "output_config.format" if (self.output_config or {}).get("format") else None

    @property
    def engine_names(self) -> dict[str, str]:
        """This request's names for fields of the engine, where they differ."""
        names = {"stop_words": "stop_sequences", "continue_final_message": "messages"}
        return names | ({"guided_decoding_guide": self.guide_field} if self.guide_field else {})

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is not None and self.thinking["type"] != "disabled"

    @property
    def omits_thinking(self) -> bool:
        """Whether thinking blocks are sent without their text."""
        return self.thinking is not None and self.thinking.get("display") == "omitted"

    @property
    def functions(self) -> list[dict[str, Any]]:
        return [tool for tool in self.tools or () if tool["type"] == "function"]

    @cached_property
    def ignored_parts(self) -> list[str]:
        """The tools and content blocks that this server does not support."""
        found = unsupported("tools", (tool["type"] for tool in self.tools or ()))
        for at, message in enumerate(self.messages):
            kinds = (block.get("ignored") for block in message.content)
            found += unsupported(f"messages[{at}].content", kinds, (None,))
        return found + name_replaced("messages", media_of(self.messages))

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        none = self.tool_choice is not None and self.tool_choice["type"] == "none"
        return None if none else self.functions or None

    @property
    def engine_tool_choice(self) -> Any:
        """tool_choice in OpenAI's form; None if the model may choose."""
        choice = self.tool_choice or {}
        if choice.get("type") == "tool":
            return {"type": "function", "function": {"name": choice["name"]}}
        return "required" if choice.get("type") == "any" else None

    @cached_property
    def conversation(self) -> list[dict[str, Any]]:
        """The conversation in the form of the chat template."""
        turns = Turns()
        if self.system:
            turns.say("system", self.system)
        for message in self.messages:
            message.add_to(turns)
        return turns.messages()

    def template_variables(self) -> dict[str, Any]:
        """Without `thinking` the model does not think: hidden thoughts would use up the response's tokens."""
        variables: dict[str, Any] = {"enable_thinking": self.shows_thinking}
        if self.thinking and self.thinking["type"] == "enabled":
            variables["thinking_budget"] = self.thinking["budget_tokens"]
        if effort := (self.output_config or {}).get("effort"):
            variables["reasoning_effort"] = effort
        return variables

    def tokenize_request(self) -> TokenizeRequest:
        return TokenizeRequest(
            messages=self.conversation,
            tools=self.offered_tools,
            tool_choice=self.engine_tool_choice,
            chat_template_kwargs=self.template_variables(),
            continue_final_message=self.continues,
        )


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages"""

    operation: ClassVar[str] = "chat"

    max_tokens: int = Field(ge=1, le=INT32, description="maximum tokens of the response")
    stop_sequences: Annotated[
        list[str] | None,
        BeforeValidator(_stop_sequences),
        WithJsonSchema({"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": MAX_STOP_SEQUENCES}),
    ] = Field(None, description="texts that end the response; they are not part of it")
    stream: bool | None = Field(None, description="server-sent events")
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy; unset: the model's default")
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, le=INT32, description="the top k tokens; 0: all")
    metadata: Annotated[dict[str, Any] | None, AfterValidator(lambda _: None)] = Field(
        None, description="taken, without effect"
    )
    service_tier: str | None = Field(None, description="taken, without effect")
    cache_salt: CacheSalt = Field(None, description=CACHE_SALT)
    container: Annotated[Any, refused("this server has no containers: leave container out")] = None
    mcp_servers: Annotated[Any, refused("this server calls no MCP servers: leave mcp_servers out")] = None

    @property
    def guide(self) -> Guide | None:
        form = self.output_format or (self.output_config or {}).get("format")
        return Guide("json_schema", json.dumps(form["schema"], ensure_ascii=False)) if form else None

    def engine_request(self, *, reasons: bool) -> GenerateRequest:
        """Build the engine's request. reasons: the model's responses may contain reasoning, which is returned
        separately."""
        tools = self.offered_tools
        single = tools and (self.tool_choice or {}).get("disable_parallel_tool_use") is True
        return GenerateRequest(
            messages=self.conversation,
            tools=tools,
            tool_choice=self.engine_tool_choice,
            parallel_tool_calls=False if single else None,
            chat_template_kwargs=self.template_variables(),
            continue_final_message=self.continues,
            guide=self.guide,
            parsed=True if tools or reasons else None,
            cache_salt=self.cache_salt,
            max_tokens=self.max_tokens,
            thinking_budget=self.template_variables().get("thinking_budget") if reasons else None,
            stop_words=self.stop_sequences or (),
            name_stop_word=bool(self.stop_sequences) or None,
            temperature=self.temperature,
            top_p=engine_top_p(self.top_p),
            top_k=self.top_k,
            stream=bool(self.stream),
        )
