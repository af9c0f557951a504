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


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int


class UsageBody(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = Field(None, description="where there was reasoning")


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


class CalledFunction(BaseModel):
    name: str
    arguments: str = Field(description="JSON, as the model wrote it")


class ToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None = Field(description="null where the answer consists of calls")
    reasoning_content: str | None = Field(None, description="where there was reasoning")
    tool_calls: list[ToolCall] | None = Field(None, description="where the model calls tools")
    refusal: None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]


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
    status: Literal["ready", "not ready"] = Field(description="not ready: requests for it are answered with 503 now")
    max_model_len: int | None = Field(description="context length in tokens; null where no server can say, as below")
    weight_type: str | None = Field(description="type of its weights; of a quantised model, of most of their codes")
    data_type: str | None = Field(description="type of activations, and of weights that are not quantised")
    group_size: int | None = Field(description="weights that share a scale; null where it is a whole row or none")
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
    chat_template: str | dict[str, str] | None = Field(description="several are by name")


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str


class AnthropicErrorBody(BaseModel):
    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str


class AnthropicText(BaseModel):
    type: Literal["text"]
    text: str


class AnthropicThinking(BaseModel):
    type: Literal["thinking"]
    thinking: str = Field(description="empty where `thinking.display` is omitted")
    signature: str = Field(description="the same in every answer; it is not checked")


class AnthropicToolUse(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] = Field(description='the arguments; {"INVALID_JSON": TEXT} where they are no JSON object')


class AnthropicTokensDetails(BaseModel):
    thinking_tokens: int


class AnthropicUsage(BaseModel):
    input_tokens: int = Field(description="of the prompt, without those that were in the cache")
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: AnthropicTokensDetails | None = Field(None, description="where there was reasoning")


class AnthropicAnswer(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnthropicText | AnthropicThinking | AnthropicToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: AnthropicUsage


class TokenCount(BaseModel):
    input_tokens: int


class ResponseBody(BaseModel):
    """The answer of /v1/responses, as OpenAI has it."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    background: bool
    error: None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]] = Field(description="items of type reasoning, message and function_call")
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool = Field(description="whether it is stored")
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: str
    usage: dict[str, Any]


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"]
    deleted: bool
