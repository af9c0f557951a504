# Generated from definitions/tensors.toml and definitions/sampling_parameters.toml by `make generate`; do not edit.
"""The fields of a request that are one value, and their tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class ScalarFields:
    """None is not sent: the server's default holds."""

    # default false; true: with stream, responses without text say how much of a long prompt is computed
    # (`num_computed_tokens`), one for each step
    prompt_progress: bool | None = None
    # default false; true: max_tokens may be more than the context has room for, and the answer ends where the context
    # does; a session keeps as much of its history as without max_tokens
    fit_max_tokens: bool | None = None
    # with `pooling`: the embedding's first numbers, of length 1 again; default 0: all
    dimensions: int | None = None
    # higher goes first; default 0
    priority: int | None = None
    # at least 1: then the request ends with `[504]`; unset: the setting request_timeout_s
    timeout_ms: int | None = None
    # longest completion in tokens; unset: until session_len is reached; >= 1
    max_tokens: int | None = None
    # minimum output tokens; before that, end ids and stop words do not end the sequence; >= 0
    min_tokens: int | None = None
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
    presence_penalty: float | None = None
    # subtracted from the logits of tokens for each occurrence in the output; in [-2, 2]
    frequency_penalty: float | None = None
    # equal requests with the same seed give the same tokens; unset: a new seed for each request
    seed: int | None = None
    # end ids do not end the sequence
    ignore_eos: bool | None = None
    # most tokens of thinking; then the engine writes the mark that ends the thinking, and the response goes on; unset:
    # no limit; >= 0
    thinking_budget: int | None = None
    # log probabilities of the prompt's tokens from the second one on, and of this many top tokens; unset: none;
    # in [0, 20]
    prompt_logprobs: int | None = None
    # sequences to return; they share the prompt's KV blocks. Sequence i has the seed `seed + i`; in [1, 128]
    n: int | None = None
    # sequences to sample, at least n; the n sequences with the largest mean log probability per token, without tokens
    # that thinking_budget forced, are returned, best first. More than n: only without streaming; in [1, 128]
    best_of: int | None = None


# Field -> its tensor of shape [1] and its Triton type.
SCALARS: dict[str, tuple[str, str]] = {
    "prompt_progress": ("prompt_progress", "BOOL"),
    "fit_max_tokens": ("fit_max_tokens", "BOOL"),
    "dimensions": ("dimensions", "INT32"),
    "priority": ("priority", "INT32"),
    "timeout_ms": ("timeout_ms", "INT32"),
    "max_tokens": ("max_tokens", "INT32"),
    "min_tokens": ("min_tokens", "INT32"),
    "temperature": ("temperature", "FP32"),
    "top_k": ("top_k", "INT32"),
    "top_p": ("top_p", "FP32"),
    "min_p": ("min_p", "FP32"),
    "repetition_penalty": ("repetition_penalty", "FP32"),
    "presence_penalty": ("presence_penalty", "FP32"),
    "frequency_penalty": ("frequency_penalty", "FP32"),
    "seed": ("seed", "UINT64"),
    "ignore_eos": ("ignore_eos", "BOOL"),
    "thinking_budget": ("thinking_budget", "INT32"),
    "prompt_logprobs": ("prompt_logprobs", "INT32"),
    "n": ("num_return_sequences", "INT32"),
    "best_of": ("best_of", "INT32"),
}
