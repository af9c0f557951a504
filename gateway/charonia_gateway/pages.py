"""The gateway's pages: the chat at `/` and the documentation at `/docs`. They consist of files in page/ and of
third-party libraries in page/libraries/, which scripts/get_page_libraries.py downloads.

Neither page loads anything from another server. The HTML contains no scripts, and a browser runs only these files.
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
    "The libraries of this page are not installed, so the page is not available. The API works as usual.\n"
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
# Only the libraries that render HTML may convert text to HTML, and only one module may start workers.
_CHAT_POLICY = _POLICY | {
    "require-trusted-types-for": "'script'",
    "trusted-types": "lit-html dompurify charonia-workers",
}
# swagger-ui has images in its style sheet, and inline styles.
_DOCS_POLICY = _POLICY | {"img-src": "'self' data:", "style-src": "'self' 'unsafe-inline'"}
# This worker only talks to the MCP servers that the user has added.
_MCP_POLICY = _POLICY | {"connect-src": "http: https:"}
_HEADERS = {
    "Cache-Control": "no-cache",  # browsers ask for a new version each time; unchanged files have status 304
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
    """Serves the files of the pages with their headers."""

    def file_response(
        self, full_path: Any, stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(_headers(_MCP_POLICY if Path(full_path).name == "mcp_worker.js" else _POLICY))
        if Path(full_path).suffix in (".js", ".mjs"):  # independent of this machine's list of types
            response.headers["Content-Type"] = "text/javascript; charset=utf-8"
        return response


class _NamedMount(Mount):
    """A mount whose requests are counted under its path, like the requests of routes."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        return match, {**child, "route": self} if match is not Match.NONE else child


def _page(name: str, policy: dict[str, str]) -> Response:
    if not LIBRARIES.is_dir():
        return PlainTextResponse(MISSING, 503, headers=_headers(_POLICY))
    return FileResponse(FOLDER / name, media_type="text/html; charset=utf-8", headers=_headers(policy))


async def chat_page() -> Response:
    """The chat page."""
    return _page("chat.html", _CHAT_POLICY)


async def docs_page() -> Response:
    """The documentation page for /openapi.json."""
    return _page("docs.html", _DOCS_POLICY)


def add_pages(app: FastAPI, *, chat: bool) -> None:
    """chat: also serve the chat page at `/`."""
    if not LIBRARIES.is_dir():
        log.warning("%s has no libraries, so / and /docs return 503: %s", FOLDER, MISSING.splitlines()[1])
    if chat:
        app.add_api_route("/", chat_page, methods=["GET", "HEAD"], include_in_schema=False)
    app.add_api_route("/docs", docs_page, methods=["GET", "HEAD"], include_in_schema=False)
    app.router.routes.append(_NamedMount("/page", GZipMiddleware(_Files(directory=FOLDER), minimum_size=1000)))
