"""One ModelStreamInfer call, read by a task of its own.

gRPC's asyncio API cancels a call when the task that reads it is cancelled, and a cancelled ensemble is what Triton
handles worst: the step that runs does not hear of it, and some such requests count as in flight for ever, so that the
server can neither unload a model nor end in order. So when a reader disconnects, the call's own
task reads on, drops what comes, and ends when the engine has stopped the request and has sent the last response.

The call takes a stream of requests and is given one. That one goes out with the call's head and end in one operation,
as in a call that takes a single request, which on the wire is the same. Written by itself, to a connection that has
just broken, it would fail with a status of gRPC's own in place of the one that says what happened.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2 as pb  # type: ignore[import-untyped]

from charonia_client.errors import CharoniaError, ConnectionLost, ServerError, Unresponsive, from_rpc, from_triton

# Responses read ahead of a slow reader; more wait in gRPC's and Triton's buffers.
_READ_AHEAD = 64


def stream_infer(channel: grpc.aio.Channel) -> Any:
    """ModelStreamInfer with one request: called with it, gives the call, whose responses `async for` reads."""
    return channel.unary_stream(
        "/inference.GRPCInferenceService/ModelStreamInfer",
        request_serializer=pb.ModelInferRequest.SerializeToString,
        response_deserializer=pb.ModelStreamInferResponse.FromString,
    )


class Stream:
    """Raw responses of one call. One task may read."""

    def __init__(self, call: Any, target: str) -> None:
        self._call = call
        self._target = target
        self._responses: deque[Any] = deque()
        self._error: CharoniaError | None = None
        self._ended = False
        self.begun = False  # a response has come
        self.over = False  # the server has nothing more to do for this call
        self._abandoned = False
        self._news = asyncio.Event()  # for the reader
        self._room = asyncio.Event()  # for the task
        self._clock = asyncio.get_running_loop().time
        self.news_at = self._clock()  # when the last response came, by the loop's clock
        self.task = asyncio.get_running_loop().create_task(self._read())

    async def next(self) -> Any | None:
        """The next ModelInferResponse, None at the end. Raises the client's errors. Cancelling it loses nothing."""
        while not self._responses:
            if self._error:
                raise self._error
            if self._ended:
                return None
            self._news.clear()
            await self._news.wait()
        self._room.set()
        return self._responses.popleft()

    def abandon(self) -> None:
        """The reader is gone: responses that still come are dropped."""
        self._abandoned = True
        self._responses.clear()
        self._room.set()

    def fail(self, error: CharoniaError) -> None:
        """Gives the reader `error` after what has come before."""
        self._error = self._error or error
        self._news.set()

    def cancel(self) -> None:
        """Ends the call, whatever the server makes of it."""
        self._call.cancel()

    async def _read(self) -> None:
        try:
            async for answer in self._call:
                self.news_at = self._clock()
                if answer.error_message:
                    # The end of the call, to which this reads on, is near.
                    self.over = True
                    self.fail(from_triton(answer.error_message))
                elif not self._abandoned and not self._error:
                    self.begun = True
                    self._responses.append(answer.infer_response)
                    self._news.set()
                    while len(self._responses) >= _READ_AHEAD:
                        self._room.clear()
                        await self._room.wait()
            self.over = True
        except grpc.RpcError as error:
            failure = from_rpc(error, self._target)
            # Of a connection that broke nobody knows whether the server lives on, and works on.
            self.over = not isinstance(failure, (ConnectionLost, Unresponsive))
            self.fail(failure)
        except asyncio.CancelledError:
            # By a loop that ends, or because the call was cancelled here; whoever did the latter has set an error.
            self.fail(ServerError("the call was cancelled"))
            raise
        finally:
            self._ended = True
            self._news.set()
