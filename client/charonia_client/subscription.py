"""One stream for the responses of many requests (docs/contracts.md, "Subscriptions").

A client has one call of the engine open. Its responses are deliveries: one for each step of the engine, with the chunks
of all requests of the client. A request is a call that ends as soon as the engine has it. Its chunks wait in its
Stream. There the chunks of a slow reader are joined, so no reader delays the others.
"""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import grpc  # type: ignore[import-untyped]

from charonia_client.delivery import Chunk, Delivery
from charonia_client.errors import CharoniaError, ServerError, Unavailable, from_rpc, from_triton
from charonia_client.tensors import encode_subscription, with_arithmetic

# The client acknowledges deliveries when so many, or so many bytes, are unacknowledged. The server sends four times as
# many without an acknowledgement.
_ACKNOWLEDGED_DELIVERIES = 64
_ACKNOWLEDGED_BYTES = 1 << 20
_CALL_TIMEOUT_S = 5.0
_RETRY_S = 1.0

_ERROR = Chunk.DESCRIPTOR.fields_by_name["finish_reason"].enum_type.values_by_name["ERROR"].number


class Receiver(Protocol):
    """Takes the chunks of one request: a stream.Stream."""

    news_at: float

    def push(self, chunk: Any) -> None: ...

    def lose(self, error: CharoniaError) -> None: ...


class Subscription:
    """A call of `engine` that stays open until it is ended or lost. `call` makes ModelStreamInfer with one request;
    `describe` requests a description of the model, such as its answer_formats."""

    def __init__(
        self,
        call: Callable[..., Any],
        engine: str,
        target: str,
        describe: Callable[[str], Awaitable[dict[str, Any]]],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.name = str(uuid.uuid4())
        self.call = call
        self.target = target
        self.over = False
        self.known = True  # False: the server has rejected a request because it does not know the subscription
        self._clock = loop.time
        self.news_at = self._clock()  # when the last delivery arrived
        self._engine = engine
        self._error: CharoniaError | None = None
        self._streams: dict[int, Receiver] = {}  # by key
        self._last_key = 0
        self._opened: asyncio.Future[None] = loop.create_future()
        self._number = 0  # of the last delivery
        self._unacknowledged = (0, 0)  # deliveries and bytes
        self._acknowledger: asyncio.Task[None] | None = None
        self._senders: set[asyncio.Task[None]] = set()
        self.arithmetic = b""  # of the first delivery, as the next one
        self.deterministic = False
        self._describe = describe
        self._descriptions: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._call = call(encode_subscription(self.name, engine))
        self.task = loop.create_task(self._read())

    def add(self, stream: Receiver) -> int:
        """Returns the key of the stream."""
        self._last_key += 1
        self._streams[self._last_key] = stream
        return self._last_key

    def remove(self, key: int) -> None:
        self._streams.pop(key, None)

    def keep(self, sender: asyncio.Task[None]) -> None:
        """Keeps the task of a call of the ensemble, which must not be cancelled."""
        self._senders.add(sender)
        sender.add_done_callback(self._senders.discard)

    async def opened(self) -> None:
        """Returns when requests may name the subscription. Raises the client's errors if it cannot be opened or has
        ended."""
        if self._error is None and not self._opened.done():
            await asyncio.wait((self._opened,))
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error:
            raise _copied(self._error)

    async def described(self, what: str) -> dict[str, Any]:
        """A description of the model, requested once: a subscription ends when its model is unloaded. Raises the
        client's errors."""
        if what not in self._descriptions:
            self._descriptions[what] = asyncio.ensure_future(self._describe(what))
        found = self._descriptions[what]
        if not found.done():
            await asyncio.wait((found,))
        if found.cancelled():
            self._raise_error()
            raise Unavailable("the client was closed")
        if error := found.exception():
            if self._descriptions.get(what) is found:
                del self._descriptions[what]  # the next request asks again
            raise _copied(error) if isinstance(error, CharoniaError) else ServerError(f"no {what}: {error!r}")
        return found.result()

    async def model_info(self) -> dict[str, Any]:
        """Returns Client.model_info() of the model that computes this subscription's requests."""
        return with_arithmetic(await self.described("model_info"), self.arithmetic, self.deterministic)

    async def end(self, timeout_s: float) -> None:
        """Requests that the server ends the subscription with all its requests. Returns when it has ended, or after
        this time."""
        deadline = self._clock() + timeout_s
        if not self._opened.done():  # the server ignores an end that overtakes the opening
            await asyncio.wait((self._opened,), timeout=timeout_s)
        if not self.over:
            message = encode_subscription(self.name, self._engine, end=True)
            await self._send(message, max(0.0, deadline - self._clock()))
            await asyncio.wait((self.task, *self._senders), timeout=max(0.0, deadline - self._clock()))
        self.cancel(Unavailable("the client was closed"))
        await asyncio.wait((self.task,))

    def cancel(self, error: CharoniaError) -> None:
        """Ends the call, whatever the server does. Its streams end with the error."""
        self._lose(error)
        self._call.cancel()
        for task in (self._acknowledger, *self._descriptions.values()):
            if task:
                task.cancel()

    def _lose(self, error: CharoniaError) -> None:
        self.over = True
        self._error = self._error or error
        if not self._opened.done():
            self._opened.set_result(None)
        for stream in list(self._streams.values()):
            stream.lose(_copied(self._error))

    async def _read(self) -> None:
        lost: CharoniaError = Unavailable(f"Triton at {self.target} ended the subscription")
        try:
            async for answer in self._call:
                if answer.error_message:
                    lost = from_triton(answer.error_message)
                    self._lose(lost)
                else:
                    self._take(answer.infer_response.raw_output_contents[0])
        except grpc.RpcError as error:
            lost = from_rpc(error, self.target)
        except asyncio.CancelledError:
            # The event loop ends, or cancel() was called, which has set the error.
            lost = ServerError("the call was cancelled")
            raise
        except Exception as error:
            lost = ServerError(f"Triton at {self.target} sent an invalid delivery: {error}")
            self._call.cancel()
        finally:
            self._lose(lost)

    def _take(self, raw: bytes) -> None:
        """Takes a delivery, a BYTES element: its length in 4 bytes, then the message."""
        delivery = Delivery.FromString(raw[4:])
        self._number = delivery.number
        self.news_at = now = self._clock()
        if not self._opened.done():
            self.arithmetic, self.deterministic = delivery.arithmetic, delivery.deterministic
            self._opened.set_result(None)
        for chunk in delivery.chunks:
            stream = self._streams.get(chunk.subscription_key)
            if stream is None:  # it has ended here
                continue
            stream.news_at = now
            if chunk.finish_reason == _ERROR:
                stream.lose(from_triton(b"".join(chunk.text_output).decode(errors="replace")))
            else:
                stream.push(chunk)
        deliveries, size = self._unacknowledged
        self._unacknowledged = (deliveries + 1, size + len(raw))
        if self._acknowledger is None and self._must_acknowledge():
            self._acknowledger = asyncio.get_running_loop().create_task(self._acknowledge())

    def _must_acknowledge(self) -> bool:
        deliveries, size = self._unacknowledged
        return deliveries >= _ACKNOWLEDGED_DELIVERIES or size >= _ACKNOWLEDGED_BYTES

    async def _acknowledge(self) -> None:
        """Acknowledges deliveries, and retries until the server has received that."""
        try:
            while not self.over and self._must_acknowledge():
                number, (deliveries, size) = self._number, self._unacknowledged
                if await self._send(encode_subscription(self.name, self._engine, read=number), _CALL_TIMEOUT_S):
                    self._unacknowledged = (self._unacknowledged[0] - deliveries, self._unacknowledged[1] - size)
                else:
                    await asyncio.sleep(_RETRY_S)
        finally:
            self._acknowledger = None

    async def _send(self, message: Any, timeout_s: float) -> bool:
        """Returns whether the server took the message."""
        try:
            async for answer in self.call(message, timeout=timeout_s):
                if answer.error_message:
                    return False
        except Exception:  # gRPC's, or an invalid response
            return False
        return True


def _copied(error: CharoniaError) -> CharoniaError:
    """Returns a copy of an exception for each reader: raising it changes its traceback, and a caller may change its
    text."""
    return copy.copy(error)
