"""`timings` in responses, if requested."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from stack import HANG_S, Stack

CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 16}
COMPLETION: dict[str, Any] = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 8}


def post(stack: Stack, route: str, body: dict[str, Any]) -> httpx.Response:
    answer = httpx.post(f"{stack.gateway}/v1/{route}", json=body, timeout=HANG_S)
    assert answer.status_code == 200, answer.text
    assert "charonia-ignored-fields" not in answer.headers
    return answer


def chunks(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def check(timings: dict[str, Any], usage: dict[str, Any]) -> None:
    assert 0 <= timings["queue_ms"] <= timings["first_token_ms"] <= timings["total_ms"]
    assert timings["first_token_ms"] > 0
    assert timings["prompt_ms"] == pytest.approx(timings["first_token_ms"] - timings["queue_ms"], abs=0.01)
    assert timings["predicted_ms"] == pytest.approx(timings["total_ms"] - timings["first_token_ms"], abs=0.01)
    assert timings["cache_n"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert timings["cache_n"] + timings["prompt_n"] == usage["prompt_tokens"]
    assert timings["predicted_n"] == usage["completion_tokens"]
    assert timings["prompt_per_second"] > 0 and timings["predicted_per_second"] > 0


@pytest.mark.parametrize(("route", "body"), [("chat/completions", CHAT), ("completions", COMPLETION)])
def test_unstreamed_response_has_timings(stack: Stack, route: str, body: dict[str, Any]) -> None:
    answer = post(stack, route, {**body, "timings": True}).json()
    check(answer["timings"], answer["usage"])
    assert "timings" not in post(stack, route, body).json()


@pytest.mark.parametrize(("route", "body"), [("chat/completions", CHAT), ("completions", COMPLETION)])
def test_stream_has_timings_in_last_chunk_with_usage(stack: Stack, route: str, body: dict[str, Any]) -> None:
    streamed = {**body, "timings": True, "stream": True, "n": 2}
    parts = chunks(post(stack, route, streamed))
    assert [index for index, part in enumerate(parts) if "timings" in part] == [len(parts) - 1]
    assert parts[-1]["choices"][0]["finish_reason"] and parts[-1]["timings"]["predicted_n"] > 1
    parts = chunks(post(stack, route, {**streamed, "stream_options": {"include_usage": True}}))
    assert parts[-1]["choices"] == []
    check(parts[-1]["timings"], parts[-1]["usage"])
    assert not any("timings" in part for part in chunks(post(stack, route, {**body, "stream": True})))


def test_interactive_response_has_timings_in_last_line(stack: Stack) -> None:
    body = {"prompt": "Who are you?", "request_output_len": 16, "timings": True}
    whole = post(stack, "chat/interactive", body).json()
    assert whole["timings"]["predicted_n"] == whole["tokens"]
    lines = [json.loads(line) for line in post(stack, "chat/interactive", {**body, "stream": True}).text.splitlines()]
    assert [index for index, line in enumerate(lines) if "timings" in line] == [len(lines) - 1]
    assert lines[-1]["timings"]["prompt_n"] + lines[-1]["timings"]["cache_n"] == lines[-1]["input_tokens"]


def test_stream_reports_progress_of_long_prompt(stack: Stack) -> None:
    words = " ".join(f"word {number}" for number in range(300))
    body = {**CHAT, "messages": words, "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
    parts = chunks(post(stack, "chat/completions", {**body, "return_progress": True}))
    found = [part["prompt_progress"] for part in parts if "prompt_progress" in part]
    usage = parts[-1]["usage"]
    computed = [one["processed"] for one in found]
    assert found and computed == sorted(set(computed)) and computed[0] > 0 and computed[-1] < usage["prompt_tokens"]
    assert {(one["total"], one["cache"]) for one in found} == {(usage["prompt_tokens"], 0)}
    assert all(part["choices"][0]["delta"].get("content", "") == "" for part in parts if "prompt_progress" in part)
    assert not any("prompt_progress" in part for part in chunks(post(stack, "chat/completions", body)))
