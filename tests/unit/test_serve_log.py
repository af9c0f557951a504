"""Log lines of its processes that `charonia serve` prints."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from charonia import cli
from charonia.errors import ServeError
from charonia.serve.logs import REPEATED_S, Repeats, _with_year, parse, renderer, reported
from charonia.serve.models import with_labels
from charonia.serve.triton import device_of, explain_failure, has_gpu, on_cpu, with_names, worth_showing
from charonia.text import prompt_ids

STAMP = "1121 07:33:19.808406 27217"
CAUSE = "failed to load 'engine' version 1: Unsupported: device = cuda: this build has no CUDA"
REMEDY = (
    "The instance_group of the model's engine/config.pbtxt asks for a GPU that the server does not see: set it to "
    "[ { count: 1 kind: KIND_MODEL } ], with which the setting device decides, or check nvidia-smi"
)
FOLLOWS = "Invalid argument: ensemble 'ensemble' depends on 'engine' which has no loaded version."


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (f'I{STAMP} server.cc:305] "Waiting"', None),
        (f'E{STAMP} model_lifecycle.cc:642] "{CAUSE}"', ("error", CAUSE)),
        (f'W{STAMP} model.cpp:1] "config.ini: key old is ignored"', ("warning", "config.ini: key old is ignored")),
        ("| cache_enabled | 0 |", None),
        ("INFO:     Application startup complete.", None),
        ("ERROR:    Exception in ASGI application", ("error", "Exception in ASGI application")),
        ('{"level": "error", "message": "x"}', ("error", "x")),
    ],
)
def test_warnings_and_errors_are_shown(line: str, shown: tuple[str, str] | None) -> None:
    assert worth_showing(line) == shown


def test_similar_log_lines_are_shown_once_a_minute() -> None:
    now = 0.0
    repeats = Repeats(lambda: now)
    lines = [f"a request failed: 127.0.0.1:{port} went away [cmpl-{port:x}ab]" for port in range(33330, 33340)]
    assert [repeats.passed(line) for line in lines] == [lines[0], *[None] * 9]
    assert repeats.passed("endpoint 127.0.0.1:33337 is up") is not None, "that is something else"
    now = REPEATED_S
    assert repeats.passed(lines[1]) == f"{lines[1]} (9 more like this are in the log)"
    now = 2 * REPEATED_S
    assert repeats.passed(lines[2]) == lines[2]


@pytest.mark.skipif(has_gpu(), reason="what is said of a GPU matters here")
@pytest.mark.parametrize(
    "line",
    [
        f'W{STAMP} pinned_memory_manager.cc:170] "failed to allocate pinned system memory: no pinned memory pool"',
        f'W{STAMP} metrics.cc:798] "DCGM unable to start: DCGM initialization error"',
        f'E{STAMP} server.cc:241] "CudaDriverHelper has not been initialized."',
        f'E{STAMP} ensemble_scheduler.cc:1468] "unable to create stream for ensemble: CUDA driver version is '
        'insufficient for CUDA runtime version"',
    ],
)
def test_messages_about_a_missing_gpu_are_not_shown(line: str) -> None:
    assert worth_showing(line) is None
    assert explain_failure([line, "the end"]) == ["the end"]


NO_GPU = "failed to load 'engine' version 1: Invalid argument: instance group engine_0 of model engine "


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        ([f'I{STAMP} a.cc:1] "x"', f'E{STAMP} a.cc:1] "{CAUSE}"', f'E{STAMP} a.cc:1] "{FOLLOWS}"', "the end"], [CAUSE]),
        ([f"line {number}" for number in range(100)], [f"line {number}" for number in range(80, 100)]),
        (["the start", "+------+", "| exit_timeout | 7 |", "+------+", "", "the end"], ["the start", "the end"]),
        *(
            ([f'E{STAMP} model_lifecycle.cc:642] "{NO_GPU}{more}"'], [f"{NO_GPU}{more}", REMEDY])
            for more in (
                "has kind KIND_GPU but no GPUs are available",
                "specifies invalid or unsupported gpu id 3. GPUs with at least the minimum capability are: 0",
            )
        ),
    ],
)
def test_a_failure_is_explained_by_its_cause_or_the_last_lines(lines: list[str], shown: list[str]) -> None:
    assert explain_failure(lines) == shown


@pytest.mark.parametrize(
    ("line", "devices", "cpu"),
    [
        ("demo (llama, bf16) on GPU 0, sm_90; weights 13.5 GB", ["GPU 0, sm_90; weights 13.5 GB"], False),
        ("demo (llama, bf16) on cpu, 2 threads, avx512; weights 1 GB", ["cpu, 2 threads, avx512; weights 1 GB"], True),
        ("demo (llama, bf16) on null, which; weights 1 GB", ["null, which; weights 1 GB"], False),
        ("device = auto is the CPU: this build has no CUDA", ["because this build has no CUDA"], False),
        ("Waiting", [], False),
    ],
)
def test_the_device_of_an_engine_is_read_from_its_line(line: str, devices: list[str], cpu: bool) -> None:
    for name, label in (("engine", ""), ("engine.small", "small: ")):
        found = device_of(f'I{STAMP} charonia:0] "{name} version 1: {line}"')
        assert found == [f"{label}{device}" for device in devices] and on_cpu(found) is cpu


INNER = json.dumps({"component": "preprocessing", "message": 'a "b"', "request_id": "shop-42", "prompt_tokens": 3})
OWN = {"time": "2026-01-31T12:00:00.000+00:00", "level": "error", "component": "gateway", "message": "x", "n": 1}


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        (
            f'W{STAMP} server.cc:305] "a \\"b\\" \\n c"',
            {"level": "warning", "component": "triton", "source": "server.cc", "message": 'a "b" \n c'},
        ),
        (f"I{STAMP} model.py:40] {json.dumps(INNER)}", {**json.loads(INNER), "level": "info"}),
        (f'I{STAMP} charonia:0] "loaded"', {"component": "engine", "message": "loaded"}),
        (json.dumps(OWN), OWN),
        *(
            (line, {"level": "info", "component": "triton", "message": line})
            for line in ("| cache_enabled | 0 |", "Traceback (most recent call last):", "{not an object", "[1]")
        ),
    ],
)
def test_a_line_becomes_a_json_object_with_its_fields(line: str, fields: dict[str, Any]) -> None:
    text = renderer("json", "triton")(line)
    assert text is not None and "\n" not in text
    said = json.loads(text)
    assert said.items() >= fields.items()
    if line.startswith("W"):
        assert said["time"].endswith("-11-21T07:33:19.808+00:00")


def test_text_is_unchanged_and_empty_lines_are_no_events() -> None:
    assert renderer("text", "triton")("| a |") == "| a |"
    for line in ("  ", f"I{STAMP} server.cc:604] ", f'I{STAMP} server.cc:604] ""'):
        assert renderer("json", "triton")(line) is None
    assert parse("| a |") is None


def test_the_year_that_the_server_leaves_out_is_the_last_that_fits() -> None:
    new_year = datetime(2027, 1, 1, 0, 0, 5, tzinfo=timezone.utc)
    assert _with_year("1231 23:59:59.000001", new_year).startswith("2026-12-31T23:59:59")
    assert _with_year("0101 00:00:01.000001", new_year).startswith("2027-01-01T00:00:01")


def test_an_error_ends_a_command_with_its_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = ServeError("no port")
    with pytest.raises(SystemExit) as ended, reported("json"):
        raise error
    assert ended.value.code == 1
    assert json.loads(capsys.readouterr().err)["message"] == str(error)

    def fails() -> None:
        raise error

    monkeypatch.setattr(cli, "app", fails)
    monkeypatch.setattr(prompt_ids, "tokenizers_alone", False)  # main() sets it for its own process
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert str(error) in capsys.readouterr().err


def test_devices_of_several_models_have_their_names() -> None:
    devices = ["b_c: because no GPU", "cpu, avx2; weights 1 GB", "b_c: cpu, avx2; weights 2 GB"]
    served = with_labels([("a,other", Path("one")), ("b/c", Path("two"))])
    assert with_names(devices, served) == [
        "a: cpu, avx2; weights 1 GB",
        "b/c: because no GPU",
        "b/c: cpu, avx2; weights 2 GB",
    ]
    assert with_names(devices[1:2], served[:1]) == devices[1:2]
