"""Actions of a user on the chat page."""

from __future__ import annotations

import json
import time
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from missing_tools import needed_module
from scripted import HANG_S, Scripted

playwright = needed_module("playwright.sync_api")
if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

expect = playwright.expect
expect.set_options(timeout=HANG_S * 1000)


# A notice disappears after some seconds, so this reads the text of earlier notices.
NOTE = """
  window.notices = [];
  new MutationObserver(() => {
    const said = document.querySelector(".notice")?.textContent.trim();
    if (said && said !== window.notices.at(-1)) window.notices.push(said);
  }).observe(document, { subtree: true, childList: true, characterData: true });
"""


# Whether the browser has stored all chats in the list, with complete responses.
KEPT = """async () => {
  const { openDB } = await import("/page/libraries/idb/build/index.js");
  const database = await openDB("charonia");
  const chats = (await database.getAll("conversations")).filter(({ removed }) => !removed);
  database.close();
  const written = chats.flatMap(({ messages }) => Object.values(messages)).every(({ state }) => !state);
  return written && chats.length === document.querySelectorAll(".chat-title").length;
}"""


def opened(page: Page, server: Scripted) -> Page:
    """Open the chat page and wait until it has the server's models, so that later scripts do not affect its start."""
    page.add_init_script(NOTE)
    page.goto(server.url)
    expect(page.get_by_label("Model", exact=True)).not_to_have_value("")
    return page


def pause(page: Page) -> None:
    """Stop the page's clock, which Page.clock moves on. Without it the page draws nothing."""
    page.clock.install()
    page.clock.pause_at(datetime.now() + timedelta(hours=1))


def noticed(page: Page, text: str) -> None:
    """Wait until a notice with this text has been shown."""
    page.wait_for_function("(text) => notices.some((said) => said.includes(text))", arg=text)


def until(page: Page, holds: str, arg: Any = None) -> None:
    """Wait until the function returns true. It may be asynchronous; Page.wait_for_function treats a promise as true."""
    deadline = time.monotonic() + HANG_S
    while not page.evaluate(holds, arg):
        assert time.monotonic() < deadline, holds
        page.wait_for_timeout(50)


def kept(page: Page) -> None:
    """Wait until the page has stored its content, because unsaved content is lost with the page."""
    until(page, KEPT)


def field(page: Page) -> Locator:
    return page.get_by_role("textbox", name="Message")


def say(page: Page, text: str) -> None:
    field(page).fill(text)
    field(page).press("Enter")


def answers(page: Page) -> Locator:
    return page.get_by_role("article", name="Assistant")


def finished(page: Page, count: int = 1) -> Locator:
    """Return the last of `count` responses when it is complete."""
    expect(answers(page)).to_have_count(count)
    expect(answers(page).last).to_have_attribute("aria-busy", "false")
    return answers(page).last


def button(page: Page | Locator, name: str) -> Locator:
    return page.get_by_role("button", name=name, exact=True)


def set_functions(page: Page, *names: str) -> list[dict[str, Any]]:
    """Define functions in the settings, and return them."""
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in names]
    button(page, "Settings").click()
    page.get_by_label("Functions (JSON)").fill(json.dumps(tools))
    page.get_by_label("Functions (JSON)").blur()
    page.keyboard.press("Escape")
    return tools


def chat_link(page: Page, title: str) -> Locator:
    """Return the chat in the list."""
    return page.get_by_role("link", name=title, exact=True)


def ask(page: Page, server: Scripted, answer: Any) -> Locator:
    server.script(answer)
    say(page, "Hello?")
    return finished(page)
