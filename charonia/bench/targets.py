"""Targets of requests: the engine in this process, Triton's ensemble, or the gateway. All responses are streamed."""

from __future__ import annotations

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

# Sampling parameters of measured requests. They override a repetition penalty in generation_config.json.
GREEDY: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 1.0}


class Target(Protocol):
    async def run(self, job: Job, trace: Trace) -> None:
        """Send a request and record its responses in `trace`. Raises the error of the request."""
        ...


# Opens a target inside a running event loop, for example a partial of `triton`.
OpenTarget = Callable[[], AbstractAsyncContextManager[Target]]


class InProcess:
    """The engine of this process, through its asyncio stream."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def run(self, job: Job, trace: Trace) -> None:
        sampling = SamplingParams(max_tokens=job.max_tokens, ignore_eos=True, **GREEDY)
        async for chunk in self._engine.astream(job.prompt, sampling):
            if chunk.token_ids:
                trace.arrivals.append(clock())
            trace.count(chunk)


class Triton:
    """Triton's ensemble over gRPC, through the client library."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def run(self, job: Job, trace: Trace) -> None:
        from charonia_client import GenerateRequest

        kind = "text" if isinstance(job.prompt, str) else "messages"
        prompt: dict[str, Any] = {kind: job.prompt}
        request = GenerateRequest(**prompt, max_tokens=job.max_tokens, ignore_eos=True, **GREEDY)
        async for part in self._client.generate(request):
            if part.token_ids or part.text:
                trace.arrivals.append(clock())
            trace.count(part)


class Gateway:
    """The gateway's /v1/completions, or /v1/chat/completions for messages, as server-sent events."""

    def __init__(self, client: Any, model: str) -> None:
        self._client = client
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        self._body = {"model": model, "ignore_eos": True, "timings": True, **streamed}

    async def run(self, job: Job, trace: Trace) -> None:
        path, name = ("/v1/completions", "prompt")
        if not isinstance(job.prompt, str):
            path, name = ("/v1/chat/completions", "messages")
        body = {**self._body, name: job.prompt, "max_tokens": job.max_tokens, **GREEDY}
        async with self._client.stream("POST", path, json=body) as response:
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
                if usage := event.get("usage"):
                    trace.input_tokens, trace.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
                if (timings := event.get("timings")) and "draft_n" in timings:
                    trace.proposed_tokens, trace.accepted_tokens = timings["draft_n"], timings["draft_n_accepted"]


@asynccontextmanager
async def in_process(engine: Engine) -> AsyncIterator[Target]:
    yield InProcess(engine)


@asynccontextmanager
async def triton(address: str) -> AsyncIterator[Target]:
    """address: HOST:PORT of Triton's gRPC."""
    try:
        from charonia_client import Client
    except ImportError as error:
        raise ModelError("the Triton target needs the client library: pip install charonia-client") from error
    async with Client(address) as client:
        if not await client.model_ready():
            raise ModelError(f"no Triton server with a ready ensemble at {address}: was it started (charonia serve)?")
        yield Triton(client)


@asynccontextmanager
async def gateway(url: str, api_key: str | None = None, tls_ca: Path | None = None) -> AsyncIterator[Target]:
    """Arguments as of gateway_client()."""
    async with gateway_client(url, api_key, tls_ca) as client:
        yield Gateway(client, (await client.get("/v1/models")).json()["data"][0]["id"])


@asynccontextmanager
async def gateway_client(url: str, api_key: str | None = None, tls_ca: Path | None = None) -> AsyncIterator[Any]:
    """Yield an httpx.AsyncClient of a gateway that responds. Raises ModelError if none does. url: such as
    http://localhost:23333, with or without /v1. tls_ca: a PEM file with the authorities of the gateway's certificate;
    None: public ones."""
    import httpx

    try:
        base = httpx.URL(url.rstrip("/").removesuffix("/v1"))
    except httpx.InvalidURL as error:
        raise ModelError(f"--url {url} is not an address ({error}): write http://HOST:PORT") from None
    if base.scheme not in ("http", "https") or not base.host:
        raise ModelError(f"--url {url} is not an address: write http://HOST:PORT or https://HOST")
    try:
        verify = ssl.create_default_context(cafile=tls_ca)
    except OSError as error:
        raise ModelError(f"{tls_ca} cannot be used: {error.strerror or error}") from None
    async with httpx.AsyncClient(
        base_url=base, timeout=None, limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=False,  # ignore proxies in the environment
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {}, verify=verify,
    ) as client:  # fmt: skip
        try:
            response = await client.get("/v1/models")
            if response.status_code == 401:
                raise ModelError(f"the gateway at {url} needs an API key (401): use --api-key or CHARONIA_API_KEY")
            response.raise_for_status()
        except httpx.HTTPStatusError as error:
            raise ModelError(f"the gateway at {url} returned an error: {error}") from error
        except httpx.HTTPError as error:
            hint = "was it started (charonia serve)?"
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                hint = "name its certificate authority with --tls-ca"
            elif url.startswith("http:") and isinstance(error, httpx.RemoteProtocolError):
                hint = "if it uses TLS, --url must start with https://"
            raise ModelError(f"no gateway responds at {url} ({error}): {hint}") from error
        yield client
