"""The bodies of answers, for the API's documentation. The routes build answers as plain dictionaries, which is what the
hot path can afford; the tests hold them against the types of OpenAI's own package."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class UsageBody(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TimingsBody(BaseModel):
    """Milliseconds from the engine's receipt of the request; names as in llama.cpp's server."""

    queue_ms: float = Field(description="until it was scheduled")
    first_token_ms: float = Field(description="until the first token; 0 where there was none")
    total_ms: float = Field(description="until the end")
    cache_n: int = Field(description="tokens of the prompt that were in the cache")
    prompt_n: int = Field(description="tokens of the prompt that were computed")
    prompt_ms: float = Field(description="from scheduled to the first token")
    prompt_per_second: float | None
    predicted_n: int = Field(description="tokens generated")
    predicted_ms: float = Field(description="from the first token to the end")
    predicted_per_second: float | None = Field(description="of the tokens after the first")


class _Answer(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: UsageBody
    timings: TimingsBody | None = Field(None, description="where the request asked for it")


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(_Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


class Completion(_Answer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    quality: list[dict[str, Any]] = Field(
        [], description="what `charonia evaluate` measured of the model: perplexity, distance from its 16-bit form"
    )


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]


class TokensBody(BaseModel):
    """The answer of /tokenize."""

    count: int
    max_model_len: int | None = Field(description="tokens of the longest sequence; null where it is not known")
    tokens: list[int]
    token_strs: list[str] | None = Field(description="where return_token_strs asked for them")


class PromptBody(BaseModel):
    """The answer of /detokenize."""

    prompt: str


class TokenizerInfo(BaseModel):
    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    chat_template: str | None
