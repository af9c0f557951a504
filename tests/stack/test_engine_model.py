"""The model `engine` in the real server, called directly: two engines in one server, loaded and unloaded by name."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import subprocess
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engine_metrics
import httpx
import pytest
import triton_stream
import tritonclient.grpc.aio as triton
import waiting
from stack import ENDLESS, HANG_S, START_LIMIT_S, answers, free_ports
from tritonclient.utils import InferenceServerException

from charonia.serve import triton as serving
from charonia.settings import ServeSettings, read_settings
from charonia.weights.convert import link_workspace

ENGINE = "engine"
OTHER = "other"  # the same weights under another name
SPARE = "spare"  # not loaded at the start
PROMPT = [5, 6, 7]


def make_repository(folder: Path, workspace: Path) -> Path:
    """Three models that differ only in their names."""
    model = workspace / "model_repository" / ENGINE
    config = (model / "config.pbtxt").read_text()
    for name in (ENGINE, OTHER, SPARE):
        (folder / name).mkdir(parents=True)
        (folder / name / "1").symlink_to((model / "1").resolve())
        (folder / name / "config.pbtxt").write_text(config.replace(f'name: "{ENGINE}"', f'name: "{name}"'))
    return folder


@dataclass
class Server:
    """A Triton server with only the models ENGINE and OTHER."""

    settings: ServeSettings
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.settings.grpc_port}"

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.settings.http_port}"

    async def metrics(self, model: str = ENGINE) -> dict[str, float]:
        return await engine_metrics.read_all(f"http://127.0.0.1:{self.settings.metrics_port}/metrics", model)

    async def until(self, holds: Callable[[dict[str, float]], bool], model: str = ENGINE) -> dict[str, float]:
        """Wait until `holds` accepts the metrics, and return them."""
        metrics: dict[str, float] = {}

        async def accepted() -> bool:
            nonlocal metrics
            metrics = await self.metrics(model)
            return holds(metrics)

        await waiting.until(accepted, lambda: metrics)
        return metrics

    async def until_idle(self, model: str = ENGINE) -> dict[str, float]:
        """The metrics when the engine is idle."""
        await self.until(
            lambda m: m["num_requests_running"] == m["num_requests_waiting"] == m["kv_blocks_active"] == 0, model
        )
        # Counters may have changed while the server collected the metrics. A later collection has the final values.
        return await self.metrics(model)

    async def until_cancelled(self, before: dict[str, float], requests: int) -> dict[str, float]:
        """The metrics when this number of requests since `before` have been cancelled and the engine is idle."""
        name = "request_success_total{cancelled}"
        await self.until(lambda m: m[name] - before[name] >= requests)
        after = await self.until_idle()
        assert after[name] - before[name] == requests
        return after


@contextlib.contextmanager
def running(repository: Path, folder: Path, drain_s: int = 1) -> Iterator[Server]:
    http, grpc, metrics = free_ports(3)
    settings = read_settings(http_port=http, grpc_port=grpc, metrics_port=metrics)
    distribution = serving.Distribution.find()
    command = serving.command(
        distribution, settings, repository, serving.make_backend_folder(folder / "backends", distribution), drain_s
    )
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("CHARONIA_")}
    env = {
        **serving.environment(distribution, inherited),
        "CHARONIA_DRAIN_TIMEOUT_S": str(drain_s),
        "CHARONIA_THREADS": "2",
        "CHARONIA_CACHE_MAX_ENTRY_COUNT": "512",
        "CHARONIA_MAX_BATCH_SIZE": "32",
        "CHARONIA_MAX_QUEUE_SIZE": "200",
        "CHARONIA_STREAM_INTERVAL_MS": "0",
    }
    explicit = ["--model-control-mode=explicit", f"--load-model={ENGINE}", f"--load-model={OTHER}"]
    log = folder / "triton.log"
    with log.open("wb") as out:
        process = subprocess.Popen([*command, *explicit], env=env, stdout=out, stderr=out)
    try:
        server = Server(settings, log, process)
        deadline = time.monotonic() + START_LIMIT_S
        while not answers(f"{server.http}/v2/health/ready"):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield server
    finally:
        process.kill()
        process.wait(HANG_S)


@pytest.fixture(scope="module")
def repository(slow_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine_model")
    return make_repository(folder / "repository", link_workspace(slow_model, folder / "workspace"))


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(repository, tmp_path_factory.mktemp("engine_server")) as served:
        yield served


@pytest.fixture
async def client(server: Server) -> AsyncIterator[triton.InferenceServerClient]:
    async with triton.InferenceServerClient(server.grpc) as made:
        yield made


collect = functools.partial(triton_stream.collect, model=ENGINE)


def request(**fields: Any) -> dict[str, Any]:
    """A request's inputs. The engine generates exactly the requested number of tokens."""
    defaults = {"input_ids": PROMPT, "seed": 1, "ignore_eos": True, "stream": True}
    return {name: value for name, value in (defaults | fields).items() if value is not None}


async def outcome(
    client: triton.InferenceServerClient, fields: dict[str, Any], begun: asyncio.Event | None = None, **options: Any
) -> str:
    """The finish reason, or the server's error."""
    try:
        responses = await collect(client, fields, begun, **options)
    except InferenceServerException as error:
        return str(error.message())
    return str(responses[-1].finish_reason)


async def leave_after(client: triton.InferenceServerClient, fields: dict[str, Any], responses: int) -> None:
    """Read this number of responses, then cancel the call."""
    async with contextlib.aclosing(triton_stream.stream(client, fields, model=ENGINE)) as answers:
        async for _ in answers:
            responses -= 1
            if responses == 0:
                return


async def test_response_has_documented_tensors(client: triton.InferenceServerClient) -> None:
    texts = {"echo": "é"}
    tensors = request(max_tokens=4, return_log_probs=True, top_logprobs=2, prompt_logprobs=3, stream=False, **texts)
    response = (await collect(client, tensors))[0].tensors
    shapes = {name: array.shape for name, array in response.items()}
    scalars = ("echo", "finish_reason", "num_input_tokens", "num_output_tokens", "num_cached_tokens")
    scalars += ("sequence_index", "cum_log_probs", "num_session_tokens", "num_computed_tokens")
    scalars += ("num_proposed_tokens", "num_accepted_tokens", "lora_adapters")
    rows = {"output_ids": (4,), "output_log_probs": (4,), "top_log_prob_ids": (8,), "top_log_probs": (8,)}
    rows |= {"prompt_ids": (3,), "prompt_log_probs": (2,)}
    rows |= {"prompt_top_log_prob_ids": (6,), "prompt_top_log_probs": (6,)}
    assert shapes == {
        **rows,
        **dict.fromkeys(scalars, (1,)),
        "pooled": (0,),
        "text_span": (2,),
        "text_tokens": (6,),
        "timings": (3,),
    }
    assert response["text_tokens"].tolist() == [*response["text_span"], *response["output_ids"]]
    assert response["prompt_ids"].tolist() == PROMPT
    assert response["cum_log_probs"][0] == pytest.approx(response["output_log_probs"].sum(), abs=1e-4)
    assert response["echo"][0].decode() == "é"
    assert response["num_input_tokens"] == [len(PROMPT)]
    assert response["num_output_tokens"] == [4]
    queue_ms, first_ms, total_ms = response["timings"]
    assert 0 <= queue_ms <= first_ms <= total_ms


async def test_parameter_counts_as_input_of_its_name(server: Server) -> None:
    body = {"input_ids": PROMPT, "ignore_eos": True, "parameters": {"max_tokens": 3}}
    async with httpx.AsyncClient(timeout=HANG_S) as http:
        answer = await http.post(f"{server.http}/v2/models/{ENGINE}/generate", json=body)
    assert answer.json()["num_output_tokens"] == 3


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input_ids": None}, "input_ids is missing"),
        ({"input_ids": [1, 100000]}, "100000"),
        ({"input_ids": [-1]}, "-1"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 50000}, "50000"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs is 21 and must be 0 to 20"),
        ({"stop_words": [""]}, "stop"),
        ({"stop": True}, "stop is true and the request has no id"),
        ({"cancel": True}, "cancel is true and the request has no id"),
        ({"stop": True, "cancel": True}, "stop and cancel are both true"),
        ({"end_session": True}, "end_session is true and there is no session_id"),
        ({"continuation_ids": [1]}, "continuation_ids has 1 tokens and there is no session_id"),
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21 and must be -1 (none) to 20"),
        ({"num_return_sequences": 0}, "0"),
        ({"num_return_sequences": 3, "best_of": 2}, "best_of"),
        ({"best_of": 3}, "best_of"),  # also for a stream
        ({"timeout_ms": 0}, "timeout_ms"),
        ({"logit_bias_ids": [3]}, "logit_bias_ids has 1 entries and logit_bias_values 0"),
        ({"bad_words_ids": [[3, 4], [2, 1]]}, "bad_words_ids: the end offset 1 must be above 2"),
        ({"bad_words_ids": [[3, 4], [3, -1]]}, "bad_words_ids: the end offset 3 must be above 0 and at most 2"),
    ],
)
async def test_wrong_request_field_is_named(
    client: triton.InferenceServerClient, fields: dict[str, Any], named: str
) -> None:
    answer = await outcome(client, request(**fields))
    assert answer.startswith("[400] ")
    assert named in answer


async def test_http_client_disconnect_ends_request(server: Server) -> None:
    before = await server.until_idle()
    body = {"input_ids": PROMPT, "ignore_eos": True, "max_tokens": ENDLESS, "stream": True}
    async with (
        httpx.AsyncClient(timeout=HANG_S) as http,
        http.stream("POST", f"{server.http}/v2/models/{ENGINE}/generate_stream", json=body) as answer,
    ):
        assert (await anext(answer.aiter_lines())).startswith("data: ")
    await server.until_cancelled(before, 1)


async def test_engine_is_idle_after_200_clients_disconnect(
    server: Server, client: triton.InferenceServerClient
) -> None:
    before = await server.until_idle()
    await asyncio.gather(*(leave_after(client, request(max_tokens=ENDLESS), 1 + index % 3) for index in range(200)))
    await server.until_cancelled(before, 200)
    assert await outcome(client, request(max_tokens=2)) == "length"


async def test_stop_request_ends_only_its_request(server: Server, client: triton.InferenceServerClient) -> None:
    ours, other = uuid.uuid4().hex, uuid.uuid4().hex
    begun = [asyncio.Event(), asyncio.Event()]
    stopped = asyncio.create_task(collect(client, request(max_tokens=ENDLESS), begun[0], request_id=ours))
    kept = asyncio.create_task(outcome(client, request(max_tokens=60), begun[1], request_id=other))
    await asyncio.gather(*(event.wait() for event in begun))
    (answer,) = await collect(client, request(input_ids=None, stop=True), request_id=ours)
    assert answer.ids == []
    assert (await stopped)[-1].finish_reason == "cancelled"
    assert sum(len(one.ids) for one in await stopped) < ENDLESS
    assert await kept == "length"


@pytest.mark.parametrize("action", ["stop", "cancel"])
async def test_stop_request_for_unknown_id_is_ignored(client: triton.InferenceServerClient, action: str) -> None:
    (answer,) = await collect(client, request(input_ids=None, **{action: True}), request_id="nobody")
    assert answer.ids == []
    (answer,) = await collect(client, request(input_ids=None, **{action: True}, session_id="nobody's"))
    assert answer.ids == []


async def test_session_with_folder_survives_unloading(
    server: Server, client: triton.InferenceServerClient, tmp_path: Path
) -> None:
    config = (await client.get_model_config(ENGINE, as_json=True))["config"]

    async def turn(session: str) -> int:
        fields: dict[str, Any] = {"session_id": session, "max_tokens": 4, "stream": False}
        (answer,) = await collect(client, request(**fields, continuation_ids=[8, 9]), model=SPARE)
        return int(answer.tensors["num_session_tokens"][0])

    async def load_spare(**parameters: str) -> None:
        changed = {key: {"string_value": value} for key, value in parameters.items()}
        await load(client, SPARE, {**config, "name": SPARE, "parameters": changed})

    for parameters, survives in ({"session_dir": str(tmp_path)}, True), ({}, False):
        session = uuid.uuid4().hex
        await load_spare(**parameters)
        assert await turn(session) == 0
        history = await turn(session)
        assert history > 0
        await unloaded(client, SPARE)
        await load_spare(**parameters)
        assert (await turn(session) > history) == survives
        await unloaded(client, SPARE)


async def test_environment_overrides_model_parameters(server: Server, client: triton.InferenceServerClient) -> None:
    """The server's environment sets the number of blocks, but not the length of a sequence."""
    config = (await client.get_model_config(ENGINE, as_json=True))["config"]
    parameters = {"cache_max_entry_count": {"string_value": "64"}, "session_len": {"string_value": "100"}}
    await load(client, SPARE, {**config, "name": SPARE, "parameters": parameters})
    assert (await server.metrics(SPARE))["kv_blocks_total"] == 512
    assert await outcome(client, request(max_tokens=97), model=SPARE) == "length"
    assert (await outcome(client, request(max_tokens=98), model=SPARE)).startswith("[400] ")
    await unloaded(client, SPARE)


async def test_every_step_reports_time_batch_and_tokens(server: Server, client: triton.InferenceServerClient) -> None:
    before = await server.until_idle()
    await asyncio.gather(*(collect(client, request(max_tokens=20)) for _ in range(2)))
    await server.until(lambda m: m["generation_tokens_total"] - before["generation_tokens_total"] == 40)
    after = await server.until_idle()

    def more(name: str) -> float:
        return after[name] - before[name]

    steps = more("engine_steps_total")
    for name in ("engine_step_seconds", "engine_step_sequences", "engine_step_tokens"):
        assert more(f"{name}_count") == steps
    # One step per token. There may be one more step, which was launched ahead.
    assert 40 <= more("engine_step_sequences_sum") <= 42
    assert 2 * (len(PROMPT) + 19) <= more("engine_step_tokens_sum") <= 2 * (len(PROMPT) + 20)  # all except the last
    assert more("engine_step_seconds_sum") > 0


async def test_unloading_ends_running_requests(server: Server, client: triton.InferenceServerClient) -> None:
    tasks = [asyncio.create_task(outcome(client, request(max_tokens=ENDLESS))) for _ in range(8)]
    neighbour = asyncio.create_task(outcome(client, request(max_tokens=100), model=OTHER))
    await server.until(lambda m: m["num_requests_running"] == len(tasks))
    await client.unload_model(ENGINE)
    for answer in await asyncio.wait_for(asyncio.gather(*tasks), HANG_S):
        assert answer.startswith("[503] model 'engine' is being unloaded")
    await until_unloaded(client, ENGINE)
    assert await server.metrics() == {}
    assert await neighbour == "length"
    await load(client, ENGINE)
    assert await outcome(client, request(max_tokens=3)) == "length"


async def test_unloading_ends_subscriptions(server: Server, client: triton.InferenceServerClient) -> None:
    def opened(name: str, begun: asyncio.Event) -> asyncio.Task[str]:
        fields = request(input_ids=None, seed=None, ignore_eos=None, stream=None, subscription=name)
        return asyncio.create_task(outcome(client, fields, begun, outputs=["deliveries"]))

    events = [asyncio.Event(), asyncio.Event()]
    streams = [opened("idle", events[0]), opened("busy", events[1])]
    await asyncio.gather(*(event.wait() for event in events))
    assert await collect(client, request(max_tokens=ENDLESS, subscription="busy")) == []
    await server.until(lambda m: m["num_requests_running"] == 1)
    await client.unload_model(ENGINE)
    for answer in await asyncio.wait_for(asyncio.gather(*streams), HANG_S):
        assert answer == "[503] model 'engine' is being unloaded"
    await until_unloaded(client, ENGINE)
    await load(client, ENGINE)
    assert await outcome(client, request(max_tokens=3)) == "length"


async def load(client: triton.InferenceServerClient, model: str, config: dict[str, Any] | None = None) -> None:
    """Load a model. The server waits forever for a model that is still in use: here that is a failure."""
    await asyncio.wait_for(client.load_model(model, config=json.dumps(config) if config else None), HANG_S)


async def unloaded(client: triton.InferenceServerClient, model: str) -> None:
    """Unload a model, and wait until it is gone."""
    await client.unload_model(model)
    await until_unloaded(client, model)


async def until_unloaded(client: triton.InferenceServerClient, model: str) -> None:
    async def gone() -> bool:
        (found,) = (one for one in (await client.get_model_repository_index()).models if one.name == model)
        return (found.state, found.reason) == ("UNAVAILABLE", "unloaded")

    await waiting.until(gone)


async def test_reloading_lets_running_requests_finish(server: Server, client: triton.InferenceServerClient) -> None:
    begun = asyncio.Event()
    running_on = asyncio.create_task(outcome(client, request(max_tokens=300), begun))
    await begun.wait()
    config = await client.get_model_config(ENGINE, as_json=True)
    changed = {**config["config"], "parameters": {"max_batch_size": {"string_value": "7"}}}
    await load(client, ENGINE, changed)
    assert await outcome(client, request(max_tokens=3)) == "length"
    assert await running_on == "length"
    # The end of the old engine has not removed the series of the new one.
    assert (await server.until(lambda m: m["num_requests_running"] == 0))["kv_blocks_total"] == 512


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_transaction_policy": {"decoupled": False}}, "decoupled: true"),
        ({"max_batch_size": 4}, "max_batch_size"),
        ({"instance_group": [{"count": 2, "kind": "KIND_CPU"}]}, "exactly one"),
        (
            {"instance_group": [{"kind": "KIND_CPU"}], "parameters": {"device": {"string_value": "cuda"}}},
            "instance_group has KIND_CPU and the parameter device is cuda",
        ),
        ({"parameters": {"thread": {"string_value": "1"}}}, "did you mean 'threads'"),
        ({"parameters": {"token_budget": {"string_value": "many"}}}, "token_budget"),
        ({"parameters": {"drain_timeout_s": {"string_value": "-1"}}}, "drain_timeout_s"),
    ],
)
async def test_invalid_configuration_is_rejected(
    client: triton.InferenceServerClient, change: dict[str, Any], named: str
) -> None:
    config = (await client.get_model_config(ENGINE, as_json=True))["config"]
    with pytest.raises(InferenceServerException, match=re.escape(named)):
        await load(client, SPARE, {**config, "name": SPARE, **change})


def test_library_exports_only_entry_points() -> None:
    lines = subprocess.run(
        ["nm", "--dynamic", "--defined-only", serving.backend_library()], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert sorted(line.split()[-1] for line in lines) == sorted(
        f"TRITONBACKEND_{name}"
        for name in (
            "Initialize",
            "Finalize",
            "ModelInitialize",
            "ModelFinalize",
            "ModelInstanceInitialize",
            "ModelInstanceFinalize",
            "ModelInstanceExecute",
        )
    )
