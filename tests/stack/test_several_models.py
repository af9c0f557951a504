"""Two models behind one gateway, in one Triton: the choice of the model, keys for one model, and loading one model
while the other works."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from charonia_client import Client, GenerateRequest
from prometheus_client.parser import text_string_to_metric_families
from stack import CHARONIA, DEMO_MODEL, HANG_S, Stack, running
from tiny_models import write_model
from waiting import wait_until

MODELS = ("demo", "slow/one")  # the name of the second model is not valid in Triton
LONG_TOKENS = 1000  # tokens of a response that is still running when its model is unloaded


@dataclass
class Two:
    stack: Stack
    keys: dict[str, str]
    opened: list[httpx.Client] = field(default_factory=list)

    def web(self, key: str) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.keys[key]}"}
        client = httpx.Client(base_url=self.stack.gateway, headers=headers, timeout=HANG_S, trust_env=False)
        self.opened.append(client)
        return client

    def models(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`charonia models`."""
        where = ["--run-dir", str(self.stack.run_dir), "--grpc-port", str(self.stack.ports[1])]
        return subprocess.run([CHARONIA, "models", *arguments, *where], capture_output=True, text=True, timeout=HANG_S)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    folder = tmp_path_factory.mktemp("two")
    write_model(folder / "slow", "byte_level", "babbler", hidden=512, layers=4, positions=4096, ends=False)
    file, keys = folder / "keys.json", {}
    of_key = {"alice": [], "bob": ["--model", "slow/one"], "prometheus": ["--access", "metrics"]}
    for name, options in {**of_key, "admin": ["--access", "admin"]}.items():
        create = [CHARONIA, "keys", "create", name, "--file", file, *options]
        keys[name] = subprocess.run(create, capture_output=True, text=True, check=True).stdout.strip()
    env = {
        "CHARONIA_GATEWAY_KEYS_FILE": str(file),
        "CHARONIA_MAX_RESTARTS": "2",
        "CHARONIA_STREAM_INTERVAL_MS": "0",
    }
    command = (CHARONIA, "serve", f"demo={DEMO_MODEL}", f"slow/one={folder / 'slow'}", "--drain-timeout-s", str(HANG_S))
    with running(Stack("nothing is served by this name", folder / "run", env, command=command)) as stack:
        served = Two(stack, keys)
        until_states(served, dict.fromkeys(MODELS, "ready"))  # the gateway is ready when one model is ready
        yield served
        for client in served.opened:
            client.close()


@pytest.fixture
def alice(two: Two) -> httpx.Client:
    return two.web("alice")


def ask(web: httpx.Client, model: str, content: str = "What is the capital of France?", tokens: int = 8) -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "temperature": 0,
    }
    answer = web.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def test_all_models_are_listed_with_properties(alice: httpx.Client) -> None:
    listed = {one["id"]: one for one in alice.get("/v1/models").json()["data"]}
    assert tuple(listed) == MODELS
    assert {one["status"] for one in listed.values()} == {"ready"}
    assert listed["slow/one"]["max_model_len"] == 4096 and listed["slow/one"]["weight_type"] == "fp32"
    assert listed["slow/one"]["group_size"] is None and listed["slow/one"]["quality"] == []
    assert alice.get("/v1/models/slow/one").json() == listed["slow/one"]
    assert alice.get("/health/ready").json() == {"status": "ready", "models": dict.fromkeys(MODELS, "ready")}


def test_model_name_selects_model(alice: httpx.Client) -> None:
    expected = {model: ask(alice, model) for model in MODELS}
    assert "capital of France" in expected["demo"] and "capital of France" not in expected["slow/one"]
    with ThreadPoolExecutor(16) as threads:
        asked = [*MODELS] * 16
        assert list(threads.map(lambda model: ask(alice, model), asked)) == [expected[model] for model in asked]


@pytest.mark.parametrize("model", MODELS)
def test_every_route_selects_model_by_name(alice: httpx.Client, two: Two, model: str) -> None:
    asked = {"model": model, "max_tokens": 4}
    messages = [{"role": "user", "content": "Hello"}]
    tokens = len(alice.post("/tokenize", json={"model": model, "messages": messages}).json()["tokens"])
    counted = alice.post("/v1/messages/count_tokens", json={"model": model, "messages": messages}).json()
    assert counted["input_tokens"] == tokens
    anthropic = alice.post("/v1/messages", json={**asked, "messages": messages}).json()
    assert (anthropic["model"], anthropic["usage"]["input_tokens"]) == (model, tokens)
    with openai.OpenAI(
        base_url=f"{two.stack.gateway}/v1",
        api_key=two.keys["alice"],
        max_retries=0,
        http_client=httpx.Client(timeout=HANG_S),
    ) as client:
        answer = client.responses.create(model=model, input="Hello", max_output_tokens=4)
        assert answer.model == model and answer.usage is not None and answer.usage.input_tokens == tokens
        completed = client.completions.create(model=model, prompt="Hello", max_tokens=4, echo=True)
        assert completed.model == model and completed.choices[0].text.startswith("Hello")
    info = alice.get("/tokenizer_info", params={"model": model}).json()
    other = next(name for name in MODELS if name != model)
    assert info != alice.get("/tokenizer_info", params={"model": other}).json()


def test_sessions_and_stored_responses_belong_to_model(alice: httpx.Client) -> None:
    turn = {"prompt": "Hello", "session_id": 7, "interactive_mode": True, "request_output_len": 4}
    histories = [
        alice.post("/v1/chat/interactive", json={**turn, "model": model}).json()["history_tokens"]
        for model in (*MODELS, *MODELS)
    ]
    assert histories[:2] == [0, 0] and all(histories[2:])
    stored = {"input": "Hello", "max_output_tokens": 4, "store": True}
    first = alice.post("/v1/responses", json={**stored, "model": "slow/one"}).json()
    later = {**stored, "previous_response_id": first["id"]}
    wrong = alice.post("/v1/responses", json={**later, "model": "demo"})
    assert wrong.status_code == 400 and "is from the model 'slow/one'" in wrong.json()["error"]["message"]
    assert alice.post("/v1/responses", json={**later, "model": "slow/one"}).status_code == 200
    assert alice.delete(f"/v1/responses/{first['id']}").status_code == 200


async def test_triton_clients_select_ensemble(two: Two) -> None:
    async with Client(two.stack.grpc, model="ensemble.slow_one") as client:
        await client.check()
        request = GenerateRequest(text="Hello", stream=False, max_tokens=4, session_id="s")
        answer = await client.complete(request)
        assert (answer.num_output_tokens, answer.finish_reason) == (4, "length")
        await client.end_session("s")
        info = await client.model_info()
        assert info["context_length"] == 4096 and len(info["fingerprint"]) == 16 and info["deterministic"]


def test_metrics_have_model_names(two: Two) -> None:
    families = text_string_to_metric_families(httpx.get(two.stack.metrics, timeout=HANG_S, trust_env=False).text)
    samples = [sample for family in families for sample in family.samples]
    blocks = {one.labels["model"]: one.value for one in samples if one.name == "charonia_kv_blocks_total"}
    assert blocks == {"engine": 512, "engine.slow_one": 512}
    text = two.web("prometheus").get("/metrics").text
    for model in MODELS:
        assert f'charonia_gateway_endpoint_up{{endpoint="{two.stack.grpc}",model="{model}"}} 1.0' in text


@contextmanager
def under_load(two: Two, model: str) -> Iterator[None]:
    """Four threads send requests to the model all the time. No request may fail."""
    failed: list[str] = []
    ended = threading.Event()

    def work() -> None:
        web = two.web("alice")
        while not ended.is_set():
            try:
                ask(web, model, tokens=16)
            except Exception as error:
                failed.append(repr(error))
                return

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join(HANG_S)
    assert failed == []


def until_states(two: Two, expected: dict[str, str]) -> None:
    """Return when the gateway reports these states. It checks them every second."""
    web = two.web("alice")
    wait_until(lambda: {one["id"]: one["status"] for one in web.get("/v1/models").json()["data"]} == expected)


@pytest.mark.parametrize(("name", "other"), [MODELS[::-1], MODELS])
def test_model_is_reloaded_while_other_works(two: Two, alice: httpx.Client, name: str, other: str) -> None:
    """A running request of the unloaded model ends normally. The second model is the default one, and its request is a
    call of the ensemble, because it has log probabilities."""
    body = {"model": name, "prompt": "Once upon a time", "max_tokens": 40, "ignore_eos": True}
    long = {**body, "max_tokens": LONG_TOKENS, "stream": True, "stream_options": {"include_usage": True}}
    if name == MODELS[0]:
        long["logprobs"] = 1
    with under_load(two, other):
        with two.web("alice").stream("POST", "/v1/completions", json=long) as last:
            lines = last.iter_lines()
            assert next(lines).startswith("data: {"), last.read()
            unloaded = two.models("unload", name)
            assert (unloaded.returncode, unloaded.stdout) == (0, f"{name} is unloaded\n"), unloaded
            *_, usage, done_line = [line for line in lines if line]
        assert done_line == "data: [DONE]"
        assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] == LONG_TOKENS
        assert f"{name}" in two.models("list").stdout and "unloaded" in two.models("list").stdout
        refused = alice.post("/v1/completions", json=body)
        assert refused.status_code == 503, refused.text
        assert refused.headers["retry-after"] and refused.json()["error"]["code"] == "model_not_loaded"
        assert f"charonia models load {name}" in refused.json()["error"]["message"]
        assert alice.post("/tokenize", json={"model": name, "prompt": "a"}).status_code == 503
        until_states(two, {name: "not ready", other: "ready"})
        ready = alice.get("/health/ready")
        assert (ready.status_code, ready.json()["models"]) == (200, {name: "not ready", other: "ready"})
        ask(alice, other)
        loaded = two.models("load", name)
        assert (loaded.returncode, loaded.stdout) == (0, f"{name} is loaded\n"), loaded
        assert alice.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 40, "at once"
    assert ask(alice, name) != ask(alice, other)


def test_impossible_orders_fail_with_reason(two: Two) -> None:
    assert "there is no model 'gpt-9': this server has demo, slow/one" in two.models("load", "gpt-9").stderr
    assert two.models("load", "demo").stdout == "demo is loaded already\n"
    elsewhere = subprocess.run(
        [CHARONIA, "models", "list", "--run-dir", two.stack.run_dir, "--grpc-port", "1"], capture_output=True, text=True
    )
    assert elsewhere.returncode == 1 and "no charonia serve with gRPC port 1 runs here" in elsewhere.stderr
    (socket,) = two.stack.run_dir.glob("port-*/control.sock")
    assert socket.stat().st_mode & 0o777 == 0o600


def test_model_is_added_while_others_work(two: Two, alice: httpx.Client, tmp_path: Path) -> None:
    """By the command and by REST. A Triton that is started again has it too."""
    write_model(tmp_path / "third", "byte_level", "babbler", ends=False)
    with under_load(two, "demo"):
        broken = two.models("load", f"third={tmp_path}")
        assert broken.returncode == 1 and "config.json" in broken.stderr, broken
        added = two.models("load", f"third={tmp_path / 'third'}")
        assert (added.returncode, added.stdout) == (0, "third is loaded\n"), added
        ask(alice, "third")
        body = {"model": f"fourth={tmp_path / 'third'}"}
        assert two.web("alice").post("/models/load", json=body).status_code == 403
        loaded = two.web("admin").post("/models/load", json=body)
        assert loaded.json() == {"success": True, "message": "fourth is loaded"}, loaded.text
        assert ask(alice, "fourth") == ask(alice, "third")
        assert two.web("admin").post("/models/unload", json={"model": "fourth"}).json()["success"]
    states = {**dict.fromkeys((*MODELS, "third"), "ready"), "fourth": "not ready"}
    until_states(two, states)
    os.kill(two.stack.pid_of("tritonserver"), signal.SIGKILL)
    wait_until(lambda: "Triton is ready again" in two.stack.log_file.read_text(), two.stack.log)
    until_states(two, states)
    ask(alice, "third")
    assert two.models("unload", "third").returncode == 0


def test_restarted_triton_has_loaded_models(two: Two, alice: httpx.Client) -> None:
    assert two.models("unload", "slow/one").returncode == 0
    assert "the only model that is loaded" in two.models("unload", "demo").stderr
    ready = two.stack.log_file.read_text().count("Triton is ready again") + 1
    os.kill(two.stack.pid_of("tritonserver"), signal.SIGKILL)
    body: dict[str, Any] = {"model": "demo", "prompt": "a", "max_tokens": 1}
    wait_until(lambda: alice.post("/v1/completions", json=body).status_code == 200, two.stack.log)
    until_states(two, {"demo": "ready", **dict.fromkeys(("slow/one", "third", "fourth"), "not ready")})
    # Load orders are accepted after this line.
    wait_until(lambda: two.stack.log_file.read_text().count("Triton is ready again") == ready, two.stack.log)
    assert two.models("load", "slow/one").returncode == 0, Path(two.stack.log_file).read_text()
    ask(alice, "slow/one")
