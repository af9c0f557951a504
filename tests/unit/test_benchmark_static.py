"""What `charonia benchmark static` prints of a GPU's kernels."""

from __future__ import annotations

import io

from rich.console import Console

from charonia.bench.records import Record
from charonia.bench.static import Report, print_report

LINES = ("device 0: a GPU, sm_90", "rows 1..8 n 64 k 32 bf16 -> bf16: cuBLASLt, 1.0 us")


def printed(*, verbose: bool, rejected: int = 0, lines: tuple[str, ...] = LINES) -> str:
    console = Console(file=io.StringIO(), width=200)
    found = (Record.of("static", "decode", "tokens/s", [90.0, 120.0, 100.0], case={"batch": 8}),)
    report = Report("a model", "bf16", "cuda", "sm_90", 1, 1000, 4e12, 8e14, found, lines, rejected)
    assert report.value("decode", batch=8) == 100 and report.value("decode", batch=9) is None
    print_report(console, report, verbose=verbose)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_kernel_report_is_printed_when_it_is_asked_for() -> None:
    assert all(line in printed(verbose=True) for line in LINES)
    assert not any(line in printed(verbose=False) for line in LINES)
    assert "the CPU device has no kernels to choose from" in printed(verbose=True, lines=())


def test_rejected_gemms_are_always_told() -> None:
    assert "rejected" not in printed(verbose=False)
    assert "cuBLASLt rejected 3 GEMMs, which own kernels took; --verbose says which" in printed(
        verbose=False, rejected=3
    )
    text = printed(verbose=True, rejected=3)
    assert "cuBLASLt rejected 3 GEMMs, which own kernels took" in text and "--verbose" not in text
