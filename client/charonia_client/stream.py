"""The parts of one request's responses, as they arrive on a subscription."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import grpc  # type: ignore[import-untyped]

from charonia_client.delivery import Chunk
from charonia_client.errors import (
    CharoniaError,
    ConnectionLost,
    ServerError,
    Unavailable,
    Unresponsive,
    from_rpc,
    from_triton,
)
from charonia_client.offload import offload
from charonia_client.progress import Progress, join
from charonia_client.subscription import Subscription
from charonia_client.tensors import decode, decode_with_logprobs, num_logprobs, set_subscription
from charonia_client.turns import Turns
from charonia_client.types import GenerateRequest, GenerateResponse

# Chunks that wait for a slow reader. Later chunks are joined with the last waiting chunk of their response.
_READ_AHEAD = 64
# Log probabilities in a chunk that was joined: decoded, they take 150 bytes each.
_MAX_JOINED_LOGPROBS = 4096
_PARSE_ITEMS = 16  # offload() counts microseconds; the parser takes 6 to 27 for a token

_NO_SUBSCRIPTION = "there is no subscription"  # the engine's error for an unknown name begins with this
_RELOADED = "was loaded again"  # the error of a subscription whose model was reloaded ends with this


class Stream:
    """The chunks of one request, until each of its responses has ended. One task may read.

    `progress` has the tokens from other servers. `choose` returns the subscription to use. If the server does not
    know it, because the model was reloaded, the request is sent again once, with the subscription that `choose` then
    returns.
    """

    def __init__(
        self,
        choose: Callable[[], Subscription],
        request: GenerateRequest,
        message: Any,
        progress: Progress,
        turns: Turns,
        metadata: Sequence[tuple[str, str]] | None = None,
    ) -> None:
        loop = self._loop = asyncio.get_running_loop()
        self._choose = choose
        self._request = request
        self._message = message
        self._metadata = metadata
        self._turns = turns
        self._subscription = choose()
        self._progress = progress
        self._running = progress.num_running  # responses that have not ended
        self._chunks: deque[Any] = deque()
        self._parser = progress.parser
        self._has_logprobs = request.logprobs is not None or request.prompt_logprobs is not None
        self._error: CharoniaError | None = None
        self._abandoned = False
        self._sent = False
        self._calling = False  # the call that submits the request has not ended
        self._lost: CharoniaError | None = None  # the error of the subscription, if the call says that it was known
        self._waiter: asyncio.Future[None] | None = None  # of the reader
        self.begun = False  # a chunk has arrived
        self.over = False  # the server has nothing left to do for this request
        self.news_at = loop.time()  # when the last chunk arrived
        self.task: asyncio.Future[None] = loop.create_future()  # done when no more chunks are taken
        self._key = self._subscription.add(self)
        self._sender = loop.create_task(self._send())
        self._subscription.keep(self._sender)

    async def next(self) -> GenerateResponse | None:
        """Returns the next part, or None at the end. Raises the client's errors. Cancelling it loses no part."""
        while not self._chunks:
            if self._error:
                raise self._error
            if self.task.done():
                return None
            self._waiter = self._loop.create_future()
            await self._waiter
        chunk = self._chunks.popleft()
        if self._has_logprobs:
            part = await offload(num_logprobs(chunk), decode_with_logprobs, chunk)
        else:
            part = decode(chunk)
        if self._parser:
            num_items = self._message.ByteSize() if self._parser.is_new(part) else 0
            num_items += _PARSE_ITEMS * len(part.token_ids)
            await offload(num_items, self._parser.parse, part, in_reasoning=chunk.in_reasoning)
        return part

    @property
    def place(self) -> tuple[str, int]:
        """The subscription of the request, and its key there."""
        return self._subscription.name, self._key

    def abandon(self) -> None:
        """The reader has left: later chunks are dropped. A request that was not sent yet is over."""
        self._abandoned = True
        self._chunks.clear()
        if not self._sent:
            self.over = True
            self._sender.cancel()
            self.end()

    def fail(self, error: CharoniaError) -> None:
        """Raises `error` in the reader, after the chunks that have arrived. Does nothing if all responses have
        ended."""
        if self._running:
            self._error = self._error or error
            self._wake()

    def cancel(self) -> None:
        """Takes no more chunks, whatever the server does with the request."""
        if not self.over:  # otherwise the call ends by itself
            self._sender.cancel()
        self.end()

    def push(self, chunk: Any) -> None:
        """Takes a chunk from the subscription."""
        self.begun = True
        if chunk.finish_reason:
            self._running -= 1
        # After an error, another server may continue after the last chunk.
        if not self._abandoned and not self._error and (chunk := self._progress.take(chunk)) is not None:
            if len(self._chunks) < _READ_AHEAD or not self._join(chunk):
                # A copy, because a chunk of a delivery keeps the whole delivery in memory.
                copied = Chunk()
                copied.CopyFrom(chunk)
                self._chunks.append(copied)
            self._wake()
        if not self._running:
            self.over = True
            self.end()

    def _join(self, chunk: Any) -> bool:
        """Joins a chunk with the last waiting chunk of its response, if that has few log probabilities."""
        for last in reversed(self._chunks):
            if last.sequence_index == chunk.sequence_index:
                if num_logprobs(last) >= _MAX_JOINED_LOGPROBS:
                    return False
                join(last, chunk)
                return True
        return False

    def lose(self, error: CharoniaError) -> None:
        """The subscription or the request has ended with `error`. Does nothing if the stream has ended."""
        if self.task.done():
            return
        if self._calling and not self.begun and isinstance(error, Unavailable) and _RELOADED in str(error):
            self._lost = error  # the request may reach the model that replaces the other one
            return
        # After a broken connection the server may still work on the request.
        self.over = not isinstance(error, (ConnectionLost, Unresponsive))
        self.fail(error)
        self.end()

    def end(self) -> None:
        """Takes no more chunks."""
        self._subscription.remove(self._key)
        if not self.task.done():
            self.task.set_result(None)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
            self._waiter = None

    async def _send(self) -> None:
        """Submits the request when the subscription is open. An error of the call ends the request."""
        try:
            unknown = await self._call()
            if unknown and not (self._abandoned or self._error or self.task.done()):
                self._lost = None
                self._subscription.remove(self._key)
                self._subscription = self._choose()
                self._key = self._subscription.add(self)
                self._subscription.keep(self._sender)
                unknown = await self._call()
            if lost := unknown or self._lost:
                self.lose(lost)
        except grpc.RpcError as failure:
            self.lose(from_rpc(failure, self._subscription.target))
        except CharoniaError as failure:
            self.lose(failure)
        except asyncio.CancelledError:
            # The event loop ends, or cancel() was called.
            self._break_off(ServerError("the call was cancelled"))
            raise
        except Exception as failure:  # an invalid response, or the channel is closed
            self._break_off(ServerError(f"the call to Triton at {self._subscription.target} failed: {failure!r}"))

    async def _call(self) -> Unavailable | None:
        """Makes the call that submits the request. Returns the error of a server that does not know the subscription,
        and so has not taken the request."""
        subscription = self._subscription
        await subscription.opened()
        info: dict[str, Any] = {}
        with contextlib.suppress(CharoniaError):
            info = await subscription.model_info()
        self._progress.identify(info)
        if self._parser:
            self._parser.formats = await subscription.described("answer_formats")
        async with self._turns.turn(self._request.owner or ""):
            if self._abandoned or self._error:
                self.over = True
                self.end()
                return None
            return await self._submit()

    async def _submit(self) -> Unavailable | None:
        subscription, unknown = self._subscription, None
        set_subscription(self._message, subscription.name, self._key)
        self._sent = self._calling = True
        try:
            async for answer in subscription.call(self._message, metadata=self._metadata):
                if answer.error_message:
                    error = from_triton(answer.error_message)
                    if isinstance(error, Unavailable) and _NO_SUBSCRIPTION in str(error):
                        subscription.known = False
                        unknown = error
                    else:
                        self.lose(error)
        finally:
            self._calling = False
        return unknown

    def _break_off(self, error: CharoniaError) -> None:
        """Ends the stream with the error, unless it has ended. The server may have the request."""
        if not self.task.done():
            self.fail(error)
            self.end()
