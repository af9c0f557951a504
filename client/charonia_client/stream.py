"""One ModelStreamInfer call, read by a task of its own.

gRPC's asyncio API cancels a call when the task that reads it is cancelled, and a cancelled ensemble is what Triton
handles worst: the step that runs does not hear of it, and some such requests count as in flight for ever, so that the
server can neither unload a model nor end in order. So a reader that leaves does not touch the call: the call's own task
reads on, drops what comes, and ends when the engine, told to stop, has sent the last response.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import grpc  # type: ignore[import-untyped]

from charonia_client.errors import CharoniaError, ServerError, from_rpc, from_triton

# Responses read ahead of a slow reader; more wait in gRPC's and Triton's buffers.
_READ_AHEAD = 64


class Stream:
    """Raw responses of one call. One task may read."""

    def __init__(self, call: Any, message: Any, target: str) -> None:
        self._call = call
        self._target = target
        self._responses: deque[Any] = deque()
        self._error: CharoniaError | None = None
        self._ended = False
        self.over = False  # the server has nothing more to do for this call, or is gone
        self._left = False
        self._news = asyncio.Event()  # for the reader
        self._room = asyncio.Event()  # for the task
        self.task = asyncio.get_running_loop().create_task(self._read(message))

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

    def leave(self) -> None:
        """Nobody reads any more: what still comes is dropped."""
        self._left = True
        self._responses.clear()
        self._room.set()

    def fail(self, error: CharoniaError) -> None:
        """Gives the reader `error` after what has come before."""
        self._error = self._error or error
        self._news.set()

    def cancel(self) -> None:
        """Ends the call, whatever the server makes of it."""
        self._call.cancel()

    async def _read(self, message: Any) -> None:
        try:
            await self._call.write(message)
            await self._call.done_writing()
            while (answer := await self._call.read()) is not grpc.aio.EOF:
                if answer.error_message:
                    # The end of the call, to which this reads on, is near.
                    self.over = True
                    self.fail(from_triton(answer.error_message))
                elif not self._left and not self._error:
                    self._responses.append(answer.infer_response)
                    self._news.set()
                    while len(self._responses) >= _READ_AHEAD:
                        self._room.clear()
                        await self._room.wait()
            self.over = True
            if (code := await self._call.code()) is not grpc.StatusCode.OK:
                self._fail_by_status(code, await self._call.details())
        except grpc.RpcError as error:
            self.over = True
            self.fail(from_rpc(error, self._target))
        except asyncio.InvalidStateError:  # writing to a call that has ended already
            self.over = True
            self._fail_by_status(await self._call.code(), await self._call.details())
        except asyncio.CancelledError:
            # By a loop that ends, or because the call was cancelled here; whoever did the latter has set an error.
            self.fail(ServerError("the call was cancelled"))
            raise
        finally:
            self._ended = True
            self._news.set()

    def _fail_by_status(self, code: Any, details: str) -> None:
        self.fail(from_rpc(grpc.aio.AioRpcError(code, None, None, details=details), self._target))
