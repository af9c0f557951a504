"""What `charonia serve` shows of the logs of the processes that it runs."""

from __future__ import annotations

import pytest

from charonia.serve.triton import device_of, explain_failure, has_gpu, worth_showing

STAMP = "1121 07:33:19.808406 27217"
CAUSE = "failed to load 'engine' version 1: Unsupported: device = cuda: this build has no CUDA"
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
    ],
)
def test_warnings_and_errors_are_shown(line: str, shown: tuple[str, str] | None) -> None:
    assert worth_showing(line) == shown


@pytest.mark.skipif(has_gpu(), reason="what is said of a GPU matters here")
@pytest.mark.parametrize(
    "line",
    [
        f'W{STAMP} pinned_memory_manager.cc:170] "failed to allocate pinned system memory: no pinned memory pool"',
        f'W{STAMP} metrics.cc:798] "DCGM unable to start: DCGM initialization error"',
        f'E{STAMP} server.cc:241] "CudaDriverHelper has not been initialized."',
    ],
)
def test_what_a_machine_without_gpu_lacks_is_not_shown(line: str) -> None:
    assert worth_showing(line) is None


def test_a_failure_is_explained_by_its_cause_alone() -> None:
    lines = [f'I{STAMP} a.cc:1] "x"', f'E{STAMP} a.cc:1] "{CAUSE}"', f'E{STAMP} a.cc:1] "{FOLLOWS}"', "the end"]
    assert explain_failure(lines) == [CAUSE]


@pytest.mark.parametrize(
    "cause",
    [
        "failed to load 'engine' version 1: Invalid argument: instance group engine_0 of model engine has kind "
        "KIND_GPU but no GPUs are available",
        "failed to load 'engine' version 1: Invalid argument: instance group engine_0 of model engine specifies "
        "invalid or unsupported gpu id 3. GPUs with at least the minimum CUDA compute capability of 6 are: 0",
    ],
)
def test_a_gpu_that_is_not_there_is_explained_with_the_remedy(cause: str) -> None:
    shown, remedy = explain_failure([f'E{STAMP} model_lifecycle.cc:642] "{cause}"'])
    assert shown == cause
    assert "engine/config.pbtxt" in remedy
    assert "KIND_MODEL" in remedy


def test_where_the_engine_runs_is_read_from_its_line() -> None:
    loaded = "engine version 1: demo (llama, bf16) on GPU 0, sm_90; weights 13.5 GB; context 4096 tokens"
    chosen = "engine version 1: device = auto is the CPU: this build has no CUDA; build it where nvcc is"
    assert device_of(f'I{STAMP} charonia:0] "{loaded}"') == ["GPU 0, sm_90; weights 13.5 GB; context 4096 tokens"]
    assert device_of(f'I{STAMP} charonia:0] "{chosen}"') == ["because this build has no CUDA; build it where nvcc is"]
    assert device_of(f'I{STAMP} server.cc:305] "Waiting"') == []


def test_a_failure_without_errors_is_explained_by_the_last_lines() -> None:
    assert explain_failure([f"line {number}" for number in range(100)])[-1] == "line 99"
