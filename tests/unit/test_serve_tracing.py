"""Trace and log settings that `charonia serve` passes to its processes, and trace data from the gateway to Triton."""

from __future__ import annotations

from pathlib import Path

import pytest
from charonia_gateway.tracing import Tracing

from charonia.errors import InvalidRequestError
from charonia.serve.triton import Distribution, command
from charonia.settings import read_settings, shared_environment


def options(endpoint: str | None) -> list[str]:
    """Return the server's trace options."""
    nowhere = Path("/nowhere")
    settings = read_settings(tracing_endpoint=endpoint)
    words = command(Distribution(nowhere, nowhere, nowhere, nowhere), settings, nowhere, nowhere, 30)
    return [word.removeprefix("--trace-config=") for word in words if word.startswith("--trace")]


@pytest.mark.parametrize("endpoint", ["http://c:4318", "http://c:4318/", "http://c:4318/v1/traces"])
def test_the_server_traces_what_comes_with_a_trace(endpoint: str) -> None:
    assert {"mode=opentelemetry", "rate=0", "level=TIMESTAMPS"} <= set(options(endpoint))
    assert "opentelemetry,url=http://c:4318/v1/traces" in options(endpoint)


def test_without_an_endpoint_the_server_is_told_nothing_of_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHARONIA_TRACING_ENDPOINT", "")
    assert options(None) == []


def test_an_endpoint_that_is_no_url_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError, match="CHARONIA_TRACING_ENDPOINT='collector:4318'"):
        read_settings(tracing_endpoint="collector:4318")


@pytest.mark.slow
def test_a_calls_parent_is_not_the_last_entry_of_its_head() -> None:
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
    }
