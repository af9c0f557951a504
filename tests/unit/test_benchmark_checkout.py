"""Benchmarks whose code is in benchmarks/ of a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from charonia.bench import checkout
from charonia.bench.cli import app
from charonia.errors import UnsupportedError

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from benchmarks import page_load, quantised_quality  # noqa: E402


@pytest.mark.parametrize(
    "command",
    ["peers", "kv-quantisation", "quantised-quality", "real-schemas", "page-load", "cuda-predictions"],
)
def test_outside_of_a_checkout_a_command_is_listed_and_says_where_it_runs(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkout, "_OWN", tmp_path / "site-packages")
    monkeypatch.chdir(tmp_path)
    assert command in CliRunner().invoke(app, ["--help"]).output
    error = CliRunner().invoke(app, [command]).exception
    assert isinstance(error, UnsupportedError)
    assert "runs in a checkout of the repository" in str(error)
    assert f"{tmp_path / 'site-packages'}, where this package is" in str(error) and f"{tmp_path}, the" in str(error)


def test_the_current_folder_may_be_the_checkout(tmp_path: Path) -> None:
    """In a process of its own: modules of another checkout would stay."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()
    (tmp_path / "benchmarks" / "kv_quantisation.py").write_text(
        "def run_kv_quantisation(threads): exit(40 + threads)\n"
    )
    code = (
        "from pathlib import Path; from charonia.bench import checkout; from charonia.bench.cli import app; "
        "checkout._OWN = Path('/none'); app(['kv-quantisation', '--threads', '2'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=dict(os.environ), capture_output=True)
    assert done.returncode == 42, done.stderr


def test_wrong_bits_and_peers_are_refused_with_what_is_expected() -> None:
    refused = CliRunner().invoke(app, ["peers", "--bits", "5"]).exception
    assert str(refused) == "--bits 5: expected one of 16, 8, 4"
    refused = CliRunner().invoke(app, ["peers", "--bits", "8", "--peer", "openvino"]).exception
    assert str(refused).startswith("--peer openvino: expected with --bits 8 one of llama_cpp_q8_0, ")


def test_figures_of_the_page_are_its_last_size_and_the_times_of_all_loads() -> None:
    def load(kilobytes: float, paint: float, usable: float) -> tuple[page_load.Load, dict[str, page_load.Load]]:
        formulas = {"formulas": page_load.Load(2, 8000, 30000)}
        return page_load.Load(29, int(1000 * kilobytes), 360_000, paint, usable), formulas

    found = page_load.figures([load(122, 500, 700), load(122, 400, 900), load(122, 800, 600)])
    shown = {(record.case["of"], record.name): record.with_range for record in found}
    assert shown["the page", "sent"] == "122" and shown["formulas", "sent"] == "8"
    assert shown["the page", "first text on the screen"] == "500 (400 to 800)"
    assert shown["the page", "a message can be written"] == "700 (600 to 900)"


def test_a_scheme_that_could_not_be_measured_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = {"tokens": 4535, "window": 1024, "stride": 512, "perplexity": 8.75}
    reference = {"kl_mean": 0.25, "kl_p99": 0.5, "top1_agreement": 0.875}

    def measure(variant: quantised_quality.Variant, folder: Path, calibration: Path) -> dict[str, Any] | str:
        if "awq" in variant.name:
            return "no memory"
        answers = {"right": 116, "asked": 120}
        return {"weight_bytes": 5, "text": text, "reference": reference, "questions": answers, "device": "cpu",
                "seconds": 9.0 if variant.options else 0.0}  # fmt: skip

    monkeypatch.setattr(quantised_quality, "measure", measure)
    monkeypatch.setattr(quantised_quality, "calibration_text", lambda: "a text")
    notes, found = quantised_quality.run_quantised_quality(tmp_path)
    assert notes[0].startswith("4535 tokens of models/demo/text.txt in windows of 1024, stride 512; ")
    assert notes[1:] == ["w4a16 awq, quant_policy 0, was not measured: no memory"]
    first = {(record.name, record.unit): record.value for record in found if record.case == found[0].case}
    assert first["same top token", "%"] == 87.5 and first["right answers", "of 120"] == 116
    assert ("quantising", "s") not in first
    assert len({str(record.case) for record in found}) == len(quantised_quality.VARIANTS) - 1
