"""The gateway rejects requests that arrive too slowly and requests of foreign web pages.

There is no Triton: a request that would reach Triton gets 503.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from gateway_process import GatewayProcess, gateway
from stack import HANG_S, free_ports
from waiting import wait_until

FRIEND = "https://chat.example.com"
CHAT = {"model": "model", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    env = {"CHARONIA_GATEWAY_ALLOWED_ORIGINS": f"{FRIEND}, http://intranet:8080/"}
    with gateway(f"127.0.0.1:{free_ports(1)[0]}", tmp_path_factory.mktemp("doors") / "gateway.log", **env) as started:
        yield started


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway that allows a request one second to arrive."""
    env = {"CHARONIA_GATEWAY_READ_TIMEOUT_S": "1"}
    with gateway(f"127.0.0.1:{free_ports(1)[0]}", tmp_path_factory.mktemp("hasty") / "gateway.log", **env) as started:
        yield started


def connect(url: str) -> socket.socket:
    address = httpx.URL(url)
    return socket.create_connection((address.host, address.port or 80), timeout=HANG_S)


def rest_of(connection: socket.socket) -> bytes:
    """The data until the server closes the connection."""
    said = b""
    while piece := connection.recv(65536):
        said += piece
    return said


def answer_to(gateway: GatewayProcess, sent: bytes) -> bytes:
    """The data until the server closes the connection. Sends again if the connection was closed without a response: on
    a busy machine a hasty gateway may have waited a second before the data arrived."""

    def answer() -> bytes:
        with connect(gateway.url) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(sent)
            return rest_of(connection)
        return b""

    found: bytes = wait_until(answer)
    return found


HEAD = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()


@pytest.mark.parametrize(
    "sent", [b"\r\n", HEAD, HEAD + b"Content-Length: 100\r\n\r\n{", HEAD + b"Transfer-Encoding: chunked\r\n\r\n"]
)
def test_incomplete_request_ends_connection(hasty: GatewayProcess, sent: bytes) -> None:
    head, _, body = answer_to(hasty, sent).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ") and b"connection: close" in head
    assert json.loads(body)["error"]["code"] == "request_timeout"


def test_connection_without_request_ends(hasty: GatewayProcess) -> None:
    with connect(hasty.url) as connection:
        assert rest_of(connection) == b""


@pytest.mark.parametrize("drip", [b"x", b"1\r\nx\r\n"])
def test_slow_request_ends_connection(hasty: GatewayProcess, drip: bytes) -> None:
    """Each byte arrives in time, but the request never ends: in the head, and in a chunked body."""

    def answer() -> bytes:
        with connect(hasty.url) as connection, contextlib.suppress(ConnectionError):  # see answer_to()
            connection.sendall(HEAD + (b"Cookie: " if drip == b"x" else b"Transfer-Encoding: chunked\r\n\r\n"))
            connection.settimeout(0.1)
            began = time.monotonic()
            while time.monotonic() - began < HANG_S:
                connection.sendall(drip)
                with contextlib.suppress(TimeoutError):
                    return connection.recv(65536)
        return b""

    assert wait_until(answer).startswith(b"HTTP/1.1 408 ")


def test_unread_body_is_not_waited_for(hasty: GatewayProcess) -> None:
    answer = answer_to(hasty, b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert answer.startswith(b"HTTP/1.1 404 ") and answer.count(b"HTTP/1.1") == 1


def test_connection_stays_open_between_requests(hasty: GatewayProcess) -> None:
    request = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"

    def two_answers() -> bool:
        with connect(hasty.url) as connection, contextlib.suppress(ConnectionError):
            for number in range(2):
                connection.sendall(request)
                answer = b""
                while not answer.endswith(b"}"):  # the body may arrive separately
                    if not (piece := connection.recv(65536)):
                        assert not answer
                        return False
                    answer += piece
                assert answer.startswith(b"HTTP/1.1 200 ")
                if not number:
                    time.sleep(1.5)  # longer than the time limit for a request
            return True
        return False

    wait_until(two_answers)  # a request may take more than a second to arrive: see answer_to()


def test_head_has_size_limit(own: GatewayProcess) -> None:
    with connect(own.url) as connection:
        connection.sendall(HEAD + b"Cookie: ")
        try:
            for _ in range(1000):
                connection.sendall(b"x" * 65536)
        except OSError:  # the connection is closed before the server has read the whole head
            return
        assert rest_of(connection).startswith(b"HTTP/1.1 431 ")


def ask(url: str, body: bytes | None = None, **headers: str) -> httpx.Response:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    content = json.dumps(CHAT).encode() if body is None else body
    return httpx.post(f"{url}{PATH}", content=content, headers=given, timeout=HANG_S)


JSON = "application/json"


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example", "Content_Type": JSON},
        {"Origin": "https://evil.example"},  # a Blob without a type has no Content-Type
        {"Origin": "null", "Content_Type": JSON},
        {"Origin": "http://localhost:1", "Content_Type": JSON},
        {"Origin": "http://evil.example:23333", "Host": "evil.example:23333", "Content_Type": JSON},  # DNS rebinding
        {"Origin": "http://[::1", "Host": "[::1", "Content_Type": JSON},
        {"Sec_Fetch_Site": "cross-site", "Content_Type": JSON},
        {"Sec_Fetch_Site": "same-site", "Content_Type": JSON},
    ],
)
def test_foreign_page_is_rejected(own: GatewayProcess, headers: dict[str, str]) -> None:
    answer = ask(own.url, **headers)
    assert answer.status_code == 403, answer.text
    assert answer.json()["error"]["code"] == "origin_not_allowed"
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("host", ["evil.example:23333", "evil.example", "127.0.0.1.evil.example", "[::1"])
def test_read_under_foreign_name_is_rejected(own: GatewayProcess, host: str) -> None:
    """A page of this name, which points at this machine, could read the response (DNS rebinding)."""
    answer = httpx.get(f"{own.url}/v1/models", headers={"Host": host}, timeout=HANG_S)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")


@pytest.mark.parametrize("host", ["localhost:1", "a.localhost", "127.0.0.1", "[::1]:80", "gateway", "chat.example.com"])
def test_read_under_own_name_is_accepted(own: GatewayProcess, host: str) -> None:
    assert httpx.get(f"{own.url}/docs", headers={"Host": host}, timeout=HANG_S).status_code == 200


def test_health_is_read_under_any_name(own: GatewayProcess) -> None:
    assert httpx.get(f"{own.url}/health/live", headers={"Host": "evil.example"}, timeout=HANG_S).status_code == 200


@pytest.mark.parametrize(("trusted", "client"), [("", "127.0.0.1"), ("127.0.0.1", "203.0.113.7")])
def test_forwarded_address_counts_only_from_trusted_proxies(tmp_path: Path, trusted: str, client: str) -> None:
    env = {
        "CHARONIA_GATEWAY_TRUSTED_PROXIES": trusted,
        "CHARONIA_GATEWAY_ACCESS_LOG": "true",
        "CHARONIA_LOG_FORMAT": "json",
    }
    log = tmp_path / "gateway.log"
    with gateway(f"127.0.0.1:{free_ports(1)[0]}", log, **env) as started:
        httpx.get(f"{started.url}/v1/models", headers={"X-Forwarded-For": "203.0.113.7"}, timeout=HANG_S)
        deadline = time.monotonic() + HANG_S
        while "/v1/models" not in log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    line = next(line for line in log.read_text().splitlines() if "/v1/models" in line)
    assert client in line, line


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_content_types_of_html_forms_are_rejected(own: GatewayProcess, kind: str) -> None:
    assert ask(own.url, Content_Type=kind).status_code == 415


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Content_Type": JSON, "Host": "behind.a.proxy.example"},
        {"Content_Type": JSON, "Origin": FRIEND, "Sec_Fetch_Site": "cross-site"},
        {"Content_Type": JSON, "Origin": "http://intranet:8080"},
        {"Content_Type": JSON, "Origin": "http://[::1]:23333", "Host": "[::1]:23333"},
        {"Content_Type": JSON, "Origin": "http://localhost:23333", "Host": "localhost:23333"},
        {"Content_Type": JSON, "Origin": "https://10.0.0.7", "Host": "10.0.0.7", "Sec_Fetch_Site": "same-origin"},
    ],
)
def test_clients_own_pages_and_allowed_origins_are_accepted(own: GatewayProcess, headers: dict[str, str]) -> None:
    assert ask(own.url, **headers).status_code == 503  # there is no Triton
