"""KV in files: a server that starts again loads the KV of a prompt, also after it was killed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import engine_metrics
import httpx
from stack import DEMO_MODEL, HANG_S, Stack, running
from waiting import until

QUESTION = "What is the capital of France, and which river flows through it? " * 6


async def ask(stack: Stack) -> dict[str, Any]:
    body = {
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 24,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 5,
    }
    async with httpx.AsyncClient(base_url=stack.gateway, timeout=HANG_S) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        response = await http.post("/v1/chat/completions", json={"model": model, **body})
        assert response.status_code == 200, response.text
        return dict(response.json())


def cached(response: dict[str, Any]) -> int:
    return int(response["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_restarted_server_loads_kv_with_the_same_bytes(tmp_path: Path) -> None:
    env = {"CHARONIA_KV_OFFLOAD_PATH": str(tmp_path / "kv"), "CHARONIA_CACHE_BLOCK_SEQ_LEN": "16"}
    responses = []
    for run in ("killed", "stopped", "last"):
        with running(Stack(DEMO_MODEL, tmp_path / run, env)) as stack:
            responses.append(await ask(stack))

            async def metrics(stack: Stack = stack) -> dict[str, float]:
                return await engine_metrics.read_all(stack.metrics, "engine")

            async def stored() -> bool:
                return (await metrics())["kv_offload_bytes"] > 0

            await until(stored)
            hits = (await metrics())["external_prefix_cache_hits_total"]
            assert hits == cached(responses[-1])
            if run == "killed":
                for pid in stack.processes():
                    os.kill(pid, signal.SIGKILL)
            elif run == "stopped":  # it stores the rest before it ends
                stack.signal(signal.SIGTERM)
                assert await asyncio.to_thread(stack.wait) == 0
    first, *later = responses
    assert cached(first) == 0
    assert cached(later[0]) > 0
    assert cached(later[1]) == (first["usage"]["prompt_tokens"] - 1) // 16 * 16
    for response in later:
        assert response["choices"] == first["choices"]
