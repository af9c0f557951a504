"""Tools of an MCP server on the chat page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from chat import answers, button, expect, finished, kept, pause, say, set_functions
from free_ports import free_ports
from scripted import HANG_S, Scripted
from waiting import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.fixture
def tools() -> Iterator[Scripted]:
    """A server of another origin."""
    server = Scripted(*free_ports(1))
    server.start()
    yield server
    server.stop()


def calls(tools: Scripted) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{tools.url}/tools/_calls", timeout=HANG_S).json()
    return found


def answered(tools: Scripted) -> dict[str, int]:
    """The last status for a list of tools, by token."""
    found: dict[str, int] = httpx.get(f"{tools.url}/tools/_lists", timeout=HANG_S).json()
    return found


def call(name: str, arguments: str = "{}") -> list[dict[str, Any]]:
    function = {"name": name, "arguments": arguments}
    return [
        {"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": function}]},
        {"finish": "tool_calls"},
    ]


def add_server(page: Page, tools: Scripted, token: str) -> None:
    button(page, "Settings").click()
    page.get_by_label("Address of the server").fill(f"{tools.url}/tools/mcp")
    page.get_by_label("Token, if it needs one").fill(token)
    button(page, "Add").click()


def test_calls_run_after_the_user_agrees(page: Page, server: Scripted, tools: Scripted) -> None:
    add_server(page, tools, "wrong")
    expect(page.get_by_text("401")).to_be_visible()
    page.keyboard.press("Escape")
    add_server(page, tools, "secret")
    expect(page.get_by_text("clock, weather.today")).to_be_visible()
    page.keyboard.press("Escape")

    server.script(call("weather_today", '{"city": "Rome"}'), "It is sunny.", call("clock"), "Refused.")
    say(page, "Weather?")
    expect(finished(page).locator(".call")).to_contain_text(f"{tools.url}/tools/mcp")
    assert calls(tools) == []
    page.set_viewport_size({"width": 360, "height": 700})
    box = button(page, "Run").bounding_box()
    assert box and box["height"] < 60  # one line
    button(page, "Run").click()
    expect(finished(page, 2)).to_contain_text("It is sunny.")
    assert calls(tools) == [{"name": "weather.today", "arguments": {"city": "Rome"}}]
    first, second = server.requests()
    assert [one["function"]["name"] for one in first["tools"]] == ["clock", "weather_today"]
    result = {"role": "tool", "tool_call_id": "c1", "content": 'weather.today: {"city": "Rome"}'}
    assert second["messages"][-1] == result
    say(page, "And the time?")
    finished(page, 3)
    button(page, "Refuse").click()
    expect(finished(page, 4)).to_contain_text("Refused.")
    assert server.requests()[-1]["messages"][-1]["content"] == "The user did not allow this call."
    assert len(calls(tools)) == 1


def test_new_token_of_a_server_begins_a_new_session(page: Page, tools: Scripted) -> None:
    for token in ("secret", "other"):
        add_server(page, tools, token)
        wait_until(lambda token=token: f"Bearer {token}" in answered(tools))  # the status may be of the earlier token
        expect(page.locator(".servers [role=status]")).to_have_text("clock, weather.today")
        page.keyboard.press("Escape")
    assert 400 not in answered(tools).values()


def test_messages_wait_for_a_silent_server_only_at_first(page: Page, tools: Scripted) -> None:
    page.evaluate("import('/page/mcp.js').then((mcp) => { window.mcp = mcp; })")
    look = "Promise.race([mcp.settled().then(() => true), new Promise((end) => setTimeout(end, 1, false))])"

    def is_settled() -> bool:
        page.evaluate(f"window.looked = {look}, null")
        page.clock.run_for(1000)
        found: bool = page.evaluate("looked")
        return found

    button(page, "Settings").click()
    page.get_by_label("Address of the server").fill(f"{tools.url}/tools/mcp")
    page.get_by_label("Token, if it needs one").fill("silent")
    pause(page)
    button(page, "Add").click()
    assert not is_settled()
    page.clock.run_for(10_000)
    assert is_settled()


def test_a_tool_that_is_allowed_in_a_chat_runs_without_a_question(
    page: Page, server: Scripted, tools: Scripted
) -> None:
    add_server(page, tools, "secret")
    expect(page.get_by_text("clock, weather.today")).to_be_visible()
    page.keyboard.press("Escape")
    server.script(call("clock"), call("clock"), call("weather_today"), "Done.")
    say(page, "Time?")
    finished(page)
    button(page, "Run, and always in this chat").click()
    finished(page, 3)  # the second call of the clock has run, the weather waits
    expect(button(page, "Run")).to_be_visible()
    assert [one["name"] for one in calls(tools)] == ["clock", "clock"]
    kept(page)
    page.reload()
    button(page, "Run").click()
    expect(finished(page, 4)).to_contain_text("Done.")
    server.script(call("clock"))
    button(page, "New chat").first.click()
    say(page, "Time?")
    finished(page)
    expect(button(page, "Run")).to_be_visible()
    button(page, "Functions in this chat").click()
    button(page, "Regenerate").click()
    expect(answers(page).locator(".versions")).to_contain_text("2 / 2")
    finished(page)
    assert "tools" not in server.requests()[-1]


def test_a_function_of_the_settings_hides_a_tool_with_its_name(page: Page, server: Scripted, tools: Scripted) -> None:
    add_server(page, tools, "secret")
    expect(page.get_by_text("clock, weather.today")).to_be_visible()
    page.keyboard.press("Escape")
    own = set_functions(page, "clock")
    server.script(call("clock"), "Noon.")
    say(page, "Time?")
    finished(page)
    assert [one["function"]["name"] for one in server.requests()[0]["tools"]] == ["clock", "weather_today"]
    assert server.requests()[0]["tools"][0] == own[0]
    expect(button(page, "Run")).to_have_count(0)
    page.get_by_label("Result: clock").fill("12:00")
    button(page, "Send results").click()
    expect(finished(page, 2)).to_contain_text("Noon.")
    assert calls(tools) == []
