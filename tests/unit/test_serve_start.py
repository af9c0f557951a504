"""Options and variables that `charonia serve` passes to its processes, its warnings about access, and its signals."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from charonia_gateway.tracing import Tracing

from charonia.errors import InvalidRequestError
from charonia.serve import triton
from charonia.serve.access import curl_options, gateway_url, warnings
from charonia.serve.launcher import _TOGETHER_S, _Signals
from charonia.settings import ServeSettings, read_settings, shared_environment

HERE = triton.Distribution(Path("/server"), Path("/python"), Path("/stub"), Path("/libraries"))

# --- access


def test_inference_over_http_is_warned_of_on_this_machine_too() -> None:
    assert list(warnings(ServeSettings(triton_address="127.0.0.1", host="127.0.0.1"))) == []
    (warning,) = warnings(ServeSettings(triton_address="127.0.0.1", host="127.0.0.1", http_inference=True))
    assert "web page" in warning and "CHARONIA_HTTP_INFERENCE" in warning


def test_open_gateway_is_warned_of_until_it_has_keys_and_tls() -> None:
    (warning,) = warnings(ServeSettings(triton_address="127.0.0.1", host="0.0.0.0"))
    assert "without a key" in warning and "CHARONIA_GATEWAY_KEYS_FILE" in warning
    keys = Path("keys.json")
    settings = ServeSettings(triton_address="127.0.0.1", host="0.0.0.0", gateway_keys_file=keys)
    (warning,) = warnings(settings)
    assert "without TLS" in warning and "CHARONIA_GATEWAY_TLS_CERT" in warning
    assert list(warnings(settings.model_copy(update={"gateway_tls_cert": Path("cert.pem")}))) == []


def test_curl_command_has_the_options_that_the_gateway_requires() -> None:
    plain = ServeSettings(host="0.0.0.0", gateway_port=1234)
    assert (gateway_url(plain), curl_options(plain)) == ("http://127.0.0.1:1234", [])
    closed = plain.model_copy(update={"gateway_keys_file": Path("keys"), "gateway_tls_cert": Path("/a b/cert.pem")})
    assert gateway_url(closed) == "https://127.0.0.1:1234"
    assert curl_options(closed) == ['-H "Authorization: Bearer $CHARONIA_API_KEY"', "--cacert '/a b/cert.pem'"]
    own = closed.model_copy(update={"gateway_tls_client_ca": Path("ca.pem")})
    assert "--cert YOUR_CERTIFICATE --key ITS_KEY" in curl_options(own)


# --- environment and options of the processes


@pytest.mark.parametrize(
    ("given", "preloaded"),
    [
        ("", "libjemalloc.so.2"),
        ("/usr/lib/libother.so", "libjemalloc.so.2 /usr/lib/libother.so"),
        ("/usr/lib/libtcmalloc.so.4", "/usr/lib/libtcmalloc.so.4"),
        ("libasan.so.8", "libasan.so.8"),
    ],
)
def test_jemalloc_is_preloaded_unless_there_is_another_allocator(
    monkeypatch: pytest.MonkeyPatch, given: str, preloaded: str
) -> None:
    monkeypatch.setattr("ctypes.util.find_library", lambda name: f"lib{name}.so.2")
    base = {"LD_PRELOAD": given} if given else {}
    assert triton.environment(HERE, base, jemalloc=True)["LD_PRELOAD"] == preloaded
    assert triton.environment(HERE, base, jemalloc=False).get("LD_PRELOAD", "") == given
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    assert triton.environment(HERE, base, jemalloc=True).get("LD_PRELOAD", "") == given


def trace_options(endpoint: str | None) -> list[str]:
    words = triton.command(HERE, read_settings(tracing_endpoint=endpoint), Path("/nowhere"), Path("/nowhere"), 30)
    return [word.removeprefix("--trace-config=") for word in words if word.startswith("--trace")]


@pytest.mark.parametrize("endpoint", ["http://c:4318", "http://c:4318/", "http://c:4318/v1/traces"])
def test_triton_traces_requests_with_a_trace_id(endpoint: str) -> None:
    assert {"mode=opentelemetry", "rate=0", "level=TIMESTAMPS"} <= set(trace_options(endpoint))
    assert "opentelemetry,url=http://c:4318/v1/traces" in trace_options(endpoint)


def test_triton_does_not_trace_without_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHARONIA_TRACING_ENDPOINT", "")
    assert trace_options(None) == []
    with pytest.raises(InvalidRequestError, match="CHARONIA_TRACING_ENDPOINT='collector:4318'"):
        read_settings(tracing_endpoint="collector:4318")


@pytest.mark.slow
def test_traceparent_is_not_the_last_entry_of_the_metadata() -> None:
    """Triton would read beyond the end."""
    tracing = Tracing("http://127.0.0.1:1")
    try:
        with tracing.tracer.start_as_current_span("a request"):
            names = [name for name, _ in tracing.metadata()]
        assert "traceparent" in names[:-1]
        assert tracing.metadata() == [], "there is nothing to be below"
    finally:
        tracing.close()


def test_all_processes_read_the_same_settings() -> None:
    settings = read_settings(tracing_endpoint="http://c:4318", log_format="json", access_log=True)
    assert shared_environment(settings) == {
        "CHARONIA_TRACING_ENDPOINT": "http://c:4318",
        "CHARONIA_ACCESS_LOG": "1",
        "CHARONIA_LOG_FORMAT": "json",
        "CHARONIA_LOG_PROMPTS": "0",
        "CHARONIA_REASONING_PARSER": "auto",
        "CHARONIA_TOOL_CALL_PARSER": "auto",
        "CHARONIA_GENERIC_TOOLS": "1",
    }


# --- signals


def test_signals_that_arrive_together_count_once() -> None:
    """make or a shell forward a signal that the whole process group has received."""
    now = 100.0
    signals = _Signals(lambda: now)
    assert not signals.wait(0)
    counts, exit_codes = [], []
    for seconds in (0, 0, 0.9 * _TOGETHER_S, 0.2 * _TOGETHER_S, 0.5 * _TOGETHER_S, 10):
        now += seconds
        signals.handle(signal.SIGINT, None)
        counts.append(signals.count)
        exit_codes.append(signals.exit_code)
    assert counts == [1, 1, 1, 2, 2, 3]
    assert exit_codes == [0, 0, 0, 130, 130, 130]
    assert signals.wait(0)
