"""The engine's metrics on Triton's metrics port."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families
from stack import HANG_S


@dataclass(frozen=True)
class EngineMetrics:
    running: float
    waiting: float
    blocks_active: float
    cancelled: float
    generated_tokens: float
    subscriptions: float

    @property
    def idle(self) -> bool:
        return self.running == self.waiting == self.blocks_active == 0


async def read_all(url: str, model: str = "engine") -> dict[str, float]:
    """All samples of a model except buckets. A labelled sample has the name name{value}. `url`: Triton's metrics."""
    # Does not load the system's CA certificates, because that would block the event loop of the tested code.
    async with httpx.AsyncClient(verify=False, trust_env=False, timeout=HANG_S) as http:
        text = (await http.get(url)).raise_for_status().text
    found = {}
    for sample in (sample for family in text_string_to_metric_families(text) for sample in family.samples):
        name, labels = sample.name.removeprefix("charonia_"), sample.labels
        if name != sample.name and labels["model"] == model and "le" not in labels:
            reason = labels.get("finished_reason") or labels.get("reason") or labels.get("source")
            found[f"{name}{{{reason}}}" if reason else name] = sample.value
    return found


async def read(url: str) -> EngineMetrics:
    values = await read_all(url)
    return EngineMetrics(
        running=values["num_requests_running"],
        waiting=values["num_requests_waiting"],
        blocks_active=values["kv_blocks_active"],
        cancelled=values["request_success_total{cancelled}"],
        generated_tokens=values["generation_tokens_total"],
        subscriptions=values["subscriptions"],
    )


async def until(url: str, holds: Callable[[EngineMetrics], bool], what: str) -> EngineMetrics:
    """Wait until `holds` accepts the metrics, and return them."""
    deadline = time.monotonic() + HANG_S
    while not holds(metrics := await read(url)):
        assert time.monotonic() < deadline, f"after {HANG_S} s still not: {what}; {metrics}"
        await asyncio.sleep(0.02)
    return metrics


async def idle(url: str) -> EngineMetrics:
    """The metrics when nothing runs, waits or holds a block."""
    await until(url, lambda metrics: metrics.idle, "idle")
    # The engine counts a request's end before it becomes idle, but both may happen while the server collects the
    # metrics. Only a later collection certainly has the complete count.
    return await read(url)
