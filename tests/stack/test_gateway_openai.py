"""OpenAI's own client, unchanged, against the gateway."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
from gateway_process import gateway
from stack import HANG_S, Stack
from waiting import wait_until

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


async def test_usage_counts_tokens_and_is_in_last_chunk(api: openai.AsyncOpenAI, model: str) -> None:
    whole = await api.chat.completions.create(model=model, messages=QUESTION, temperature=0, logprobs=True)
    assert whole.usage is not None and whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.content is not None
    # The end token is counted, but is not part of the text.
    assert whole.usage.completion_tokens == len(whole.choices[0].logprobs.content) + 1
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    stream = await api.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert all(chunk.usage is None and chunk.choices for chunk in chunks[:-1])


async def test_several_prompts_are_answered_in_order_and_echoed(api: openai.AsyncOpenAI, model: str) -> None:
    prompts = ["The capital of", "One plus"]
    both = await api.completions.create(model=model, prompt=prompts, n=2, seed=1, temperature=0, echo=True)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    for at, prompt in enumerate(prompts):
        alone = await api.completions.create(model=model, prompt=prompt, temperature=0)
        assert both.choices[2 * at].text == both.choices[2 * at + 1].text == prompt + alone.choices[0].text


def test_gateway_finds_servers_by_dns_name(stack: Stack, tmp_path: Path) -> None:
    """localhost, which may have an IPv4 and an IPv6 address. The server listens on one of them."""
    port = stack.grpc.rpartition(":")[2]
    name = f"dns:///localhost:{port}"
    with gateway("127.0.0.1:1", tmp_path / "gateway.log", CHARONIA_TRITON_ENDPOINTS=name) as own:
        up = f'charonia_gateway_endpoint_up{{endpoint="127.0.0.1:{port}",model="model"}} 1.0'
        wait_until(lambda: up in httpx.get(f"{own.url}/metrics", timeout=HANG_S).text)
        body = {"model": "model", "prompt": "One, two,", "max_tokens": 2}
        answer = httpx.post(f"{own.url}/v1/completions", json=body, timeout=HANG_S)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 2
        check_quality(stack, own.url)


def check_quality(stack: Stack, url: str) -> None:
    """Quality records that are written while the model is served appear in its entry."""
    (manifest,) = stack.run_dir.glob("workspaces/*/triton_models/weights/manifest.json")
    before = manifest.read_text()
    record = {"text": {"perplexity": 5.5}, "quant_policy": 8}
    try:
        manifest.write_text(json.dumps({**json.loads(before), "quality": [record | {"command": "of its files"}]}))
        # If the server does not report the records in time, the entry shows none for ten seconds.
        wait_until(lambda: httpx.get(f"{url}/v1/models", timeout=HANG_S).json()["data"][0]["quality"] == [record])
    finally:
        manifest.write_text(before)


def test_documentation_examples_work(stack: Stack) -> None:
    assert httpx.get(f"{stack.gateway}/docs", timeout=HANG_S).status_code == 200
    schema = httpx.get(f"{stack.gateway}/openapi.json", timeout=HANG_S).json()
    tried = 0
    chat = {"model": "model", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat}
    files = {"file": ("batch.jsonl", json.dumps(line))}
    answer = httpx.post(f"{stack.gateway}/v1/files", files=files, data={"purpose": "batch"}, timeout=HANG_S)
    uploaded = {"input_file_id": answer.json()["id"]}
    for path, methods in schema["paths"].items():
        # Only with a key; test_several_models and test_adapters_served load and unload.
        if path.startswith("/models/") or path.endswith("_lora_adapter"):
            continue
        content = methods.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json", {})
        for example in content.get("examples", {}).values():
            body = {key: uploaded.get(key, value) for key, value in example["value"].items()}
            answer = httpx.post(f"{stack.gateway}{path}", json=body, timeout=HANG_S)
            if path in ("/v1/embeddings", "/v1/rerank", "/v1/score"):  # test_embeddings.py has models for these
                assert answer.status_code == 400 and "load it with the setting task" in answer.text
                continue
            assert answer.status_code == 200, answer.text
            tried += 1
    assert tried >= 4
