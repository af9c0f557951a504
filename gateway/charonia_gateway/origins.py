"""Which web pages may use the gateway: its own, and those that the settings name.

Whoever has a web page open runs its code beside a server on localhost. Browsers say in `Origin` whose page it is that
sends a request, and a page cannot change that. What is no browser sends no Origin, and is not meant here.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from charonia_gateway.errors import ApiError
from charonia_gateway.record import record_of
from charonia_gateway.settings import ANY_ORIGIN

_SAFE = ("GET", "HEAD", "OPTIONS")  # they change nothing here, and the browser keeps the answer from another's page
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


def _is_own(origin: str, host: str, any_name: bool) -> bool:
    """Whether a page of `origin` came from the server that is now called `host`. Not where that is a name that anybody
    may have pointed at this machine (DNS rebinding), unless `any_name`."""
    try:
        parts, called = urlsplit(origin), urlsplit(f"//{host}")
        name = called.hostname or ""
        if parts.netloc.removesuffix(_DEFAULT_PORTS.get(parts.scheme, "")) != host.lower():
            return False
        if any_name or name == "localhost" or name.endswith(".localhost"):
            return True
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class OriginMiddleware:
    """Answers with 403 what a page of another origin asks to be done.

    keys: every request that acts needs an API key. A page of the gateway's own is then known under any host name: a
    foreign page under a name that leads here has no key, which no browser sends by itself.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str], keys: bool = False) -> None:
        self._app = app
        self._allowed = allowed
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        acts = scope["type"] == "http" and scope["method"] not in _SAFE
        if acts and (problem := self._problem(Headers(scope=scope))):
            error = ApiError(
                403,
                f"{problem}: name its origin in CHARONIA_GATEWAY_ALLOWED_ORIGINS if it may use this server",
                type="permission_error",
                code="origin_not_allowed",
            )
            record_of(scope).error = error.code
            await error.response(scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _problem(self, headers: Headers) -> str | None:
        if ANY_ORIGIN in self._allowed:
            return None
        origin = headers.get("origin")
        if origin is not None:
            host = headers.get("host", "")
            known = origin.lower() in self._allowed or _is_own(origin.lower(), host, any_name=self._keys)
            return None if known else f"a web page of {origin[:100]!r} is none of this server's"
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return "the request comes from a web page of another server"
        return None
