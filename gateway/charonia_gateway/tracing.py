"""One span for each request for text, in the trace that its client began or in a new one. Triton goes on with it.

Nothing of OpenTelemetry is imported where tracing is off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Receive, Scope, Send

from charonia_gateway import __version__
from charonia_gateway.record import final_status, record_of

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

_TRACES_PATH = "/v1/traces"
# A collector that is away holds up the end of this process for so long.
_SEND_TIMEOUT_S = 3
# Triton 24.10 and those after it do not take the traceparent by its length: they read it, where it was received, up to
# a zero byte, and record nothing of a call where it is too long then. So it must not be the last entry of the call's
# head, which anything may follow. HTTP/2 begins an entry that no table has with a zero byte. Entries that come in two
# parts are copied, and about one call in a thousand is lost still.
_AFTER_TRACEPARENT = {"charonia-after-traceparent": "1"}


def traces_url(endpoint: str) -> str:
    """Where spans are posted: `endpoint` is a collector's address (http://collector:4318) or that whole URL."""
    url = endpoint.rstrip("/")
    return url if url.endswith(_TRACES_PATH) else url + _TRACES_PATH


class Tracing:
    """Sends spans to a collector by OTLP over HTTP, in batches and on a thread of its own: what is lost or late there
    holds up no request. The SDK's own variables (OTEL_TRACES_SAMPLER, OTEL_SERVICE_NAME, ...) hold as well."""

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
        """What a call to Triton carries, so that its spans are below the one that is current. A trace that is not
        sampled is not handed on: Triton would record whatever has a parent."""
        from opentelemetry.trace import get_current_span

        carrier: dict[str, str] = {}
        if get_current_span().get_span_context().trace_flags.sampled:
            self.propagator.inject(carrier)
            carrier |= _AFTER_TRACEPARENT
        return list(carrier.items())

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()


class TracingMiddleware:
    """The span of a request lasts to its answer's end. What only looks (health, metrics, models) has none."""

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
    # A client's own error is none of the server's.
    if status >= 499 or (record.error and status < 400):
        span.set_status(StatusCode.ERROR)
