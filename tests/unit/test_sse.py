"""Events and lines of the gateway's streams, their heartbeats, and clients that do not read them."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import sys
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
import uvicorn
from charonia_client import DeadlineExceeded
from charonia_gateway.drain import Drain, DrainingServer
from charonia_gateway.metrics import Metrics, MetricsMiddleware
from charonia_gateway.record import RecordMiddleware, record_of
from charonia_gateway.sse import (
    DONE,
    EVENTS,
    LINES,
    TEXT,
    EventStream,
    Format,
    TextEvents,
    event,
    line,
    while_connected,
)
from gateway_in_process import listening
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

HANG_S = 120
HEARTBEAT_S = 0.02

EVERY_CHARACTER = "".join(chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code <= 0xDFFF)


async def test_an_error_of_work_whose_client_has_left_is_not_logged_as_unread() -> None:
    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def fails_when_it_is_cancelled() -> None:
        try:
            await asyncio.sleep(HANG_S)
        finally:
            raise DeadlineExceeded("late")

    unread: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unread.append(context))
    with pytest.raises(ClientDisconnect):
        await while_connected(Request({"type": "http"}, receive), fails_when_it_is_cancelled())
    gc.collect()
    assert not unread


@pytest.mark.parametrize(("write", "prefix"), [(event, "data: "), (line, "")])
def test_text_with_any_character_is_one_line_and_is_read_unchanged(write: Callable[[Any], bytes], prefix: str) -> None:
    lines = [text for text in write({"text": EVERY_CHARACTER}).decode().splitlines() if text]
    assert len(lines) == 1
    assert lines[0].startswith(prefix)
    assert json.loads(lines[0].removeprefix(prefix)) == {"text": EVERY_CHARACTER}


@pytest.mark.parametrize(
    "text", ["", " fox", 'a "quote", a \\ and \n', EVERY_CHARACTER], ids=["none", "plain", "escaped", "all"]
)
def test_event_with_new_text_equals_an_event_that_is_written_whole(text: str) -> None:
    def data(text: str) -> dict[str, Any]:
        return {"id": "\u2028", "choices": [{"delta": {"content": text}, "logprobs": None}], "usage": None}

    assert TextEvents(data(TEXT)).event(text) == event(data(text))


async def until_beats(sent: list[Message], format: Format, count: int) -> None:
    """Wait until a client has received this many heartbeats."""
    while sum(message.get("body") == format.heartbeat for message in sent) < count:
        await asyncio.sleep(HEARTBEAT_S / 10)


async def sent_by(
    events: AsyncGenerator[bytes, None], format: Format, heartbeat_s: float, sent: list[Message]
) -> tuple[list[Message], Any]:
    """Append the messages that a client receives until the end to `sent`. Returns the log record, with the
    metrics."""
    scope: Scope = {"type": "http", "method": "POST", "headers": [], "path": "/"}
    metrics = Metrics()

    async def send(message: Message) -> None:
        await asyncio.sleep(0)
        sent.append(message)

    async def receive() -> Message:
        await asyncio.Event().wait()
        return {}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await EventStream(events, {}, format, heartbeat_s=heartbeat_s)(scope, receive, send)

    layers = RecordMiddleware(MetricsMiddleware(app, metrics), access_log=False)
    await asyncio.wait_for(layers(scope, receive, send), HANG_S)
    (first_byte,) = [
        sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "charonia_gateway_time_to_first_byte_seconds_sum"
    ]
    assert first_byte > 0
    counted = metrics.registry.get_sample_value(
        "charonia_gateway_requests_total",
        {"route": "other", "status": str(record_of(scope).failed_status or sent[0]["status"])},
    )
    assert counted == 1, "once, and under the status that it came to"
    return sent, record_of(scope)


@pytest.mark.parametrize(("format", "heartbeat"), [(EVENTS, b":\n\n"), (LINES, b" ")])
async def test_silent_stream_sends_heartbeats_before_and_between_texts(format: Format, heartbeat: bytes) -> None:
    sent: list[Message] = []

    async def late() -> AsyncGenerator[bytes, None]:
        await until_beats(sent, format, 5)
        yield line({"text": "a"})
        await until_beats(sent, format, 8)
        yield line({"text": "b"})

    _, record = await sent_by(late(), format, HEARTBEAT_S, sent)
    assert [message["type"] for message in sent].count("http.response.start") == 1
    assert sent[0]["type"] == "http.response.start"
    bodies = [message["body"] for message in sent[1:]]
    first, second = bodies.index(line({"text": "a"})), bodies.index(line({"text": "b"}))
    assert set(bodies[:first] + bodies[first + 1 : second]) == {heartbeat}
    assert bodies[second + 1 :] == [b""]
    # The first measured byte is the first text, after five heartbeats.
    assert record.first_byte_s >= 4 * HEARTBEAT_S
    if format is LINES:
        assert [json.loads(text) for text in b"".join(bodies).splitlines()] == [{"text": "a"}, {"text": "b"}]


@pytest.mark.parametrize("heartbeat_s", [0, 60])
async def test_a_stream_that_is_not_silent_has_no_heartbeat(heartbeat_s: float) -> None:
    async def soon() -> AsyncGenerator[bytes, None]:
        for _ in range(3):
            await asyncio.sleep(0.01)
            yield event({})
        yield DONE

    sent, _ = await sent_by(soon(), EVENTS, heartbeat_s, [])
    assert [message["body"] for message in sent[1:]] == [event({})] * 3 + [DONE, b""]


async def test_events_after_the_first_text_bypass_the_middleware() -> None:
    seen: list[Any] = []
    sent: list[Any] = []

    async def send(message: Message) -> None:
        sent.append(message.get("body"))

    async def receive() -> Message:
        await asyncio.Event().wait()
        return {}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def watched(message: Message) -> None:
            seen.append(message.get("body"))
            await send(message)

        async def events() -> AsyncGenerator[bytes, None]:
            while len(sent) < 2:  # the start, and a heartbeat
                await asyncio.sleep(HEARTBEAT_S / 10)
            for text in (b"a", b"b", b"c"):
                yield text

        await EventStream(events(), {}, heartbeat_s=HEARTBEAT_S)(scope, receive, watched)

    scope: Scope = {"type": "http", "method": "POST", "headers": [], "path": "/"}
    await asyncio.wait_for(RecordMiddleware(app, access_log=False)(scope, receive, send), HANG_S)
    texts = [body for body in sent[1:] if body != EVENTS.heartbeat]
    assert (sent[0], texts) == (None, [b"a", b"b", b"c", b""])
    assert [body for body in seen[1:] if body != EVENTS.heartbeat] == [b"a", b""]
    assert "send" not in scope["state"], "a request that has ended is held by nothing"


@pytest.mark.parametrize("texts", [[], [b"a"], [b"a", b"b"]])
async def test_an_event_and_the_end_wait_for_a_heartbeat_that_is_on_its_way(texts: list[bytes]) -> None:
    """A client that does not read blocks it."""
    sent: list[Message] = []
    beats, reads, said = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            beats.set()
            await reads.wait()
        sent.append(message)

    async def receive() -> Message:
        await asyncio.Event().wait()
        return {}

    async def events() -> AsyncGenerator[bytes, None]:
        await beats.wait()
        said.set()
        for text in texts:
            yield text

    async def read() -> None:
        await said.wait()
        await asyncio.sleep(HEARTBEAT_S)
        assert not sent
        reads.set()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await EventStream(events(), {}, heartbeat_s=HEARTBEAT_S)(scope, receive, send)

    scope: Scope = {"type": "http", "method": "POST", "headers": [], "path": "/"}
    answer = RecordMiddleware(app, access_log=False)(scope, receive, send)
    await asyncio.wait_for(asyncio.gather(answer, read()), HANG_S)
    assert [message["type"] for message in sent].count("http.response.start") == 1
    assert sent[0]["type"] == "http.response.start"
    assert [message["body"] for message in sent[1:]] == [EVENTS.heartbeat, *texts, b""]


@pytest.mark.parametrize(("heartbeat_s", "status"), [(0, 504), (HEARTBEAT_S, 200)])
async def test_an_error_has_its_own_status_until_the_first_heartbeat(heartbeat_s: float, status: int) -> None:
    sent: list[Message] = []

    async def fails() -> AsyncGenerator[bytes, None]:
        await until_beats(sent, EVENTS, 1 if heartbeat_s else 0)
        raise DeadlineExceeded("late")
        yield b""

    _, record = await sent_by(fails(), EVENTS, heartbeat_s, sent)
    assert sent[0]["status"] == status
    assert record.failed_status == (504 if status == 200 else 0)
    assert b'"code":"deadline_exceeded"' in sent[-1]["body"].replace(b": ", b":")
    assert sent[-1]["body"].startswith(b"event: error\n") is (status == 200)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the kernel cannot bound a stalled write")
async def test_a_client_that_stops_reading_is_disconnected_and_its_work_ends() -> None:
    ended = asyncio.Event()
    made = 0

    async def endless() -> AsyncGenerator[bytes, None]:
        nonlocal made
        try:
            while True:
                await asyncio.sleep(0)
                made += 65536
                yield b"x" * 65536
        finally:
            ended.set()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await EventStream(endless(), {})(scope, receive, send)

    def make(config: uvicorn.Config) -> uvicorn.Server:
        return DrainingServer(config, Drain(0), write_timeout_s=1)

    recorded = RecordMiddleware(app, access_log=False)
    async with listening(recorded, make, http="httptools", timeout_graceful_shutdown=1) as address:
        with socket.socket() as stalled:
            stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stalled.connect(address)
            stalled.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await asyncio.wait_for(ended.wait(), HANG_S)
        assert made < 16 << 20, "what is not read waits in memory"
