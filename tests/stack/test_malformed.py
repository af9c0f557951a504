"""Malformed requests over REST, gRPC and Triton's HTTP: no crash, no hang, and no growing memory.

The requests are the same in every run. CHARONIA_TEST_MALFORMED sets their number.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import json
import os
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import engine_metrics
import grpc
import httpx
import numpy as np
import triton_stream
from stack import HANG_S, Stack
from tritonclient.grpc import service_pb2

COUNT = int(os.environ.get("CHARONIA_TEST_MALFORMED", "1000"))
AT_ONCE = 8
# Allowed growth of a process: Triton's heap grows in two steps by 60 MiB in 24,000 requests, and then stays constant.
GROWTH_MIB = 100
MODELS = ("ensemble", "preprocessing", "engine", "postprocessing")
# The field that limits the response, so that requests are short.
LIMITS = {"/v1/responses": "max_output_tokens", "/v1/chat/interactive": "request_output_len"}
TYPES = {name: kind for name, (kind, _) in triton_stream.TYPES.items() if not name.startswith("subscription")}
TYPES["no_such_tensor"] = "FP64"
DEFAULTS: dict[str, Any] = {"BYTES": "x", "INT32": 2, "FP32": 1.0, "UINT64": 1, "BOOL": True, "FP64": 1.0}
MEANT = {
    "messages": '[{"role": "user", "content": "Hello"}]',
    "tools": "[{}]",
    "logit_bias": '{"5": 1}',
    "timeout_ms": 60_000,
}
KINDS = {"INT32": np.int32, "FP32": np.float32, "UINT64": np.uint64, "BOOL": np.bool_, "FP64": np.float64}
VALUES: list[Any] = [
    None, True, 0, -1, 2**31, 2**63, 2**64, 10**30, 1e308, -0.0, "", "\x00", "\ud800", "é" * 3000, [], {}, [[]],
    [None] * 300, {"a": {"b": []}}, "[" * 150, "NaN", "-1",
]  # fmt: skip


@functools.cache
def bodies(gateway: str) -> list[tuple[str, dict[str, Any]]]:
    """Path and body of each example in the gateway's documentation."""
    found = []
    for path, methods in httpx.get(f"{gateway}/openapi.json", timeout=HANG_S).json()["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json", {})
        for example in content.get("examples", {}).values():
            found.append((path, {**example["value"], LIMITS.get(path, "max_tokens"): 2}))
    return found


def bent_json(rng: random.Random, body: dict[str, Any]) -> bytes:
    """A body with a changed value, a truncated body, or a body with changed bytes."""
    bent = {**body}
    for _ in range(rng.randint(1, 3)):
        name = rng.choice([*bent, "tools", "top_k", "session_id", "n", "temperature", "timeout", "x\x00"])
        inner = bent.get(name)
        if isinstance(inner, list) and inner and rng.random() < 0.5:
            bent[name] = [*inner, rng.choice(VALUES)]
        else:
            bent[name] = rng.choice(VALUES)
    data = json.dumps(bent).encode()
    return bent_bytes(rng, data) if rng.random() < 0.4 else data


def bent_bytes(rng: random.Random, data: bytes) -> bytes:
    """Truncated, doubled or changed bytes."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        way = rng.randrange(4)
        if way == 0:
            data = data[:at]
        elif way == 1:
            data = data[:at] + rng.randbytes(rng.randint(1, 8)) + data[at:]
        elif way == 2:
            data = data[:at] + rng.randbytes(1) + data[at + 1 :]
        else:
            data = data + data[at : at + 50]
    return data


async def rest(stack: Stack, rng: random.Random, http: httpx.AsyncClient, said: collections.Counter[str]) -> None:
    path, body = rng.choice(bodies(stack.gateway))
    kind = rng.choice(["application/json"] * 8 + ["", "text/plain", "application/json; charset=\xff"])
    content = bent_json(rng, body)
    answer = await http.post(path, content=content, headers={"Content-Type": kind.encode("latin-1")})
    # 504: the request has a time limit.
    assert answer.status_code < 500 or answer.status_code == 504, (content, answer.text)
    assert "server_error" not in answer.text, (content, answer.text)
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert error["type"] and error["message"], (content, answer.text)
    said[f"REST {answer.status_code}"] += 1


async def raw(stack: Stack, rng: random.Random, http: httpx.AsyncClient, said: collections.Counter[str]) -> None:
    """Data that is not even HTTP. This side closes the connection, like a client that gives up."""
    path, example = rng.choice(bodies(stack.gateway))
    body = bent_json(rng, example)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    host, _, port = stack.gateway.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    with contextlib.suppress(ConnectionError):
        writer.write(bent_bytes(rng, head.encode() + body))
        await writer.drain()
        writer.write_eof()
        line = await reader.readline()
        said[f"raw {line[9:12].decode() or 'closed'}"] += 1
    writer.close()


def tensors(rng: random.Random, model: str) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=model, id="x" * rng.choice([0, 1, 300]))
    names = rng.sample([*TYPES], rng.randint(1, 6))
    if rng.random() < 0.7:
        names.append("messages" if model in ("ensemble", "preprocessing") else "input_ids")
    for name in {*names, "max_tokens"} if model in ("ensemble", "engine") else {*names}:
        kind = TYPES[name]
        value = MEANT.get(name, DEFAULTS[kind])
        shape = rng.choice([[1]] * 6 + [[0], [-1], [2], [1, 1], [], [2**40], [2, 1]])
        count = int(np.prod(shape)) if shape and 0 <= np.prod(shape) < 10 else 1
        if kind == "BYTES":
            text = str(rng.choice(VALUES)) if rng.random() < 0.4 else str(value)
            one = bent_bytes(rng, text.encode("utf-8", "surrogatepass"))
            length = len(one) if rng.random() < 0.9 else rng.choice([0, 2**31, 2**32 - 1, len(one) + 1])
            content = (length.to_bytes(4, "little") + one) * count
        else:
            ugly: list[Any] = [value, value, 0, 1] + ([] if kind == "BOOL" or name == "max_tokens" else [2**31 - 1])
            ugly += [float("nan"), float("inf"), -1.0] if kind == "FP32" else []
            ugly += [-1, -(2**31)] if kind == "INT32" else []
            content = np.array([rng.choice(ugly)] * count, KINDS[kind]).tobytes()
            content = content[: rng.choice([len(content)] * 9 + [1])]
        request.inputs.add(name=name, datatype=rng.choice([kind] * 9 + ["INT64", "", "BYTES"]), shape=shape)
        request.raw_input_contents.append(content)
    if rng.random() < 0.1:
        request.raw_input_contents.append(b"x")
    return request


async def over_grpc(
    stack: Stack, rng: random.Random, channel: grpc.aio.Channel, said: collections.Counter[str]
) -> None:
    """Tensors that do not fit, or bytes that are not a message. A stream is read to its end: see docs/contracts.md."""
    request = tensors(rng, rng.choice(MODELS)).SerializeToString()
    if rng.random() < 0.25:
        request = bent_bytes(rng, request)
    service = "/inference.GRPCInferenceService/"
    try:
        if rng.random() < 0.7:
            call = channel.stream_stream(f"{service}ModelStreamInfer")([request])
            codes = []
            async for answer in call:
                error_text = service_pb2.ModelStreamInferResponse.FromString(answer).error_message
                codes.append("error" if error_text else "answer")
            said[f"gRPC stream {codes[-1] if codes else 'nothing'}"] += 1
        else:
            await channel.unary_unary(f"{service}ModelInfer")(request, timeout=HANG_S)
            said["gRPC answer"] += 1
    except grpc.aio.AioRpcError as error:
        assert error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED), error
        said[f"gRPC {error.code().name}"] += 1


async def over_http(stack: Stack, rng: random.Random, http: httpx.AsyncClient, said: collections.Counter[str]) -> None:
    """Triton's own HTTP port: 403 if inference is closed there, which is the default."""
    body: dict[str, Any] = {name: MEANT.get(name, DEFAULTS[kind]) for name, kind in TYPES.items() if rng.random() < 0.1}
    path = f"{stack.http}/v2/models/{rng.choice(MODELS)}/{rng.choice(['generate', 'generate_stream', 'infer'])}"
    content = bent_json(rng, {"text_input": "Hello", "max_tokens": 2, **body})
    headers = {"Inference-Header-Content-Length": str(rng.choice([0, 1, -1, 2**40, "x"]))} if rng.random() < 0.1 else {}
    answer = await http.post(path, content=content, headers=headers)
    said[f"HTTP {answer.status_code}"] += 1


async def send(stack: Stack, count: int, seed: int) -> collections.Counter[str]:
    """Count the results of `count` requests."""
    said: collections.Counter[str] = collections.Counter()
    left = iter(range(count))
    channel = grpc.aio.insecure_channel(stack.grpc)
    ways: list[tuple[Callable[..., Awaitable[None]], Any]] = []

    async def work() -> None:
        for number in left:
            rng = random.Random(seed + number)
            way, by = ways[number % len(ways)]
            await asyncio.wait_for(way(stack, rng, by, said), 2 * HANG_S)

    async with httpx.AsyncClient(base_url=stack.gateway, timeout=HANG_S) as http:
        ways += [(rest, http), (raw, http), (over_grpc, channel), (over_http, http)]
        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    await channel.close()
    return said


def test_malformed_requests_cause_no_crash_hang_or_leak(stack: Stack) -> None:
    warm = asyncio.run(send(stack, min(COUNT, 400) // 2, 0))
    before, pids = stack.memory_mib(), set(stack.processes())
    began = time.monotonic()
    said = asyncio.run(send(stack, COUNT, 1_000_000))
    seconds = time.monotonic() - began
    after = stack.memory_mib()
    print(f"{COUNT} requests in {seconds:.0f} s; {dict(sorted(said.items()))}; MiB before {before}, after {after}")
    assert sum(said.values()) >= 0.9 * COUNT and sum(warm.values()) > 0
    assert stack.process is not None and stack.process.poll() is None
    assert set(stack.processes()) == pids, "a process has ended"
    assert set(after) == set(before)
    assert all(after[name] - size < GROWTH_MIB for name, size in before.items()), (before, after)
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    answer = httpx.post(f"{stack.gateway}/v1/chat/completions", json=body, timeout=HANG_S)
    assert answer.status_code == 200, answer.text
    asyncio.run(engine_metrics.idle(stack.metrics))  # no request was forgotten
    log = "".join(Path(file).read_text(errors="replace") for file in stack.run_dir.glob("port-*/gateway.log"))
    assert "Exception in ASGI application" not in log and "internal error of the gateway" not in log
