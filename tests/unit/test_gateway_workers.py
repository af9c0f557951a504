"""A gateway with several processes: shared state, a process that dies, and the orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import gateway_process
import httpx
import psutil
import pytest
from charonia_gateway import workers
from charonia_gateway.metrics import Metrics
from charonia_gateway.port import bound_sockets, held_port
from charonia_gateway.settings import Settings
from free_ports import free_ports
from gateway_process import GatewayProcess
from key_files import KeyFile
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError
from redis_server import redis_server
from triton_double import Double, part
from tritonclient.grpc import service_pb2 as pb
from waiting import until
from worker_client import client_of

pytestmark = pytest.mark.slow

MODEL = "the-model"
CHAT: dict[str, Any] = {"model": MODEL, "messages": "hi"}
STREAM = {**CHAT, "stream": True}
HANG_S = 120
Parts = AsyncIterator[Any]


class Held:
    """A behaviour of the server: responses start, and end when the test releases them."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()

    async def __call__(self, request: pb.ModelInferRequest) -> Parts:
        yield part("begun")
        await self.may_end.wait()
        yield part("ended", "stop")


class Gateway:
    def __init__(self, started: GatewayProcess) -> None:
        self.process, self.log, self.url = started.process, started.log, started.url
        self.port, self.pids = started.port, started.pids

    async def clients(self, opened: contextlib.AsyncExitStack) -> list[httpx.AsyncClient]:
        """Return a client for each worker."""
        return [await opened.enter_async_context(client_of(self.url, pid)) for pid in self.pids()]

    async def until(self, holds: Callable[[], Any]) -> None:
        def or_over() -> Any:
            assert self.process.poll() is None, self.log.read_text()
            return holds()

        await until(or_over)

    async def ready(self) -> bool:
        async with httpx.AsyncClient(base_url=self.url, timeout=HANG_S) as web:
            return (await web.get("/health/ready")).status_code == 200

    async def ended(self) -> int:
        """Wait until the process has ended, and return its exit code."""
        return await asyncio.to_thread(self.process.wait, HANG_S)


@contextlib.asynccontextmanager
async def gateway(server: Double, folder: Path, count: int = 2, **env: str) -> AsyncIterator[Gateway]:
    """Run a gateway with `count` processes until it is ready."""
    settings = {
        "CHARONIA_GATEWAY_WORKERS": str(count),
        "CHARONIA_GATEWAY_MAX_RESPONSES": "0",
        "CHARONIA_MODEL_NAME": MODEL,
        "CHARONIA_DRAIN_TIMEOUT_S": str(HANG_S),
        "TMPDIR": str(folder / "own"),
    }
    (folder / "own").mkdir()
    with gateway_process.gateway(server.target, folder / "gateway.log", **settings | env) as started:
        found = Gateway(started)
        await found.until(found.ready)
        yield found


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[str]:
    with redis_server(tmp_path) as url:
        yield url


def samples(text: str) -> dict[str, float]:
    """Return metric values by name and labels."""
    return {
        sample.name + "".join(f" {name}={value}" for name, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def begin(web: httpx.AsyncClient, headers: dict[str, str] | None = None) -> asyncio.Task[str]:
    """Start a stream and wait for its first text. The task returns its last line."""
    begun = asyncio.Event()

    async def read() -> str:
        last = ""
        async with web.stream("POST", "/v1/chat/completions", json=STREAM, headers=headers) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                last = line or last
                if "begun" in line:
                    begun.set()
        return last

    task = asyncio.create_task(read())
    await asyncio.wait_for(begun.wait(), HANG_S)
    return task


async def is_draining(web: httpx.AsyncClient) -> bool:
    return (await web.get("/health/ready")).status_code == 503


async def test_processes_share_limits_stored_responses_and_metrics(tmp_path: Path, redis: str) -> None:
    file = KeyFile(tmp_path / "keys.json", three={"requests_per_minute": 3, "access": ("inference", "metrics")})
    file.add("one", max_concurrent=1)
    file.add("many")
    env = {"CHARONIA_GATEWAY_REDIS_URL": redis, "CHARONIA_GATEWAY_MAX_RESPONSES": "10"}
    async with (
        Double() as server,
        gateway(server, tmp_path, CHARONIA_GATEWAY_KEYS_FILE=str(file.path), **env) as own,
        contextlib.AsyncExitStack() as opened,
    ):
        first, second = await own.clients(opened)
        answers = [
            await web.post("/v1/chat/completions", json=CHAT, headers=file.bearer("three"))
            for web in (first, second, first, second)
        ]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
        assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["2", "1", "0", "0"]

        body = {"model": MODEL, "input": "hi", "store": True}
        stored = (await first.post("/v1/responses", json=body, headers=file.bearer("many"))).json()
        path = f"/v1/responses/{stored['id']}"
        assert (await second.get(path, headers=file.bearer("many"))).json() == stored
        assert (await second.get(path, headers=file.bearer("one"))).status_code == 404
        assert (await second.delete(path, headers=file.bearer("many"))).json()["deleted"]
        assert (await first.get(path, headers=file.bearer("many"))).status_code == 404

        held = server.behaviour = Held()
        stream = await begin(first, file.bearer("one"))
        refused = await second.post("/v1/chat/completions", json=CHAT, headers=file.bearer("one"))
        assert refused.status_code == 429 and "may have 1 sequences running" in refused.json()["error"]["message"]
        seen = {}

        async def all_have_checked() -> bool:
            seen.update(samples((await second.get("/metrics", headers=file.bearer("three"))).text))
            return seen[f"charonia_gateway_endpoint_up endpoint={server.target} model={MODEL}"] == 1

        await own.until(all_have_checked)
        assert seen["charonia_gateway_requests_total route=/v1/chat/completions status=200"] == 3
        assert seen["charonia_gateway_requests_total route=other status=429"] == 2
        assert seen["charonia_gateway_requests_running"] == 1, "the stream of the other process"
        assert (seen["charonia_gateway_workers"], seen["charonia_gateway_worker_restarts_total"]) == (2, 0)
        held.may_end.set()
        assert await stream == "data: [DONE]"


async def test_a_killed_worker_is_replaced_and_the_others_go_on(tmp_path: Path) -> None:
    async with Double() as server, gateway(server, tmp_path) as own, contextlib.AsyncExitStack() as opened:
        before = own.pids()
        dies, lives = await own.clients(opened)
        assert (await dies.post("/v1/chat/completions", json=CHAT)).status_code == 200
        held = server.behaviour = Held()
        lost, kept = await begin(dies), await begin(lives)
        os.kill(before[0], signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            await lost
        held.may_end.set()
        assert await kept == "data: [DONE]"

        async def is_replaced() -> bool:
            seen = samples((await lives.get("/metrics")).text)
            return (seen["charonia_gateway_workers"], seen["charonia_gateway_worker_restarts_total"]) == (2, 1)

        await own.until(is_replaced)
        (new,) = set(own.pids()) - set(before)
        async with client_of(own.url, new) as web:
            seen = samples((await web.get("/metrics")).text)
            assert seen["charonia_gateway_requests_total route=/v1/chat/completions status=200"] >= 2, "none is lost"
            assert (await web.post("/v1/chat/completions", json=CHAT)).status_code == 200
        assert "was killed by SIGKILL; its replacement starts in 0 s" in own.log.read_text()


async def test_the_end_waits_for_the_streams_of_all_workers(tmp_path: Path) -> None:
    async with Double() as server, gateway(server, tmp_path) as own, contextlib.AsyncExitStack() as opened:
        held = server.behaviour = Held()
        webs = await own.clients(opened)
        streams = [await begin(web) for web in webs]
        async with client_of(own.url, own.pids()[1]) as another:
            for pid in (own.process.pid, *own.pids()):  # like a terminal
                os.kill(pid, signal.SIGINT)
            await own.until(lambda: is_draining(another))
            refused = await another.post("/v1/chat/completions", json=CHAT)
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        held.may_end.set()
        assert await asyncio.gather(*streams) == ["data: [DONE]"] * 2
        assert await own.ended() == 0
        assert list((tmp_path / "own").iterdir()) == [], "no files are left"


async def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    async with Double() as server, gateway(server, tmp_path) as own, contextlib.AsyncExitStack() as opened:
        server.behaviour = Held()
        stream = await begin((await own.clients(opened))[0])
        async with client_of(own.url, own.pids()[0]) as another:
            own.process.send_signal(signal.SIGTERM)
            await own.until(lambda: is_draining(another))
        server.fall_asleep()  # clients still receive their error
        own.process.send_signal(signal.SIGTERM)
        assert "shutting down" in await stream
        assert await own.ended() == 0
        text = own.log.read_text()
        assert "1 request was cut off: the gateway must shut down immediately" in text and "ERROR" not in text


async def test_workers_finish_their_streams_when_the_supervisor_dies(tmp_path: Path) -> None:
    async with Double() as server, gateway(server, tmp_path) as own, contextlib.AsyncExitStack() as opened:
        held = server.behaviour = Held()
        left = [psutil.Process(pid) for pid in own.pids()]
        stream = await begin((await own.clients(opened))[0])
        own.process.kill()
        await own.ended()
        await asyncio.to_thread(left[1].wait, HANG_S)
        held.may_end.set()
        assert await asyncio.wait_for(stream, HANG_S) == "data: [DONE]"
        assert (await asyncio.to_thread(psutil.wait_procs, left, HANG_S))[1] == []


async def test_requests_that_are_cut_off_get_an_error_and_one_line_in_the_log(tmp_path: Path) -> None:
    async def long(_: pb.ModelInferRequest) -> Parts:
        for _ in range(300):  # more than the kernel's buffers hold, but no more than a slow gateway can read
            yield part("x" * 60_000)
            await asyncio.sleep(0)
        await asyncio.Event().wait()

    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n"
    whole = json.dumps(STREAM).encode()
    async with (
        Double() as server,
        gateway(server, tmp_path, count=1, CHARONIA_DRAIN_TIMEOUT_S="0") as own,
        httpx.AsyncClient(base_url=own.url, timeout=HANG_S) as web,
    ):
        server.behaviour = long
        with socket.socket() as silent, socket.socket() as half:
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # it never reads
            for one, sent in ((silent, head % len(whole) + whole), (half, head % 100 + b"{")):
                one.connect(("127.0.0.1", own.port))
                one.sendall(sent)
            await own.until(lambda: server.requests)
            server.behaviour = Held()
            stream = await begin(web)

            async def all_run() -> bool:
                return samples((await web.get("/metrics")).text)["charonia_gateway_requests_running"] == 3

            await own.until(all_run)
            own.process.send_signal(signal.SIGTERM)
            assert "shutting down" in await stream
            half.settimeout(HANG_S)
            assert (await asyncio.to_thread(half.recv, 4096)).startswith(b"HTTP/1.1 503 ")
            assert await own.ended() == 0
        loud = [line for line in own.log.read_text().splitlines() if not line.startswith("INFO:")]
        assert loud == [
            "WARNING:     3 requests were cut off: not ended 0 s after the shutdown began (CHARONIA_DRAIN_TIMEOUT_S)"
        ]


async def test_gateway_that_cannot_start_names_the_remedy(tmp_path: Path) -> None:
    missing = tmp_path / "none.json"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        wrong = [
            ("CHARONIA_GATEWAY_KEYS_FILE", str(missing), 2, f"CHARONIA_GATEWAY_KEYS_FILE={missing} cannot be read"),
            (
                "CHARONIA_GATEWAY_PORT",
                port,
                1,
                f"the gateway cannot listen on 127.0.0.1, port {port} (Address already in use): "
                "end the process that uses it, or choose another port with CHARONIA_GATEWAY_PORT (--port)",
            ),
        ]
        redis = {"CHARONIA_GATEWAY_REDIS_URL": "redis://127.0.0.1:1"}

        async def check(variable: str, value: str, code: int, says: str, workers: int) -> None:
            env = {**os.environ, **redis, "CHARONIA_GATEWAY_WORKERS": str(workers), variable: value}
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "charonia_gateway", env=env, stderr=asyncio.subprocess.PIPE
            )
            text = (await asyncio.wait_for(process.communicate(), HANG_S))[1].decode()
            assert process.returncode == code and text.count(says) == 1 and "Traceback" not in text, text

        await asyncio.gather(*(check(*one, workers) for one in wrong for workers in (1, 2)))


# --- without processes


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ({}, "(CHARONIA_GATEWAY_MAX_RESPONSES)"),
        ({"keys_file": "k", "max_responses": 0}, "(CHARONIA_GATEWAY_KEYS_FILE)"),
        ({"keys_file": "k"}, "(CHARONIA_GATEWAY_KEYS_FILE and CHARONIA_GATEWAY_MAX_RESPONSES)"),
    ],
)
def test_several_processes_need_redis_for_keys_and_stored_responses(more: dict[str, Any], names: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Settings(_env_file=None, workers=2, redis_url="", **more)
    text = str(refused.value)
    assert "CHARONIA_GATEWAY_WORKERS=2 needs CHARONIA_GATEWAY_REDIS_URL" in text and names in text
    for fine in ({"workers": 1}, {"redis_url": "redis://h"}, {"max_responses": 0, "keys_file": None}):
        Settings(_env_file=None, **{"workers": 2, "redis_url": "", **more, **fine})


def test_a_port_belongs_to_one_gateway_before_it_listens() -> None:
    (port,) = free_ports(1)
    first = held_port("127.0.0.1", port)
    with pytest.raises(OSError, match="in use"):
        held_port("localhost", port)
    for one in first:
        one.close()
    for one in held_port("127.0.0.1", port):
        one.close()


def test_an_address_that_this_machine_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, 0)) for host in ("192.0.2.1", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    (one,) = bound_sockets("some", 0, shared=True)
    with one:
        assert one.getsockname()[0] == "127.0.0.1"
    del found[1]
    with pytest.raises(OSError, match="assign requested address"):
        bound_sockets("some", 0, shared=True)


async def test_the_metrics_of_a_server_that_is_gone_are_removed() -> None:
    metrics = Metrics()
    for target, up in (("a:1", True), ("b:1", False), ("a:1", None)):
        metrics.set_endpoint("m", target, up)
    lines = [line for line in (await metrics.render()).decode().splitlines() if line.startswith("charonia_gateway_end")]
    assert lines == ['charonia_gateway_endpoint_up{endpoint="b:1",model="m"} 0.0']


def test_deaths_in_a_row_are_replaced_ever_later() -> None:
    assert [workers.delay_s(deaths) for deaths in range(9)] == [0, 0, 1, 2, 4, 8, 16, 30, 30]


def test_the_number_of_workers_follows_the_cores(tmp_path: Path) -> None:
    assert [workers.default_workers(count) for count in (0.5, 2, 7.9, 8, 16, 64)] == [1, 1, 1, 2, 4, 8]
    quota = tmp_path / "cpu.max"
    here = len(os.sched_getaffinity(0))
    for text, expected in (("max 100000", here), ("50000 100000", 0.5), ("", here)):
        quota.write_text(text)
        assert workers._cores(quota) == expected
    assert workers._cores(tmp_path / "none") == here
