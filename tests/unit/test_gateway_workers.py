"""A gateway in several processes: one port, one picture of limits and metrics, and an end of which nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from charonia_gateway import cores, metrics, shared, workers
from charonia_gateway.keys import Key
from charonia_gateway.limiter import Limiter, LimitExceeded
from charonia_gateway.port import bound_sockets, held_port
from charonia_gateway.settings import Settings
from charonia_gateway.shared import Shared
from free_ports import free_ports
from key_files import PAST, KeyFile
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from triton_double import Double, input_text, part
from tritonclient.grpc import service_pb2 as pb
from worker_client import client_of

MODEL = "the-model"
CHAT: dict[str, Any] = {"model": MODEL, "messages": "hi"}
STREAM = {**CHAT, "stream": True}
HANG_S = 120
Parts = AsyncIterator[pb.ModelStreamInferResponse]


class Held:
    """A behaviour of the server: answers begin, and end when they may."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()

    async def __call__(self, request: pb.ModelInferRequest) -> Parts:
        yield part("begun")
        await self.may_end.wait()
        yield part("ended", "stop")


class Workers:
    """A gateway of several processes, and what tests ask of it."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, log: Path, folder: Path) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.port = port
        self.log = log
        self.folder = folder  # for files of its own

    def pids(self) -> set[int]:
        return {child.pid for child in psutil.Process(self.process.pid).children()}

    def client(self, pid: int) -> contextlib.AbstractAsyncContextManager[httpx.AsyncClient]:
        return client_of(self.url, pid)

    async def until(self, holds: Callable[[], Any]) -> None:
        async def wait() -> None:
            while not (found := holds()) or (asyncio.iscoroutine(found) and not await found):
                assert self.process.returncode is None, self.log.read_text()
                await asyncio.sleep(0.02)

        await asyncio.wait_for(wait(), HANG_S)

    async def ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            async with httpx.AsyncClient(base_url=self.url, timeout=HANG_S) as web:
                return (await web.get("/health/ready")).status_code == 200
        return False


@contextlib.asynccontextmanager
async def gateway(server: Double, folder: Path, count: int = 2, **env: str) -> AsyncIterator[Workers]:
    """`python -m charonia_gateway` with `count` workers, ready."""
    (port,) = free_ports(1)
    own = folder / "own"
    own.mkdir()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("CHARONIA_")}
    settings = {
        "CHARONIA_TRITON_ENDPOINTS": server.target,
        "CHARONIA_GATEWAY_PORT": str(port),
        "CHARONIA_GATEWAY_WORKERS": str(count),
        "CHARONIA_MODEL_NAME": MODEL,
        "CHARONIA_DRAIN_TIMEOUT_S": str(HANG_S),
        "TMPDIR": str(own),
        **env,
    }
    log = folder / "gateway.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "charonia_gateway", env={**inherited, **settings}, stdout=output, stderr=output
        )
    found = Workers(process, port, log, own)
    try:
        await found.until(found.ready)
        yield found
    finally:
        if process.returncode is None:
            processes = [psutil.Process(pid) for pid in found.pids()]
            process.kill()
            await process.wait()
            await asyncio.to_thread(psutil.wait_procs, processes, HANG_S)


def samples(text: str) -> dict[str, float]:
    """Values by name and labels, as they are written."""
    return {
        sample.name + "".join(f" {name}={value}" for name, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def begin(web: httpx.AsyncClient, headers: dict[str, str] | None = None) -> asyncio.Task[str]:
    """A stream whose first text has come; the task has the last line."""
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


async def test_limits_and_metrics_are_those_of_all_workers(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json", three={"requests_per_minute": 3, "access": ("inference", "metrics")})
    file.add("one", max_concurrent=1)
    async with (
        Double() as server,
        gateway(server, tmp_path, CHARONIA_GATEWAY_KEYS_FILE=str(file.path)) as own,
        contextlib.AsyncExitStack() as opened,
    ):
        first, second = sorted(own.pids())
        webs = [await opened.enter_async_context(own.client(pid)) for pid in (first, second)]
        answers = [
            await webs[at % 2].post("/v1/chat/completions", json=CHAT, headers=file.bearer("three")) for at in range(5)
        ]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]
        assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["2", "1", "0", "0", "0"]

        held = server.behaviour = Held()
        stream = await begin(webs[0], file.bearer("one"))
        refused = await webs[1].post("/v1/chat/completions", json=CHAT, headers=file.bearer("one"))
        assert refused.status_code == 429 and "1 requests running" in refused.json()["error"]["message"]

        async def shown(web: httpx.AsyncClient) -> dict[str, float]:
            return samples((await web.get("/metrics", headers=file.bearer("three"))).text)

        # Of the work that another worker has, this one hears within a second.
        up, outstanding = (
            f"charonia_gateway_endpoint_{what} endpoint={server.target}" for what in ("up", "outstanding_tokens")
        )

        async def hears() -> bool:
            return (await shown(webs[1]))[outstanding] > 0

        await own.until(hears)
        async with own.client(first) as another:  # the first is busy
            for web in (another, webs[1]):
                seen = await shown(web)
                assert seen["charonia_gateway_requests_total route=/v1/chat/completions status=200"] == 3
                assert seen["charonia_gateway_requests_total route=other status=429"] == 3
                assert seen["charonia_gateway_key_requests_total key=three"] >= 3
                assert seen["charonia_gateway_requests_running"] == 1, "the stream, and not what asks"
                assert (seen["charonia_gateway_workers"], seen["charonia_gateway_worker_restarts_total"]) == (2, 0)
                assert [value for name, value in seen.items() if name.startswith(up)] == [1]
        held.may_end.set()
        assert await stream == "data: [DONE]"
        server.behaviour = server.say_name

        async def has_room() -> bool:  # the stream's end comes before it is no longer counted
            answer = await webs[1].post("/v1/chat/completions", json=CHAT, headers=file.bearer("one"))
            return answer.status_code == 200

        await own.until(has_room)

        file.revoke("one")
        for web in webs:

            async def is_revoked(web: httpx.AsyncClient = web) -> bool:
                return (await web.get("/v1/models", headers=file.bearer("one"))).status_code == 401

            await own.until(is_revoked)


async def test_a_killed_worker_is_replaced_and_holds_nothing(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json", one={"max_concurrent": 1}, many={"access": ("inference", "metrics")})
    async with (
        Double() as server,
        gateway(server, tmp_path, CHARONIA_GATEWAY_KEYS_FILE=str(file.path)) as own,
        contextlib.AsyncExitStack() as opened,
    ):
        before = own.pids()
        killed, other = sorted(before)
        dies, lives = [await opened.enter_async_context(own.client(pid)) for pid in (killed, other)]
        counted = await dies.post("/v1/chat/completions", json=CHAT, headers=file.bearer("many"))
        assert counted.status_code == 200
        body = {"model": MODEL, "input": "hi", "store": True}
        stored = (await dies.post("/v1/responses", json=body, headers=file.bearer("many"))).json()
        held = server.behaviour = Held()
        stream = await begin(dies, file.bearer("one"))
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            await stream
        await own.until(lambda: killed not in own.pids())
        await own.until(lambda: server.actions)
        assert server.actions == [("cancel", server.requests[-1].id)], "the engine does not see that its caller is gone"
        held.may_end.set()

        async def has_room() -> bool:
            answer = await lives.post("/v1/chat/completions", json=CHAT, headers=file.bearer("one"))
            assert answer.status_code in (200, 429), answer.text
            return answer.status_code == 200

        await own.until(has_room)

        path = f"/v1/responses/{stored['id']}"
        assert (await lives.get(path, headers=file.bearer("many"))).json() == stored, "it outlives who stored it"
        follows = {**body, "previous_response_id": stored["id"]}
        next_one = (await lives.post("/v1/responses", json=follows, headers=file.bearer("many"))).json()
        assert [input_text(request, "session_id") for request in server.requests[-1:]] == [
            input_text(request, "session_id") for request in server.requests if input_text(request, "session_id")
        ][:1], "it goes on with the session"

        async def is_replaced() -> bool:
            text = (await lives.get("/metrics", headers=file.bearer("many"))).text
            return samples(text)["charonia_gateway_worker_restarts_total"] == 1

        await own.until(is_replaced)
        (new,) = own.pids() - before
        await own.until(own.ready)
        async with own.client(new) as web:
            seen = samples((await web.get("/metrics", headers=file.bearer("many"))).text)
            assert seen["charonia_gateway_workers"] == 2
            assert seen["charonia_gateway_requests_running"] == 0
            assert seen["charonia_gateway_requests_total route=/v1/chat/completions status=200"] >= 2, "none is lost"
            assert (await web.post("/v1/chat/completions", json=CHAT, headers=file.bearer("many"))).status_code == 200
            for id in (stored["id"], next_one["id"]):
                deleted = await web.delete(f"/v1/responses/{id}", headers=file.bearer("many"))
                assert deleted.json()["deleted"] is True
        gone = await lives.get(path, headers=file.bearer("many"))
        assert gone.status_code == 404
        assert [what for what, _ in server.actions].count("cancel") == 1, (
            "neither what has ended nor what others have is cancelled"
        )
        assert f"(process {killed}) was killed by SIGKILL; another one starts" in own.log.read_text()


async def test_the_end_waits_for_streams_of_all_workers(tmp_path: Path) -> None:
    async with (
        Double() as server,
        gateway(server, tmp_path, count=3) as own,
        contextlib.AsyncExitStack() as opened,
    ):
        held = server.behaviour = Held()
        webs = [await opened.enter_async_context(own.client(pid)) for pid in sorted(own.pids())]
        streams = [await begin(web) for web in webs[:2]]
        own.process.send_signal(signal.SIGTERM)
        idle = webs[2]

        async def drains() -> bool:
            return (await idle.get("/health/ready")).status_code == 503

        await own.until(drains)
        refused = await idle.post("/v1/chat/completions", json=CHAT)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        async with own.client(sorted(own.pids())[2]) as web:  # the port is still open, for whoever asks
            assert (await web.get("/health/ready")).status_code == 503
        held.may_end.set()
        assert await asyncio.gather(*streams) == ["data: [DONE]"] * 2
        assert await asyncio.wait_for(own.process.wait(), HANG_S) == 0
        assert list(own.folder.iterdir()) == [], "no files are left"


async def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    async with Double() as server, gateway(server, tmp_path) as own, contextlib.AsyncExitStack() as opened:
        server.behaviour = Held()
        webs = [await opened.enter_async_context(own.client(pid)) for pid in sorted(own.pids())]
        stream = await begin(webs[0])
        own.process.send_signal(signal.SIGTERM)

        async def drains() -> bool:
            return (await webs[1].get("/health/ready")).status_code == 503

        await own.until(drains)
        server.fall_asleep()  # who is cut off hears of it all the same
        own.process.send_signal(signal.SIGINT)
        assert "shutting down" in await stream
        assert await asyncio.wait_for(own.process.wait(), HANG_S) == 0
        text = own.log.read_text()
        assert (
            text.count("1 request was cut off: the gateway was asked to shut down at once") == 1 and "ERROR" not in text
        )


async def test_what_is_cut_off_at_the_end_is_a_line_of_the_log_and_knows_it(tmp_path: Path) -> None:
    async def endless(_: pb.ModelInferRequest) -> Parts:
        while True:
            yield part("x" * 60_000)
            await asyncio.sleep(0)

    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n"
    whole = json.dumps(STREAM).encode()
    async with (
        Double() as server,
        gateway(server, tmp_path, count=1, CHARONIA_DRAIN_TIMEOUT_S="0") as own,
        httpx.AsyncClient(base_url=own.url, timeout=HANG_S) as web,
    ):
        server.behaviour = endless
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
            assert await asyncio.wait_for(own.process.wait(), HANG_S) == 0
        loud = [line for line in own.log.read_text().splitlines() if not line.startswith("INFO:")]
        said = (
            "3 requests were cut off: not ended 0 s after the gateway was asked to shut down (CHARONIA_DRAIN_TIMEOUT_S)"
        )
        assert loud == [f"WARNING:     {said}"]


async def test_workers_do_not_outlive_their_supervisor(tmp_path: Path) -> None:
    async with Double() as server, gateway(server, tmp_path) as own, contextlib.AsyncExitStack() as opened:
        held = server.behaviour = Held()
        left = [psutil.Process(pid) for pid in sorted(own.pids())]
        works = await opened.enter_async_context(own.client(left[0].pid))
        stream = await begin(works)
        own.process.kill()
        await own.process.wait()
        await asyncio.to_thread(left[1].wait, HANG_S)

        def is_left() -> bool:  # to the next gateway
            with contextlib.suppress(OSError):
                for one in held_port("127.0.0.1", own.port):
                    one.close()
                return True
            return False

        deadline = time.monotonic() + HANG_S
        while not is_left():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        assert len(list(own.folder.iterdir())) == 1, "of the one that has not ended"
        left[0].terminate()  # as systemd does with what is left of a service
        held.may_end.set()
        assert await asyncio.wait_for(stream, HANG_S) == "data: [DONE]"
        _, alive = await asyncio.to_thread(psutil.wait_procs, left, HANG_S)
        assert alive == []
        assert list(own.folder.iterdir()) == [], "nor do their files"


async def test_what_cannot_start_ends_with_its_exit_code_and_says_what_would_be_right(tmp_path: Path) -> None:
    missing = tmp_path / "none.json"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        wrong = {
            "CHARONIA_GATEWAY_KEYS_FILE": (str(missing), 2, f"CHARONIA_GATEWAY_KEYS_FILE={missing} cannot be read"),
            "CHARONIA_GATEWAY_PORT": (
                port,
                1,
                f"the gateway cannot listen on 127.0.0.1, port {port} (Address already in use): "
                "end the process that has it, or choose another port with CHARONIA_GATEWAY_PORT (--port)",
            ),
        }

        async def check(variable: str, workers: str) -> None:
            value, code, says = wrong[variable]
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "charonia_gateway",
                env={**os.environ, "CHARONIA_GATEWAY_WORKERS": workers, variable: value},
                stderr=asyncio.subprocess.PIPE,
            )
            _, said = await asyncio.wait_for(process.communicate(), HANG_S)
            text = said.decode()
            assert process.returncode == code and text.count(says) == 1 and "Traceback" not in text, text

        for variable in wrong:
            await asyncio.gather(check(variable, "1"), check(variable, "2"))


async def test_the_gateway_outlives_errors_in_the_care_of_one_worker(tmp_path: Path) -> None:
    async with Double() as server, gateway(server, tmp_path) as own, contextlib.AsyncExitStack() as opened:
        lives, dies = sorted(own.pids())
        web = await opened.enter_async_context(own.client(lives))
        (file,) = own.folder.glob("*/state.sqlite")
        held = opened.enter_context(contextlib.closing(sqlite3.connect(file, isolation_level=None)))
        held.execute("BEGIN IMMEDIATE")  # as a worker that was stopped while it wrote
        supervisor = psutil.Process(own.process.pid)
        limits = supervisor.rlimit(resource.RLIMIT_NOFILE)
        supervisor.rlimit(resource.RLIMIT_NOFILE, (supervisor.num_fds() - 2, limits[1]))
        os.kill(dies, signal.SIGKILL)
        await own.until(lambda: "still counted: database is locked" in own.log.read_text())
        await own.until(lambda: "worker 2 cannot be started" in own.log.read_text().replace("worker 1", "worker 2"))
        assert (await web.get("/health/live")).status_code == 200
        held.execute("ROLLBACK")
        supervisor.rlimit(resource.RLIMIT_NOFILE, limits)
        await own.until(lambda: len(own.pids() - {dies}) == 2)
        await own.until(own.ready)


async def test_requests_are_answered_while_nothing_shared_can_be_written(tmp_path: Path) -> None:
    async with Double() as server, gateway(server, tmp_path) as own, contextlib.AsyncExitStack() as opened:
        web = await opened.enter_async_context(own.client(min(own.pids())))
        body = {"model": MODEL, "input": "hi", "store": True}
        stored = (await web.post("/v1/responses", json=body)).json()
        (file,) = own.folder.glob("*/state.sqlite")
        held = opened.enter_context(contextlib.closing(sqlite3.connect(file, isolation_level=None)))
        held.execute("BEGIN IMMEDIATE")
        for _ in range(2):
            answer = await web.post("/v1/chat/completions", json={**CHAT, "session_id": "one"})
            assert answer.status_code == 200, answer.text
            follows = {**body, "previous_response_id": stored["id"]}
            answer = await web.post("/v1/responses", json=follows)
            assert answer.status_code == 200 and answer.json()["store"] is False
            assert "charonia_gateway_endpoint_up" in (await web.get("/metrics")).text
            assert (await web.delete(f"/v1/responses/{stored['id']}")).status_code == 503
        assert (await web.get(f"/v1/responses/{stored['id']}")).json() == stored
        held.execute("ROLLBACK")

        async def is_deleted() -> bool:
            return (await web.delete(f"/v1/responses/{stored['id']}")).status_code == 200

        await own.until(is_deleted)
        assert "Traceback" not in own.log.read_text()


@pytest.mark.skipif(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, reason="with nohup it goes on")
async def test_a_terminal_that_closes_leaves_no_files(tmp_path: Path) -> None:
    async with Double() as server, gateway(server, tmp_path) as own:
        for pid in (own.process.pid, *own.pids()):
            with contextlib.suppress(ProcessLookupError):  # the first had it, and has ended this one
                os.kill(pid, signal.SIGHUP)
        assert await asyncio.wait_for(own.process.wait(), HANG_S) == 0
        assert list(own.folder.iterdir()) == []


async def test_files_of_a_gateway_whose_processes_were_all_killed_are_removed_by_the_next(tmp_path: Path) -> None:
    async with Double() as server:
        (tmp_path / "first").mkdir()
        async with gateway(server, tmp_path / "first") as first:
            held = list(first.folder.iterdir())
            (tmp_path / "second").mkdir()
            async with gateway(server, tmp_path / "second", TMPDIR=str(first.folder)):
                assert set(held) < set(first.folder.iterdir()), "that of one that runs stays"
            killed = [psutil.Process(pid) for pid in (first.process.pid, *first.pids())]
            for one in killed:  # so that no worker outlives the supervisor
                one.suspend()
            for one in killed:
                one.kill()
            await first.process.wait()
            await asyncio.to_thread(psutil.wait_procs, killed, HANG_S)
            assert list(first.folder.iterdir()) == held
            env = os.environ | {"TMPDIR": str(first.folder)}
            code = "from charonia_gateway import folder; print(folder.made())"
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", code, env=env, stdout=asyncio.subprocess.PIPE
            )
            made, _ = await process.communicate()
            assert [str(one) for one in first.folder.iterdir()] == [made.decode().strip()]


def test_a_folder_that_takes_no_database_is_one_line(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    env = {"CHARONIA_GATEWAY_PORT": str(port), "CHARONIA_GATEWAY_WORKERS": "2", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "charonia_gateway"],
        env=os.environ | env,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)),
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "set TMPDIR to one (disk I/O error)" in done.stderr
    assert list(tmp_path.iterdir()) == []


async def test_a_worker_that_hangs_is_killed_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_ALIVE_S", 0.2)
    shared.create(tmp_path)
    async with Double() as server:
        (port,) = free_ports(1)
        settings = Settings(triton_endpoints=server.target, port=port, host="127.0.0.1", model_name=MODEL)
        supervisor = workers._Supervisor(settings, 2, tmp_path)
        running = asyncio.create_task(supervisor.run())

        async def until(holds: Callable[[], bool]) -> None:
            async def wait() -> None:
                while not holds():
                    assert not running.done()
                    await asyncio.sleep(0.02)

            await asyncio.wait_for(wait(), HANG_S)

        def is_well() -> bool:
            return len(supervisor._workers) == 2 and all(one.ready for one in supervisor._workers.values())

        try:
            await until(is_well)
            hung = supervisor._workers[1]
            os.kill(hung.process.pid, signal.SIGSTOP)
            monkeypatch.setattr(workers, "_SILENT_S", 4.0)  # not before all have started, which ends everything
            await until(lambda: hung.process.returncode is not None)
            assert hung.process.returncode == -signal.SIGKILL
            await until(lambda: is_well() and supervisor._workers[1] is not hung)
        finally:
            supervisor._signalled()
            assert await asyncio.wait_for(running, HANG_S) == 0


async def test_a_worker_that_hangs_before_it_is_ready_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workers, "_ALIVE_S", 0.2)
    shared.create(tmp_path)
    pipe = tmp_path / "endpoints"
    os.mkfifo(pipe)
    (port,) = free_ports(1)
    settings = Settings(triton_endpoints=f"file://{pipe}", port=port, host="127.0.0.1", model_name=MODEL)
    supervisor = workers._Supervisor(settings, 1, tmp_path)
    running = asyncio.create_task(supervisor.run())
    while True:
        with contextlib.suppress(OSError):  # as long as nobody reads it
            writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            break
        assert not running.done(), caplog.text
        await asyncio.sleep(0.02)
    monkeypatch.setattr(workers, "_START_S", 0.2)  # from here on it waits for what is never written
    assert await asyncio.wait_for(running, HANG_S) == 1
    os.close(writer)
    assert " s and is killed" in caplog.text and "is not ready after " in caplog.text


# --- without processes


def test_a_port_is_of_one_gateway_also_before_it_listens() -> None:
    (port,) = free_ports(1)
    first = held_port("127.0.0.1", port)
    with pytest.raises(OSError, match="in use"):
        held_port("localhost", port)
    for one in first:
        one.close()
    for one in held_port("127.0.0.1", port):
        one.close()


@pytest.fixture
def two(tmp_path: Path) -> tuple[Shared, Shared]:
    """What two workers share."""
    shared.create(tmp_path)
    return Shared(tmp_path, 1), Shared(tmp_path, 2)


def key(id: str = "0", **limits: int) -> Key:
    return Key(id=id * 12, name="one", sha256="0" * 64, created=PAST, **limits)


async def test_a_limiter_counts_tokens_and_requests_at_once_with_the_other_workers(two: tuple[Shared, Shared]) -> None:
    here, there = (Limiter(workers=one) for one in two)
    asked = key(tokens_per_minute=10, max_concurrent=2)
    await here.begin(asked)
    await there.begin(asked)
    for full in (here, there):
        with pytest.raises(LimitExceeded, match="2 requests running"):
            await full.begin(asked)
    await here.end(asked, 4)
    headers = await there.begin(asked)
    assert headers["x-ratelimit-remaining-tokens"] == "6"
    two[0].forget(2)  # it was killed with two running
    await here.begin(asked)
    await here.begin(asked)
    await here.end(asked, 6)
    with pytest.raises(LimitExceeded, match="10 tokens per minute"):
        await here.begin(asked)
    assert here._running["0" * 12] == 1, "what is refused does not run"


async def test_what_could_not_be_told_of_running_requests_is_told_later(
    two: tuple[Shared, Shared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "_PAUSE_S", 0)
    here, there = (Limiter(workers=one) for one in two)
    one, other = (key(id, max_concurrent=1) for id in "01")

    async def until_here(asked: Key, has_room: bool) -> None:
        async def wait() -> None:
            while not has_room:
                try:
                    await here.begin(asked)
                except LimitExceeded:
                    return
                await here.end(asked, 0)
                await asyncio.sleep(0.02)
            while has_room:
                with contextlib.suppress(LimitExceeded):
                    await here.begin(asked)
                    return await here.end(asked, 0)
                await asyncio.sleep(0.02)

        await asyncio.wait_for(wait(), HANG_S)

    with contextlib.closing(sqlite3.connect(tmp_path / "state.sqlite", isolation_level=None)) as held:
        await there.begin(one)
        held.execute("BEGIN IMMEDIATE")
        await there.end(one, 0)
        held.execute("ROLLBACK")
        with pytest.raises(LimitExceeded):
            await here.begin(one)
        await there.begin(other)  # before it, all that was not told is
        await here.begin(one)
        await here.end(one, 0)
        await there.end(other, 0)

        following = asyncio.create_task(there.follow())
        held.execute("BEGIN IMMEDIATE")
        await there.begin(one)
        held.execute("ROLLBACK")
        await until_here(one, has_room=False)
        held.execute("BEGIN IMMEDIATE")
        await there.end(one, 0)
        held.execute("ROLLBACK")
        await until_here(one, has_room=True)
        following.cancel()


async def test_a_limit_that_goes_and_comes_back_counts_what_runs(two: tuple[Shared, Shared]) -> None:
    here, there = (Limiter(workers=one) for one in two)
    limited, unlimited = key(max_concurrent=1), key()
    await there.begin(limited)
    await there.begin(unlimited)  # the file of keys was loaded anew
    await there.end(limited, 0)
    await there.end(unlimited, 0)
    await here.begin(limited)
    await here.end(limited, 0)


async def test_a_limiter_whose_workers_state_fails_counts_alone(two: tuple[Shared, Shared]) -> None:
    limiter = Limiter(workers=two[0])
    asked = key(requests_per_minute=2, max_concurrent=1)
    two[0].close()
    await limiter.begin(asked)
    with pytest.raises(LimitExceeded, match="1 requests running"):
        await limiter.begin(asked)
    await limiter.end(asked, 0)
    await limiter.begin(asked)
    await limiter.end(asked, 0)
    with pytest.raises(LimitExceeded, match="2 requests per minute"):
        await limiter.begin(asked)


async def test_the_event_loop_goes_on_while_the_workers_metrics_are_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()
    merges = 0

    class Held(metrics.MultiProcessCollector):  # type: ignore[misc]
        def collect(self) -> Any:
            nonlocal merges
            merges += 1
            assert may_end.wait(HANG_S)
            return super().collect()

    class OfTheLoop(Collector):
        def collect(self) -> list[Metric]:
            assert threading.current_thread() is threading.main_thread(), "its database is of the loop's thread"
            return [GaugeMetricFamily("of_the_loop", "", value=1)]

    monkeypatch.setattr(metrics, "MultiProcessCollector", Held)
    now = 10.0
    own = metrics.Metrics(tmp_path, clock=lambda: now)
    own.add(OfTheLoop())
    asked = [asyncio.create_task(own.render()) for _ in range(3)]
    while not merges and not asked[0].done():
        await asyncio.sleep(0.001)
    may_end.set()
    assert len(set(await asyncio.gather(*asked))) == 1 and merges == 1
    assert b"of_the_loop 1.0" in await own.render() and merges == 1
    now += 1
    await own.render()
    assert merges == 2


def test_an_address_that_this_machine_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, 0)) for host in ("192.0.2.1", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    (one,) = bound_sockets("some", 0, shared=True)
    with one:
        assert one.getsockname()[0] == "127.0.0.1"
    del found[1]
    with pytest.raises(OSError, match="assign requested address"):
        bound_sockets("some", 0, shared=True)


def test_a_state_that_is_gone_is_not_made_anew(tmp_path: Path) -> None:
    with pytest.raises(sqlite3.OperationalError, match="unable to open"):
        Shared(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_window_ends(two: tuple[Shared, Shared]) -> None:
    here, there = two
    assert [one.count("w", 1, 60) for one in (here, there, here)] == [1, 2, 3]
    assert there.window("w")[0] == 3
    here.count("past", 1, -1)
    assert there.window("past")[0] == 0
    assert here.count("past", 1, 60) == 1


def test_an_endpoint_is_up_when_all_workers_find_it_so(two: tuple[Shared, Shared]) -> None:
    here, there = two
    here.tell_endpoints([("m", "a", True, 5), ("m", "b", True, 1)])
    there.tell_endpoints([("m", "a", False, 7)])
    assert here.endpoints() == [("m", "a", False, 12), ("m", "b", True, 1)]
    here.forget(2)
    assert there.endpoints() == [("m", "a", True, 5), ("m", "b", True, 1)]


def test_what_a_killed_worker_had_begun_is_undone(two: tuple[Shared, Shared], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock, too: the kernel takes it back. A connection that is closed stands for it."""
    monkeypatch.setattr(shared, "_PAUSE_S", 0)
    here, there = two
    here.run("BEGIN IMMEDIATE")
    here.run("INSERT INTO windows VALUES ('w', 1, 1e12)")
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        there.count("w", 1, 60)
    here.close()
    assert there.count("w", 1, 60) == 1


def test_deaths_in_a_row_are_replaced_ever_later() -> None:
    assert [workers.delay_s(deaths) for deaths in range(9)] == [0, 0, 1, 2, 4, 8, 16, 30, 30]


def test_the_number_of_workers_follows_the_cores(tmp_path: Path) -> None:
    assert [cores.default_workers(count) for count in (0.5, 2, 7.9, 8, 16, 64)] == [1, 1, 1, 2, 4, 8]
    quota = tmp_path / "cpu.max"
    here = len(os.sched_getaffinity(0))
    for text, expected in (("max 100000", here), ("50000 100000", 0.5), ("", here)):
        quota.write_text(text)
        assert cores.cores(quota) == expected
    assert cores.cores(tmp_path / "none") == here
