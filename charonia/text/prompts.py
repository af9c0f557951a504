"""From what a caller passes to token ids: texts, token ids and chats; and sampling parameters to the engine's."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, cast

from charonia import _engine
from charonia.api.results import Messages, SamplingParams
from charonia.api.sampling_fields import EXPECTED, VALUES
from charonia.errors import InvalidRequestError

Prompt = str | Sequence[int] | Messages


@dataclass(frozen=True)
class Encoded:
    """A prompt's token ids. strip_leading_space: the answer is a text of its own, not the prompt's continuation.

    continuation_ids: what the prompt adds to a session that has a history; only where a session is asked for.
    """

    token_ids: list[int]
    strip_leading_space: bool = False
    continuation_ids: list[int] = field(default_factory=list)


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


def encode(tokenizer: Any, prompt: Prompt) -> Encoded:
    """Texts as the tokenizer does it, with its beginning token; chats through the template, which writes its own.

    tokenizer: called only where one is needed; returns the Hugging Face tokenizer.
    """
    if isinstance(prompt, str):
        return Encoded(_ids(tokenizer(), prompt, special=True))
    if not isinstance(prompt, Sequence):
        raise InvalidRequestError(f"{prompt!r} is no prompt; expected a text, token ids or chat messages")
    if prompt and isinstance(prompt[0], Mapping):
        return Encoded(_ids(tokenizer(), render_chat(tokenizer(), cast(Messages, prompt)), special=False), True)
    for position, token in enumerate(prompt):
        if not isinstance(token, Integral):  # NumPy's too
            raise InvalidRequestError(f"prompt[{position}] is {token!r}, which is no token id")
    return Encoded([int(token) for token in cast("Sequence[int]", prompt)])


def render_chat(tokenizer: Any, messages: Messages) -> str:
    """The text that the chat template makes of the messages, ending where the answer begins."""
    import jinja2

    if tokenizer.chat_template is None:
        raise InvalidRequestError("this model's tokenizer has no chat template: pass a text, or use a chat model")
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))
    except (jinja2.TemplateError, TypeError, KeyError, ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"the model's chat template refuses the messages ({error}): change the roles or their order"
        ) from error


# Text that no template changes, since it has neither spaces nor markup, and that nobody writes.
_MARK = "charoniaXanswerXendsXhere"


def continuation(tokenizer: Any, messages: Messages) -> list[int]:
    """The ids that new messages add to a conversation which ends with an assistant's answer.

    What the chat template writes after such an answer: the end of its turn, the messages, and the beginning of the next
    answer. System messages at their head are left out: they begin a conversation, and this one has begun. Raises
    InvalidRequestError where the template makes that depend on what went before.
    """

    new = list(itertools.dropwhile(lambda message: message.get("role") == "system", messages))
    if not new:
        raise InvalidRequestError("the messages are all the system's; expected one of the user's")

    def after_answer(turns: int) -> str:
        before = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}] * (turns - 1)
        marked = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _MARK}]
        parts = render_chat(tokenizer, [*before, *marked, *new]).split(_MARK)
        if len(parts) != 2:
            raise InvalidRequestError(
                "the model's chat template does not show an earlier answer once and as it was, so a session cannot "
                "go on from it: send the whole conversation as the prompt, without a session"
            )
        return parts[1]

    text = after_answer(1)
    if after_answer(2) != text:
        raise InvalidRequestError(
            "the model's chat template writes new messages differently after more turns, so they cannot be added to a "
            "session: send the whole conversation as the prompt, without a session"
        )
    return _inner_ids(tokenizer, text)


def _inner_ids(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a text that is not the beginning of one: without what a tokenizer puts before a first word."""
    before = _ids(tokenizer, "\n", special=False)
    both = _ids(tokenizer, "\n" + text, special=False)
    if both[: len(before)] == before:
        return both[len(before) :]
    return _ids(tokenizer, text, special=False)


def encode_turn(tokenizer: Any, prompt: Prompt) -> Encoded:
    """A prompt with what it adds to a session: messages as `continuation` has them, texts and ids as they are."""
    whole = encode(tokenizer, prompt)
    if isinstance(prompt, str):
        added = _inner_ids(tokenizer(), prompt)
    elif prompt and isinstance(prompt[0], Mapping):
        added = continuation(tokenizer(), cast(Messages, prompt))
    else:
        added = whole.token_ids
    return replace(whole, continuation_ids=added)


def _ids(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    try:
        ids = tokenizer(text, add_special_tokens=special, return_attention_mask=False)["input_ids"]
    except (UnicodeEncodeError, TypeError) as error:
        raise InvalidRequestError("the prompt is not valid Unicode: it has a lone surrogate") from error
    return cast("list[int]", ids)


def _bad_word_ids(tokenizer: Any, word: str | Sequence[int]) -> list[list[int]]:
    """The tokens that spell a word at the beginning of a text, after a space and inside a line."""
    if not isinstance(word, str):
        return [list(word)]
    if not word:
        raise InvalidRequestError("bad_words has an empty text; leave it out")
    newline = _ids(tokenizer(), "\n", special=False)
    spellings = [_ids(tokenizer(), text, special=False) for text in (word, " " + word)]
    continued = _ids(tokenizer(), "\n" + word, special=False)
    if continued[: len(newline)] == newline and len(continued) > len(newline):
        spellings.append(continued[len(newline) :])
    return [ids for number, ids in enumerate(spellings) if ids not in spellings[:number]]


def native_sampling(tokenizer: Any, sampling: SamplingParams) -> _engine.SamplingParams:
    """The engine's form. Raises InvalidRequestError for a value of a wrong type; ranges are checked on submission."""
    stop = sampling.stop
    values = {name: getattr(sampling, name) for name in VALUES}
    values = {name: VALUES[name] if value is None else value for name, value in values.items()}
    values |= {
        "stop_words": [] if stop is None else [stop] if isinstance(stop, str | bytes) else list(stop),
        "end_ids": list(sampling.end_ids),
        "bad_words": [ids for word in sampling.bad_words for ids in _bad_word_ids(tokenizer, word)],
        "logit_bias": list(sampling.logit_bias.items()),
    }
    native = _engine.SamplingParams()
    for name, value in values.items():
        try:
            setattr(native, name, value)
        except (TypeError, ValueError) as error:  # ValueError: a text with a lone surrogate
            raise InvalidRequestError(f"{name} = {value!r} is not valid: {EXPECTED[name]}") from error
    return native
