"""What goes into a generation and what comes out: sampling parameters, streamed chunks and whole outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from charonia.api.sampling_fields import SamplingFields

# A chat: messages as OpenAI has them, {"role": ..., "content": ...}.
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class SamplingParams(SamplingFields):
    """How tokens are chosen; definitions/sampling_parameters.toml defines the fields.

    Fields that are None have the model's defaults, `Engine.info.default_sampling`. They come from
    generation_config.json unless the setting generation_config is none. The same request with the same `seed` gives the
    same tokens, whatever else runs.
    """


@dataclass(frozen=True)
class Timings:
    """Milliseconds since the request was submitted; queue_ms: to its first scheduled token."""

    queue_ms: float
    first_token_ms: float
    total_ms: float


@dataclass(frozen=True)
class Chunk:
    """What is new in a stream. Joined texts are the whole text, byte for byte.

    The last one has a finish_reason: stop | length | cancelled; before it is None. logprobs[i] belongs to token_ids[i];
    top_logprobs[i] are the most likely tokens at that place, in that order, as (id, logprob). Of a request with n > 1
    the chunks of all its sequences come in one stream, and `index` tells them apart. prompt_logprobs[i] belongs to
    token i + 1 of the prompt; they come with the first chunk of sequence 0.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None
    num_input_tokens: int
    num_output_tokens: int  # so far
    num_cached_tokens: int
    timings: Timings
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    index: int = 0
    cumulative_logprob: float = 0.0  # of its tokens so far, where logprobs or best_of were asked for
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    num_session_tokens: int = 0  # of num_input_tokens: the session's history before the prompt


@dataclass(frozen=True)
class Output:
    """A whole sequence; fields as in Chunk. token_ids include the end token. prompt_token_ids: as sent, without what a
    session put before them."""

    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str
    num_input_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    timings: Timings
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    index: int = 0
    cumulative_logprob: float = 0.0  # of its tokens so far, where logprobs or best_of were asked for
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    num_session_tokens: int = 0  # of num_input_tokens: the session's history before the prompt
