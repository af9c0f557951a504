"""Decides which web pages may use the gateway: its own, and the origins in the settings.

Any web page that is open in a browser can send requests to a server on localhost. Browsers send the page's origin in
`Origin`, and a page cannot change it. Other clients send no Origin; they are not restricted here.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from charonia_gateway.errors import ApiError
from charonia_gateway.port import machine_names
from charonia_gateway.record import record_of
from charonia_gateway.settings import ANY_ORIGIN

_SAFE = ("GET", "HEAD", "OPTIONS")  # they change nothing, and the browser hides the response from a foreign page
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


def _is_local(host: str) -> bool:
    """Whether the Host header can name a gateway on this machine. Names without a dot are not on the internet."""
    with contextlib.suppress(ValueError):
        name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
        return "." not in name or name.endswith(".localhost") or bool(ipaddress.ip_address(name))
    return False


def _is_own(origin: str, host: str, names: Collection[str] | None) -> bool:
    """Whether a page of `origin` came from this server, which the request names `host`. names: host names of this
    server; None: any name. Another name does not count, because an attacker may have pointed it at this machine (DNS
    rebinding)."""
    try:
        parts, called = urlsplit(origin), urlsplit(f"//{host}")
        name = called.hostname or ""
        if parts.netloc.removesuffix(_DEFAULT_PORTS.get(parts.scheme, "")) != host.lower():
            return False
        if names is None or name.removesuffix(".") in names or name == "localhost" or name.endswith(".localhost"):
            return True
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class OriginMiddleware:
    """Rejects requests of foreign pages with 403, unless they only read.

    local: the gateway listens on this machine alone. Then a request that only reads is rejected if its Host is another
    name: a page of this name, which an attacker has pointed at this machine, could read the response.
    keys: every request that changes something needs an API key. Then a page of the gateway is accepted under any host
    name: a foreign page has no key, and no browser sends one by itself.

    Pages under a name of this machine are accepted if the gateway is neither local nor has keys. A local gateway
    rejects them: other machines cannot reach it, and the network (DHCP) may have chosen the domain.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str], keys: bool = False, local: bool = False) -> None:
        self._app = app
        self._allowed = allowed
        self._names: set[str] | None = None if keys else set() if local else machine_names()
        if self._names and ANY_ORIGIN not in allowed:
            # DNS may take seconds.
            threading.Thread(target=self._add_full_name, args=(self._names,), daemon=True).start()
        self._checks_host = local and not keys and ANY_ORIGIN not in allowed
        self._hosts = {urlsplit(origin).hostname for origin in allowed}

    @staticmethod
    def _add_full_name(names: set[str]) -> None:
        names.add(socket.getfqdn().lower())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_probe = scope["type"] == "http" and (
            scope["path"].startswith("/health/") or scope["path"] in ("/health", "/ping")
        )
        if (
            scope["type"] == "http"
            and not is_probe
            and (problem := self._problem(scope["method"], Headers(scope=scope)))
        ):
            error = ApiError(
                403,
                f"{problem}: add its origin (http://NAME:PORT) to CHARONIA_GATEWAY_ALLOWED_ORIGINS if it may be used",
                type="permission_error",
                code="origin_not_allowed",
            )
            record_of(scope).error = error.code
            await error.response(scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _problem(self, method: str, headers: Headers) -> str | None:
        if method in _SAFE:
            host = headers.get("host", "").lower()
            known = not self._checks_host or _is_local(host) or host.partition(":")[0] in self._hosts
            return None if known else f"{host[:100]!r} is not a name of this server"
        if ANY_ORIGIN in self._allowed:
            return None
        origin = headers.get("origin")
        if origin is not None:
            host = headers.get("host", "")
            known = origin.lower() in self._allowed or _is_own(origin.lower(), host, self._names)
            return None if known else f"a web page of {origin[:100]!r} does not belong to this server"
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return "the request comes from a web page of another server"
        return None
