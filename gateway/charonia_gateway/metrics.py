"""The gateway's own metrics, and the ASGI layer that takes them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from charonia_gateway.record import begins_text

# Who asks for these looks at the gateway, and is no work of its own.
_WATCHING = frozenset(("/metrics", "/health/live", "/health/ready"))
_MERGE_EVERY_S = 1.0  # merging the files of all workers takes up to a second of CPU time where there are many keys
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class _Collected(Collector):
    """What was collected before."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


class Metrics:
    """Has a registry of its own, so that several applications can live in one process. folder: in which the workers of
    one gateway have the files of what they count, of which each shows the sums. restarted: this process replaces one of
    them that died."""

    def __init__(
        self, folder: Path | None = None, restarted: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.registry = CollectorRegistry()
        self._folder = folder
        self._clock = clock
        self._merging: asyncio.Task[bytes] | None = None  # or merged
        self._merged_at = 0.0
        self._collectors: list[Collector] = []
        self.requests = Counter(
            "charonia_gateway_requests",
            "HTTP requests answered; status 499: the client went away before the answer",
            ("route", "status"),
            registry=self.registry,
        )
        self.running = Gauge(
            "charonia_gateway_requests_running",
            "HTTP requests in work, but those of health checks and of metrics",
            registry=self.registry,
            multiprocess_mode="livesum",
        )
        self.disconnects = Counter(
            "charonia_gateway_disconnects", "clients that went away before their answer's end", registry=self.registry
        )
        self.duration = Histogram(
            "charonia_gateway_request_duration_seconds",
            "from a request's head to its answer's end",
            ("route",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.first_byte = Histogram(
            "charonia_gateway_time_to_first_byte_seconds",
            "from a request's head to its answer's beginning, which for streams is the first text",
            ("route",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.retries = Counter(
            "charonia_gateway_retries",
            "requests sent on to another endpoint: one had no room, failed, or went down before the answer began",
            registry=self.registry,
        )
        self._choices = Counter(
            "charonia_gateway_endpoint_choices",
            "choices among several endpoints, by what decided",
            ("reason",),
            registry=self.registry,
        )
        # By reason, made at once: a counter that is missing would look like one that was lost.
        self.choices = {reason: self._choices.labels(reason) for reason in ("session", "prefix", "load")}

        self._ways = Counter(
            "charonia_gateway_triton_requests",
            "requests sent to Triton, by what their answers come by: a call of each, or the subscription",
            ("way",),
            registry=self.registry,
        )
        self.ways = {way: self._ways.labels(way) for way in ("call", "subscription")}

        # Names of keys are those of the file of keys: what clients make up is no label.
        self.key_requests = Counter(
            "charonia_gateway_key_requests", "HTTP requests by a key", ("key",), registry=self.registry
        )
        self.key_tokens = Counter(
            "charonia_gateway_key_tokens", "tokens of a key's requests", ("key", "kind"), registry=self.registry
        )
        self.key_limited = Counter(
            "charonia_gateway_key_limited",
            "requests answered with 429 since a key had used its limit",
            ("key", "limit"),
            registry=self.registry,
        )
        # Also of one process, so that graphs and alerts find them.
        text = "processes of this gateway"
        Gauge("charonia_gateway_workers", text, registry=self.registry, multiprocess_mode="livesum").set(1)
        text = "processes of this gateway that died and were replaced"
        Counter("charonia_gateway_worker_restarts", text, registry=self.registry).inc(restarted)

    def add(self, collector: Collector) -> None:
        """It shows what is so of all workers."""
        self._collectors.append(collector)
        self.registry.register(collector)

    async def render(self) -> bytes:
        """Where there are several workers, as of a second ago at most."""
        if self._folder is None:
            return generate_latest(self.registry)
        merging = self._merging
        old = self._clock() >= self._merged_at + _MERGE_EVERY_S
        if merging is None or (merging.done() and (old or merging.cancelled() or merging.exception())):
            merging = self._merging = asyncio.create_task(self._merge(self._folder))
        return await asyncio.shield(merging)  # others wait for it, too

    async def _merge(self, folder: Path) -> bytes:
        try:
            # What reads the database of the workers does so in the thread that opened it.
            collected = [_Collected(list(collector.collect())) for collector in self._collectors]
            return await asyncio.to_thread(_together, folder, collected)
        finally:
            self._merged_at = self._clock()


def _together(folder: Path, more: Sequence[Collector]) -> bytes:
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(folder))  # type: ignore[no-untyped-call]
    for collector in more:
        registry.register(collector)
    return generate_latest(registry)


class MetricsMiddleware:
    """Counts and times requests."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        status = 0
        first_byte_s = 0.0

        async def watched(message: Message) -> None:
            nonlocal status, first_byte_s
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not first_byte_s and begins_text(message):
                first_byte_s = time.perf_counter() - began
            await send(message)

        metrics = self._metrics
        works = scope["path"] not in _WATCHING
        if works:
            metrics.running.inc()
        try:
            await self._app(scope, receive, watched)
        finally:
            if works:
                metrics.running.dec()
            if scope.get("state", {}).get("disconnected"):
                metrics.disconnects.inc()
                status = status or 499
            if record := scope.get("state", {}).get("record"):  # a stream that failed is no success
                status = record.failed_status or status
            # Only paths of the application are labels: what clients make up is not.
            route = getattr(scope.get("route"), "path", "other")
            metrics.requests.labels(route, str(status or 500)).inc()
            metrics.duration.labels(route).observe(time.perf_counter() - began)
            if first_byte_s:
                metrics.first_byte.labels(route).observe(first_byte_s)
