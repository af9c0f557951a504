"""`charonia benchmark` against the real stack."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from stack import CHARONIA, START_LIMIT_S, Stack

from charonia.bench import records

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "demo" / "model"


def benchmark(*arguments: object) -> str:
    done = subprocess.run(
        [CHARONIA, "benchmark", *map(str, arguments)],
        capture_output=True, text=True, timeout=START_LIMIT_S, check=False,
        env={**os.environ, "COLUMNS": "80", "CHARONIA_TEXT_INSTANCES": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\N{HORIZONTAL ELLIPSIS}" not in done.stdout, done.stdout
    return done.stdout


def values(file: Path, case: dict[str, object]) -> dict[str, float]:
    """By the names of a case's records; of "requests" the count."""
    return {record.name: record.value for record in records.read(file)[1] if record.case == case}


@pytest.mark.slow
def test_compare_measures_the_engine_triton_and_the_gateway_with_one_setting(tmp_path: Path) -> None:
    file = tmp_path / "compare.json"
    benchmark(
        "compare", DEMO, "--threads", 1, "--concurrency", 2, "--requests-per-client", 2, "--max-tokens", 16,
        "--json", file,
    )  # fmt: skip
    for target in ("in-process", "triton", "gateway"):
        value = values(file, {"requests at once": 2, "target": target})
        assert (value["errors"], value["requests"], value["output tokens"]) == (0, 4, 64)
        assert value["of in process"] == 100 if target == "in-process" else value["of in process"] > 0


@pytest.mark.slow
def test_endpoints_spreads_requests_over_its_servers(tmp_path: Path) -> None:
    file = tmp_path / "endpoints.json"
    benchmark(
        "endpoints", DEMO, "--threads", 1, "--servers", 2, "--concurrency", 4, "--num-requests", 12,
        "--max-tokens", 16, "--rounds", 1, "--cache-max-entry-count", 256, "--json", file,
    )  # fmt: skip
    value = values(file, {"servers": 2})
    assert (value["of the first"], value["errors"]) == (100, 0)
    assert (value["requests"], value["output tokens"]) == (12, 12 * 16)
    assert value["most of a server"] + value["least of a server"] == pytest.approx(100)
    assert value["least of a server"] > 0


@pytest.mark.parametrize("target", ["triton", "gateway"])
def test_prefix_counts_what_the_second_prompt_found_cached(stack: Stack, target: str, tmp_path: Path) -> None:
    file = tmp_path / "prefix.json"
    address = {"triton": stack.grpc, "gateway": stack.gateway}[target]
    shown = benchmark(
        "prefix", DEMO, "--target", target, "--url", address, "--prefix-tokens", 400, "--question-tokens", 16,
        "--prefixes", 2, "--seed", len(target), "--json", file,
    )  # fmt: skip
    first, shared = (values(file, {"request": name}) for name in ("first with its prefix", "next with it"))
    assert first["of them cached"] == 0
    assert first["prompt tokens"] > 380
    assert 256 <= shared["of them cached"] < shared["prompt tokens"]
    assert shared["shorter"] == pytest.approx(first["time to first token"] / shared["time to first token"])
    assert "shorter," in shown


@pytest.mark.parametrize("target", ["triton", "gateway"])
def test_serving_measures_a_running_stack(stack: Stack, target: str, tmp_path: Path) -> None:
    file = tmp_path / "serving.json"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("What is the capital of France?\nWho are you?\n")
    address = {"triton": stack.grpc, "gateway": stack.gateway}[target]
    shown = benchmark(
        "serving", DEMO, "--target", target, "--url", address, "--prompts", prompts, "--num-requests", 6,
        "--concurrency", 3, "--max-tokens", 8, "--json", file,
    )  # fmt: skip
    value = values(file, {"target": target})
    assert (value["errors"], value["requests"]) == (0, 6)
    for name in ("time to first token", "end to end"):  # an answer in one piece has no other
        assert 0 < value[name] <= value[f"{name}, 99th"]
    assert "output, tokens/s" in shown


@pytest.mark.slow
def test_streaming_measures_what_a_response_costs(tmp_path: Path) -> None:
    file = tmp_path / "streaming.json"
    shown = benchmark(
        "streaming", DEMO, "--device", "null", "--null-step-ms", 1, "--stream-interval-ms", 0,
        "--streams", 2, "--streams", 16, "--max-tokens", 24, "--rounds", 1, "--cache-max-entry-count", 256,
        "--target", "triton", "--target", "gateway", "--target", "gateway-subscribed", "--target", "in-process",
        "--json", file,
    )  # fmt: skip
    subscribed = values(file, {"through": "gateway-subscribed", "streams": 16})
    assert subscribed["events"] * subscribed["tokens per event"] == pytest.approx(32 * 24)
    assert subscribed["responses"] == subscribed["events"]
    assert 0 < subscribed["late, median"] <= subscribed["late, 99th"]
    assert "late, median, of in process" not in subscribed, "in process, events came as often as by calls"
    for target in ("triton", "gateway"):
        value = values(file, {"through": target, "streams": 16})
        # A response for each token, and at most one more at the end. An engine that is late makes one of several
        # tokens, and a gateway one event of several responses.
        assert 32 < value["responses"] <= 32 * 25
        assert value["events"] * value["tokens per event"] == pytest.approx(32 * 24)
        assert value["events"] <= value["responses"]
        # Prices are differences of CPU times, which a busy machine may turn about.
        assert {"server", "client", "Triton", "postprocessing", "queue of postprocessing"} <= value.keys()
        assert value["responses/s per core"] > 0
    here = values(file, {"through": "in-process", "streams": 2})
    assert here["events"] * here["tokens per event"] == pytest.approx(8 * 24)
    assert "server" not in here
    late = values(file, {"through": "triton", "streams": 2})
    for name in ("late, median", "late, 99th"):
        assert late[f"{name}, of in process"] == pytest.approx(late[name] / here[name])
    assert "gateway 16" in shown
