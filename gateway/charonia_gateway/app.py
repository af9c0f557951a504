"""The application: routes, error format, metrics and middleware in front of the Triton servers."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from charonia_client import CharoniaError, Tls
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from charonia_gateway import __version__
from charonia_gateway.autoload import Autoload
from charonia_gateway.background import Backgrounds
from charonia_gateway.batches.store import BatchStore
from charonia_gateway.batches.worker import BatchWorker
from charonia_gateway.body import IGNORED_HEADER
from charonia_gateway.context import Gateway
from charonia_gateway.documentation import complete_schema
from charonia_gateway.drain import Drain, DrainMiddleware
from charonia_gateway.endpoints.discovery import Discovery
from charonia_gateway.endpoints.pool import Pool
from charonia_gateway.endpoints.server import Server
from charonia_gateway.engine import Engine
from charonia_gateway.errors import (
    LIMIT_HEADERS,
    ApiError,
    handle_api_error,
    handle_engine_error,
    handle_http_error,
    handle_parameter_error,
)
from charonia_gateway.keys import KeyRing
from charonia_gateway.limiter import Limiter
from charonia_gateway.metrics import Metrics, MetricsMiddleware
from charonia_gateway.models_file import ModelsFile
from charonia_gateway.origins import OriginMiddleware
from charonia_gateway.pages import add_pages
from charonia_gateway.port import is_loopback
from charonia_gateway.record import NOT_ENFORCED_HEADER, REQUEST_ID_HEADER, RecordMiddleware
from charonia_gateway.request_log import RequestLog
from charonia_gateway.routes import (
    batches,
    chat,
    completions,
    embeddings,
    interactive,
    messages,
    models,
    replay,
    responses,
    service,
    tokenizer,
)
from charonia_gateway.settings import Settings
from charonia_gateway.state import Bounds, MemoryState, RedisState, State
from charonia_gateway.stored import ResponseStore
from charonia_gateway.tracing import Tracing, TracingMiddleware

_DESCRIPTION = """OpenAI's API for the models of this server. OpenAI's own clients work unchanged. Their `base_url` is
this server's address and `/v1`; their `api_key` comes from the operator (any value if the server needs no key). The
server ignores unknown fields and names them in the response header `charonia-ignored-fields`."""


async def _client_gone(request: Request, _: Exception) -> Response:
    request.scope.setdefault("state", {})["disconnected"] = True
    return Response(status_code=499)


def _of(server: Server) -> Callable[[str], Server]:
    return lambda _: server


def _state_of(settings: Settings) -> State:
    bounds = _bounds_of(settings)
    return RedisState(settings.redis_url, bounds) if settings.redis_url else MemoryState(bounds)


def _bounds_of(settings: Settings) -> Bounds:
    """The bounds of stored responses."""
    return Bounds(settings.max_responses, settings.max_response_bytes, settings.response_ttl_s)


@dataclass(frozen=True)
class _Parts:
    """The parts of an application."""

    settings: Settings
    models_file: ModelsFile | None
    drain: Drain
    servers: Mapping[str, Server] | None  # instead of Triton
    state: State
    metrics: Metrics
    keys: KeyRing | None
    tls: Tls | None  # to Triton
    tracing: Tracing | None

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Connect to Triton. Until its end, files and DNS names are read again when they change."""
        settings = self.settings
        discovery = Discovery(settings.endpoints)
        found = [] if self.servers else list(await discovery.targets())
        pools: dict[str, Pool] = {}

        def use(targets: Iterable[str]) -> None:
            found[:] = targets
            for pool in pools.values():
                pool.set_targets(found)

        async with AsyncExitStack() as opened:
            adding = asyncio.Lock()

            async def add_models() -> None:
                async with adding:
                    added = {name: label for name, label in self._models().items() if name not in gateway.engines}
                    if not added:
                        return
                    for model, label in added.items():
                        if model not in pools:  # else a request that added it was cancelled
                            pools[model] = await opened.enter_async_context(self._pool(model, label, found))
                    for model, pool in pools.items():
                        pool.model = model if len(pools) > 1 and not self.servers else None
                    await asyncio.gather(*(pools[model].first_checks() for model in added))
                    gateway.add({model: self._engine(model, pools[model], autoload) for model in added})

            async def refresh() -> None:
                if self.models_file:
                    await asyncio.to_thread(self.models_file.refresh)
                    await add_models()

            autoload = self._autoload()
            gateway = app.state.gateway = self._gateway(refresh, await asyncio.to_thread(self._batches))
            await add_models()
            followers = [self.state.follow()]
            if self.models_file:
                followers.append(self.models_file.follow(add_models))
            if self.keys:
                followers.append(self.keys.follow())
            if not self.servers:
                followers.append(discovery.follow(use, settings.endpoint_check_interval_s))
            if gateway.batches:
                most = settings.batch_concurrency
                gateway.batch_worker = BatchWorker(app, gateway.batches, self.drain, most)
                followers.append(gateway.batch_worker.follow())
            following = [asyncio.create_task(follower) for follower in followers]
            try:
                yield
            finally:
                await gateway.backgrounds.close()
                for task in following:
                    task.cancel()
                await asyncio.gather(*following, return_exceptions=True)
        await self.state.close()
        if self.tracing:
            await asyncio.to_thread(self.tracing.close)

    def _models(self) -> dict[str, str]:
        """The label of each model, by its own name. The default model is first."""
        return {**self.settings.models, **(self.models_file.models if self.models_file else {})}

    def _pool(self, model: str, label: str, targets: list[str]) -> Pool:
        settings, servers, metrics = self.settings, self.servers, self.metrics
        return Pool(
            [servers[model].target] if servers else targets,
            check_interval_s=settings.endpoint_check_interval_s,
            check_timeout_s=settings.endpoint_check_timeout_s,
            resume_timeout_s=0 if servers else settings.resume_timeout_s,
            on_retry=metrics.retries.inc,
            on_resume=metrics.resumes.inc,
            on_change=partial(metrics.set_endpoint, model),
            metadata=self.tracing.metadata if self.tracing else None,
            tls=self.tls,
            label=label,
            connect=_of(servers[model]) if servers else None,
            state=self.state,
        )

    def _autoload(self) -> Autoload | None:
        settings = self.settings
        if settings.models_autoload and settings.control_dir and not self.servers:
            return Autoload(settings.control_dir, settings.load_timeout_s)
        return None

    def _engine(self, model: str, pool: Pool, autoload: Autoload | None) -> Engine:
        settings = self.settings
        return Engine(
            pool,
            settings.request_timeout_s,
            cache_by_key=settings.cache_by_key,
            fit_max_tokens=settings.fit_max_tokens,
            model=model,
            autoload=autoload,
        )

    def _batches(self) -> BatchStore | None:
        settings = self.settings
        if settings.batch_dir is None:
            return None
        return BatchStore(
            settings.batch_dir,
            max_bytes=settings.max_batch_bytes,
            max_requests=settings.max_batch_requests,
            ttl_s=settings.batch_ttl_s,
            max_line_bytes=settings.max_body_bytes,
        )

    def _gateway(self, refresh: Callable[[], Awaitable[None]], batches: BatchStore | None) -> Gateway:
        """The state of the application, without models."""
        settings = self.settings
        return Gateway(
            settings,
            self.metrics,
            self.drain,
            int(time.time()),
            ResponseStore(self.state, settings.max_responses, settings.max_response_bytes),
            Backgrounds(0 if settings.redis_url else settings.max_background, _bounds_of(settings)),
            batches,
            refresh,
        )

    @property
    def is_open(self) -> Callable[[str, str], bool] | None:
        """Takes method and path; returns whether they need no key. None if no request needs a key."""
        if not self.keys:
            return None
        from charonia_gateway.access import is_open

        return is_open

    def add_middleware(self, app: FastAPI) -> None:
        """Add the middleware, innermost first. After the first text, a stream's events bypass it
        (record.server_send)."""
        settings, keys = self.settings, self.keys
        app.add_middleware(DrainMiddleware, drain=self.drain)
        if keys:
            from charonia_gateway.access import KeyMiddleware

            app.add_middleware(KeyMiddleware, keys=keys, limiter=Limiter(self.state), metrics=self.metrics)
        local = is_loopback(settings.host)
        app.add_middleware(OriginMiddleware, allowed=settings.origins, keys=keys is not None, local=local)
        if settings.origins:
            app.add_middleware(
                CORSMiddleware,
                allow_origins=sorted(settings.origins),
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=[REQUEST_ID_HEADER, IGNORED_HEADER, NOT_ENFORCED_HEADER, "Retry-After", *LIMIT_HEADERS],
            )
        app.add_middleware(MetricsMiddleware, metrics=self.metrics)
        if self.tracing:
            app.add_middleware(TracingMiddleware, tracing=self.tracing)
        requests = RequestLog(settings.log_requests) if settings.log_requests else None
        app.add_middleware(RecordMiddleware, access_log=settings.access_log, request_log=requests)


def create_app(
    settings: Settings,
    drain: Drain | None = None,
    servers: Mapping[str, Server] | None = None,
    *,
    restarted: bool = False,
) -> FastAPI:
    """The ASGI application. The connections to Triton open with its lifespan; Triton may start later. `drain`: for the
    caller to end it. `servers`: used instead of Triton, by the name of the model; the lifespan closes them.
    `restarted`: this process replaces one that died. Raises ValueError for a file of keys or certificates that cannot
    be used."""
    parts = _Parts(
        settings,
        ModelsFile(settings.models_file) if settings.models_file else None,
        drain or Drain(settings.shutdown_timeout_s),
        servers,
        _state_of(settings),
        Metrics(os.environ.get("PROMETHEUS_MULTIPROC_DIR"), restarted),
        KeyRing(settings.keys_file) if settings.keys_file else None,
        settings.tls_to_triton(),
        Tracing(settings.tracing_endpoint) if settings.tracing_endpoint else None,
    )
    parts.metrics.expiries.of_certificates = settings.certificate_expiries
    if parts.keys:
        parts.metrics.expiries.of_keys = parts.keys.expiries
    app = FastAPI(
        title="Charonia",
        version=__version__,
        description=_DESCRIPTION,
        lifespan=parts.lifespan,
        docs_url=None,  # add_pages serves it, without files from other servers
        redoc_url=None,
        redirect_slashes=False,  # a redirect would contain the request's Host header
    )
    for module in (
        chat,
        completions,
        responses,
        batches,
        interactive,
        messages,
        embeddings,
        models,
        tokenizer,
        replay,
        service,
    ):
        app.include_router(module.router)
    add_pages(app, chat=settings.page)
    parts.add_middleware(app)
    app.add_exception_handler(ApiError, handle_api_error)
    app.add_exception_handler(RequestValidationError, handle_parameter_error)
    app.add_exception_handler(CharoniaError, handle_engine_error)
    app.add_exception_handler(HTTPException, handle_http_error)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    complete_schema(app, settings.model_names[0], parts.is_open)
    return app
