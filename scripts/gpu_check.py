"""Builds the engine with CUDA, tests it on a GPU and measures it, in stages, within a budget of seconds.

docs/gpu_testing.md describes the stages. `--emulated FOLDER` rehearses them without a GPU, on the emulated device of
that build folder, with tiny models: its figures say nothing."""

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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from gpu_check_stages import MEASUREMENTS, Figure, decide

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "gpu_check"
OUT = Path(os.environ.get("OUT") or WORK)
SITE, PACKAGES, ENGINE, LOGS = WORK / "site", WORK / "packages", WORK / "engine", WORK / "logs"
# Modules that the engine and the tests import, and their packages on PyPI if these have other names.
NEEDED = {
    **{name: name.replace("_", "-") for name in (
        "cmake", "ninja", "pybind11", "nlohmann_json", "torch", "transformers", "typer", "rich", "pydantic_settings",
        "prompt_toolkit", "ml_dtypes", "gguf", "pytest", "hypothesis")}, "re2": "google-re2",
    "llguidance": "llguidance==1.9.1", **({"tomli": "tomli"} if sys.version_info < (3, 11) else {}),
}  # fmt: skip
# The tests of kernels and instructions that no GPU has run yet. probe runs them, cpp_tests the others.
UNPROVEN_TESTS = (
    "HopperTest.*", "GemmTest.bulk_copies_*", "W8a8Test.int8_of_the_library_*", "W8a8WgmmaTest.*", "QuantWgmmaTest.*",
    "CudaQuantExpertsTest.wgmma_*", "ExpertKernelsTest.*", "CudaWgmmaAttentionTest.*", "PromptKernelsTest.*",
    "DecodeKernelsTest.*", "CudaAttentionTest.decodes_with_the_scales_of_k_outside_*",
)  # fmt: skip
CPP_QUIET_S = 15.0  # a C++ test that writes nothing for so long hangs
QUIET_S = 60.0  # likewise a test of tests/gpu, and a benchmark, which writes a line for each case
HANGS = "killed: it wrote nothing"  # in the text and the summary of what wrote nothing for too long
BENCHMARK = [sys.executable, "-c", "from charonia.bench.cli import app; app()"]
MEMORY = Path("/dev/shm")  # models are there if there is room
MODELS = (MEMORY if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 20 << 30 else WORK) / "charonia_gpu_check"
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
    records: list[Figure] = field(default_factory=list)
    decisions: list[str] = field(default_factory=list)


def environment(**more: str) -> dict[str, str]:
    """The environment of child processes: the package in SITE, the device, and variables without CHARONIA_."""
    folders = [str(folder) for place in sys.path for folder in Path(place).glob("nvidia/*/lib")]  # cuBLASLt, NCCL
    return {
        **{key: value for key, value in os.environ.items() if not re.match("CHARONIA_(?!CUDA)", key)},
        "CHARONIA_DEVICE": "cuda", "CHARONIA_CACHE_DIR": str(WORK / "cache"), "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": f"{SITE}:{PACKAGES}:{ROOT}/scripts", "PYTHONSAFEPATH": "1",
        "PATH": f"{PACKAGES}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/local/cuda/bin",
        "LD_LIBRARY_PATH": ":".join([*folders, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]),
        **{f"CHARONIA_{name}": value for name, value in more.items()},
    }  # fmt: skip


def run(
    command: Sequence[object], log: str, limit_s: float, env: dict[str, str], quiet_s: float = math.inf
) -> tuple[int | None, str]:
    """Run a command. Returns its exit code, and its output, which is logged too. The code is None if it was killed: at
    the limit, or because it wrote nothing for `quiet_s` seconds. The last line of the output then says which."""
    file = LOGS / f"{log}.log"
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
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGKILL)  # its children too, also after Ctrl-C
                process.wait(10)  # a process that waits for a GPU forever cannot be killed
    text = file.read_text(encoding="utf-8", errors="replace")
    if code is None:
        text += f"\n{HANGS} for {quiet_s:.0f} s" if now < ends_at else f"\nstopped after {limit_s:.0f} s"
    return code, text


def failed(summary: str, text: str, **more: Any) -> Outcome:
    return Outcome("failed", summary, text="\n".join(text.splitlines()[-40:]), **more)


def build(emulated: Path | None, limit_s: float) -> Outcome:
    """Get the missing packages, compile the Python module and the C++ tests, and lay out the package in SITE."""
    from charonia.bench.machine import gpu_of

    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    if emulated:
        module = emulated / "emulated" / f"_engine{suffix}"
        if not module.is_file():
            return failed("not built", f"{module} is missing: build the target _engine_on_host")
        return lay_out(module, emulated)
    gpu = gpu_of("compute_cap").replace(".", "")
    if not gpu:
        return failed("no GPU was found (nvidia-smi): --emulated FOLDER rehearses the stages without one", "")
    ends_at, env = time.monotonic() + limit_s, environment()
    brought = sorted(map(str, (ROOT / ".whl").glob("*.whl")))
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing or (brought and not PACKAGES.is_dir()):
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--target", PACKAGES]
        code, text = run([*pip, *(["--no-index", "--no-deps", *brought] if brought else missing)], "pip", limit_s, env)
        if code != 0:
            return failed("packages cannot be installed", text)
        importlib.invalidate_caches()  # PACKAGES may be new
    headers = "".join(run(["scripts/get_cuda_headers.sh"], "headers", limit_s, env)[1].splitlines()[-1:])
    without_tests, googletest = run(["scripts/get_googletest.sh"], "googletest", 60, env)
    _, pybind = run([sys.executable, "-m", "pybind11", "--cmakedir"], "pybind11", 60, env)
    architecture = "90a-real" if gpu == "90" else f"{gpu}-real"  # 90a: with Hopper's own instructions
    configure = [
        "cmake", "-S", ROOT, "-B", ENGINE, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DCHARONIA_TRITON=ON",
        f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind.strip()}", "-DCHARONIA_CUDA=ON",
        f"-DCHARONIA_CUDA_ARCHITECTURES={architecture}", f"-DCHARONIA_CUDA_HEADERS={headers}",
        "-DCHARONIA_KERNELS=native", "-DCHARONIA_CUDA_ON_HOST_TESTS=OFF",
        f"-DCHARONIA_TESTS={'OFF' if without_tests else 'ON'}", f"-DCMAKE_PREFIX_PATH={googletest.strip()}",
    ]  # fmt: skip
    targets = ["_engine", "triton_charonia", *([] if without_tests else ["charonia_cuda_tests"])]
    for command in (configure, ["cmake", "--build", ENGINE, "--target", *targets]):
        code, text = run(command, "build", ends_at - time.monotonic(), env)
        if code != 0:
            return failed("not compiled" if code is not None else f"not compiled in {limit_s:.0f} s", text)
    return lay_out(ENGINE / f"_engine{suffix}", ENGINE)


def lay_out(module: Path, folder: Path) -> Outcome:
    """Link the package's sources, the compiled module and Triton's backend of a build folder into SITE."""
    shutil.rmtree(SITE, ignore_errors=True)
    package = SITE / "charonia"
    (package / "backends" / "charonia").mkdir(parents=True)
    (package / "backends" / "charonia" / "libtriton_charonia.so").symlink_to(folder / "libtriton_charonia.so")
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
    ends_at, env = time.monotonic() + limit_s, environment(CUDA_MEASURE_S="2")
    known, texts, code = dict[str, str](), list[str](), None
    positive, _, negative = chosen.partition("-")
    for attempt in range(6):
        left_out = ":".join(filter(None, (negative, *sorted(known))))
        command = [program, f"--gtest_filter={positive}{left_out and '-'}{left_out}"]
        quiet_s = math.inf if emulated else CPP_QUIET_S
        code, text = run(command, f"{name}_{attempt}", ends_at - time.monotonic(), env, quiet_s)
        found = gtest_results(text)
        how = text.splitlines()[-1] if code is None else f"ended with {code}"
        known |= {test: how if status == "RUN" else status for test, status in found.items()}
        texts.append(text)
        if "RUN" not in found.values():
            break
    wrong = [f"{test} ({how})" for test, how in sorted(known.items()) if how not in ("OK", "SKIPPED")]
    summary = f"{list(known.values()).count('OK')} passed, {len(wrong)} failed"
    if wrong or code != 0 or not known:
        return failed(f"{summary}: {', '.join(wrong)}"[:2000], "\n".join(texts)), "\n".join(texts)
    return Outcome("passed", summary), "\n".join(texts)


def cpp_tests(emulated: Path | None, limit_s: float) -> Outcome:
    chosen = f"{'*RowsTest.*' if emulated else '*'}-{':'.join(UNPROVEN_TESTS)}"
    return run_tests("cpp_tests", chosen, emulated, limit_s)[0]


def probe(emulated: Path | None, limit_s: float) -> Outcome:
    """Compare hopper.h and the kernels that no GPU has run with the CPU, and the bits of wgmma with mma's."""
    from charonia.bench.records import Record

    outcome, text = run_tests("probe", ":".join(UNPROVEN_TESTS), emulated, limit_s)
    figures = re.findall(r"^figure (\S+) (\S+) (.+)$", text, re.MULTILINE)
    records = (Record.of("probe", "bits", unit, float(value), case={"what": what}) for value, unit, what in figures)
    outcome.records = list(map(asdict, records))
    if outcome.status == "passed" and not figures:
        return Outcome("left out", "the GPU or this build has no wgmma (compute capability 9.0, compiled for 90a)")
    outcome.decisions = list(decide("probe", outcome.records)) if outcome.status == "passed" else []
    return outcome


def gtest_results(text: str) -> dict[str, str]:
    """Return the last status of each test: OK, FAILED, SKIPPED, or RUN for a test that did not end."""
    lines = re.findall(r"^\[ +(RUN|OK|FAILED|SKIPPED) +\] ([\w./]+)(?:, where| \(|$)", text, re.MULTILINE)
    return {name: status for status, name in lines if "." in name}


def python_tests(emulated: Path | None, limit_s: float) -> Outcome:
    command = [sys.executable, "-m", "pytest", "-v", "-rf", "-o", f"faulthandler_timeout={0.8 * QUIET_S}", "tests/gpu"]
    quiet_s = math.inf if emulated else QUIET_S
    code, text = run(command, "python_tests", limit_s, environment(CUDA_MEASURE_S="2"), quiet_s)
    summary = (text.strip().splitlines() or ["no output"])[-1].strip("= ")
    return Outcome("passed", summary) if code == 0 and " passed" in summary else failed(summary, text)


def measured(name: str, emulated: Path | None, limit_s: float) -> Outcome:
    """Run the commands of a stage. After a command that fails, the others run; after one that is killed, none."""
    ends_at = time.monotonic() + limit_s
    gpu, records, errors, wrong = "", list[Figure](), list[str](), dict[str, str]()
    for number, command in enumerate(MEASUREMENTS[name][1]):
        file = LOGS / f"{name}_{number}.json"
        file.unlink(missing_ok=True)
        env = environment(**command.variables)
        program = [sys.executable, "scripts/gpu_check_torch.py"] if command.name in ("limits", "gap") else BENCHMARK
        model = [model_of(*command.model, emulated)] if command.model else []
        options = (command.tiny if emulated else command.options).split()
        slow = command.optional or command.name in ("adapters", "compare") or "--case 512" in command.options
        code, text = run(
            [*program, command.name, *model, *options, "--json", file], f"{name}_{number}",
            ends_at - time.monotonic(), env, math.inf if emulated else 2.5 * QUIET_S if slow else QUIET_S,
        )  # fmt: skip
        errors += [f"{name}: {line.strip()}" for line in text.splitlines() if "ERROR " in line]
        if file.exists():
            content = json.loads(file.read_text(encoding="utf-8"))
            records += [one | {"case": one["case"] | command.labels} for one in content["records"]]
            if not emulated:  # nvidia-smi itself may wait forever after a kernel that hangs
                gpu = content.get("run", {}).get("machine", {}).get("gpu", "").partition(",")[0] or gpu
        how = " ".join(text.splitlines()[-1:])
        if code is not None and code != 0 and command.optional:
            errors.append(f"{name}, {command.labels['library']}: ERROR {how}")
        elif code != 0:
            wrong[f"{command.name} {', '.join(map(str, command.labels.values()))}: {how}"] = text
        if code is None:
            break
    more: dict[str, Any] = {"records": records, "decisions": [*errors, *decide(name, records, gpu)]}
    if wrong:
        return failed("; ".join(wrong), "\n".join(wrong.values()), **more)
    return Outcome("passed", f"{len(records)} figures", **more)


def model_of(scheme: str, shape: str, emulated: Path | None) -> Path:
    """Write a random model, if it is not there yet."""
    if emulated:
        shape = shape.rstrip("0123456789,") + "2,64,4,2,160,320"
    folder = MODELS / f"{shape}-{scheme or 'bf16'}"
    if not folder.exists():
        options = ["--shape", shape, "--quick", *(["--scheme", scheme] if scheme else [])]
        code, text = run([*BENCHMARK, "make-model", folder, *options], "make_model", 120, environment())
        if code != 0:
            raise RuntimeError(f"no model {folder}: {' '.join(text.splitlines()[-1:])}")
    return folder


# In the order of their value: estimates of the seconds with an H200 and 16 cores. A stage is killed after twice that.
STAGES: dict[str, tuple[float, Run]] = {
    "build": (150, build), "probe": (15, probe), "cpp_tests": (40, cpp_tests),
    **{name: (s, partial(measured, name) if some else python_tests) for name, (s, some) in MEASUREMENTS.items()},
}  # fmt: skip


def measures_unproven(outcomes: dict[str, Outcome]) -> bool:
    """Whether engines may measure kernels that no GPU has run: not if their tests failed, or if anything hung."""
    wrong = {name: one.summary for name, one in outcomes.items() if one.status == "failed"}
    return "probe" not in wrong and not any(HANGS in summary for summary in wrong.values())


def check(stages: dict[str, tuple[float, Run]], emulated: Path | None, budget_s: float) -> dict[str, Outcome]:
    """Run the stages, and write the results after each. Outcomes of earlier calls for other stages are kept."""
    from charonia.bench.records import describe_run, replace

    OUT.mkdir(parents=True, exist_ok=True)
    starts_at = time.monotonic()
    facts = {**describe_run(), "command": sys.argv, "emulated": bool(emulated)}
    outcomes: dict[str, Outcome] = {}
    with contextlib.suppress(OSError, ValueError, KeyError):
        earlier = json.loads((WORK / "results.json").read_text(encoding="utf-8"))
        if earlier["run"]["commit"] == facts["commit"] and earlier["run"]["emulated"] == facts["emulated"]:
            outcomes = {name: Outcome(**values) for name, values in earlier["stages"].items()}
    now, allowed = {}, os.environ.get("CHARONIA_CUDA_UNPROVEN") != "0"
    for name, (guess_s, run_stage) in stages.items():
        began = time.monotonic()
        left = starts_at + budget_s - began
        if left < guess_s and not emulated:
            outcome = Outcome("left out", f"it takes about {guess_s:.0f} s, and {left:.0f} s were left")
            outcome.decisions = [*decide(name, [])] if name in MEASUREMENTS else []
        else:
            os.environ["CHARONIA_CUDA_UNPROVEN"] = str(int(allowed and measures_unproven(outcomes)))
            try:
                outcome = run_stage(emulated, left if emulated else min(left, 2 * guess_s))
            except Exception as error:  # the other stages run
                outcome = failed(f"{type(error).__name__}: {error}", "")
            finally:
                shutil.rmtree(MODELS, ignore_errors=True)
        now[name], outcome.seconds, outcome.estimate = outcome, time.monotonic() - began, guess_s
        outcomes[name] = outcomes.get(name, outcome) if outcome.status == "left out" else outcome
        replace(WORK / "results.json", json.dumps({"run": facts, "stages": outcomes}, indent=1, default=asdict) + "\n")
        if OUT != WORK:  # which may be emptied before the next call
            shutil.copy2(WORK / "results.json", OUT)
            shutil.make_archive(str(OUT / "logs"), "gztar", LOGS)  # with the kernel report of each engine
        took = f"{outcome.seconds:.0f} s, estimate {guess_s:.0f} s"
        line = f"[{time.monotonic() - starts_at:4.0f} s] {name}: {outcome.status} ({took}), {outcome.summary}"
        print(line, *(f"  {one}" for one in outcome.decisions), *filter(None, [outcome.text]), sep="\n")
        if outcome.status == "failed" and name == "build":
            break
    return now


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"only these [{', '.join(STAGES)}]")
    parser.add_argument("--emulated", type=Path, metavar="FOLDER", help="rehearse with this build folder of CMake")
    parser.add_argument("--budget-s", type=float, default=420.0, help="seconds; --emulated has no budget [420]")
    options = parser.parse_args()
    if unknown := set(options.stages) - set(STAGES):
        parser.error(f"unknown stages: {', '.join(sorted(unknown))}; expected {', '.join(STAGES)}")
    if options.budget_s <= 0:
        parser.error(f"--budget-s {options.budget_s:g}: expected more than 0 seconds")
    sys.path[:0] = [str(ROOT), str(PACKAGES)]  # charonia.bench.records, which needs nothing compiled
    LOGS.mkdir(parents=True, exist_ok=True)
    stages = {name: stage for name, stage in STAGES.items() if name in (options.stages or STAGES)}
    emulated = options.emulated and options.emulated.absolute()
    now = check(stages, emulated, 3600 if emulated else options.budget_s)
    print(f"{OUT / 'results.json'} has the results")
    return int(any(one.status == "failed" for one in now.values()))


if __name__ == "__main__":
    sys.exit(main())
