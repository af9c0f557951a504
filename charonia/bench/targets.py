"""Who answers: the engine in this process, Triton's ensemble or the gateway. Each counts tokens, and streams unless the
servers are asked for whole answers."""

from __future__ import annotations

import itertools
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from charonia.api.engine import Engine
from charonia.api.results import SamplingParams
from charonia.bench.figures import Trace
from charonia.bench.workload import Job
from charonia.errors import ModelError

clock = time.perf_counter

_TIMED_EVERY = 8  # of the gateway's streams: to say when each event was made takes time, in all of them too much


class Target(Protocol):
    """Something that answers requests."""

    async def run(self, job: Job, trace: Trace) -> None:
        """Reads one answer into `trace`; raises what went wrong."""
        ...


# Opens a target inside a running event loop.
OpenTarget = Callable[[], AbstractAsyncContextManager[Target]]

# Sampling parameters of a measured request. A model's generation_config.json may ask for a repetition penalty.
GREEDY: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 1.0}


class InProcess:
    """The engine of this process, through its asyncio stream."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def run(self, job: Job, trace: Trace) -> None:
        sampling = SamplingParams(max_tokens=job.max_tokens, ignore_eos=True, logprobs=job.logprobs, **GREEDY)
        async for chunk in self._engine.astream(job.text, sampling):
            if chunk.token_ids:
                trace.arrivals.append(clock())
                trace.made_ms.append(chunk.timings.total_ms)
            trace.input_tokens, trace.output_tokens = chunk.num_input_tokens, chunk.num_output_tokens
            trace.cached_tokens = chunk.num_cached_tokens


class Triton:
    """Triton's ensemble over gRPC, through the client library."""

    def __init__(self, client: Any, stream: bool = True) -> None:
        self._client = client
        self._stream = stream

    async def run(self, job: Job, trace: Trace) -> None:
        from charonia_client import GenerateRequest

        request = GenerateRequest(
            text=job.text,
            max_tokens=job.max_tokens,
            ignore_eos=True,
            logprobs=job.logprobs,
            stream=self._stream,
            **GREEDY,
        )
        async for part in self._client.generate(request):
            if part.token_ids or part.text:
                trace.arrivals.append(clock())
                if part.timings:
                    trace.made_ms.append(part.timings.total_ms)
            trace.input_tokens, trace.output_tokens = part.num_input_tokens, part.num_output_tokens
            trace.cached_tokens = part.num_cached_tokens


class Gateway:
    """The gateway's /v1/completions, as server-sent events or whole. Of the streams each eighth has made_ms."""

    def __init__(self, client: Any, model: str, stream: bool = True) -> None:
        self._client = client
        self._model = model
        self._stream = stream
        self._streams = itertools.count()

    async def run(self, job: Job, trace: Trace) -> None:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": job.text,
            "max_tokens": job.max_tokens,
            "ignore_eos": True,
            **GREEDY,
        }
        if job.logprobs is not None:
            body["logprobs"] = job.logprobs
        if not self._stream:
            response = await self._client.post("/v1/completions", json=body)
            if response.status_code != 200:
                raise RuntimeError(f"HTTP {response.status_code}: {response.text[:300]}")
            trace.arrivals.append(clock())
            self._count(response.json()["usage"], trace)
            return
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if next(self._streams) % _TIMED_EVERY == 0:
            body["timings_per_token"] = True
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                raise RuntimeError(f"HTTP {response.status_code}: {response.text[:300]}")
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(str(event["error"].get("message", event["error"])))
                if event["choices"]:
                    trace.arrivals.append(clock())
                    if timings := event.get("timings"):
                        trace.made_ms.append(timings["total_ms"])
                if usage := event.get("usage"):
                    self._count(usage, trace)

    @staticmethod
    def _count(usage: dict[str, Any], trace: Trace) -> None:
        trace.input_tokens, trace.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        trace.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]


def in_process(engine: Engine) -> OpenTarget:
    @asynccontextmanager
    async def open_target() -> AsyncIterator[Target]:
        yield InProcess(engine)

    return open_target


def triton(address: str, stream: bool = True, subscribe: bool = False) -> OpenTarget:
    """address: HOST:PORT of Triton's gRPC. subscribe: as the client library's Client has it."""

    @asynccontextmanager
    async def open_target() -> AsyncIterator[Target]:
        try:
            from charonia_client import Client
        except ImportError as error:
            raise ModelError("the Triton target needs the client library: pip install charonia-client") from error
        async with Client(address, subscribe=subscribe) as client:
            if not await client.model_ready():
                raise ModelError(
                    f"no Triton with a ready ensemble answers at {address}: is it started (charonia serve)?"
                )
            yield Triton(client, stream)

    return open_target


def gateway(url: str, api_key: str | None = None, tls_ca: Path | None = None, stream: bool = True) -> OpenTarget:
    """url: the gateway's address, such as http://localhost:23333. api_key: for one that asks for keys. tls_ca:
    a PEM file, the certificates that its own comes from; None: public ones."""

    @asynccontextmanager
    async def open_target() -> AsyncIterator[Target]:
        try:
            import httpx
        except ImportError as error:
            raise ModelError("the gateway target needs httpx: pip install httpx") from error
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        # A benchmark's server is not behind a proxy for web pages, whatever the environment says.
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            verify = ssl.create_default_context(cafile=tls_ca)
        except OSError as error:
            raise ModelError(f"{tls_ca} cannot be used: {error.strerror or error}") from None
        async with httpx.AsyncClient(
            base_url=url, timeout=None, limits=limits, trust_env=False, headers=headers, verify=verify
        ) as client:
            try:
                models = (await client.get("/v1/models")).raise_for_status().json()["data"]
            except httpx.HTTPStatusError as error:
                if error.response.status_code != 401:
                    raise ModelError(f"the gateway at {url} fails: {error}") from error
                raise ModelError(
                    f"the gateway at {url} wants an API key (401): give one that it knows with --api-key or "
                    "CHARONIA_API_KEY"
                ) from error
            except httpx.HTTPError as error:
                hint = "is it started (charonia serve)?"
                if "CERTIFICATE_VERIFY_FAILED" in str(error):
                    hint = "name the certificates that its own comes from with --tls-ca"
                elif url.startswith("http:") and isinstance(error, httpx.RemoteProtocolError):
                    hint = "has it TLS? Then --url begins with https://"
                raise ModelError(f"no gateway answers at {url} ({error}): {hint}") from error
            yield Gateway(client, models[0]["id"], stream)

    return open_target
