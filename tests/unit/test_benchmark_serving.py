"""`charonia benchmark serving`: its targets, and its errors."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from charonia.bench import records, targets
from charonia.bench.cli import app
from charonia.bench.figures import Trace
from charonia.bench.serving import closed_loop
from charonia.bench.workload import Job, jobs_from_prompts
from charonia.errors import InvalidRequestError, ModelError
from charonia.text.tokenizer import load_tokenizer

DEMO_MODEL = Path(__file__).resolve().parents[2] / "models" / "demo" / "model"


class Half:
    """Serves every second request, and rejects the others."""

    def __init__(self) -> None:
        self._asked = 0

    async def run(self, job: Job, trace: Trace) -> None:
        self._asked += 1
        if self._asked % 2:
            raise RuntimeError("HTTP 429: the queue is full")
        trace.arrivals.append(targets.clock())


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses of the targets, which are replaced by doubles."""
    found: list[str] = []

    @asynccontextmanager
    async def open_target(address: str, *_: Any) -> AsyncIterator[Half]:
        found.append(address)
        yield Half()

    monkeypatch.setattr(targets, "triton", open_target)
    monkeypatch.setattr(targets, "gateway", open_target)
    return found


@pytest.mark.parametrize(("target", "address"), [("triton", "127.0.0.1:4001"), ("gateway", "https://127.0.0.1:4002")])
def test_serving_with_failed_requests_counts_and_names_them(
    asked: list[str], tmp_path: Path, target: str, address: str
) -> None:
    (tmp_path / "prompts").write_text("Hello\n")
    options = ["--prompts", str(tmp_path / "prompts"), "--num-requests", "6", "--concurrency", "1", "--warmup", "0"]
    env = {"CHARONIA_GRPC_PORT": "4001", "CHARONIA_GATEWAY_PORT": "4002", "CHARONIA_GATEWAY_TLS_CERT": "cert.pem"}
    file = tmp_path / "figures"
    done = CliRunner().invoke(app, ["serving", "model", "--target", target, *options, "--json", str(file)], env=env)
    assert isinstance(done.exception, ModelError) and asked == [address]
    assert str(done.exception) == (
        "3 of 6 requests failed and are not in the figures: 3 x RuntimeError: HTTP 429: the queue is full"
    )
    assert {one.name: one.value for one in records.read(file)[1]}["errors"] == 3


def test_gateway_target_with_tls_error_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = {
        "https://a": (httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate"), "--tls-ca"),
        "http://a": (httpx.RemoteProtocolError("Server disconnected without sending a response."), "https://"),
    }
    for url, (error, hint) in failures.items():

        async def fails(*_: Any, error: httpx.HTTPError = error) -> httpx.Response:
            raise error

        monkeypatch.setattr(httpx.AsyncClient, "get", fails)
        with pytest.raises(ModelError, match=hint):
            asyncio.run(opened(url))


async def test_error_without_text_names_its_cause() -> None:
    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        linger = struct.pack("ii", 1, 0)  # closing resets the connection
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()

    server = await asyncio.start_server(reset, "127.0.0.1")
    async with server, httpx.AsyncClient(timeout=None) as client:
        host, port = server.sockets[0].getsockname()

        class Asks:
            async def run(self, job: Job, trace: Trace) -> None:
                await client.get(f"http://{host}:{port}")

        [trace] = await closed_loop(Asks(), [Job("x", 1)], 1, lambda: None)
    assert trace.error.startswith("ReadError, caused by ConnectionResetError: ") and "reset by peer" in trace.error


CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
SHARED_CHAT = {"id": 1, "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}


@pytest.mark.parametrize(
    ("text", "prompts"),
    [
        ("One {\n\nTwo [1]\n", ["One {", "Two [1]"]),
        (json.dumps({"prompt": "One"}) + "\n" + json.dumps({"text": "Two"}), ["One", "Two"]),
        (json.dumps({"messages": CHAT}), [CHAT[:1]]),
        (json.dumps([{"messages": CHAT[:1]}, "One"]), [CHAT[:1], "One"]),
        (json.dumps([SHARED_CHAT], indent=2), [CHAT[:1]]),
        (json.dumps(SHARED_CHAT), [CHAT[:1]]),
    ],
)
def test_prompts_of_each_kind_of_file_are_recognised(tmp_path: Path, text: str, prompts: list[Any]) -> None:
    file = tmp_path / "prompts"
    file.write_text(text)
    found = [job.prompt for job in jobs_from_prompts(file, len(prompts) + 1, 5)]
    assert found == [*prompts, prompts[0]]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\n", "has no prompts"),
        ('{"prompt": "One"}\nTwo', "line 2: it begins like JSON and is not valid JSON"),
        ('[{"messages": []}]', "entry 1 has no prompt"),
        ('{"question": "One"}', "line 1 has no prompt"),
        ('{"messages": [{"role": "assistant", "content": "Hello"}]}', "line 1 has no prompt"),
        ('{"conversations": [{"from": "gpt", "value": "Hello"}]}', "line 1 has no prompt"),
    ],
)
def test_json_without_a_prompt_is_rejected(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "prompts"
    file.write_text(text)
    with pytest.raises(InvalidRequestError, match=said):
        jobs_from_prompts(file, 1, 5)


def test_serving_without_a_file_sends_random_words_of_random_length(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Job] = []

    async def run(_: Half, job: Job, trace: Trace) -> None:
        sent.append(job)
        trace.arrivals.append(targets.clock())

    monkeypatch.setattr(Half, "run", run)
    options = ["--num-requests", "20", "--prompt-tokens", "40", "--max-tokens", "20", "--warmup", "0"]
    done = CliRunner().invoke(app, ["serving", str(DEMO_MODEL), "--target", "triton", *options])
    assert done.exit_code == 0, done.output
    tokenizer = load_tokenizer(DEMO_MODEL)
    lengths = [len(tokenizer(job.prompt, add_special_tokens=False)["input_ids"]) for job in sent]
    assert len(sent) == 20 and 15 < min(lengths) < 35 < 45 < max(lengths) <= 60
    assert 10 <= min(job.max_tokens for job in sent) < 15 < 25 < max(job.max_tokens for job in sent) <= 30


async def test_messages_are_sent_to_the_chat_route() -> None:
    sent: dict[str, Any] = {}

    def answer(request: httpx.Request) -> httpx.Response:
        sent[request.url.path] = json.loads(request.content)["messages"]
        return httpx.Response(200, text="data: [DONE]\n\n")

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://gateway") as client:
        await targets.Gateway(client, "m").run(Job(CHAT[:1], 1), Trace(0.0))
    assert sent == {"/v1/chat/completions": CHAT[:1]}


async def test_requests_are_greedy_without_repetition_penalty() -> None:
    """The sampling parameters of generation_config.json would change the time of a step."""
    found: list[Any] = []

    class Asked:
        """A double of an engine and of Triton's client."""

        async def generate(self, request: Any) -> AsyncIterator[Any]:
            found.append({name: getattr(request, name) for name in ("temperature", "repetition_penalty")})
            for nothing in ():
                yield nothing

        async def astream(self, _: str, sampling: Any) -> AsyncIterator[Any]:
            async for part in self.generate(sampling):
                yield part

    def answer(request: httpx.Request) -> httpx.Response:
        found.append(json.loads(request.content))
        event = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
        return httpx.Response(200, text=f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n")

    server: Any = Asked()
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://gateway") as client:
        for target in (targets.InProcess(server), targets.Triton(server), targets.Gateway(client, "m")):
            await target.run(Job("x", 1), Trace(0.0))
    assert [(one["temperature"], one["repetition_penalty"]) for one in found] == [(0.0, 1.0)] * 3


def test_serving_shows_accepted_tokens_only_with_speculation(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("one two three one two three one two three one two\n")
    found = {}
    for method in ("off", "ngram"):
        file = tmp_path / method
        options = ["--prompts", str(tmp_path / "prompts"), "--num-requests", "1", "--warmup", "0", "--json", str(file)]
        settings = ["--device", "cpu", "--threads", "1", "--speculative-method", method]
        done = CliRunner().invoke(app, ["serving", str(DEMO_MODEL), *options, *settings])
        assert done.exit_code == 0, done.output
        found[method] = {one.name: one.value for one in records.read(file)[1]}
    assert not {"proposed tokens", "accepted tokens"} & found["off"].keys()
    assert found["ngram"]["proposed tokens"] >= found["ngram"]["accepted tokens"] > 0


async def test_the_gateway_names_proposed_and_accepted_tokens() -> None:
    event = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 9}}
    event["timings"] = {"draft_n": 7, "draft_n_accepted": 5}
    answer = httpx.Response(200, text=f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n")
    async with httpx.AsyncClient(transport=httpx.MockTransport(lambda _: answer), base_url="http://gateway") as client:
        await targets.Gateway(client, "m").run(Job("x", 9), trace := Trace(0.0))
    assert (trace.output_tokens, trace.proposed_tokens, trace.accepted_tokens) == (9, 7, 5)


async def opened(url: str) -> None:
    async with targets.gateway(url):
        pass
