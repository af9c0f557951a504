"""LMDeploy's interactive chat: the server keeps the conversation. Names of fields are LMDeploy's; sampling has the
model's defaults."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from charonia_client import GenerateRequest
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from charonia_gateway.schemas.fields import CACHE_SALT, CacheSalt, OrText, SessionId, StopOrEnd, wrong
from charonia_gateway.schemas.requests import (
    INT32,
    MAX_TIMEOUT_S,
    TIMINGS,
    Messages,
    engine_top_p,
    messages_of,
    to_template,
)
from charonia_gateway.schemas.responses import TimingsBody
from charonia_gateway.schemas.structured import refuse_guides


def _prompt(value: Any) -> Any:
    """An empty text is treated as null: there is no prompt."""
    return None if value is None or value == "" else messages_of(value)


class InteractiveRequest(BaseModel):
    """POST /v1/chat/interactive"""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    operation: ClassVar[str] = "chat"

    model: str | None = Field(None, description="a name that /v1/models lists; default: the first")
    prompt: Annotated[Annotated[Messages, Field(min_length=1)] | None, BeforeValidator(_prompt), OrText()] = Field(
        None, description="the new part of the conversation: the user's text, or messages"
    )
    session_id: SessionId = Field(None, description="the conversation; -1: none, so nothing is kept")
    interactive_mode: bool = Field(
        False, description="keep the conversation for the next request; false: forget it after the response"
    )
    stream: bool = Field(False, description="one JSON object per line, each with the new text")
    stop: StopOrEnd = Field(
        None,
        description="texts that end the response; or true: end the session's running response and keep in the "
        "conversation the text generated so far",
    )
    cancel: bool | None = Field(
        None, description="true: end the session's running response and drop the turn from the conversation"
    )
    request_output_len: int | None = Field(
        None,
        ge=0,
        le=INT32,
        description="maximum tokens of the response; default: the rest of the context; 0 generates nothing",
    )
    max_tokens: int | None = Field(None, ge=0, le=INT32, description="OpenAI's name for request_output_len")
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=INT32, description="the top k tokens; 0 or -1: all")
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy; unset: the model's default")
    repetition_penalty: float | None = Field(
        None, ge=0.01, le=100, description="over prompt and response; 1 has no effect"
    )
    ignore_eos: bool = Field(False, description="the end token does not end the response")
    skip_special_tokens: Literal[True] | None = Field(None, description="special tokens never appear in the text")
    # Fields that LMDeploy does not have.
    seed: int | None = Field(None, ge=-1, le=2**64 - 1, description="makes the response repeatable; -1: random")
    timeout: float | None = Field(
        None, gt=0, le=MAX_TIMEOUT_S, description="seconds after which the request ends with status 504"
    )
    priority: int | None = Field(None, ge=-(2**31), le=INT32, description="higher goes first; default 0")
    cache_salt: CacheSalt = Field(None, description=CACHE_SALT)
    timings: bool | None = Field(None, description=TIMINGS)

    @model_validator(mode="after")
    def _consistent(self) -> InteractiveRequest:
        refuse_guides(self.model_extra, "send response_format to /v1/chat/completions")
        if (self.model_extra or {}).get("image_url") is not None:
            raise wrong("image_url: models take texts only; send the prompt without it")
        if self.acts and self.session_id is None:
            raise wrong("session_id is missing: name the session whose response is to end")
        if self.cancel and self.stop is True:
            raise wrong("cancel and stop are both true: stop keeps the turn, cancel drops it; send one")
        if self.max_tokens is not None:
            if self.request_output_len not in (None, self.max_tokens):
                raise wrong(
                    f"max_tokens = {self.max_tokens} and request_output_len = {self.request_output_len} have the same "
                    "meaning but different values: send one"
                )
            self.request_output_len = self.max_tokens
        if self.acts or self.ends:
            return self
        if self.prompt is None:
            raise wrong("prompt is missing: send the user's text or messages")
        if self.request_output_len == 0:
            raise wrong(
                "request_output_len = 0 generates nothing: send at least 1, or interactive_mode = false and a "
                "session_id to end that session"
            )
        return self

    @property
    def engine_names(self) -> dict[str, str]:
        """This request's names for fields of the engine, where they differ."""
        names = {"messages": "prompt"}
        return names if self.max_tokens is not None else names | {"max_tokens": "request_output_len"}

    @property
    def acts(self) -> bool:
        """Whether it ends a response and requests none."""
        return bool(self.cancel) or self.stop is True

    @property
    def ends(self) -> bool:
        """Whether it ends a session and requests nothing."""
        nothing = self.prompt is None or self.request_output_len == 0
        return nothing and not self.acts and not self.interactive_mode and self.session_id is not None

    def engine_request(self) -> GenerateRequest:
        assert self.prompt is not None
        assert not isinstance(self.stop, bool)
        return GenerateRequest(
            messages=to_template(self.prompt),
            session_id=self.session_id,
            interactive=self.session_id is not None,
            end_session=self.session_id is not None and not self.interactive_mode,
            max_tokens=self.request_output_len,
            temperature=self.temperature,
            top_p=engine_top_p(self.top_p),
            top_k=None if self.top_k is None else max(self.top_k, 0),
            repetition_penalty=self.repetition_penalty,
            ignore_eos=self.ignore_eos,
            seed=None if self.seed == -1 else self.seed,
            stop_words=self.stop or (),
            timeout_ms=None if self.timeout is None else math.ceil(self.timeout * 1000),
            priority=self.priority,
            cache_salt=self.cache_salt,
            stream=self.stream,
        )


class InteractiveAnswer(BaseModel):
    """The response. With `stream`, each line is such an object, with the new text and the counts so far."""

    text: str
    tokens: int = Field(description="of the answer")
    input_tokens: int = Field(description="tokens of the prompt, without the history")
    history_tokens: int = Field(description="tokens of the conversation before the prompt")
    finish_reason: Literal["stop", "length", "cancelled"] | None = Field(
        description="cancelled: a request with stop or cancel ended the response"
    )
    timings: TimingsBody | None = Field(None, description="only if requested; in the last line")
