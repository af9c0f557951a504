"""The log of Triton's Python models."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "model_repository"))

from model_log import ModelLog

TEXT = {"prompt": 'the "secret"\nü'}


def logger(monkeypatch: pytest.MonkeyPatch, **env: str) -> tuple[ModelLog, list[str]]:
    for name in ("LOG_FORMAT", "ACCESS_LOG", "LOG_PROMPTS"):
        monkeypatch.delenv(f"CHARONIA_{name}", raising=False)
    for name, value in env.items():
        monkeypatch.setenv(f"CHARONIA_{name}", value)
    lines: list[str] = []
    return ModelLog("preprocessing", lines.append, lambda line: lines.append(f"E {line}")), lines


@pytest.mark.parametrize("env", [{}, {"LOG_PROMPTS": "1"}, {"ACCESS_LOG": "0", "LOG_FORMAT": "json"}])
def test_requests_have_no_line_unless_asked_for(monkeypatch: pytest.MonkeyPatch, env: dict[str, str]) -> None:
    log, lines = logger(monkeypatch, **env)
    log.request("3 tokens", "id", {}, TEXT)
    assert lines == []


def test_a_line_is_an_object_under_the_shown_id(monkeypatch: pytest.MonkeyPatch) -> None:
    log, lines = logger(monkeypatch, LOG_FORMAT="json", ACCESS_LOG="true")
    log.request("3 tokens", "shop-42#chatcmpl-1#0", {"prompt_tokens": 3}, TEXT)
    assert json.loads(lines[0]) == {
        "component": "preprocessing",
        "message": "3 tokens",
        "request_id": "shop-42",
        "prompt_tokens": 3,
    }
    log, lines = logger(monkeypatch, LOG_FORMAT="json", ACCESS_LOG="1", LOG_PROMPTS="1")
    log.request("3 tokens", "", {}, TEXT)
    assert "\n" not in lines[0] and json.loads(lines[0])["prompt"] == TEXT["prompt"]


def test_text_is_one_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    log, lines = logger(monkeypatch, ACCESS_LOG="1", LOG_PROMPTS="1")
    log.request("3 tokens", "shop-42#x", {"prompt_tokens": 3}, TEXT)
    assert lines == [f"preprocessing: 3 tokens [shop-42] prompt={TEXT['prompt']!r}"]


@pytest.mark.parametrize("prompts", ["0", "1"])
def test_unexpected_error_names_its_place_and_quotes_no_content(monkeypatch: pytest.MonkeyPatch, prompts: str) -> None:
    log, lines = logger(monkeypatch, LOG_FORMAT="json", ACCESS_LOG="1", LOG_PROMPTS=prompts)
    try:
        raise ValueError(TEXT["prompt"])
    except ValueError as error:
        told = log.failed(error, "id")
    assert told == "preprocessing failed (ValueError); the server's log says where"
    said = json.loads(lines[0].removeprefix("E "))
    assert said["error"] == "ValueError" and "test_model_log.py" in said["traceback"]
    assert ("secret" in json.dumps(said)) == (prompts == "1")
