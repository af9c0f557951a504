"""The whole stack with API keys, TLS for REST, and mutual TLS to Triton."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from certificates import Authority
from stack import CHARONIA, HANG_S, Stack, running
from tiny_models import write_model
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as pb_grpc
from waiting import wait_until

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))

SECRET = "what-the-prompt-says"
TOKENS_PER_MINUTE = 100_000_000  # no request of these tests is rejected


@dataclass
class Secured:
    stack: Stack
    authority: Authority
    keys: dict[str, str]

    @property
    def trust(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.authority.ca)

    def web(self, name: str | None) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.keys[name]}"} if name else {}
        return httpx.Client(
            base_url=self.stack.gateway,
            verify=self.trust,
            headers=headers,
            timeout=HANG_S,
            trust_env=False,
        )


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    write_model(folder / "parrot", "byte_level", "parrot")
    authority = Authority(folder / "certificates")
    rest, triton = authority.issue("rest", "localhost", "127.0.0.1"), authority.issue("triton", "triton.internal")
    gateway = authority.issue("gateway", "gateway")
    file = folder / "keys.json"
    keys = {}
    for name in ("alice", "bob"):
        create = [CHARONIA, "keys", "create", name, "--file", file, "--tokens-per-minute", str(TOKENS_PER_MINUTE)]
        keys[name] = subprocess.run(create, capture_output=True, text=True, check=True).stdout.strip()
    env = {
        "CHARONIA_GATEWAY_KEYS_FILE": file,
        "CHARONIA_GATEWAY_TLS_CERT": rest.cert,
        "CHARONIA_GATEWAY_TLS_KEY": rest.key,
        "CHARONIA_GRPC_TLS_CERT": triton.cert,
        "CHARONIA_GRPC_TLS_KEY": triton.key,
        "CHARONIA_GRPC_TLS_CLIENT_CA": authority.ca,
        "CHARONIA_TRITON_TLS_CA": authority.ca,
        "CHARONIA_TRITON_TLS_CERT": gateway.cert,
        "CHARONIA_TRITON_TLS_KEY": gateway.key,
        "CHARONIA_TRITON_TLS_NAME": "triton.internal",
        "CHARONIA_ACCESS_LOG": "1",
    }
    with running(Stack(folder / "parrot", folder / "run", {name: str(value) for name, value in env.items()})) as stack:
        yield Secured(stack, authority, keys)


def test_openai_client_works_with_tls_and_key(secured: Secured) -> None:
    with secured.web("alice") as web:
        model = web.get("/v1/models").json()["data"][0]["id"]
    asked: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": SECRET}], "max_tokens": 4}
    http = openai.DefaultHttpxClient(verify=secured.trust, trust_env=False)
    url, key = f"{secured.stack.gateway}/v1", secured.keys["alice"]
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0, http_client=http) as client:
        whole = client.chat.completions.with_raw_response.create(**asked)
        assert whole.headers["x-ratelimit-limit-tokens"] == str(TOKENS_PER_MINUTE)
        parts = list(client.chat.completions.create(**asked, stream=True))
        assert parts[-1].choices[0].finish_reason
    with secured.web(None) as web:
        assert web.post("/v1/chat/completions", json=asked).status_code == 401
        assert web.get("/health/ready").status_code == 200


def test_printed_curl_command_works(secured: Secured) -> None:
    wait_until(lambda: "\n  Metrics" in secured.stack.log_file.read_text(), secured.stack.log)
    line = secured.stack.log_file.read_text().partition("Ask it")[2].partition("\n  Chat")[0].strip()
    assert line.startswith("curl https://"), line
    env = {**os.environ, "CHARONIA_API_KEY": secured.keys["alice"], "NO_PROXY": "*"}
    done = subprocess.run(["sh", "-c", line], env=env, capture_output=True, text=True, timeout=HANG_S)
    assert json.loads(done.stdout)["usage"]["completion_tokens"] > 0, done.stderr


def test_triton_grpc_port_requires_certificate(secured: Secured) -> None:
    own = secured.authority.issue("client", "client")
    ca = secured.authority.ca.read_bytes()
    options = [("grpc.ssl_target_name_override", "triton.internal"), ("grpc.enable_http_proxy", 0)]

    def live(credentials: grpc.ChannelCredentials | None) -> bool:
        target = secured.stack.grpc
        channel = (
            grpc.secure_channel(target, credentials, options) if credentials else grpc.insecure_channel(target, options)
        )
        with channel:
            return bool(
                pb_grpc.GRPCInferenceServiceStub(channel).ServerLive(pb.ServerLiveRequest(), timeout=HANG_S).live
            )

    assert live(grpc.ssl_channel_credentials(ca, own.key.read_bytes(), own.cert.read_bytes()))
    for credentials in (None, grpc.ssl_channel_credentials(ca)):
        with pytest.raises(grpc.RpcError):
            live(credentials)


def test_terminal_chat_accepts_certificates(secured: Secured) -> None:
    own, ca = secured.authority.issue("client", "client"), str(secured.authority.ca)
    program = Path(sys.executable).parent / "triton_client"
    tls = ["--tls-ca", ca, "--tls-cert", str(own.cert), "--tls-key", str(own.key), "--tls-name", "triton.internal"]
    chat = subprocess.run(
        [program, secured.stack.grpc, *tls, "--max-tokens", "4"],
        input=f"{SECRET}\n\nexit\n\n",
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert chat.returncode == 0 and "Traceback" not in chat.stderr, chat.stderr
    assert chat.stdout.strip()
    without = subprocess.run([program, secured.stack.grpc], capture_output=True, text=True, timeout=HANG_S)
    assert without.returncode == 1 and "No Triton server answers" in without.stderr
