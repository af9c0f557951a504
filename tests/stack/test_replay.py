"""`charonia replay` against a real server: the log's requests give the same tokens again."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from stack import CHARONIA, DEMO_MODEL, HANG_S, Stack, running

USER = [{"role": "user", "content": "Tell me about Triton and his conch shell."}]
PARAMETERS = {"type": "object", "properties": {"word": {"type": "string", "maxLength": 20}}, "required": ["word"]}
FUNCTION = {"name": "look_up", "parameters": PARAMETERS}
CHAT = {"messages": USER, "max_tokens": 40, "temperature": 1.0}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": PARAMETERS}}
# No request has a seed, except one.
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", {**CHAT, "n": 2}),
    ("chat/completions", {**CHAT, "stream": True, "seed": 7, "session_id": "a"}),
    ("chat/completions", {**CHAT, "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}),
    ("chat/completions", {**CHAT, "response_format": SCHEMA, "stream": True}),
    ("completions", {"prompt": ["The sea is", "The sea is"], "n": 2, "max_tokens": 40, "temperature": 1.0}),
    ("completions", {"prompt": "A shell", "best_of": 3, "max_tokens": 40, "temperature": 1.0, "logprobs": 2}),
    ("completions", {"prompt": "A shell", "max_tokens": 40, "stream": True}),
    ("responses", {"input": USER, "max_output_tokens": 40, "store": True}),
    ("responses", {"input": USER, "max_output_tokens": 40, "stream": True}),
    ("messages", {"messages": USER, "max_tokens": 40}),
    ("messages", {"messages": USER, "max_tokens": 40, "stream": True}),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("replay")
    with running(Stack(DEMO_MODEL, folder, {"CHARONIA_GATEWAY_LOG_REQUESTS": str(folder / "requests.jsonl")})) as stack:
        yield stack


@pytest.fixture(scope="module")
def requests(served: Stack) -> Path:
    """The log of REQUESTS, which were sent at the same time, and of one that continues a stored response."""
    asyncio.run(send_all(served))
    return served.run_dir / "requests.jsonl"


async def send_all(served: Stack) -> None:
    async with httpx.AsyncClient(base_url=f"{served.gateway}/v1/", timeout=HANG_S, trust_env=False) as web:

        async def post(path: str, body: dict[str, Any]) -> httpx.Response:
            return (await web.post(path, json={"model": "demo", **body})).raise_for_status()

        answers = await asyncio.gather(*(post(path, body) for path, body in REQUESTS))
        (stored,) = (one.json()["id"] for (_, body), one in zip(REQUESTS, answers, strict=True) if "store" in body)
        await post("responses", {"input": "And then?", "previous_response_id": stored, "max_output_tokens": 8})


def replayed(file: Path, stack: Stack, *options: str) -> subprocess.CompletedProcess[str]:
    command = [CHARONIA, "replay", file, "--url", stack.gateway, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)


@pytest.mark.parametrize("concurrency", ["1", "8"])
async def test_replay_of_every_api_gives_the_logged_tokens(served: Stack, requests: Path, concurrency: str) -> None:
    done = await asyncio.to_thread(replayed, requests, served, "--json", "--concurrency", concurrency)
    found = json.loads(done.stdout)
    (skipped,) = found["not_equal"]
    assert (skipped["result"], skipped["detail"]) == (
        "skipped",
        "it belongs to a session or continues a stored response",
    )
    assert (found["equal"], found["requests"], done.returncode) == (len(REQUESTS), len(REQUESTS) + 1, 0)
    assert found["logged_fingerprints"] == found["fingerprints"]


async def test_replay_reports_altered_tokens_and_fails(served: Stack, requests: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in requests.read_bytes().splitlines()][:2]
    lines[0]["choices"][0]["token_ids"][3] += 1
    lines[1]["choices"][0]["token_ids"][5] += 1
    lines[1]["system_fingerprint"] = "fp_other"
    altered = tmp_path / "altered.jsonl"
    altered.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = await asyncio.to_thread(replayed, altered, served)
    assert done.returncode == 1, done.stdout + done.stderr
    ids = [line["choices"][0]["token_ids"] for line in lines]
    assert f"response 0, token 3: {ids[0][3] - 1}, logged: {ids[0][3]}" in done.stdout
    assert f"response 0, token 5: {ids[1][5] - 1}, logged: {ids[1][5]}" in done.stdout
    assert "Tokens differ with equal fingerprints" in done.stdout
    altered.write_text(json.dumps(lines[1]) + "\n")
    done = await asyncio.to_thread(replayed, altered, served)
    assert done.returncode == 0 and "tokens may differ" in done.stdout
