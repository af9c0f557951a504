"""Several tabs of one browser on the chat page."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from chat import answers, button, chat_link, expect, field, finished, kept, noticed, opened, pause, say, until
from scripted import Scripted

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page

LOOK = "dispatchEvent(new Event('online'))"  # makes the page check the server immediately
MAX_CONNECTIONS = 6  # of a browser to one server with HTTP/1.1


def another_tab(page: Page, server: Scripted) -> Page:
    return opened(page.context.new_page(), server)


def beside_a_writing_one(page: Page, server: Scripted) -> Page:
    """Open another tab with the chat "Tell" while this one streams: its response is "Once" until release()."""
    server.script(["Once", {"wait": True}, " more"])
    say(page, "Tell")
    expect(answers(page)).to_contain_text("Once")
    other = another_tab(page, server)
    chat_link(other, "Tell").click()
    return other


def test_two_tabs_have_the_same_conversations(page: Page, server: Scripted) -> None:
    other = another_tab(page, server)
    say(page, "From the first tab")
    finished(page)
    chat_link(other, "From the first tab").click()
    expect(answers(other)).to_contain_text("Hello!")


def test_two_tabs_that_write_simultaneously_lose_nothing(page: Page, server: Scripted) -> None:
    say(page, "Start")
    finished(page)
    other = another_tab(page, server)
    chat_link(other, "Start").click()
    expect(answers(other)).to_have_count(1)
    server.script(["from one", {"wait": True}, "."], "from two")
    say(page, "Question of the first tab")
    expect(answers(page).last).to_contain_text("from one")
    expect(other.get_by_role("article", name="You").last).to_contain_text("Question of the first tab")
    say(other, "Question of the other tab")
    expect(other.get_by_text("from two")).to_be_visible()
    server.release()
    expect(answers(page).nth(1).locator(".markdown")).to_have_text("from one.")
    for tab in (page, other):
        expect(answers(tab).locator(".markdown")).to_have_text(["Hello!", "from one.", "from two"])
        expect(tab.locator("[aria-busy=true]")).to_have_count(0)
        kept(tab)
        tab.reload()
        chat_link(tab, "Start").click()
        expect(answers(tab).locator(".markdown")).to_have_text(["Hello!", "from one.", "from two"])


def test_a_name_that_is_typed_stays_when_another_tab_changes_the_chat(page: Page, server: Scripted) -> None:
    for title in ("Older", "Newer"):
        button(page, "New chat").first.click()
        say(page, title)
        expect(finished(page)).to_contain_text("Hello!")
    other = another_tab(page, server)
    chat_link(page, "Older").click()
    button(page, "Rename: Older").click()
    rename = page.get_by_role("textbox", name="Rename")
    rename.press_sequentially("half")
    chat_link(other, "Older").click()
    say(other, "Again")
    finished(other, 2)
    expect(page.locator(".chat-item").first.locator("input")).to_have_value("half")  # now the newest chat
    button(other, "Rename: Older").click()
    other.get_by_role("textbox", name="Rename").fill("Renamed elsewhere")
    other.get_by_role("textbox", name="Rename").press("Enter")
    expect(other.locator(".chat-title").first).to_have_text("Renamed elsewhere")
    expect(page).to_have_title("Renamed elsewhere · Charonia")
    expect(rename).to_be_focused()
    page.keyboard.type(" way")
    page.keyboard.press("Enter")
    expect(page.locator(".chat-title")).to_have_text(["half way", "Newer"])
    expect(answers(page)).to_have_count(2)


def test_a_chat_that_is_renamed_while_another_tab_writes_in_it_keeps_the_name(page: Page, server: Scripted) -> None:
    other = beside_a_writing_one(page, server)
    button(other, "Rename: Tell").click()
    other.get_by_role("textbox", name="Rename").fill("Told")
    other.get_by_role("textbox", name="Rename").press("Enter")
    until(
        other,
        """async () => {
          const { openDB } = await import("/page/libraries/idb/build/index.js");
          const database = await openDB("charonia");
          const chats = await database.getAll("conversations");
          database.close();
          return chats[0].title === "Told";
        }""",
    )
    server.release()
    expect(finished(page)).to_contain_text("Once more")
    for tab in (page, other):
        expect(tab.locator(".chat-title")).to_have_text("Told")


def test_a_chat_that_is_deleted_in_one_tab_stays_deleted_in_all(page: Page, server: Scripted) -> None:
    other = beside_a_writing_one(page, server)
    field(page).fill("a draft")
    button(other, "Delete: Tell").click()
    noticed(page, "This chat was deleted in another tab")
    expect(field(page)).to_have_value("a draft")  # now in a new chat
    for tab in (page, other):
        expect(tab.locator(".chat-title")).to_have_count(0)
    other.reload()
    other.get_by_text("Chats are kept in this browser only").wait_for()
    expect(other.locator(".chat-title")).to_have_count(0)


def test_a_chat_that_another_tab_adds_to_while_a_message_is_edited_stays_one(page: Page, server: Scripted) -> None:
    server.script("first", "from the other", "edited")
    say(page, "Start")
    finished(page)
    other = another_tab(page, server)
    chat_link(other, "Start").click()
    expect(answers(other)).to_have_count(1)
    button(page, "Edit").click()
    editor = page.get_by_role("textbox", name="Edit")
    editor.fill("Start anew")
    say(other, "And more")
    expect(answers(page).locator(".markdown")).to_have_text(["first", "from the other"])
    expect(editor).to_be_focused()
    expect(editor).to_have_value("Start anew")
    editor.press("Enter")
    expect(finished(page).locator(".markdown")).to_have_text("edited")
    expect(page.locator(".chat-title")).to_have_count(1)
    button(page, "Previous version").click()
    expect(answers(page).locator(".markdown")).to_have_text(["first", "from the other"])
    button(page, "Delete: Start").click()
    expect(page.locator(".chat-title")).to_have_count(0)


def test_an_answer_that_goes_on_is_the_one_that_is_stored(page: Page, server: Scripted) -> None:
    server.script(["Once upon", {"wait": True}, "never"], " a time.")
    say(page, "Tell")
    expect(answers(page)).to_contain_text("Once upon")
    field(page).press("Escape")
    finished(page)
    server.release()
    kept(page)
    other = another_tab(page, server)
    # The button belongs to the response as it was drawn, and the other tab's change arrives before the next drawing.
    page.evaluate("""async () => {
      window.actions = await import("/page/state.js");
      const { messages, leaf } = actions.state.current;
      window.drawn = messages[leaf];
    }""")
    chat_link(other, "Tell").click()
    button(other, "Rename: Tell").click()
    other.get_by_label("Rename", exact=True).fill("Told")
    other.keyboard.press("Enter")
    until(page, "() => actions.state.current.title === 'Told'")
    page.evaluate("actions.goOn(drawn)")
    expect(finished(page).locator(".markdown")).to_have_text("Once upon a time.")
    until(page, "() => !actions.state.running.size")
    kept(page)
    page.reload()
    chat_link(page, "Told").click()
    expect(answers(page).locator(".markdown")).to_have_text("Once upon a time.")


def test_undo_brings_a_deleted_chat_back_in_all_tabs(page: Page, server: Scripted) -> None:
    say(page, "Tell")
    finished(page)
    other = another_tab(page, server)
    kept(page)
    pause(page)  # the other tab, too
    button(page, "Delete: Tell").click()
    until(other, "async () => !(await import('/page/state.js')).state.conversations.length")
    page.clock.run_for(7000)  # undo stays for 8 s
    expect(other.locator(".chat-title")).to_have_count(0)
    button(page, "Undo").click()
    page.clock.resume()
    for tab in (page, other):
        chat_link(tab, "Tell").click()
        expect(answers(tab)).to_contain_text("Hello!")


def test_response_of_a_closed_tab_is_cut_off_in_the_others(page: Page, server: Scripted) -> None:
    other = beside_a_writing_one(page, server)
    expect(answers(other)).to_contain_text("Once")  # it is stored
    page.close()
    expect(finished(other)).to_contain_text("The connection was lost in the middle of this answer")
    other.reload()
    chat_link(other, "Tell").click()
    expect(finished(other)).to_contain_text("The connection was lost in the middle of this answer")


def test_another_tab_stops_the_response(page: Page, server: Scripted) -> None:
    other = beside_a_writing_one(page, server)
    button(other, "Stop").click()
    for tab in (page, other):
        expect(finished(tab)).to_contain_text("Stopped")
        expect(button(tab, "Stop")).to_have_count(0)


DEAF = """
  window.asked = 0;
  window.BroadcastChannel = class extends BroadcastChannel {
    postMessage(message) {
      if (message.ask) asked++; // for the messages that other tabs are writing
      else super.postMessage(message);
    }
  };
"""


def test_tab_that_was_taken_for_closed_goes_on_writing(page: Page, server: Scripted) -> None:
    server.script(["Once", {"wait": True}, " more"])
    say(page, "Tell")
    expect(answers(page)).to_contain_text("Once")
    kept_elsewhere = "async () => (await (await import('/page/conversations.js')).load(location.hash.slice(6)))"
    until(page, f"async () => JSON.stringify(await ({kept_elsewhere})()).includes('Once')")
    page.evaluate(
        """() => {
          window.changes = 0;
          new BroadcastChannel("charonia-conversations").onmessage = () => changes++;
        }"""
    )
    other = page.context.new_page()
    other.add_init_script(DEAF)
    opened(other, server)
    chat_link(other, "Tell").click()
    until(other, "() => asked > 0")
    until(page, "() => changes >= 2")  # the other tab ends the response, and this tab contradicts
    button(other, "Stop").click()
    for tab in (page, other):
        expect(finished(tab)).to_contain_text("Stopped")


def test_of_a_message_that_two_tabs_write_the_longer_text_is_kept(page: Page) -> None:
    """Except if the other tab has only broken it off."""
    kept = page.evaluate(
        """async () => {
          const { answerTabs, save } = await import("/page/conversations.js");
          let written = [];
          answerTabs({ written: () => written, stop: () => {} });
          const kept = [];
          for (const other of [{ state: "writing", finish: null }, { finish: "broken" }]) {
            const chat = (content, more) => ({
              id: `chat ${kept.length}`, title: "", updated: 0, leaf: "m",
              messages: { m: { id: "m", parent: null, role: "assistant", content, ...more } },
            });
            written = [];
            await save(chat("Once upon", other));
            written = ["m"];
            const mine = chat("Once", { state: "writing", finish: null });
            await save(mine);
            kept.push(mine.messages.m);
          }
          return kept.map(({ content, state }) => [content, state]);
        }"""
    )
    assert kept == [["Once upon", "writing"], ["Once", "writing"]]


def test_fifty_tabs_share_six_connections_and_the_servers_state(
    server: Scripted, new_context: Callable[..., BrowserContext]
) -> None:
    context = new_context()
    tabs = [context.new_page() for _ in range(50)]
    for tab in tabs:
        tab.goto(server.url, wait_until="commit")
    for tab in tabs:  # all of them load at the same time
        tab.get_by_label("Model", exact=True).wait_for(timeout=len(tabs) * 10_000)

    # Streams use all connections, and questions and a message wait for one.
    streaming, waiting, rest = tabs[:MAX_CONNECTIONS], tabs[MAX_CONNECTIONS], tabs[MAX_CONNECTIONS + 1 :]
    slow = [*["word "] * 3, {"wait": True}, "end"]
    server.script(*[slow] * MAX_CONNECTIONS, "at last")
    for tab in streaming:
        say(tab, "Hello?")
        expect(answers(tab)).to_contain_text("word word word")
    say(waiting, "Me too")
    for tab in rest:
        tab.evaluate(LOOK)
    expect(waiting.get_by_text("Other tabs are receiving answers")).to_be_visible()
    server.release()
    for tab in streaming:
        expect(finished(tab).locator(".markdown")).to_have_text("word word word end")
    expect(finished(waiting)).to_contain_text("at last")
    assert all(tab.locator(".banner").count() == 0 for tab in tabs)

    server.script(reason="the model is being loaded")
    tabs[0].evaluate(LOOK)
    for tab in tabs:
        tab.get_by_text("The server is not ready yet").wait_for()
    server.script()
    for tab in tabs:
        expect(tab.locator(".banner")).to_have_count(0)
