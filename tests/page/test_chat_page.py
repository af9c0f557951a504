"""Each part of the chat page in a browser, with scripted responses."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from charonia_gateway.pages import FOLDER
from chat import (
    answers,
    ask,
    button,
    chat_link,
    expect,
    field,
    finished,
    kept,
    noticed,
    opened,
    pause,
    say,
    set_functions,
    until,
)
from free_ports import free_ports
from scripted import Scripted

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Locator, Page

# --- Responses


def test_an_answer_is_streamed_with_its_figures(page: Page, server: Scripted) -> None:
    server.script(["One ", {"wait": True}, "two", " **three**", {"sleep": 0.3}, "."])
    say(page, "Count")
    expect(answers(page).first).to_contain_text("One")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    server.release()
    answer = finished(page)
    expect(answer.locator("strong")).to_have_text("three")
    expect(answer.locator(".stats")).to_have_text(
        re.compile(r"^first · 4 tokens · \d.* tokens/s · first token after \d.* s$")
    )
    expect(page.get_by_role("meter")).to_have_attribute("aria-label", "16 of 100 tokens of the context are used")
    (asked,) = server.requests()
    assert asked["messages"] == [{"role": "user", "content": "Count"}]
    # The server's measurement: an immediate response does not show how fast it was generated.
    timings = {"prompt_n": 10, "cache_n": 2, "predicted_n": 3, "predicted_per_second": 25.5}
    server.script([*"abc", {"timings": timings}, {"wait": True}, "d"])
    say(page, "Again")
    expect(answers(page).last.locator(".stats")).to_have_text("first · 3 tokens · 25.5 tokens/s")
    server.release()
    expect(finished(page, 2).locator(".stats")).to_contain_text("4 tokens · 25.5 tokens/s")
    assert server.requests()[0]["timings_per_token"] is True
    assert (asked["model"], asked["stream"]) == ("first", True)
    assert "temperature" not in asked


def test_stop_and_continue(page: Page, server: Scripted) -> None:
    timings = {"prompt_n": 10, "cache_n": 2, "predicted_n": 9, "predicted_per_second": 5}
    server.script(["Once upon", {"timings": timings}, {"wait": True}, "never"], [" a time", "."])
    say(page, "Tell")
    expect(answers(page).first).to_contain_text("9 tokens")
    field(page).press("Escape")
    expect(finished(page)).to_contain_text("Stopped")
    button(page, "Continue").click()
    answer = finished(page)
    expect(answer.locator(".markdown")).to_have_text("Once upon a time.")
    expect(answer).not_to_contain_text("Stopped")
    expect(answer.locator(".stats")).to_contain_text("11 tokens")
    conversation, going_on = server.requests()
    assert going_on["messages"] == [*conversation["messages"], {"role": "assistant", "content": "Once upon"}]
    assert (going_on["continue_final_message"], going_on["add_generation_prompt"]) == (True, False)
    expect(page.get_by_role("meter")).to_have_attribute("aria-label", "14 of 100 tokens of the context are used")


def test_the_progress_of_a_long_prompt_is_shown(page: Page, server: Scripted) -> None:
    progress = {"total": 2000, "cache": 0, "processed": 512, "time_ms": 900}
    server.script([{"prompt_progress": progress}, {"wait": True}, "Read"])
    say(page, "Much")
    expect(answers(page)).to_contain_text("Reading your message: 512 of 2,000 tokens")
    assert server.requests()[0]["return_progress"] is True
    server.release()
    expect(finished(page).locator(".markdown")).to_have_text("Read")
    expect(answers(page).locator("progress")).to_have_count(0)


def test_regenerate_edit_and_versions(page: Page, server: Scripted) -> None:
    server.script("first", "second", "third")
    say(page, "Hello?")
    finished(page)
    button(page, "Regenerate").click()
    expect(finished(page).locator(".markdown")).to_have_text("second")
    button(page, "Previous version").click()
    expect(answers(page).locator(".markdown")).to_have_text("first")
    expect(answers(page).locator(".versions")).to_have_text(re.compile(r"1 / 2"))
    button(page, "Next version").click()
    expect(answers(page).locator(".markdown")).to_have_text("second")
    button(page, "Edit").click()
    page.get_by_role("textbox", name="Edit").fill("Never sent")
    button(page, "Cancel").click()
    expect(page.get_by_role("article", name="You")).to_contain_text("Hello?")
    expect(field(page)).to_be_focused()
    field(page).press("ArrowUp")
    page.get_by_role("textbox", name="Edit").fill("Bye?")
    page.keyboard.press("Enter")
    expect(finished(page).locator(".markdown")).to_have_text("third")
    assert [one["messages"][-1]["content"] for one in server.requests()] == ["Hello?", "Hello?", "Bye?"]
    button(page, "Previous version").click()
    expect(page.get_by_role("article", name="You")).to_contain_text("Hello?")
    expect(answers(page).locator(".markdown")).to_have_text("second")


def test_reasoning_is_folded_and_not_sent_back(page: Page, server: Scripted) -> None:
    server.script([{"reasoning_content": "Hmm, "}, {"reasoning_content": "so."}, "Yes"], "Again")
    say(page, "Is it?")
    answer = finished(page)
    expect(answer.get_by_text("Hmm, so.")).to_be_hidden()
    answer.get_by_text("Reasoning").click()
    expect(answer.get_by_text("Hmm, so.")).to_be_visible()
    say(page, "And?")
    finished(page, 2)
    sent = server.requests()[-1]["messages"]
    assert sent[1] == {"role": "assistant", "content": "Yes"}


def test_calls_of_functions_are_shown_and_answered(page: Page, server: Scripted) -> None:
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "weather", "arguments": ""}}
    more = {"index": 0, "function": {"arguments": '{"city":"Rome"}'}}
    server.script([{"tool_calls": [call]}, {"tool_calls": [more]}, {"finish": "tool_calls"}], "It is sunny.")
    button(page, "Settings").click()
    page.get_by_label("Functions (JSON)").fill("{")
    page.get_by_label("Functions (JSON)").blur()
    expect(page.get_by_text("Not saved:")).to_be_visible()
    page.keyboard.press("Escape")
    tools = set_functions(page, "weather")
    say(page, "Weather?")
    expect(finished(page).locator("pre")).to_have_text('{\n  "city": "Rome"\n}')
    page.get_by_label("Result: weather").fill("sunny")
    button(page, "Send results").click()
    expect(finished(page, 2)).to_contain_text("It is sunny.")
    first, second = server.requests()
    assert first["tools"] == tools
    assert second["messages"][1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city":"Rome"}'}
    assert second["messages"][2] == {"role": "tool", "tool_call_id": "c1", "content": "sunny"}


def copy_code(page: Page, answer: Locator) -> None:
    """Click the button, and wait until it confirms the copy, which it shows for 1.5 seconds."""
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    copy = button(answer, "Copy code")
    copy.evaluate(
        """(one) => {
          window.labels = [];
          new MutationObserver(() => labels.push(one.textContent)).observe(one, { childList: true });
        }"""
    )
    copy.click()
    page.wait_for_function("() => labels.includes('Copied')")


def test_markdown(page: Page, server: Scripted) -> None:
    text = """# Title

| a | b |
|---|--:|
| 1 | 2 |

```python
def f(): return "x"
```

Inline $e^{i\\pi} = -1$ and \\(a_1\\), but $5 or $6.

$$\\sum_{i=1}^n i$$

[link](https://example.com)

- [ ] open
- [x] done

|a<br>b|
|---|

Noted[^1].

[^1]: The *note*.
"""
    answer = ask(page, server, text)
    expect(answer.locator("li.task")).to_have_text(["☐ open", "☑ done"])
    expect(answer.locator("th br")).to_have_count(1)
    expect(answer.locator("p sup")).to_have_text("[1]")
    expect(answer.locator(".footnotes li em")).to_have_text("note")
    expect(answer.locator(".katex")).to_have_count(3)
    expect(answer.locator(".katex-display")).to_have_count(1)
    expect(answer).to_contain_text("but $5 or $6.")
    expect(answer.locator("code .hljs-keyword")).to_have_text(["def", "return"])
    expect(answer.locator("td").nth(1)).to_have_css("text-align", "end")
    link = answer.get_by_role("link", name="link")
    assert link.get_attribute("rel") == "noopener noreferrer nofollow"
    # KaTeX positions elements with styles, which the page's policy must allow.
    assert answer.locator(".katex-display .vlist > span").first.evaluate("(one) => one.style.top") != ""
    copy_code(page, answer)
    assert page.evaluate("navigator.clipboard.readText()").strip() == 'def f(): return "x"'
    for message, written in ((answer, text), (page.get_by_role("article", name="You"), "Hello?")):
        button(message, "Copy").click()
        noticed(page, "Copied")
        until(page, "async (text) => text === (await navigator.clipboard.readText())", written)


def test_files_are_context(page: Page, server: Scripted, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("alpha ``` beta")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\x00\xff")
    chooser = page.get_by_label("Attach text or PDF files").last
    chooser.set_input_files([tmp_path / "notes.txt", tmp_path / "picture.png"])
    noticed(page, "picture.png is not a text file")
    for kind, name in (("drop", "dropped.txt"), ("paste", "pasted.txt")):
        taken = """(area, [kind, name]) => {
          const files = new DataTransfer();
          files.items.add(new File([`of ${name}`], name));
          const options = { bubbles: true, cancelable: true, dataTransfer: files, clipboardData: files };
          const Kind = kind === "drop" ? DragEvent : ClipboardEvent;
          return !area.dispatchEvent(new Kind(kind, options));
        }"""
        assert field(page).evaluate(taken, [kind, name])
        expect(page.locator(".chip").last).to_have_text(name)  # the file has been read
    expect(page.locator(".chip")).to_have_text(["notes.txt", "dropped.txt", "pasted.txt"])
    button(page, "Remove dropped.txt").click()
    expect(page.locator(".chip")).to_have_text(["notes.txt", "pasted.txt"])
    say(page, "Sum up")
    finished(page)
    (asked,) = server.requests()
    notes = "notes.txt\n````\nalpha ``` beta\n````"
    assert asked["messages"][0]["content"] == f"{notes}\n\npasted.txt\n```\nof pasted.txt\n```\n\nSum up"


PDF = b"""%PDF-1.4
1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj
2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj
3 0 obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 200 200]/Contents 4 0 R/Resources<</Font<</F 5 0 R>>>>>>endobj
4 0 obj<</Length 66>>stream
BT /F 12 Tf 9 99 Td (Two lines) Tj 0 -20 Td (of a page) Tj ET     
endstream endobj
5 0 obj<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>endobj
trailer<</Root 1 0 R>>
"""


def test_pdf_and_older_encodings_are_read(page: Page, server: Scripted) -> None:
    files = {
        "a.pdf": PDF,
        "picture.pdf": PDF.replace(b"Tj", b"% "),
        "broken.pdf": b"%PDF-nothing",
        "b.txt": "größer".encode("utf-16"),
        "c.txt": "größer".encode("latin-1"),
        "d.pdf": PDF.replace(b"Two", b"Ten"),
    }
    # The worker ends a document only after the next one has begun, as on a busy machine.
    page.evaluate("""() => {
      const send = Worker.prototype.postMessage;
      Worker.prototype.postMessage = function (message, ...rest) {
        setTimeout(() => send.call(this, message, ...rest), message.action === "Terminate" ? 500 : 0);
      };
    }""")
    payload = [{"name": name, "mimeType": "", "buffer": content} for name, content in files.items()]
    page.get_by_label("Attach text or PDF files").last.set_input_files(payload)
    noticed(page, "picture.pdf has no text")
    noticed(page, "broken.pdf cannot be read")
    say(page, "Sum up")
    finished(page)
    (asked,) = server.requests()
    texts = {"a.pdf": "Two lines\nof a page", "b.txt": "größer", "c.txt": "größer", "d.pdf": "Ten lines\nof a page"}
    parts = [f"{name}\n```\n{text}\n```" for name, text in texts.items()]
    assert asked["messages"][0]["content"] == "\n\n".join([*parts, "Sum up"])


# --- Hostile responses

HOSTILE = """<script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">
<iframe src="https://evil.example"></iframe>

[a](javascript:window.hacked=3) [b](data:text/html,<script>alert(1)</script>) <javascript:alert(1)> [c](//x.example)
![pixel](https://evil.example/p.png?secret) ![](data:image/svg+xml,<svg/onload=alert(1)>)

[d]: https://evil.example/ "x\\" onmouseover=\\"window.hacked=4"
[d] <a href="javascript:alert(5)">e</a> <style>body{display:none}</style>

$\\href{javascript:alert(1)}{x}$ $\\includegraphics{https://evil.example/k.png}$ $\\htmlStyle{color:red}{y}$
$\\rule{9999em}{9999em}$

```html"><script>alert(6)</script>
<script>alert(7)</script>
```

safe\u202etxt.exe\u202c zero\u200bwidth \U000e0068\U000e0069 done $a\u2066$
"""
HOSTILE_CODE = "if admin:  # \u202e no\u200bthing\n    pass\n"


def test_nothing_of_a_hostile_answer_is_run_or_fetched(page: Page, server: Scripted) -> None:
    answer = ask(page, server, HOSTILE)
    expect(answer.locator(".formula:has(.katex)")).to_have_count(4)  # their library is fetched late
    expect(answer).to_contain_text("<script>window.hacked = 1</script>")
    assert page.evaluate("window.hacked") is None
    assert answer.locator("script, img, iframe, style, object, svg[onload], [onerror], [onmouseover]").count() == 0
    addresses = answer.locator("a").evaluate_all("(links) => links.map((link) => link.getAttribute('href'))")
    assert addresses == ["https://evil.example", "https://evil.example/p.png?secret", "https://evil.example/"]
    expect(answer.locator("a.picture")).to_have_text("pixel")
    marks = answer.locator(".hidden-character").all_text_contents()
    assert marks == ["U+202E", "U+202C", "U+200B", "U+E0068", "U+E0069", "U+2066"]
    box = answer.locator(".markdown").bounding_box()
    assert box and box["width"] <= 1200 and box["height"] < 5000
    function = {"name": "safe\u202etxt", "arguments": '{"path": "a\u200bb", "mode": "\\u2066"}'}
    server.script([{"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": function}]}])
    say(page, "Call")
    call = finished(page, 2).locator(".call")
    expect(call.locator("code")).to_have_text("safeU+202Etxt")
    expect(call.locator("pre")).to_have_text('{\n  "path": "aU+200Bb",\n  "mode": "U+2066"\n}')
    assert call.locator(".hidden-character").count() == 3


def test_the_users_texts_show_hidden_characters(page: Page, server: Scripted) -> None:
    function = {"name": "get", "arguments": "{}"}
    call = {"index": 0, "id": "c1", "type": "function", "function": function}
    server.script([{"tool_calls": [call]}, {"finish": "tool_calls"}], "done")
    say(page, "a\u00adb\u200e\u061c\U000e0101")
    shown = "aU+00ADbU+200EU+061CU+E0101"
    finished(page)
    expect(page.locator(".message.user .bubble")).to_have_text(shown)
    expect(page.locator("nav").get_by_text(shown)).to_have_count(1)
    page.get_by_label("Result: get").fill("c\u200fd")
    button(page, "Send results").click()
    expect(page.locator(".message.tool pre")).to_have_text("cU+200Fd")


@pytest.mark.parametrize("language", ["python", "unknown"])
def test_code_is_copied_unchanged_and_shows_hidden_characters(page: Page, server: Scripted, language: str) -> None:
    answer = ask(page, server, f"```{language}\n{HOSTILE_CODE}```")
    expect(answer.locator(".hljs-keyword")).to_have_count(2 if language == "python" else 0)
    expect(answer.locator("code .hidden-character")).to_have_text(["U+202E", "U+200B"])
    copy_code(page, answer)
    assert page.evaluate("navigator.clipboard.readText()") == HOSTILE_CODE


def test_a_huge_answer_does_not_stop_the_page(page: Page, server: Scripted) -> None:
    table = "|" + "x|" * 50 + "\n|" + "-|" * 50 + "\n" + ("|" + "1|" * 50 + "\n") * 400
    nested = "> " * 2000 + "deep\n\n" + "- " * 2000 + "deep\n\n" + "[" * 5000 + "\n\n" + "*a " * 5000
    # Chromium crashes if it draws the fractions. KaTeX has no stack for the braces.
    formulas = "$" + "\\frac{" * 500 + "x" + "}{y}" * 500 + "$ and $" + "{" * 4900 + "x" + "}" * 4900 + "$ and $y$"
    server.script([formulas, "\n\n", table, "\n\n", nested])
    say(page, "Much")
    answer = finished(page)
    expect(answer.locator(".formula:has(.katex)")).to_have_text(re.compile("^y"))
    field(page).fill("still here")
    assert answer.locator("td").count() == 400 * 50
    box = answer.locator(".table").bounding_box()
    assert box and box["width"] < 800
    # Again after the page has been drawn with its end in view, before it notices this.
    page.wait_for_function(
        """() => {
          document.getElementById("scroller").scrollTop = 0;
          return document.querySelector(".to-end") !== null;
        }"""
    )
    button(page, "To the end").click()
    expect(button(page, "To the end")).to_have_count(0)
    expect(page.locator("article").last.locator(".actions")).to_be_in_viewport()


# --- Servers that are busy or away, or require a key


def test_a_busy_server_is_asked_again(page: Page, server: Scripted) -> None:
    def come_again(status: int, code: str | None, error: str) -> dict[str, Any]:
        return {"status": status, "code": code, "error": error, "headers": {"Retry-After": "3000"}}

    page.clock.install()  # the test ends each wait after the page has shown it
    page.evaluate(
        """() => {
          window.spoken = [];
          const note = () => {
            const said = document.querySelector(".visually-hidden[role=status]").textContent;
            if (said !== spoken.at(-1)) spoken.push(said);
          };
          new MutationObserver(note).observe(document.body, { subtree: true, childList: true, characterData: true });
        }"""
    )

    server.script(
        come_again(429, "overloaded", "the queue is full"),
        come_again(429, "rate_limit_exceeded", "the key 'ann' has 4 requests running"),
        come_again(503, "model_not_loaded", "unloaded"),
        come_again(503, "service_unavailable", "no server can take requests"),
        {**come_again(502, None, "of a proxy"), "page": "<html>Bad gateway</html>"},
        "At last",
    )
    say(page, "Please")
    waits = [
        "The server is overloaded. Next try in {} s (429: the queue is full)",
        "A limit of your API key is reached. Next try in {} s (429: the key 'ann' has 4 requests running)",
        "The server has not loaded first now. Next try in {} s; you can stop and choose another model",
        "The server is not available, or is being restarted. Next try in {} s (503: no server can take requests)",
        "The server is not available, or is being restarted. Next try in {} s (502: Bad Gateway)",
    ]
    for wait in waits:
        begin, _, end = map(re.escape, wait.partition("{}"))
        expect(page.locator(".waiting")).to_have_text(re.compile(rf"^{begin}(3000|2\d\d\d){end}$"))
        page.clock.fast_forward("01:00:00")
    expect(finished(page)).to_contain_text("At last")
    # A screen reader reads each message once, but not the server's text.
    assert [re.sub(r"\d+", "{}", words) for words in page.evaluate("spoken") if "Next try" in words] == [
        wait.partition(" (")[0] for wait in waits[:4]
    ]
    assert len(server.requests()) == 6


def test_a_refusal_is_shown(page: Page, server: Scripted) -> None:
    answer = ask(page, server, {"status": 400, "error": "temperature: too hot"})
    expect(answer.get_by_role("alert")).to_have_text("The server rejected the request: 400: temperature: too hot")
    answer = ask_again(page, server, ["Half", {"error": {"message": "no memory", "code": 500}}], version=2)
    expect(answer).to_contain_text("Half")
    expect(answer.get_by_role("alert")).to_have_text("The server rejected the request: no memory")
    gone = {"message": "the server went down", "type": "service_unavailable_error", "code": "service_unavailable"}
    for version, reply in enumerate((["Half", {"cut": True}], ["Half", {"error": gone}]), 3):
        answer = ask_again(page, server, reply, version)
        expect(answer).to_contain_text("The connection was lost in the middle of this answer")


def ask_again(page: Page, server: Scripted, reply: Any, version: int) -> Locator:
    server.script(reply)
    button(page, "Regenerate").click()
    expect(answers(page).locator(".versions")).to_have_text(re.compile(f"{version} / {version}"))  # the newest one
    return finished(page)


def test_a_server_that_dies_in_mid_answer_and_comes_back(new_context: Callable[..., BrowserContext]) -> None:
    server = Scripted(*free_ports(1))
    server.start()
    try:
        page = opened(new_context().new_page(), server)
        server.script(["The beginning", {"wait": True}, {"die": True}])
        say(page, "Tell")
        expect(answers(page)).to_contain_text("The beginning")
        server.release()
        expect(finished(page)).to_contain_text("The connection was lost in the middle of this answer")
        expect(answers(page)).to_contain_text("The beginning")
        expect(page.get_by_text("The server cannot be reached. What you have typed is kept")).to_be_visible()
        say(page, "And then?")
        expect(page.locator(".waiting")).to_contain_text("Your message is sent as soon as it is back")
        field(page).fill("a draft")
        server.start()
        expect(finished(page, 2)).to_contain_text("Hello!")
        expect(page.get_by_text("The server cannot be reached")).to_have_count(0)
        expect(field(page)).to_have_value("a draft")
        kept(page)
        page.reload()
        expect(field(page)).to_have_value("a draft")
        expect(answers(page)).to_have_count(2)
    finally:
        server.stop()


def test_a_server_that_is_not_ready(page: Page, server: Scripted) -> None:
    away = {"status": 503, "code": "service_unavailable", "error": "no server", "headers": {"Retry-After": "0.5"}}
    server.script(away, away, reason="the model is being loaded")
    page.reload()
    banner = page.locator(".banner")
    expect(banner).to_contain_text("The server is not ready yet")
    expect(banner.get_by_text("503: the model is being loaded")).to_be_hidden()
    banner.get_by_text("Details").click()
    expect(banner.get_by_text("503: the model is being loaded")).to_be_visible()
    say(page, "Hello?")
    expect(page.get_by_text("Your message is sent as soon as it is back (503: no server)")).to_be_visible()
    asked = server.health_asked()
    while server.health_asked() < asked + 2:
        page.wait_for_timeout(50)
    assert len(server.requests()) == 1  # each request counts against the limits of a key
    server.script()
    noticed(page, "The server is back")
    expect(finished(page)).to_contain_text("Hello!")


def test_a_server_that_comes_back_with_another_model(page: Page, server: Scripted) -> None:
    page.get_by_label("Model", exact=True).select_option("second/model")
    server.script(models=["third"])  # while the server is away, unnoticed by the page
    say(page, "Hello?")
    expect(finished(page)).to_contain_text("Hello!")
    assert [one["model"] for one in server.requests()] == ["second/model", "third"]
    expect(page.get_by_label("Model", exact=True)).to_have_value("third")
    server.script(reason="restarting")
    page.evaluate("dispatchEvent(new Event('online'))")
    expect(page.get_by_text("The server is not ready yet")).to_be_visible()
    server.script()
    expect(page.get_by_label("Model", exact=True)).to_have_value("second/model")  # the chosen one


def test_formulas_and_colours_come_when_their_libraries_can_be_fetched(page: Page, server: Scripted) -> None:
    refused: list[str] = []

    def refuse_once(route: Any) -> None:
        address = route.request.url.partition("?")[0]
        if address in refused:
            route.continue_()
        else:
            refused.append(address)
            route.abort()

    page.route("**/katex.min.*", refuse_once)
    page.route("**/highlight.min.js*", refuse_once)
    answer = ask(page, server, "$a$\n\n$b$\n\n```python\ndef f(): pass\n```")
    expect(answer.locator(".formula")).to_have_count(2)
    server.script("$c$\n\n```python\ndef g(): pass\n```")
    say(page, "More")
    finished(page, 2)
    expect(page.locator(".katex")).to_have_count(3)
    expect(page.locator(".hljs-keyword")).to_have_text(["def", "pass", "def", "pass"])
    assert len(refused) == 3


@pytest.mark.parametrize("remember", [False, True])
def test_a_key_is_asked_for(server: Scripted, new_context: Callable[..., BrowserContext], remember: bool) -> None:
    server.script(key="k-123")
    context = new_context()
    page = context.new_page()
    page.goto(server.url)
    dialog = page.get_by_role("dialog", name="API key")
    expect(dialog.locator("p")).to_have_text("This server needs an API key. Its operator can give you one")
    none = "it allows only models that this server does not have"
    refused = {
        "wrong": "401: no such key",
        "of-metrics": "403: no access",
        "“k-123”": "it has characters that are not allowed in a key",
    }
    for wrong, said in {**refused, "of-no-model": none}.items():
        dialog.get_by_label("Key", exact=True).fill(wrong)
        button(dialog, "Save").click()
        expect(dialog).to_contain_text(f"The server rejected this key: {said}")
    button(dialog, "Cancel").click()
    expect(dialog).to_be_hidden()  # it closes with the next frame; earlier input would go to the dialog
    say(page, "Hello?")
    expect(dialog).to_contain_text(none)
    dialog.get_by_label("Key", exact=True).fill(" k-\u200b123\n")
    dialog.get_by_label("Remember").set_checked(remember)
    button(dialog, "Save").click()
    expect(page.get_by_label("Model", exact=True)).to_have_value("first")
    expect(finished(page)).to_contain_text("Hello!")
    assert [one["model"] for one in server.requests()] == ["first"]
    assert page.evaluate("[sessionStorage.length, localStorage['charonia-key'] ?? null]") == (
        [0, "k-123"] if remember else [1, None]
    )
    another = context.new_page()  # each tab has its own session
    posts: list[str] = []  # each request counts against the limits of the key
    another.on("request", lambda request: posts.append(request.url) if request.method == "POST" else None)
    another.goto(server.url)
    if remember:
        say(another, "Hello?")
        finished(another)
        expect(another.get_by_role("meter")).to_have_attribute("max", "100")
        assert posts == [f"{server.url}/v1/chat/completions"]
        button(another, "Settings").click()
        button(another, "Forget the key").click()
        assert another.evaluate("localStorage['charonia-key'] ?? null") is None
    else:
        expect(another.get_by_role("dialog", name="API key")).to_be_visible()


def test_a_key_of_access_admin_loads_a_model(page: Page, server: Scripted) -> None:
    button(page, "Settings").click()
    expect(page.get_by_label("Load a model")).to_have_count(0)  # the page has no key
    page.evaluate("sessionStorage.setItem('charonia-key', 'secret')")
    page.reload()
    button(page, "Settings").click()
    order = page.get_by_label("Load a model")
    order.fill("other")
    order.press("Enter")
    expect(page.get_by_text("400: there is no model other")).to_be_visible()
    order.fill("other=owner/other")
    order.press("Enter")
    expect(page.get_by_text("other=owner/other is loaded")).to_be_visible()
    page.keyboard.press("Escape")
    page.get_by_label("Model", exact=True).select_option("other")
    say(page, "Hello?")
    finished(page)
    assert server.requests()[0]["model"] == "other"


def test_a_key_that_no_longer_holds_loses_no_message(page: Page, server: Scripted) -> None:
    server.script(key="new")
    say(page, "Hello?")
    dialog = page.get_by_role("dialog", name="API key")
    button(dialog, "Cancel").click()
    expect(finished(page).get_by_role("alert")).to_contain_text("This server needs an API key")
    button(page, "Regenerate").click()
    dialog.get_by_label("Key", exact=True).fill("new")
    dialog.get_by_label("Key", exact=True).press("Enter")
    expect(finished(page)).to_contain_text("Hello!")


# --- Conversations


def test_conversations_are_kept_found_renamed_and_removed(page: Page, server: Scripted) -> None:
    server.script("Paris", "Oxygen")
    say(page, "Capital of France?")
    finished(page)
    button(page, "New chat").first.click()
    say(page, "What do we breathe?")
    expect(finished(page)).to_contain_text("Oxygen")
    kept(page)
    page.reload()
    titles = page.locator(".chat-title")
    expect(titles).to_have_text(["What do we breathe?", "Capital of France?"])
    page.keyboard.press("Alt+k")
    page.keyboard.type("paris")
    expect(titles).to_have_text(["Capital of France?"])
    titles.first.click()
    expect(answers(page)).to_contain_text("Paris")
    page.get_by_label("Search chats").fill("nothing has this")
    expect(page.get_by_text("No chat has these words")).to_be_visible()
    page.get_by_label("Search chats").fill("")
    button(page, "Rename: Capital of France?").click()
    expect(page.get_by_label("Rename", exact=True)).to_be_focused()
    page.keyboard.type("Cities")
    page.keyboard.press("Enter")
    expect(titles).to_have_text(["What do we breathe?", "Cities"])
    pause(page)
    button(page, "Delete: Cities").click()
    page.clock.run_for(1000)
    expect(titles).to_have_text(["What do we breathe?"])
    button(page, "Undo").click()
    page.clock.resume()
    expect(titles).to_have_count(2)


def test_every_chat_has_an_address(page: Page, server: Scripted) -> None:
    server.script("Paris", "Oxygen")
    say(page, "Capital of France?")
    finished(page)
    first = page.url
    assert "#chat/" in first
    button(page, "New chat").first.click()
    assert page.url == f"{server.url}/"
    say(page, "What do we breathe?")
    expect(finished(page)).to_contain_text("Oxygen")
    second = page.url
    kept(page)
    page.reload()
    expect(answers(page)).to_contain_text("Oxygen")
    chat_link(page, "Capital of France?").click()
    expect(answers(page)).to_contain_text("Paris")
    assert page.url == first
    page.go_back()
    expect(answers(page)).to_contain_text("Oxygen")
    assert page.url == second
    page.go_back()
    expect(answers(page)).to_contain_text("Paris")  # the new chat has become the second one
    button(page, "Delete: Capital of France?").click()
    expect(answers(page)).to_have_count(0)
    assert page.url == f"{server.url}/"
    page.goto(first)
    noticed(page, "This browser has no such chat")
    assert page.url == f"{server.url}/"


def test_export_and_import(page: Page, server: Scripted, tmp_path: Path) -> None:
    server.script([{"reasoning_content": "Hm"}, "Paris"])
    say(page, "Capital of France?")
    finished(page)
    with page.expect_download() as download:
        button(page, "Export chats").click()
    exported = tmp_path / "chats.json"
    download.value.save_as(exported)
    chooser = page.get_by_label("Import chats")
    chooser.set_input_files(exported)
    noticed(page, "All chats of this file are here already")
    button(page, "Delete: Capital of France?").click()
    expect(page.locator(".chat-title")).to_have_count(0)
    chooser.set_input_files(exported)
    noticed(page, "1 chat imported")
    page.locator(".chat-title").click()
    expect(answers(page).locator(".markdown").last).to_have_text("Paris")
    kept(page)
    page.reload()
    expect(page.locator(".chat-title")).to_have_text(["Capital of France?"])

    file = json.loads(exported.read_text())
    (message, *_) = file["conversations"][0]["messages"].values()
    for wrong, said in (
        ('{"format": 1}', "expected a file that this page, ChatGPT, Open WebUI or llama.cpp's page has exported"),
        ("no JSON", "Unexpected token"),
    ):
        exported.write_text(wrong)
        chooser.set_input_files(exported)
        noticed(page, f"This file cannot be imported: {said}")
    message["parent"] = message["id"]  # a cycle
    exported.write_text(json.dumps(file))
    chooser.set_input_files(exported)
    noticed(page, "is not a message before")
    expect(page.locator(".chat-title")).to_have_count(1)
    file["conversations"].append({"id": "other", "title": "Other", "messages": {}, "leaf": None, "toolsOff": True})
    exported.write_text(json.dumps(file))
    chooser.set_input_files(exported)
    noticed(page, "1 chat imported. 1 chat is invalid: parent: ")


def test_import_keeps_only_sampling_parameters_of_the_page(page: Page, server: Scripted) -> None:
    sampling = {"temperature": 0.5, "messages": "hidden", "top_p": [1], "stop": "x"}
    chat = {"id": "c", "title": "Imported", "messages": {}, "leaf": None, "settings": {"sampling": sampling}}
    file = json.dumps({"format": "charonia-chat-1", "conversations": [chat]})
    payload = {"name": "chats", "mimeType": "", "buffer": file.encode()}
    page.get_by_label("Import chats").set_input_files(payload)
    noticed(page, "1 chat imported. These sampling parameters were left out: messages, top_p, stop")
    chat_link(page, "Imported").click()
    server.script("Hi")
    say(page, "Hello")
    finished(page)
    (body,) = server.requests()
    assert body["temperature"] == 0.5 and not {"top_p", "stop"} & set(body)
    assert body["messages"] == [{"role": "user", "content": "Hello"}]


CHATGPT_NODES = {
    "root": {"parent": None, "message": None},
    "s": {"parent": "root", "message": ("system", {"content_type": "text", "parts": [""]})},
    "u": {"parent": "s", "message": ("user", {"content_type": "text", "parts": ["Hi?"]})},
    "t": {"parent": "u", "message": ("assistant", {"content_type": "thoughts", "thoughts": []})},
    "a": {"parent": "t", "message": ("assistant", {"content_type": "text", "parts": ["Hi!"]})},
}


def chatgpt_node(name: str) -> dict[str, Any]:
    node: dict[str, Any] = CHATGPT_NODES[name]
    said = node["message"] and {"author": {"role": node["message"][0]}, "content": node["message"][1]}
    return {"id": name, "parent": node["parent"], "message": said, "children": []}


CHATGPT = {
    "conversation_id": "c1",
    "title": "Of ChatGPT",
    "create_time": 1.5,
    "update_time": 2.5,
    "current_node": "a",
    "mapping": {name: chatgpt_node(name) for name in CHATGPT_NODES},
}
WEBUI_MESSAGES = [
    {"id": "u", "parentId": None, "role": "user", "content": "Hi?", "timestamp": 1},
    {"id": "a", "parentId": "u", "role": "assistant", "content": '<details type="reasoning">Hm</details>\nHi!'},
]
OPEN_WEBUI = {
    "id": "c2",
    "title": "Of Open WebUI",
    "chat": {"history": {"currentId": "a", "messages": {one["id"]: one for one in WEBUI_MESSAGES}}},
    "created_at": 1,
    "updated_at": 2,
}
LLAMA_CPP: dict[str, Any] = {
    "conv": {"id": "c3", "name": "Of llama.cpp", "lastModified": 2000, "currNode": "a"},
    "messages": [
        {"id": "r", "type": "root", "role": "system", "content": "", "parent": None, "timestamp": 1},
        {"id": "u", "type": "text", "role": "user", "content": "Hi?", "parent": "r", "timestamp": 1},
        {"id": "a", "type": "text", "role": "assistant", "content": "Hi!", "parent": "u", "timestamp": 2},
    ],
}
LLAMA_CPP_LINES = [
    {"type": "session", "harness": "llama.app", **LLAMA_CPP["conv"]},
    *[{"type": "message", "message": one} for one in LLAMA_CPP["messages"]],
]


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def as_lines(values: list[Any]) -> bytes:
    return b"\n".join(map(as_json, values))


def as_zip(**files: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name.replace("__", "."), content)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("title", "file"),
    [
        ("Of ChatGPT", as_json([CHATGPT])),
        ("Of ChatGPT", as_zip(user__json=b"no chats", conversations__json=as_json([CHATGPT]))),
        ("Of Open WebUI", as_json([OPEN_WEBUI])),
        ("Of llama.cpp", as_json(LLAMA_CPP)),
        ("Of llama.cpp", as_lines(LLAMA_CPP_LINES)),
        ("Of llama.cpp", as_zip(one__jsonl=as_lines(LLAMA_CPP_LINES))),
    ],
    ids=["ChatGPT", "ChatGPT-ZIP", "Open-WebUI", "llama.cpp", "llama.cpp-lines", "llama.cpp-ZIP"],
)
def test_chats_of_other_pages_are_imported_once(page: Page, server: Scripted, title: str, file: bytes) -> None:
    payload = {"name": "chats", "mimeType": "", "buffer": file}
    page.get_by_label("Import chats").set_input_files(payload)
    noticed(page, "1 chat imported")
    page.get_by_label("Import chats").set_input_files(payload)
    noticed(page, "All chats of this file are here already")
    chat_link(page, title).click()
    expect(answers(page).locator(".markdown")).to_have_text("Hi!")
    say(page, "And?")
    finished(page, 2)
    assert [one["content"] for one in server.requests()[0]["messages"]] == ["Hi?", "Hi!", "And?"]


# --- Settings, languages, looks


def test_settings_are_the_gateways(page: Page, server: Scripted) -> None:
    button(page, "Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    temperature = page.get_by_label("temperature")
    assert (temperature.get_attribute("min"), temperature.get_attribute("max")) == ("0", "2")
    expect(temperature).to_have_attribute("placeholder", "0.6")  # the model's default
    expect(page.get_by_label("top_p")).to_have_attribute("placeholder", "default")
    expect(page.locator("#help-temperature")).to_have_text("0 is greedy; unset: the model's default · 0 to 2")
    temperature.fill("9")
    temperature.blur()  # the value is rejected
    page.get_by_label("reasoning_effort").select_option("high")
    button(page, "Reset to defaults").click()
    expect(temperature).to_have_value("")
    expect(page.get_by_label("reasoning_effort")).to_have_value("")
    page.get_by_label("top_k").fill("40")
    page.get_by_label("reasoning_effort").select_option("low")
    page.get_by_label("Colours").select_option("dark")
    for name in page.locator(".parameter label").all_text_contents():
        assert page.locator(f"#help-{name}").text_content(), name
    page.keyboard.press("Escape")
    page.get_by_label("Model", exact=True).select_option("second/model")
    button(page, "Hide chats").click()
    page.reload()
    page.get_by_label("Model", exact=True).wait_for()
    expect(page.locator("body")).to_have_css("background-color", "rgb(28, 25, 23)")
    expect(page.get_by_label("Search chats")).to_be_hidden()
    button(page, "Show chats").click()
    expect(page.get_by_label("Search chats")).to_be_visible()
    say(page, "Hello?")
    finished(page)
    (asked,) = server.requests()
    assert asked["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (asked["model"], asked["top_k"], asked["reasoning_effort"]) == ("second/model", 40, "low")
    assert "temperature" not in asked


def test_a_chat_has_settings_of_its_own_and_presets(page: Page, server: Scripted) -> None:
    system, top_k = page.get_by_label("System prompt"), page.get_by_label("top_k")

    def sent() -> tuple[Any, Any]:
        say(page, "Hello?")
        finished(page)
        (asked,) = server.requests()
        server.script()
        return asked["messages"][0]["content"], asked.get("top_k")

    button(page, "Settings").click()
    system.fill("For all chats")
    page.keyboard.press("Escape")
    expect(system).to_have_count(0)  # a late drawing of this text would replace the next one
    button(page, "Settings").click()
    page.get_by_label("Settings for this chat only").check()
    system.fill("For this chat")
    top_k.fill("5")
    top_k.blur()
    page.get_by_label("Name of a preset").fill("five")
    button(page, "Save these settings").click()
    page.keyboard.press("Escape")
    assert sent() == ("For this chat", 5)
    kept(page)
    page.reload()
    button(page, "Regenerate").click()
    expect(answers(page).locator(".versions")).to_have_text(re.compile("2 / 2"))
    finished(page)
    assert server.requests()[0]["top_k"] == 5
    server.script()
    button(page, "New chat").first.click()
    assert sent() == ("For all chats", None)
    button(page, "New chat").first.click()
    button(page, "Settings").click()
    expect(system).to_have_value("For all chats")
    button(page, "five").click()
    expect(system).to_have_value("For this chat")
    page.keyboard.press("Escape")
    assert sent() == ("For this chat", 5)
    chat_link(page, "Hello?").last.click()
    button(page, "Settings").click()
    page.get_by_label("Settings for this chat only").uncheck()
    expect(top_k).to_have_value("5")  # of the preset, for all chats
    button(page, "Delete the preset five").click()
    expect(button(page, "five")).to_have_count(0)


def test_the_form_of_the_answer_is_sent(page: Page, server: Scripted) -> None:
    form = page.get_by_label("Form of the answer")

    def sent() -> dict[str, Any]:
        page.keyboard.press("Escape")
        button(page, "New chat").first.click()
        say(page, "Hello?")
        expect(button(finished(page), "Continue")).to_have_count(0)  # only the rest would have the form
        body = server.requests()[-1]
        button(page, "Settings").click()
        return {name: body[name] for name in ("response_format", "structured_outputs") if name in body}

    server.script(*[["half", {"finish": "length"}]] * 3)
    button(page, "Settings").click()
    form.select_option("json_object")
    assert sent() == {"response_format": {"type": "json_object"}}
    form.select_option("json_schema")
    schema = page.get_by_role("textbox", name="JSON schema")
    schema.fill("{")
    schema.blur()
    expect(page.get_by_text("Not saved:")).to_be_visible()
    schema.fill('{"type": "object"}')
    schema.blur()
    described = {"name": "answer", "schema": {"type": "object"}, "strict": True}
    assert sent() == {"response_format": {"type": "json_schema", "json_schema": described}}
    form.select_option("regex")
    page.get_by_role("textbox", name="Regular expression").fill("yes|no")
    page.get_by_role("textbox", name="Regular expression").blur()
    assert sent() == {"structured_outputs": {"regex": "yes|no"}}


def test_functions_are_off_for_a_chat_and_warn_if_the_model_has_none(page: Page, server: Scripted) -> None:
    server.script(accepts_tools=False)
    page.reload()
    page.get_by_label("Model", exact=True).wait_for()
    switch = button(page, "Functions in this chat")
    expect(switch).to_have_count(0)
    set_functions(page, "weather")
    expect(page.get_by_text("first cannot call functions")).to_be_visible()
    switch.click()
    expect(page.get_by_text("first cannot call functions")).to_have_count(0)
    say(page, "Hello?")
    finished(page)
    assert "tools" not in server.requests()[0]
    button(page, "New chat").first.click()
    expect(switch).to_have_attribute("aria-pressed", "true")


def test_models_that_give_no_text_are_not_offered(page: Page, server: Scripted) -> None:
    server.script(tasks={"first": "embed"})
    page.reload()
    expect(page.get_by_label("Model", exact=True).locator("option")).to_have_text(["second/model"])
    expect(page.locator(".banner")).to_have_count(0)
    server.script(tasks={"first": "embed", "second/model": "score"})
    page.reload()
    expect(page.locator(".banner")).to_contain_text("No model of this server chats")
    expect(page.get_by_label("Model", exact=True).locator("option")).to_have_count(0)


def test_chinese(server: Scripted, new_context: Callable[..., BrowserContext]) -> None:
    page = new_context(locale="zh-CN").new_page()
    page.goto(server.url)
    expect(page.locator("html")).to_have_attribute("lang", "zh")
    page.get_by_label("消息").fill("你好")
    page.get_by_label("消息").press("Enter")
    expect(page.locator(".stats")).to_contain_text("个词元")
    page.get_by_role("button", name="设置").click()
    expect(page.locator("#help-temperature")).to_contain_text("0 到 2")
    page.get_by_label("语言").select_option("en")
    expect(page.get_by_role("heading", name="Settings")).to_be_visible()


def test_both_languages_have_the_same_texts_and_values() -> None:
    english, chinese = json.loads((FOLDER / "languages.json").read_text(encoding="utf-8")).values()
    assert english.keys() == chinese.keys()
    for name in english.keys() - {"help"}:
        places = [set(re.findall(r"{\d}", json.dumps(one[name]))) for one in (english, chinese)]
        assert places[0] == places[1], name


def test_phone(server: Scripted, new_context: Callable[..., BrowserContext]) -> None:
    page = new_context(viewport={"width": 360, "height": 700}, has_touch=True, color_scheme="dark").new_page()
    page.goto(server.url)
    ask(page, server, "wide " * 50 + "\n\n```\n" + "x" * 300 + "\n```\n\n|" + "column|" * 20 + "\n|" + "-|" * 20)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(28, 25, 23)"
    expect(page.get_by_label("Search chats")).to_be_hidden()
    button(page, "Show chats").click()
    chat_link(page, "Hello?").click()
    expect(page.get_by_label("Search chats")).to_be_hidden()
    button(page, "Settings").click()
    page.get_by_label("temperature").wait_for()
    assert page.get_by_role("dialog").evaluate("(one) => one.scrollWidth - one.clientWidth") == 0


def test_the_keyboard_reaches_everything(page: Page) -> None:
    expect(field(page)).to_be_focused()
    page.keyboard.press("Alt+,")
    expect(page.get_by_role("dialog", name="Settings")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog", name="Settings")).to_be_hidden()
    page.keyboard.press("Alt+k")
    expect(page.get_by_label("Search chats")).to_be_focused()
    page.keyboard.press("Alt+n")
    expect(field(page)).to_be_focused()
    field(page).fill("line")
    field(page).press("Shift+Enter")
    expect(field(page)).to_have_value("line\n")
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, textarea, a")]
          .filter((one) => !(one.getAttribute("aria-label") || one.textContent.trim() || one.labels?.length))
          .map((one) => one.outerHTML)"""
    )
    assert unnamed == []


def test_all_modules_are_preloaded(page: Page) -> None:
    loaded, announced = page.evaluate(
        """[performance.getEntriesByType("resource").map((one) => one.name).filter((one) => /\\.m?js$/.test(one)),
          [...document.querySelectorAll("link[rel=modulepreload], script")].map((one) => one.href || one.src)]"""
    )
    assert sorted(set(loaded)) == sorted(announced)


def test_slow_network(page: Page, server: Scripted) -> None:
    session = page.context.new_cdp_session(page)
    session.send("Network.enable")
    slow = {"offline": False, "latency": 200, "downloadThroughput": 4000, "uploadThroughput": 4000}
    session.send("Network.emulateNetworkConditions", slow)
    answer = ask(page, server, "word " * 60)
    assert answer.locator(".markdown").inner_text() == ("word " * 60).strip()


def test_the_documentation_works_offline(page: Page, server: Scripted) -> None:
    button(page, "Settings").click()
    with page.expect_popup() as opened:
        page.get_by_role("link", name="API documentation").click()
    expect(opened.value.get_by_text("/v1/chat/completions").first).to_be_visible()
    expect(opened.value.get_by_role("link", name="openapi.json")).to_be_visible()
    expect(button(opened.value, "Authorize")).to_have_count(0)


def test_the_documentation_asks_for_the_key(page: Page, server: Scripted) -> None:
    server.script(key="k-123")
    page.goto(f"{server.url}/docs")
    key = page.get_by_label("Key", exact=True)
    expect(page.get_by_role("alert")).to_have_text("This server needs an API key. Its operator can give you one")
    expect(key).to_be_focused()
    key.fill("wrong")
    key.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("The server rejected this key: no such key")
    key.fill("k-1\u200b23")  # not allowed in a header
    key.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("The server rejected this key:")
    expect(key).to_have_value("")
    key.fill("k-123")
    button(page, "Save").click()
    page.get_by_text("/v1/models", exact=True).click()
    expect(key).to_have_count(0)
    button(page, "Try it out").click()
    button(page, "Execute").click()
    expect(page.locator(".live-responses-table .response-col_status").last).to_have_text("200")
    expect(page.locator(".curl-command")).to_contain_text("Authorization: Bearer k-123")


# --- Origins, full storage, large conversations


@pytest.mark.parametrize(("language", "refused"), [("en-GB", "does not know this page"), ("zh-CN", "服务器不接受来自")])
def test_origin_that_is_not_allowed_shows_the_remedy(
    server: Scripted, new_context: Callable[..., BrowserContext], language: str, refused: str
) -> None:
    server.script(refused=True)
    page = new_context(locale=language).new_page()
    page.goto(server.url)
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text(refused)
    expect(alert).to_contain_text(f"CHARONIA_GATEWAY_ALLOWED_ORIGINS={server.url}")
    box = page.locator("#composer")
    box.fill("Hello?")
    box.press("Enter")
    expect(page.get_by_role("article").get_by_role("alert")).to_contain_text(refused)


BLOCKED = """
  const get = () => { throw new DOMException("blocked", "SecurityError"); };
  for (const name of ["localStorage", "sessionStorage", "indexedDB"]) Object.defineProperty(window, name, { get });
  window.BroadcastChannel = get;
"""


def test_blocked_site_data_stop_nothing(server: Scripted, new_context: Callable[..., BrowserContext]) -> None:
    server.script(key="k")
    page = new_context().new_page()
    page.add_init_script(BLOCKED)
    page.goto(server.url)
    page.get_by_label("Key", exact=True).fill("k")
    page.get_by_label("Remember").check()
    button(page, "Save").click()
    page.get_by_label("Model", exact=True).select_option("second/model")
    expect(page.get_by_text("This browser stores no data for the page")).to_be_visible()
    field(page).fill("a draft")
    button(page, "New chat").first.click()
    expect(field(page)).to_have_value("a draft")
    field(page).press("Enter")
    expect(finished(page)).to_contain_text("Hello!")
    button(page, "Delete: a draft").click()
    expect(page.locator(".chat-title")).to_have_count(0)
    assert server.requests()[0]["model"] == "second/model"


def test_a_full_storage_stops_nothing(page: Page, server: Scripted) -> None:
    page.evaluate(
        """() => {
          for (let size = 2 ** 22; size >= 1; size /= 2) {
            try { for (let n = 0; ; n++) localStorage.setItem(`fill-${size}-${n}`, "x".repeat(size)); } catch {}
          }
        }"""
    )
    page.get_by_label("Model", exact=True).select_option("second/model")
    field(page).fill("Hello?\n\n\n")
    assert field(page).evaluate("(area) => area.clientHeight >= area.scrollHeight")  # it has grown with the text
    field(page).press("Enter")
    finished(page)
    assert server.requests()[0]["model"] == "second/model"
    server.script(key="a-key")
    say(page, "Again")
    page.get_by_label("Key", exact=True).fill("a-key")
    page.get_by_label("Remember").check()
    button(page, "Save").click()
    finished(page, 2)


def test_a_long_conversation_is_imported_and_goes_on(page: Page, server: Scripted, tmp_path: Path) -> None:
    count = 20_000
    message = {"role": "user", "content": "x", "created": 1}
    messages = {str(i): {**message, "id": str(i), "parent": str(i - 1) if i else None} for i in range(count)}
    leaf, unseen = "300", {"title": "long", "created": 1, "updated": 1, "messages": messages}
    file = tmp_path / "long.json"
    file.write_text(json.dumps({"format": "charonia-chat-1", "conversations": [{**unseen, "leaf": leaf}]}))
    page.get_by_label("Import chats").set_input_files(file)
    noticed(page, "1 chat imported")
    chat_link(page, "long").click()
    expect(page.get_by_role("article", name="You")).to_have_count(301)
    ask(page, server, "On")
