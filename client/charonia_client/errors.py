"""The client's errors, and their creation from errors of Triton and gRPC.

docs/contracts.md defines the prefixes of error texts. `[400] `: the caller's error. `[404] `: an unknown LoRA adapter.
`[429] ` with `retry after N s`: overload. `[503] `: shutdown or unload. `[504] `: the request's own time limit. Other
errors are the server's own.
"""

from __future__ import annotations

import re

import grpc  # type: ignore[import-untyped]


class CharoniaError(Exception):
    """Base of all errors of this package. `str()` is a text for human readers."""


class BadRequest(CharoniaError):
    """The request is wrong: the message names the field, its value and the remedy."""


class NotFound(BadRequest):
    """The request names something that the server does not have, such as a LoRA adapter."""


class Overloaded(CharoniaError):
    """The server is overloaded. Retry after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(CharoniaError):
    """The server cannot be reached, is shutting down, or broke off during a response."""


class NotReady(Unavailable):
    """The server answers but accepts no new request: it drains, or a model has failed. Running requests continue."""


class Unresponsive(Unavailable):
    """The server did not respond in time: it hangs, is not reachable, or is very busy."""


class ConnectionLost(Unavailable):
    """The connection broke during the request, for example because the server's process died."""


class Moved(Unavailable):
    """Client.move() was called: the caller continues the request at another server."""


class DeadlineExceeded(CharoniaError):
    """The request did not end within its own limit (`timeout_ms`) or its caller's (`timeout_s`)."""


class TooManyRounds(CharoniaError):
    """The model has called functions in each of the `max_rounds` responses that `converse` allows."""


class ServerError(CharoniaError):
    """The server failed through no fault of the caller."""


# Triton's prefix of a model's error: the ensemble and the request.
_PREFIX = re.compile(r"^(?:in ensemble '[^']*', |\[request id: [^\]]*\] )*")
_CODE = re.compile(r"\[(\d{3})\] ")
_RETRY = re.compile(r"retry after (\d+(?:\.\d+)?) s")
# Errors of Triton's core: when it or a model ends, for an unknown model, and for a full queue.
_ENDING = re.compile(r"no available versions|unloading|server is stopping|Server is exiting", re.IGNORECASE)
_AWAY = re.compile(
    r"unknown model|is not ready|not found"
    r"|Stub process .* is not healthy|stub process has exited|Failed to increase the shared memory pool",
    re.IGNORECASE,
)
# gRPC's errors for a connection that was open and broke.
_BROKEN = re.compile(r"Socket closed|Connection reset|Broken pipe|recvmsg", re.IGNORECASE)
_FULL = re.compile(r"exceeds maximum queue size|request timeout expired", re.IGNORECASE)


def from_triton(message: str) -> CharoniaError:
    """The error for the text of a Triton error."""
    text = message[_PREFIX.match(message).end() :]  # type: ignore[union-attr]  # the pattern matches everything
    code = _CODE.match(text)
    body = text[code.end() :] if code else text
    retry = _RETRY.search(body)
    match code.group(1) if code else "":
        case "400":
            return BadRequest(body)
        case "404":
            return NotFound(body)
        case "429":
            return Overloaded(body, float(retry.group(1)) if retry else 1.0)
        case "503":
            return Unavailable(body)
        case "504":
            return DeadlineExceeded(body)
    if _FULL.search(text):
        return Overloaded(text)
    if _ENDING.search(text):
        return Unavailable("the server is shutting down")
    if _AWAY.search(text):
        return Unavailable(text)
    return ServerError(text)


def from_rpc(error: grpc.RpcError, target: str) -> CharoniaError:
    """The error for a call that gRPC ended; `target` is the server's address, for the text."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Unresponsive(f"Triton at {target} did not answer in time")
    if code is grpc.StatusCode.UNAVAILABLE:
        # Triton returns this status and its own text while it shuts down.
        kind = ConnectionLost if _BROKEN.search(details) else Unavailable
        return kind(f"Triton at {target} cannot be reached or went away: {details}")
    if code is grpc.StatusCode.CANCELLED:
        return Unavailable(f"Triton at {target} cancelled the call: {details or 'no reason given'}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return ServerError(f"{target} is not a Triton server: {details}")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return BadRequest(f"the request is larger than the server's limit: {details}")
    return from_triton(details or f"gRPC status {code.name} without a text")
