"""Models that do not fit into the memory together, and are loaded when requests need them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from stack import CHARONIA, DEMO_MODEL, HANG_S, Stack, running
from tiny_models import write_model

MODELS = ("demo", "other")


@pytest.fixture(scope="module")
def rotating(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("autoload")
    write_model(folder / "other", "byte_level", "babbler", hidden=512, layers=4, positions=4096, ends=False)
    # Each cache takes more than half of the memory. It is only mapped, and not used.
    env = {"CHARONIA_CACHE_SIZE": str(int(psutil.virtual_memory().available * 0.6)), "CHARONIA_STREAM_INTERVAL_MS": "0"}
    command = (CHARONIA, "serve", f"demo={DEMO_MODEL}", f"other={folder / 'other'}", "--models-autoload")
    with running(Stack("nothing is served by this name", folder / "run", env, command=command)) as stack:
        yield stack


def ask(stack: Stack, model: str) -> str:
    body = {"model": model, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{stack.gateway}/v1/completions", json=body, timeout=HANG_S, trust_env=False)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def loaded(stack: Stack) -> list[str]:
    where = ["--run-dir", str(stack.run_dir), "--grpc-port", str(stack.ports[1]), "--json"]
    listed = subprocess.run([CHARONIA, "models", "list", *where], capture_output=True, text=True, check=True)
    return [one["name"] for one in json.loads(listed.stdout) if one["state"] == "loaded"]


def test_model_is_loaded_for_a_request_instead_of_the_idle_one(rotating: Stack) -> None:
    assert loaded(rotating) == ["demo"]
    expected = {}
    for model in (*MODELS, "demo"):
        text = ask(rotating, model)
        assert text == expected.setdefault(model, text)
        assert loaded(rotating) == [model]
    assert expected["demo"] != expected["other"]
    with ThreadPoolExecutor(4) as threads:
        asked = [*MODELS] * 2
        assert list(threads.map(lambda model: ask(rotating, model), asked)) == [expected[model] for model in asked]


def test_running_response_is_not_ended_for_another_model(rotating: Stack) -> None:
    ask(rotating, "other")
    body = {"model": "other", "prompt": "Once", "max_tokens": 600, "ignore_eos": True, "stream": True}
    with (
        ThreadPoolExecutor(1) as thread,
        httpx.stream(
            "POST", f"{rotating.gateway}/v1/completions", json=body, timeout=HANG_S, trust_env=False
        ) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        waiting = thread.submit(ask, rotating, "demo")
        assert [line for line in lines if line][-1] == "data: [DONE]"
        assert "Paris" in waiting.result(HANG_S)
    assert loaded(rotating) == ["demo"]
