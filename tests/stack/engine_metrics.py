"""What the engine says of itself on Triton's metrics port."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True)
class EngineMetrics:
    running: float
    waiting: float
    blocks_active: float
    cancelled: float
    generated_tokens: float

    @property
    def idle(self) -> bool:
        return self.running == self.waiting == self.blocks_active == 0


async def read(url: str) -> EngineMetrics:
    """`url`: of Triton's metrics."""
    # Without reading the certificates of the world, which would hold up the event loop of whoever is being watched.
    async with httpx.AsyncClient(verify=False, trust_env=False) as http:
        text = (await http.get(url)).raise_for_status().text
    values = {
        (sample.name, sample.labels.get("finished_reason")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    return EngineMetrics(
        running=values["charonia_num_requests_running", None],
        waiting=values["charonia_num_requests_waiting", None],
        blocks_active=values["charonia_kv_blocks_active", None],
        cancelled=values["charonia_request_success_total", "cancelled"],
        generated_tokens=values["charonia_generation_tokens_total", None],
    )


async def idle(url: str, within_s: float = 10) -> EngineMetrics:
    """The metrics as soon as nothing runs, waits or holds a block; an assertion when that takes longer."""
    deadline = time.monotonic() + within_s
    while not (metrics := await read(url)).idle:
        assert time.monotonic() < deadline, f"still busy after {within_s} s: {metrics}"
        await asyncio.sleep(0.02)
    return metrics
