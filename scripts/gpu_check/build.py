"""What is checked: libraries of engine and device, C++ programs and Triton backend, compiled elsewhere and brought
along or compiled here, and the Python module, which is compiled here in either case: it depends on this Python."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

from charonia.bench import machine
from gpu_check import packages, records
from gpu_check.commands import Done
from gpu_check.commands import run as run_command
from gpu_check.context import HOST, ROOT, SITE_CUSTOMIZE, Context, cuda_folders, find_tool
from gpu_check.records import Failure, Outcome

_ERROR_LINE = re.compile(r"(error|fatal|undefined reference|Error \d|FAILED:)", re.IGNORECASE)
GRAMMAR_LIBRARY = "libcharonia_grammar.so"
_STAMP = "made_of.json"
_PACK = "scripts/gpu_check.sh --pack .whl"
_SMOKE_TEST = "CudaRowsTest.*"


def _suffix(architecture: str) -> str:
    """Of targets: the emulated device has the same sources."""
    return "_on_host" if architecture == HOST else ""


def test_program(context: Context) -> Path:
    return context.compiled / f"charonia_cuda_tests{_suffix(context.architecture)}"


def kernel_benchmark(context: Context) -> Path:
    return context.compiled / f"charonia_cuda_kernels{_suffix(context.architecture)}"


def run(context: Context, session: object, size: str) -> Outcome:
    installed = packages.install(context)
    (usable, told), failures = _bring(context), []
    if not usable:
        done = compile_all(context, context.compiled)
        failures = [] if done.code == 0 else _failed("compiling", done)
        if failures and not (context.compiled / _STAMP).is_file():
            return Outcome("failed", f"{installed}; {told}; compiling {done.how}", failures=failures)
        told += f"; compiled in {done.seconds:.0f} s" + ("; NOT ALL OF IT" if failures else "")
    done = _python_module(context)
    if done.code != 0:
        failures += _failed("compiling the Python module", done)
        return Outcome("failed", f"{installed}; {told}; the Python module: {done.how}", failures=failures)
    backend = context.site / "charonia" / "backends" / "charonia"
    backend.mkdir(parents=True)
    shutil.copy2(context.compiled / "libtriton_charonia.so", backend)
    shutil.copy2(context.compiled / GRAMMAR_LIBRARY, backend.parents[1])
    # What does not compile keeps nothing else from being tested and measured.
    return Outcome("passed", f"{installed}; {told}; Python module compiled in {done.seconds:.0f} s", failures=failures)


def _bring(context: Context) -> tuple[bool, str]:
    """Takes what was compiled elsewhere, or here before, if it is of these sources and runs here; and what it did."""
    folder = packages.unpacked(context.carried, packages.COMPILED) or context.compiled
    if not (folder / _STAMP).is_file():
        return False, "nothing compiled was brought along"
    made_of, wanted = json.loads((folder / _STAMP).read_text()), _made_of(context.architecture)
    if made_of != wanted:
        return False, f"what is compiled is of {made_of}, and {wanted} is wanted"
    if folder != context.compiled:
        shutil.rmtree(context.compiled, ignore_errors=True)
        shutil.copytree(folder, context.compiled)
    if not test_program(context).is_file():
        if _googletest(context) and not _missing(context):
            return False, "what is compiled has no C++ tests, and GoogleTest is here"
        return True, "what is compiled was there, without C++ tests"
    command: list[str | Path] = [test_program(context), f"--gtest_filter={_SMOKE_TEST}"]
    done = run_command(command, context.logs / "smoke_test.log", limit_s=60, env=context.environment())
    # A test that fails is the business of the stage that runs them all; here a program that cannot run is looked for.
    if "[==========] Running" not in done.text or "no kernel image" in done.text:
        return False, f"what was brought along does not run here ({done.how}: {done.text.strip()[-200:]})"
    return True, "what is compiled was there, and its smoke test ran"


def _made_of(architecture: str) -> dict[str, str]:
    return {"sources": records.engine_sources(), "architecture": architecture}


def compile_all(context: Context, to: Path) -> Done:
    """Compiles for context.architecture. `to` has a stamp when what everything else needs is in it."""
    cmake_folder = ROOT / "build" / f"gpu_check_{context.architecture}"
    env = context.environment()
    missing = _missing(context)
    if missing:
        return Done(1, missing, 0.0)
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    done = run_command(_configure(context, cmake_folder), context.logs / "configuring.log", limit_s=180, env=env)
    if done.code != 0:
        return done
    device = f"charonia_cuda{_suffix(context.architecture)}"
    targets = ["charonia_engine", device, "triton_charonia", "charonia_grammar"]
    if _googletest(context):
        targets.append(test_program(context).name)
    if (ROOT / "benchmarks" / "cuda_kernels.cpp").is_file():
        targets.append(kernel_benchmark(context).name)
    # -k 0: all compiler errors in one run.
    command: list[str | Path] = [
        _tool("cmake"), "--build", cmake_folder, "--parallel", str(context.jobs), "--target", *targets, "--", "-k", "0"
    ]  # fmt: skip
    limit_s = 380 if context.jobs >= 8 else 3400  # a machine that is lent for minutes, and a workstation
    done = run_command(command, context.logs / "compiling.log", limit_s=limit_s, env=env)
    libraries = ["libcharonia_engine.a", f"lib{device}.a", "libtriton_charonia.so", GRAMMAR_LIBRARY]
    for name in (*libraries, *targets[4:]):
        if (cmake_folder / name).is_file():
            shutil.copy2(cmake_folder / name, to)
    if context.architecture != HOST:
        shutil.copy2(_cudart(cmake_folder), to)
    if all((to / name).is_file() for name in libraries):
        (to / _STAMP).write_text(json.dumps(_made_of(context.architecture)))
    return done


def _cudart(cmake_folder: Path) -> Path:
    """CUDA's own static library, as CMake found it."""
    cache = (cmake_folder / "CMakeCache.txt").read_text()
    found = re.search(r"^CUDA_cudart_static_LIBRARY:FILEPATH=(.+)$", cache, re.MULTILINE)
    if found is None:
        raise FileNotFoundError(f"CUDA_cudart_static_LIBRARY is not in {cmake_folder}/CMakeCache.txt")
    return Path(found.group(1))


def make_site(site: Path) -> Path:
    """A charonia package in `site`: links to the checkout's files. Returns its folder, for what is compiled."""
    shutil.rmtree(site, ignore_errors=True)
    package = site / "charonia"
    package.mkdir(parents=True)
    shutil.copy2(SITE_CUSTOMIZE / "sitecustomize.py", site)
    for file in (ROOT / "charonia").iterdir():
        if file.suffix != ".so" and file.name != "__pycache__":
            (package / file.name).symlink_to(file)
    return package


def _python_module(context: Context) -> Done:
    """Compiles the Python module into the site, with the compiled libraries."""
    import pybind11

    package, limit_s = make_site(context.site), 150 if context.jobs >= 8 else 900
    libraries = [f"libcharonia_cuda{_suffix(context.architecture)}.a", "libcharonia_engine.a"]
    if context.architecture != HOST:
        libraries.append("libcudart_static.a")
    compiler = [*shlex.split(os.environ.get("CMAKE_CXX_COMPILER_LAUNCHER", "")), os.environ.get("CXX", "c++")]
    includes = (ROOT / "engine/include", ROOT / "engine/src", sysconfig.get_path("include"), pybind11.get_include())
    made = context.work / "module.o"
    compiling: list[str | Path] = [
        *compiler, "-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", *(f"-I{folder}" for folder in includes),
        "-c", ROOT / "engine/python/module.cpp", "-o", made,
    ]  # fmt: skip
    linking: list[str | Path] = [
        compiler[-1], "-shared", made, f"-Wl,--version-script={ROOT / 'engine/python/exports.map'}",
        "-Wl,--start-group", *(context.compiled / name for name in libraries), "-Wl,--end-group", "-ldl", "-lrt",
        "-pthread", "-o", package / f"_engine{sysconfig.get_config_var('EXT_SUFFIX')}",
    ]  # fmt: skip
    done = run_command(compiling, context.logs / "python_module.log", limit_s=limit_s, env=context.environment())
    if done.code != 0:
        return done
    linked = run_command(linking, context.logs / "python_module_link.log", limit_s=90, env=context.environment())
    return Done(linked.code, linked.text, done.seconds + linked.seconds)


def _missing(context: Context) -> str:
    """What the build needs and the machine lacks, in one line."""
    for tool in ("cmake", "ninja", *(() if context.architecture == HOST else ("nvcc",))):
        if find_tool(tool) is None:
            return f"{tool} is not on the PATH: install it, or bring along what was compiled, {_PACK} --build-for 90a"
    for module, wheel in (("nlohmann_json", "nlohmann-json"), ("pybind11", "pybind11")):
        if importlib.util.find_spec(module) is None and not list(context.packages.glob(f"{module}*")):
            return f"the Python package {wheel} is missing: bring it along, {_PACK}"
    if context.architecture == HOST and not _googletest(context):
        return (
            "GoogleTest is missing, and the emulated device is compiled with its tests: scripts/get_googletest.sh "
            "fetches it; --brought has it where --pack has packed it"
        )
    return ""


def _tool(name: str) -> str:
    return find_tool(name) or name


def _configure(context: Context, cmake_folder: Path) -> list[str | Path]:
    host, googletest = context.architecture == HOST, _googletest(context)
    command: list[str | Path] = [
        _tool("cmake"), "-S", ROOT, "-B", cmake_folder, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}",
        "-DCMAKE_BUILD_TYPE=Release", "-DCHARONIA_PYTHON=OFF", "-DCHARONIA_TRITON=ON", "-DCHARONIA_BENCHMARKS=ON",
        f"-DCHARONIA_TESTS={'ON' if googletest else 'OFF'}", f"-DPython_EXECUTABLE={sys.executable}",
        f"-DCHARONIA_CUDA={'OFF' if host else 'ON'}",
        # A compiler that nobody has tried may warn of other things.
        f"-DCHARONIA_WERROR={'OFF' if machine.gpu_of() else 'ON'}",
        f"-DCHARONIA_CUDA_ON_HOST_TESTS={'ON' if host else 'OFF'}",
    ]  # fmt: skip
    if not host:
        # Those of installed packages, brought along, or fetched before; CMake looks into the toolkit itself.
        headers = cuda_folders("include", "cublasLt.h", "nccl.h")
        for folder in (packages.unpacked(context.carried, packages.CUDA_HEADERS), ROOT / "build" / "cuda_headers"):
            headers += [str(each) for each in sorted(folder.glob("*")) if each.is_dir()] if folder else []
        command.append(f"-DCMAKE_CUDA_COMPILER={_tool('nvcc')}")
        command.append(f"-DCHARONIA_CUDA_ARCHITECTURES={context.architecture}-real")
        command.append(f"-DCHARONIA_CUDA_HEADERS={';'.join(headers)}")
    if xgrammar := packages.unpacked(context.carried, packages.XGRAMMAR):
        command.append(f"-DCHARONIA_XGRAMMAR={xgrammar}")
    if googletest not in ("", "/usr"):
        command.append(f"-DCMAKE_PREFIX_PATH={googletest}")
    return command


def _googletest(context: Context) -> str:
    """A prefix with GoogleTest: brought along, installed, or unpacked before by scripts/get_googletest.sh; or none."""
    brought = packages.unpacked(context.carried, packages.GOOGLETEST)
    for place in (*([brought] if brought else []), Path("/usr"), ROOT / "build" / "googletest" / "usr"):
        if (place / "include" / "gtest" / "gtest.h").is_file() and any(place.glob("lib/**/libgtest.a")):
            return str(place)
    return ""


def _failed(what: str, done: Done) -> list[Failure]:
    return [Failure(what, _errors(done), records.COMPILER)]


def _errors(done: Done) -> str:
    """The first errors of each file, with what is around them."""
    lines = done.text.splitlines()
    picked: list[str] = []
    for index, line in enumerate(lines):
        if _ERROR_LINE.search(line) and line not in picked:
            picked += [each[:240] for each in lines[index : index + 3] if each not in picked]
        if len(picked) > 24:
            break
    return "\n".join(picked or lines[-20:])
