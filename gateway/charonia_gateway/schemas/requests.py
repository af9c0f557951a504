"""The bodies of requests. Unknown fields are kept aside (`model_extra`), to be named to the client."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from charonia_client import GenerateRequest, Guide
from charonia_client.contract import SCALARS
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from charonia_gateway.schemas.fields import (
    CACHE_SALT,
    MAX_MESSAGES,
    MAX_TOOLS,
    AddGenerationPrompt,
    Audio,
    BadWords,
    CacheSalt,
    ChatTemplate,
    Content,
    ContinueFinalMessage,
    Effort,
    FunctionCall,
    Functions,
    LogitBias,
    OfChat,
    OrText,
    Prompt,
    SessionId,
    Stop,
    TextModality,
    ToolChoice,
    Tools,
    check_arguments,
    wrong,
)
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
TIMINGS = "`timings` in the answer, in a stream in its last chunk: where the time went, and how fast tokens came"


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool | None = Field(None, description="a last chunk with `usage` and no choices")


class Sampling(BaseModel):
    """What chat completions and completions have in common."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    operation: ClassVar[str]  # as OpenTelemetry names it

    model: str = Field(description="a name that /v1/models lists")
    stream: bool | None = Field(None, description="server-sent events, one per piece of text")
    stream_options: StreamOptions | None = None
    n: int | None = Field(
        None, ge=1, le=128, description="answers to each prompt; with a seed, answer i is that of `seed + i`"
    )
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy; unset: the model's default")
    top_p: float | None = Field(
        None, ge=0, le=1, description="the fewest tokens whose probabilities add up to it; 1 is all of them"
    )
    stop: Stop = Field(None, description="ends the answer, which does not contain it")
    seed: int | None = Field(
        None, ge=-(2**63), le=_UINT64, description="the same request with the same seed has the same answer"
    )
    presence_penalty: float | None = Field(
        None, ge=-2, le=2, description="makes tokens of the answer less likely; 0 is none"
    )
    frequency_penalty: float | None = Field(
        None, ge=-2, le=2, description="the same for each time that a token is there; 0 is none"
    )
    logit_bias: LogitBias = Field(None, description="token id to a bias from -100 to 100")
    user: str | None = Field(None, description="taken, without effect")
    metadata: Annotated[dict[str, Any] | None, AfterValidator(lambda _: None)] = Field(
        None, description="taken, without effect"
    )
    store: bool | None = Field(None, description="taken; nothing is stored")
    service_tier: str | None = Field(None, description="taken, without effect")

    response_format: ResponseFormat | None = Field(None, description="JSON, with or without a schema")

    # What OpenAI does not have and other servers do.
    structured_outputs: StructuredOutputs | None = Field(None, description="what the answer has to be")
    guided_json: GuidedJson = Field(None, description="rejected: send structured_outputs.json")
    guided_regex: GuidedRegex = Field(None, description="rejected: send structured_outputs.regex")
    guided_choice: GuidedChoice = Field(None, description="rejected: send structured_outputs.choice")
    guided_grammar: GuidedGrammar = Field(None, description="rejected: send structured_outputs.grammar")
    top_k: int | None = Field(None, ge=-1, le=INT32, description="the top k tokens; 0 or -1: all")
    min_p: float | None = Field(None, ge=0, le=1, description="minimum probability relative to the top token's")
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, description="over prompt and answer; 1 is none")
    min_tokens: int | None = Field(None, ge=0, le=INT32, description="the answer does not end before")
    ignore_eos: bool | None = Field(None, description="the end token does not end the answer")
    bad_words: BadWords = Field(None, description="never in the answer")
    session_id: SessionId = Field(
        None,
        description="a name under which the server keeps what it has computed of this conversation, for its next turn; "
        "without effect with several answers",
    )
    cache_salt: CacheSalt = Field(None, description=CACHE_SALT)
    timeout: float | None = Field(
        None, gt=0, le=MAX_TIMEOUT_S, description="seconds after which the request ends with status 504"
    )
    priority: int | None = Field(None, ge=-(2**31), le=INT32, description="higher goes first; default 0")
    skip_special_tokens: Literal[True] | None = Field(None, description="special tokens are never part of a text")
    timings: bool | None = Field(None, description=TIMINGS)
    timings_per_token: bool | None = Field(None, description="`timings` in each chunk of a stream")

    @model_validator(mode="after")
    def _consistent(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options is for stream = true only: leave it out or stream")
        refuse_guides(
            self.model_extra, "send response_format, or structured_outputs with json, regex, choice or grammar"
        )
        if self.guide_field == "response_format" and self.structured_outputs is not None:
            raise wrong("structured_outputs: response_format says what the answer has to be; send one of them")
        return self

    @property
    def guide_field(self) -> str | None:
        """The field that says what the answer has to be, where one does."""
        if self.response_format is not None and self.response_format.type != "text":
            return "response_format"
        return None if self.structured_outputs is None else "structured_outputs"

    @property
    def engine_names(self) -> dict[str, str]:
        """What this request calls fields of the engine's, where these are not their names."""
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
        """Answers that the engine makes."""
        return self.choices_per_prompt

    def to_engine(self, **more: Any) -> GenerateRequest:
        """The engine's request for all choices of one prompt. A session goes on with one answer: of several none is."""
        several = self.choices_per_prompt > 1 or (more.get("best_of") or 1) > 1
        # What both call the same is the same, but where it is changed below.
        same: dict[str, Any] = {name: getattr(self, name) for name in SCALARS if name in Sampling.model_fields}
        same["top_p"] = engine_top_p(self.top_p)
        same["top_k"] = max(self.top_k, 0) if self.top_k is not None else None
        same["seed"] = None if self.seed is None else self.seed & _UINT64
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
    """The engine's range is open at 0; the smallest nucleus is the most likely token either way."""
    return None if top_p is None else max(top_p, 1e-6)


class Message(BaseModel):
    """One message of a conversation. What else it holds goes to the chat template as it is."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = Field(None, fail_fast=True, max_length=MAX_TOOLS)
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        called = self.tool_calls or (self.model_extra or {}).get("function_call")
        if self.content is None and not (self.role == "assistant" and called):
            raise wrong("content is missing: send the message's text")
        return self

    def to_template(self) -> dict[str, Any]:
        message = self.model_dump(exclude_none=True)
        if self.role == "developer":
            message["role"] = "system"
        return message


def _check_calls(messages: list[Message]) -> list[Message]:
    functions = [call.get("function") for message in messages for call in message.tool_calls or ()]
    arguments = [function.get("arguments") for function in functions if isinstance(function, dict)]
    check_arguments(text for text in arguments if isinstance(text, str))
    return messages


# A list ends at its first error: each error is kept with its value, and a body has room for a million of them.
Messages = Annotated[list[Message], Field(fail_fast=True, max_length=MAX_MESSAGES), AfterValidator(_check_calls)]


def messages_of(value: Any) -> Any:
    """A plain text is the user's only message."""
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
        None, ge=1, le=INT32, description="longest answer in tokens; default: what the context holds"
    )
    max_tokens: int | None = Field(None, ge=1, le=INT32, description="older name of max_completion_tokens")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20, description="top tokens at each place; needs logprobs")
    tools: Tools = Field(None, description="functions that the model may call, in the format of its chat template")
    tool_choice: ToolChoice = Field(None, description="required, or a function's name: the answer is calls")
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most")
    functions: Functions = Field(None, description="rejected: send tools")
    function_call: FunctionCall = Field(None, description="rejected: send tool_choice")
    modalities: TextModality = Field(None, description='["text"]')
    audio: Audio = Field(None, description="rejected: answers are text")
    reasoning_effort: Effort | None = Field(
        None, description="a variable of the chat template; none also sets enable_thinking = false"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="variables of the chat template, such as enable_thinking"
    )
    add_generation_prompt: AddGenerationPrompt = Field(None, description="true: the answer is a message of its own")
    continue_final_message: ContinueFinalMessage = Field(None, description="the last message is whole")
    chat_template: ChatTemplate = None
    renew_session: bool | None = Field(None, description="forget first what is kept under session_id")

    @model_validator(mode="after")
    def _consistent_chat(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise wrong("top_logprobs needs logprobs = true")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise wrong("tool_choice needs tools")
        if self.renew_session and self.session_id is None:
            raise wrong("renew_session needs a session_id")
        return self

    @property
    def engine_names(self) -> dict[str, str]:
        longest = {} if self.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
        return super().engine_names | longest

    @property
    def names_function(self) -> bool:
        """The answer is a call of one function. Its finish reason is `stop` then, with OpenAI."""
        return isinstance(self.tool_choice, dict)

    def template_variables(self) -> dict[str, Any] | None:
        """Of the chat template; what is named there wins over what follows from other fields."""
        variables: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
        if self.reasoning_effort == "none":
            variables["enable_thinking"] = False
        return {**variables, **(self.chat_template_kwargs or {})} or None

    def engine_request(self, *, reasons: bool = False) -> GenerateRequest:
        """reasons: the model's answers may hold reasoning."""
        tools = None if self.tool_choice == "none" else self.tools
        return self.to_engine(
            messages=[message.to_template() for message in self.messages],
            tools=tools,
            tool_choice=self.tool_choice if tools and self.tool_choice != "auto" else None,
            parallel_tool_calls=self.parallel_tool_calls if tools else None,
            chat_template_kwargs=self.template_variables(),
            parsed=True if tools or reasons else None,
            max_tokens=self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


class CompletionRequest(Sampling):
    """POST /v1/completions"""

    operation: ClassVar[str] = "text_completion"

    prompt: Prompt = Field(description="a text or several, or token ids: one list, or a list of lists")
    max_tokens: int | None = Field(16, ge=0, le=INT32, description="longest answer in tokens; 0 with echo")
    logprobs: int | None = Field(
        None, ge=0, le=20, description="top tokens at each place; with echo, of the prompt too"
    )
    echo: bool | None = Field(None, description="begin with the prompt")
    best_of: int | None = Field(
        None,
        ge=1,
        le=128,
        description="answers to make, of which the n of greatest mean log probability per token are returned",
    )
    suffix: str | None = None
    tools: OfChat = Field(None, description="rejected: a part of chats")
    tool_choice: OfChat = Field(None, description="rejected, as tools")
    functions: OfChat = Field(None, description="rejected, as tools")
    function_call: OfChat = Field(None, description="rejected, as tools")

    @model_validator(mode="after")
    def _consistent_completion(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of < self.choices_per_prompt:
            raise wrong(f"best_of = {self.best_of} is less than n = {self.choices_per_prompt}: send at least n")
        if self.best_of is not None and self.best_of > self.choices_per_prompt and self.stream:
            raise wrong("best_of: which answers are the best is known at the end; leave it out or do not stream")
        if self.max_tokens == 0 and not self.echo:
            raise wrong("max_tokens = 0 is for echo = true only: send at least 1")
        if self.session_id is not None and len(self.prompt) > 1:
            raise wrong(
                f"session_id: {len(self.prompt)} prompts are no one conversation; send one prompt or no session"
            )
        if self.suffix:
            raise wrong("suffix: text is only continued, not filled in; leave suffix out")
        return self

    @property
    def prompt_only(self) -> bool:
        """Nothing is generated that anybody sees: the engine makes one token at least, which is left out."""
        return self.max_tokens == 0

    @property
    def choices_made(self) -> int:
        return len(self.prompt) * max(self.choices_per_prompt, self.best_of or 1)

    def engine_requests(self) -> list[GenerateRequest]:
        """One per prompt."""
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
