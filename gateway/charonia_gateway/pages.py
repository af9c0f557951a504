"""The gateway's pages: the chat at `/` and the documentation at `/docs`. Both are files of page/, and libraries of
other projects under page/libraries/, which scripts/get_page_libraries.py fetches.

Neither loads anything from another server. No script stands in the HTML, and a browser runs none but these files.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import FileResponse, PlainTextResponse
from starlette.middleware.gzip import GZipMiddleware
from starlette.routing import Match, Mount
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

FOLDER = Path(__file__).parent / "page"
LIBRARIES = FOLDER / "libraries"
MISSING = (
    "The chat page's libraries are not installed, so there is no page here. The API works as usual.\n"
    "In a checkout, `make setup` or `python scripts/get_page_libraries.py` fetches them; then restart the gateway.\n"
)
log = logging.getLogger("charonia_gateway")

_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "connect-src": "'self'",
    "font-src": "'self'",
    "img-src": "'self'",
    "style-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
# Only the libraries that render HTML by themselves may make HTML of a text.
_CHAT_POLICY = _POLICY | {"require-trusted-types-for": "'script'", "trusted-types": "lit-html dompurify"}
# swagger-ui has pictures in its style sheet, and styles in its elements.
_DOCS_POLICY = _POLICY | {"img-src": "'self' data:", "style-src": "'self' 'unsafe-inline'"}
_HEADERS = {
    "Cache-Control": "no-cache",  # a new version of the gateway is a new page; unchanged files are answered with 304
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def _headers(policy: dict[str, str]) -> dict[str, str]:
    return {**_HEADERS, "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items())}


class _Files(StaticFiles):
    """Hands out the files of the pages, with their headers."""

    def file_response(
        self, full_path: Any, stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(_headers(_POLICY))
        if Path(full_path).suffix in (".js", ".mjs"):  # whatever this machine's list of types says
            response.headers["Content-Type"] = "text/javascript; charset=utf-8"
        return response


class _NamedMount(Mount):
    """A mount whose requests are counted under its path, as those of routes are."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        return match, {**child, "route": self} if match is not Match.NONE else child


def _page(name: str, policy: dict[str, str]) -> Response:
    if not LIBRARIES.is_dir():
        return PlainTextResponse(MISSING, 503, headers=_headers(_POLICY))
    return FileResponse(FOLDER / name, media_type="text/html; charset=utf-8", headers=_headers(policy))


async def chat_page() -> Response:
    """The chat, for browsers."""
    return _page("chat.html", _CHAT_POLICY)


async def docs_page() -> Response:
    """What /openapi.json says, to read and to try."""
    return _page("docs.html", _DOCS_POLICY)


def add_pages(app: FastAPI, *, chat: bool) -> None:
    """chat: the page at `/` too."""
    if not LIBRARIES.is_dir():
        log.warning("%s has no libraries, so / and /docs answer with 503: %s", FOLDER, MISSING.splitlines()[1])
    if chat:
        app.add_api_route("/", chat_page, methods=["GET", "HEAD"], include_in_schema=False)
    app.add_api_route("/docs", docs_page, methods=["GET", "HEAD"], include_in_schema=False)
    app.router.routes.append(_NamedMount("/page", GZipMiddleware(_Files(directory=FOLDER), minimum_size=1000)))
