"""A long mixed load on a served model, with clients that disconnect early; then an account of it: every request has
ended, once; every KV block is free or cached; resident memory is flat.

Half of the requests are read to the end, the others are left in the midst of the answer, before its first token, or are
turns of a few shared sessions. Prompts share beginnings, so that blocks are reused and evicted all the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import psutil  # type: ignore[import-untyped]
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn, TimeRemainingColumn

from charonia.bench.records import Record

if TYPE_CHECKING:
    import httpx
    from charonia_client import Client, GenerateRequest

_SAMPLE_S = 1.0
_IDLE_LIMIT_S = 120.0
_WORDS = [
    "shell",
    "trumpet",
    "harbour",
    "lantern",
    "river",
    "seven",
    "copper",
    "window",
    "garden",
    "letter",
    "silver",
    "thunder",
    "winter",
    "orange",
    "music",
    "paper",
    "mountain",
    "bridge",
    "candle",
    "forest",
    "clock",
    "island",
    "mirror",
    "pepper",
    "ribbon",
    "shadow",
    "temple",
    "valley",
    "whistle",
    "yellow",
]


@dataclass(frozen=True)
class Memory:
    """Resident bytes of all processes of the server: medians of a tenth of the time, after a tenth and at the end."""

    early_bytes: int
    late_bytes: int

    @property
    def growth(self) -> float:
        """(late - early) / early."""
        return (self.late_bytes - self.early_bytes) / self.early_bytes


@dataclass
class Report:
    """What was sent and what the server says of it.

    sent: by what clients meant to do; ended: by what they saw, `left` where they did not wait for the end. counted:
    what the engine's metrics have gained, by finish reason. blocks: of the KV cache, when all was over. unseen:
    requests that were left so early that the gateway may not have read them.
    """

    seconds: float
    clients: int
    sent: dict[str, int] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    counted: dict[str, int] = field(default_factory=dict)
    blocks: dict[str, int] = field(default_factory=dict)
    memory: Memory | None = None
    memory_bytes: list[int] = field(default_factory=list)  # once a second
    unseen: int = 0

    def faults(self, growth_limit: float | None = None) -> list[str]:
        """What should not be, in words; empty when all is well. growth_limit: of the memory, as a share of it."""
        found = []
        sent, counted = sum(self.sent.values()), sum(self.counted.values())
        if not sent - self.unseen <= counted <= sent:
            found.append(f"{sent} requests were sent and {counted} have ended in the engine")
        for reason in ("error", "unexpected"):
            if self.ended.get(reason):
                found.append(f"{self.ended[reason]} requests ended with {reason}")
        if self.counted.get("error"):
            found.append(f"{self.counted['error']} requests ended with an error in the engine")
        if self.blocks["active"]:
            found.append(f"{self.blocks['active']} KV blocks are held by nobody")
        if growth_limit is not None and self.memory is not None and self.memory.growth > growth_limit:
            found.append(f"resident memory grew by {100 * self.memory.growth:.1f} %")
        return found

    def records(self) -> list[Record]:
        counts = {
            "sent": self.sent,
            "ended for the client": self.ended,
            "ended in the engine": self.counted,
            "KV blocks": self.blocks,
        }
        found = [
            Record.of("soak", "count", "", number, case={"of": f"{what}: {name}"})
            for what, several in counts.items()
            for name, number in sorted(several.items())
        ]
        if self.memory:
            memory, case = self.memory, {"of": "resident memory"}
            found.append(Record.of("soak", "after a tenth", "MiB", memory.early_bytes / 2**20, case=case))
            samples = {"bytes_each_second": self.memory_bytes}
            found.append(Record.of("soak", "at the end", "MiB", memory.late_bytes / 2**20, case=case, details=samples))
            found.append(Record.of("soak", "growth", "%", 100 * memory.growth, case=case))
        return found


@dataclass(frozen=True)
class Guarded:
    """A gateway, in place of Triton's gRPC: its URL, API keys that clients use in turn (none: it asks for none), and
    the certificates that its own comes from (a PEM file; None: public ones)."""

    url: str
    keys: Sequence[str] = ()
    tls_ca: Path | None = None


def run_soak(
    triton: str | Guarded, metrics: str, pid: int, *, seconds: float, clients: int, seed: int, console: Console
) -> Report:
    """Loads the server for `seconds` with so many clients at once.

    triton: HOST:PORT of its gRPC, or the gateway before it; metrics: URL of its metrics; pid: the process that
    all of the server hangs below.
    """
    return asyncio.run(_Soak(triton, metrics, pid, seconds, clients, seed, console).run())


class _Door(Protocol):
    # A gateway reads a request after it has taken the connection: who leaves at once may not have been seen.
    sees_all: bool

    def parts(self, request: GenerateRequest, number: int) -> AsyncGenerator[str | None, None]:
        """Of each part of the answer the finish reason, None before the last. number: of the client."""


class _Triton:
    sees_all = True

    def __init__(self, client: Client) -> None:
        self._client = client

    async def parts(self, request: GenerateRequest, number: int) -> AsyncGenerator[str | None, None]:
        async with contextlib.aclosing(self._client.generate(request)) as answer:
            async for part in answer:
                yield part.finish_reason


class _Gateway:
    sees_all = False

    def __init__(self, client: httpx.AsyncClient, keys: Sequence[str], model: str) -> None:
        self._client = client
        self._keys = keys
        self._model = model

    async def parts(self, request: GenerateRequest, number: int) -> AsyncGenerator[str | None, None]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "ignore_eos": True,
            "stream": True,
        }
        if request.messages is None:
            path = "/v1/completions"
            body |= {"prompt": request.text, "logprobs": request.logprobs}
        else:
            path = "/v1/chat/interactive"
            body |= {"prompt": list(request.messages), "session_id": request.session_id, "interactive_mode": True}
        async with self._client.stream("POST", path, json=body, headers=key_header(self._keys, number)) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code}: {(await answer.aread()).decode(errors='replace')[:500]}")
            async for line in answer.aiter_lines():
                text = line.removeprefix("data: ")
                if not text or text == "[DONE]" or text.startswith(":"):  # a comment: the answer is waited for
                    continue
                part = json.loads(text)
                part = part["choices"][0] if "choices" in part else part
                if "finish_reason" not in part:
                    raise RuntimeError(text[:500])
                yield part["finish_reason"]


def key_header(keys: Sequence[str], number: int) -> dict[str, str]:
    """That of client `number`."""
    return {"Authorization": f"Bearer {keys[number % len(keys)]}"} if keys else {}


@contextlib.asynccontextmanager
async def _door(target: str | Guarded) -> AsyncGenerator[_Door, None]:
    if isinstance(target, str):
        from charonia_client import Client

        async with Client(target) as client:
            yield _Triton(client)
        return
    import ssl

    import httpx

    async with httpx.AsyncClient(
        base_url=target.url,
        timeout=None,
        limits=httpx.Limits(max_connections=None),
        trust_env=False,
        verify=ssl.create_default_context(cafile=target.tls_ca),
    ) as http:
        models = (await http.get("/v1/models", headers=key_header(target.keys, 0))).raise_for_status().json()["data"]
        yield _Gateway(http, target.keys, models[0]["id"])


class _Soak:
    def __init__(
        self, triton: str | Guarded, metrics: str, pid: int, seconds: float, clients: int, seed: int, console: Console
    ) -> None:
        self._target = triton
        self._metrics = metrics
        self._pid = pid
        self._seconds = seconds
        self._clients = clients
        self._random = random.Random(seed)
        self._console = console
        self._sent: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()

    async def run(self) -> Report:
        before = await self._engine()
        report = Report(self._seconds, self._clients)
        async with _door(self._target) as door:
            until = time.monotonic() + self._seconds
            watch = asyncio.create_task(self._watch(until, report.memory_bytes))
            await asyncio.gather(*(self._client(door, number, until) for number in range(self._clients)))
            await watch
            report.unseen = 0 if door.sees_all else self._sent["left at once"]
        after = await self._idle()
        report.sent, report.ended = dict(self._sent), dict(self._ended)
        report.counted = {
            reason: int(after[key] - before[key])
            for key in after
            if isinstance(key, tuple)
            for reason in (key[1],)
            if after[key] != before[key]
        }
        report.blocks = {name: int(after[f"charonia_kv_blocks_{name}"]) for name in ("active", "cached", "total")}
        tenth = max(1, len(report.memory_bytes) // 10)
        if len(report.memory_bytes) >= 2 * tenth:
            report.memory = Memory(
                int(np.median(report.memory_bytes[tenth : 2 * tenth])), int(np.median(report.memory_bytes[-tenth:]))
            )
        return report

    async def _watch(self, until: float, samples: list[int]) -> None:
        columns = (*Progress.get_default_columns()[:3], TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task("soak", total=self._seconds)
            while (left := until - time.monotonic()) > 0:
                samples.append(resident_bytes(self._pid))
                progress.update(task, completed=self._seconds - left)
                await asyncio.sleep(min(_SAMPLE_S, left))

    async def _client(self, door: _Door, number: int, until: float) -> None:
        chosen = random.Random(self._random.random())
        kinds = {"read": 5, "left": 3, "left at once": 1, "session": 2}
        while time.monotonic() < until:
            [kind] = chosen.choices(list(kinds), list(kinds.values()))
            self._sent[kind] += 1
            try:
                self._ended[await self._one(door, number, kind, chosen)] += 1
            except Exception as error:
                self._console.print(f"client {number}: {kind}: {error!r}", markup=False)
                self._ended["error"] += 1

    async def _one(self, door: _Door, number: int, kind: str, chosen: random.Random) -> str:
        from charonia_client import GenerateRequest

        # Few beginnings, of some blocks each, and an end of its own.
        begin = random.Random(chosen.randrange(4)).choices(_WORDS, k=chosen.choice((20, 60)))
        text = " ".join([*begin, *chosen.choices(_WORDS, k=chosen.randrange(1, 40))])
        request = GenerateRequest(
            messages=[{"role": "user", "content": text}] if kind == "session" else None,
            text=None if kind == "session" else text,
            max_tokens=chosen.randrange(1, 64),
            temperature=chosen.choice((0.0, 1.0)),
            seed=chosen.randrange(2**32),
            logprobs=chosen.choice((None, None, 2)),
            session_id=f"soak-{chosen.randrange(6)}" if kind == "session" else None,
            interactive=kind == "session",
            ignore_eos=True,
        )
        leave_after = {"left": chosen.randrange(1, 4), "left at once": 0}.get(kind)
        async with contextlib.aclosing(door.parts(request, number)) as parts:
            if leave_after == 0:
                first = asyncio.ensure_future(anext(parts))
                # A gateway gets some of these after it has read the request, too.
                await asyncio.sleep(0 if door.sees_all else chosen.uniform(0, 0.05))
                first.cancel()
                with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
                    await first
                return "left"
            count = 0
            async for finish_reason in parts:
                count += 1
                if finish_reason is not None:
                    return finish_reason
                if count == leave_after:
                    return "left"
        return "unexpected"

    async def _engine(self) -> dict[Any, float]:
        """The engine's gauges by name, and its count of ended requests by (name, finish reason)."""
        from prometheus_client.parser import text_string_to_metric_families

        def read() -> str:
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(self._metrics, timeout=30) as response:
                return str(response.read().decode())

        values: dict[Any, float] = {}
        for family in text_string_to_metric_families(await asyncio.to_thread(read)):
            for sample in family.samples:
                if sample.name == "charonia_request_success_total":
                    values[sample.name, sample.labels["finished_reason"]] = sample.value
                elif not sample.labels.get("le"):
                    values[sample.name] = sample.value
        return values

    async def _idle(self) -> dict[Any, float]:
        """The metrics once nothing runs, waits or holds a block; the last ones when that does not come."""
        deadline = time.monotonic() + _IDLE_LIMIT_S
        names = ("num_requests_running", "num_requests_waiting", "kv_blocks_active")
        while True:
            values = await self._engine()
            if all(values[f"charonia_{name}"] == 0 for name in names) or time.monotonic() > deadline:
                # The engine counts an end before it says that it is idle: what is read afterwards has the whole count.
                return await self._engine()
            await asyncio.sleep(0.2)


def resident_bytes(pid: int) -> int:
    """Of a process and all below it. Pages that several of them share are counted once for each."""
    total = 0
    process = psutil.Process(pid)
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += one.memory_info().rss
    return total
