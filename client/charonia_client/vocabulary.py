"""The bytes of tokens, asked of the server once each and remembered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence, Set

from charonia_client.aside import aside
from charonia_client.types import GenerateResponse, TopToken

# (ids) -> the bytes of each, and whether it is special (no part of a text)
Lookup = Callable[[Sequence[int]], Awaitable[tuple[list[bytes], list[bool]]]]


class Vocabulary:
    """A cache in front of `lookup`. It holds at most the model's vocabulary."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._known: dict[int, tuple[bytes, bool]] = {}

    async def _names(self, ids: Set[int]) -> Mapping[int, tuple[bytes, bool]]:
        """At least those of `ids`."""
        known = self._known
        if missing := sorted(ids - known.keys()):
            pieces, special = await self._lookup(missing)
            known.update(zip(missing, zip(pieces, special, strict=True), strict=True))
        return known

    def forget(self) -> None:
        """The server was away: it may come back with another model. Answers that are being named keep their names."""
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


def _name(response: GenerateResponse, known: Mapping[int, tuple[bytes, bool]]) -> None:
    for top in _tops(response):
        top.token = known[top.id][0]
    for token in response.prompt_ids:
        piece, special = known[token]
        response.prompt_tokens.append(piece)
        response.prompt_special.append(special)
    if not response.logprobs:
        return
    begin, end = response.text_span
    at = 0
    for token in response.token_ids:
        piece, special = known[token]
        if special:
            piece = b""
        response.tokens.append(piece[max(begin - at, 0) : max(end - at, 0)])
        at += len(piece)
