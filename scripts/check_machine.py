"""Checks whether this machine can build and run Charonia. Needs only Python. Prints one message with all problems."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
GLIBC = (2, 35)
CXX_TEST = "#include <concepts>\n#include <span>\n#include <string>\nint main() { return std::span<int>().size(); }\n"


def missing_packages() -> list[tuple[str, str]]:
    """Return pairs of (missing thing and its purpose, Debian's package for it)."""
    missing = []
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        missing.append((f"Python's modules venv and ensurepip ({sys.executable})", f"python{VERSION}-venv"))
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        missing.append(("Python.h, to build the engine's Python module", f"python{VERSION}-dev"))
    if not has_libpython():
        missing.append((f"libpython{VERSION}.so.1.0, on which Triton runs Python models", f"libpython{VERSION}"))
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        missing.append(("a C++ compiler", "build-essential"))
    elif not compiles_cxx20(compiler):
        missing.append((f"a compiler with C++20: {compiler} is too old, g++ 11 or clang 14 is needed", "g++"))
    return missing


def has_libpython() -> bool:
    name = f"libpython{sysconfig.get_config_var('LDVERSION')}.so.1.0"
    for place in (name, f"{sysconfig.get_config_var('LIBDIR')}/{name}"):
        try:
            ctypes.CDLL(place)
            return True
        except OSError:
            continue
    return False


def compiles_cxx20(compiler: str) -> bool:
    command = [*compiler.split(), "-std=c++20", "-x", "c++", "-fsyntax-only", "-"]
    try:
        return subprocess.run(command, input=CXX_TEST, text=True, capture_output=True).returncode == 0
    except OSError:
        return False


def unsupported() -> str | None:
    """Return a problem that no package can fix."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return f"Triton runs on Linux on x86_64 or aarch64; this is {sys.platform} on {platform.machine()}"
    name, version = platform.libc_ver()
    if name != "glibc" or tuple(int(part) for part in version.split(".")[:2]) < GLIBC:
        return f"Triton needs glibc 2.35 or newer (Debian 12, Ubuntu 22.04), not {name or 'none'} {version}"
    return None


def main() -> int:
    problem = unsupported()
    if problem is not None:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    missing = missing_packages()
    if not missing:
        return 0
    sudo = "" if os.geteuid() == 0 else "sudo "
    packages = " ".join(package for _, package in missing)
    print("error: this machine does not have", file=sys.stderr)
    for what, _ in missing:
        print(f"  - {what}", file=sys.stderr)
    print(f"Install with:\n  {sudo}apt-get update && {sudo}apt-get install -y {packages}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
