"""Inputs and outputs of a generation: sampling parameters, streamed chunks and complete outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from charonia.api.sampling_fields import SamplingFields

_SHOWN = 60  # characters of a text in its repr

# A chat: messages in OpenAI's format, {"role": ..., "content": ...}.
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class SamplingParams(SamplingFields):
    """How tokens are chosen; definitions/sampling_parameters.toml defines the fields.

    Fields that are None use the model's defaults, `Engine.info.default_sampling`. These come from
    generation_config.json unless the setting generation_config is none. Equal requests with the same `seed` give the
    same tokens, whatever other requests run.
    """


@dataclass(frozen=True)
class Timings:
    """Milliseconds since the request was submitted. queue_ms: until its first token was scheduled."""

    queue_ms: float
    first_token_ms: float
    total_ms: float


@dataclass(frozen=True, repr=False)
class Chunk:
    """The new part of a stream. The joined texts are exactly the complete text.

    The last chunk has a finish_reason: stop | length | cancelled; in earlier ones it is None. logprobs[i] belongs to
    token_ids[i]; top_logprobs[i] are the most likely tokens at this position, in order, as (id, logprob). With n > 1
    the stream contains the chunks of all sequences; `index` is the number of the sequence. prompt_logprobs[i] belongs
    to token i + 1 of the prompt; they are in the first chunk of sequence 0.
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
    cumulative_logprob: float = 0.0  # of all tokens so far, if logprobs or best_of were requested
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    num_session_tokens: int = 0  # part of num_input_tokens: the session's history before the prompt
    num_proposed_tokens: int = 0  # by speculation so far
    num_accepted_tokens: int = 0  # part of num_output_tokens: proposals that were accepted
    pooled: list[float] = field(default_factory=list)  # of Engine.embed and Engine.score

    def __repr__(self) -> str:
        """The text, without the lists, which may have thousands of numbers."""
        text = self.text if len(self.text) <= _SHOWN else f"{self.text[: _SHOWN - 3]}..."
        end = f", {self.finish_reason}" if self.finish_reason else ""
        return f"{type(self).__name__}({text!r}, {self.num_output_tokens} tokens{end})"


@dataclass(frozen=True, repr=False)
class Output(Chunk):
    """A complete sequence. token_ids include the end token. prompt_token_ids do not include a session's history."""

    finish_reason: str
    prompt_token_ids: list[int] = field(kw_only=True)
