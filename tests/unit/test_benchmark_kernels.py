"""`charonia benchmark kernels`, with a program that writes what the real one would."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from charonia.bench import kernels
from charonia.bench.cli import app

LIMITS = {
    "read_bytes_per_s": 4e12,
    "gemm_operations_per_s": 8e14,
    "gemm_by": "cublasLt 130200",
    "mma_operations_per_s": 5e14,
}
GEMM = {"model": "m", "weight": "qkv", "rows": 8, "n": 64, "k": 32, "type": "bf16", "out": "bf16"}
CONTEXT = {
    **{"model": "m", "batch": 2, "new_tokens": 4, "context": 4, "heads": 4, "kv_heads": 2, "head_dim": 8},
    "kv_bits": 16,
}


def row(suite: str, kernel: str, shape: dict[str, Any], us: float, **more: Any) -> dict[str, Any]:
    work = {"bytes": 4e6, "operations": 2.0, "limit": "memory", "share": 1 / us}
    return {
        "suite": suite,
        "kernel": kernel,
        "shape": shape,
        "variant": "a",
        "pdl": True,
        "microseconds": us,
        **work,
        **more,
    }


ROWS = {
    "gemm": [
        row("gemm", "gemm_stream", GEMM, 9.0),
        row("gemm", "gemm_tile", GEMM, 7.0, variant="b"),
        row("gemm", "gemm_tile", GEMM, 7.5, variant="b", pdl=False),
        row("gemm", "cuBLASLt", GEMM, 6.0, pdl=None),
        row("gemm", "gemm_plain", {**GEMM, "type": "fp32"}, 5.0),
    ],
    "decode_attention": [
        row("decode_attention", "attention_decode", {**CONTEXT, "new_tokens": 1, "context": 70}, 4.0),
        row("decode_attention", "attention_decode", {**CONTEXT, "new_tokens": 1, "kv_bits": 8}, 4.0),
    ],
    "prefill_attention": [row("prefill_attention", "attention_prefill", CONTEXT, 20.0)],
    "rows": [row("rows", "embed", {"model": "m", "rows": 1, "hidden": 8}, 3.0)],
    "sampling": [],
    "experts": [],
    "quantised": [],
}


def program(folder: Path, *, suite: str = "", then: str = "") -> Path:
    """A stand-in for charonia_cuda_kernels. then: what it does after it has written the results of `suite`."""
    file = folder / "charonia_cuda_kernels"
    (folder / "rows.json").write_text(json.dumps(ROWS))
    file.write_text(
        f"#!{sys.executable}\n"
        "import json, sys, time\n"
        "out, size, suite = sys.argv[1:]\n"
        f"rows = json.load(open({str(folder / 'rows.json')!r}))[suite]\n"
        f"found = dict(size=size, device=dict(name='a device', driver='driver 1'), limits={LIMITS!r},\n"
        "             rows=rows, skipped=[], errors=[])\n"
        "json.dump(found, open(out, 'w'))\n"
        f"if suite == {suite!r}:\n    {then or 'pass'}\n"
    )
    file.chmod(0o755)
    return file


def run(folder: Path, binary: Path, *more: str) -> tuple[int, dict[str, Any]]:
    out = folder / "kernels.jsonl"
    wide = {"COLUMNS": "120"}  # a line of a table in one line
    done = CliRunner().invoke(app, ["kernels", str(binary), "--json", str(out), "--size", "quick", *more], env=wide)
    print(done.output)
    return done.exit_code, kernels.read(out)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "cuda_torch", lambda: (None, "PyTorch 2 sees no CUDA device"))


@pytest.mark.usefixtures("no_gpu")
def test_all_suites_are_run_and_what_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run(tmp_path, program(tmp_path))
    assert code == 0
    assert (found["size"], found["errors"]) == ("quick", [])
    assert list(found["suites"]) == list(kernels.SUITES) == list(ROWS)
    assert found["rows"] == [one for rows in ROWS.values() for one in rows]
    assert found["limits"] == found["suites"]["rows"]["limits"] == LIMITS
    assert found["torch"] == {"version": None, "left_out": "PyTorch 2 sees no CUDA device"}
    out = capsys.readouterr().out
    assert "PyTorch was not measured: PyTorch 2 sees no CUDA device" in out
    [line] = [line for line in out.splitlines() if "gemm_tile" in line]
    cells = [cell.strip() for cell in line.split("│")[1:-1]]
    assert cells == ["gemm_tile", "m qkv rows 8 n 64 k 32", "b", "7.0", "14 %", "7.5", "6.0"]


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("then", "told"),
    [
        ("sys.exit('an illegal memory access')", "exit code 1: an illegal memory access"),
        ("time.sleep(600)", "killed after 15 s"),
    ],
)
def test_what_a_failed_suite_had_measured_is_kept(tmp_path: Path, then: str, told: str) -> None:
    code, found = run(tmp_path, program(tmp_path, suite="gemm", then=then), "--limit", "15")
    assert code == 1
    assert found["errors"] == [{"suite": "gemm", "error": told}]
    assert found["suites"]["gemm"]["failure"] == told
    assert found["suites"]["gemm"]["rows"] == 5 and found["suites"]["rows"]["failure"] is None
    assert len(found["rows"]) == sum(len(rows) for rows in ROWS.values())


@pytest.mark.usefixtures("no_gpu")
def test_a_program_that_is_not_there_is_an_error_of_every_suite(tmp_path: Path) -> None:
    code, found = run(tmp_path, tmp_path / "nothing", "--suite", "rows", "--suite", "sampling")
    assert code == 1 and [one["suite"] for one in found["errors"]] == ["rows", "sampling"]
    assert "nothing cannot be run" in found["errors"][0]["error"]


def torch_without_device() -> Any:
    properties = SimpleNamespace(L2_cache_size=100)
    cuda = SimpleNamespace(empty_cache=lambda: None, get_device_properties=lambda index: properties)
    return SimpleNamespace(__version__="2.9", cuda=cuda)


def test_torch_is_measured_on_the_same_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def mm(clock: Any, shape: dict[str, Any], us: float) -> tuple[float, str]:
        asked.append(("mm", shape, us))
        return 2.0, "bf16 out"

    def sdpa(clock: Any, shape: dict[str, Any], us: float, backend: str) -> tuple[float, str]:
        asked.append((backend, shape, us))
        if backend == kernels.CUDNN and shape["new_tokens"] == 1:
            raise RuntimeError("No available kernel. Aborting execution.")
        return 4.0, "bf16"

    monkeypatch.setattr(kernels, "cuda_torch", lambda: (torch_without_device(), ""))
    monkeypatch.setattr(kernels, "measure_mm", mm)
    monkeypatch.setattr(kernels, "measure_sdpa", sdpa)
    code, found = run(tmp_path, program(tmp_path))
    assert code == 0
    decode = ROWS["decode_attention"][0]["shape"]
    assert asked == [
        ("mm", GEMM, 9.0),
        *((kernels.FLASH, shape, us) for shape, us in ((decode, 4.0), (CONTEXT, 20.0))),
        *((kernels.CUDNN, shape, us) for shape, us in ((decode, 4.0), (CONTEXT, 20.0))),
    ], "each shape once, and nothing that is not in 16 bits"
    theirs = [one for one in found["rows"] if one["kernel"] in (kernels.TORCH_MM, kernels.FLASH, kernels.CUDNN)]
    assert [(one["suite"], one["kernel"]) for one in theirs] == [
        ("gemm", kernels.TORCH_MM),
        ("decode_attention", kernels.FLASH),
        ("prefill_attention", kernels.FLASH),
        ("prefill_attention", kernels.CUDNN),
    ]
    assert theirs[0] == row("gemm", "torch.mm", GEMM, 2.0, variant="bf16 out", pdl=None, share=0.5)
    [skipped] = found["skipped"]
    assert skipped["kernel"] == kernels.CUDNN and skipped["why"] == "No available kernel. Aborting execution."
    assert found["torch"] == {"version": "2.9", "left_out": None}


def test_a_device_that_torch_has_lost_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = torch_without_device()

    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def mm(clock: Any, shape: dict[str, Any], us: float) -> tuple[float, str]:
        torch.cuda.empty_cache = lost
        return lost() or (0.0, "")

    monkeypatch.setattr(kernels, "cuda_torch", lambda: (torch, ""))
    monkeypatch.setattr(kernels, "measure_mm", mm)
    code, found = run(tmp_path, program(tmp_path))
    assert code == 1 and len(found["rows"]) == sum(len(rows) for rows in ROWS.values())
    assert found["errors"] == [
        {"suite": "torch", "error": "RuntimeError: CUDA error: an illegal memory access was encountered"}
    ]


def test_times_are_medians_of_graphs() -> None:
    """The calls that PyTorch's clock makes, on a module that only counts."""
    calls: list[str] = []
    times = iter([0.9, 0.2, 0.4])

    class Quiet:
        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *args: Any) -> None: ...
        def synchronize(self) -> None: ...
        def record(self, stream: Any) -> None: ...
        def elapsed_time(self, end: Any) -> float:
            return next(times)

        def replay(self) -> None:
            calls.append("replay")

    cuda = SimpleNamespace(Stream=Quiet, stream=Quiet, CUDAGraph=Quiet, graph=Quiet, Event=Quiet)
    clock = kernels.TorchClock(SimpleNamespace(cuda=cuda), 40, 3)
    taken = clock.microseconds(10, lambda index: calls.append(f"issue {index}"))
    assert calls == ["issue 0", "issue 1", "issue 0", "issue 1", "issue 2", "issue 3", *["replay"] * 4]
    assert taken == pytest.approx(1000 * 0.4 / 4)


def test_errors_are_printed(tmp_path: Path) -> None:
    results = kernels.Results(tmp_path / "kernels.json", "full", errors=[{"suite": "rows", "error": "[503] broken"}])
    console = Console(file=io.StringIO(), width=80)
    kernels.print_tables(console, results)
    assert "[503] broken" in console.file.getvalue()
