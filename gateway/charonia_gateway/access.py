"""API keys of requests, if the settings name a file of keys."""

from __future__ import annotations

import asyncio
import uuid
from datetime import datetime, timezone

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from charonia_gateway.errors import ApiError
from charonia_gateway.keys import Access, Key, KeyRing
from charonia_gateway.limiter import Limiter, LimitExceeded
from charonia_gateway.metrics import Metrics
from charonia_gateway.record import Inner, Record, record_of

# Paths that need no key for GET and HEAD: probes, and the pages in which a browser asks for a key. An entry that ends
# with "/" includes all paths below it.
OPEN_PATHS = ("/health/live", "/health/ready", "/health", "/ping", "/", "/docs", "/page/")
_CANCEL = "/cancel"
_ACCESS: dict[str, Access] = {
    "/metrics": "metrics",
    "/models/load": "admin",
    "/models/unload": "admin",
    "/v1/load_lora_adapter": "admin",
    "/v1/unload_lora_adapter": "admin",
}


def _access_to(path: str) -> Access:
    """The access that a path needs. The patterns of routes also match before a line end."""
    return _ACCESS.get(path.removesuffix("\n"), "inference")


def is_open(method: str, path: str) -> bool:
    if method not in ("GET", "HEAD"):
        return False
    return path in OPEN_PATHS or any(one != "/" and one.endswith("/") and path.startswith(one) for one in OPEN_PATHS)


def presented(headers: Headers) -> str | None:
    """The key of a request: OpenAI's clients send it as a bearer token, Anthropic's as x-api-key. White space around a
    value is not part of it (RFC 9110, 5.5), and the parser keeps trailing white space. The bearer token has precedence,
    and the first of several Authorization headers."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip()
    return headers.get("x-api-key", "").strip() or None


def _denied(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


class KeyMiddleware:
    """Rejects a request with 401 if it has no valid key, with 403 if its key has no access, and with 429 if a limit of
    the key is exceeded. Limits apply to POST requests, except those that cancel something."""

    def __init__(self, app: ASGIApp, keys: KeyRing, limiter: Limiter, metrics: Metrics) -> None:
        self._app = app
        self._keys = keys
        self._limiter = limiter
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_open(scope["method"], scope["path"]):
            await self._app(scope, receive, send)
            return
        record = record_of(scope)
        try:
            key = record.key = self._key_of(scope, record)
            self._check_access(key, _access_to(scope["path"]))
            holder = (record.inner and record.inner.holder) or uuid.uuid4().hex
            counts = scope["method"] == "POST" and not scope["path"].endswith(_CANCEL)
            headers = await self._begin(key, holder, record.inner) if counts else None
        except ApiError as error:
            record.error = error.code
            if record.inner and record.inner.key_id and record.inner.holder:
                await self._limiter.drop(record.inner.key_id, record.inner.holder)
            if isinstance(error, LimitExceeded) and record.key:
                self._metrics.key_limited.labels(record.key.name, error.limit).inc()
            await error.response(scope)(scope, receive, send)
            return
        self._metrics.key_requests.labels(key.name).inc()
        if headers is None:
            await self._app(scope, receive, send)
            return

        held = 1 if record.inner is None or record.inner.holder else 0
        ending: asyncio.Future[None] | None = None

        async def with_limits(message: Message) -> None:
            nonlocal ending
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(headers)
            elif ending is None and (not message.get("more_body") or (record.usage and record.usage.ended)):
                # Before the end is sent: the client may send its next request as soon as it has read it.
                ending = asyncio.ensure_future(self._end(key, holder, scope, record, held))
            await send(message)

        async def hold(sequences: int) -> None:
            nonlocal held
            try:
                await self._limiter.add(key, holder, sequences)
            except LimitExceeded as error:
                self._metrics.key_limited.labels(key.name, error.limit).inc()
                raise
            held = sequences

        def hand_over() -> str:
            nonlocal held
            held = 0
            return holder

        record.hold = None if record.inner else hold
        record.hand_over = hand_over
        try:
            await self._app(scope, receive, with_limits)
        finally:
            record.hold = record.hand_over = None  # avoids a reference cycle
            # Also if this task is cancelled: the tokens were used, and the servers may still work on the request.
            await asyncio.shield(ending or asyncio.ensure_future(self._end(key, holder, scope, record, held)))

    async def _begin(self, key: Key, holder: str, inner: Inner | None) -> dict[str, str]:
        """Count a request. A request that the gateway sends to itself is part of one that was counted."""
        if inner is None:
            return await self._limiter.begin(key, holder)
        return {} if inner.holder else await self._limiter.check_tokens(key)

    def _key_of(self, scope: Scope, record: Record) -> Key:
        if record.inner:
            key = self._keys.by_id(record.inner.key_id)
            if key is None:
                raise _denied("the API key that asked for this no longer exists: ask with another key")
        else:
            text = presented(Headers(scope=scope))
            if text is None:
                raise _denied("there is no API key: send it as Authorization: Bearer KEY, or as x-api-key: KEY")
            key = self._keys.find(text)
            if key is None:
                raise _denied("invalid API key: check it, or ask the server's operator for one")
        if problem := key.why_not_valid(datetime.now(timezone.utc)):
            raise _denied(f"the API key {problem}: ask the server's operator for another")
        return key

    @staticmethod
    def _check_access(key: Key, wanted: Access) -> None:
        if wanted not in key.access:
            raise ApiError(
                403,
                f"the key {key.name!r} has no access to {wanted} (it has {', '.join(key.access)}): use another key",
                type="permission_error",
                code="access_denied",
            )

    async def _end(self, key: Key, holder: str, scope: Scope, record: Record, sequences: int) -> None:
        prompt, generated = _tokens(scope, record)
        for kind, tokens in (("prompt", prompt), ("completion", generated)):
            if tokens:
                self._metrics.key_tokens.labels(key.name, kind).inc(tokens)
        await self._limiter.charge(key, prompt + generated)
        for until_over in record.calls:  # not gather(), which waits even if nothing runs
            await until_over()
        if sequences:
            await self._limiter.end(key, holder, sequences)


def _tokens(scope: Scope, record: Record) -> tuple[int, int]:
    """Prompt tokens and generated tokens, as the engine counted them. If the client left, or the time was over, before
    the engine's first response, the prompt is estimated."""
    if record.usage and (usage := record.usage.to_json())["total_tokens"]:
        return usage["prompt_tokens"], usage["completion_tokens"]
    left = scope["state"].get("disconnected") or 504 in (record.status, record.failed_status)
    return (record.estimated_tokens, 0) if left else (0, 0)
