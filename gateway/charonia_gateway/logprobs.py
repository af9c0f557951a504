"""Log probabilities in OpenAI's two formats: for chat completions, and the older format for completions."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from typing import Any

from charonia_client import BadRequest, GenerateResponse

# JSON has no infinity; OpenAI sends this value for an impossible token.
MIN_LOGPROB = -9999.0

# Maximum log probabilities, including top tokens, in one response without streaming: about 20 MB of JSON.
MAX_ENTRIES = 1 << 18


def count_entries(response: GenerateResponse) -> int:
    """Count the log probabilities of a response, including its prompt and top tokens."""
    return sum(
        len(logprobs) * (1 + (len(tops[0]) if tops else 0))
        for logprobs, tops in (
            (response.logprobs, response.top_logprobs),
            (response.prompt_logprobs, response.prompt_top_logprobs),
        )
    )


def _finite(logprob: float) -> float:
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


def _escaped(token: bytes) -> str | None:
    """The bytes as \\x.. if they are not whole characters, else None."""
    try:
        token.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in token)
    return None


def _entry(token: bytes, logprob: float) -> dict[str, Any]:
    text = _escaped(token)
    return {
        "token": token.decode() if text is None else text,
        "logprob": _finite(logprob),
        "bytes": list(token),
    }


def _text(token: bytes) -> str:
    text = _escaped(token)
    return token.decode() if text is None else f"bytes:{text}"


def chat_logprobs(response: GenerateResponse) -> Iterator[dict[str, Any]]:
    """One entry per token of the response that adds to the text."""
    return (entry for entry in _entries(response) if entry["bytes"])


def _entries(response: GenerateResponse) -> Iterator[dict[str, Any]]:
    for token, logprob, tops in zip(response.tokens, response.logprobs, response.top_logprobs, strict=True):
        yield {**_entry(token, logprob), "top_logprobs": [_entry(top.token, top.logprob) for top in tops]}


class ContentLogprobs:
    """The entries of the tokens of a response's content, without reasoning and calls. parsed: the response was
    requested with `parsed`."""

    def __init__(self, *, parsed: bool) -> None:
        self._parsed = parsed
        self._held: dict[int, dict[str, Any]] = {}  # by the token's number
        self._num_tokens = 0
        self._num_entries = 0

    def of(self, part: GenerateResponse) -> list[dict[str, Any]]:
        """The entries of the content of the next part. Raises BadRequest if a response has too many."""
        self._num_entries += count_entries(part)
        if self._num_entries > MAX_ENTRIES:
            text = f"top_logprobs: the response has more than {MAX_ENTRIES} log probabilities, top_logprobs included; "
            raise BadRequest(text + "send a smaller max_output_tokens or top_logprobs")
        if not self._parsed:
            return list(chat_logprobs(part))
        self._held.update(enumerate(_entries(part), self._num_tokens))
        self._num_tokens += len(part.logprobs)
        return [self._held.pop(token) for token in part.content_tokens]


_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class _Characters:
    """Counts the characters of a text from its bytes. Invalid bytes count as U+FFFD, as in the text."""

    def __init__(self, count: int = 0) -> None:
        self._count = count
        self._decoder = _utf8_decoder("replace")

    def begin_of(self, token: bytes) -> int:
        """Add the next token. Returns the index of the character in which it begins."""
        if not token:
            return self._count
        self._count += len(self._decoder.decode(token[:1]))
        begin = self._count if self._decoder.getstate()[0] else self._count - 1
        self._count += len(self._decoder.decode(token[1:]))
        return begin


class CompletionLogprobs:
    """The older format. Offsets count the characters of the choice's text, so each choice needs its own object."""

    def __init__(self, every: bool = False) -> None:
        """every: include response tokens that add no text, such as the end token."""
        self._every = every
        self._characters = _Characters()

    def of(self, response: GenerateResponse) -> dict[str, list[Any]]:
        """tokens, token_logprobs, top_logprobs and text_offset of the tokens that add to the text."""
        tokens: list[str] = []
        logprobs: list[float] = []
        tops: list[dict[str, float]] = []
        offsets: list[int] = []
        rows = zip(response.tokens, response.logprobs, response.top_logprobs, strict=True)
        for token, logprob, top in rows:
            if not token and not self._every:
                continue
            tokens.append(_text(token))
            logprobs.append(_finite(logprob))
            tops.append({_text(entry.token): _finite(entry.logprob) for entry in reversed(top)})
            offsets.append(self._characters.begin_of(token))
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def of_prompt(self, response: GenerateResponse, prompt: str, *, exact: bool = False) -> dict[str, list[Any]]:
        """The same for the prompt's tokens, which an echo puts before the response's tokens. The first token has no log
        probability, because no token precedes it. Text that a tokenizer adds by itself (a beginning token, a leading
        space) is not part of the prompt and is left out. exact: the prompt was sent as tokens, and each token has an
        entry.
        """
        tokens: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        text = prompt.encode()
        at = 0  # bytes of `text` that the earlier tokens cover
        rows = zip(
            response.prompt_tokens,
            response.prompt_special,
            [None, *response.prompt_logprobs],
            [None, *response.prompt_top_logprobs]
            if response.prompt_top_logprobs
            else [None] * len(response.prompt_ids),
            strict=True,
        )
        for token, special, logprob, top in rows:
            if special and not exact and not text.startswith(token, at):
                continue
            if at == 0 and not text.startswith(token) and token.startswith(b" "):
                token = token[1:]
            if not token and not exact:
                continue
            tokens.append(_text(token))
            logprobs.append(None if logprob is None else _finite(logprob))
            tops.append(None if top is None else {_text(one.token): _finite(one.logprob) for one in reversed(top)})
            offsets.append(self._characters.begin_of(token))
            at += len(token)
        self._characters = _Characters(len(prompt))
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def joined(parts: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}
