"""Builds the engine with CUDA, tests it on a GPU and measures it, in stages, within a budget of seconds.

Each stage runs in a process of its own. After each, results.json and results.md are written to $OUT, or to
build/gpu_check. Without names of stages, it runs those that fit the budget, correctness first. A stage that does not
fit the rest is left out. `--emulated FOLDER` rehearses all stages without a GPU, on the emulated device of that build
folder, with tiny models: its figures say nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from gpu_check_decisions import Record, decide
from gpu_check_starts import START_S, limited_starts

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "gpu_check"
OUT = Path(os.environ.get("OUT") or WORK)
SITE, PACKAGES, ENGINE = WORK / "site", WORK / "packages", WORK / "engine"
BUDGET_S = 420.0
# Modules that the engine and the tests import, and their packages on PyPI if these have other names.
NEEDED = {
    **{name: name.replace("_", "-") for name in (
        "cmake", "ninja", "pybind11", "nlohmann_json", "torch", "transformers", "typer", "rich", "pydantic_settings",
        "prompt_toolkit", "ml_dtypes", "pytest", "hypothesis", "setuptools_scm")},
    "re2": "google-re2",
}  # fmt: skip
# The tests of kernels and instructions that no GPU has run yet. probe runs them, cpp_tests the others.
UNPROVEN_TESTS = (
    "W8a8WgmmaTest.*",
    "HopperTest.*", "GemmTest.bulk_copies_*", "W8a8Test.int8_of_the_library_*", "QuantWgmmaTest.*",
    "CudaQuantExpertsTest.wgmma_*", "ExpertKernelsTest.*", "CudaWgmmaAttentionTest.*", "PromptKernelsTest.*",
    "CudaAttentionTest.decodes_with_the_scales_of_k_outside_*",
)  # fmt: skip
QUIET_S = 15.0  # a C++ test that writes nothing for so long hangs
# The build folder of a rehearsal, and the seconds after which the stage is killed.
Run = Callable[[Path | None, float], "Outcome"]


@dataclass
class Outcome:
    """status: passed, failed or left out. text: the end of the log of a failure. decisions: see decide()."""

    status: str
    summary: str = ""
    seconds: float = 0.0
    estimate: float = 0.0  # of the seconds
    text: str = ""
    records: list[Record] = field(default_factory=list)
    decisions: list[str] = field(default_factory=list)


def environment(emulated: Path | None) -> dict[str, str]:
    """The environment of child processes: the package in SITE, and the device."""
    ours = re.compile("CHARONIA_(?!CUDA)")
    kept = {key: value for key, value in os.environ.items() if not ours.match(key)}
    spec = importlib.util.find_spec("nvidia")  # cuBLASLt and NCCL may be in Python packages
    places = (spec and spec.submodule_search_locations) or []
    folders = [str(path) for place in places for path in Path(place).glob("*/lib")]
    programs = (PACKAGES / "bin", Path(sys.executable).parent, os.environ["PATH"], "/usr/local/cuda/bin")
    return kept | {
        "PYTHONPATH": os.pathsep.join(map(str, (SITE, PACKAGES, ROOT / "scripts"))),
        "PYTHONSAFEPATH": "1",
        "PATH": os.pathsep.join(map(str, programs)),
        "LD_LIBRARY_PATH": os.pathsep.join([*folders, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]),
        "CHARONIA_DEVICE": "cuda",
        "CHARONIA_CACHE_DIR": str(WORK / "cache"),
        "GPU_CHECK_EMULATED": str(emulated or ""),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def test_environment(emulated: Path | None) -> dict[str, str]:
    """environment() with short measurements."""
    return environment(emulated) | {"CHARONIA_CUDA_MEASURE_S": "2"}


def run(
    command: Sequence[object], log: str, limit_s: float, env: dict[str, str], quiet_s: float = math.inf
) -> tuple[int | None, str]:
    """Run a command. Returns its exit code, and its output, which is logged too. The code is None if it was killed: at
    the limit, or because it wrote nothing for `quiet_s` seconds."""
    file = WORK / f"{log}.log"
    with file.open("wb") as output:
        process = subprocess.Popen(
            [str(part) for part in command], stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env=env, cwd=ROOT, start_new_session=True,
        )  # fmt: skip
        code, size, now = None, 0, time.monotonic()
        ends_at, quiet_at = now + max(limit_s, 0.1), now + quiet_s
        try:
            while code is None and (now := time.monotonic()) < min(ends_at, quiet_at):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(min(1.0, ends_at - now))
                if file.stat().st_size > size:
                    size, quiet_at = file.stat().st_size, time.monotonic() + quiet_s
        finally:
            with contextlib.suppress(ProcessLookupError):  # its children too, also after Ctrl-C
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return code, file.read_text(encoding="utf-8", errors="replace")


def failed(summary: str, text: str) -> Outcome:
    return Outcome("failed", summary, text="\n".join(text.splitlines()[-40:]))


def killed(code: int | None, limit_s: float) -> str:
    return f"killed after {limit_s:.0f} s" if code is None else ""


def build(emulated: Path | None, limit_s: float) -> Outcome:
    """Get the missing packages, compile the Python module and the C++ tests, and lay out the package in SITE."""
    from charonia.bench.machine import gpu_of

    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    if emulated:
        module = emulated / "emulated" / f"_engine{suffix}"
        if not module.is_file():
            return failed("not built", f"{module} is missing: build the target _engine_on_host")
        return lay_out(module)
    ends_at = time.monotonic() + limit_s
    env = environment(None)
    brought = sorted(map(str, (ROOT / ".whl").glob("*.whl")))
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    if brought or missing:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--target", PACKAGES]
        code, text = run([*pip, *(["--no-index", "--no-deps", *brought] if brought else missing)], "pip", limit_s, env)
        if code != 0:
            return failed("packages cannot be installed", text)
    headers = "".join(run(["scripts/get_cuda_headers.sh"], "headers", limit_s, env)[1].splitlines()[-1:])
    without_tests, googletest = run(["scripts/get_googletest.sh"], "googletest", 60, env)
    _, pybind = run([sys.executable, "-m", "pybind11", "--cmakedir"], "pybind11", 60, env)
    gpu = gpu_of("compute_cap").replace(".", "")
    architecture = {"": "native", "90": "90a-real"}.get(gpu, f"{gpu}-real")  # 90a: with Hopper's own instructions
    configure = [
        "cmake", "-S", ROOT, "-B", ENGINE, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DCHARONIA_TRITON=OFF",
        f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind.strip()}", "-DCHARONIA_CUDA=ON",
        f"-DCHARONIA_CUDA_ARCHITECTURES={architecture}", f"-DCHARONIA_CUDA_HEADERS={headers}",
        "-DCHARONIA_KERNELS=native", "-DCHARONIA_CUDA_ON_HOST_TESTS=OFF",
        f"-DCHARONIA_TESTS={'OFF' if without_tests else 'ON'}", f"-DCMAKE_PREFIX_PATH={googletest.strip()}",
    ]  # fmt: skip
    targets = ["_engine", *([] if without_tests else ["charonia_cuda_tests"])]
    for command in (configure, ["cmake", "--build", ENGINE, "--target", *targets]):
        code, text = run(command, "build", ends_at - time.monotonic(), env)
        if code != 0:
            return failed("not compiled" if code is not None else f"not compiled in {limit_s:.0f} s", text)
    return lay_out(ENGINE / f"_engine{suffix}")


def lay_out(module: Path) -> Outcome:
    """Link the package's sources and the compiled module into SITE."""
    shutil.rmtree(SITE, ignore_errors=True)
    package = SITE / "charonia"
    package.mkdir(parents=True)
    shutil.copy2(ROOT / "scripts" / "before_editable" / "sitecustomize.py", SITE)
    for file in (*(ROOT / "charonia").iterdir(), module):
        if file.suffix != ".so" or file.parent != ROOT / "charonia":
            (package / file.name).symlink_to(file)
    return Outcome("passed", str(module))


def run_tests(name: str, chosen: str, emulated: Path | None, limit_s: float) -> tuple[Outcome, str]:
    """Run C++ tests of the device, and return their output too. After a crash, or a test that hangs, the next process
    continues without the tests that have run."""
    program = emulated / "charonia_cuda_tests_on_host" if emulated else ENGINE / "charonia_cuda_tests"
    if not program.is_file():
        return Outcome("left out", f"{program.name} was not built (GoogleTest is missing)"), ""
    ends_at = time.monotonic() + limit_s
    known, texts, code = dict[str, str](), list[str](), None
    positive, _, negative = chosen.partition("-")
    for attempt in range(6):
        left_out = ":".join(filter(None, (negative, *sorted(known))))
        code, text = run([program, f"--gtest_filter={positive}{left_out and '-'}{left_out}"], f"{name}_{attempt}",
                         ends_at - time.monotonic(), test_environment(emulated),
                         math.inf if emulated else QUIET_S)  # fmt: skip
        found = gtest_results(text)
        how = "killed" if code is None else f"ended with {code}"
        known |= {test: how if status == "RUN" else status for test, status in found.items()}
        texts.append(text)
        if "RUN" not in found.values():
            break
    wrong = [f"{test} ({how})" for test, how in sorted(known.items()) if how not in ("OK", "SKIPPED")]
    summary = f"{list(known.values()).count('OK')} passed, {len(wrong)} failed{', killed' if code is None else ''}"
    if wrong or code != 0 or not known:
        return failed(f"{summary}: {', '.join(wrong)}"[:2000], "\n".join(texts)), "\n".join(texts)
    return Outcome("passed", summary), "\n".join(texts)


def cpp_tests(emulated: Path | None, limit_s: float) -> Outcome:
    chosen = f"{'*RowsTest.*' if emulated else '*'}-{':'.join(UNPROVEN_TESTS)}"
    return run_tests("cpp_tests", chosen, emulated, limit_s)[0]


def probe(emulated: Path | None, limit_s: float) -> Outcome:
    """Compare each instruction of hopper.h and the kernels that no GPU has run with the CPU, and report which bits of
    wgmma and mma are equal."""
    outcome, text = run_tests("probe", ":".join(UNPROVEN_TESTS), emulated, limit_s)
    figures = re.findall(r"^figure (\S+) (\S+) (.+)$", text, re.MULTILINE)
    outcome.records = [record("probe", "bits", unit, float(value), what=what) for value, unit, what in figures]
    if outcome.status == "passed" and not figures:
        return Outcome("left out", "the GPU or this build has no wgmma (compute capability 9.0, compiled for 90a)")
    outcome.decisions = list(decide("probe", outcome.records)) if outcome.status == "passed" else []
    return outcome


def gtest_results(text: str) -> dict[str, str]:
    """Return the last status of each test: OK, FAILED, SKIPPED, or RUN for a test that did not end."""
    lines = re.findall(r"^\[ +(RUN|OK|FAILED|SKIPPED) +\] ([\w./]+)(?:, where| \(|$)", text, re.MULTILINE)
    return {name: status for status, name in lines if "." in name}


def python_tests(emulated: Path | None, limit_s: float) -> Outcome:
    stacks = f"faulthandler_timeout={max(1.0, 0.8 * limit_s)}"  # before the kill, in the log
    command = [sys.executable, "-m", "pytest", "-v", "-rf", "-o", stacks, "tests/gpu"]
    code, text = run(command, "python_tests", limit_s, test_environment(emulated))
    summary = (text.strip().splitlines() or ["no output"])[-1].strip("= ")
    if code == 0 and " passed" in summary:
        return Outcome("passed", summary)
    return failed(killed(code, limit_s) or summary, text)


def measured(name: str, emulated: Path | None, limit_s: float) -> Outcome:
    file = WORK / f"{name}.jsonl"
    file.unlink(missing_ok=True)
    code, text = run([sys.executable, __file__, "--measure", name], name, limit_s, environment(emulated))
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    records = [json.loads(line) for line in lines]
    if code == 0 and records:
        return Outcome("passed", f"{len(records)} figures", records=records, decisions=list(decide(name, records)))
    hung = f"killed: an engine did not start in {START_S:.0f} s" if "Timeout (" in text else ""
    return replace(failed(killed(code, limit_s) or hung or f"ended with {code}", text), records=records)


class Clock:
    """Times PyTorch operations on the GPU, or without one on the CPU."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.one = torch.ones((), device=self.device)

    def seconds(self, issue: Callable[[], object], repeats: int = 5) -> float:
        """The median seconds of `issue`. On a GPU it is captured in a CUDA graph, so launches do not count."""
        torch, began = self.torch, time.perf_counter()
        issue()
        if self.device == "cpu":
            return time.perf_counter() - began
        from charonia.bench.limits import seconds_of

        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            issue()
        return seconds_of(torch, repeats, graph.replay)[repeats // 2]

    def matrices(self, kind: str, count: int, rows: int, k: int) -> Any:
        torch = self.torch
        values = torch.randn((count, rows, k), dtype=torch.bfloat16, device=self.device)
        if kind == "s8":
            return (values * 40).clamp(-127, 127).to(torch.int8)
        return values.to(torch.float8_e4m3fn) if kind == "fp8" else values

    def gemms(self, kind: str, a: Any, weights: Any) -> None:
        """a [rows, k] times the transpose of each of `weights` [count, n, k]."""
        torch = self.torch
        scaled = partial(torch._scaled_mm, scale_a=self.one, scale_b=self.one, out_dtype=torch.bfloat16)
        multiply = {"s8": torch._int_mm, "fp8": scaled}.get(kind, torch.mm)
        for weight in weights:
            multiply(a, weight.t())


def measure_limits(clock: Clock) -> Iterator[Record]:
    """The limits of the GPU: the read rate of memory, and GEMMs in a burst and after five seconds, with the clock."""
    from charonia.bench.machine import gpu_of

    on_gpu = clock.device == "cuda"
    data = clock.torch.ones((4 << 30 if on_gpu else 1 << 20) // 4, device=clock.device)
    yield record("limits", "read", "TB/s", data.nbytes / clock.seconds(data.sum) / 1e12, what="sum of 4 GB")
    del data
    side = 8192 if on_gpu else 64
    for kind in ("bf16", "fp8", "s8"):
        issue = partial(clock.gemms, kind, clock.matrices(kind, 1, side, side)[0], clock.matrices(kind, 1, side, side))
        for when, warm_s in (("burst", 0.0), ("after 5 s", 5.0 if on_gpu else 0.0)):
            ends_at = time.monotonic() + warm_s
            while time.monotonic() < ends_at:
                issue()
                clock.torch.cuda.synchronize()
            rate = 2 * side**3 / clock.seconds(issue) / 1e12
            yield record("limits", f"{kind} GEMM", "T operations/s", rate, what=when)
            if mhz := gpu_of("clocks.sm").split():
                yield record("limits", "SM clock", "MHz", float(mhz[0]), what=f"{kind}, {when}")


def measure_lib(clock: Clock) -> Iterator[Record]:
    """cuBLASLt through PyTorch: bf16 GEMMs of one row padded to more rows, and s8 GEMMs, of an 8B model's weights."""
    on_gpu = clock.device == "cuda"
    shapes = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
    for name, (n, k) in shapes.items() if on_gpu else {"tiny": (64, 128)}.items():
        copies = max(2, (256 << 20) // (2 * n * k)) if on_gpu else 2  # more than the L2 cache holds
        for kind, rows_of_kind in (("bf16", (1, 8, 16, 32)), ("s8", (32, 256, 2048)), ("bf16", (256, 2048))):
            weights = clock.matrices(kind, copies, n, k)
            for rows in rows_of_kind:
                issue = partial(clock.gemms, kind, clock.matrices(kind, 1, rows, k)[0], weights)
                taken = clock.seconds(issue) / copies
                yield record("lib", "time", "us", 1e6 * taken, weight=f"{name} {n} x {k}", type=kind, rows=rows)


def model_of(scheme: str, emulated: bool, layers: int = 32) -> Path:
    """A random model: layers of Llama-3-8B, or a tiny one. It is written once, to memory if there is room."""
    from charonia.bench.random_model import SHAPES, write_random_model

    shape = SHAPES["tiny"] if emulated else replace(SHAPES["llama3-8b"], layers=layers)
    place = models_folder() / f"{'tiny' if emulated else 'llama3-8b'}-{shape.layers}-{scheme or 'bf16'}"
    if not (place / "made").exists():
        shutil.rmtree(place, ignore_errors=True)
        write_random_model(place, shape, scheme=scheme, quick=True)
        (place / "made").touch()
    return place


def models_folder() -> Path:
    memory = Path("/dev/shm")
    room = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 30 << 30
    return memory / "charonia_gpu_check" if room else WORK / "models"


def measure_gap(clock: Clock) -> Iterator[Record]:
    """A prefill step of 2048 rows: its time, the sum of its kernels, and the largest gaps between them."""
    from torch.profiler import ProfilerActivity, profile

    from charonia import Engine, SamplingParams
    from charonia.bench.limits import busy_and_gaps

    emulated, on_gpu = bool(os.environ["GPU_CHECK_EMULATED"]), clock.device == "cuda"
    rows = 64 if emulated else 2048
    settings: dict[str, Any] = {"token_budget": rows, "session_len": rows + 64, "enable_prefix_caching": False}
    with Engine.from_pretrained(str(model_of("", emulated)), max_batch_size=1, **settings) as engine:
        one = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0)

        def step(seed: int) -> float:
            prompt = [3 + (seed + i * 7919) % (engine.info.vocab_size - 3) for i in range(rows)]
            [output] = engine.generate([prompt], one)
            return float(output.timings.first_token_ms - output.timings.queue_ms)

        yield record("gap", "step", "ms", sorted(step(seed) for seed in range(7))[3], what="without the profiler")
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
            if not on_gpu:
                clock.torch.mm(clock.torch.ones(8, 8), clock.torch.ones(8, 8))
            taken = step(7)
            if on_gpu:
                clock.torch.cuda.synchronize()
    wanted = clock.torch.autograd.DeviceType.CUDA if on_gpu else clock.torch.autograd.DeviceType.CPU
    kernels = [(e.time_range.start, e.time_range.end, e.name) for e in profiler.events() if e.device_type == wanted]
    if not kernels:
        raise SystemExit("the profiler has recorded no kernels")
    busy, gaps = busy_and_gaps(kernels)
    span = max(end for _, end, _ in kernels) - min(begin for begin, _, _ in kernels)
    yield record("gap", "step", "ms", taken, what="with the profiler")
    yield record("gap", "first to last kernel", "ms", span / 1e3, what=f"{len(kernels)} kernels")
    yield record("gap", "kernels", "ms", busy / 1e3, what="time in which a kernel ran")
    for rank, (length, before, after) in enumerate(gaps[:10]):
        yield record("gap", "gap", "us", length, what=f"{1 + rank}: {before[:60]} -> {after[:60]}")


PDL: dict[str, dict[str, str]] = {
    **{name: {"CHARONIA_CUDA_PDL": name} for name in ("off", "early", "late")},
    "late, prefetch": {"CHARONIA_CUDA_PDL": "late", "CHARONIA_CUDA_PREFETCH": "16"},
    "splits of 64": {"CHARONIA_CUDA_DECODE_SPLIT": "64"},
}


def measure_pdl(clock: Clock) -> Iterator[Record]:
    """measure_pdl_one() with each of PDL, in processes of this one's session, so that they end with it."""
    for name, variables in PDL.items():
        subprocess.run([sys.executable, __file__, "--measure", "pdl_one"], env=os.environ | variables, check=True)
        for line in (WORK / "pdl_one.jsonl").read_text("utf-8").splitlines():
            if (one := json.loads(line))["name"] == "decode":
                yield record("pdl", "decode", one["unit"], one["value"], weights=one["case"]["weights"], setting=name)


def measure_yard(clock: Clock) -> Iterator[Record]:
    """Attention of one prompt: our kernels, also with a quantised cache, PyTorch's, and FlashInfer's if installed."""
    from charonia import _engine

    torch, on_gpu = clock.torch, clock.device == "cuda"
    heads, kv_heads, dim = (32, 8, 128) if on_gpu else (2, 1, 64)
    wgmma = os.environ.get("CHARONIA_CUDA_UNPROVEN") == "1"
    benches = {name: _engine.KernelBench("cuda", wgmma_prompts=name == "wgmma")
               for name in ("tiles", *(["wgmma"] if wgmma else []))}  # fmt: skip
    for rows in (2048, 8192) if on_gpu else (64,):
        operations = 2.0 * heads * dim * rows * (rows + 1)
        layers = 32 if rows == 2048 else 4  # enough that the host's work for a step, which counts here, is small
        for bits in (16, 8, 4):
            for name, bench in benches.items():
                _, ours = bench.attention(heads, kv_heads, dim, bits, 1, rows, rows, layers, 3)
                title = f"charonia {name}{'' if bits == 16 else f', {bits}-bit KV'}"
                yield record("yard", "rate", "TFLOP/s", operations / min(ours) / 1e12, kernel=title, rows=rows)
        sizes = (heads, kv_heads, kv_heads)
        q, k, v = (torch.randn((rows, n, dim), dtype=torch.bfloat16, device=clock.device) for n in sizes)
        of_sequence = [x[None].transpose(1, 2) for x in (q, k, v)]
        sdpa = partial(torch.nn.functional.scaled_dot_product_attention, *of_sequence)
        kernels = {"torch": partial(sdpa, is_causal=True, enable_gqa=True)}
        if importlib.util.find_spec("flashinfer"):
            of = importlib.import_module("flashinfer").single_prefill_with_kv_cache
            kernels["flashinfer"] = partial(of, q, k, v, causal=True)
        for name, kernel in kernels.items():
            yield record("yard", "rate", "TFLOP/s", operations / clock.seconds(kernel) / 1e12, kernel=name, rows=rows)


def measure_decodes(clock: Clock, schemes: Sequence[str], few: bool = False) -> Iterator[Record]:
    """Decodes of an 8B model. few: of one sequence by four layers, with `reproducible` off."""
    from rich.console import Console

    from charonia.bench.static import run_static

    emulated, layers = bool(os.environ["GPU_CHECK_EMULATED"]), 4 if few else 32
    batches, prompts, tokens = ([1], [1024], 256) if few else ([1, 8, 64], [32, 1024], 64)
    if emulated:
        batches, prompts, tokens = batches[:2], [32], 4
    for scheme in schemes:
        for reproducible in (False,) if few else (False, True):
            report = run_static(
                str(model_of(scheme, emulated, layers)), batches, prompts, [tokens], runs=1, dtype="auto",
                console=Console(), settings={"reproducible": reproducible},
            )  # fmt: skip
            for one in report.records:
                if one.name in ("decode", "weights", "prefill"):
                    case = {key: one.case[key] for key in ("batch", "prompt")} | {"reproducible": reproducible}
                    yield record("decode", one.name, one.unit, one.value, weights=scheme or "bf16", **case)


def measure_adapters(clock: Clock) -> Iterator[Record]:
    """An 8B model without and with LoRA adapters, whose tokens must be the same alone and in a batch."""
    from charonia.bench.adapters import run_checked_adapters

    emulated = bool(os.environ["GPU_CHECK_EMULATED"])
    batch, rank, prompt, output = (3, 4, 8, 6) if emulated else (8, 16, 256, 64)
    for one in run_checked_adapters(str(model_of("", emulated)), batch, rank, prompt, output):
        yield record("adapters", one.name, one.unit, one.value, **one.case)


measure_decode = partial(measure_decodes, schemes=("",))
measure_decode_w4a16 = partial(measure_decodes, schemes=("w4a16",))
measure_pdl_one = partial(measure_decodes, schemes=("", "w4a16"), few=True)


def record(benchmark: str, name: str, unit: str, value: float, **case: Any) -> Record:
    from charonia.bench.records import Record as Figure

    return asdict(Figure.of(benchmark, name, unit, float(value), case=case))


# Estimates of the seconds that a stage takes with an H200 and 16 cores. It is killed after twice that time.
STAGES: dict[str, tuple[float, Run]] = {
    "build": (150, build), "probe": (15, probe), "cpp_tests": (40, cpp_tests), "python_tests": (35, python_tests),
    **{name: (guess_s, partial(measured, name)) for name, guess_s in (
        ("limits", 30), ("decode", 70), ("pdl", 45), ("yard", 15), ("lib", 20), ("gap", 35), ("decode_w4a16", 70),
        ("adapters", 60))},
}  # fmt: skip
LATER = ("gap", "decode_w4a16", "adapters")  # only in runs that name them: they do not fit the budget


def measure(name: str) -> int:
    """Run a measurement in this process."""
    limits = contextlib.nullcontext() if os.environ["GPU_CHECK_EMULATED"] else limited_starts()
    with limits, (WORK / f"{name}.jsonl").open("w", encoding="utf-8") as out:
        for one in globals()[f"measure_{name}"](Clock()):
            print(one["name"], one["case"], f"{one['value']:.4g}", one["unit"])
            out.write(json.dumps(one) + "\n")
            out.flush()
    return 0


def write(outcomes: dict[str, Outcome], run_facts: dict[str, Any]) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    whole = {"run": run_facts, "stages": {name: asdict(outcome) for name, outcome in outcomes.items()}}
    for file, text in (("results.json", json.dumps(whole, indent=1)), ("results.md", page(outcomes, run_facts))):
        (OUT / f"{file}.part").write_text(text + "\n", encoding="utf-8")
        (OUT / f"{file}.part").replace(OUT / file)


def page(outcomes: dict[str, Outcome], run_facts: dict[str, Any]) -> str:
    from charonia.bench import records as figures

    lines = ["# GPU check", "", f"Commit {run_facts['commit']}, {run_facts['at']}", "", f"`{run_facts['machine']}`", ""]
    if run_facts["emulated"]:
        lines += ["A rehearsal on the emulated device: the figures say nothing.", ""]
    stages = [
        [name, one.status, f"{one.seconds:.0f}", f"{one.estimate:.0f}", one.summary] for name, one in outcomes.items()
    ]
    lines += markdown(["stage", "", "seconds", "estimate", "summary"], stages)
    for name, outcome in outcomes.items():
        for _, headings, rows in figures.tables([figures.Record(**one) for one in outcome.records]):
            lines += ["", f"## {name}", "", *markdown(headings, rows)]
        lines += ["", *(f"- {line}" for line in outcome.decisions)] if outcome.decisions else []
        if outcome.text:
            lines += ["", f"## {name}: {outcome.status}", "", *(f"    {line}" for line in outcome.text.splitlines())]
    return "\n".join(lines)


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [[" ".join(cell.replace("|", "\\|").split()) for cell in row] for row in (headings, *rows)]
    head, *others = (f"| {' | '.join(row)} |" for row in cells)
    return [head, "|---" * len(headings) + "|", *others]


def measures_unproven(outcomes: dict[str, Outcome]) -> bool:
    """Whether engines may measure kernels that no GPU has run: not if their tests failed, or if a stage was killed."""
    failures = {name: one.summary for name, one in outcomes.items() if one.status == "failed"}
    return "probe" not in failures and not any("killed" in summary for summary in failures.values())


def check(stages: dict[str, tuple[float, Run]], emulated: Path | None, budget_s: float) -> dict[str, Outcome]:
    """Run the stages, and write the results after each. Outcomes of earlier calls for other stages are kept."""
    from charonia.bench.records import describe_run

    ends_at = time.monotonic() + budget_s
    facts = {**describe_run(), "command": sys.argv, "emulated": bool(emulated)}
    outcomes: dict[str, Outcome] = {}
    with contextlib.suppress(OSError, ValueError, KeyError):
        earlier = json.loads((OUT / "results.json").read_text(encoding="utf-8"))
        if earlier["run"]["commit"] == facts["commit"] and earlier["run"]["emulated"] == facts["emulated"]:
            outcomes = {name: Outcome(**values) for name, values in earlier["stages"].items()}
    now = {}
    for name, (guess_s, run_stage) in stages.items():
        began = time.monotonic()
        left = ends_at - began
        if left < guess_s and not emulated:
            outcome = Outcome("left out", f"it takes about {guess_s:.0f} s, and {left:.0f} s were left")
        else:
            os.environ["CHARONIA_CUDA_UNPROVEN"] = str(int(measures_unproven(outcomes)))
            outcome = run_stage(emulated, left if emulated else min(left, 2 * guess_s))
        outcome.seconds, outcome.estimate = time.monotonic() - began, guess_s
        outcomes[name] = now[name] = outcome
        write(outcomes, facts)
        if outcome.status == "failed" and not measures_unproven(outcomes):
            print("The following engines run with CHARONIA_CUDA_UNPROVEN=0.")
        took = f"{outcome.seconds:.0f} s, estimate {guess_s:.0f} s"
        print(
            f"[{budget_s - (ends_at - time.monotonic()):4.0f} s] {name}: {outcome.status} ({took}), {outcome.summary}"
        )
        for line in outcome.decisions:
            print(f"  {line}")
        if outcome.status == "failed":
            print(outcome.text)
            if name == "build":
                break
    return now


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "stages", nargs="*", metavar="STAGE", help=f"only these: {', '.join(STAGES)} [all but {', '.join(LATER)}]"
    )
    parser.add_argument("--emulated", type=Path, metavar="FOLDER", help="rehearse with this build folder of CMake")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds; --emulated has no budget [420]")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.stages) - set(STAGES):
        parser.error(f"unknown stages: {', '.join(sorted(unknown))}; expected {', '.join(STAGES)}")
    if options.measure:
        return measure(options.measure)
    sys.path[:0] = [str(ROOT), str(PACKAGES)]  # charonia.bench.records, which needs nothing compiled
    WORK.mkdir(parents=True, exist_ok=True)
    emulated = options.emulated.absolute() if options.emulated else None
    chosen = options.stages or [name for name in STAGES if emulated or name not in LATER]
    stages = {name: stage for name, stage in STAGES.items() if name in chosen}
    try:
        now = check(stages, emulated, 3600 if emulated else options.budget_s)
    finally:
        shutil.rmtree(models_folder(), ignore_errors=True)
    print(f"{OUT / 'results.json'} and results.md have the results")
    return int(any(one.status == "failed" for one in now.values()))


if __name__ == "__main__":
    sys.exit(main())
