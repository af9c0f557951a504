"""check_spills.py FOLDER: reads ptxas's output for every kernel in the folder (see keep_ptxas_output.sh). Fails if a
kernel spills registers to memory. --table prints registers and shared memory of all kernels."""

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

COMPILED = re.compile(r"Compiling entry function '(\w+)' for '(sm_\w+)'")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")


@dataclass
class Kernel:
    source: str
    name: str
    target: str
    stack_bytes: int = 0
    spilled_bytes: int = 0  # stored and loaded
    registers: int = 0
    shared_bytes: int = 0  # not dynamic


def read(file: Path) -> list[Kernel]:
    kernels: list[Kernel] = []
    for line in file.read_text().splitlines():
        if found := COMPILED.search(line):
            kernels.append(Kernel(file.name.split(".")[0], found[1], found[2]))
        elif kernels and (found := FRAME.search(line)):
            kernels[-1].stack_bytes = int(found[1])
            kernels[-1].spilled_bytes = int(found[2]) + int(found[3])
        elif kernels and (found := USED.search(line)):
            kernels[-1].registers = int(found[1])
            kernels[-1].shared_bytes = int(shared[1]) if (shared := SHARED.search(line)) else 0
    return kernels


def readable(names: list[str]) -> list[str]:
    """Demangle C++ names; returns the mangled names if there is no c++filt."""
    try:
        done = subprocess.run(["c++filt", "-p"], input="\n".join(names), capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return names
    return [re.sub(r"charonia::cuda::|\(anonymous namespace\)::", "", name) for name in done.stdout.splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    files = sorted(arguments.folder.rglob("*.ptxas"))
    kernels = [kernel for file in files for kernel in read(file)]
    if not kernels:
        print(f"{arguments.folder} has no output of ptxas: build the target charonia_cuda first")
        return 1
    for kernel, name in zip(kernels, readable([kernel.name for kernel in kernels]), strict=True):
        kernel.name = name
    spilling = [kernel for kernel in kernels if kernel.spilled_bytes > 0]
    for kernel in kernels if arguments.table else spilling:
        print(
            f"{kernel.source} {kernel.target} {kernel.name}: {kernel.registers} registers,"
            f" {kernel.shared_bytes} bytes of shared memory, {kernel.stack_bytes} of stack,"
            f" {kernel.spilled_bytes} spilled"
        )
    print(f"{len(kernels)} kernels of {len(files)} files, of which {len(spilling)} spill registers")
    return 1 if spilling else 0


if __name__ == "__main__":
    sys.exit(main())
