"""Access to Triton: the addresses of its ports, and the closed endpoints."""

from __future__ import annotations

import re
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import tritonclient.grpc.aio as triton
from stack import HANG_S, Stack
from tritonclient.utils import InferenceServerException

DEEP = b"[" * 200_000  # JSON that overflows the stack of the server's parser
MODEL = "/v2/models/ensemble"
REGION = "/v2/systemsharedmemory"


def alive(stack: Stack) -> bool:
    return httpx.get(f"{stack.http}/v2/health/live", timeout=HANG_S).status_code == 200


def test_triton_ports_listen_only_on_this_machine(stack: Stack) -> None:
    connections = psutil.Process(stack.pid_of("tritonserver")).net_connections("inet")
    listening = {
        (one.laddr.ip.removeprefix("::ffff:"), one.laddr.port)  # gRPC uses IPv6 sockets for both versions
        for one in connections
        if one.status == psutil.CONN_LISTEN
    }
    assert listening == {("127.0.0.1", port) for port in stack.ports[:3]}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", f"{MODEL}/generate"),
        ("POST", f"{MODEL}/generate_stream"),
        ("POST", f"{MODEL}/infer"),
        ("POST", f"{MODEL}/versions/1/generate"),
        ("POST", "/v2/repository/index"),
        ("POST", "/v2/repository/models/ensemble/load"),
        ("POST", "/v2/repository/models/ensemble/unload"),
        ("POST", f"{REGION}/region/region/register"),
        ("POST", f"{REGION}/unregister"),
        ("GET", f"{REGION}/status"),
        ("POST", "/v2/cudasharedmemory/region/region/register"),
        ("GET", "/v2/cudasharedmemory/status"),
        ("POST", "/v2/trace/setting"),
        ("GET", "/v2/trace/setting"),
        ("POST", f"{MODEL}/trace/setting"),
        ("POST", "/v2/logging"),
        ("GET", "/v2/logging"),
        ("GET", "/v2/models/stats"),
        ("GET", f"{MODEL}/stats"),
    ],
)
def test_unused_http_endpoints_are_closed(stack: Stack, method: str, path: str) -> None:
    answer = httpx.request(method, stack.http + path, content=DEEP if method == "POST" else None, timeout=HANG_S)
    assert answer.status_code == 403, answer.text
    assert "restricted" in answer.json()["error"]
    assert alive(stack)


@pytest.mark.parametrize("path", [f"{MODEL}/generate", "/v2/repository/index"])
def test_body_with_many_chunks_is_rejected(stack: Stack, path: str) -> None:
    """Triton before 25.07 used stack memory for each chunk of a body."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", stack.ports[0]), HANG_S) as connection:
        connection.sendall(head.encode() + b"1\r\n \r\n" * 700_000 + b"0\r\n\r\n")
        assert connection.recv(4096).split()[1] == b"403"
    assert alive(stack)


def test_health_and_metadata_are_open(stack: Stack) -> None:
    for path in ("/v2", "/v2/health/ready", MODEL, f"{MODEL}/ready", f"{MODEL}/config"):
        assert httpx.get(stack.http + path, timeout=HANG_S).status_code == 200, path


GRPC: dict[str, Callable[[triton.InferenceServerClient], Awaitable[Any]]] = {
    "load": lambda client: client.load_model("ensemble"),
    "unload": lambda client: client.unload_model("ensemble"),
    "index": lambda client: client.get_model_repository_index(),
    "register": lambda client: client.register_system_shared_memory("region", "/region", 64),
    "unregister": lambda client: client.unregister_system_shared_memory(),
    "status": lambda client: client.get_system_shared_memory_status(),
    "cuda": lambda client: client.register_cuda_shared_memory("region", b"aGFuZGxl", 0, 64),
    "trace": lambda client: client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"]}),
    "trace setting": lambda client: client.get_trace_settings(),
    "logging": lambda client: client.update_log_settings({"log_verbose_level": 1}),
    "log setting": lambda client: client.get_log_settings(),
    "statistics": lambda client: client.get_inference_statistics(),
}


@pytest.mark.parametrize("name", GRPC)
async def test_unused_grpc_calls_are_closed(stack: Stack, name: str) -> None:
    async with triton.InferenceServerClient(stack.grpc) as client:
        with pytest.raises(InferenceServerException, match="restricted"):
            await GRPC[name](client)
        assert await client.is_model_ready("ensemble")


def restrictions(stack: Stack, option: str) -> list[tuple[str, str]]:
    """Names and values of the headers that the server requires, read from its public command line."""
    command = Path(f"/proc/{stack.pid_of('tritonserver')}/cmdline").read_text().split("\0")
    found = [re.fullmatch(rf"--{option}=[\w,-]+:([^=]+)=(\w+)", text) for text in command]
    return [(match[1], match[2]) for match in found if match]


def test_command_line_reveals_no_access(stack: Stack) -> None:
    asked = restrictions(stack, "http-restricted-api")
    assert len(asked) == 2
    for name, value in asked:
        for header in (f"{name}: {value}", f"{name}:{value}", f"{name.partition(':')[0]}: {value}"):
            lines = ["POST /v2/repository/index HTTP/1.1", "Host: localhost", header, "Content-Length: 2", "", "{}"]
            with socket.create_connection(("127.0.0.1", stack.ports[0]), HANG_S) as connection:
                connection.sendall("\r\n".join(lines).encode())
                assert connection.recv(4096).split()[1] in (b"400", b"403"), header
    [(name, value)] = restrictions(stack, "grpc-restricted-protocol")
    service = "/inference.GRPCInferenceService"
    assert over_http2(stack.ports[1], f"{service}/ServerReady") == b"\x08\x01"  # true
    for header in (name, name.partition(":")[0], name.partition(":")[0] + ":"):
        assert over_http2(stack.ports[1], f"{service}/RepositoryIndex", f"triton-grpc-protocol-{header}", value) == b""
    assert alive(stack)


def over_http2(port: int, path: str, *header: str) -> bytes:
    """The response messages to an empty message, with any header. gRPC's own client would reject the header's name."""

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload

    def literal(text: str) -> bytes:
        assert len(text) < 127
        return bytes([len(text)]) + text.encode()

    names = [":method", "POST", ":scheme", "http", ":path", path, ":authority", "localhost"]
    names += ["content-type", "application/grpc", "te", "trailers", *header]
    block = b"".join(b"\0" * (i % 2 == 0) + literal(text) for i, text in enumerate(names))
    with socket.create_connection(("127.0.0.1", port), HANG_S) as connection:
        ask = frame(4, 0, 0, b"") + frame(1, 4, 1, block) + frame(0, 1, 1, bytes(5))
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + ask)
        answer = connection.makefile("rb")
        messages = b""
        while head := answer.read(9):
            payload = answer.read(int.from_bytes(head[:3], "big"))
            if head[3] == 0:  # DATA: a flag byte and the length precede each message
                messages += payload[5:]
            if head[3] == 3 or (head[3] == 1 and head[4] & 1):  # the stream has ended
                break
        return messages
