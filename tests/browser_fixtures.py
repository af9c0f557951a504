"""Fixtures for tests in a browser, for the conftest.py of their folders."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from charonia_gateway.pages import LIBRARIES
from missing_tools import missing_tool

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

ROOT = Path(__file__).resolve().parents[1]
PAGE_HANG_S = 120


@pytest.fixture(scope="module")  # no asynchronous test can run in this process while the browser is open
def browser() -> Iterator[Browser]:
    found = subprocess.run([ROOT / "scripts" / "get_chromium.sh"], capture_output=True, text=True)
    if found.returncode:
        missing_tool(found.stderr.removeprefix("skipped: "))
    if not LIBRARIES.is_dir():
        missing_tool("the chat page's libraries are not there: scripts/get_page_libraries.py says why")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        program, arguments = found.stdout.strip(), ["--no-sandbox"] if os.geteuid() == 0 else []
        with playwright.chromium.launch(executable_path=program, args=arguments, timeout=PAGE_HANG_S * 1000) as browser:
            yield browser


@pytest.fixture
def new_context(browser: Browser) -> Iterator[Callable[..., BrowserContext]]:
    """Return a function that creates browser contexts, each like a new user. The test fails if a page violates its
    security policy, has an error, or sends a request to another server."""
    wrong: list[str] = []
    with contextlib.ExitStack() as stack:

        def make(**settings: Any) -> BrowserContext:
            context = browser.new_context(**{"locale": "en-GB", **settings})
            stack.callback(context.close)
            context.set_default_timeout(PAGE_HANG_S * 1000)

            def watch(page: Page) -> None:
                page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
                page.on("dialog", lambda dialog: (wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))

                def note(message: Any) -> None:
                    # The page itself handles network errors.
                    if message.type == "error" and not message.text.startswith("Failed to load resource"):
                        wrong.append(message.text)

                page.on("console", note)

            def asked(request: Any) -> None:
                if not request.url.startswith(("http://127.0.0.1:", "blob:")):
                    wrong.append(f"asked for {request.url}")

            context.on("page", watch)
            context.on("request", asked)
            return context

        yield make
    assert not wrong, wrong
