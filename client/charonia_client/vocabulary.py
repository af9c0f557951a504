"""The bytes of tokens, asked of the server once each and remembered."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence, Set

from charonia_client.aside import aside
from charonia_client.errors import Unavailable
from charonia_client.types import GenerateResponse, TopToken

# (ids) -> the bytes of each, and whether it is special (no part of a text)
Lookup = Callable[[Sequence[int]], Awaitable[tuple[list[bytes], list[bool]]]]
_Name = tuple[bytes | None, bool]
_UNKNOWN: _Name = (None, False)
_NO_CHARACTER = "\ufffd"


class Vocabulary:
    """A cache in front of `lookup`. It holds at most the model's vocabulary.

    A server that drains finishes its answers, and may have no `lookup` any more: it raises Unavailable. Then
    `elsewhere` is asked, which is to raise that too where nobody else knows. No answer is lost for that.
    """

    def __init__(self, lookup: Lookup, elsewhere: Lookup | None = None) -> None:
        self._lookup = lookup
        self._elsewhere = elsewhere
        self._known: dict[int, _Name] = {}
        self._before: dict[int, _Name] = {}  # what was forgotten, for when nobody can be asked

    async def _names(self, ids: Set[int]) -> Mapping[int, _Name]:
        """Those of `ids`, as far as they can be known."""
        known = self._known
        if missing := sorted(ids - known.keys()):
            try:
                pieces, special = await self._ask(missing)
            except Unavailable:
                return ChainMap(known, self._before)
            known.update(zip(missing, zip(pieces, special, strict=True), strict=True))
            self._before = {}
        return known

    async def _ask(self, ids: Sequence[int]) -> tuple[list[bytes], list[bool]]:
        try:
            return await self._lookup(ids)
        except Unavailable:
            if self._elsewhere is None:
                raise
            return await self._elsewhere(ids)

    async def stop_word(self, response: GenerateResponse, words: Sequence[str]) -> str | None:
        """Which of the words ended the answer whose last response this is: it stands behind the response's text."""
        known = await self._names(set(response.token_ids))
        names = [known.get(token, _UNKNOWN) for token in response.token_ids]
        spelled = b"".join(piece or b"" for piece, special in names if not special)
        behind = spelled[response.text_span[1] :] if response.text_span else b""
        return next((word for word in words if behind.startswith(word.encode())), None)

    def forget(self) -> None:
        """The server was away: it may come back with another model. Answers that are being named keep their names."""
        self._before = {**self._before, **self._known}
        self._known = {}

    async def name_tokens(self, response: GenerateResponse) -> None:
        """Sets the tokens' bytes of a response that has log probabilities, of the answer or of the prompt."""
        tops = (response.top_logprobs, response.prompt_top_logprobs)
        count = sum(len(rows) * len(rows[0]) for rows in tops if rows)
        known = await self._names(await aside(count, _ids, response))
        await aside(count, _name, response, known)


def _tops(response: GenerateResponse) -> Iterator[TopToken]:
    return (top for rows in (response.top_logprobs, response.prompt_top_logprobs) for row in rows for top in row)


def _ids(response: GenerateResponse) -> set[int]:
    """All tokens that are to be named."""
    answer = response.token_ids if response.logprobs else ()
    return {*answer, *response.prompt_ids, *(top.id for top in _tops(response))}


def _name(response: GenerateResponse, known: Mapping[int, _Name]) -> None:
    for top in _tops(response):
        top.token = known.get(top.id, _UNKNOWN)[0]
    for token in response.prompt_ids:
        piece, special = known.get(token, _UNKNOWN)
        response.prompt_tokens.append(piece)
        response.prompt_special.append(special)
    if not response.logprobs:
        return
    begin, end = response.text_span
    at = 0
    placed = True  # until a token of unknown length
    for token in response.token_ids:
        piece, special = known.get(token, _UNKNOWN)
        if special:
            piece = b""
        placed = placed and piece is not None
        if placed:
            assert piece is not None
            response.tokens.append(piece[max(begin - at, 0) : max(end - at, 0)])
            at += len(piece)
        else:
            response.tokens.append(piece)
    if response.tokens.count(None) == 1 and response.tokens[-1] is None and _NO_CHARACTER not in response.text:
        text = response.text.encode()
        if len(text) == end - begin:  # no echo before it
            response.tokens[-1] = text[sum(len(piece) for piece in response.tokens if piece is not None) :]
