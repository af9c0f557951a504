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
    """The values of a case's records by name; for "requests" their count."""
    return {record.name: record.value for record in records.read(file)[1] if record.case == case}


@pytest.mark.slow
def test_compare_measures_engine_triton_and_gateway(tmp_path: Path) -> None:
    file = tmp_path / "compare.json"
    benchmark(
        "compare", DEMO, "--threads", 1, "--concurrency", 2, "--requests-per-client", 2, "--max-tokens", 16,
        "--json", file,
    )  # fmt: skip
    for target in ("in-process", "triton", "gateway"):
        value = values(file, {"requests at once": 2, "target": target})
        assert (value["errors"], value["requests"], value["output tokens"]) == (0, 4, 64)
        assert value["of in process"] == 100 if target == "in-process" else value["of in process"] > 0


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
    for name in ("time to first token", "end to end"):  # a response without streaming has no other times
        assert 0 < value[name] <= value[f"{name}, 99th"]
    assert "tokens/s" in shown
