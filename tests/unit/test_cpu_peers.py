"""benchmarks/cpu_peers: the table and its bars; and a run on a tiny model, with the engines that are installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from benchmarks.cpu_peers.table import EngineResult, Report, ShapeResult, bars, markdown  # noqa: E402


def report() -> Report:
    """100 MB of weights at 10 GB/s: at most 100 steps per second."""
    ours = EngineResult(
        "charonia", "Charonia", info={"weight_mb": 150.0, "kv_mb": 20.0, "instruction_set": "avx512"},
        prefill_s=[1.0, 0.5, 2.0], decode_1_s=[1.1, 1.0, 1.2], decode_8_s=[2.0, 2.0, 2.0],
        imports_mb=90.0, peak_mb=400.0,
    )  # fmt: skip
    peer = EngineResult(
        "peer", "Peer", versions={"peer": "1.2"}, prefill_s=[0.8] * 3, decode_1_s=[2.0] * 3, decode_8_s=[2.5] * 3,
        peak_mb=500.0,
    )  # fmt: skip
    absent = EngineResult("absent", "Absent", missing="pip install failed: no | wheel")
    shape = ShapeResult("m", 100e6, 512, 101, 8, [9e9, 10e9], [ours, peer, absent])
    return Report({"processor": "P"}, 2, 3, False, [shape])


def test_rates_are_of_medians_and_shares_of_the_best_limit() -> None:
    shape = report().shapes[0]
    ours = shape.engines[0]
    assert shape.prefill_rate(ours) == 512.0
    assert shape.decode_rate(ours, 1) == pytest.approx(100 / 1.1)
    assert shape.share(ours, 1) == pytest.approx(100 / 1.1 / 100)
    assert shape.decode_rate(ours, 8) == 400.0
    assert shape.share(ours, 8) == 0.5


def test_bars_say_what_is_met_and_what_is_not() -> None:
    measured = {bar.what: bar for bar in bars(report().shapes[0])}
    assert measured["decode, batch 1, share of the read limit"].met is True
    assert measured["decode, batch 8, share of the read limit"].met is False
    assert measured["decode, batch 8, times the best peer"].measured == "1.25"
    assert measured["decode, batch 8, times the best peer"].met is True
    assert measured["prefill of 512, times the best peer"].measured == "0.80"
    assert measured["prefill of 512, times the best peer"].met is False
    # 400 - 150 - 20 of the process, 90 of which were there before the model.
    assert measured["peak memory above weights and KV cache, of the engine"].measured == "140 MB"
    assert measured["peak memory above weights and KV cache, of the engine"].met is True
    assert measured["the same, of the process with Python and its libraries"].met is False


def test_without_a_peer_its_bars_are_not_measured() -> None:
    shape = report().shapes[0]
    shape.engines = [shape.engines[0], shape.engines[2]]
    assert [bar.met for bar in bars(shape) if "best peer" in bar.what] == [None, None]
    assert markdown(Report({}, 2, 3, False, [shape])).count("not measured") == 3


def test_the_page_names_what_is_missing_with_the_reason() -> None:
    page = markdown(report())
    assert "| Absent | not measured: pip install failed: no \\| wheel |" in page
    assert "| Peer (peer 1.2) | 640.0 |" in page
    assert "| decode, batch 8, share of the read limit | 80 % | 50 % | **no** |" in page


def test_a_report_comes_back_from_json() -> None:
    assert Report.from_json(report().to_json()) == report()


@pytest.mark.slow
def test_a_quick_run_measures_charonia_and_names_the_peers_that_are_not_installed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.cpu_peers", "--quick", "--no-install", "--threads", "1"]
    command += ["--build", str(tmp_path), "--output", str(tmp_path / "result")]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    engines = json.loads((tmp_path / "result.json").read_text())["shapes"][0]["engines"]
    assert [engine["name"] for engine in engines] == ["charonia", "transformers", "llama_cpp", "openvino"]
    ours, *peers = engines
    assert not ours["missing"]
    assert min(*ours["prefill_s"], *ours["decode_1_s"], *ours["decode_8_s"], ours["peak_mb"]) > 0
    assert all(peer["missing"] == "not installed, and --no-install was given" for peer in peers)
    assert (tmp_path / "result.md").read_text() in done.stdout
