"""Each failure of a request has its own status in OpenAI's format. No client error is a 500."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from stack import HANG_S, Stack

USER: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def http(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.gateway, timeout=HANG_S) as client:
        yield client


@pytest.fixture(scope="module")
def model(http: httpx.Client) -> str:
    name: str = http.get("/v1/models").json()["data"][0]["id"]
    return name


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    assert error["message"]
    return error


def test_unknown_model_is_404(http: httpx.Client) -> None:
    error = error_of(http.post("/v1/chat/completions", json={"model": "gpt-9", "messages": USER}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "gpt-9" in error["message"]
    error_of(http.get("/v1/models/gpt-9"), 404)


def test_unknown_paths_and_methods_have_error_format(http: httpx.Client) -> None:
    error_of(http.get("/v2/nothing"), 404)
    error_of(http.get("/v1/chat/completions"), 405)


@pytest.mark.parametrize("stream", [False, True])
def test_too_long_request_names_the_numbers(http: httpx.Client, model: str, stream: bool) -> None:
    body = {"model": model, "prompt": "word " * 6000, "stream": stream}
    error = error_of(http.post("/v1/completions", json=body), 400)
    assert error["code"] == "context_length_exceeded"


def test_max_tokens_beyond_the_context_end_the_response_when_it_is_full(http: httpx.Client, model: str) -> None:
    """test_engine_model checks the engine's error without fit_max_tokens."""
    body = {"model": model, "prompt": "word " * 1000, "max_tokens": 1_000_000, "ignore_eos": True}
    answer = http.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["total_tokens"] == 2048


def test_huge_texts_are_rejected_without_full_tokenization(stack: Stack, http: httpx.Client, model: str) -> None:
    stack.forget_peaks()  # peaks of earlier tests
    before = stack.memory_mib()
    assert any(name.startswith("preprocessing") for name in before)
    for fields in ({"prompt": "word " * 1_600_000}, {"prompt": " " * 8_000_000}):
        error = error_of(http.post("/v1/completions", json={"model": model, **fields}), 400)
        assert error["code"] == "context_length_exceeded" and "2048" in error["message"]
    messages = [{"role": "user", "content": "word " * 800_000}] * 2
    error = error_of(http.post("/v1/chat/completions", json={"model": model, "messages": messages}), 400)
    assert error["code"] == "context_length_exceeded"
    peaks = stack.memory_mib("VmHWM")
    # Tokenizing a whole text would take 1 to 2 GiB.
    assert all(peaks[name] - size < 300 for name, size in before.items()), (before, peaks)


def test_other_content_types_and_large_bodies_are_rejected(http: httpx.Client, model: str) -> None:
    error_of(http.post("/v1/completions", data={"model": model, "prompt": "a"}), 415)
    error_of(http.post("/v1/completions", json={"model": model, "prompt": "a" * (9 << 20)}), 413)

    def chunked() -> Iterator[bytes]:
        for _ in range(10):
            yield b" " * (1 << 20)

    error_of(http.post("/v1/completions", content=chunked(), headers={"Content-Type": "application/json"}), 413)
