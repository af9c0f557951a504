"""LoRA adapters behind the gateway: served as models, and loaded and unloaded while requests run."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from charonia_client import Client, GenerateRequest, NotFound
from safetensors.numpy import save_file
from stack import CHARONIA, DEMO_MODEL, HANG_S, Stack, running

from charonia import Engine, SamplingParams

QUESTION = "What is the capital of France?"
TOKENS = 12


def write_adapter(folder: Path, seed: int, rank: int = 4, **config: Any) -> Path:
    """Write an adapter of the demo model that changes its answers."""
    shape = json.loads((DEMO_MODEL / "config.json").read_text())
    hidden, inter = shape["hidden_size"], shape["intermediate_size"]
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        at = f"base_model.model.model.layers.{layer}.mlp"
        for module, rows, cols in (("up_proj", inter, hidden), ("down_proj", hidden, inter)):
            tensors[f"{at}.{module}.lora_A.weight"] = random.normal(0, 0.3, (rank, cols)).astype(np.float32)
            tensors[f"{at}.{module}.lora_B.weight"] = random.normal(0, 0.3, (rows, rank)).astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


@dataclass
class Served:
    stack: Stack
    folder: Path  # of the adapters: a, b and dora
    admin: httpx.Client
    user: httpx.Client

    def models(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`charonia models`."""
        where = ["--run-dir", str(self.stack.run_dir), "--grpc-port", str(self.stack.ports[1])]
        return subprocess.run([CHARONIA, "models", *arguments, *where], capture_output=True, text=True, timeout=HANG_S)

    def load(self, name: str, folder: str = "b") -> httpx.Response:
        body = {"lora_name": name, "lora_path": str(self.folder / folder)}
        return self.admin.post("/v1/load_lora_adapter", json=body)

    def unload(self, name: str) -> httpx.Response:
        return self.admin.post("/v1/unload_lora_adapter", json={"lora_name": name})

    def ask(self, model: str, tokens: int = TOKENS) -> httpx.Response:
        message = {"role": "user", "content": QUESTION}
        body = {"model": model, "messages": [message], "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return self.user.post("/v1/chat/completions", json=body)

    def text(self, model: str) -> str:
        answer = self.ask(model)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == model
        text: str = answer.json()["choices"][0]["message"]["content"]
        return text


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("adapters")
    write_adapter(folder / "a", 1)
    write_adapter(folder / "b", 2)
    write_adapter(folder / "dora", 3, use_dora=True)
    file, keys = folder / "keys.json", {}
    for name, options in {"user": [], "admin": ["--access", "admin"]}.items():
        create = [CHARONIA, "keys", "create", name, "--file", file, *options]
        keys[name] = subprocess.run(create, capture_output=True, text=True, check=True).stdout.strip()
    env = {"CHARONIA_GATEWAY_KEYS_FILE": str(file)}
    command = (CHARONIA, "serve", f"demo={DEMO_MODEL}", "--lora", f"a={folder / 'a'}")
    with running(Stack("nothing is served by this name", folder / "run", env, command=command)) as stack:
        web = {
            name: httpx.Client(
                base_url=stack.gateway,
                headers={"Authorization": f"Bearer {key}"},
                timeout=HANG_S,
                trust_env=False,
            )
            for name, key in keys.items()
        }
        yield Served(stack, folder, web["admin"], web["user"])
        for client in web.values():
            client.close()


def listed(served: Served) -> dict[str, Any]:
    return {one["id"]: one for one in served.user.get("/v1/models").json()["data"]}


def test_adapter_is_listed_as_a_model_with_parent(served: Served) -> None:
    models = listed(served)
    assert list(models) == ["demo", "a"]
    assert models["a"]["parent"] == "demo" and models["a"]["root"] == str(served.folder / "a")
    assert models["demo"]["parent"] is None
    assert served.user.get("/v1/models/a").json() == models["a"]


async def test_every_api_gives_the_text_of_the_adapter(served: Served) -> None:
    text = served.text("a")
    assert text != served.text("demo")
    message = {"role": "user", "content": QUESTION}
    body = {"model": "a", "messages": [message], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    assert served.user.post("/v1/messages", json=body).json()["content"][0]["text"] == text
    asked = {"model": "a", "input": QUESTION, "max_output_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    assert served.user.post("/v1/responses", json=asked).json()["output"][-1]["content"][0]["text"] == text
    async with Client(served.stack.grpc) as client:
        fields: dict[str, Any] = {"messages": [message], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        answer = await client.complete(GenerateRequest(**fields, stream=False, lora_name="a"))
        assert answer.text == text
        with pytest.raises(NotFound, match="lora_name = other"):
            await client.complete(GenerateRequest(**fields, stream=False, lora_name="other"))
    with Engine.from_pretrained(DEMO_MODEL, threads=2) as engine:
        engine.load_adapter("x", served.folder / "a")
        sampling = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
        assert engine.generate([message], sampling, lora="x")[0].text == text


def test_adapter_is_loaded_and_unloaded_by_route_and_by_command(served: Served) -> None:
    assert served.ask("b").status_code == 404
    assert served.load("b").status_code == 200
    text = served.text("b")
    assert text not in (served.text("a"), served.text("demo"))
    assert listed(served)["b"]["parent"] == "demo"
    assert served.unload("b").status_code == 200
    gone = served.ask("b")
    assert gone.status_code == 404 and "'b'" in gone.json()["error"]["message"]
    assert gone.json()["error"]["code"] == "model_not_found"
    assert served.unload("b").status_code == 404
    loaded = served.models("load-adapter", f"b={served.folder / 'b'}")
    assert loaded.returncode == 0, loaded.stderr
    assert served.text("b") == text
    shown = json.loads(served.models("list", "--json").stdout)
    assert [(one["name"], one.get("parent")) for one in shown] == [("demo", None), ("a", "demo"), ("b", "demo")]
    assert served.models("unload-adapter", "b").returncode == 0
    assert served.models("unload-adapter", "b").returncode == 1
    assert served.ask("b").status_code == 404


@pytest.mark.parametrize(
    ("name", "folder", "message"),
    [
        ("c", "dora", "use_dora"),
        ("c", "missing", "not a folder"),
        ("a", "b", "loaded adapter"),
        ("demo", "b", "'demo'"),
        ("  ", "b", "'  ' is not a name"),
    ],
)
def test_adapter_that_cannot_be_loaded_is_rejected(served: Served, name: str, folder: str, message: str) -> None:
    refused = served.load(name, folder)
    assert refused.status_code == 400 and message in refused.json()["error"]["message"]
    assert list(listed(served)) == ["demo", "a"]


def test_loading_needs_an_admin_key(served: Served) -> None:
    body = {"lora_name": "b", "lora_path": str(served.folder / "b")}
    assert served.user.post("/v1/load_lora_adapter", json=body).status_code == 403
    assert served.user.post("/v1/unload_lora_adapter", json={"lora_name": "a"}).status_code == 403


def test_no_request_is_lost_while_adapters_are_loaded_and_unloaded(served: Served) -> None:
    assert served.load("b").status_code == 200
    expected = {model: served.text(model) for model in ("demo", "a", "b")}
    with ThreadPoolExecutor(12) as threads:
        steady = [threads.submit(served.text, ("demo", "a")[index % 2]) for index in range(40)]
        changing = [threads.submit(served.ask, "b") for _ in range(40)]
        for _ in range(5):
            assert served.unload("b").status_code == 200
            assert served.load("b").status_code == 200
        assert [one.result() for one in steady] == [expected["demo"], expected["a"]] * 20
        answers = [one.result() for one in changing]
    assert {answer.status_code for answer in answers} <= {200, 404}
    texts = [one.json()["choices"][0]["message"]["content"] for one in answers if one.status_code == 200]
    assert set(texts) <= {expected["b"]}
    assert served.text("b") == expected["b"]
    assert served.unload("b").status_code == 200
