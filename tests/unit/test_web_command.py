"""charonia web, run as users run it: with an engine in its process, and before a Triton elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from free_ports import free_ports
from triton_double import Double, part
from waiting import HANG_S, wait_until

from charonia import Engine, SamplingParams
from charonia.bench.random_model import SHAPES, write_random_model
from charonia.weights.workspace import is_held

COMMAND = [sys.executable, "-m", "charonia", "web"]
CHAT = [{"role": "user", "content": "hello"}]
ENDLESS_TOKENS = 60_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "small"
    write_random_model(folder, replace(SHAPES["tiny"], max_positions=ENDLESS_TOKENS + 1000), scale=0.2)
    return folder


@dataclass
class Web:
    url: str
    process: subprocess.Popen[str]
    log: Path

    def wait_for(self, text: str) -> None:
        def is_said() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return text in self.log.read_text()

        wait_until(is_said, self.log.read_text)

    def ask(self, route: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{route}", json={"model": "small", **body}, timeout=HANG_S)

    def interrupt(self) -> None:
        """Ctrl-C. Its exit code must be 0."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(HANG_S) == 0, self.log.read_text()


def environment(**more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("CHARONIA_")}
    # CHARONIA_DRAIN_TIMEOUT_S is a setting of services. This command must ignore it.
    own = {"TERM": "dumb", "NO_COLOR": "1", "CHARONIA_THREADS": "1", "CHARONIA_DRAIN_TIMEOUT_S": "3600"}
    return {**inherited, **own, **more}


@contextlib.contextmanager
def web(folder: Path, *arguments: str | Path, **env: str) -> Iterator[Web]:
    (port,) = free_ports(1)
    log = folder / "web.log"
    command = [*COMMAND, *map(str, arguments), "--gateway-port", str(port), "--run-dir", str(folder / "run")]
    with log.open("w") as stream:
        process = subprocess.Popen(command, env=environment(**env), stderr=stream, cwd=folder, text=True)
    try:
        yield Web(f"http://127.0.0.1:{port}", process, log)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    with web(tmp_path_factory.mktemp("web"), model, CHARONIA_STREAM_INTERVAL_MS="0") as started:
        started.wait_for("Ctrl-C ends it")
        yield started


@pytest.mark.slow
def test_the_address_is_printed_and_has_the_page_and_the_api(running: Web) -> None:
    said = running.log.read_text()
    assert f"Chat        {running.url}\n" in said and "small is ready after" in said and "warning" not in said
    assert "<title>Charonia</title>" in httpx.get(running.url, timeout=HANG_S).text
    (served,) = running.log.parent.glob("run/workspaces/[!.]*")
    assert is_held(served)
    assert httpx.get(f"{running.url}/health/ready", timeout=HANG_S).status_code == 200
    [listed] = httpx.get(f"{running.url}/v1/models", timeout=HANG_S).json()["data"]
    assert (listed["id"], listed["status"], listed["weight_type"]) == ("small", "ready", "bf16")
    assert listed["max_model_len"] == ENDLESS_TOKENS + 1000
    assert httpx.get(f"{running.url}/tokenizer_info", timeout=HANG_S).json()["chat_template"]


def test_responses_equal_the_engine(running: Web, model: Path) -> None:
    with Engine.from_pretrained(model, threads=1) as engine:
        params = SamplingParams(max_tokens=12, temperature=0, logprobs=2, ignore_eos=True)
        [of_chat] = engine.generate([CHAT], params)
        [of_text] = engine.generate(["hello"], replace(params, prompt_logprobs=0))
        tokens = engine.encode(CHAT)
    asked = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    whole = running.ask("/v1/chat/completions", messages=CHAT, logprobs=True, top_logprobs=2, n=2, **asked).json()
    assert [choice["message"]["content"] for choice in whole["choices"]] == [of_chat.text] * 2
    entries = whole["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in entries] == pytest.approx(of_chat.logprobs, abs=1e-4)
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode(errors="replace") == of_chat.text
    assert whole["usage"] == {**whole["usage"], "prompt_tokens": len(tokens), "completion_tokens": 24}

    with httpx.stream(
        "POST",
        f"{running.url}/v1/chat/completions",
        json={"model": "small", "messages": CHAT, "stream": True, **asked},
        timeout=HANG_S,
    ) as stream:
        events = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == of_chat.text

    echoed = running.ask("/v1/completions", prompt="hello", echo=True, logprobs=0, **asked).json()["choices"][0]
    assert echoed["text"] == "hello" + of_text.text
    assert echoed["logprobs"]["token_logprobs"][1 : len(of_text.prompt_token_ids)] == pytest.approx(
        of_text.prompt_logprobs, abs=1e-4
    )
    assert running.ask("/tokenize", messages=CHAT).json()["tokens"] == tokens
    assert running.ask("/detokenize", tokens=tokens).json()["prompt"] == "<s>user: hello\nassistant: "

    word = of_text.text[3:6]
    stopped = running.ask("/v1/completions", prompt="hello", stop=[word], **asked).json()["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == (of_text.text.partition(word)[0], "stop")


def test_structure_sessions_and_errors_equal_the_gateway(running: Web) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["red", "blue"]}, "strict": True}}
    chosen = running.ask("/v1/chat/completions", messages=CHAT, response_format=form, max_tokens=40).json()
    assert json.loads(chosen["choices"][0]["message"]["content"]) in ("red", "blue")

    turn = {"session_id": 7, "interactive_mode": True, "request_output_len": 4, "stream": False, "temperature": 0}
    first = running.ask("/v1/chat/interactive", prompt="hello", **turn).json()
    second = running.ask("/v1/chat/interactive", prompt="more", **turn).json()
    assert second["history_tokens"] == first["history_tokens"] + first["input_tokens"] + 4, (first, second)

    wrong = running.ask("/v1/chat/completions", messages=CHAT, top_k=-5)
    assert wrong.status_code == 400
    wrong = running.ask("/v1/chat/completions", messages=[{"role": "nobody", "content": 1}])
    assert wrong.status_code == 400
    long = running.ask("/v1/completions", prompt=[5] * (ENDLESS_TOKENS + 2000), max_tokens=1)
    assert long.status_code == 400 and "does not fit" in long.json()["error"]["message"]
    given = running.ask("/v1/chat/completions", messages=CHAT, logit_bias={"999999999": 1})
    assert given.status_code == 400 and "logit_bias" in given.json()["error"]["message"]


def test_ctrl_c_ends_running_requests(model: Path, tmp_path: Path) -> None:
    slow = {"CHARONIA_DEVICE": "null", "CHARONIA_NULL_STEP_MS": "10", "CHARONIA_STREAM_INTERVAL_MS": "0"}
    body = {"model": "small", "prompt": "hello", "max_tokens": ENDLESS_TOKENS, "ignore_eos": True, "stream": True}
    with web(tmp_path, model, **slow) as started:
        started.wait_for("Ctrl-C ends it")
        with httpx.stream("POST", f"{started.url}/v1/completions", json=body, timeout=HANG_S) as stream:
            lines = stream.iter_lines()
            next(lines)
            started.process.send_signal(signal.SIGINT)
            rest: list[str] = []
            with contextlib.suppress(httpx.TransportError):
                rest += lines
            assert "data: [DONE]" not in rest
        assert started.process.wait(HANG_S) == 0
        assert "Traceback" not in started.log.read_text()


@pytest.mark.slow
def test_several_models_share_the_machine_and_one_page(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_random_model(other, replace(SHAPES["tiny"], max_positions=600), seed=7)
    with web(tmp_path, model, f"of/mine={other}", "--model-shares", "3,1", "--drain-timeout-s", "3600") as started:
        started.wait_for("small and of/mine are ready after")
        listed = httpx.get(f"{started.url}/v1/models", timeout=HANG_S).json()["data"]
        assert {one["id"]: one["max_model_len"] for one in listed} == {"small": ENDLESS_TOKENS + 1000, "of/mine": 600}
        asked = {"prompt": "hello", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        answers = [started.ask("/v1/completions", **{"model": name}, **asked).json() for name in ("small", "of/mine")]
        assert [answer["model"] for answer in answers] == ["small", "of/mine"]
        assert answers[0]["choices"][0]["text"] != answers[1]["choices"][0]["text"]
        unknown = started.ask("/v1/completions", **{"model": "nothing"}, **asked)
        assert unknown.status_code == 404 and "'small', 'of/mine'" in unknown.json()["error"]["message"]
        body = {"model": "small", "max_tokens": 3000, "ignore_eos": True, "stream": True, "prompt": "hello"}
        with httpx.stream("POST", f"{started.url}/v1/completions", json=body, timeout=HANG_S) as stream:
            lines = stream.iter_lines()
            next(lines)
            started.process.send_signal(signal.SIGINT)
            assert "data: [DONE]" in list(lines), "--drain-timeout-s lets it come to its end"
        assert started.process.wait(HANG_S) == 0
        assert "Traceback" not in started.log.read_text()


@pytest.mark.slow
async def test_web_connects_to_a_triton_that_starts_later_and_dies(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    target, ended = f"127.0.0.1:{port}", asyncio.Event()

    async def begin(_: Any) -> AsyncIterator[Any]:
        yield part("He")
        await ended.wait()

    with web(tmp_path, "--triton", target, "--model-name", "first", "--more-models", "b=label") as started:
        async with httpx.AsyncClient(base_url=started.url, timeout=HANG_S) as client:
            await asyncio.to_thread(started.wait_for, "first is not ready")
            await asyncio.to_thread(started.wait_for, "b is not ready")
            assert f"Chat        {started.url}\n" in started.log.read_text()
            assert (await client.get("/health/ready")).status_code == 503
            listed = (await client.get("/v1/models")).json()["data"]
            assert [(one["id"], one["status"]) for one in listed] == [("first", "not ready"), ("b", "not ready")]
            async with Double(port=port) as server:
                server.unloaded.add("ensemble")
                await asyncio.to_thread(started.wait_for, f"b at {target} is ready")
                assert "first at" not in started.log.read_text()
                server.behaviour = begin
                body = {"model": "b", "prompt": "hello", "stream": True}
                async with client.stream("POST", "/v1/completions", json=body) as stream:
                    lines = stream.aiter_lines()
                    assert '"text":"He"' in await anext(lines)
                    ended.set()
                    await server.go()
                    rest = [line async for line in lines]
                assert server.requests[0].model_name == "ensemble.label"
            assert '"error"' in "".join(rest) and "[DONE]" not in "".join(rest)
            assert (await client.get("/health/ready")).status_code == 503
        await asyncio.to_thread(started.interrupt)
        assert "Traceback" not in started.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing/here/x"], "nothing/here/x does not exist"),
        (["--triton", "nowhere"], "='nowhere': 'nowhere' is not a server"),
        (["--triton", ""], "--triton is empty"),
        (["MODEL", "--triton", "127.0.0.1:9"], "remove one"),
        (["--triton", "127.0.0.1:9", "--more-models", "a=?"], "expected NAME or NAME=LABEL"),
        (["--more-models", "a"], "charonia web A B"),
        (["--triton", "127.0.0.1:9", "--max-batch-size", "4"], "--max-batch-size and --triton"),
    ],
)
def test_wrong_arguments_are_reported_immediately(tmp_path: Path, arguments: list[str], said: str) -> None:
    with web(tmp_path, *arguments) as started:
        assert started.process.wait(HANG_S) == 1
        assert said in started.log.read_text() and "Traceback" not in started.log.read_text()


@pytest.mark.parametrize("variable", ["KEYS_FILE", "TLS_CERT"])
def test_files_of_the_gateway_are_read_before_a_model_is_loaded(tmp_path: Path, variable: str) -> None:
    missing = tmp_path / "missing"
    env = {f"CHARONIA_GATEWAY_{variable}": str(missing)}
    if variable == "TLS_CERT":
        env["CHARONIA_GATEWAY_TLS_KEY"] = str(missing)
    with web(tmp_path, "nothing/here/x", **env) as started:
        assert started.process.wait(HANG_S) == 1
        assert str(missing) in started.log.read_text() and "nothing/here" not in started.log.read_text()


def test_taken_port_is_reported_before_a_model_is_loaded(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ended = subprocess.run(
            [*COMMAND, "nothing/here", "--gateway-port", port], env=environment(), capture_output=True, text=True
        )
    assert ended.returncode == 1 and f"port {port} is in use" in ended.stderr, ended.stderr
