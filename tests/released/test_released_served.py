"""SmolLM2 answers chats through Triton, gateway and REST as in the Python API."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
from released_texts import CHATS
from stack import HANG_S, Stack, running

from charonia import Engine, SamplingParams

CHATS_SERVED = CHATS[:4]


def test_served_chats_equal_the_engines_greedy_responses(smollm2: Path, tmp_path: Path) -> None:
    with Engine.from_pretrained(smollm2, threads=2, cache_users=1, cache_user_tokens=4096) as engine:
        expected = engine.generate(CHATS_SERVED, SamplingParams(max_tokens=64, temperature=0))
    for output, word in zip(expected, ("Paris", "scattering", "My name is", "Banana"), strict=True):
        assert word in output.text
    assert {output.finish_reason for output in expected} == {"stop", "length"}

    settings = {"CHARONIA_CACHE_MAX_ENTRY_COUNT": "64"}
    with (
        running(Stack(smollm2, tmp_path / "run", settings)) as served,
        httpx.Client(base_url=f"{served.gateway}/v1", timeout=HANG_S) as client,
    ):
        model = client.get("/models").json()["data"][0]["id"]
        for chat, output in zip(CHATS_SERVED, expected, strict=True):
            body = {"model": model, "messages": chat, "temperature": 0, "max_tokens": 64}
            response = client.post("/chat/completions", json=body).json()
            choice = response["choices"][0]
            assert choice["message"]["content"] == output.text
            assert choice["finish_reason"] == output.finish_reason
            assert response["usage"]["prompt_tokens"] == len(output.prompt_token_ids)
            assert response["usage"]["completion_tokens"] == len(output.token_ids)

            events = client.post("/chat/completions", json={**body, "stream": True}).text.split("\n\n")
            chunks = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
            assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == output.text
