"""Reads a streamed chat completion of the gateway."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families


@dataclass
class Streamed:
    text: str = ""
    reason: str | None = None
    tokens: int = 0  # from usage, if it was requested
    last: str = ""  # the last line


async def read_stream(http: httpx.AsyncClient, body: dict[str, Any], begun: asyncio.Event) -> Streamed:
    """Read the stream to its end; set `begun` at its first text."""
    found = Streamed()
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            found.last = line or found.last
            event = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {}
            found.tokens = (event.get("usage") or {}).get("completion_tokens", found.tokens)
            for choice in event.get("choices", ()):
                found.text += choice["delta"].get("content") or ""
                found.reason = choice["finish_reason"] or found.reason
            if found.text:
                begun.set()
    return found


async def gateway_metric(http: httpx.AsyncClient, name: str, **labels: str) -> float:
    """The value of the gateway's only sample with this name and these labels."""
    (value,) = [
        sample.value
        for family in text_string_to_metric_families((await http.get("/metrics")).text)
        for sample in family.samples
        if sample.name == f"charonia_gateway_{name}" and labels.items() <= sample.labels.items()
    ]
    return value
