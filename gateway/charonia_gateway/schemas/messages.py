"""Anthropic's Messages. Names of fields are Anthropic's; what this server cannot do is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from charonia_client import GenerateRequest, TokenizeRequest
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from charonia_gateway.schemas.fields import MAX_MESSAGES, Content, refused, wrong
from charonia_gateway.schemas.requests import INT32, engine_top_p

MAX_STOP_SEQUENCES = 64


def _stop_sequences(value: Any) -> Any:
    texts = isinstance(value, list) and all(isinstance(text, str) and text for text in value)
    if value is not None and (not texts or len(value) > MAX_STOP_SEQUENCES):
        raise wrong(f"send a list of at most {MAX_STOP_SEQUENCES} strings, none of them empty")
    return value


def _thinking(value: Any) -> Any:
    if value is not None and (not isinstance(value, dict) or value.get("type") != "disabled"):
        raise wrong('answers have no thinking blocks here: leave it out, or send {"type": "disabled"}')
    return value


def _tools(value: Any) -> Any:
    if value:
        raise wrong("calls of tools are not supported here: leave tools out, or use /v1/chat/completions")
    return value


def _tool_choice(value: Any) -> Any:
    if value is not None and (not isinstance(value, dict) or value.get("type") not in ("auto", "none")):
        raise wrong('a call cannot be forced: leave it out, or send {"type": "none"}')
    return value


class AnthropicMessage(BaseModel):
    """One turn: text only."""

    model_config = ConfigDict(extra="ignore", strict=True)

    role: Literal["user", "assistant", "system"]
    content: Content

    @model_validator(mode="after")
    def _has_content(self) -> AnthropicMessage:
        if self.content is None:
            raise wrong("content is missing: send the message's text")
        return self


class CountTokensRequest(BaseModel):
    """POST /v1/messages/count_tokens"""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    operation: ClassVar[str] = "tokenize"
    timings: ClassVar[None] = None  # no field of Anthropic's

    model: str = Field(description="a name that /v1/models lists")
    messages: Annotated[list[AnthropicMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    system: Content = Field(None, description="a text, or text blocks, which are joined")
    tools: Annotated[Any, BeforeValidator(_tools), WithJsonSchema({"type": "array", "maxItems": 0})] = None
    tool_choice: Annotated[Any, BeforeValidator(_tool_choice), WithJsonSchema({"type": "object"})] = None
    thinking: Annotated[Any, BeforeValidator(_thinking), WithJsonSchema({"type": "object"})] = None
    output_config: Annotated[Any, refused("the form of an answer cannot be forced here: leave output_config out")] = (
        None
    )

    @model_validator(mode="after")
    def _consistent(self) -> CountTokensRequest:
        if self.messages[-1].role != "user":
            raise wrong("messages: the last one is not the user's; a begun answer is not continued")
        return self

    def conversation(self) -> list[dict[str, Any]]:
        """For the chat template. Turns of one role that follow each other are one turn."""
        turns: list[tuple[str, list[str]]] = [("system", [self.system])] if self.system else []
        for message in self.messages:
            if not turns or turns[-1][0] != message.role:
                turns.append((message.role, []))
            turns[-1][1].append(message.content or "")
        return [{"role": role, "content": "\n\n".join(texts)} for role, texts in turns]

    def template_variables(self) -> dict[str, Any] | None:
        return {"enable_thinking": False} if self.thinking else None

    def tokenize_request(self) -> TokenizeRequest:
        return TokenizeRequest(messages=self.conversation(), chat_template_kwargs=self.template_variables())


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages"""

    operation: ClassVar[str] = "chat"

    max_tokens: int = Field(ge=1, le=INT32, description="longest answer in tokens")
    stop_sequences: Annotated[
        list[str] | None,
        BeforeValidator(_stop_sequences),
        WithJsonSchema({"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": MAX_STOP_SEQUENCES}),
    ] = Field(None, description="texts that end the answer, which does not contain them")
    stream: bool | None = Field(None, description="server-sent events")
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy; default 1")
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, le=INT32, description="the k likeliest tokens; 0: all")
    metadata: Annotated[dict[str, Any] | None, AfterValidator(lambda _: None)] = Field(
        None, description="taken, without effect"
    )
    service_tier: str | None = Field(None, description="taken, without effect")
    container: Annotated[Any, refused("there are no containers here: leave container out")] = None
    mcp_servers: Annotated[Any, refused("no MCP server is called from here: leave mcp_servers out")] = None

    def engine_request(self, *, reasons: bool) -> GenerateRequest:
        """reasons: the model's answers may hold reasoning, which is told apart."""
        return GenerateRequest(
            messages=self.conversation(),
            chat_template_kwargs=self.template_variables(),
            parsed=True if reasons else None,
            max_tokens=self.max_tokens,
            stop_words=self.stop_sequences or (),
            name_stop_word=bool(self.stop_sequences) or None,
            temperature=self.temperature,
            top_p=engine_top_p(self.top_p),
            top_k=self.top_k,
            stream=bool(self.stream),
        )
