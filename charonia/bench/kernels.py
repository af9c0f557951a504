"""Times of every CUDA kernel, beside cuBLASLt, torch.mm and PyTorch's attention on the same shapes.

The binary runs once per suite, in a process of its own, so that what one suite does to the device is not another's.
Then PyTorch is measured, where it is there and sees a GPU. The file of records is written after every suite. Its
settings are what Results holds beside the rows; a record's details are a row as benchmarks/cuda_kernels.cpp says it.
PyTorch's rows have its names as kernels ("torch.mm", "SDPA FlashAttention", "SDPA cuDNN") and the shapes of ours.
`device` and `limits` are those of the first suite that ran; every suite has the limits of its own run.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from charonia.bench.records import Grid, Record, describe_run, print_grid, write
from charonia.bench.records import read as read_records
from charonia.errors import InvalidRequestError

if TYPE_CHECKING:
    from rich.console import Console

SUITES = ("gemm", "decode_attention", "prefill_attention", "rows", "sampling", "experts", "quantised")
_GEMM, _DECODE, _PREFILL = SUITES[:3]
CUBLAS, TORCH_MM, FLASH, CUDNN = "cuBLASLt", "torch.mm", "SDPA FlashAttention", "SDPA cuDNN"
_NOT_OURS = (CUBLAS, TORCH_MM, FLASH, CUDNN)
_OWN_GEMMS = ("gemm_stream", "gemm_tile")
_MOST_COPIES = 32

Row = dict[str, Any]


@dataclass
class Results:
    """What was found. size: full, quick, or tiny, for charonia_cuda_kernels_on_host. file: save() replaces it as a
    whole; None: nowhere."""

    file: Path | None
    size: str
    device: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)
    suites: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    skipped: list[Row] = field(default_factory=list)
    errors: list[Row] = field(default_factory=list)
    torch: dict[str, Any] = field(default_factory=dict)

    run: dict[str, Any] = field(default_factory=dict)

    def notes(self) -> list[str]:
        """The limits, and why PyTorch's times are not there."""
        found = []
        if limits := self.limits:
            found.append(
                f"{self.device['name']}: memory reads at {limits['read_bytes_per_s'] / 1e12:.2f} TB/s, GEMMs run at "
                f"{limits['gemm_operations_per_s'] / 1e12:.1f} TFLOP/s ({limits['gemm_by']})"
            )
        if self.torch.get("left_out"):
            found.append(f"PyTorch was not measured: {self.torch['left_out']}")
        return found

    def save(self) -> None:
        self.run = self.run or describe_run()
        settings = {name: value for name, value in vars(self).items() if name not in ("file", "run", "rows")}
        run = {**self.run, "settings": settings, "notes": self.notes()}
        write(self.file, run, [record_of(row) for row in self.rows])


def record_of(row: Row) -> Record:
    """A row of the binary's; its time is the median of several graphs' times."""
    case = {**row["shape"], "variant": row["variant"], "overlap": row["pdl"]}
    return Record.of("kernels", row["kernel"], "us", row["microseconds"], case=case, details=row)


def read(file: Path) -> dict[str, Any]:
    """The settings of a file that Results has written, with its rows. Raises InvalidRequestError of another file."""
    run, records = read_records(file)
    settings = run.get("settings", {})
    if not {"device", "limits", "suites"} <= settings.keys() or not all(is_row(record.details) for record in records):
        raise InvalidRequestError(
            f"{file} has no times of CUDA kernels: a file is expected that charonia benchmark kernels --json wrote"
        )
    return {**settings, "rows": [record.details for record in records]}


_ROW_KINDS: dict[str, Any] = {
    "suite": str, "kernel": str, "shape": dict, "variant": str, "pdl": (bool, type(None)), "microseconds": (int, float),
    "share": (int, float),
}  # fmt: skip


def is_row(details: Mapping[str, Any]) -> bool:
    """Whether a record's details are what record_of() took."""
    return all(name in details and isinstance(details[name], kind) for name, kind in _ROW_KINDS.items())


def run_suite(binary: Path, suite: str, results: Results, limit_s: float) -> None:
    """Adds what the binary measured of a suite, also when it failed or was killed after limit_s."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "suite.json"
        command = [str(binary.absolute()), str(file), results.size, suite]
        failure = ""
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
            if done.returncode != 0:
                failure = f"exit code {done.returncode}: {done.stderr.strip()[-2000:]}"
        except subprocess.TimeoutExpired:
            failure = f"killed after {limit_s:.0f} s"
        except OSError as error:
            failure = f"{binary} cannot be run: {error}"
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    rows, errors = found.get("rows", []), found.get("errors", [])
    if failure and not errors:
        errors = [{"suite": suite, "error": failure}]
    results.device = results.device or found.get("device", {})
    results.limits = results.limits or found.get("limits", {})
    results.suites[suite] = {
        "limits": found.get("limits"),
        "rows": len(rows),
        "errors": len(errors),
        "failure": failure or None,
        "seconds": round(time.monotonic() - began, 1),
    }
    results.rows += rows
    results.skipped += found.get("skipped", [])
    results.errors += errors
    results.save()


def cuda_torch() -> tuple[Any, str]:
    """PyTorch and "", or None and why it cannot measure."""
    try:
        import torch
    except ImportError as error:
        return None, f"PyTorch cannot be imported: {error}"
    if not torch.cuda.is_available():
        return None, f"PyTorch {torch.__version__} sees no CUDA device"
    return torch, ""


@dataclass(frozen=True)
class TorchClock:
    """Times launches as the binary does: many of them in a CUDA graph, the median of the graph's times.

    torch: the module. target_us: how long a graph should take.
    """

    torch: Any
    target_us: float
    samples: int

    @classmethod
    def of(cls, torch: Any, size: str) -> TorchClock:
        return cls(torch, 1500, 5) if size == "full" else cls(torch, 400, 3)

    def microseconds(self, expected_us: float, issue: Callable[[int], object]) -> float:
        torch = self.torch
        count = max(1, min(128, int(self.target_us / max(expected_us, 1))))
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for index in range(2):
                issue(index)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for index in range(count):
                issue(index)
        times = []
        with torch.cuda.stream(stream):
            graph.replay()
            for _ in range(self.samples):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record(stream)
                graph.replay()
                end.record(stream)
                end.synchronize()
                times.append(1000 * begin.elapsed_time(end) / count)
        return float(sorted(times)[len(times) // 2])

    def copies(self, size: int) -> int:
        """So many operands of `size` bytes that one is out of the L2 cache when its turn comes again."""
        cache = getattr(self.torch.cuda.get_device_properties(0), "L2_cache_size", 50 << 20)
        return min(3 * int(cache) // max(size, 1) + 1, _MOST_COPIES)


def like(rows: list[Row], kernels: tuple[str, ...]) -> Iterator[Row]:
    """The first row of each shape that these kernels were measured with, in 16 bits."""
    seen = set()
    for row in rows:
        shape = row["shape"]
        key = json.dumps(shape)
        in_16_bits = shape.get("type", "bf16") == "bf16" and shape.get("kv_bits", 16) == 16
        if row["kernel"] in kernels and in_16_bits and key not in seen:
            seen.add(key)
            yield row


def torch_row(own: Row, kernel: str, variant: str, microseconds: float, limits: dict[str, Any]) -> Row:
    """A row of PyTorch's with the work of ours."""
    by_memory = own["bytes"] / limits["read_bytes_per_s"]
    by_gemms = own["operations"] / limits["gemm_operations_per_s"]
    return {
        **{name: own[name] for name in ("suite", "shape", "bytes", "operations", "limit")},
        "kernel": kernel,
        "variant": variant,
        "pdl": None,
        "microseconds": microseconds,
        "share": 1e6 * max(by_memory, by_gemms) / microseconds,
    }


def measure_mm(clock: TorchClock, shape: dict[str, Any], expected_us: float) -> tuple[float, str]:
    torch = clock.torch
    n, k = shape["n"], shape["k"]
    weights = torch.randn((clock.copies(2 * n * k), n, k), dtype=torch.bfloat16, device="cuda") * 0.02
    x = torch.randn((shape["rows"], k), dtype=torch.bfloat16, device="cuda")
    out = torch.empty((shape["rows"], n), dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        taken = clock.microseconds(expected_us, lambda i: torch.mm(x, weights[i % len(weights)].t(), out=out))
    return taken, "bf16 out"


def measure_sdpa(clock: TorchClock, shape: dict[str, Any], expected_us: float, backend: str) -> tuple[float, str]:
    """k and v lie one token behind the other, as PyTorch's users have them; a chunk's mask is aligned to its end."""
    torch = clock.torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    batch, new, context = shape["batch"], shape["new_tokens"], shape["context"]
    heads, kv_heads, dim = shape["heads"], shape["kv_heads"], shape["head_dim"]
    kv_bytes = 2 * batch * context * kv_heads * dim * 2
    copies = clock.copies(kv_bytes)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if copies * kv_bytes > 0.8 * free:
        raise MemoryError(f"{copies * kv_bytes} bytes of k and v do not fit into {free}")
    kv = torch.randn((copies, 2, batch, context, kv_heads, dim), dtype=torch.bfloat16, device="cuda").transpose(3, 4)
    q = torch.randn((batch, new, heads, dim), dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    how: dict[str, Any] = {"enable_gqa": True} if heads != kv_heads else {}
    if new == context:
        how["is_causal"] = True
    elif new > 1:
        how["attn_mask"] = causal_lower_right(new, context)
    kind = SDPBackend.FLASH_ATTENTION if backend == FLASH else SDPBackend.CUDNN_ATTENTION

    def issue(index: int) -> object:
        k, v = kv[index % copies]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **how)

    with torch.no_grad(), sdpa_kernel(kind):
        return clock.microseconds(expected_us, issue), "bf16"


def measure_torch(torch: Any, results: Results) -> None:
    """torch.mm and SDPA on the shapes of the rows so far. What PyTorch refuses is skipped, with its reason."""
    clock = TorchClock.of(torch, results.size)
    cases: list[tuple[str, tuple[str, ...], str, Callable[[dict[str, Any], float], tuple[float, str]]]] = [
        (_GEMM, _OWN_GEMMS, TORCH_MM, lambda shape, us: measure_mm(clock, shape, us)),
    ]
    for backend in (FLASH, CUDNN):

        def sdpa(shape: dict[str, Any], us: float, backend: str = backend) -> tuple[float, str]:
            return measure_sdpa(clock, shape, us, backend)

        cases += [(_DECODE, ("attention_decode",), backend, sdpa), (_PREFILL, ("attention_prefill",), backend, sdpa)]
    for suite, kernels, name, measure in cases:
        limits = (results.suites.get(suite) or {}).get("limits") or results.limits
        for own in list(like(results.rows, kernels)):
            try:
                taken, variant = measure(own["shape"], own["microseconds"])
            except (RuntimeError, MemoryError, ImportError, TypeError) as error:
                why = str(error).strip().splitlines()[:3]
                skipped = {"suite": suite, "kernel": name, "shape": own["shape"], "variant": "", "why": " ".join(why)}
                results.skipped.append(skipped)
                torch.cuda.empty_cache()
                continue
            results.rows.append(torch_row(own, name, variant, taken, limits))
        torch.cuda.empty_cache()
        results.save()


def best(rows: list[Row], **fields: Any) -> Row | None:
    """The fastest of the rows with these fields."""
    some = [row for row in rows if all(row[name] == value for name, value in fields.items())]
    return min(some, key=lambda row: float(row["microseconds"]), default=None)


def print_tables(console: Console, results: Results) -> None:
    for note in results.notes():
        console.print(note, highlight=False, markup=False, soft_wrap=True)
    for grid in kernel_grids(results.rows):
        print_grid(console, grid)
    for one in results.errors:
        console.print(f"error: {json.dumps(one)}", style="red", markup=False, highlight=False, soft_wrap=True)


def kernel_grids(rows: Sequence[Row]) -> Iterator[Grid]:
    """One for each suite, a line for each kernel, shape and variant; of GEMMs the best of our own tactics."""
    for suite in dict.fromkeys(row["suite"] for row in rows):
        some = [row for row in rows if row["suite"] == suite]
        others = [name for name in _NOT_OURS if any(row["kernel"] == name for row in some)]
        lines = []
        for kernel, shape, variant in _lines(some, others, suite):
            named = {"kernel": kernel, "shape": shape, **({} if suite == _GEMM else {"variant": variant})}
            fastest = best([row for row in some if row["pdl"] is not False], **named)
            if fastest is None:
                continue
            without = best([row for row in some if row["pdl"] is False], **{**named, "variant": fastest["variant"]})
            cells = [kernel, _text(shape), fastest["variant"], _us(fastest), f"{100 * fastest['share']:.0f} %"]
            beside = [best(some, kernel=other, shape=shape) for other in others]
            lines.append([*cells, _us(without), *(_us(one) for one in beside)])
        if lines:
            headings = ("kernel", "shape", "variant", "us", "share", "no overlap", *others)
            yield Grid(headings, lines, suite, keys=3)


def _lines(rows: list[Row], others: list[str], suite: str) -> list[tuple[str, dict[str, Any], str]]:
    seen: dict[str, tuple[str, dict[str, Any], str]] = {}
    for row in rows:
        if row["kernel"] in others:
            continue
        variant = "" if suite == _GEMM else row["variant"]
        seen.setdefault(json.dumps([row["kernel"], row["shape"], variant]), (row["kernel"], row["shape"], variant))
    return list(seen.values())


def _text(shape: dict[str, Any]) -> str:
    left_out = ("heads", "kv_heads", "head_dim", "kv_bits", "type", "out")
    return " ".join(
        str(value) if name in ("model", "weight") else f"{name} {value}"
        for name, value in shape.items()
        if name not in left_out
    )


def _us(row: Row | None) -> str:
    return "" if row is None else f"{row['microseconds']:.1f}"


def measure(
    binary: Path, file: Path | None, *, size: str, suites: Sequence[str], limit_s: float, console: Console
) -> bool:
    """Runs the suites and PyTorch, and prints the tables. limit_s: after which a suite is killed. Returns whether all
    could be measured; the file says what could not, under "errors"."""
    results = Results(file, size)
    for suite in suites or SUITES:
        run_suite(binary, suite, results, limit_s)
        told = results.suites[suite]
        console.print(
            f"{suite}: {told['rows']} measurements, {told['errors']} errors, {told['seconds']} s", highlight=False
        )
    torch, why = cuda_torch()
    if results.size == "tiny" and not why:
        torch, why = None, "times of tiny shapes say nothing"
    results.torch = {"version": None if torch is None else str(torch.__version__), "left_out": why or None}
    results.save()
    if torch is not None:
        try:
            measure_torch(torch, results)
        except Exception as error:  # what was measured before is kept, whatever PyTorch does
            results.errors.append({"suite": "torch", "error": f"{type(error).__name__}: {error}"})
            results.save()
    print_tables(console, results)
    return not results.errors
