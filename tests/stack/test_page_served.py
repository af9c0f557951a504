"""The chat page with the real server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from gateway_process import gateway
from missing_tools import needed_module
from stack import HANG_S, Stack

playwright = needed_module("playwright.sync_api")
if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext

expect = playwright.expect
expect.set_options(timeout=HANG_S * 1000)


def test_truncated_chat_is_continued(stack: Stack, new_context: Callable[..., BrowserContext]) -> None:
    """With greedy sampling, a continued response equals the complete response."""
    page = new_context().new_page()
    page.goto(stack.gateway)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("temperature").fill("0")
    page.get_by_label("max_completion_tokens").fill("3")
    page.get_by_label("max_completion_tokens").blur()
    page.keyboard.press("Escape")
    question = "What is the capital of France?"
    page.get_by_role("textbox", name="Message").fill(question)
    page.keyboard.press("Enter")
    expect(page.get_by_text("The answer reached its longest length")).to_be_visible()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("max_completion_tokens").fill("")
    page.get_by_label("max_completion_tokens").blur()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Continue", exact=True).click()
    expect(page.get_by_text("The answer reached its longest length")).to_have_count(0)
    answer = page.get_by_role("article", name="Assistant")
    expect(answer).to_have_attribute("aria-busy", "false")
    model = httpx.get(f"{stack.gateway}/v1/models", timeout=HANG_S).json()["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": question}], "temperature": 0}
    whole = httpx.post(f"{stack.gateway}/v1/chat/completions", json=body, timeout=HANG_S).json()
    text = whole["choices"][0]["message"]["content"]
    assert answer.locator(".markdown").inner_text().split() == text.split()
    expect(answer.locator(".stats")).to_contain_text("tokens/s")
    expect(page.get_by_role("meter")).to_be_visible()
    page.goto(f"{stack.gateway}/docs")
    expect(page.get_by_text("/v1/chat/completions").first).to_be_visible()
    metrics = httpx.get(f"{stack.gateway}/metrics", timeout=HANG_S).text
    for route in ("/", "/page", "/docs"):
        assert f'charonia_gateway_requests_total{{route="{route}",status="200"}}' in metrics


def test_page_waits_for_gateway_without_triton(tmp_path: Path, new_context: Callable[..., BrowserContext]) -> None:
    with gateway("127.0.0.1:9", tmp_path / "gateway.log") as served:
        page = new_context().new_page()
        page.goto(served.url)
        page.get_by_role("textbox", name="Message").fill("Hello?")
        page.keyboard.press("Enter")
        expect(page.locator(".waiting")).to_contain_text("The server is not available, or is being restarted")
        expect(page.get_by_text("The server is not ready yet")).to_be_visible()
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_text("Stopped")).to_be_visible()
