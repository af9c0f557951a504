"""The engine with CUDA for this machine's GPU alone: C++ tests, Python module, Triton back end."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import tarfile
from pathlib import Path

from gpu_check import packages, records
from gpu_check.commands import Done
from gpu_check.commands import run as run_command
from gpu_check.context import ROOT, Context, cuda_folders
from gpu_check.records import Failure, Outcome

_TESTS = "charonia_cuda_tests"
_ERROR_LINE = re.compile(r"(error|fatal|undefined reference|Error \d|FAILED:)", re.IGNORECASE)
_SOURCES_FILE = "sources.txt"


def _tests(context: Context) -> str:
    """A rehearsal has the same tests with the kernels on the CPU."""
    return _TESTS + ("_on_host" if context.rehearse else "")


def test_program(context: Context) -> Path:
    return context.site / "bin" / _tests(context)


def products(context: Context) -> Path:
    """What was compiled, in one file: bring it along to the next machine of the kind and nothing is built there."""
    return context.work / "products.tar.gz"


def run(context: Context, session: object, size: str) -> Outcome:
    installed = packages.install(context)
    if _unpack(context):
        return Outcome("passed", f"{installed}; what was built before with these sources")
    missing = _missing(context)
    if missing:
        return Outcome("failed", f"{installed}; {missing}", failures=[Failure("build", missing, records.COMPILER)])
    done = run_command(_configure(context), context.logs / "configuring.log", limit_s=60, env=context.environment())
    if done.code != 0:
        return _failed("configuring", done)
    for file in (*_compiled(context), context.cmake / _tests(context)):
        file.unlink(missing_ok=True)
    done = run_command(
        _compile(context), context.logs / "compiling.log", limit_s=_compile_limit(context), env=context.environment()
    )
    # Tests that do not compile keep nothing else from being tested and measured.
    if len(_compiled(context)) < 2:
        return _failed("compiling", done)
    _make_site(context)
    _pack(context)
    megabytes = products(context).stat().st_size / 1e6
    summary = f"{installed}; compiled in {done.seconds:.0f} s; {products(context).name} has {megabytes:.1f} MB"
    if done.code != 0:
        return Outcome("passed", f"{summary}; WITHOUT THE C++ TESTS", failures=_failed("compiling", done).failures)
    return Outcome(
        "passed", summary if _googletest(context) else f"{summary}; without C++ tests: no GoogleTest is here"
    )


def _failed(what: str, done: Done) -> Outcome:
    return Outcome("failed", f"{what} {done.how}", failures=[Failure(what, _errors(done), records.COMPILER)])


def _compile_limit(context: Context) -> float:
    """Seconds; for a machine of the kind that has such GPUs, and for a workstation."""
    return 380 if context.jobs >= 8 else 1700


def _compiled(context: Context) -> list[Path]:
    """What must be there for anything else: the Python module and the back end."""
    return [*context.cmake.glob("_engine*.so"), *context.cmake.glob("libtriton_charonia.so")]


def _missing(context: Context) -> str:
    """What the build needs and the machine lacks, in one line."""
    for tool in ("cmake", "ninja", *(() if context.rehearse else ("nvcc",))):
        if shutil.which(tool, path=_path()) is None:
            return f"{tool} is not on the PATH"
    for module, wheel in (("nlohmann_json", "nlohmann-json"), ("pybind11", "pybind11")):
        if importlib.util.find_spec(module) is None and not list(context.packages.glob(f"{module}*")):
            return f"the Python package {wheel} is missing: bring it along, scripts/gpu_check.sh --pack .whl"
    return ""


def _path() -> str:
    """CUDA's usual place counts."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"])


def _configure(context: Context) -> list[str | Path]:
    import pybind11

    command: list[str | Path] = [
        shutil.which("cmake", path=_path()) or "cmake", "-S", ROOT, "-B", context.cmake, "-G", "Ninja",
        "-DCMAKE_BUILD_TYPE=Release", "-DCHARONIA_PYTHON=ON", "-DCHARONIA_TRITON=ON",
        f"-DCHARONIA_TESTS={'ON' if _googletest(context) else 'OFF'}",
        f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        f"-DCHARONIA_CUDA={'OFF' if context.rehearse else 'ON'}",
        f"-DCHARONIA_CUDA_ON_HOST_TESTS={'ON' if context.rehearse else 'OFF'}",
    ]  # fmt: skip
    if not context.rehearse:
        # Those of installed packages, brought along, or fetched before; CMake looks into the toolkit itself.
        headers = cuda_folders("include", "cublasLt.h", "nccl.h")
        for folder in (context.wheels / "cuda_headers", ROOT / "build" / "cuda_headers"):
            headers += [str(each) for each in sorted(folder.glob("*")) if each.is_dir()]
        command.append(f"-DCMAKE_CUDA_COMPILER={shutil.which('nvcc', path=_path())}")
        command.append(f"-DCHARONIA_CUDA_ARCHITECTURES={context.architecture}-real")
        command.append(f"-DCHARONIA_CUDA_HEADERS={';'.join(headers)}")
    prefix = _googletest(context)
    if prefix not in ("", "/usr"):
        command.append(f"-DCMAKE_PREFIX_PATH={prefix}")
    return command


def _googletest(context: Context) -> str:
    """A prefix with GoogleTest: brought along, installed, or unpacked before by scripts/get_googletest.sh; or none."""
    for place in (context.wheels / "googletest", Path("/usr"), ROOT / "build" / "googletest" / "usr"):
        if (place / "include" / "gtest" / "gtest.h").is_file() and any(place.glob("lib/**/libgtest.a")):
            return str(place)
    return ""


def _compile(context: Context) -> list[str | Path]:
    targets = ["_engine", "triton_charonia", *([_tests(context)] if _googletest(context) else [])]
    cmake = shutil.which("cmake", path=_path()) or "cmake"
    # --keep-going: all compiler errors in one run.
    return [cmake, "--build", context.cmake, "--parallel", str(context.jobs), "--target", *targets, "--", "-k", "0"]


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


def _make_site(context: Context) -> None:
    """A charonia package: links to the checkout's files, and what was compiled beside them."""
    shutil.rmtree(context.site, ignore_errors=True)
    package = context.site / "charonia"
    (package / "backends" / "charonia").mkdir(parents=True)
    (context.site / "bin").mkdir()
    for file in _compiled(context):
        shutil.copy2(file, package if file.name.startswith("_engine") else package / "backends" / "charonia")
    if (context.cmake / _tests(context)).is_file():
        shutil.copy2(context.cmake / _tests(context), context.site / "bin")
    _link(context)


# The package of an editable installation would otherwise come first.
_SITECUSTOMIZE = """import sys


def has_charonia(finder):
    modules = (*getattr(finder, "known_source_files", ()), *getattr(finder, "known_wheel_files", ()))
    return any(name.partition(".")[0] == "charonia" for name in modules)


sys.meta_path[:] = [finder for finder in sys.meta_path if not has_charonia(finder)]
"""


def _link(context: Context) -> None:
    (context.site / "sitecustomize.py").write_text(_SITECUSTOMIZE, encoding="utf-8")
    for file in (ROOT / "charonia").iterdir():
        link = context.site / "charonia" / file.name
        if file.suffix != ".so" and file.name != "__pycache__" and not link.exists():
            link.symlink_to(file)


def _pack(context: Context) -> None:
    (context.site / _SOURCES_FILE).write_text(_product_key(context))
    with tarfile.open(products(context), "w:gz", compresslevel=6) as archive:
        for file in sorted(context.site.rglob("*")):
            if file.is_file() and not file.is_symlink():
                archive.add(file, file.relative_to(context.site), recursive=False)


def _product_key(context: Context) -> str:
    """Of these sources, for this Python and this GPU."""
    return f"{records.engine_sources()} {sys.implementation.cache_tag} {context.architecture or 'none'}"


def _unpack(context: Context) -> bool:
    """True when the products of these sources are there, or were brought along and unpacked."""
    stamp = context.site / _SOURCES_FILE
    if not stamp.is_file() and products(context).is_file():
        shutil.rmtree(context.site, ignore_errors=True)
        with tarfile.open(products(context)) as archive:
            archive.extractall(context.site, filter="data")
    if not stamp.is_file() or stamp.read_text() != _product_key(context):
        return False
    _link(context)
    return True
