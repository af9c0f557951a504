"""benchmarks/cpu_peers: the table and its bars; and a run on a tiny model, with the engines that are installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from charonia.bench import records
from charonia.bench import report as reports

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from benchmarks.cpu_peers.table import EngineResult, Report, ShapeResult  # noqa: E402


def report() -> Report:
    """100 MB of weights at 10 GB/s: at most 100 steps per second."""
    ours = EngineResult(
        "charonia", "Charonia", info={"weight_mb": 150.0, "kv_mb": 20.0, "instruction_set": "avx512"},
        prefill_s={512: [1.0, 0.5, 2.0], 4096: [8.0]}, after_s={4096: [0.5]},
        decode_s={1: [1.1, 1.0, 1.2], 8: [2.0, 2.0, 2.0]}, imports_mb=90.0, peak_mb=400.0,
    )  # fmt: skip
    peer = EngineResult(
        "peer", "Peer", versions={"peer": "1.2"}, prefill_s={512: [0.8] * 3, 4096: [16.0]}, after_s={4096: [0.8]},
        decode_s={1: [2.0] * 3, 8: [2.5] * 3}, peak_mb=500.0,
    )  # fmt: skip
    absent = EngineResult("absent", "Absent", missing="pip install failed: no | wheel")
    shape = ShapeResult("m", 100e6, [512, 4096], [1, 8], 101, 17, [9e9, 10e9], [ours, peer, absent])
    return Report(2, 3, False, [shape])


def page(given: Report) -> str:
    """As one line, with single spaces."""
    return " ".join(reports.markdown(given.for_report(), given.records(), "").split())


def test_rates_are_of_medians_and_shares_of_the_best_limit() -> None:
    ours = {(r.name, r.unit): r.value for r in report().records() if r.case.get("engine") == "Charonia (avx512)"}
    assert (ours["prefill of 512", "tokens/s"], ours["prefill of 4096", "tokens/s"]) == (512, 512)
    assert ours["decode after 4096", "tokens/s"] == 32 and ("decode after 512", "tokens/s") not in ours
    assert ours["decode, batch 1", "tokens/s"] == pytest.approx(100 / 1.1)
    assert ours["batch 1", "% of the limit"] == pytest.approx(100 / 1.1)
    assert ours["decode, batch 8", "tokens/s"] == 400.0
    assert ours["batch 8", "% of the limit"] == 50
    assert (ours["peak memory", "MB"], ours["before the model", "MB"]) == (400, 90)


def test_bars_say_what_is_met_and_what_is_not() -> None:
    measured = {(bar.name, bar.unit): (bar.value, bar.met) for bar in report().shapes[0].bars()}
    assert measured["decode, batch 1", "% of the read limit"][1] is True
    assert measured["decode, batch 8", "% of the read limit"] == (50, False)
    assert measured["decode, batch 8", "times the best peer"] == (1.25, True)
    assert measured["prefill of 512", "times the best peer"] == (pytest.approx(0.8), False)
    assert measured["prefill of 4096", "times the best peer"] == (2, True)
    assert measured["decode after 4096", "times the best peer"] == (pytest.approx(1.6), True)
    # 400 - 150 - 20 of the process, 90 of which were there before the model.
    above = "peak memory above weights and KV cache, of the"
    assert measured[f"{above} engine", "MB"] == (140, True)
    assert measured[f"{above} process with Python and its libraries", "MB"] == (230, False)


def test_without_a_peer_its_bars_are_not_measured() -> None:
    alone = report()
    [shape] = alone.shapes
    shape.engines = [shape.engines[0], shape.engines[2]]
    assert not [bar for bar in shape.bars() if "best peer" in bar.unit]
    assert page(alone).count("not measured") == 1


def test_the_page_and_the_file_name_what_is_missing_with_the_reason() -> None:
    text = page(report())
    assert "m: Absent was not measured: pip install failed: no | wheel" in text
    assert "Peer (peer 1.2) |" in text and "| prefill of 512, tokens/s | 512 | 640 |" in text
    assert (
        "| peers | m | Charonia | decode, batch 8 | 80 % of the read limit | 50 % of the read limit | NOT MET |" in text
    )
    assert "2 threads; medians of 3 rounds in which" in text and "a prompt of 32, of 17 after a long one." in text
    short = report()
    short.threads = short.rounds = 1
    short.shapes[0].prompts = [512]
    assert "1 thread; one round in which" in page(short) and "after a prompt of 32. " in page(short)
    assert report().settings()["shapes"]["m"]["missing"] == {"absent": "pip install failed: no | wheel"}


@pytest.mark.slow
def test_a_quick_run_measures_charonia_and_names_the_peers_that_are_not_installed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "charonia", "benchmark", "peers", "--quick", "--no-install", "--threads", "1"]
    command += ["--build", str(tmp_path), "--json", str(tmp_path / "result.json")]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    run, found = records.read(tmp_path / "result.json")
    ours = {(record.name, record.unit): record.value for record in found if record.benchmark == "peers, tiny"}
    assert {name for name, _ in ours} >= {"prefill of 64", "decode, batch 1", "decode, batch 8", "peak memory"}
    assert min(ours.values()) > 0
    missing = run["settings"]["shapes"]["tiny"]["missing"]
    assert list(missing) == ["transformers", "llama_cpp", "openvino"]
    assert set(missing.values()) == {"not installed, and --no-install was given"}
    assert "llama.cpp, bf16 was not measured: not installed" in done.stdout
    assert "NOT MET" not in done.stdout  # figures of a tiny model say nothing
