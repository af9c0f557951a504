"""CPU time of the gateway for one event of a stream, of several checkouts in turns.

Each has a gateway of its own in front of one engine that is made up, and many streams that are open all the time. The
engine delivers parts for some of them, whose events are read before the next delivery: so nothing waits for anything,
and what a delivery has is the same on a machine that is busy. A turn takes some milliseconds, and what is compared
are turns side by side.

    python -m benchmarks.gateway_events --streams 64 . ../other-checkout
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2 as pb  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2_grpc as pb_grpc

from charonia.errors import CharoniaError

MODEL = "the-model"
TEXT = b" the quick fox"
TOKENS = 3
WAIT_S = 60.0
WARM_UP = 5  # turns that do not count
REQUEST = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "stream": True}
# Parts of a delivery, by streams: with steps of 8 ms and the intervals of subscriptions.
PARTS = {64: 21, 256: 43}
_HEAD = struct.Struct("<QIIiiiiiiiiffff")


def part(key: int) -> bytes:
    """As a subscription has it (docs/contracts.md)."""
    head = _HEAD.pack(key, len(TEXT), TOKENS, 0, 0, 0, len(TEXT), 5, TOKENS, 0, 0, 0.0, 1.0, 2.0, 3.0)
    return head + struct.pack(f"<{TOKENS}i", *range(TOKENS)) + TEXT


def response(name: str, value: bytes) -> pb.ModelInferResponse:
    made = pb.ModelInferResponse()
    made.outputs.add(name=name, datatype="BYTES", shape=[1])
    made.raw_output_contents.append(struct.pack("<I", len(value)) + value)
    return made


class Engine(pb_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Takes every request by subscription, and answers when it is told to."""

    def __init__(self) -> None:
        self.keys: dict[str, list[int]] = {}  # of requests, by subscription
        self.deliveries: dict[str, asyncio.Queue[bytes]] = {}

    async def ServerLive(self, request: Any, context: Any) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ModelReady(self, request: Any, context: Any) -> pb.ModelReadyResponse:
        return pb.ModelReadyResponse(ready=True)

    async def ModelInfer(self, request: Any, context: Any) -> pb.ModelInferResponse:
        return response(request.outputs[0].name, b"{}")  # what it is asked of its model

    async def ModelStreamInfer(self, requests: Any, context: Any) -> AsyncIterator[pb.ModelStreamInferResponse]:
        async for request in requests:
            inputs = {tensor.name: raw for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True)}
            name = inputs.get("subscription", b"")[4:].decode()
            if "subscription_key" in inputs:
                self.keys[name].append(int.from_bytes(inputs["subscription_key"], "little"))
            elif any(output.name == "deliveries" for output in request.outputs):
                self.keys[name] = []
                waiting = self.deliveries[name] = asyncio.Queue()
                number, packed = 0, b""
                while True:
                    delivery = response("deliveries", struct.pack("<Q", number) + packed)
                    yield pb.ModelStreamInferResponse(infer_response=delivery)
                    number, packed = number + 1, await waiting.get()


@contextlib.contextmanager
def gateway(checkout: Path, target: str) -> Iterator[tuple[int, int]]:
    """Its process id and port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {name: value for name, value in os.environ.items() if not name.startswith("CHARONIA_")}
    env |= {"CHARONIA_GATEWAY_PORT": str(port), "CHARONIA_GATEWAY_LOG_LEVEL": "critical", "CHARONIA_MODEL_NAME": MODEL}
    env |= {"CHARONIA_GATEWAY_WORKERS": "1", "PYTHONPATH": f"{checkout / 'client'}:{checkout / 'gateway'}"}
    process = subprocess.Popen([sys.executable, "-m", "charonia_gateway", "--triton-endpoints", target], env=env)
    try:
        yield process.pid, port
    finally:
        process.kill()
        process.wait()


def cpu_us(pid: int) -> float:
    """So far, of all its threads (Linux)."""
    times = (path.read_text().split()[0] for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(map(int, times)) / 1000


@dataclass
class Events(asyncio.Protocol):
    """What the streams of one gateway have sent."""

    count: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200"):
            raise CharoniaError(f"the gateway answered {data[:500]!r}")
        self.count += data.count(b"\n\n")
        self.news.set()

    async def until(self, count: int) -> None:
        while self.count < count:
            self.news.clear()
            await asyncio.wait_for(self.news.wait(), WAIT_S)


class Streams:
    """Open ones of one gateway."""

    def __init__(self, pid: int, port: int, engine: Engine) -> None:
        self._pid, self._port, self._engine = pid, port, engine
        self._events = Events()
        self._next = 0

    async def open(self, count: int) -> None:
        body = json.dumps(REQUEST).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        head += b"content-length: %d\r\n\r\n" % len(body)
        known = set(self._engine.keys)
        for _ in range(count):
            transport, _ = await asyncio.get_running_loop().create_connection(
                lambda: self._events, "127.0.0.1", self._port
            )
            transport.write(head + body)
        name = await asyncio.wait_for(self._subscription(known, count), WAIT_S)
        self._deliveries = self._engine.deliveries[name]
        self._parts = [part(key) for key in self._engine.keys[name]]
        self._deliver(count)
        await self._events.until(2 * count)  # the first part has two: the role's

    async def _subscription(self, known: set[str], count: int) -> str:
        """The name of a new one, once it has so many requests."""
        while True:
            for name, keys in self._engine.keys.items():
                if name not in known and len(keys) == count:
                    return name
            await asyncio.sleep(0.01)

    def _deliver(self, count: int) -> None:
        at = range(self._next, self._next + count)
        self._deliveries.put_nowait(b"".join(self._parts[number % len(self._parts)] for number in at))
        self._next += count

    async def turn(self, deliveries: int, parts: int) -> float:
        """Microseconds of CPU time for each event."""
        before, count = cpu_us(self._pid), self._events.count
        for number in range(1, deliveries + 1):
            self._deliver(parts)
            await self._events.until(count + number * parts)
        return (cpu_us(self._pid) - before) / (deliveries * parts)


async def _listens(port: int) -> None:
    while True:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        await asyncio.sleep(0.1)


async def measured(checkouts: list[Path], count: int, turns: int, parts: int) -> list[list[float]]:
    """By checkout, the turns that count."""
    engine = Engine()
    server = grpc.aio.server()
    pb_grpc.add_GRPCInferenceServiceServicer_to_server(engine, server)
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    with contextlib.ExitStack() as running:
        all_streams = []
        for checkout in checkouts:
            pid, port = running.enter_context(gateway(checkout, target))
            await asyncio.wait_for(_listens(port), WAIT_S)
            all_streams.append(Streams(pid, port, engine))
            await all_streams[-1].open(count)
        found: list[list[float]] = [[] for _ in checkouts]
        for number in range(turns + WARM_UP):
            order = list(zip(all_streams, found, strict=True))
            for streams, times in order if number % 2 else reversed(order):
                times.append(await streams.turn(max(1, 200 // parts), parts))
    await server.stop(None)
    return [times[WARM_UP:] for times in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="+", type=Path, help="the first is what the others are compared with")
    parser.add_argument("--streams", type=int, action="append", help="default: 64 and 256")
    parser.add_argument("--turns", type=int, default=80)
    options = parser.parse_args()
    for checkout in options.checkouts:  # else what is installed would be measured under its name
        if not (missing := checkout / "gateway" / "charonia_gateway").is_dir():
            parser.error(f"{checkout} is no checkout of Charonia: there is no folder {missing}")
    for count in options.streams or PARTS:
        checkouts = [checkout.resolve() for checkout in options.checkouts]
        found = asyncio.run(measured(checkouts, count, options.turns, PARTS.get(count, max(1, count // 4))))
        for checkout, times in zip(options.checkouts, found, strict=True):
            ratio = statistics.median(own / first for own, first in zip(times, found[0], strict=True))
            tenth, median = sorted(times)[len(times) // 10], statistics.median(times)
            print(
                f"{count} streams, {checkout}: {median:.1f} us/event (10th percentile {tenth:.1f}), {ratio:.3f} times"
            )


if __name__ == "__main__":
    main()
