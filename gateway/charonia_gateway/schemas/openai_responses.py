"""OpenAI's Responses. Names of fields are OpenAI's; what this server cannot do is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from charonia_client import GenerateRequest
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from charonia_gateway.schemas.fields import MAX_MESSAGES, MAX_PARTS, refused, wrong
from charonia_gateway.schemas.requests import INT32, engine_top_p

MAX_METADATA = 16
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text")


def _input(value: Any) -> list[dict[str, str]]:
    """Messages {"role", "content"} of what is new in the conversation: a text is the user's message."""
    if isinstance(value, str) and value:
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise wrong("send a text, or a list of messages; neither is empty")
    if len(value) > MAX_MESSAGES:
        raise wrong(f"{len(value)} messages are too many: send at most {MAX_MESSAGES}")
    return [_message(number, item) for number, item in enumerate(value)]


def _message(number: int, item: Any) -> dict[str, str]:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind != "message":
        raise wrong(f"item {number} is {str(kind)[:40]!r}: only messages are taken, no calls and no references")
    role = item.get("role")
    if role not in _ROLES:
        raise wrong(f"item {number}: its role is none of {', '.join(_ROLES)}")
    content = item.get("content")
    parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or len(parts) > MAX_PARTS:
        raise wrong(f"item {number}: its content is neither a text nor a list of at most {MAX_PARTS} parts")
    texts = []
    for part in parts:
        named = part.get("type") if isinstance(part, dict) else None
        if named not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise wrong(f"item {number} has a part of type {str(named)[:40]!r}: this model takes texts only")
        texts.append(part["text"])
    return {"role": "system" if role == "developer" else role, "content": "".join(texts)}


def _text(value: Any) -> Any:
    form = value.get("format") if isinstance(value, dict) else None
    if value is not None and not (
        isinstance(value, dict) and (form is None or (isinstance(form, dict) and form.get("type") == "text"))
    ):
        raise wrong('text.format: structured output is not supported here; send {"format": {"type": "text"}}')
    return value


def _tool_choice(value: Any) -> Any:
    if value not in (None, "auto", "none"):
        raise wrong('a call cannot be forced here: send "auto" or "none"')
    return value


def _none_of(what: str) -> BeforeValidator:
    """An empty list, false or null and nothing else."""

    def check(value: Any) -> Any:
        if value is not None and value is not False and not (isinstance(value, list) and not value):
            raise wrong(what)
        return value

    return BeforeValidator(check)


def _truncation(value: Any) -> Any:
    if value not in (None, "disabled"):
        raise wrong('a conversation that does not fit is refused and not cut: send "disabled"')
    return value


def _metadata(value: dict[str, str] | None) -> dict[str, str] | None:
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
        list[dict[str, str]],
        BeforeValidator(_input),
        WithJsonSchema({"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "minItems": 1}]}),
    ] = Field(description="what is new in the conversation: the user's text, or messages")
    instructions: str | None = Field(None, description="the system's message, of this answer alone")
    previous_response_id: str | None = Field(
        None, min_length=1, max_length=200, description="go on with the conversation of a stored answer"
    )
    store: bool | None = Field(None, description="keep the answer and its conversation for a while; default: not")
    max_output_tokens: int | None = Field(None, ge=1, le=INT32, description="longest answer in tokens")
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy; default 1")
    top_p: float | None = Field(None, ge=0, le=1)
    stream: bool | None = Field(None, description="server-sent events")
    metadata: Annotated[dict[str, str] | None, AfterValidator(_metadata)] = Field(
        None, description="given back with the answer"
    )
    text: Annotated[Any, BeforeValidator(_text), WithJsonSchema({"type": "object"})] = Field(
        None, description="`format` of type text"
    )
    truncation: Annotated[Any, BeforeValidator(_truncation), WithJsonSchema({"enum": ["disabled", None]})] = None
    tools: Annotated[
        Any,
        _none_of("calls of tools are not supported here: leave tools out, or use /v1/chat/completions"),
        WithJsonSchema({"type": "array", "maxItems": 0}),
    ] = None
    tool_choice: Annotated[Any, BeforeValidator(_tool_choice), WithJsonSchema({"enum": ["auto", "none", None]})] = None
    max_tool_calls: Annotated[Any, refused("no tool is called here: leave max_tool_calls out")] = None
    include: Annotated[
        Any,
        _none_of("nothing more can be included: leave include out"),
        WithJsonSchema({"type": "array", "maxItems": 0}),
    ] = None
    background: Annotated[
        Any,
        _none_of("answers are not made in the background: leave background out"),
        WithJsonSchema({"enum": [False, None]}),
    ] = None
    conversation: Annotated[Any, refused("there are no conversations: send previous_response_id")] = None
    prompt: Annotated[Any, refused("there are no stored prompts: send instructions and input")] = None
    reasoning: Annotated[Any, refused("reasoning is not controlled here: leave it out")] = None
    top_logprobs: Annotated[Any, refused("log probabilities are those of /v1/chat/completions: use it")] = None
    context_management: Annotated[Any, refused("a conversation is not made shorter here: leave it out")] = None
    moderation: Annotated[Any, refused("nothing is moderated here: leave it out")] = None

    @model_validator(mode="after")
    def _ends_with_a_turn(self) -> ResponsesRequest:
        if self.input[-1]["role"] == "assistant":
            raise wrong("input: the last message is the assistant's; a begun answer is not continued")
        return self

    def engine_request(
        self, conversation: list[dict[str, str]], session_id: str | None, *, reasons: bool
    ) -> GenerateRequest:
        """conversation: all of it, with what is new and without the instructions. reasons: the model's answers may
        hold reasoning, which is told apart."""
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return GenerateRequest(
            messages=[*system, *conversation],
            parsed=True if reasons else None,
            session_id=session_id,
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=engine_top_p(self.top_p),
            stream=bool(self.stream),
        )
