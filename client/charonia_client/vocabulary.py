"""The bytes of tokens, asked of the server once each and remembered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from charonia_client.types import GenerateResponse

# (ids) -> the bytes of each, and whether it is special (no part of a text)
Lookup = Callable[[Sequence[int]], Awaitable[tuple[list[bytes], list[bool]]]]


class Vocabulary:
    """A cache in front of `lookup`. It holds at most the model's vocabulary."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._known: dict[int, tuple[bytes, bool]] = {}

    async def _names(self, ids: Iterable[int]) -> Mapping[int, tuple[bytes, bool]]:
        """At least those of `ids`."""
        known = self._known
        if missing := sorted(set(ids) - known.keys()):
            pieces, special = await self._lookup(missing)
            known.update(zip(missing, zip(pieces, special, strict=True), strict=True))
        return known

    def forget(self) -> None:
        """The server was away: it may come back with another model. Answers that are being named keep their names."""
        self._known = {}

    async def name_tokens(self, response: GenerateResponse) -> None:
        """Sets the tokens' bytes of a response that has log probabilities, of the answer or of the prompt."""
        tops = [top for rows in (response.top_logprobs, response.prompt_top_logprobs) for row in rows for top in row]
        answer = response.token_ids if response.logprobs else ()
        known = await self._names([*answer, *response.prompt_ids, *(top.id for top in tops)])
        for top in tops:
            top.token = known[top.id][0]
        for token in response.prompt_ids:
            piece, special = known[token]
            response.prompt_tokens.append(piece)
            response.prompt_special.append(special)
        if not answer:
            return
        begin, end = response.text_span
        at = 0
        for token in answer:
            piece, special = known[token]
            if special:
                piece = b""
            response.tokens.append(piece[max(begin - at, 0) : max(end - at, 0)])
            at += len(piece)
