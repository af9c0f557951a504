"""Requests and responses, independent of protobuf."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from charonia_client.contract import ScalarFields

FinishReason = Literal["stop", "length", "cancelled", "error"]


GuideType = Literal["json", "json_schema", "regex", "ebnf_grammar", "structural_tag", "choice"]


@dataclass(frozen=True, slots=True)
class Guide:
    """Structured output (docs/structured_output.md): the form of the text. Create it with a function below.
    text: the schema, expression, grammar or tag, or a JSON list of choices; empty for json."""

    type: GuideType
    text: str = ""

    @classmethod
    def json(cls) -> Guide:
        """Require any JSON object."""
        return cls("json")

    @classmethod
    def json_schema(cls, schema: str | bool | Mapping[str, Any]) -> Guide:
        """Require a JSON value that is valid under the schema, a mapping or its JSON text."""
        return cls("json_schema", schema if isinstance(schema, str) else _json("json_schema", schema))

    @classmethod
    def regex(cls, expression: str) -> Guide:
        """Require a text that the regular expression matches completely."""
        return cls("regex", expression)

    @classmethod
    def grammar(cls, text: str) -> Guide:
        """A text of a grammar in Lark, from its rule `start`; a server takes EBNF too, from its rule `root`."""
        return cls("ebnf_grammar", text)

    @classmethod
    def structural_tag(cls, tag: str | Mapping[str, Any]) -> Guide:
        """Tagged parts in free text, as xgrammar's structural tags describe them. A server takes it, and not an Engine
        in this process."""
        return cls("structural_tag", tag if isinstance(tag, str) else _json("structural_tag", tag))

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Guide:
        """Require a text from this list."""
        return cls("choice", _json("choice", _texts(texts)))


def _texts(texts: Sequence[str]) -> list[str]:
    listed = list(texts)
    if isinstance(texts, str) or not all(isinstance(text, str) for text in listed):
        raise TypeError(f"choice = {texts!r} is not valid: it must be a list of texts")
    return listed


def _json(name: str, value: Any) -> str:
    try:
        return json.dumps(dict(value) if isinstance(value, Mapping) else value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not valid: it cannot be written as JSON: {error}") from None


def as_json(value: Any) -> str:
    """The JSON text of a request's field. A text stays as it is."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@dataclass(slots=True, kw_only=True)
class GenerateRequest(ScalarFields):
    """One request to the ensemble (docs/contracts.md): exactly one of `text`, `prompt_token_ids` and `messages`, and
    the sampling parameters and limits of ScalarFields.

    None and empty collections are not sent: the server's default applies.
    """

    text: str | None = None
    prompt_token_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None  # chat messages, {"role": ..., "content": ...}
    tools: Sequence[Mapping[str, Any]] | None = None
    # "auto", "none", "required", {"type": "function", "function": {"name": ...}}, or
    # {"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool | None = None  # False: one call at most
    any_arguments: bool = False  # True: arguments of forced calls follow `parameters` only if the function is strict
    chat_template_kwargs: Mapping[str, Any] | None = None  # variables of the chat template, such as enable_thinking
    continue_final_message: bool = False  # the last message is the beginning of the response
    prompt_time: str | None = None  # the local time that the chat template shows, such as 2026-11-28T21:45:00
    # True: the text is also parsed into content, reasoning and tool_calls.
    parsed: Literal[True] | None = None
    stop_words: Sequence[str] = ()
    bad_words: Sequence[str] = ()
    logit_bias: Mapping[int, float] | None = None
    end_id: Sequence[int] = ()  # instead of the model's own end ids
    guide: Guide | None = None  # constrains the text
    # An embedding, or a score of messages with the roles query and document: GenerateResponse.pooled instead of text.
    pooling: Literal["embed", "score"] | None = None
    name_stop_word: bool | None = None  # report which of stop_words ended a response
    logprobs: int | None = None  # log probabilities of the sampled token and of this many most likely tokens, 0 to 20
    stream: bool = True  # False: one response with the whole text
    echo: bool = False  # return the prompt's text first
    # The server keeps the conversation's KV blocks and tokens under this name.
    session_id: str | None = None
    interactive: bool = False  # text or messages are only the new turn of the session; False: the whole conversation
    end_session: bool = False  # forget the session afterwards
    # The prefix cache finds only blocks of requests with the same salt. At most 256 bytes.
    cache_salt: str | None = None
    owner: str | None = None  # names the client, so that clients take turns
    lora_name: str | None = None  # the LoRA adapter that computes the response; NAME=FINGERPRINT: with these files

    def __post_init__(self) -> None:
        _check_prompt(self.text, self.prompt_token_ids, self.messages)
        if (self.interactive or self.end_session) and not self.session_id:
            raise ValueError("interactive and end_session need a session_id")

    @property
    def forces_calls(self) -> bool:
        choice = self.tool_choice
        if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
            choice = choice["allowed_tools"]["mode"]
        return choice not in (None, "auto", "none")


def _check_prompt(*forms: object) -> None:
    if sum(form is not None for form in forms) != 1:
        raise ValueError("give exactly one of text, prompt_token_ids and messages")


@dataclass(slots=True, kw_only=True)
class TokenizeRequest:
    """A request to the server's tokenizer: for the tokens of `text` or `messages`, or for the text of
    `prompt_token_ids`.

    add_special_tokens: whether the tokenizer adds its special tokens around a text; None: to a text, not to messages.
    """

    text: str | None = None
    prompt_token_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    continue_final_message: bool = False  # the last message is the beginning of the response
    add_special_tokens: bool | None = None
    with_strings: bool = False  # the tokens as the vocabulary spells them
    owner: str | None = None  # as in GenerateRequest

    def __post_init__(self) -> None:
        _check_prompt(self.text, self.prompt_token_ids, self.messages)


@dataclass(slots=True)
class Tokenized:
    """text: the text of prompt_token_ids, including special tokens. context_length: tokens of the longest sequence;
    None if unknown."""

    token_ids: list[int]
    text: str
    context_length: int | None
    strings: list[str] | None  # only if requested


@dataclass(slots=True)
class Timings:
    """Milliseconds from the engine's receipt of the request."""

    queue_ms: float
    first_token_ms: float
    total_ms: float


@dataclass(slots=True)
class TopToken:
    """A likely token at one position. `token` has its bytes, also for a special token."""

    id: int
    logprob: float
    token: bytes = b""


@dataclass(slots=True)
class ToolCallDelta:
    """The part of a tool call that a response adds.

    index: the number of the call in the response, from 0. id, name: set at the call's beginning. arguments: the next
    piece; all pieces joined are a JSON object. complete: set at the call's end; False if the response ended within the
    arguments, or if they are not JSON.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    complete: bool | None = None


@dataclass(slots=True)
class GenerateResponse:
    """A part of a response. The texts of all parts, joined, are the response.

    `finish_reason` is set only on the last part; with `n` responses, on the last part of each. If `logprobs` was
    requested, `logprobs` and `top_logprobs` (most likely first) have one entry per token of `token_ids`.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    num_input_tokens: int = 0
    num_output_tokens: int = 0  # so far
    num_cached_tokens: int = 0
    timings: Timings | None = None
    logprobs: tuple[float, ...] = ()
    top_logprobs: list[list[TopToken]] = field(default_factory=list)
    token_bytes: tuple[bytes, ...] = ()  # the bytes of each of token_ids; empty for special tokens
    text_span: tuple[int, int] = (0, 0)  # [begin, end) of the text in the joined token_bytes; an echo precedes it
    index: int = 0  # index of the response, if n > 1
    cum_logprob: float = 0.0  # sum over the response's tokens so far, with log probabilities or best_of
    # With parsed: the text without reasoning and calls; the reasoning; the calls.
    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    num_reasoning_tokens: int = 0  # part of num_output_tokens
    # With parsed and logprobs: which tokens `content` consists of, by their number in the response, from 0.
    content_tokens: list[int] = field(default_factory=list)
    num_session_tokens: int = 0  # part of num_input_tokens: the session's history
    # With prompt_progress, in parts without tokens: part of num_input_tokens, computed or from the cache.
    num_computed_tokens: int = 0
    num_proposed_tokens: int = 0  # by speculation so far
    num_accepted_tokens: int = 0  # part of num_output_tokens: proposals that were accepted
    pooled: Sequence[float] = ()  # with pooling: the embedding, or the score as one number
    stop_word: str | None = None  # with name_stop_word, on the last part: the stop word that ended the response, if any
    # With prompt_logprobs, on the first part of response 0: prompt_ids, prompt_tokens and prompt_special have an entry
    # for each token of the prompt. The other fields have an entry for each token from the second on.
    prompt_ids: tuple[int, ...] = ()
    prompt_tokens: list[bytes] = field(default_factory=list)  # also the names of special tokens
    prompt_special: list[bool] = field(default_factory=list)
    prompt_logprobs: tuple[float, ...] = ()
    prompt_top_logprobs: list[list[TopToken]] = field(default_factory=list)

    @property
    def tokens(self) -> list[bytes]:
        """The bytes that each of token_ids adds to the text: none for special tokens and after the begin of a stop
        word. Joined they are the text, except that invalid UTF-8 is not replaced by U+FFFD."""
        begin, end = self.text_span
        at, found = 0, []
        for piece in self.token_bytes:
            found.append(piece[max(begin - at, 0) : max(end - at, 0)])
            at += len(piece)
        return found

    def find_stop_word(self, words: Sequence[str]) -> str | None:
        """Returns the stop word that ended the response. Call it on the last part: the word follows the part's text."""
        behind = b"".join(self.token_bytes)[self.text_span[1] :]
        return next((word for word in words if behind.startswith(word.encode())), None)


@dataclass(slots=True)
class ServerMetadata:
    name: str
    version: str
    extensions: tuple[str, ...]


@dataclass(slots=True)
class ModelMetadata:
    """The names of a model's tensors with their Triton types and shapes."""

    name: str
    versions: tuple[str, ...]
    inputs: dict[str, tuple[str, tuple[int, ...]]]
    outputs: dict[str, tuple[str, tuple[int, ...]]]
