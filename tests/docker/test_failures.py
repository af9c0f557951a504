"""Crashes and shutdowns during responses, in containers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from project import HANG_S, Project

CLIENTS = 6
TOKENS = 1500  # of a stream that runs to its end
USER: list[Any] = [{"role": "user", "content": "Hello"}]


def body(tokens: int, **fields: Any) -> dict[str, Any]:
    return {"model": "/models/slow", "messages": USER, "max_tokens": tokens, "ignore_eos": True, **fields}


async def streamed(url: str, begun: asyncio.Event) -> None:
    extra = {"ignore_eos": True}
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=HANG_S) as client:
        chunks = await client.chat.completions.create(
            model="/models/slow", messages=USER, max_tokens=4000, stream=True, extra_body=extra
        )
        async for _ in chunks:
            begun.set()


async def unstreamed(url: str, begun: asyncio.Event) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=HANG_S) as client:
        begun.set()
        await client.completions.create(
            model="/models/slow", prompt="Hello", max_tokens=4000, extra_body={"ignore_eos": True}
        )


def kill_triton(project: Project) -> None:
    """Kill Triton's process in its container."""
    program = (
        "import os, pathlib\n"
        "for folder in pathlib.Path('/proc').glob('[0-9]*'):\n"
        "    if (folder / 'comm').read_text().strip() == 'tritonserver':\n"
        "        os.kill(int(folder.name), 9)"
    )
    project.compose("exec", "--no-TTY", "server", "python3", "-c", program)


def kill_container(project: Project) -> None:
    """Kill the container's first process, and with it all others. (Docker does not restart after `docker kill`.)"""
    container = project.container("server")
    pid = container["State"]["Pid"]
    with contextlib.suppress(OSError):
        if container["Id"] in Path(f"/proc/{pid}/cgroup").read_text():
            os.kill(pid, signal.SIGKILL)
            return
    pytest.skip("the processes of containers are not seen from here")


@pytest.mark.parametrize("kill", [kill_triton, kill_container])
async def test_streams_pause_while_a_killed_server_starts_and_whole_responses_fail(
    slow: Project, kill: Callable[[Project], None]
) -> None:
    url = slow.gateway
    begun = [asyncio.Event() for _ in range(CLIENTS)]
    kinds = (streamed, unstreamed)
    clients = [asyncio.create_task(kinds[index % 2](url, event)) for index, event in enumerate(begun)]
    await asyncio.wait_for(asyncio.gather(*(event.wait() for event in begun)), HANG_S)
    await asyncio.to_thread(kill, slow)
    killed = time.monotonic()
    refusals = []
    async with httpx.AsyncClient(base_url=url, timeout=HANG_S) as http:
        while (answer := await http.post("/v1/chat/completions", json=body(1))).status_code != 200:
            refusals.append(answer)
            assert time.monotonic() - killed < HANG_S, answer.text
            await asyncio.sleep(0.2)
    healed_s = time.monotonic() - killed
    print(f"healed after {healed_s:.1f} s; {len(refusals)} refusals meanwhile")
    results = await asyncio.wait_for(asyncio.gather(*clients, return_exceptions=True), HANG_S)
    assert all(result is None for result in results[::2]), results
    assert all(isinstance(result, openai.APIError) for result in results[1::2]), results
    # A request sent before the gateway has noticed counts as a running one and gets an error, too.
    assert refusals
    for answer in refusals:
        assert answer.status_code == 503, answer.text
        assert int(answer.headers["Retry-After"]) >= 1
        assert answer.json()["error"]["code"] == "service_unavailable"
    # Possibly more than once: in one run it also died without the kill (not seen in 160 further kills). The service
    # recovers in this case too.
    restarts = slow.container("server")["RestartCount"]
    assert restarts >= 1
    if restarts > 1:
        warnings.warn(f"the server was started again {restarts} times:\n{slow.logs('server')[-20000:]}", stacklevel=1)


async def test_stop_lets_running_streams_end(slow: Project) -> None:
    url = slow.gateway

    async def read(http: httpx.AsyncClient, begun: asyncio.Event) -> tuple[str | None, str]:
        reason, last = None, ""
        async with http.stream("POST", "/v1/chat/completions", json=body(TOKENS, stream=True)) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line:
                    begun.set()
                    last = line
                if line.startswith("data: {"):
                    choices = json.loads(line.removeprefix("data: "))["choices"]
                    reason = (choices and choices[0]["finish_reason"]) or reason
        return reason, last

    async with httpx.AsyncClient(base_url=url, timeout=HANG_S) as http:
        begun = [asyncio.Event() for _ in range(CLIENTS)]
        streams = [asyncio.create_task(read(http, event)) for event in begun]
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in begun)), HANG_S)
        stop = asyncio.create_task(asyncio.to_thread(slow.compose, "stop"))
        while (await http.get("/health/ready")).status_code != 503:
            await asyncio.sleep(0.05)
        refused = await http.post("/v1/chat/completions", json=body(1))
        assert refused.status_code == 503
        assert int(refused.headers["Retry-After"]) >= 1
        for reason, last in await asyncio.wait_for(asyncio.gather(*streams), HANG_S):
            assert (reason, last) == ("length", "data: [DONE]")
    await stop
    gateway, server = (slow.container(name)["State"] for name in ("gateway", "server"))
    assert (gateway["ExitCode"], server["ExitCode"]) == (0, 0)
    assert gateway["FinishedAt"] < server["FinishedAt"]
