"""One span per request for text, in the client's trace or in a new one. Triton continues the trace.

OpenTelemetry is imported only if tracing is on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Receive, Scope, Send

from charonia_gateway import __version__
from charonia_gateway.record import final_status, record_of

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

_TRACES_PATH = "/v1/traces"
# An unreachable collector delays the end of this process by at most this time.
_SEND_TIMEOUT_S = 3
# Triton since 24.10 ignores the length of the traceparent: it reads the receive buffer up to a zero byte. It records no
# span if the value is then too long. So the traceparent must not be the last metadata entry, because any byte may
# follow it. This entry follows instead: in HTTP/2 an entry that is not in a table begins with a zero byte. If an entry
# arrives in two parts, Triton copies it. About one call in a thousand is still lost.
_AFTER_TRACEPARENT = {"charonia-after-traceparent": "1"}


def traces_url(endpoint: str) -> str:
    """The URL for spans. `endpoint`: a collector's address (http://collector:4318) or the complete URL."""
    url = endpoint.rstrip("/")
    return url if url.endswith(_TRACES_PATH) else url + _TRACES_PATH


class Tracing:
    """Sends spans to a collector by OTLP over HTTP, in batches and in its own thread, so requests never wait for the
    collector. The SDK's own variables (OTEL_TRACES_SAMPLER, OTEL_SERVICE_NAME, ...) also apply."""

    def __init__(self, endpoint: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        own = Resource.create({"service.name": "charonia-gateway", "service.version": __version__})
        self._provider = TracerProvider(resource=own.merge(OTELResourceDetector().detect()))
        exporter = OTLPSpanExporter(traces_url(endpoint), timeout=_SEND_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self.tracer = self._provider.get_tracer("charonia_gateway", __version__)
        self.propagator = TraceContextTextMapPropagator()

    def metadata(self) -> list[tuple[str, str]]:
        """Metadata of a call to Triton, which makes Triton's spans children of the current span. Empty for a trace that
        is not sampled, because Triton would record every call with a parent."""
        from opentelemetry.trace import get_current_span

        carrier: dict[str, str] = {}
        if get_current_span().get_span_context().trace_flags.sampled:
            self.propagator.inject(carrier)
            carrier |= _AFTER_TRACEPARENT
        return list(carrier.items())

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()


class TracingMiddleware:
    """Creates a span for each request for text. It ends with the response. Other requests (health, metrics, models)
    have no span."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracer: Tracer = tracing.tracer
        self._propagator = tracing.propagator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        from opentelemetry.trace import SpanKind

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        parent = self._propagator.extract(headers)
        with self._tracer.start_as_current_span(scope["method"], parent, SpanKind.SERVER) as span:
            record_of(scope).trace_id = f"{span.get_span_context().trace_id:032x}"
            try:
                await self._app(scope, receive, send)
            finally:
                _describe(span, scope)


def _describe(span: Span, scope: Scope) -> None:
    """Attributes by OpenTelemetry's conventions for HTTP servers and for generative models."""
    from opentelemetry.trace import StatusCode

    record = record_of(scope)
    status = final_status(scope)
    route = getattr(scope.get("route"), "path", None)
    span.update_name(f"{scope['method']} {route}" if route else scope["method"])
    attributes: dict[str, Any] = {
        "http.request.method": scope["method"],
        "http.route": route,
        "http.response.status_code": status,
        "url.path": scope["path"],
        "url.scheme": scope["scheme"],
        "client.address": scope["client"][0] if scope.get("client") else None,
        "charonia.request_id": record.request_id,
        "gen_ai.operation.name": record.operation,
        "gen_ai.request.model": record.model,
    }
    if record.usage:
        usage = record.usage.to_json()
        attributes |= {
            "gen_ai.usage.input_tokens": usage["prompt_tokens"],
            "gen_ai.usage.output_tokens": usage["completion_tokens"],
            "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "gen_ai.response.finish_reasons": record.usage.finish_reasons,
        }
    span.set_attributes({name: value for name, value in attributes.items() if value is not None})
    if record.error or status >= 499:
        span.set_attribute("error.type", record.error or str(status))
    # A client's error is not an error of the server's span.
    if status >= 499 or (record.error and status < 400):
        span.set_status(StatusCode.ERROR)
