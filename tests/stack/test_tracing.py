"""One trace per request, from the gateway through Triton, as a collector receives it."""

from __future__ import annotations

import secrets
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from gateway_process import gateway
from otlp_receiver import Receiver, Span, receiving
from stack import DEMO_MODEL, HANG_S, Stack, running

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
MODELS = {"ensemble", "preprocessing", "engine"}


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def traced(receiver: Receiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The demo model with tracing. The second setting makes spans arrive sooner.

    At the end the collector is gone. That delays neither requests nor the shutdown: traced requests are released,
    otherwise the models would not be unloaded.
    """
    env = {"CHARONIA_TRACING_ENDPOINT": receiver.url, "OTEL_BSP_SCHEDULE_DELAY": "200"}
    env["CHARONIA_DRAIN_TIMEOUT_S"] = str(HANG_S)  # long timeout: no process is killed on a slow machine
    with running(Stack(DEMO_MODEL, tmp_path_factory.mktemp("traced"), env)) as served:
        yield served
        receiver.go_away()
        body: dict[str, object] = {"messages": QUESTION, "max_tokens": 2}
        assert post(served.gateway, body, traceparent(secrets.token_hex(16))).status_code == 200
        served.signal(signal.SIGTERM)
        assert served.wait() == 0
        assert "killed" not in served.log_file.read_text()


def traceparent(trace: str, parent: str = "00f067aa0ba902b7", flags: str = "01") -> dict[str, str]:
    return {"traceparent": f"00-{trace}-{parent}-{flags}"}


def post(url: str, body: dict[str, object], headers: dict[str, str], route: str = "chat/completions") -> httpx.Response:
    return httpx.post(f"{url}/v1/{route}", json={"model": "demo", **body}, headers=headers, timeout=HANG_S)


def of_gateway(spans: list[Span]) -> list[Span]:
    return [span for span in spans if span.service == "charonia-gateway"]


def named(spans: list[Span], name: str) -> Span:
    found = [span for span in spans if span.name == name]
    assert len(found) == 1, (name, [span.name for span in spans])
    return found[0]


def calls_in(spans: list[Span]) -> int:
    """The calls whose spans are complete: Triton ends the outermost span after all its children."""
    return sum(span.name == "InferRequest" for span in spans)


def recorded(receiver: Receiver, traced: Stack, ask: Callable[[], str], calls: int = 1) -> list[Span]:
    """All spans of a request that `ask` sends, with this number of calls to Triton.

    Triton cannot read the parent of about one call in a thousand (charonia_gateway/tracing.py), and then records no
    span for it. Such a request is sent again, after the spans of a later request have arrived. If any span of a call
    has arrived, the others will also arrive.
    """

    def complete(trace: str, count: int) -> list[Span]:
        spans = receiver.trace(trace)
        return spans if of_gateway(spans) and calls_in(spans) == count else []

    for _ in range(3):
        trace = ask()
        later = secrets.token_hex(16)
        body: dict[str, object] = {"messages": QUESTION, "max_tokens": 2}
        assert post(traced.gateway, body, traceparent(later)).status_code == 200
        receiver.wait_until(lambda trace=trace, later=later: complete(trace, calls) or complete(later, 1))
        begun = sum(span.name == "preprocessing" for span in receiver.trace(trace))  # the span that ends first
        spans = receiver.wait_until(lambda trace=trace, begun=begun: complete(trace, begun))
        if begun == calls:
            return spans
    raise AssertionError(f"three times Triton has not recorded all calls: {spans}")


def test_request_is_one_trace_with_queue_prefill_and_decode(receiver: Receiver, traced: Stack) -> None:
    def ask() -> str:
        nonlocal answer
        trace = secrets.token_hex(16)
        headers = {**traceparent(trace), "x-request-id": "shop-42"}
        answer = post(traced.gateway, {"messages": QUESTION, "max_tokens": 24, "temperature": 0}, headers)
        assert answer.status_code == 200, answer.text
        return trace

    answer: httpx.Response
    spans = recorded(receiver, traced, ask)
    usage = answer.json()["usage"]

    server = named(spans, "POST /v1/chat/completions")
    assert server.service == "charonia-gateway" and server.parent == "00f067aa0ba902b7" and not server.failed
    assert server.attributes["http.route"] == "/v1/chat/completions"
    assert server.attributes["http.response.status_code"] == 200
    assert server.attributes["gen_ai.request.model"] == "demo"
    assert server.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert server.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert server.attributes["gen_ai.response.finish_reasons"] == [answer.json()["choices"][0]["finish_reason"]]
    assert server.attributes["charonia.request_id"] == "shop-42" == answer.headers["x-request-id"]

    outermost = named(spans, "InferRequest")
    assert outermost.service == "charonia-triton" and outermost.parent == server.id
    ensemble, engine = named(spans, "ensemble"), named(spans, "engine")
    assert ensemble.parent == outermost.id
    for model in MODELS - {"ensemble"}:
        assert {span.parent for span in spans if span.name == model} == {ensemble.id}, model
    assert ensemble.attributes["triton.request_id"].partition("#")[0] == "shop-42"
    queue, prefill, decode = (named(spans, name) for name in ("queue", "prefill", "decode"))
    assert {span.parent for span in (queue, prefill, decode)} == {engine.id}

    times = [engine.begin, queue.begin, queue.end, prefill.begin, prefill.end, decode.begin, decode.end, engine.end]
    assert times == sorted(times)
    assert prefill.end > prefill.begin and decode.end > decode.begin
    by_id = {span.id: span for span in spans}
    assert len(by_id) == len(spans)
    for span in spans:
        above = by_id.get(span.parent)
        if above and above.service == span.service:  # the services have different clocks
            assert above.begin <= span.begin <= span.end <= above.end, (span, above)


def test_trace_without_parent_begins_at_gateway(receiver: Receiver, traced: Stack) -> None:
    def ask() -> str:
        before = len(receiver.named("POST /v1/completions"))
        body: dict[str, object] = {"prompt": ["One, two,", "Red, green,"], "max_tokens": 4, "stream": True}
        assert post(traced.gateway, body, {}, "completions").text.endswith("data: [DONE]\n\n")
        return receiver.wait_until(lambda: receiver.named("POST /v1/completions")[before:])[0].trace

    spans = recorded(receiver, traced, ask, calls=2)
    server = named(spans, "POST /v1/completions")
    assert server.parent == ""
    assert {span.parent for span in spans if span.name == "InferRequest"} == {server.id}, "one for each prompt"
    for name in ("queue", "prefill", "decode"):
        assert sum(span.name == name for span in spans) == 2, name


def test_unsampled_trace_is_not_recorded(receiver: Receiver, traced: Stack) -> None:
    left_out = []

    def ask() -> str:
        left_out.append(secrets.token_hex(16))
        sampled = secrets.token_hex(16)
        for headers in (traceparent(left_out[-1], flags="00"), traceparent(sampled)):
            assert post(traced.gateway, {"messages": QUESTION, "max_tokens": 2}, headers).status_code == 200
        return sampled

    recorded(receiver, traced, ask)
    assert not any(receiver.trace(trace) for trace in left_out)


def test_rejected_request_has_span_with_error(receiver: Receiver, traced: Stack) -> None:
    trace = secrets.token_hex(16)
    answer = post(traced.gateway, {"messages": QUESTION, "temperature": 9}, traceparent(trace))
    assert answer.status_code == 400 and answer.headers["x-request-id"]
    (server,) = receiver.wait_for(trace, lambda spans: bool(of_gateway(spans)))
    assert server.attributes["http.response.status_code"] == 400
    assert server.attributes["error.type"] == "invalid_value"
    assert not server.failed, "a client's error is not the server's"


def test_request_rejected_by_engine_has_no_queue_span(receiver: Receiver, traced: Stack) -> None:
    def ask() -> str:
        trace = secrets.token_hex(16)
        body: dict[str, object] = {"prompt": "word " * 5000, "max_tokens": 1}
        assert post(traced.gateway, body, traceparent(trace), "completions").status_code == 400
        return trace

    spans = recorded(receiver, traced, ask)
    assert {"engine", "preprocessing"} <= {span.name for span in spans}
    assert not {"queue", "prefill", "decode"} & {span.name for span in spans}


def test_client_disconnect_ends_trace(receiver: Receiver, traced: Stack) -> None:
    def ask() -> str:
        trace = secrets.token_hex(16)
        body = {"model": "demo", "messages": QUESTION, "stream": True, "ignore_eos": True}
        url = f"{traced.gateway}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, headers=traceparent(trace), timeout=HANG_S) as answer:
            assert next(answer.iter_lines()).startswith("data: ")
        return trace

    spans = recorded(receiver, traced, ask)
    assert {"queue", "prefill", "decode"} <= {span.name for span in spans}
    assert named(spans, "engine").end >= named(spans, "decode").end


def test_no_span_is_sent_without_tracing(receiver: Receiver, stack: Stack, tmp_path: Path) -> None:
    assert b"--trace-config" not in Path(f"/proc/{stack.pid_of('tritonserver')}/cmdline").read_bytes()
    with receiving() as other:
        # OpenTelemetry's own variable does not enable tracing.
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": other.url, "CHARONIA_TRACING_ENDPOINT": "", "CHARONIA_MODEL_NAME": "demo"}
        with gateway(stack.grpc, tmp_path / "gateway.log", **env) as served:
            trace = secrets.token_hex(16)
            body: dict[str, object] = {"messages": QUESTION, "max_tokens": 2}
            assert post(served.url, body, traceparent(trace)).status_code == 200
            served.process.send_signal(signal.SIGTERM)
            assert served.process.wait(HANG_S) == 0  # exporters send all spans before they end
        assert other.requests == 0
