"""Attacks on a gateway, for test_attacks.py. As a program, it runs all of them again and again:

python tests/stack/attacks.py http://127.0.0.1:8080 --key KEY --seconds 300

With --beside, it measures what each attack costs a client with another key:

python tests/stack/attacks.py http://127.0.0.1:8080 --key KEY --beside OTHER --seconds 10
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

CHAT = "/v1/chat/completions"
RAW_BYTES = 16 << 20  # at most, on a connection that no HTTP client would use
RAW_S = 5.0
IDLE_CONNECTIONS = 1100
GUIDES: dict[str, dict[str, Any]] = {
    "memory of a pattern": {"json": {"type": "string", "pattern": f"^{'a{49999,}' * 150}$"}},
    "time of a pattern": {"json": {"type": "string", "pattern": "^a{20000}$"}},
    "patterns that meet": {
        "json": {"allOf": [{"type": "string", "pattern": f"[a-z].{{{n}}}[0-9]"} for n in range(40)]}
    },
    "numbers that meet": {"json": {"$ref": "#/$defs/a", "multipleOf": 9973, "$defs": {"a": {"multipleOf": 9967}}}},
    "an ambiguous grammar": {"grammar": 'start: s\ns: s s | "a" | ""' + " | s s s" * 1000},
    "nested terminals": {
        "grammar": "start: A0\n" + "".join(f"A{n}: A{n + 1} A{n + 1}\n" for n in range(60)) + 'A60: "a"'
    },
    "optional parts": {"regex": "(a?){1000}a{1000}"},
    "states of a regular expression": {"regex": "(a|b)*a(a|b){200}"},
}


@dataclass
class Target:
    """A gateway, and the statuses of its responses. model: the name of its model."""

    http: httpx.AsyncClient
    model: str
    statuses: Counter[str] = field(default_factory=Counter)

    async def post(self, path: str, body: Any, give_up_s: float | None = None) -> int:
        """Send a request. Leaves after give_up_s, and then returns 499."""
        content = json.dumps({"model": self.model, **body}).encode()
        headers = {"Content-Type": "application/json"}
        try:
            answer = await asyncio.wait_for(self.http.post(path, content=content, headers=headers), give_up_s)
        except TimeoutError:
            self.statuses["left"] += 1
            return 499
        self.statuses[str(answer.status_code)] += 1
        return answer.status_code

    async def chat(self, give_up_s: float | None = None, **body: Any) -> int:
        return await self.post(CHAT, {"messages": [{"role": "user", "content": "Hello"}], **body}, give_up_s)

    async def raw(self, first: bytes, then: bytes) -> None:
        """Send `first`, and `then` again and again, on a connection of its own. Reads nothing."""
        address = self.http.base_url
        _, writer = await asyncio.open_connection(address.host, address.port, limit=1)
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(RAW_S):
                writer.write(first)
                for _ in range(RAW_BYTES // len(then) if then else 0):
                    writer.write(then)
                    await writer.drain()
                await writer.wait_closed()
        writer.transport.abort()


async def pipelined_requests(target: Target) -> None:
    await target.raw(b"", b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)


async def many_trailers(target: Target) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{{\r\n0\r\n"
    await target.raw(head.encode(), b"x: y\r\n" * 10_000)


async def one_trailer(target: Target) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{{\r\n0\r\nx: "
    await target.raw(head.encode(), b"y" * (1 << 16))


async def idle_connections(target: Target) -> None:
    opened = []
    try:
        for number in range(IDLE_CONNECTIONS):
            one = socket.create_connection((target.http.base_url.host, target.http.base_url.port or 80))
            opened.append(one)
            one.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"[: number % 40])
            await asyncio.sleep(0)
        await target.http.get("/v1/models")
    finally:
        for one in opened:
            one.close()


async def a_reader_that_stops(target: Target) -> None:
    of_choices = {"n": 16, "max_tokens": 1000, "ignore_eos": True, "stream": True}
    body = json.dumps({"model": target.model, "prompt": "x", **of_choices})
    key = target.http.headers.get("authorization", "")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: {key}\r\nContent-Length: {len(body)}"
    await target.raw(f"{head}\r\n\r\n{body}".encode(), b"")


async def costly_guides(target: Target) -> None:
    for guide in GUIDES.values():
        await target.chat(max_tokens=20, structured_outputs=guide)


async def many_bad_words(target: Target) -> None:
    await target.chat(max_tokens=1, bad_words=["é" * 500] * 65)
    await target.chat(max_tokens=1, bad_words=["x" * 1000] * 1000)
    for _ in range(12):
        await target.chat(max_tokens=1, bad_words=["é" * 500] * 65, give_up_s=0.05)


async def many_biases(target: Target) -> None:
    await target.chat(max_tokens=1, logit_bias={str(token): 1 for token in range(1 << 18)})


async def many_system_messages(target: Target) -> None:
    late = [{"role": "user", "content": "x" * 400}, {"role": "system", "content": "x" * 400}] * 4500
    await target.chat(max_tokens=1, messages=[{"role": "user", "content": "x" * 1_000_000}, *late])


async def many_values(target: Target) -> None:
    await target.chat(max_tokens=1, chat_template_kwargs={f"x{number}": [1] for number in range(200_000)})
    await target.post("/v1/completions", {"prompt": [[1]] * 200_000})
    await target.post("/v1/responses", {"input": "x", "max_output_tokens": 1, "tools": [{"type": " " * 4_000_000}]})


async def many_log_probabilities(target: Target) -> None:
    body = {"prompt": ["x " * 500] * 60, "echo": True, "logprobs": 5, "max_tokens": 1}
    await target.post("/v1/completions", body)


async def many_sequences(target: Target) -> None:
    await target.chat(n=128, max_tokens=64, ignore_eos=True)


async def abandoned_requests(target: Target) -> None:
    requests = (target.chat(max_tokens=1000, ignore_eos=True, give_up_s=0.02 * number) for number in range(1, 20))
    await asyncio.gather(*requests)


async def stored_responses(target: Target) -> None:
    """The chat template does not show earlier thoughts, so these take no tokens."""
    thought = {"type": "reasoning", "id": "x", "summary": [{"type": "summary_text", "text": "x" * 1000}] * 1000}
    items = [{"role": "user", "content": "x"}, thought, {"role": "assistant", "content": "x"}]
    for _ in range(80):
        body = {"input": [*items, items[0]], "max_output_tokens": 1, "store": True}
        await target.post("/v1/responses", body)


ATTACKS: list[Callable[[Target], Awaitable[None]]] = [
    *(pipelined_requests, many_trailers, one_trailer, idle_connections, a_reader_that_stops, costly_guides),
    *(many_bad_words, many_biases, many_system_messages, many_values, many_log_probabilities, many_sequences),
    *(abandoned_requests, stored_responses),
]


@contextlib.asynccontextmanager
async def target_of(url: str, key: str | None = None) -> Any:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120, trust_env=False, limits=limits) as http:
        yield Target(http, (await http.get("/v1/models")).json()["data"][0]["id"])


async def main(url: str, key: str | None, seconds: float, only: Iterable[str]) -> None:
    until = time.monotonic() + seconds
    rounds: Counter[str] = Counter()

    async def repeat(target: Target, attack: Callable[[Target], Awaitable[None]]) -> None:
        while time.monotonic() < until:
            with contextlib.suppress(httpx.TransportError, OSError):
                await attack(target)
                rounds[attack.__name__] += 1
            await asyncio.sleep(1)

    async with target_of(url, key) as target:
        names = set(only) or {attack.__name__ for attack in ATTACKS}
        await asyncio.gather(*(repeat(target, attack) for attack in ATTACKS if attack.__name__ in names))
        print(json.dumps({"rounds": rounds, "statuses": target.statuses}))


async def first_token_ms(target: Target) -> float:
    """Milliseconds from a request to its first token; infinity if it fails."""
    began = time.perf_counter()
    body = {"model": target.model, "prompt": "Hello", "max_tokens": 8, "ignore_eos": True, "stream": True}
    with contextlib.suppress(httpx.TransportError):
        async with target.http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {") and answer.status_code == 200:
                    return (time.perf_counter() - began) * 1000
    return math.inf


async def beside(url: str, key: str | None, other: str, seconds: float, only: Iterable[str]) -> None:
    """Print the times to the first token of a client with the key `other`, alternately without and with each attack.
    The attacks run in a process of lower priority, because real ones come from other machines."""
    print(f"{'attack':24} {'requests':>8} {'quiet p50':>10} {'p99':>8} {'attacked p50':>12} {'p99':>8} {'ratio':>6}")
    async with target_of(url, other) as target:
        for attack in [one.__name__ for one in ATTACKS if not only or one.__name__ in only]:
            times: tuple[list[float], list[float]] = ([], [])
            for turn in range(2 * _TURNS):
                process = None
                if turn % 2:
                    options = ["--seconds", str(seconds), "--only", attack, *(("--key", key) if key else ())]
                    command = ["nice", "-n", "5", sys.executable, __file__, url, *options]
                    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
                    await asyncio.sleep(1)
                requests = []
                for _ in range(int(seconds / _REQUEST_S)):
                    requests.append(asyncio.create_task(first_token_ms(target)))
                    await asyncio.sleep(_REQUEST_S)
                times[turn % 2].extend(await asyncio.gather(*requests))
                if process:
                    await process.wait()
            (a, b), (c, d) = (
                (statistics.median(one), statistics.quantiles(one, n=100, method="inclusive")[98]) for one in times
            )
            print(f"{attack:24} {len(times[1]):8} {a:10.1f} {b:8.1f} {c:12.1f} {d:8.1f} {d / b:6.1f}", flush=True)


_TURNS = 4
_REQUEST_S = 0.05

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("url", type=lambda text: urlsplit(text).geturl())
    parser.add_argument("--key")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--beside", metavar="KEY", help="measure a client with this key beside each attack")
    given = parser.parse_args()
    if given.beside:
        asyncio.run(beside(given.url, given.key, given.beside, given.seconds, given.only))
    else:
        asyncio.run(main(given.url, given.key, given.seconds, given.only))
