"""The predictions of the CUDA kernels: every kernel is in them, and the committed table is the command's."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from charonia.bench.cli import app

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import cuda_predictions as table  # noqa: E402


def row(prediction: table.Prediction, us: float, **more: Any) -> dict[str, Any]:
    """As charonia_cuda_kernels writes it."""
    moved, operations = prediction.work
    return {
        "suite": "a suite",
        "kernel": prediction.kernel.name,
        "shape": dict(prediction.shape),
        "variant": prediction.variant,
        "pdl": True,
        "microseconds": us,
        "bytes": moved,
        "operations": operations,
        "limit": prediction.limit,
        "share": prediction.limit_us / us,
        **more,
    }


def results(rows: list[dict[str, Any]]) -> dict[str, Any]:
    limits = {"read_bytes_per_s": 4.4e12, "gemm_operations_per_s": 8e14, "mma_operations_per_s": 5e14}
    return {
        "device": {"name": "a device", "driver": "driver 13020"},
        "limits": {**limits, "gemm_by": "cublasLt 130200"},
        "rows": rows,
    }


def test_the_committed_table_is_what_the_command_writes(tmp_path: Path) -> None:
    out = tmp_path / "table.md"
    command = [sys.executable, "-m", "charonia", "benchmark", "cuda-predictions", "--out", str(out)]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert out.read_text() == table.TABLE.read_text(), "run charonia benchmark cuda-predictions"
    assert "Measured on NVIDIA H200" in out.read_text()


def test_every_kernel_of_the_engine_is_predicted() -> None:
    folder = ROOT / "engine/src/ops/cuda/kernels"
    sources = [*folder.glob("*.cu"), *folder.glob("*.h")]
    declared = {
        f"{re.sub('_kernels?$', '', file.stem)}: {name}"
        for file in sources
        for name in re.findall(r"CHARONIA_KERNEL\((?:[^()]|\([^()]*\))*\)\s*void (\w+)\(", file.read_text())
    }
    assert len(declared) > 20
    assert {name for kernel in table.KERNELS.values() for name in kernel.compiled} == declared
    assert {one.kernel.name for one in table.predictions()} == set(table.KERNELS)


def test_predictions_are_told_apart_and_within_the_limits() -> None:
    keys = [(one.kernel.name, json.dumps(one.shape), one.variant) for one in table.predictions()]
    assert len(set(keys)) == len(keys)
    for one in table.predictions():
        assert 0 < one.limit_us < one.expected_us


def test_work_of_a_gemm_and_of_attention_by_hand() -> None:
    gemm = {"rows": 3, "n": 5, "k": 7, "type": "bf16", "out": "fp32"}
    assert table.work("gemm_tile", gemm, "") == ((5 * 7 + 3 * 7) * 2 + 3 * 5 * 4, 2 * 3 * 5 * 7)
    attention = {"batch": 2, "new_tokens": 2, "context": 4, "heads": 6, "kv_heads": 3, "head_dim": 8, "kv_bits": 4}
    read = 2 * 4 * 3 * 2 * (8 / 2 + 4)
    assert table.work("attention_prefill", attention, "") == (
        read + 2 * 2 * 2 * 48 * 2,
        2 * 2 * 2 * 48 * (3 + 4) * 2 / 2,
    )


def test_measurements_stand_beside_their_predictions() -> None:
    one = next(p for p in table.predictions() if p.kernel.name == "gemm_stream" and p.shape["rows"] == 8)
    other = next(p for p in table.predictions() if p.kernel.name == "rms_norm")
    rows = [
        row(one, 40.0, variant="stream 8 x 32, 4 stages"),
        row(one, 30.0, variant="stream 8 x 16, 4 stages"),
        row(one, 33.0, variant="stream 8 x 16, 4 stages", pdl=False),
        row(one, 28.0, kernel="cuBLASLt", pdl=None),
        row(one, 29.0, kernel="torch.mm", pdl=None),
        row(other, 7.0, shape={**other.shape, "rows": 77}),
    ]
    assert table.measured(one, rows) == table.Measured(30.0, one.limit_us / 30, 33.0, 28.0, "cuBLASLt")
    assert table.measured(other, rows) is None
    text = table.markdown(results(rows))
    [line] = [line for line in text.splitlines() if line.endswith(" (cuBLASLt) |")]
    share = f"{100 * one.limit_us / 30:.0f} %"
    assert line.endswith(f"| 30.0 | {share} | 33.0 | 28.0 (cuBLASLt) |") and "rows 8" in line
    assert "Measured on a device (driver 13020): memory reads at 4.40 TB/s, GEMMs run at 800 TFLOP/s" in text
    assert {text.count("|") for text in text.splitlines() if text.startswith("| gemm_stream | llama")} == {13}


def test_a_program_that_counts_otherwise_is_found() -> None:
    rows = [row(one, 10.0) for one in table.predictions()]
    assert table.differences(results(rows)) == []
    wrong = [{**rows[0], "bytes": rows[0]["bytes"] + 1}, *rows[1:]]
    [text] = table.differences(results(wrong))
    assert "the program counts" in text and rows[0]["kernel"] in text
    named = [{**one, "shape": {**one["shape"], "more": 1}} if one["kernel"] == "embed" else one for one in rows]
    [text] = table.differences(results(named))
    assert text.startswith("embed: the table's shapes are of")


@pytest.mark.parametrize("code", [0, 3])
def test_a_program_that_fails_says_so(tmp_path: Path, code: int) -> None:
    program = tmp_path / "program"
    program.write_text(f'#!/bin/sh\necho "no device" >&2\necho \'{{"rows": []}}\' > "$1"\nexit {code}\n')
    program.chmod(0o755)
    wrong = table.check_against(program)
    assert CliRunner().invoke(app, ["cuda-predictions", "--against", str(program)]).exit_code == 1
    if code:
        [text] = wrong
        assert "ended with 3" in text and "no device" in text
    else:
        assert len(wrong) >= len(table.KERNELS)
        program.write_text("#!/bin/sh\n")
        [text] = table.check_against(program)
        assert "is no charonia_cuda_kernels_on_host" in text
        [text] = table.check_against(tmp_path / "none")
        assert "cannot be run: No such file" in text
