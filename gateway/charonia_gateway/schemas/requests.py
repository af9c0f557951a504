"""The bodies of requests. Unknown fields are kept in `model_extra`, and the response names them."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from charonia_client import GenerateRequest, Guide
from charonia_client.contract import SCALARS
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, model_validator
from pydantic_core import PydanticCustomError

from charonia_gateway.schemas.fields import (
    ADD_GENERATION_PROMPT,
    CACHE_SALT,
    CONTINUE_FINAL_MESSAGE,
    MAX_MESSAGES,
    MAX_TOOLS,
    THINKING_BUDGET,
    Audio,
    BadWords,
    CacheSalt,
    ChatTemplate,
    Content,
    Effort,
    FunctionCall,
    Functions,
    LogitBias,
    OfChat,
    OrText,
    Prompt,
    SessionId,
    Stop,
    TemplateVariables,
    TextModality,
    ToolChoice,
    Tools,
    check_allowed,
    check_arguments,
    check_prompt_end,
    template_end,
    unsupported,
    wrong,
)
from charonia_gateway.schemas.media import NAME_MEDIA, media_of, name_replaced
from charonia_gateway.schemas.structured import (
    GuidedChoice,
    GuidedGrammar,
    GuidedJson,
    GuidedRegex,
    ResponseFormat,
    StructuredOutputs,
    refuse_guides,
)

INT32 = 2**31 - 1
_UINT64 = 2**64 - 1
MAX_TIMEOUT_S = 86400.0
TIMINGS = "return `timings` (time of each phase, tokens per second); in a stream, the last chunk has them"


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool | None = Field(None, description="send a last chunk with `usage` and no choices")


class Sampling(BaseModel):
    """Common fields of chat completions and completions."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    operation: ClassVar[str]  # OpenTelemetry's name of the operation

    model: str = Field(description="a name that /v1/models lists")
    stream: bool | None = Field(None, description="server-sent events, one per piece of text")
    stream_options: StreamOptions | None = None
    n: int | None = Field(
        None, ge=1, le=128, description="responses per prompt; with a seed, response i uses `seed + i`"
    )
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy; unset: the model's default")
    top_p: float | None = Field(
        None,
        ge=0,
        le=1,
        description="sample from the smallest set of tokens whose probabilities add up to this; 1: all tokens",
    )
    stop: Stop = Field(None, description="texts that end the response; they are not part of it")
    seed: int | None = Field(
        None,
        ge=-(2**63),
        le=_UINT64,
        description="the same request with the same seed returns the same response; -1: random; other negative "
        "numbers are seeds",
    )
    presence_penalty: float | None = Field(
        None, ge=-2, le=2, description="makes tokens that were generated less likely; 0 has no effect"
    )
    frequency_penalty: float | None = Field(
        None, ge=-2, le=2, description="the same, for each occurrence of the token; 0 has no effect"
    )
    logit_bias: LogitBias = Field(None, description="biases from -100 to 100, by token id")
    user: str | None = Field(None, description="taken, without effect")
    metadata: Annotated[dict[str, Any] | None, AfterValidator(lambda _: None)] = Field(
        None, description="taken, without effect"
    )
    store: bool | None = Field(None, description="accepted; nothing is stored")
    service_tier: str | None = Field(None, description="taken, without effect")

    response_format: ResponseFormat | None = Field(None, description="JSON, with or without a schema")

    # Fields of other servers that OpenAI does not have.
    structured_outputs: StructuredOutputs | None = Field(None, description="constrains the response")
    guided_json: GuidedJson = Field(None, description="rejected: send structured_outputs.json")
    guided_regex: GuidedRegex = Field(None, description="rejected: send structured_outputs.regex")
    guided_choice: GuidedChoice = Field(None, description="rejected: send structured_outputs.choice")
    guided_grammar: GuidedGrammar = Field(None, description="rejected: send structured_outputs.grammar")
    top_k: int | None = Field(None, ge=-1, le=INT32, description="the top k tokens; 0 or -1: all")
    min_p: float | None = Field(None, ge=0, le=1, description="minimum probability relative to the top token's")
    repetition_penalty: float | None = Field(
        None, ge=0.01, le=100, description="over prompt and response; 1 has no effect"
    )
    min_tokens: int | None = Field(None, ge=0, le=INT32, description="minimum tokens of the response")
    ignore_eos: bool | None = Field(None, description="the end token does not end the response")
    bad_words: BadWords = Field(None, description="texts that the response never contains")
    session_id: SessionId = Field(
        None,
        description="the server keeps the KV cache of this conversation under this name, for its next turn; "
        "no effect with several responses",
    )
    cache_salt: CacheSalt = Field(None, description=CACHE_SALT)
    timeout: float | None = Field(
        None, gt=0, le=MAX_TIMEOUT_S, description="seconds after which the request ends with status 504"
    )
    priority: int | None = Field(None, ge=-(2**31), le=INT32, description="higher goes first; default 0")
    skip_special_tokens: Literal[True] | None = Field(None, description="special tokens never appear in the text")
    timings: bool | None = Field(None, description=TIMINGS)
    timings_per_token: bool | None = Field(None, description="`timings` in each chunk of a stream")

    @model_validator(mode="after")
    def _consistent(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options is for stream = true only: leave it out or send stream = true")
        refuse_guides(
            self.model_extra, "send response_format, or structured_outputs with json, regex, choice or grammar"
        )
        if self.guide_field == "response_format" and self.structured_outputs is not None:
            raise wrong("structured_outputs: response_format constrains the response, too; send one of them")
        return self

    @property
    def guide_field(self) -> str | None:
        """The field that constrains the response, if there is one."""
        if self.response_format is not None and self.response_format.type != "text":
            return "response_format"
        return None if self.structured_outputs is None else "structured_outputs"

    @property
    def engine_names(self) -> dict[str, str]:
        """This request's names for fields of the engine, where they differ."""
        return {"guided_decoding_guide": self.guide_field} if self.guide_field else {}

    @property
    def guide(self) -> Guide | None:
        if self.guide_field == "response_format":
            assert self.response_format is not None
            return self.response_format.guide()
        return None if self.structured_outputs is None else self.structured_outputs.guide()

    @property
    def choices_per_prompt(self) -> int:
        return self.n or 1

    @property
    def choices_made(self) -> int:
        """Number of responses that the engine generates."""
        return self.choices_per_prompt

    def to_engine(self, **more: Any) -> GenerateRequest:
        """Build the engine's request for all choices of one prompt. A session continues with one response, so a request
        for several responses has no session."""
        several = self.choices_per_prompt > 1 or (more.get("best_of") or 1) > 1
        # Fields with the same name are copied, except those that are changed below.
        same: dict[str, Any] = {name: getattr(self, name) for name in SCALARS if name in Sampling.model_fields}
        same["top_p"] = engine_top_p(self.top_p)
        same["top_k"] = max(self.top_k, 0) if self.top_k is not None else None
        same["seed"] = None if self.seed in (None, -1) else self.seed & _UINT64
        return GenerateRequest(
            **same,
            stop_words=self.stop or (),
            bad_words=self.bad_words or (),
            logit_bias=self.logit_bias,
            session_id=None if several else self.session_id,
            cache_salt=self.cache_salt,
            timeout_ms=None if self.timeout is None else math.ceil(self.timeout * 1000),
            stream=bool(self.stream),
            guide=self.guide,
            **more,
        )


def engine_top_p(top_p: float | None) -> float | None:
    """The engine does not accept 0. The smallest positive value has the same effect: only the most likely token."""
    return None if top_p is None else max(top_p, 1e-6)


class Message(BaseModel):
    """One message of a conversation. Its other fields are passed to the chat template unchanged."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = Field(None, fail_fast=True, max_length=MAX_TOOLS)
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and self.role in ("system", "developer", "user"):
            raise wrong("content is missing: send the message's text")
        return self


_MESSAGES = TypeAdapter(list[Message])


def to_template(messages: list[Message]) -> list[dict[str, Any]]:
    """Return the messages as preprocessing gets them."""
    dumped: list[dict[str, Any]] = _MESSAGES.dump_python(messages, exclude_none=True)
    return dumped


def _check_calls(messages: list[Message]) -> list[Message]:
    functions = [call.get("function") for message in messages for call in message.tool_calls or ()]
    arguments = [function.get("arguments") for function in functions if isinstance(function, dict)]
    check_arguments(text for text in arguments if isinstance(text, str))
    return messages


# Validation of a list stops at the first error: each error is kept with its value, and a body may have a million
# errors.
Messages = Annotated[
    list[Message], Field(fail_fast=True, max_length=MAX_MESSAGES), AfterValidator(_check_calls), NAME_MEDIA
]


def messages_of(value: Any) -> Any:
    """Return a list of messages. A plain text is the user's only message."""
    if not isinstance(value, str | list):
        raise PydanticCustomError("messages", "send the user's text, or a list of messages")
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ChatRequest(Sampling):
    """POST /v1/chat/completions"""

    operation: ClassVar[str] = "chat"

    messages: Annotated[Messages, Field(min_length=1), BeforeValidator(messages_of), OrText()] = Field(
        description="the conversation; one plain string is the user's only message"
    )
    max_completion_tokens: int | None = Field(
        None, ge=1, le=INT32, description="maximum tokens of the response; default: the rest of the context"
    )
    max_tokens: int | None = Field(None, ge=1, le=INT32, description="older name for max_completion_tokens")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="number of most likely tokens per position; needs logprobs"
    )
    tools: Tools = Field(None, description="functions that the model may call, in the format of its chat template")
    tool_choice: ToolChoice = Field(
        None,
        description="required, or a function's name: the response is calls; allowed_tools: it calls only these",
    )
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most")
    functions: Functions = Field(None, description="rejected: send tools")
    function_call: FunctionCall = Field(None, description="rejected: send tool_choice")
    modalities: TextModality = Field(None, description='["text"]')
    audio: Audio = Field(None, description="rejected: answers are text")
    reasoning_effort: Effort | None = Field(
        None, description="a variable of the chat template; none also sets enable_thinking = false"
    )
    thinking_budget: int | None = Field(None, ge=0, le=INT32, description=THINKING_BUDGET)
    chat_template_kwargs: TemplateVariables | None = Field(
        None, description="variables of the chat template, such as enable_thinking"
    )
    add_generation_prompt: bool | None = Field(None, description=ADD_GENERATION_PROMPT)
    continue_final_message: bool | None = Field(None, description=CONTINUE_FINAL_MESSAGE)
    chat_template: ChatTemplate = None
    return_progress: bool | None = Field(
        None, description="in a stream, report how much of a long prompt is computed, in `prompt_progress`"
    )
    renew_session: bool | None = Field(None, description="first delete the history of session_id")

    @model_validator(mode="after")
    def _consistent_chat(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise wrong("top_logprobs needs logprobs = true")
        if self.tool_choice not in (None, "none", "auto") and not self.functions_offered:
            raise wrong("tool_choice needs tools")
        if isinstance(self.tool_choice, dict) and not self.names_function:
            named = (tool["function"]["name"] for tool in self.tool_choice["allowed_tools"]["tools"])
            check_allowed(named, {tool["function"]["name"] for tool in self.functions_offered})
        if self.renew_session and self.session_id is None:
            raise wrong("renew_session needs a session_id")
        check_prompt_end(self.add_generation_prompt, self.continue_final_message)
        return self

    @property
    def engine_names(self) -> dict[str, str]:
        longest = {} if self.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
        return super().engine_names | longest

    @property
    def functions_offered(self) -> list[dict[str, Any]]:
        return [tool for tool in self.tools or () if tool["type"] == "function"]

    @cached_property
    def ignored_parts(self) -> list[str]:
        tools = unsupported("tools", (tool["type"] for tool in self.tools or ()))
        return tools + name_replaced("messages", media_of(self.messages))

    @property
    def names_function(self) -> bool:
        """Whether the response must be a call of one function. OpenAI's finish reason is then `stop`."""
        return isinstance(self.tool_choice, dict) and self.tool_choice["type"] == "function"

    def template_variables(self) -> dict[str, Any] | None:
        """Variables of the chat template. `chat_template_kwargs` overrides values from other fields."""
        variables = template_end(self.add_generation_prompt, self.continue_final_message)
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
        if self.reasoning_effort == "none":
            variables["enable_thinking"] = False
        if self.thinking_budget is not None:
            variables["thinking_budget"] = self.thinking_budget
        return {**variables, **(self.chat_template_kwargs or {})} or None

    def engine_request(self, *, reasons: bool = False) -> GenerateRequest:
        """Build the engine's request. reasons: the model's responses may contain reasoning."""
        tools = None if self.tool_choice == "none" else self.functions_offered or None
        return self.to_engine(
            messages=to_template(self.messages),
            tools=tools,
            tool_choice=self.tool_choice if tools and self.tool_choice != "auto" else None,
            parallel_tool_calls=self.parallel_tool_calls if tools else None,
            chat_template_kwargs=self.template_variables(),
            continue_final_message=bool(self.continue_final_message),
            thinking_budget=self.thinking_budget,
            prompt_progress=True if self.return_progress and self.stream else None,
            parsed=True if tools or reasons else None,
            max_tokens=self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


class CompletionRequest(Sampling):
    """POST /v1/completions"""

    operation: ClassVar[str] = "text_completion"

    prompt: Prompt = Field(description="a text or a list of texts, or token ids: one list, or a list of lists")
    max_tokens: int | None = Field(16, ge=0, le=INT32, description="maximum tokens of the response; 0 only with echo")
    logprobs: int | None = Field(
        None, ge=0, le=20, description="number of most likely tokens per position; with echo, also for the prompt"
    )
    echo: bool | None = Field(None, description="return the prompt before the response")
    best_of: int | None = Field(
        None,
        ge=1,
        le=128,
        description="responses to generate; the n with the highest mean log probability per token are returned",
    )
    suffix: str | None = None
    tools: OfChat = Field(None, description="rejected: only for chats")
    tool_choice: OfChat = Field(None, description="rejected, as tools")
    functions: OfChat = Field(None, description="rejected, as tools")
    function_call: OfChat = Field(None, description="rejected, as tools")

    @model_validator(mode="after")
    def _consistent_completion(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of < self.choices_per_prompt:
            raise wrong(f"best_of = {self.best_of} is less than n = {self.choices_per_prompt}: send at least n")
        if self.best_of is not None and self.best_of > self.choices_per_prompt and self.stream:
            raise wrong("best_of: the best responses are known only at the end; leave it out or do not stream")
        if self.max_tokens == 0 and not self.echo:
            raise wrong("max_tokens = 0 is for echo = true only: send at least 1")
        if self.session_id is not None and len(self.prompt) > 1:
            raise wrong(
                f"session_id: {len(self.prompt)} prompts are not one conversation; send one prompt or no session"
            )
        if self.suffix:
            raise wrong("suffix: text is only continued, not filled in; leave suffix out")
        return self

    @property
    def prompt_only(self) -> bool:
        """Whether only the prompt is returned. The engine generates at least one token, which is dropped."""
        return self.max_tokens == 0

    @property
    def choices_made(self) -> int:
        return len(self.prompt) * max(self.choices_per_prompt, self.best_of or 1)

    def engine_requests(self) -> list[GenerateRequest]:
        """Build the engine's requests, one per prompt."""
        return [
            self.to_engine(
                text=prompt if isinstance(prompt, str) else None,
                prompt_token_ids=None if isinstance(prompt, str) else prompt,
                max_tokens=1 if self.prompt_only else self.max_tokens,
                best_of=self.best_of,
                logprobs=self.logprobs,
                prompt_logprobs=self.logprobs if self.echo else None,
            )
            for prompt in self.prompt
        ]
