"""The bytes of tokens, requested from the server once each and cached."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence, Set

from charonia_client.errors import Unavailable
from charonia_client.offload import offload
from charonia_client.types import GenerateResponse, TopToken

# (ids) -> the bytes of each, and whether it is special (not part of a text)
Lookup = Callable[[Sequence[int]], Awaitable[tuple[list[bytes], list[bool]]]]
_Name = tuple[bytes | None, bool]
_UNKNOWN: _Name = (None, False)


class Vocabulary:
    """A cache of `lookup`. It holds the model's vocabulary at most.

    A server that drains ends its responses, but its `lookup` may raise Unavailable. Then `elsewhere` is used, and if
    that raises Unavailable too, the bytes are unknown: None. The response goes on.
    """

    def __init__(self, lookup: Lookup, elsewhere: Lookup | None = None) -> None:
        self._lookup = lookup
        self._elsewhere = elsewhere
        self._known: dict[int, _Name] = {}
        self._before: dict[int, _Name] = {}  # old entries, used if no server can be reached

    async def _names(self, ids: Set[int]) -> Mapping[int, _Name]:
        """Returns the names of the ids that are known or can be looked up."""
        known = self._known
        if missing := sorted(ids - known.keys()):
            try:
                pieces, special = await self._request(missing)
            except Unavailable:
                return ChainMap(known, self._before)
            known.update(zip(missing, zip(pieces, special, strict=True), strict=True))
            self._before = {}
        return known

    async def _request(self, ids: Sequence[int]) -> tuple[list[bytes], list[bool]]:
        try:
            return await self._lookup(ids)
        except Unavailable:
            if self._elsewhere is None:
                raise
            return await self._elsewhere(ids)

    def forget(self) -> None:
        """The server was not available: it may return with another model."""
        self._before = {**self._before, **self._known}
        self._known = {}

    async def name_tokens(self, response: GenerateResponse) -> None:
        """Sets the bytes of the most likely tokens and of the prompt's tokens."""
        tops = (response.top_logprobs, response.prompt_top_logprobs)
        count = sum(len(rows) * len(rows[0]) for rows in tops if rows)
        known = await self._names(await offload(count, _ids, response))
        await offload(count, _name, response, known)


def _tops(response: GenerateResponse) -> Iterator[TopToken]:
    return (top for rows in (response.top_logprobs, response.prompt_top_logprobs) for row in rows for top in row)


def _ids(response: GenerateResponse) -> set[int]:
    return {*response.prompt_ids, *(top.id for top in _tops(response))}


def _name(response: GenerateResponse, known: Mapping[int, _Name]) -> None:
    for top in _tops(response):
        top.token = known.get(top.id, _UNKNOWN)[0]
    for token in response.prompt_ids:
        piece, special = known.get(token, _UNKNOWN)
        response.prompt_tokens.append(piece)
        response.prompt_special.append(special)
