"""The gateway's log: its lines, and their information about requests."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from charonia_gateway import logs
from charonia_gateway.logs import MAX_UNSERVED, FewUnserved, RequestContext, TextFormatter, json_formatter
from charonia_gateway.record import Record, current_record
from charonia_gateway.settings import Settings


def event(message: str, **more: object) -> logging.LogRecord:
    return logging.makeLogRecord({"name": "charonia_gateway", "levelname": "WARNING", "msg": message, **more})


@pytest.fixture
def request_record() -> Record:
    record = Record(b"shop-42")
    record.trace_id = "ab" * 16
    return record


def test_json_line_begins_with_its_head_and_has_the_events_fields() -> None:
    line = json_formatter().format(event('quotes " and\nlines', status=200, color_message="\x1b[1mno"))
    assert "\n" not in line
    said = json.loads(line)
    assert list(said)[:3] == ["time", "level", "component"]
    assert (said["level"], said["component"], said["logger"]) == ("warning", "gateway", "charonia_gateway")
    assert (said["message"], said["status"]) == ('quotes " and\nlines', 200)
    assert "color_message" not in said


def test_an_exception_is_in_the_line() -> None:
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        line = json_formatter().format(event("failed", exc_info=sys.exc_info()))
    assert "\n" not in line and "RuntimeError: broken" in json.loads(line)["exc_info"]


def test_an_exception_in_a_request_is_logged_without_its_text(request_record: Record) -> None:
    def fail(said: str) -> None:
        try:
            raise KeyError(said)
        except KeyError as error:
            raise RuntimeError(said) from error

    token = current_record.set(request_record)
    lines = []
    try:
        fail("-".join("secret"))
    except RuntimeError:
        for prompts in (False, True):
            for formatter in (json_formatter(), TextFormatter("%(message)s")):
                logged = event("failed", exc_info=sys.exc_info())
                assert RequestContext(prompts).filter(logged)
                lines.append(formatter.format(logged))
    finally:
        current_record.reset(token)
    assert [text in line for line in lines for text in ("KeyError", "RuntimeError", "in fail")] == [True] * 12
    assert [line.count("s-e-c-r-e-t") for line in lines] == [0, 0, 2, 2]


def test_lines_of_unserved_requests_are_limited_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(logs.time, "monotonic", lambda: now)
    limit = FewUnserved()

    def passes(name: str = "charonia_gateway.access", **fields: object) -> logging.LogRecord | None:
        line = logging.makeLogRecord({"name": name, "msg": "GET other 401 in 0 ms", **fields})
        return line if limit.filter(line) else None

    assert [bool(passes()) for _ in range(MAX_UNSERVED + 3)] == [True] * MAX_UNSERVED + [False] * 3
    assert not passes("uvicorn.error")
    assert passes(key="alice") and passes(model="m") and passes("charonia_gateway")
    now = 61.0
    line = passes()
    assert line and line.getMessage() == "GET other 401 in 0 ms, 4 such lines were dropped before"
    assert "dropped" not in str(passes())


def test_log_lines_of_a_request_have_its_id_and_trace(request_record: Record) -> None:
    token = current_record.set(request_record)
    try:
        logged = event("late")
        assert RequestContext().filter(logged)
    finally:
        current_record.reset(token)
    said = json.loads(json_formatter().format(logged))
    assert (said["request_id"], said["trace_id"]) == ("shop-42", "ab" * 16)
    assert TextFormatter("%(levelname)s:     %(message)s").format(logged) == "WARNING:     late [shop-42]"
    outside = event("idle")
    assert RequestContext().filter(outside) and "request_id" not in outside.__dict__


def test_the_environment_names_settings_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs use HOST and PORT, too; a file has the same names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text("WORKERS=3\nCHARONIA_GRPC_PORT=778\n")
    for name, value in (("HOST", "0.0.0.0"), ("PORT", "42"), ("CHARONIA_HOST", "127.0.0.9")):
        monkeypatch.setenv(name, value)
    found = Settings()
    assert (found.host, found.port, found.workers, found.grpc_port) == ("127.0.0.9", 23333, 0, 778)
    assert Settings(host="127.0.0.7").host == "127.0.0.7"


def test_a_setting_that_is_wrong_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "charonia_gateway"],
        env={"CHARONIA_LOG_FORMAT": "xml", "CHARONIA_TRACING_ENDPOINT": "collector:4318"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    for said in ("CHARONIA_LOG_FORMAT='xml': ", "CHARONIA_TRACING_ENDPOINT='collector:4318': "):
        assert said in done.stderr
