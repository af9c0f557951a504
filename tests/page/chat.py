"""What a person does on the chat page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from missing_tools import needed_module
from scripted import HANG_S, Scripted

playwright = needed_module("playwright.sync_api")
if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

expect = playwright.expect
expect.set_options(timeout=HANG_S * 1000)


def field(page: Page) -> Locator:
    return page.get_by_role("textbox", name="Message")


def say(page: Page, text: str) -> None:
    field(page).fill(text)
    field(page).press("Enter")


def answers(page: Page) -> Locator:
    return page.get_by_role("article", name="Assistant")


def finished(page: Page, count: int = 1) -> Locator:
    """The last of `count` answers, whole."""
    expect(answers(page)).to_have_count(count)
    expect(answers(page).last).to_have_attribute("aria-busy", "false")
    return answers(page).last


def button(page: Page | Locator, name: str) -> Locator:
    return page.get_by_role("button", name=name, exact=True)


def ask(page: Page, server: Scripted, answer: Any) -> Locator:
    server.script(answer)
    say(page, "Hello?")
    return finished(page)
