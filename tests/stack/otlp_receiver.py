"""An OTLP/HTTP receiver that decodes the data for a collector."""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from stack import HANG_S


@dataclass(frozen=True)
class Span:
    """Times are in nanoseconds since the epoch. Ids are hexadecimal; `parent` is empty if there is no parent."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    begin: int
    end: int
    failed: bool
    attributes: dict[str, Any]


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(entry) for entry in value.array_value.values]
    return getattr(value, kind)


def _attributes(entries: Any) -> dict[str, Any]:
    return {entry.key: _value(entry.value) for entry in entries}


def _from_json(body: bytes) -> ExportTraceServiceRequest:
    """Parse OTLP's JSON, which is protobuf's JSON except for the ids: they are hexadecimal, and other bytes are
    base64."""

    def with_base64_ids(entry: dict[str, Any]) -> dict[str, Any]:
        for name in ("traceId", "spanId", "parentSpanId"):
            if name in entry:
                entry[name] = base64.b64encode(bytes.fromhex(entry[name])).decode()
        return entry

    parsed = json.loads(body, object_hook=with_base64_ids)
    return json_format.ParseDict(parsed, ExportTraceServiceRequest(), ignore_unknown_fields=True)


def _spans(request: ExportTraceServiceRequest) -> Iterator[Span]:
    for resource in request.resource_spans:
        service = _attributes(resource.resource.attributes)["service.name"]
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Span(
                    service,
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    span.status.code == span.status.STATUS_CODE_ERROR,
                    _attributes(span.attributes),
                )


@dataclass
class Receiver:
    """The receiver's address for CHARONIA_TRACING_ENDPOINT, and the received spans."""

    url: str = ""
    requests: int = 0
    go_away: Callable[[], None] = lambda: None  # the port is closed
    _spans: list[Span] = field(default_factory=list)
    _news: threading.Condition = field(default_factory=threading.Condition)

    def take(self, content_type: str, body: bytes) -> None:
        """The gateway's exporter sends protobuf, Triton's sends JSON."""
        as_json = content_type == "application/json"
        spans = list(_spans(_from_json(body) if as_json else ExportTraceServiceRequest.FromString(body)))
        with self._news:
            self.requests += 1
            self._spans += spans
            self._news.notify_all()

    def trace(self, trace: str) -> list[Span]:
        return [span for span in self._spans if span.trace == trace]

    def named(self, name: str) -> list[Span]:
        return [span for span in self._spans if span.name == name]

    def wait_until(self, found: Callable[[], list[Span]]) -> list[Span]:
        """Wait until `found` returns a result, because senders send in batches."""
        deadline = time.monotonic() + HANG_S
        with self._news:
            while not (spans := found()):
                left = deadline - time.monotonic()
                assert left > 0, f"in time there were only {[(span.service, span.name) for span in self._spans[-50:]]}"
                self._news.wait(left)
        return spans

    def wait_for(self, trace: str, complete: Callable[[list[Span]], bool]) -> list[Span]:
        """The spans of a trace when they are `complete`."""
        return self.wait_until(lambda: spans if complete(spans := self.trace(trace)) else [])


@contextlib.contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces", self.path
            body = self.rfile.read(int(self.headers["Content-Length"]))
            plain = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
            receiver.take(self.headers["Content-Type"], plain)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    with contextlib.ExitStack() as end:
        end.callback(server.server_close)
        end.callback(thread.join)
        end.callback(server.shutdown)
        receiver.go_away = end.close
        yield receiver
