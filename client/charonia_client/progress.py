"""The tokens of a request's responses that have arrived. With them, another server can continue the responses."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from charonia_client.delivery import Chunk
from charonia_client.errors import Unavailable
from charonia_client.parsing import ResponseParser
from charonia_client.types import GenerateRequest


def join(last: Any, chunk: Any) -> None:
    """Appends the next chunk of a response to the last one."""
    begin, end = last.text_begin, last.text_end
    last.MergeFrom(chunk)
    last.num_computed_tokens = chunk.num_computed_tokens  # MergeFrom() keeps the last value over a 0.
    last.text_begin = begin if begin != end else end + chunk.text_begin
    last.text_end = end + chunk.text_end


@dataclass(slots=True)
class _Response:
    tokens: array[int] = field(default_factory=lambda: array("i"))  # 4 bytes each
    ended: bool = False
    whole: Any = None  # the joined chunks of a whole response
    first: tuple[float, float, int] | None = None  # queue_ms, first_token_ms and num_cached_tokens of its first chunk
    logprob: float = 0.0  # cum_log_probs of its last chunk
    logprob_before: float = 0.0  # of the tokens from earlier servers

    def take(self, chunk: Any, offset_ms: float) -> None:
        if offset_ms:
            chunk.cum_log_probs += self.logprob_before
            chunk.total_ms += offset_ms
            if self.first:
                chunk.queue_ms, chunk.first_token_ms, chunk.num_cached_tokens = self.first
            else:
                chunk.queue_ms += offset_ms
                chunk.first_token_ms += offset_ms
        if chunk.output_ids or chunk.finish_reason:
            self.first = self.first or (chunk.queue_ms, chunk.first_token_ms, chunk.num_cached_tokens)
        self.logprob = chunk.cum_log_probs
        self.tokens.extend(chunk.output_ids)
        self.ended = chunk.finish_reason != 0


def promise_of(info: dict[str, Any]) -> str | None:
    """Servers with the same promise give a request the same tokens. None: the tokens depend on more than the request,
    or the server does not describe itself. info: Client.model_info()."""
    return info.get("fingerprint") if info.get("deterministic") else None


class Progress:
    """Pass the same object to each Client.generate() of a request. The next server then receives the tokens that have
    arrived, and the parts continue after them. The text is the same as that of one server if both servers give the same
    tokens for the request (docs/determinism.md). The request needs a seed.

    joins: responses with `stream=False` can be continued too. The server sends them in parts, which are joined here.
    With `best_of` this is not possible."""

    def __init__(self, request: GenerateRequest, *, joins: bool = False) -> None:
        self.parser = ResponseParser(request) if request.parsed else None
        self.joins = joins and not request.stream and (request.best_of or 0) <= (request.n or 1)
        self.resumable = request.stream or self.joins  # whether another server can continue
        self.fingerprint: str | None = None  # of the last server
        self.promise: str | None = None  # of the last server; see promise_of()
        self._responses = [_Response() for _ in range(request.n or 1)]
        self._began_at: float | None = None
        self._offset_ms = 0.0  # from the first submission to the one at the current server

    @property
    def begun(self) -> bool:
        """Whether a token has arrived, or an end."""
        return any(one.first for one in self._responses)

    @property
    def num_tokens(self) -> int:
        """The number of tokens that have arrived, of all responses."""
        return sum(len(one.tokens) for one in self._responses)

    @property
    def num_running(self) -> int:
        """The number of responses that have not ended."""
        return sum(not one.ended for one in self._responses)

    def begin(self) -> list[Sequence[int] | None] | None:
        """Called when the request is sent to a server. Returns the tokens of each response, None for a response that
        has ended; or None if nothing has arrived yet."""
        now = time.monotonic()
        self._began_at = now if self._began_at is None else self._began_at
        if not self.begun:
            return None
        self._offset_ms = (now - self._began_at) * 1000
        for one in self._responses:
            one.logprob_before = one.logprob
        return [None if one.ended else one.tokens for one in self._responses]

    def identify(self, info: dict[str, Any]) -> None:
        """Called with the Client.model_info() of a server before the request is sent there. Raises Unavailable if
        tokens from another server have arrived and this server may give other tokens."""
        promise = promise_of(info)
        if self.begun and (promise is None or promise != self.promise):
            raise Unavailable("the tokens of this server may differ from those that have arrived")
        self.fingerprint, self.promise = info.get("fingerprint"), promise

    def take(self, chunk: Any) -> Any | None:
        """Takes the next chunk. Its numbers then describe the response from its first submission. Returns the chunk for
        the reader, or None while a whole response is not complete."""
        one = self._responses[chunk.sequence_index]
        one.take(chunk, self._offset_ms)
        if not self.joins:
            return chunk
        if one.whole is None:
            one.whole = Chunk()
            one.whole.CopyFrom(chunk)
        else:
            join(one.whole, chunk)
        return one.whole if one.ended else None
