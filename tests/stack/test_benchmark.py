"""`charonia benchmark` against the real stack."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from stack import CHARONIA, START_LIMIT_S, Stack

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "demo" / "model"


def benchmark(*arguments: object) -> str:
    done = subprocess.run(
        [CHARONIA, "benchmark", *map(str, arguments)],
        capture_output=True, text=True, timeout=START_LIMIT_S, check=False,
        env={**os.environ, "COLUMNS": "160", "CHARONIA_TEXT_INSTANCES": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_compare_measures_the_engine_triton_and_the_gateway_with_one_setting(tmp_path: Path) -> None:
    file = tmp_path / "compare.json"
    benchmark(
        "compare", DEMO, "--threads", 1, "--concurrency", 2, "--requests-per-client", 2, "--max-tokens", 16,
        "--json", file,
    )  # fmt: skip
    [level] = json.loads(file.read_text())["concurrency"].values()
    assert set(level) == {"in-process", "triton", "gateway"}
    for target in level.values():
        [one_round] = target["rounds"]
        assert one_round["errors"] == 0
        assert one_round["requests"] == 4
        assert one_round["output_tokens"] == 64


@pytest.mark.slow
def test_endpoints_spreads_requests_over_its_servers(tmp_path: Path) -> None:
    file = tmp_path / "endpoints.json"
    benchmark(
        "endpoints", DEMO, "--threads", 1, "--servers", 2, "--concurrency", 4, "--num-requests", 12,
        "--max-tokens", 16, "--rounds", 1, "--cache-max-entry-count", 256, "--json", file,
    )  # fmt: skip
    levels = json.loads(file.read_text())["servers"]
    [level] = levels.values()
    assert set(levels) == {"2"} and level["ratio"] == 1
    [one_round] = level["rounds"]
    assert (one_round["errors"], one_round["requests"], one_round["output_tokens"]) == (0, 12, 12 * 16)
    assert len(one_round["shares"]) == 2 and sum(one_round["shares"]) == pytest.approx(1)
    assert one_round["shares"][-1] > 0


@pytest.mark.parametrize("target", ["triton", "gateway"])
def test_prefix_counts_what_the_second_prompt_found_cached(stack: Stack, target: str, tmp_path: Path) -> None:
    file = tmp_path / "prefix.json"
    address = {"triton": stack.grpc, "gateway": stack.gateway}[target]
    shown = benchmark(
        "prefix", DEMO, "--target", target, "--url", address, "--prefix-tokens", 400, "--question-tokens", 16,
        "--prefixes", 2, "--seed", len(target), "--json", file,
    )  # fmt: skip
    report = json.loads(file.read_text())
    assert report["first"]["cached_tokens"] == 0
    assert report["first"]["input_tokens"] > 380
    assert 256 <= report["shared"]["cached_tokens"] < report["shared"]["input_tokens"]
    assert "times shorter" in shown


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
    figures = json.loads(file.read_text())
    assert figures["errors"] == 0
    assert figures["requests"] == 6
    for name in ("ttft_ms", "tpot_ms", "itl_ms"):
        assert set(figures[name]) == {"mean", "median", "p99"}
    assert "output tokens/s" in shown
