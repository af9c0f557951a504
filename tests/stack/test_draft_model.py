"""A server with a draft model, which `charonia serve` finds and prepares like the model."""

from __future__ import annotations

from pathlib import Path

import engine_metrics
import httpx
import pytest
from stack import DEMO_MODEL, HANG_S, Stack, running

SOURCES = ("ngram", "grammar", "draft")


@pytest.mark.parametrize("temperature", [0, 1.5])
async def test_responses_are_the_same_with_a_draft_model(tmp_path: Path, temperature: float) -> None:
    question = {"role": "user", "content": "What is the capital of France, and which river flows through it?"}
    body = {"messages": [question], "temperature": temperature, "seed": 1, "max_tokens": 40, "timings": True}
    texts, timings = [], []
    for method, settings in {"off": {}, "on": {"CHARONIA_SPECULATIVE_MODEL": str(DEMO_MODEL)}}.items():
        with running(Stack(DEMO_MODEL, tmp_path / method, settings)) as stack:
            async with httpx.AsyncClient(base_url=stack.gateway, timeout=HANG_S) as http:
                model = (await http.get("/v1/models")).json()["data"][0]["id"]
                response = (await http.post("/v1/chat/completions", json={"model": model, **body})).json()
            texts.append(response["choices"][0]["message"]["content"])
            timings.append(response["timings"])
            metrics = await engine_metrics.read_all(stack.metrics, "engine")
            assert ("; speculation: draft model " in stack.log_file.read_text()) == (method == "on")
            accepted = {name: metrics[f"spec_decode_num_accepted_tokens_total{{{name}}}"] for name in SOURCES}
            assert sum(accepted.values()) == timings[-1].get("draft_n_accepted", 0)
            assert accepted["grammar"] == 0
    assert texts[0] == texts[1]
    # The first decode of an engine has proposals, whatever it takes, because no step is measured yet.
    assert "draft_n" not in timings[0] and timings[1]["draft_n"] >= timings[1]["draft_n_accepted"] > 0
