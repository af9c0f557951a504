"""Errors in OpenAI's format, or in Anthropic's format on its routes. Only this module maps errors of the engine's
client to an HTTP status.

{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
{"type": "error", "error": {"type": ..., "message": ...}, "request_id": ...}
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from typing import Any

from charonia_client import BadRequest, CharoniaError, DeadlineExceeded, NotFound, Overloaded, Unavailable
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Scope

from charonia_gateway.endpoints.pool import NotLoaded, SessionLost
from charonia_gateway.record import record_of

log = logging.getLogger("charonia_gateway")


ANTHROPIC_PATH = "/v1/messages"
ANTHROPIC_ID_HEADER = "request-id"
# As OpenAI's clients expect them.
LIMIT_HEADERS = tuple(
    f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")
)
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """A response with a status other than 200."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def anthropic_body(self, request_id: str) -> dict[str, Any]:
        # Anthropic's clients recognise a prompt that is too long by these words.
        text = f"prompt is too long: {self.message}" if self.code == "context_length_exceeded" else self.message
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": text}, "request_id": request_id}

    def response(self, scope: Scope) -> JSONResponse:
        """The error in the format of the request's path."""
        if scope["path"].startswith(ANTHROPIC_PATH):
            request_id = record_of(scope).request_id
            headers = {ANTHROPIC_ID_HEADER: request_id, **self.headers}
            return JSONResponse(self.anthropic_body(request_id), self.status, headers)
        return JSONResponse(self.body(), self.status, self.headers)


def unavailable(message: str, retry_after_s: int = 5, code: str = "service_unavailable") -> ApiError:
    return ApiError(
        503,
        message,
        type="service_unavailable_error",
        code=code,
        headers={"Retry-After": str(retry_after_s)},
    )


def too_many(message: str, retry_after_s: int | None = None, code: str = "rate_limit_exceeded") -> ApiError:
    headers = None if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return ApiError(429, message, type="rate_limit_error", code=code, headers=headers)


# The engine's errors begin with the field's name. These fields have another name in requests.
_PARAMS = {
    "text_input": "prompt",
    "prompt_token_ids": "prompt",
    "input_ids": "prompt",
    "stop_words": "stop",
    "return_log_probs": "logprobs",
    "prompt_logprobs": "logprobs",
    "timeout_ms": "timeout",
    "lora_name": "model",
}
_FIELD = re.compile(r"^([a-z_][a-z_0-9]*)((?:\[\d+\]|\.[a-z_0-9]+)*)(?=:| =| is\b| holds\b)")
_NO_FIT = re.compile(r"\bdo(?:es)? not fit\b")


# Errors about servers, and the part of their text for clients, without addresses and gRPC's details.
_PLACES = (
    (re.compile(r"^(no server can take requests): .*", re.DOTALL), r"\1"),
    (re.compile(r"^endpoint \S+ is down: .*", re.DOTALL), "the server went down"),
    (re.compile(r"^.*\bTriton at \S+ ([^:]*).*", re.DOTALL), r"the server \1"),
    (re.compile(r"^\S+ (is not a Triton server): .*", re.DOTALL), r"the server \1"),
)


def _without_addresses(text: str) -> str:
    for pattern, public in _PLACES:
        if pattern.match(text):
            log.warning("a request failed: %s", text)
            return pattern.sub(public, text)
    return text


def from_engine(error: CharoniaError, names: Mapping[str, str] | None = None) -> ApiError:
    """Map an error of the engine's client to an ApiError. Details about servers are logged. names: the request's names
    for fields of the engine."""
    names = {**_PARAMS, **(names or {})}
    text = str(error) if isinstance(error, BadRequest) else _without_addresses(str(error))
    match error:
        case NotFound():
            return ApiError(404, text, param=names["lora_name"], code="model_not_found")
        case BadRequest():
            # An error may contain a long value of the request. One expression for both parts would take quadratic time.
            if (found := _NO_FIT.search(text)) and "session_len" in text[found.end() :]:
                text = re.sub(r"\bmax_tokens\b", names.get("max_tokens", "max_tokens"), text)
                return ApiError(400, text, code="context_length_exceeded")
            if found := _FIELD.match(text):
                name = names.get(found.group(1), found.group(1))
                text = name + text[found.end(1) :]
                return ApiError(400, text, param=name + found.group(2), code="invalid_value")
            return ApiError(400, text, code="invalid_value")
        case Overloaded():
            return too_many(text, max(1, math.ceil(error.retry_after)), "overloaded")
        case DeadlineExceeded():
            return ApiError(504, text, type="timeout_error", code="deadline_exceeded")
        case NotLoaded():
            return unavailable(str(error), code="model_not_loaded")
        case Unavailable():
            return unavailable(text)
        case SessionLost():
            return ApiError(410, text, param="session_id", code="session_lost")
    return ApiError(500, text, type="server_error", code="engine_error")


def _answer(request: Request, error: ApiError) -> JSONResponse:
    record_of(request.scope).error = error.code or error.type
    return error.response(request.scope)


async def handle_api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return _answer(request, error)


async def handle_parameter_error(request: Request, error: Exception) -> JSONResponse:
    """Handle a wrong parameter of an address."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    return _answer(request, ApiError(400, f"{name}: {first['msg']}", param=name, code="invalid_value"))


async def handle_engine_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, CharoniaError)
    return _answer(request, from_engine(error, record_of(request.scope).names))


async def handle_http_error(request: Request, error: Exception) -> JSONResponse:
    """Handle unknown paths and methods."""
    assert isinstance(error, HTTPException)
    text = {404: f"unknown path {request.url.path!r}", 405: f"{request.url.path!r} does not support {request.method}"}
    message = text.get(error.status_code, str(error.detail))
    return _answer(request, ApiError(error.status_code, f"{message}; see /docs", headers=error.headers))
