"""A device that fails for good, under the real Triton: everybody is told, and the stack ends so that it can be started
again. The device is the emulated one, whose fault is injected (scripts/emulated_backend.sh)."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engine_metrics
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from stack import HANG_S, Stack
from tiny_models import TEXTS, start_token, write_model

from charonia.weights.convert import link_workspace

HERE = Path(__file__).parent
BUILD_LIMIT_S = 3600
pytestmark = pytest.mark.timeout(BUILD_LIMIT_S + 900)
# Comes in the midst of an answer of TEXTS[0], which has more tokens.
FAULT = "step=12"
ENDLESS = 2000  # tokens, of which each takes a step
# Each of these requests takes a step at least.
FAULT_IN_WARMUP = "step=2"
WARMUP = """
model_warmup [ { name: "first" batch_size: 1 count: 3 inputs { key: "input_ids"
  value: { data_type: TYPE_INT32 dims: [ 20 ] zero_data: true } } } ]
"""


@pytest.fixture(scope="module")
def backend() -> Path:
    """The Triton backend on the emulated device."""
    script = HERE.parents[1] / "scripts" / "emulated_backend.sh"
    built = subprocess.run([script], capture_output=True, text=True, timeout=BUILD_LIMIT_S)
    assert built.returncode == 0, built.stderr
    return Path(built.stdout.strip())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("failing") / "parrot"
    write_model(folder, "byte_level", "parrot")
    return folder


@pytest.fixture
def make_stack(backend: Path, model: Path, tmp_path: Path) -> Iterator[Callable[..., Stack]]:
    """Stacks on the emulated device, which are ended after the test whatever happens."""
    made: list[Stack] = []

    def make(*, model: Path = model, **env: str) -> Stack:
        small = {
            "CHARONIA_DEVICE": "cuda",
            "CHARONIA_MAX_BATCH_SIZE": "2",
            "CHARONIA_TOKEN_BUDGET": "32",
            "CHARONIA_SESSION_LEN": "256",
            "CHARONIA_CACHE_MAX_ENTRY_COUNT": "16",
            "CHARONIA_STREAM_INTERVAL_MS": "0",
            "CHARONIA_TEXT_INSTANCES": "1",
            "CHARONIA_CACHE_DIR": str(tmp_path),
        }
        command = (sys.executable, HERE / "emulated_serve.py", backend, "serve")
        made.append(Stack(model, tmp_path / f"run{len(made)}", {**small, **env}, command=command))
        return made[-1]

    yield make
    for stack in made:
        stack.stop()


async def until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + HANG_S
    while not await condition():
        assert time.monotonic() < deadline, f"after {HANG_S} s still not: {what}"
        await asyncio.sleep(0.02)


def question(**fields: Any) -> dict[str, Any]:
    return {"model": "parrot", "prompt": start_token(0), "temperature": 0, "max_tokens": 100, **fields}


def engine_failed(text: str) -> list[float]:
    """The values of charonia_engine_failed in what Triton's metrics port says."""
    return [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "charonia_engine_failed"
    ]


def assert_says_why(answer: httpx.Response) -> None:
    assert answer.status_code == 503, answer.text
    assert "retry-after" in answer.headers
    error = answer.json()["error"]
    assert error["code"] == "service_unavailable"
    assert "the device has failed" in error["message"]
    assert "Start a new process" in error["message"]


async def test_a_failed_device_is_answered_with_503_and_shown_by_health_and_a_metric(
    make_stack: Callable[..., Stack], tmp_path: Path
) -> None:
    fault = tmp_path / "fault"
    # Room for two answers of ENDLESS tokens: what is asked once the engine has been withdrawn is told less.
    room = {"CHARONIA_SESSION_LEN": "2048", "CHARONIA_CACHE_MAX_ENTRY_COUNT": "64"}
    env = {"CHARONIA_EMULATED_CUDA_FAULT": f"file={fault}", "CHARONIA_EXIT_ON_DEVICE_FAILURE": "False"}
    stack = make_stack(**room, **env).start()
    async with httpx.AsyncClient(trust_env=False, timeout=HANG_S) as http:

        async def ask(**fields: Any) -> httpx.Response:
            return await http.post(f"{stack.gateway}/v1/completions", json=question(**fields))

        async def status(url: str) -> int:
            return (await http.get(url)).status_code

        assert (await ask(max_tokens=2)).status_code == 200
        assert engine_failed((await http.get(stack.metrics)).text) == [0]
        health = [f"{stack.http}/v2/models/engine/ready", f"{stack.http}/v2/health/ready"]
        health.append(f"{stack.gateway}/health/ready")
        assert [await status(url) for url in health] == [200, 200, 200]

        async def ask_until_it_fails(stream: bool) -> httpx.Response:
            """On a machine that is slow enough an answer ends before the last one has begun."""
            while True:
                answer = await ask(stream=stream, max_tokens=ENDLESS, ignore_eos=True)
                if answer.status_code != 200 or "event: error" in answer.text:
                    return answer

        asked = asyncio.gather(*(ask_until_it_fails(stream) for stream in (True, False, False)))
        await engine_metrics.until(
            stack.metrics, lambda now: (now.running, now.waiting) == (2, 1), "two run and one waits"
        )
        fault.touch()
        streamed, *whole = await asked
        for answer in whole:
            assert_says_why(answer)
        if streamed.status_code == 200:  # it had begun
            last = [line for line in streamed.text.splitlines() if line.startswith("data: {")][-1]
            error = json.loads(last.removeprefix("data: "))["error"]
            assert error["code"] == "service_unavailable" and "the device has failed" in error["message"]
        else:
            assert_says_why(streamed)

        async def all_are_not_ready() -> bool:
            return all([await status(url) != 200 for url in health])

        await until(all_are_not_ready, "nothing is ready")
        assert engine_failed((await http.get(stack.metrics)).text) == [1]
        assert (await ask()).status_code == 503
    assert stack.process is not None and stack.process.poll() is None
    stack.process.terminate()
    assert stack.wait() == 0


async def test_the_stack_ends_with_a_code_of_its_own_and_serves_when_it_is_started_again(
    make_stack: Callable[..., Stack],
) -> None:
    stack = make_stack(CHARONIA_EMULATED_CUDA_FAULT=FAULT).start()
    async with httpx.AsyncClient(trust_env=False, timeout=HANG_S) as http:
        assert_says_why(await http.post(f"{stack.gateway}/v1/completions", json=question()))
        assert await asyncio.to_thread(stack.wait) == 75
        said = stack.log_file.read_text()
        assert "the device has failed, and Triton ended with exit code 75. Start it again" in said
        assert "the emulated device has failed" in said and "in step 12 (" in said
        assert "Traceback" not in said

        # What supervises it would do this.
        again = make_stack()
        again.ports = stack.ports
        again.start()
        answer = (await http.post(f"{again.gateway}/v1/completions", json=question())).json()
        assert answer["choices"][0]["text"] == TEXTS[0]


def ended_with_75(stack: Stack) -> str:
    """What a stack said that ends before it serves."""
    stack.launch()
    assert stack.wait() == 75, stack.log()
    said = stack.log_file.read_text()
    assert "the device has failed, and Triton ended with exit code 75. Start it again" in said
    assert "the emulated device has failed" in said
    assert "Traceback" not in said
    return said


def test_a_device_that_fails_while_the_model_is_loaded_ends_the_stack_with_that_code(
    make_stack: Callable[..., Stack], tmp_path: Path
) -> None:
    fault = tmp_path / "fault"
    fault.touch()
    said = ended_with_75(make_stack(CHARONIA_EMULATED_CUDA_FAULT=f"file={fault}"))
    assert "the device has failed, and engine cannot be loaded: " in said


@pytest.fixture
def warmed_up(model: Path, tmp_path: Path) -> Path:
    """A workspace whose engine the server warms up before it is ready."""
    workspace = link_workspace(model, tmp_path / "workspace")
    config = workspace / "triton_models" / "engine" / "config.pbtxt"
    text = config.read_text()
    config.unlink()
    config.write_text(text + WARMUP)
    return workspace


def test_a_device_that_fails_while_the_model_is_warmed_up_ends_the_stack_with_that_code(
    make_stack: Callable[..., Stack], warmed_up: Path
) -> None:
    said = ended_with_75(make_stack(model=warmed_up, CHARONIA_EMULATED_CUDA_FAULT=FAULT_IN_WARMUP))
    assert "in step 2 (" in said


def test_a_failed_warm_up_ends_the_stack_also_where_the_process_is_to_stay(
    make_stack: Callable[..., Stack], warmed_up: Path
) -> None:
    stack = make_stack(
        model=warmed_up, CHARONIA_EMULATED_CUDA_FAULT=FAULT_IN_WARMUP, CHARONIA_EXIT_ON_DEVICE_FAILURE="False"
    )
    stack.launch()
    assert stack.wait() == 1, stack.log()
    said = stack.log_file.read_text()
    assert "the emulated device has failed" in said
    # Now and then Triton crashes as it destroys an instance whose warm-up failed, before it can say that it did not
    # load the model (TritonBackendThread::StopBackendThread() reads its last instance, and it has none).
    if not re.search("Triton was killed by SIG(SEGV|ABRT|BUS);", said):
        assert "Triton ended with exit code 1;" in said, stack.log()
        assert "failed to load 'engine'" in said, stack.log()


async def test_a_model_that_was_warmed_up_serves_and_fails_as_others_do(
    make_stack: Callable[..., Stack], warmed_up: Path, tmp_path: Path
) -> None:
    fault = tmp_path / "fault"
    stack = make_stack(model=warmed_up, CHARONIA_EMULATED_CUDA_FAULT=f"file={fault}").start()
    async with httpx.AsyncClient(trust_env=False, timeout=HANG_S) as http:
        first = await http.post(f"{stack.gateway}/v1/completions", json=question())
        assert first.json()["choices"][0]["text"] == TEXTS[0]
        fault.touch()
        assert_says_why(await http.post(f"{stack.gateway}/v1/completions", json=question()))
    assert await asyncio.to_thread(stack.wait) == 75
