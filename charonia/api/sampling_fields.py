# Generated from definitions/sampling_parameters.toml by `make generate`; do not edit.
"""The fields of charonia.SamplingParams, and how they are passed to the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SamplingFields:
    """Names and meanings are OpenAI's if OpenAI has the parameter. The engine checks ranges."""

    # longest completion in tokens; unset: until session_len is reached; >= 1
    max_tokens: int | None = None
    # minimum output tokens; before that, end ids and stop words do not end the sequence; >= 0
    min_tokens: int = 0
    # 0 is greedy; >= 0; unset: the model's default, else 1
    temperature: float | None = None
    # sample from the k most probable tokens; >= 0 (0: all tokens); unset: the model's default, else 0
    top_k: int | None = None
    # sample from the fewest tokens whose probabilities add up to it; in (0, 1]; unset: the model's default, else 1
    top_p: float | None = None
    # minimum probability, relative to the most probable token; in [0, 1]; unset: the model's default, else 0
    min_p: float | None = None
    # for tokens of prompt and output: positive logits are divided by it, others multiplied; 1: none; in [0.01, 100];
    # unset: the model's default, else 1
    repetition_penalty: float | None = None
    # subtracted from the logits of tokens that are in the output; in [-2, 2]
    presence_penalty: float = 0.0
    # subtracted from the logits of tokens for each occurrence in the output; in [-2, 2]
    frequency_penalty: float = 0.0
    # equal requests with the same seed give the same tokens; unset: a new seed for each request
    seed: int | None = None
    # texts that end the sequence and are not output; matched as UTF-8 within and across tokens; at most 64 of 1 to 1024
    # bytes
    stop: str | bytes | Sequence[str | bytes] | None = None
    # tokens that end the sequence, at most 256; empty: the model's own
    end_ids: Sequence[int] = ()
    # end ids do not end the sequence
    ignore_eos: bool = False
    # most tokens of thinking; then the engine writes the mark that ends the thinking, and the response goes on; unset:
    # no limit; >= 0
    thinking_budget: int | None = None
    # with thinking_budget: the tokens of the mark that begins the thinking; empty: only the prompt begins it. A special
    # token, a word and a special token are the header of a message, and are looked for in the whole response, if
    # thinking_end_ids begins with a special token, which then ends the message
    thinking_begin_ids: Sequence[int] = ()
    # with thinking_budget: the tokens of the mark that ends the thinking
    thinking_end_ids: Sequence[int] = ()
    # with thinking_budget: the tokens of the marks that begin and end a call, so that the budget holds for thinking
    # after calls. Also of the marks around text in calls in which no mark counts, unless the end mark is a special
    # token: [[begin], [end]] or [[begin], [end], [text begin], [text end]]. Empty: calls are other text
    thinking_call_ids: Sequence[Sequence[int]] = ()
    # with thinking_budget: the prompt ends within the thinking; also true if thinking_begin_ids is empty
    thinking_begun: bool = False
    # token sequences that are never completed; for a text, the sequences that the tokenizer makes of it
    bad_words: Sequence[str | Sequence[int]] = ()
    # added to the logits, by token id; for a repeated token, the sum; in [-100, 100]
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    # log probabilities of the sampled token and of this many top tokens; unset: none; in [0, 20]
    logprobs: int | None = None
    # log probabilities of the prompt's tokens from the second one on, and of this many top tokens; unset: none;
    # in [0, 20]
    prompt_logprobs: int | None = None
    # sequences to return; they share the prompt's KV blocks. Sequence i has the seed `seed + i`; in [1, 128]
    n: int = 1
    # sequences to sample, at least n; the n sequences with the largest mean log probability per token, without tokens
    # that thinking_budget forced, are returned, best first. More than n: only without streaming; in [1, 128]
    best_of: int | None = None


# Fields with one value, passed to the engine unchanged. True: None leaves the field unset.
VALUES: dict[str, bool] = {
    "max_tokens": True,
    "min_tokens": False,
    "temperature": True,
    "top_k": True,
    "top_p": True,
    "min_p": True,
    "repetition_penalty": True,
    "presence_penalty": False,
    "frequency_penalty": False,
    "seed": True,
    "ignore_eos": False,
    "thinking_budget": True,
    "thinking_begun": False,
    "logprobs": True,
    "prompt_logprobs": True,
    "n": False,
    "best_of": True,
}

# The expected values in the error for a wrong type, by the engine's field name.
EXPECTED: dict[str, str] = {
    "max_tokens": "expected a whole number or None",
    "min_tokens": "expected a whole number",
    "temperature": "expected a number or None",
    "top_k": "expected a whole number or None",
    "top_p": "expected a number or None",
    "min_p": "expected a number or None",
    "repetition_penalty": "expected a number or None",
    "presence_penalty": "expected a number",
    "frequency_penalty": "expected a number",
    "seed": "expected a whole number from 0 to 2^64 - 1, or None",
    "stop_words": "expected texts or bytes",
    "end_ids": "expected token ids",
    "ignore_eos": "expected True or False",
    "thinking_budget": "expected a whole number or None",
    "thinking_begin_ids": "expected token ids",
    "thinking_end_ids": "expected token ids",
    "thinking_call_ids": "expected lists of token ids",
    "thinking_begun": "expected True or False",
    "bad_words": "expected texts or lists of token ids",
    "logit_bias": "expected a mapping from token id to a number",
    "logprobs": "expected a whole number or None",
    "prompt_logprobs": "expected a whole number or None",
    "n": "expected a whole number",
    "best_of": "expected a whole number or None",
}
