"""Checks the machine code of the CUDA kernels in folders of objects.

In ptxas's output (keep_ptxas_output.sh), no kernel may spill registers. These warnings are errors: C7510 to C7518,
because ptxas then makes wgmma instructions wait for each other, and C7506 to C7508, because it ignores setmaxnreg. In
the code for sm_90a, no kernel may access local memory, and the tensor core and TMA instructions of each source file's
kernels must be those of machine_code.tsv, which has every file with such instructions. They are compared only if the
release of nvcc is the one in the table; with CI set, another release is an error.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

TABLE = Path(__file__).with_name("machine_code.tsv")
TARGET = "sm_90a"
COUNTED = ("HMMA", "IMMA", "QMMA", "HGMMA", "IGMMA", "QGMMA", "UTMALDG", "UBLKCP")
LOCAL = ("LDL", "STL")

COMPILED = re.compile(r"Compiling entry function '(\w+)' for '(sm_\w+)'")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
SERIALISED = re.compile(r"\(C75(?:0[6-8]|1[0-8])\).*")
FUNCTION = re.compile(r"^\s*Function : (\w+)")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)")


@dataclass
class Kernel:
    source: str
    name: str
    target: str
    stack_bytes: int = 0
    spilled_bytes: int = 0  # stored and loaded
    registers: int = 0
    shared_bytes: int = 0  # not dynamic
    instructions: Counter[str] = field(default_factory=Counter)  # of COUNTED and LOCAL; only for TARGET

    def __str__(self) -> str:
        return f"{self.source} {self.target} {self.name}"


def read(file: Path) -> tuple[list[Kernel], list[str]]:
    """Return the kernels of a file with ptxas's output, and its warnings about wgmma."""
    kernels: list[Kernel] = []
    warnings = []
    for line in file.read_text().splitlines():
        if found := COMPILED.search(line):
            kernels.append(Kernel(file.name.split(".")[0], found[1], found[2]))
        elif found := SERIALISED.search(line):
            warnings.append(f"{file.name.split('.')[0]}: {found[0]}")
        elif kernels and (found := FRAME.search(line)):
            kernels[-1].stack_bytes = int(found[1])
            kernels[-1].spilled_bytes = int(found[2]) + int(found[3])
        elif kernels and (found := USED.search(line)):
            kernels[-1].registers = int(found[1])
            kernels[-1].shared_bytes = int(shared[1]) if (shared := SHARED.search(line)) else 0
    return kernels, warnings


def instructions(lines: Iterable[str]) -> dict[str, Counter[str]]:
    """The numbers of the instructions COUNTED and LOCAL of each function in cuobjdump's output."""
    out: dict[str, Counter[str]] = {}
    of: Counter[str] = Counter()
    for line in lines:
        if found := FUNCTION.match(line):
            of = out.setdefault(found[1], Counter())
        elif (found := INSTRUCTION.match(line)) and found[1] in (*COUNTED, *LOCAL):
            of[found[1]] += 1
    return out


def disassemble(cuobjdump: str, file: Path) -> dict[str, Counter[str]]:
    with subprocess.Popen(
        [cuobjdump, "-sass", "-arch", TARGET, str(file)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        found = instructions(process.stdout)
    if process.returncode != 0:
        raise SystemExit(f"{cuobjdump} cannot read {file}: exit code {process.returncode}")
    return found


def find_cuobjdump() -> str | None:
    """The program of the CUDA toolkit, or of the PyPI package nvidia-cuda-cuobjdump."""
    spec = importlib.util.find_spec("nvidia")
    places = (spec and spec.submodule_search_locations) or []
    folders = [str(folder) for place in places for folder in Path(place).glob("*/bin")]
    return shutil.which("cuobjdump", path=os.pathsep.join([os.environ.get("PATH", ""), *folders]))


def nvcc_release() -> str:
    done = subprocess.run([os.environ.get("CUDACXX", "nvcc"), "--version"], capture_output=True, text=True, check=True)
    found = re.search(r"V(\d+\.\d+)", done.stdout)
    return found[1] if found else "unknown"


def readable(names: list[str]) -> list[str]:
    """Demangle C++ names; returns the mangled names if there is no c++filt."""
    try:
        done = subprocess.run(["c++filt", "-p"], input="\n".join(names), capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return names
    return [re.sub(r"charonia::cuda::|\(anonymous namespace\)::", "", name) for name in done.stdout.splitlines()]


def counts(kernel: Kernel) -> str:
    return " ".join(f"{name}={kernel.instructions[name]}" for name in COUNTED if kernel.instructions[name]) or "none"


def table(kernels: Iterable[Kernel]) -> dict[str, str]:
    """{source file: "2 x HMMA=8, 1 x none"}: its kernels with equal counts. Without the files that have only none."""
    of_source: dict[str, Counter[str]] = {}
    for one in kernels:
        of_source.setdefault(one.source, Counter())[counts(one)] += 1
    return {
        source: ", ".join(f"{number} x {text}" for text, number in sorted(found.items()))
        for source, found in sorted(of_source.items())
        if set(found) != {"none"}
    }


def differences(found: dict[str, str], expected: dict[str, str]) -> Iterator[str]:
    for source in sorted({*found, *expected}):
        now, then = found.get(source, "none"), expected.get(source, "none")
        if now != then:
            yield f"{source}: {now}, but {TABLE.name} has {then}. --print shows each kernel, --write updates the table"


def add_instructions(kernels: Sequence[Kernel], found: dict[str, Counter[str]]) -> Iterator[str]:
    """Set the instructions of a file's kernels. Yield an error for each kernel that ptxas or cuobjdump did not name."""
    for kernel in kernels:
        kernel.instructions = found.get(kernel.name, Counter())
    source, names = kernels[0].source, {kernel.name for kernel in kernels}
    for name in sorted(names - found.keys()):
        yield f"{source}: cuobjdump shows no code of {name}"
    for name in sorted(found.keys() - names):
        yield f"{source}: ptxas has not printed the registers of {name}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="with the objects, and ptxas's output next to them")
    parser.add_argument("--print", action="store_true", help="print registers, memory and instructions of all kernels")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name} from the objects")
    arguments = parser.parse_args()
    files = sorted(file for folder in arguments.folders for file in folder.rglob("*.ptxas"))
    kernels, wrong = [], []
    for file in files:
        of_file, warnings = read(file)
        wrong += warnings
        kernels += of_file
        if of_target := [kernel for kernel in of_file if kernel.target == TARGET]:
            cuobjdump = find_cuobjdump()
            if cuobjdump is None:
                print(
                    "cuobjdump is missing: install the CUDA toolkit, or"
                    " pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
                )
                return 1
            wrong += add_instructions(of_target, disassemble(cuobjdump, file.with_suffix("")))
    for folder in arguments.folders:
        if not any(file.is_relative_to(folder) for file in files):
            print(f"{folder} has no output of ptxas: build its target first")
            return 1
    for kernel, name in zip(kernels, readable([kernel.name for kernel in kernels]), strict=True):
        kernel.name = name
    spilling = [kernel for kernel in kernels if kernel.spilled_bytes > 0]
    for kernel in kernels if arguments.print else spilling:
        print(
            f"{kernel}: {kernel.registers} registers, {kernel.shared_bytes} bytes of shared memory,"
            f" {kernel.stack_bytes} of stack, {kernel.spilled_bytes} spilled; {counts(kernel)}"
        )
    for kernel in kernels:
        accesses = [f"{kernel.instructions[name]} {name}" for name in LOCAL if kernel.instructions[name]]
        if accesses:
            wrong.append(f"{kernel} accesses local memory: {', '.join(accesses)}")
    compared = f"no code for {TARGET}"
    checked = [kernel for kernel in kernels if kernel.target == TARGET]
    if checked:
        found, release = table(checked), nvcc_release()
        if arguments.write:
            lines = [f"nvcc\t{release}", *(f"{source}\t{of}" for source, of in found.items())]
            TABLE.write_text("\n".join(lines) + "\n")
        (_, known), *expected = (line.split("\t") for line in TABLE.read_text().splitlines())
        if known == release:
            wrong += differences(found, dict(expected))
            compared = f"{len(checked)} compared with {TABLE.name}"
        else:
            compared = f"{TABLE.name} is for nvcc {known}, not {release}: not compared"
            if os.environ.get("CI"):
                wrong.append(f"{compared}. Install nvcc {known}, or write the table again (--write)")
    print(*wrong, sep="\n", end="\n" if wrong else "")
    print(f"{len(kernels)} kernels of {len(files)} files, of which {len(spilling)} spill registers; {compared}")
    return 1 if spilling or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
