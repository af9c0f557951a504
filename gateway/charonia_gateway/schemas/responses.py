"""The bodies of responses, for the API's documentation. The routes build plain dictionaries, which are faster. The
tests compare them with the types of OpenAI's own package."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Body(BaseModel):
    model_config = ConfigDict(defer_build=True)  # build validators only when needed; most are never used


class ErrorDetail(_Body):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(_Body):
    error: ErrorDetail


class PromptTokensDetails(_Body):
    cached_tokens: int


class CompletionTokensDetails(_Body):
    reasoning_tokens: int


class UsageBody(_Body):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = Field(None, description="only if there was reasoning")


class TimingsBody(_Body):
    """Milliseconds from the engine's receipt of the request; names as in llama.cpp's server."""

    queue_ms: float = Field(description="until it was scheduled")
    first_token_ms: float = Field(description="until the first token; 0 if there was none")
    total_ms: float = Field(description="until the end")
    cache_n: int = Field(description="tokens of the prompt that were in the cache")
    prompt_n: int = Field(description="tokens of the prompt that were computed")
    prompt_ms: float = Field(description="from scheduled to the first token")
    prompt_per_second: float | None
    predicted_n: int = Field(description="tokens generated")
    predicted_ms: float = Field(description="from the first token to the end")
    predicted_per_second: float | None = Field(description="of the tokens after the first")
    draft_n: int | None = Field(None, description="tokens that speculation proposed, if any")
    draft_n_accepted: int | None = Field(None, description="of predicted_n: proposed tokens that were accepted")
    resumes: int | None = Field(
        None, description="how often a server continued the response of a server that failed or shut down"
    )


class _Answer(_Body):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: UsageBody
    timings: TimingsBody | None = Field(None, description="only if requested")


class CalledFunction(_Body):
    name: str
    arguments: str = Field(description="JSON, as the model wrote it")


class ToolCall(_Body):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(_Body):
    role: Literal["assistant"]
    content: str | None = Field(description="null if the response consists of calls")
    reasoning_content: str | None = Field(None, description="only if there was reasoning")
    tool_calls: list[ToolCall] | None = Field(None, description="only if the model calls tools")
    refusal: None


class ChatChoice(_Body):
    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(_Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class CompletionChoice(_Body):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


class Completion(_Answer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class Model(_Body):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    status: Literal["ready", "on demand", "not ready"] = Field(
        description="on demand: the next request loads it; not ready: requests for this model receive status 503 now"
    )
    task: Literal["generate", "embed", "score"] | None = Field(
        description="what the model gives: text, embeddings, or scores of a query and a document; null if no server "
        "reports it, as for the fields below"
    )
    max_model_len: int | None = Field(description="context length in tokens")
    weight_type: str | None = Field(description="type of the weights; for a quantised model, the type of most codes")
    data_type: str | None = Field(description="type of activations and of weights that are not quantised")
    group_size: int | None = Field(
        description="number of weights that share a scale; null if a whole row shares it or there are no scales"
    )
    default_sampling_parameters: dict[str, int | float] | None = Field(
        description="defaults of fields: the model's generation_config.json, or neutral values"
    )
    parent: str | None = Field(None, description="the model of a LoRA adapter; null: this is not an adapter")
    root: str | None = Field(None, description="the folder of a LoRA adapter")
    accepts_tools: bool | None = Field(description="false: requests with tools are rejected; null if unknown")
    quality: list[dict[str, Any]] = Field(
        [], description="results of `charonia evaluate`: perplexity, distance from the 16-bit model"
    )


class ModelList(_Body):
    object: Literal["list"]
    data: list[Model]


class InputUsage(_Body):
    prompt_tokens: int
    total_tokens: int


class Embedding(_Body):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="numbers, or with encoding_format = base64 a text")


class Embeddings(_Body):
    """The response of /v1/embeddings."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: InputUsage


class RankedText(_Body):
    text: str


class Ranked(_Body):
    index: int = Field(description="of the document in the request")
    relevance_score: float
    document: RankedText | None = Field(None, description="unless return_documents = false")


class Ranking(_Body):
    """The response of /v1/rerank."""

    id: str
    model: str
    usage: InputUsage
    results: list[Ranked]


class Score(_Body):
    index: int
    object: Literal["score"]
    score: float


class Scores(_Body):
    """The response of /v1/score."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: InputUsage


class Ordered(_Body):
    """The response of a route that loads or unloads a model or a LoRA adapter."""

    success: Literal[True]
    message: str


class TokensBody(_Body):
    """The response of /tokenize."""

    count: int
    max_model_len: int | None = Field(description="tokens of the longest sequence; null if unknown")
    tokens: list[int]
    token_strs: list[str] | None = Field(description="only with return_token_strs")


class PromptBody(_Body):
    """The response of /detokenize."""

    prompt: str


class TokenizerInfo(_Body):
    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    chat_template: str | dict[str, str] | None = Field(description="named templates, if the model has several")


class AnthropicErrorDetail(_Body):
    type: str
    message: str


class AnthropicErrorBody(_Body):
    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str


class AnthropicText(_Body):
    type: Literal["text"]
    text: str


class AnthropicThinking(_Body):
    type: Literal["thinking"]
    thinking: str = Field(description="empty if `thinking.display` is `omitted`")
    signature: str = Field(description="the same in every response; it is not checked")


class AnthropicToolUse(_Body):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] = Field(description='the arguments; {"INVALID_JSON": TEXT} if they are not a JSON object')


class AnthropicTokensDetails(_Body):
    thinking_tokens: int


class AnthropicUsage(_Body):
    input_tokens: int = Field(description="tokens of the prompt that were not in the cache")
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: AnthropicTokensDetails | None = Field(None, description="only if there was reasoning")


class AnthropicAnswer(_Body):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnthropicText | AnthropicThinking | AnthropicToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: AnthropicUsage


class TokenCount(_Body):
    input_tokens: int


class ResponseBody(_Body):
    """The response of /v1/responses, as OpenAI defines it."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: dict[str, str] | None = Field(description="code and message of a failed response")
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
    top_logprobs: int
    top_p: float
    truncation: str
    usage: dict[str, Any] | None


class DeletedResponse(_Body):
    id: str
    object: Literal["response"]
    deleted: bool


class ReplayedChoice(BaseModel):
    token_ids: list[int]
    finish_reason: str


class Replayed(BaseModel):
    """The response of /v1/replay."""

    system_fingerprint: str = Field(description="of the server that ran the request")
    seeds: dict[int, int] = Field(description="of each prompt, by the index of its first response")
    choices: list[ReplayedChoice]
