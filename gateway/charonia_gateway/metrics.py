"""The gateway's own metrics, and the ASGI middleware that records them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from charonia_gateway.record import begins_text

# Requests for these paths do not count as running.
_WATCHING = frozenset(("/metrics", "/health/live", "/health/ready", "/health", "/ping"))
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


Expiries = Callable[[], Mapping[str, float]]  # seconds since 1970, by name


class _Expiries(Collector):
    """Reads the times when metrics are read, because files change. They are the same in all processes."""

    def __init__(self) -> None:
        self.of_certificates: Expiries = dict
        self.of_keys: Expiries = dict

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, label, times in (("certificate", "file", self.of_certificates), ("key", "key", self.of_keys)):
            text = f"when a {name} expires, in seconds since 1970"
            family = GaugeMetricFamily(f"charonia_gateway_{name}_expiry_seconds", text, labels=(label,))
            for value, expires in times().items():
                family.add_metric((value,), expires)
            yield family


class Metrics:
    """Has its own registry, so that several applications can run in one process. folder: the processes of one gateway
    store their values in files there, and each process exposes the sums. restarted: this process replaces a process
    that died."""

    def __init__(self, folder: str | None = None, restarted: bool = False) -> None:
        self.registry = CollectorRegistry()
        self.expiries = _Expiries()
        if folder is None:
            self.registry.register(self.expiries)
        self._folder = folder
        self.requests = Counter(
            "charonia_gateway_requests",
            "HTTP responses; status 499: the client disconnected before the response",
            ("route", "status"),
            registry=self.registry,
        )
        self.running = Gauge(
            "charonia_gateway_requests_running",
            "running HTTP requests, except health checks and metrics",
            registry=self.registry,
            multiprocess_mode="livesum",
        )
        self.disconnects = Counter(
            "charonia_gateway_disconnects",
            "clients that disconnected before the end of their response",
            registry=self.registry,
        )
        self.duration = Histogram(
            "charonia_gateway_request_duration_seconds",
            "from a request's head to the end of its response",
            ("route",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.first_byte = Histogram(
            "charonia_gateway_time_to_first_byte_seconds",
            "from a request's head to the start of its response, which for streams is the first text",
            ("route",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.retries = Counter(
            "charonia_gateway_retries",
            "requests sent to another endpoint, because an endpoint was overloaded or failed before the response began",
            registry=self.registry,
        )
        self.resumes = Counter(
            "charonia_gateway_resumes",
            "responses that another endpoint continued, because their endpoint failed or shut down",
            registry=self.registry,
        )
        self.endpoint_up = Gauge(
            "charonia_gateway_endpoint_up",
            "1: Triton there can take requests",
            ("endpoint", "model"),
            registry=self.registry,
            multiprocess_mode="livemin",
        )
        # Names of keys come from the file of keys. Clients cannot invent labels.
        self.key_requests = Counter(
            "charonia_gateway_key_requests", "HTTP requests by a key", ("key",), registry=self.registry
        )
        self.key_tokens = Counter(
            "charonia_gateway_key_tokens", "tokens of a key's requests", ("key", "kind"), registry=self.registry
        )
        self.key_limited = Counter(
            "charonia_gateway_key_limited",
            "requests rejected with 429, because a key had reached its limit",
            ("key", "limit"),
            registry=self.registry,
        )
        # A gateway of one process also has these, so that graphs and alerts find them.
        text = "processes of this gateway"
        Gauge("charonia_gateway_workers", text, registry=self.registry, multiprocess_mode="livesum").set(1)
        text = "processes of this gateway that died and were replaced"
        Counter("charonia_gateway_worker_restarts", text, registry=self.registry).inc(restarted)

    def set_endpoint(self, model: str, target: str, up: bool | None) -> None:
        """up: whether the server takes requests; None: it is gone."""
        if up is not None:
            self.endpoint_up.labels(target, model).set(up)
        elif self._folder is None:
            self.endpoint_up.remove(target, model)
        else:  # a series in a file cannot be removed
            self.endpoint_up.labels(target, model).set(math.nan)

    async def render(self) -> bytes:
        if self._folder is None:
            return generate_latest(self.registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=self._folder)  # type: ignore[no-untyped-call]
        registry.register(self.expiries)
        return await asyncio.to_thread(generate_latest, registry)


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
            if record := scope.get("state", {}).get("record"):  # a failed stream is not a success
                status = record.failed_status or status
            # Only the application's paths become labels, not the paths that clients invent.
            route = getattr(scope.get("route"), "path", "other")
            metrics.requests.labels(route, str(status or 500)).inc()
            metrics.duration.labels(route).observe(time.perf_counter() - began)
            if first_byte_s:
                metrics.first_byte.labels(route).observe(first_byte_s)
