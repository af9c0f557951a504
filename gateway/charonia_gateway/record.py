"""What becomes of one request. The routes write it down; the request's line in the log and its span are made of it."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from charonia_gateway.usage import Usage

if TYPE_CHECKING:
    from charonia_gateway.keys import Key

# What a stream sends while it has nothing to say: a comment of server-sent events, and white space before an object.
EVENT_HEARTBEAT = b":\n\n"
LINE_HEARTBEAT = b" "
PING_HEARTBEAT = b'event: ping\ndata: {"type": "ping"}\n\n'  # Anthropic's
_HEARTBEATS = (EVENT_HEARTBEAT, LINE_HEARTBEAT, PING_HEARTBEAT)

REQUEST_ID_HEADER = "x-request-id"
# Fit for a log and for the engine's request id. That ends, for this purpose, at a '#'.
_SANE = re.compile(rb"[A-Za-z0-9._:/+=@~-]{1,128}")

current_record: ContextVar[Record | None] = ContextVar("current_record", default=None)
log = logging.getLogger("charonia_gateway.access")


class Record:
    """`given`: the client's own x-request-id, which is taken where it is short and plain."""

    __slots__ = (
        "_began",
        "_given",
        "_name",
        "answers",
        "error",
        "estimated_tokens",
        "failed_status",
        "first_byte_s",
        "key",
        "model",
        "names",
        "operation",
        "prompt",
        "status",
        "system_fingerprint",
        "trace_id",
        "usage",
    )

    def __init__(self, given: bytes | None = None) -> None:
        self._began = time.perf_counter()
        self._given = given.decode() if given is not None and _SANE.fullmatch(given) else None
        self._name: str | None = None
        self.operation: str | None = None  # as OpenTelemetry names them: chat, text_completion
        self.model: str | None = None
        self.prompt: Any = None  # only if it is to be logged
        self.answers: dict[int, list[str]] | None = None  # response texts by index; only if to be logged
        self.usage: Usage | None = None  # once the engine is asked
        self.status = 0  # of HTTP; 0: no answer has begun
        self.first_byte_s: float | None = None
        self.error: str | None = None  # its code
        self.names: Mapping[str, str] = {}  # what the body calls fields of the engine's
        self.failed_status = 0  # of an error that came after the status had been sent; 0: none did
        self.key: Key | None = None  # whose request it is; None: no key is asked for
        self.estimated_tokens = 0  # of the prompts that the engine was sent
        self.system_fingerprint = ""  # set when the body is read
        self.trace_id: str | None = None  # 32 hexadecimal digits

    def name(self, prefix: str) -> str:
        """The id of the request's answer. Its prefix is as the API's own clients know it: some look at it."""
        self._name = f"{prefix}{uuid.uuid4().hex}"
        return self._name

    @property
    def request_id(self) -> str:
        """The client's; else the answer's; else, where there is none, one that is made up."""
        return self._given or self._name or self.name("request-")

    @property
    def engine_id(self) -> str:
        """Begins the ids of the engine's requests. Those of two requests differ whatever their clients call them, and
        up to a '#' they are the request id."""
        own = self._name or self.name("request-")
        return f"{self._given}#{own}" if self._given else own

    @property
    def duration_s(self) -> float:
        """So far."""
        return time.perf_counter() - self._began


def record_of(scope: Scope) -> Record:
    record: Record = scope["state"]["record"]
    return record


def server_send(scope: Scope) -> Send:
    """Sends past all layers to the server: what follows an answer's first text, at which none of them looks."""
    send: Send = scope["state"]["send"]
    return send


def current_key() -> Key | None:
    """Of the request in work."""
    record = current_record.get()
    return record.key if record else None


def begins_text(message: Message) -> bool:
    """Whether it is a piece of an answer, and no heartbeat before it."""
    return message["type"] == "http.response.body" and message.get("body") not in _HEARTBEATS


def final_status(scope: Scope) -> int:
    """499: the client left before the answer; 500: the application failed."""
    return record_of(scope).status or (499 if scope["state"].get("disconnected") else 500)


class RecordMiddleware:
    """Gives each request its record and each answer its request id. With `access_log` each has a line in the log."""

    def __init__(self, app: ASGIApp, access_log: bool) -> None:
        self._app = app
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = Record(next((value for name, value in scope["headers"] if name == b"x-request-id"), None))
        state = scope.setdefault("state", {})
        state |= {"record": record, "send": send}

        async def recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message).setdefault(REQUEST_ID_HEADER, record.request_id)
            elif record.first_byte_s is None and begins_text(message):
                record.first_byte_s = record.duration_s
            await send(message)

        # Not taken back: the server runs each request in a task of its own, and its last words are of this one.
        current_record.set(record)
        try:
            await self._app(scope, receive, recorded)
        finally:
            del state["send"]  # which holds the server's request, and that the scope
            if self._access_log:
                _log(scope, record)


def _log(scope: Scope, record: Record) -> None:
    status = final_status(scope)
    fields: dict[str, Any] = {
        "method": scope["method"],
        "route": getattr(scope.get("route"), "path", None),
        "status": status,
        "duration_ms": round(record.duration_s * 1000, 3),
        "first_byte_ms": None if record.first_byte_s is None else round(record.first_byte_s * 1000, 3),
        "client": scope["client"][0] if scope.get("client") else None,
        "key": record.key.name if record.key else None,
        "model": record.model,
        "error": record.error,
        "prompt": record.prompt,
        "answers": ["".join(texts) for _, texts in sorted(record.answers.items())] if record.answers else None,
    }
    text = f"{scope['method']} {fields['route'] or 'other'} {status} in {fields['duration_ms']:.0f} ms"
    if record.key:
        text += f", key {record.key.name}"
    if record.usage and (timings := record.usage.timings()):
        usage = record.usage.to_json()
        fields |= {
            "prompt_tokens": usage["prompt_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "completion_tokens": usage["completion_tokens"],
            "finish_reasons": record.usage.finish_reasons,
            **{name: timings[name] for name in ("queue_ms", "first_token_ms", "total_ms")},
        }
        text += (
            f", {usage['prompt_tokens']} + {usage['completion_tokens']} tokens"
            f", {', '.join(fields['finish_reasons']) or 'not ended'}"
        )
    log.info(text, extra={name: value for name, value in fields.items() if value is not None})
