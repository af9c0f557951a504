"""The memory that answers take in the gateway while their clients do not read them.

    python -m benchmarks.slow_readers

Streams with log probabilities of the 20 most likely tokens, of a model that computes nothing. Each client asks and
reads nothing more, but for one, which reads its whole answer: then the answers of all have come.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import tempfile
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import psutil  # type: ignore[import-untyped]

from charonia.bench.compare import Served, serving
from charonia.bench.random_model import SHAPES, write_random_model
from charonia.bench.streaming import process_name
from charonia.errors import CharoniaError

TOPS = 20


class Reader:
    """Of one stream. Its socket takes no more than the system's least."""

    def __init__(self, port: int) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        self._socket.setblocking(False)
        self._port = port

    async def ask(self, tokens: int) -> None:
        """Returns when the answer has begun."""
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self._socket, ("127.0.0.1", self._port))
        fields = {"model": "tiny", "prompt": "x", "max_tokens": tokens, "ignore_eos": True, "logprobs": TOPS}
        body = json.dumps({**fields, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nContent-Type: application/json\r\n"
        await loop.sock_sendall(self._socket, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        begun = await loop.sock_recv(self._socket, 12)
        if not begun.endswith(b" 200"):
            rest = await loop.sock_recv(self._socket, 1 << 12)
            raise CharoniaError((begun + rest).decode(errors="replace"))

    async def read(self) -> int:
        """The rest of the answer; how many tokens have their log probabilities."""
        loop = asyncio.get_running_loop()
        text = bytearray()
        while b"data: [DONE]" not in text[-100:]:
            more = await loop.sock_recv(self._socket, 1 << 16)
            if not more:
                raise CharoniaError(f"the answer broke off after {len(text)} bytes")
            text += more
        events = [json.loads(line[6:]) for line in text.split(b"\r\n") if line.startswith(b"data: {")]
        return sum(len(choice["logprobs"]["top_logprobs"]) for event in events for choice in event["choices"])

    def leave(self) -> None:
        self._socket.close()


def gateway_of(served: Served) -> psutil.Process:
    (found,) = [
        process
        for process in psutil.Process(served.pid).children(recursive=True)
        if process_name(process.cmdline()) == "gateway"
    ]
    return found


async def measure(served: Served, readers: int, tokens: int) -> tuple[float, float]:
    """MiB of the gateway before, and the most while the answers wait."""
    gateway, port = gateway_of(served), urlsplit(served.gateway).port
    assert port
    before = gateway.memory_info().rss
    Path(f"/proc/{gateway.pid}/clear_refs").write_text("5")  # its peak is of the time from now on
    with contextlib.ExitStack() as all_leave:
        asked = [Reader(port) for _ in range(readers)]
        for one in asked:
            all_leave.callback(one.leave)
        await asyncio.gather(*(one.ask(tokens) for one in asked))
        read = await asked[0].read()
        if read != tokens:
            raise CharoniaError(f"{read} tokens have log probabilities, of {tokens}")
        lines = Path(f"/proc/{gateway.pid}/status").read_text().splitlines()
        most = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
    return before / 2**20, most / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readers", type=int, default=24, help="how many do not read [24]")
    parser.add_argument("--tokens", type=int, default=4000, help="of each answer [4000]")
    parser.add_argument("--step-ms", type=float, default=10, help="from one token to the next [10]")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="charonia-benchmark-") as folder:
        model = Path(folder, "tiny")
        write_random_model(model, replace(SHAPES["tiny"], max_positions=chosen.tokens + 64), quick=True)
        settings = {
            "device": "null",
            "null_step_ms": chosen.step_ms,
            "stream_interval_ms": 0,
            "max_batch_size": chosen.readers,
            "cache_max_entry_count": chosen.readers * (chosen.tokens // 64 + 2),
        }
        # Who reads nothing would lose the connection.
        with serving(str(model), settings, variables={"CHARONIA_GATEWAY_WRITE_TIMEOUT_S": "0"}) as served:
            before, most = asyncio.run(measure(served, chosen.readers, chosen.tokens))
    print(
        f"{chosen.readers} answers of {chosen.tokens} tokens, {chosen.step_ms:g} ms a step: "
        f"gateway {before:.0f} MiB before, {most:.0f} MiB at most"
    )


if __name__ == "__main__":
    main()
