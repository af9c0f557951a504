"""Accessibility of the chat page, by axe-core's rules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from chat import answers, button, chat_link, expect, finished, say, set_functions
from missing_tools import missing_tool
from scripted import Scripted

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page

AXE = Path(__file__).resolve().parents[2] / "build" / "page_tests" / "axe-core" / "axe.min.js"
CALL = {"index": 0, "id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
RICH = """# Title

> quote with a [link](https://example.com)

| a | b |
|---|--:|
| 1 | 2 |

```python
# comment
def f(x: int) -> str: return "text" + str(12)
```

`code` $e^{i\\pi}$ safe\u202etxt
"""


def problems(page: Page) -> list[str]:
    """Return violated rules with their places, for all impact levels."""
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{rule['id']} ({rule['impact']}): {node['target']} {node['failureSummary']}"
        for rule in found["violations"]
        for node in rule["nodes"]
    ]


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_no_rule_of_accessibility_is_broken(
    server: Scripted, new_context: Callable[..., BrowserContext], colours: str
) -> None:
    if not AXE.is_file():
        missing_tool("axe-core is not there: python scripts/get_page_libraries.py --tests")
    page = new_context(color_scheme=colours, reduced_motion="reduce").new_page()
    page.goto(server.url)
    page.get_by_label("Model", exact=True).wait_for()
    page.evaluate(AXE.read_text())
    assert problems(page) == [], "the empty page"

    set_functions(page, "weather")
    button(page, "Settings").click()
    page.get_by_label("temperature").wait_for()
    page.get_by_label("Form of the answer").select_option("regex")
    page.get_by_label("Name of a preset").fill("one")
    page.keyboard.press("Enter")
    expect(button(page, "one")).to_be_visible()
    assert problems(page) == [], "the settings"
    page.keyboard.press("Escape")

    server.script(
        [{"reasoning_content": "Hm, so."}, RICH],
        [{"tool_calls": [CALL]}, {"finish": "tool_calls"}],
        {"status": 400, "error": "wrong"},
        ["Writing", {"wait": True}],
    )
    say(page, "First")
    finished(page).get_by_text("Reasoning").click()
    expect(answers(page).locator(".katex")).to_have_count(1)
    expect(answers(page).locator(".hljs-keyword").first).to_be_visible()
    say(page, "Second")
    finished(page, 2)
    assert problems(page) == [], "answers and calls"
    page.get_by_label("Result: weather").fill("sunny")
    button(page, "Send results").click()
    expect(finished(page, 3).get_by_role("alert")).to_be_visible()
    say(page, "Third")
    expect(answers(page).last).to_contain_text("Writing")
    assert problems(page) == [], "an error, and an answer that is being written"
    page.keyboard.press("Escape")
    finished(page, 4)

    page.set_viewport_size({"width": 320, "height": 640})
    button(page, "Show chats").click()
    expect(page.get_by_label("Search chats")).to_be_visible()
    assert problems(page) == [], "the chats on a phone"
    chat_link(page, "First").click()
    server.script(reason="the model is being loaded")
    page.evaluate("dispatchEvent(new Event('online'))")
    page.get_by_text("The server is not ready yet").wait_for()
    button(page, "Edit").last.click()
    page.get_by_role("textbox", name="Edit").wait_for()
    assert problems(page) == [], "editing on a phone, before a server that is not ready"
    assert page.evaluate("document.documentElement.scrollWidth") == 320

    server.script(key="k")
    page.reload()
    page.get_by_role("dialog", name="API key").wait_for()
    page.evaluate(AXE.read_text())
    assert problems(page) == [], "the question for a key"
    page.goto(f"{server.url}/docs")
    page.get_by_role("alert").wait_for()
    page.evaluate(AXE.read_text())
    assert problems(page) == [], "the documentation's question for a key"
