"""Converts prompts (texts, token ids and chats) to token ids, and sampling parameters to the engine's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any, cast

from charonia import _engine
from charonia.api.results import Messages, SamplingParams
from charonia.api.sampling_fields import EXPECTED, VALUES
from charonia.errors import InvalidRequestError
from charonia.text.prompt_ids import Encoded, PromptError, encode_bad_words, encode_chat, encode_text

Prompt = str | Sequence[int] | Messages


def split(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts. A text, a list of ints and a list of messages are each one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidRequestError(
            f"prompts is of type {type(prompts).__name__}; expected a text, token ids, chat messages or a list of these"
        )
    if prompts and isinstance(prompts[0], Integral | Mapping):
        return [cast(Prompt, prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def encode(
    tokenizer: Callable[[], Any], prompt: Prompt, *, interactive: bool = False, limit: int | None = None
) -> Encoded:
    """Encode a prompt with prompt_ids.py. Token ids are unchanged. interactive: whether to compute continuation_ids for
    a session. limit: the length of the context; a much longer text is not tokenized completely.

    tokenizer: returns the Hugging Face tokenizer; called only if it is needed.
    """
    with refused():
        if isinstance(prompt, str):
            return encode_text(tokenizer(), "prompt", prompt, interactive=interactive, limit=limit)
        if not isinstance(prompt, Sequence):
            raise InvalidRequestError(f"{prompt!r} is not a prompt; expected a text, token ids or chat messages")
        if prompt and isinstance(prompt[0], Mapping):
            return encode_chat(tokenizer(), prompt, interactive=interactive, limit=limit)
    for position, token in enumerate(prompt):
        # Also accepts NumPy integers. The engine, which uses 32 bits, checks whether the id is in the vocabulary.
        if not isinstance(token, Integral) or not -(2**31) <= int(token) < 2**31:
            raise InvalidRequestError(f"prompt[{position}] is {token!r}, which is not a token id")
    token_ids = [int(token) for token in cast("Sequence[int]", prompt)]
    return Encoded(token_ids, continuation_ids=token_ids if interactive else [])


@contextmanager
def refused() -> Iterator[None]:
    """Convert PromptError to InvalidRequestError."""
    try:
        yield
    except PromptError as error:
        raise InvalidRequestError(str(error)) from error


_CALLS = "thinking_call_ids"
_TOKEN_LISTS = ("end_ids", "thinking_begin_ids", "thinking_end_ids")


def _bad_word_ids(tokenizer: Callable[[], Any], words: Sequence[str | Sequence[int]]) -> list[list[int]]:
    if not isinstance(words, Sequence):
        raise _wrong("bad_words", words)
    texts = [word for word in words if isinstance(word, str)]
    with refused():
        spelled = encode_bad_words(tokenizer(), texts) if texts else []
    return [*spelled, *(_listed("bad_words", word) for word in words if not isinstance(word, str))]


def _wrong(name: str, value: Any) -> InvalidRequestError:
    return InvalidRequestError(f"{name} = {value!r} is not valid: {EXPECTED[name]}")


def _listed(name: str, value: Any) -> list[Any]:
    try:
        return list(value)
    except TypeError:
        raise _wrong(name, value) from None


def native_sampling(
    tokenizer: Callable[[], Any], sampling: SamplingParams, defaults: _engine.SamplingParams
) -> _engine.SamplingParams:
    """Write the fields that are set into `defaults`, a copy of EngineInfo.default_sampling, and return it.

    Raises InvalidRequestError for a value of a wrong type. The engine checks ranges when the request is submitted.
    """
    stop = sampling.stop
    if not isinstance(sampling.logit_bias, Mapping):
        raise _wrong("logit_bias", sampling.logit_bias)
    values = {name: getattr(sampling, name) for name in VALUES}
    values = {name: value for name, value in values.items() if value is not None or not VALUES[name]}
    values |= {
        "stop_words": [] if stop is None else [stop] if isinstance(stop, str | bytes) else _listed("stop_words", stop),
        **{name: _listed(name, getattr(sampling, name)) for name in _TOKEN_LISTS},
        "thinking_call_ids": [_listed(_CALLS, ids) for ids in _listed(_CALLS, sampling.thinking_call_ids)],
        "bad_words": _bad_word_ids(tokenizer, sampling.bad_words),
        "logit_bias": list(sampling.logit_bias.items()),
    }
    for name, value in values.items():
        try:
            setattr(defaults, name, value)
        except (TypeError, ValueError) as error:  # ValueError: a text with a lone surrogate
            raise _wrong(name, value) from error
    return defaults
