"""From what a caller passes to token ids: texts, token ids and chats; and sampling parameters to the engine's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any, cast

from charonia import _engine
from charonia.api.results import Messages, SamplingParams
from charonia.errors import InvalidRequestError
from charonia.text.prompt_ids import Encoded, PromptError, encode_bad_words, encode_chat, encode_text

Prompt = str | Sequence[int] | Messages


def split(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list: a text, a list of ints and a list of messages are one prompt each."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidRequestError(
            f"prompts is of type {type(prompts).__name__}; expected a text, token ids, chat messages or a list of these"
        )
    if prompts and isinstance(prompts[0], Integral | Mapping):
        return [cast(Prompt, prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def encode(tokenizer: Callable[[], Any], prompt: Prompt, *, interactive: bool = False) -> Encoded:
    """A prompt as prompt_ids.py has it; token ids as they are. interactive: with what the prompt adds to a session.

    tokenizer: called only where one is needed; returns the Hugging Face tokenizer.
    """
    with _refused():
        if isinstance(prompt, str):
            return encode_text(tokenizer(), "prompt", prompt, interactive=interactive)
        if not isinstance(prompt, Sequence):
            raise InvalidRequestError(f"{prompt!r} is no prompt; expected a text, token ids or chat messages")
        if prompt and isinstance(prompt[0], Mapping):
            return encode_chat(tokenizer(), prompt, interactive=interactive)
    for position, token in enumerate(prompt):
        if not isinstance(token, Integral):  # NumPy's too
            raise InvalidRequestError(f"prompt[{position}] is {token!r}, which is no token id")
    token_ids = [int(token) for token in cast("Sequence[int]", prompt)]
    return Encoded(token_ids, continuation_ids=token_ids if interactive else [])


@contextmanager
def _refused() -> Iterator[None]:
    """A PromptError is an InvalidRequestError here."""
    try:
        yield
    except PromptError as error:
        raise InvalidRequestError(str(error)) from error


def _bad_word_ids(tokenizer: Callable[[], Any], words: Sequence[str | Sequence[int]]) -> list[list[int]]:
    texts = [word for word in words if isinstance(word, str)]
    with _refused():
        spelled = encode_bad_words(tokenizer(), texts) if texts else []
    return [*spelled, *(list(word) for word in words if not isinstance(word, str))]


def native_sampling(tokenizer: Callable[[], Any], sampling: SamplingParams) -> _engine.SamplingParams:
    """The engine's form. Raises InvalidRequestError for a value of a wrong type; ranges are checked on submission."""
    stop = sampling.stop
    values = {
        "stop_words": [] if stop is None else [stop] if isinstance(stop, str | bytes) else list(stop),
        "end_ids": list(sampling.end_ids),
        "bad_words": _bad_word_ids(tokenizer, sampling.bad_words),
        "logit_bias": list(sampling.logit_bias.items()),
        "logprobs": -1 if sampling.logprobs is None else sampling.logprobs,
        "prompt_logprobs": -1 if sampling.prompt_logprobs is None else sampling.prompt_logprobs,
        "best_of": 0 if sampling.best_of is None else sampling.best_of,
    }
    for name in (
        "max_tokens",
        "min_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "ignore_eos",
        "n",
    ):
        values[name] = getattr(sampling, name)
    native = _engine.SamplingParams()
    for name, value in values.items():
        try:
            setattr(native, name, value)
        except (TypeError, ValueError) as error:  # ValueError: a text with a lone surrogate
            raise InvalidRequestError(f"{name} = {value!r} is not valid: {_expected(name)}") from error
    return native


def _expected(name: str) -> str:
    kinds = {
        "max_tokens": "expected a whole number or None",
        "seed": "expected a whole number from 0 to 2^64 - 1, or None",
        "stop_words": "expected texts or bytes",
        "end_ids": "expected token ids",
        "bad_words": "expected texts or lists of token ids",
        "logit_bias": "expected a mapping from token id to a number",
        "ignore_eos": "expected True or False",
    }
    whole = ("min_tokens", "top_k", "logprobs", "prompt_logprobs", "n", "best_of")
    return kinds.get(name, "expected a whole number" if name in whole else "expected a number")
