"""`charonia serve` from start to end: rejected settings, shutdown, and processes that die."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engine_metrics
import grpc
import httpx
import openai
import pytest
import tritonclient.grpc.aio as triton
from stack import CHARONIA, ENDLESS, HANG_S, SLOW, Stack, answers, running
from tiny_models import write_model
from triton_stream import stream as triton_stream
from tritonclient.utils import InferenceServerException
from waiting import until, wait_until

from charonia import Engine, Output, SamplingParams
from charonia.bench.random_model import Shape, write_random_model
from charonia.serve import shared_memory
from charonia.serve.triton import Distribution, has_gpu
from charonia.weights.workspace import is_held


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "babbler"
    write_model(folder, "byte_level", "babbler", positions=1 << 14)
    return folder


@pytest.fixture
def make_stack(model: Path, tmp_path: Path) -> Iterator[Callable[..., Stack]]:
    """Creates stacks of the model, which always end after the test."""
    made: list[Stack] = []

    def make(**env: str) -> Stack:
        made.append(Stack(model, tmp_path / f"run{len(made)}", env))
        return made[-1]

    yield make
    for stack in made:
        stack.stop()


def refused(stack: Stack) -> str:
    """Start a stack with wrong settings, and return its output. It must end by itself, with a message and without
    remaining processes."""
    stack.launch()
    assert stack.wait() == 1
    nothing_is_left(stack)
    text = stack.log_file.read_text()
    assert "Traceback" not in text
    return text


def shared_memory_of(stack: Stack) -> list[Path]:
    assert stack.process is not None
    return list(Path("/dev/shm").glob(f"charonia_{stack.process.pid}_*"))


def nothing_is_left(stack: Stack) -> None:
    """Wait until all processes of the stack have ended: a killed process may take a moment."""
    wait_until(lambda: stack.processes() == [])


@pytest.mark.parametrize(("place", "name"), [(1, "CHARONIA_GRPC_PORT"), (3, "CHARONIA_GATEWAY_PORT")])
def test_port_in_use_is_named(make_stack: Callable[..., Stack], place: int, name: str) -> None:
    stack = make_stack()
    with socket.create_server(("127.0.0.1", stack.ports[place])):
        text = refused(stack)
    assert f"port {stack.ports[place]} is in use" in text and name in text and "Starting Triton" not in text


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"HTTP_PORT": "9", "METRICS_PORT": "9"}, "CHARONIA_HTTP_PORT and CHARONIA_METRICS_PORT are both 9"),
        ({"GATEWAY_PORT": "http"}, "CHARONIA_GATEWAY_PORT"),
        ({"GATEWAY_MAX_BODY_BYTES": "missing"}, "CHARONIA_GATEWAY_MAX_BODY_BYTES"),
        ({"GATEWAY_KEYS_FILE": "missing"}, "CHARONIA_GATEWAY_KEYS_FILE=missing"),
        ({"GATEWAY_TLS_CLIENT_CA": "missing"}, "CHARONIA_GATEWAY_TLS_CLIENT_CA needs CHARONIA_GATEWAY_TLS_CERT"),
        ({"TRITON_DIR": "/"}, "CHARONIA_TRITON_DIR=/ has no bin/tritonserver"),
        ({"THREADS": "many"}, "threads = 'many'"),
    ],
)
def test_wrong_setting_is_named_before_triton_starts(
    make_stack: Callable[..., Stack], env: dict[str, str], says: str
) -> None:
    text = refused(make_stack(**{f"CHARONIA_{name}": value for name, value in env.items()}))
    assert says in text and "Starting Triton" not in text


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (None, "does not exist"),
        ("", "neither a workspace"),
        ('{"model_type": "mamba", "architectures": ["MambaForCausalLM"]}', "mamba"),
    ],
)
def test_unusable_model_is_named(tmp_path: Path, config: str | None, says: str) -> None:
    folder = tmp_path / "model"
    if config is not None:
        folder.mkdir()
    if config:
        (folder / "config.json").write_text(config)
    text = refused(Stack(folder, tmp_path / "run"))
    assert says in text and (str(folder) in text or "llama" in text)


NO_CUDA = pytest.mark.skipif(has_gpu(), reason="there is a GPU")


@NO_CUDA
def test_missing_gpu_ends_with_one_message(make_stack: Callable[..., Stack]) -> None:
    text = refused(make_stack(CHARONIA_DEVICE="cuda"))
    assert text.count("device = cuda") == 1 and "choose --device auto" in text and "Starting Triton" not in text


def test_start_is_announced_and_interrupt_ends_stack(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack()
    stack.start()
    wait_until(lambda: "Metrics " in stack.log_file.read_text())
    if not has_gpu():
        text = stack.log_file.read_text()
        assert re.search(r"Runs on     cpu, 2 threads, \w+; weights [\d.]+ MiB; KV cache", text)
        assert "because " in text
    processes = stack.processes()
    assert len(processes) >= 5  # the launcher, Triton, one process per Python model, the gateway
    assert importlib.util.find_spec("torch"), "torch must be installed, or the next check says nothing"
    assert not [pid for pid in processes if "libtorch" in Path(f"/proc/{pid}/maps").read_text()]
    (served,) = (stack.run_dir / "workspaces").glob("[!.]*")
    assert is_held(served)
    stack.signal(signal.SIGINT)
    assert stack.wait() == 0
    assert not is_held(served)
    nothing_is_left(stack)


def test_signal_during_start_ends_stack(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack()
    stack.launch()
    wait_until(lambda: len(stack.processes()) > 2)
    stack.signal(signal.SIGTERM)
    assert stack.wait() == 0
    nothing_is_left(stack)


def test_killed_launcher_leaves_no_process(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack().start()
    assert stack.process is not None
    of_it = f"*charonia_{stack.process.pid}_*"
    assert list(shared_memory.FOLDER.glob(of_it)) != []
    stack.signal(signal.SIGKILL)
    assert stack.wait() == -signal.SIGKILL
    nothing_is_left(stack)
    shared_memory.remove_left()  # as the next start of any stack on this machine does
    # A stack that is starting may already remove it.
    wait_until(lambda: not list(shared_memory.FOLDER.glob(of_it)))


def test_killed_gateway_ends_stack_with_message(make_stack: Callable[..., Stack]) -> None:
    """Some of the gateway's calls never end in Triton. They delay the shutdown only by the drain timeout and some
    seconds."""
    stack = make_stack(**SLOW, CHARONIA_DRAIN_TIMEOUT_S="1").start()
    (gateway,) = [pid for pid in stack.processes() if b"charonia_gateway" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    body = {"model": "babbler", "prompt": "talk", "max_tokens": ENDLESS, "ignore_eos": True, "stream": True}
    with (
        httpx.Client(timeout=HANG_S) as client,
        client.stream("POST", f"{stack.gateway}/v1/completions", json=body) as answer,
    ):
        next(answer.iter_lines())
        os.kill(gateway, signal.SIGKILL)
        assert stack.wait() == 1
    assert "the gateway was killed by SIGKILL" in stack.log_file.read_text()
    nothing_is_left(stack)


async def test_killed_or_hanging_triton_fails_requests_and_restarts(
    make_stack: Callable[..., Stack],
) -> None:
    stack = make_stack(**SLOW, CHARONIA_MAX_RESTARTS="1", CHARONIA_HANG_TIMEOUT_S="20").start()
    flowing = [asyncio.Event() for _ in range(12)]

    async def through_the_gateway(begun: asyncio.Event) -> None:
        async with openai.AsyncOpenAI(base_url=f"{stack.gateway}/v1", api_key="none", max_retries=0) as client:
            chunks = await client.chat.completions.create(
                model="babbler",
                messages=[{"role": "user", "content": "talk"}],
                stream=True,
                max_tokens=ENDLESS,
                extra_body={"ignore_eos": True},
            )
            async for _ in chunks:
                begun.set()

    async def unstreamed(begun: asyncio.Event) -> None:
        begun.set()
        body: dict[str, Any] = {"model": "babbler", "prompt": "talk", "max_tokens": ENDLESS, "ignore_eos": True}
        async with httpx.AsyncClient(timeout=HANG_S) as client:
            answer = await client.post(f"{stack.gateway}/v1/completions", json=body)
        assert answer.status_code == 503
        assert answer.json()["error"]["message"]
        raise InferenceServerException("503")

    async def through_triton(begun: asyncio.Event) -> None:
        fields = {"messages": "talk", "max_tokens": ENDLESS, "ignore_eos": True, "stream": True}
        async with triton.InferenceServerClient(stack.grpc) as client:
            async for _ in triton_stream(client, fields):
                begun.set()

    kinds = (through_the_gateway, unstreamed, through_triton)
    clients = [asyncio.create_task(kinds[index % 3](begun)) for index, begun in enumerate(flowing)]
    await asyncio.wait_for(asyncio.gather(*(begun.wait() for begun in flowing)), HANG_S)
    await engine_metrics.until(stack.metrics, lambda metrics: metrics.running == len(clients), "all run")
    of_the_first = shared_memory_of(stack)
    assert of_the_first != []
    stack.signal(signal.SIGSTOP)  # so that no restart happens before all requests were sent
    os.kill(stack.pid_of("tritonserver"), signal.SIGKILL)
    results = await asyncio.wait_for(asyncio.gather(*clients, return_exceptions=True), HANG_S)
    for result in results:
        clear = isinstance(result, openai.APIError | InferenceServerException)
        assert clear or (isinstance(result, grpc.aio.AioRpcError) and result.code() == grpc.StatusCode.UNAVAILABLE)

    async with httpx.AsyncClient(base_url=stack.gateway, timeout=HANG_S) as client:
        body = {"model": "babbler", "prompt": "talk", "max_tokens": 4}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 503 and int(answer.headers["Retry-After"]) >= 1, answer.text
        stack.signal(signal.SIGCONT)
        await until(lambda: answers(f"{stack.gateway}/health/ready"))
        assert (await client.post("/v1/completions", json=body)).status_code == 200
    text = stack.log_file.read_text()
    assert "Triton was killed by SIGKILL" in text and "(restart 1 of at most 1 in a row)" in text
    await until(lambda: "Triton is ready again" in stack.log_file.read_text())
    assert not set(shared_memory_of(stack)) & set(of_the_first)
    await until(lambda: answers(stack.metrics))
    running = asyncio.create_task(unstreamed(asyncio.Event()))
    await engine_metrics.until(stack.metrics, lambda metrics: metrics.running == 1, "it runs")
    os.kill(stack.pid_of("tritonserver"), signal.SIGSTOP)
    with pytest.raises(InferenceServerException, match="503"):
        await asyncio.wait_for(running, HANG_S)
    assert await asyncio.to_thread(stack.wait) == 1
    text = stack.log_file.read_text()
    assert "Triton was started again 1 times in a row and has ended again" in text
    assert "Triton answered no request for 20 s and was killed" in text
    await until(lambda: stack.processes() == [])
    assert shared_memory_of(stack) == []


async def test_cancelled_calls_and_hanging_triton_do_not_delay_end(
    make_stack: Callable[..., Stack],
) -> None:
    """Triton counts most cancelled calls of the ensemble as running forever, and waits for them when it exits."""
    stack = make_stack(**SLOW, CHARONIA_DRAIN_TIMEOUT_S="600").start()
    fields = {"messages": "talk", "max_tokens": 200, "ignore_eos": True, "stream": True}
    async with triton.InferenceServerClient(stack.grpc) as client:
        responses = triton_stream(client, fields, request_id="cancelled")
        await anext(responses)
        await responses.aclose()
    await engine_metrics.until(stack.metrics, lambda metrics: metrics.running == 0, "it runs no more")
    stack.signal(signal.SIGTERM)
    assert stack.wait() == 0
    await until(lambda: stack.processes() == [])


def test_second_signal_ends_stack_with_running_requests(make_stack: Callable[..., Stack]) -> None:
    stack = make_stack(**SLOW, CHARONIA_DRAIN_TIMEOUT_S="600").start()
    body = {"model": "babbler", "prompt": "talk", "max_tokens": ENDLESS, "ignore_eos": True, "stream": True}
    with (
        httpx.Client(timeout=HANG_S) as client,
        client.stream("POST", f"{stack.gateway}/v1/completions", json=body) as answer,
    ):
        next(answer.iter_lines())
        stack.signal(signal.SIGINT)
        wait_until(lambda: "Stopping" in stack.log_file.read_text())
        assert "killed" not in stack.log_file.read_text()

        def press_again() -> bool:
            """Send further signals until the end. They must not disturb the shutdown."""
            stack.signal(signal.SIGINT)
            assert stack.process is not None
            return stack.process.poll() is not None

        wait_until(press_again)
        assert stack.wait() == 130
    text = stack.log_file.read_text()
    assert text.splitlines().count("Ending without waiting for running requests") == 1 and "killed" not in text
    nothing_is_left(stack)


@pytest.fixture
def installed_triton(tmp_path: Path) -> Path:
    """A server with the folders of NVIDIA's images: one stub and one folder of libraries."""
    found = Distribution.find()
    root = tmp_path / "tritonserver"
    python = root / "backends" / "python"
    python.mkdir(parents=True)
    for file in [*found.python_backend.iterdir(), found.python_stub]:
        (python / file.name).symlink_to(file)
    (root / "bin").mkdir()
    (root / "bin" / "tritonserver").symlink_to(found.server)
    (root / "lib").symlink_to(found.libraries)
    return root


def test_installed_triton_logs_to_stderr(make_stack: Callable[..., Stack], installed_triton: Path) -> None:
    stack = make_stack(CHARONIA_TRITON_DIR=str(installed_triton), CHARONIA_GATEWAY="0", CHARONIA_LOGS="stderr")
    stack.launch()
    wait_until(lambda: "is ready after" in stack.log_file.read_text())
    assert answers(f"{stack.http}/v2/health/ready")
    assert not answers(f"{stack.gateway}/health/live")
    programs = {Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode() for pid in stack.processes()}
    assert str(installed_triton / "bin" / "tritonserver") in programs
    stack.signal(signal.SIGTERM)
    assert stack.wait() == 0
    nothing_is_left(stack)
    assert "successfully loaded 'engine'" in stack.log_file.read_text()
    assert list(stack.run_dir.glob("port-*/*.log")) == []


def test_prepare_creates_workspace_for_serve(model: Path, tmp_path: Path) -> None:
    def prepared(*options: str) -> str:
        command = [CHARONIA, "prepare", model, "--run-dir", tmp_path, *options]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    made = Path(prepared())
    assert made.parent == tmp_path / "workspaces"
    manifest = made / "triton_models" / "weights" / "manifest.json"
    before = manifest.stat()
    assert Path(prepared()) == made
    assert (manifest.stat().st_ino, manifest.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_workspace_elsewhere_is_served_split_and_quantised(
    tmp_path: Path,
) -> None:
    """Weights with 4 bits and a KV cache with 8 bits. The tokens equal the Python API's with these settings, and the
    quantised cache changes them."""
    workspace, model = tmp_path / "my workspace", tmp_path / "m"
    write_random_model(model, Shape(2, 256, 4, 2, 512, 320), weight_type="fp32", scheme="w4a16", scale=0.2)
    subprocess.run([CHARONIA, "convert", model, "--dst-path", workspace, "--tp", "2"], check=True, capture_output=True)
    asked = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, logprobs=0)

    def answer_of(**settings: int) -> Output:
        with Engine.from_pretrained(workspace, threads=2, cache_max_entry_count=64, **settings) as engine:
            return engine.generate("What is a conch?", asked)[0]

    expected = answer_of(quant_policy=8)
    assert expected.logprobs != answer_of().logprobs
    env = {"CHARONIA_TEXT_INSTANCES": "1", "CHARONIA_QUANT_POLICY": "8", "CHARONIA_HTTP_INFERENCE": "1"}
    with running(Stack(workspace, tmp_path / "run", env)) as stack:
        fields = {"text_input": "What is a conch?", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(
            f"{stack.http}/v2/models/ensemble/generate", json={**fields, "return_log_probs": True}, timeout=HANG_S
        ).json()
        assert answer["output_ids"] == expected.token_ids
        assert answer["output_log_probs"] == pytest.approx(expected.logprobs, abs=1e-5)
        assert answers(f"{stack.gateway}/health/ready")
        listed = httpx.get(f"{stack.gateway}/v1/models", timeout=HANG_S).json()["data"][0]
        assert (listed["weight_type"], listed["group_size"]) == ("int4", 128)
        body = {"model": listed["id"], "prompt": "What is a conch?", "max_tokens": 40, "temperature": 0}
        completed = httpx.post(
            f"{stack.gateway}/v1/completions", json={**body, "ignore_eos": True}, timeout=HANG_S
        ).json()
        assert completed["choices"][0]["text"] == expected.text
        stubs = [
            pid for pid in stack.processes() if b"python_backend_stub" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        assert len(stubs) == 2
