"""The gateway's pages as a browser receives them: files, headers, and the behaviour without them."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from charonia_gateway import pages
from charonia_gateway.app import create_app
from charonia_gateway.settings import Settings


def client(**settings: object) -> httpx.AsyncClient:
    app = create_app(Settings(_env_file=None, **settings))  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the libraries appear installed."""
    monkeypatch.setattr(pages, "LIBRARIES", pages.FOLDER)


@pytest.mark.parametrize("path", ["/", "/docs", "/page/main.js", "/page/chat.css"])
async def test_every_file_has_its_headers(path: str, libraries: None) -> None:
    async with client() as web:
        answer = await web.get(path)
        again = await web.get(path, headers={"If-None-Match": answer.headers["etag"]})
    assert answer.status_code == 200
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert (policy["script-src"], policy["connect-src"]) == ("'self'", "'self'")
    assert policy["frame-ancestors"] == "'none'"
    if path == "/":
        assert policy["require-trusted-types-for"] == "'script'"
        assert policy["trusted-types"] == "lit-html dompurify charonia-workers"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-cache"
    if path.startswith("/page"):
        assert again.status_code == 304


async def test_only_the_worker_of_mcp_may_contact_other_servers(libraries: None) -> None:
    async with client() as web:
        answer = await web.get("/page/mcp_worker.js")
    assert "connect-src http: https:;" in answer.headers["content-security-policy"]


@pytest.mark.parametrize("name", ["chat.html", "docs.html"])
def test_no_page_has_a_script_or_an_address_in_it(name: str) -> None:
    text = (pages.FOLDER / name).read_text()
    assert re.findall(r"<script[^>]*>[^<]", text) == []
    assert not re.search(r"https?://|\son\w+=|style=", text)
    own = [file for pattern in ("*.js", "*.css") for file in pages.FOLDER.glob(pattern)]
    for file in own:
        assert not re.search(r"""(import|from|fetch\(|url\()\s*["']?https?://""", file.read_text()), file


@pytest.mark.parametrize(
    "path", ["/page/../pages.py", "/page/%2e%2e/pages.py", "/page//etc/passwd", "/page/nothing.js", "/page"]
)
async def test_nothing_else_is_handed_out(path: str, libraries: None) -> None:
    async with client() as web:
        assert (await web.get(path)).status_code in (404, 405)


async def test_the_page_can_be_switched_off(libraries: None) -> None:
    async with client(page=False) as web:
        assert (await web.get("/")).status_code == 404
        assert (await web.get("/docs")).status_code == 200


async def test_pages_without_libraries_name_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pages, "LIBRARIES", tmp_path / "nothing")
    async with client() as web:
        for path in ("/", "/docs"):
            answer = await web.get(path)
            assert answer.status_code == 503
            assert "get_page_libraries.py" in answer.text
        assert (await web.get("/health/live")).status_code == 200
    assert "get_page_libraries.py" in caplog.text


async def test_a_head_request_has_no_body(libraries: None) -> None:
    async with client() as web:
        answer = await web.head("/")
    assert (answer.status_code, answer.content) == (200, b"")
