"""The record of one request. The routes fill it; the access log and the request's span use it."""

from __future__ import annotations

import hashlib
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from charonia_gateway.request_log import RequestLog
from charonia_gateway.usage import Usage

if TYPE_CHECKING:
    from charonia_gateway.keys import Key

# Heartbeats of a silent stream: a comment in server-sent events, and white space before a JSON object.
EVENT_HEARTBEAT = b":\n\n"
LINE_HEARTBEAT = b" "
PING_HEARTBEAT = b'event: ping\ndata: {"type": "ping"}\n\n'  # Anthropic's
_HEARTBEATS = (EVENT_HEARTBEAT, LINE_HEARTBEAT, PING_HEARTBEAT)

REQUEST_ID_HEADER = "x-request-id"
NOT_ENFORCED_HEADER = "charonia-not-enforced"
# Ids that fit a log and the engine's request id, in which a '#' ends this part.
_SANE = re.compile(rb"[A-Za-z0-9._:/+=@~-]{1,128}")

current_record: ContextVar[Record | None] = ContextVar("current_record", default=None)
log = logging.getLogger("charonia_gateway.access")


INNER = "inner"  # the key in the scope's state of an Inner


@dataclass(frozen=True)
class Inner:
    """A request that the gateway sends to itself. No client can send one.

    key_id: of the key that asked for it; None without keys. address: of the client that asked for it. id: of the
    response; None: any. request_id: the client's x-request-id. holder: its sequence that the limiter already counts as
    running; None: it is not counted. max_priority: the highest priority that it may have; None: any."""

    key_id: str | None
    address: str
    id: str | None = None
    request_id: str | None = None
    holder: str | None = None
    max_priority: int | None = None


class Record:
    """`given`: the client's x-request-id, which is used if it is short and plain."""

    def __init__(self, given: bytes | None = None) -> None:
        self._began = time.perf_counter()
        self.given_id = given.decode() if given is not None and _SANE.fullmatch(given) else None
        self._name: str | None = None
        self.inner: Inner | None = None  # of a request that the gateway sends to itself
        self.replays = False  # a logged request runs again
        self.background: bytes | None = None  # the body of a request whose response is generated in the background
        self.in_background = False  # this generation has begun: its own record is the one in the access log
        # Returns the request's holder for the limiter, which the caller then releases; None: no key is needed.
        self.hand_over: Callable[[], str] | None = None
        self.operation: str | None = None  # OpenTelemetry's names: chat, text_completion
        self.model: str | None = None
        self.prompt: Any = None  # only if it is to be logged
        self.answers: dict[int, list[str]] | None = None  # response texts by index; only if to be logged
        self.usage: Usage | None = None  # set when the request is sent to the engine
        self.status = 0  # HTTP status; 0: no response has begun
        self.first_byte_s: float | None = None
        self.error: str | None = None  # the error's code
        self.names: Mapping[str, str] = {}  # the body's names for fields of the engine
        self.failed_status = 0  # status of an error after the response began; 0: no such error
        self.key: Key | None = None  # the key of the request; None: no key is needed
        # Counts the request's sequences as concurrent ones of its key; None: no key is needed.
        self.hold: Callable[[int], Awaitable[None]] | None = None
        self.address = ""  # of the client
        # Each returns when a server has ended its call for this request.
        self.calls: list[Callable[[], Awaitable[None]]] = []
        self.num_logprobs = 0  # log probabilities that the gateway has held for this response
        # The seeds of the engine's requests, by the index of the first response of each.
        self.seeds: dict[int, int | None] = {}
        self.num_resumes = 0  # how often another server continued a response
        self.estimated_tokens = 0  # of the prompts that the engine was sent
        self.system_fingerprint = ""  # of the server that responds, once it does
        self.body: bytes | None = None  # only if it is to be logged
        self.tokens: dict[int, list[int]] | None = None  # by index; only if they are logged or returned
        self.given_seeds: Mapping[int, int] = {}  # as `seeds`, for a replay
        self.prompt_time = datetime.now().isoformat(timespec="seconds")  # that chat templates show, on each server
        self.not_enforced = ""  # why the schemas of forced calls are not enforced
        self.trace_id: str | None = None  # 32 hexadecimal digits

    def name(self, prefix: str) -> str:
        """The id of the response. Some clients check its prefix, so each API has its own."""
        given = self.inner.id if self.inner else None
        self._name = given or f"{prefix}{uuid.uuid4().hex}"
        return self._name

    @property
    def request_id(self) -> str:
        """The client's id, else the id of the response, else a generated id."""
        return self.given_id or self._name or self.name("request-")

    @property
    def engine_id(self) -> str:
        """The prefix of the engine's request ids. It is unique even if two clients send the same id. The part before
        the '#' is the request id."""
        own = self._name or self.name("request-")
        return f"{self.given_id}#{own}" if self.given_id else own

    def result(self) -> dict[str, Any] | None:
        """The tokens of a complete response with their seeds. None if it is not complete, or if its tokens were
        not collected."""
        usage = self.usage
        if self.tokens is None or not usage or not usage.ended or self.failed_status:
            return None
        choices = [
            {"token_ids": self.tokens.get(index, []), "finish_reason": reason}
            for index, reason in enumerate(usage.finish_reasons)
        ]
        return {"system_fingerprint": self.system_fingerprint, "seeds": self.seeds, "choices": choices}

    @property
    def duration_s(self) -> float:
        """Seconds since the request arrived."""
        return time.perf_counter() - self._began


def record_of(scope: Scope) -> Record:
    record: Record = scope["state"]["record"]
    return record


def server_send(scope: Scope) -> Send:
    """The server's own `send`, for events after the first text: no middleware needs them."""
    send: Send = scope["state"]["send"]
    return send


def current_key() -> Key | None:
    """The key of the current request."""
    record = current_record.get()
    return record.key if record else None


def current_owner() -> str | None:
    """A name for the client of the current request: the id of its key, or without keys a hash of its address. Clients
    take turns by this name."""
    record = current_record.get()
    if record is None:
        return None
    return record.key.id if record.key else hashlib.sha256(record.address.encode()).hexdigest()[:16]


def begins_text(message: Message) -> bool:
    """Whether a message is a part of the response, and not a heartbeat."""
    return message["type"] == "http.response.body" and message.get("body") not in _HEARTBEATS


def final_status(scope: Scope) -> int:
    """499: the client disconnected before the response; 500: the application failed."""
    return record_of(scope).status or (499 if scope["state"].get("disconnected") else 500)


class RecordMiddleware:
    """Adds a record to each request and the request id to each response. With `access_log` it logs a line per
    request. `request_log` gets the requests whose responses are complete."""

    def __init__(self, app: ASGIApp, access_log: bool, request_log: RequestLog | None = None) -> None:
        self._app = app
        self._access_log = access_log
        self._request_log = request_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = Record(next((value for name, value in scope["headers"] if name == b"x-request-id"), None))
        record.address = scope["client"][0] if scope.get("client") else ""
        state = scope.setdefault("state", {})
        record.inner = state.get(INNER)
        state |= {"record": record, "send": send}

        async def recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers.setdefault(REQUEST_ID_HEADER, record.request_id)
                if record.not_enforced:
                    headers[NOT_ENFORCED_HEADER] = record.not_enforced
            elif record.first_byte_s is None and begins_text(message):
                record.first_byte_s = record.duration_s
            await send(message)

        # Not reset: the server runs each request in its own task, and the task's last log lines belong to the request.
        current_record.set(record)
        try:
            await self._app(scope, receive, recorded)
        finally:
            del state["send"]  # avoids a reference cycle of scope, record and the server's request
            if self._access_log and not record.in_background:
                _log(scope, record)
            if self._request_log and record.body is not None and record.status == 200 and (result := record.result()):
                self._request_log.write(
                    {
                        "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
                        "request_id": record.request_id,
                        "path": scope["path"],
                        "body": record.body.decode(),
                        "prompt_time": record.prompt_time,
                        **result,
                    }
                )


def _log(scope: Scope, record: Record) -> None:
    status = final_status(scope)
    fields: dict[str, Any] = {
        "method": scope["method"],
        "route": getattr(scope.get("route"), "path", None),
        "status": status,
        "duration_ms": round(record.duration_s * 1000, 3),
        "first_byte_ms": None if record.first_byte_s is None else round(record.first_byte_s * 1000, 3),
        "client": record.address or None,
        "key": record.key.name if record.key else None,
        "model": record.model,
        "error": record.error,
        "prompt": record.prompt,
        "resumes": record.num_resumes or None,
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
