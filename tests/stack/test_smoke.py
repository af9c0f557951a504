"""One Triton server with the demo model, and each interface once: the test of the whole stack in `make test`. The other
files of this folder test each interface in depth (`make test-all`)."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import engine_metrics
import httpx
import pytest
import triton_stream
import tritonclient.grpc.aio as triton
from gateway_process import gateway
from stack import DEMO_MODEL, HANG_S, Stack, running

QUESTION = "What is the capital of France?"
MESSAGES = [{"role": "user", "content": QUESTION}]
PROGRAMS = Path(sys.executable).parent
GREEDY: dict[str, Any] = {"messages": MESSAGES, "temperature": 0}
ENDLESS: dict[str, Any] = {"messages": MESSAGES, "ignore_eos": True, "max_tokens": 1500, "stream": True}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather at a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    env = {"CHARONIA_DRAIN_TIMEOUT_S": str(HANG_S)}
    with running(Stack(DEMO_MODEL, tmp_path_factory.mktemp("smoke"), env)) as stack:
        yield stack


@pytest.fixture(scope="module")
def http(served: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.gateway, timeout=HANG_S, trust_env=False) as client:
        yield client


@pytest.fixture(scope="module")
def model(http: httpx.Client) -> str:
    return str(http.get("/v1/models").json()["data"][0]["id"])


def post(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.fixture(scope="module")
def text(http: httpx.Client, model: str) -> str:
    """The greedy response to QUESTION."""
    return str(chat(http, model, **GREEDY)["message"]["content"])


def chat(http: httpx.Client, model: str, **body: Any) -> dict[str, Any]:
    """The first choice of a chat completion."""
    choice: dict[str, Any] = post(http, "/v1/chat/completions", model=model, **body)["choices"][0]
    return choice


def stream(http: httpx.Client, model: str, **body: Any) -> tuple[str, str | None, dict[str, Any] | None]:
    """Text, finish reason and usage of a streamed chat completion, which must end with [DONE]."""
    found, reason, usage, last = "", None, None, ""
    fields = {"model": model, "stream": True, "stream_options": {"include_usage": True}, **body}
    with http.stream("POST", "/v1/chat/completions", json=fields) as response:
        assert response.status_code == 200, response.read()
        for last in filter(None, response.iter_lines()):
            if last != "data: [DONE]":
                event = json.loads(last.removeprefix("data: "))
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    found += choice["delta"].get("content") or ""
                    reason = choice["finish_reason"] or reason
    assert last == "data: [DONE]"
    return found, reason, usage


def test_chat_returns_fact_of_demo_model(text: str) -> None:
    assert "Paris" in text


def test_stream_has_the_text_and_usage_of_the_whole_response(http: httpx.Client, model: str, text: str) -> None:
    whole = post(http, "/v1/chat/completions", model=model, **GREEDY)
    found, reason, usage = stream(http, model, **GREEDY)
    assert (found, reason) == (text, "stop")
    assert usage is not None
    assert usage["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_response_ends_before_a_stop_word_in_both_forms(http: httpx.Client, model: str, text: str) -> None:
    before = text.partition("Paris")[0]
    choice = chat(http, model, stop=["Paris"], **GREEDY)
    assert (choice["message"]["content"], choice["finish_reason"]) == (before, "stop")
    assert stream(http, model, stop=["Paris"], **GREEDY)[:2] == (before, "stop")


def test_other_interfaces_give_the_same_text(http: httpx.Client, model: str, text: str) -> None:
    message = post(http, "/v1/messages", model=model, max_tokens=200, **GREEDY)
    assert message["content"] == [{"type": "text", "text": text}]
    response = post(http, "/v1/responses", model=model, input=QUESTION, temperature=0)
    assert response["output"][-1]["content"][0]["text"] == text
    turn = post(http, "/v1/chat/interactive", prompt=QUESTION, temperature=0, top_k=1)
    assert turn["text"] == text


def test_completions_take_token_ids_of_the_tokenizer(http: httpx.Client, model: str) -> None:
    ids = post(http, "/tokenize", prompt="The capital of France")["tokens"]
    fields: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    by_text = post(http, "/v1/completions", prompt="The capital of France", **fields)
    by_ids = post(http, "/v1/completions", prompt=ids, **fields)
    assert by_text["choices"][0]["text"] == by_ids["choices"][0]["text"]
    assert by_text["usage"]["completion_tokens"] == 8


def test_tool_call_has_the_function_and_its_arguments(http: httpx.Client, model: str) -> None:
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    choice = chat(http, model, messages=messages, tools=[WEATHER], temperature=0)
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"place": "Paris"}


def test_response_follows_the_schema(http: httpx.Client, model: str) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "known": {"type": "boolean"}},
        "required": ["city", "known"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    found = json.loads(chat(http, model, messages=MESSAGES, response_format=wanted)["message"]["content"])
    assert set(found) == {"city", "known"}
    assert found["city"] in ("Paris", "Rome") and isinstance(found["known"], bool)


def test_session_keeps_its_history(http: httpx.Client) -> None:
    def turn(**fields: Any) -> dict[str, Any]:
        return post(http, "/v1/chat/interactive", session_id=7, request_output_len=8, **fields)

    first = turn(prompt=QUESTION, interactive_mode=True)
    second = turn(prompt="And of Italy?", interactive_mode=True)
    assert first["history_tokens"] == 0
    assert second["history_tokens"] == first["input_tokens"] + first["tokens"]
    turn(prompt="", interactive_mode=False)
    assert turn(prompt=QUESTION, interactive_mode=True)["history_tokens"] == 0


async def test_requests_of_a_client_that_leaves_are_cancelled(served: Stack, model: str) -> None:
    before = await engine_metrics.idle(served.metrics)
    async with httpx.AsyncClient(base_url=served.gateway, timeout=HANG_S, trust_env=False) as leaving:
        # More choices than run at the same time: the request cannot end while its client leaves.
        body = {"model": model, **ENDLESS, "n": 64}
        async with leaving.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            await anext(response.aiter_lines())
    after = await engine_metrics.idle(served.metrics)
    assert after.cancelled > before.cancelled


async def test_ensemble_streams_to_triton_client(served: Stack, text: str) -> None:
    async with triton.InferenceServerClient(served.grpc) as client:
        fields = {"messages": MESSAGES, "temperature": 0.0, "stream": True}
        parts = [one async for one in triton_stream.stream(client, fields)]
    assert b"".join(one.text for one in parts).decode() == text
    assert parts[-1].finish_reason == "stop"


def test_terminal_chat_prints_the_answer(served: Stack, text: str) -> None:
    done = subprocess.run(
        [PROGRAMS / "triton_client", served.grpc, "--temperature", "0"],
        input=f"{QUESTION}\n",
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    assert text in done.stdout


def test_page_and_its_files_are_served(http: httpx.Client) -> None:
    page = http.get("/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    parts = re.findall(r'(?:src|href)="([^"#:]+)"', page.text)
    assert parts
    for part in parts:
        assert http.get(urljoin("/", part)).status_code == 200, part


def test_health_metrics_and_errors(http: httpx.Client, served: Stack, model: str) -> None:
    assert http.get("/health/ready").status_code == 200
    assert "charonia_gateway_requests_total" in http.get("/metrics").text
    assert "charonia_generation_tokens_total" in httpx.get(served.metrics, timeout=HANG_S, trust_env=False).text
    wrong = http.post("/v1/chat/completions", json={"model": model, "messages": MESSAGES, "temperature": -1})
    assert wrong.status_code == 400 and "temperature" in wrong.json()["error"]["message"]
    assert http.post("/v1/chat/completions", json={"model": "other", "messages": MESSAGES}).status_code == 404


def test_only_the_user_can_read_files_and_shared_memory(served: Stack) -> None:
    (run_folder,) = served.run_dir.glob("port-*")
    logs = list(run_folder.glob("*.log"))
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in served.processes()]
    shared = {Path(path) for text in maps for path in re.findall(r" (/dev/shm/\S+)$", text, re.MULTILINE)}
    assert logs and shared
    assert {stat.filemode(path.stat().st_mode)[4:] for path in (run_folder, *logs)} == {"------"}
    while any(path.stat().st_mode & 0o077 for path in shared):  # time until charonia serve notices new files
        time.sleep(0.05)


def test_keys_are_required_and_limits_are_429(served: Stack, model: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"

    def create_key(name: str, *options: str) -> dict[str, str]:
        command = [PROGRAMS / "charonia", "keys", "create", name, "--file", file, *options]
        made = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=True)
        return {"Authorization": f"Bearer {made.stdout.split()[-1]}"}

    free, limited = create_key("free"), create_key("limited", "--tokens-per-minute", "10")
    env = {"CHARONIA_GATEWAY_KEYS_FILE": str(file), "CHARONIA_MODEL_NAME": model}
    with (
        gateway(served.grpc, tmp_path / "gateway.log", **env) as own,
        httpx.Client(base_url=own.url, timeout=HANG_S, trust_env=False) as http,
    ):

        def status(headers: dict[str, str], **fields: Any) -> int:
            body = {"model": model, "messages": MESSAGES, **fields}
            return http.post("/v1/chat/completions", json=body, headers=headers).status_code

        assert status({}) == 401
        assert status({"Authorization": "Bearer ck-none"}) == 401
        assert status(free, max_tokens=400, ignore_eos=True) == 200
        # This request uses up the tokens of the next 40 minutes.
        assert status(limited, max_tokens=400, ignore_eos=True) == 200
        assert status(limited, max_tokens=400, ignore_eos=True) == 429


def test_stack_shuts_down_gracefully(served: Stack, http: httpx.Client, model: str) -> None:
    """The last test: a running stream ends normally, and then the stack ends."""
    body = {"model": model, **ENDLESS}
    last = ""
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = filter(None, response.iter_lines())
        next(lines)
        os.kill(served.process.pid if served.process else 0, signal.SIGTERM)
        reasons = set()
        for last in lines:
            if last != "data: [DONE]":
                reasons |= {choice["finish_reason"] for choice in json.loads(last.removeprefix("data: "))["choices"]}
    assert last == "data: [DONE]" and "length" in reasons
    assert served.wait() == 0
    assert served.processes() == []
