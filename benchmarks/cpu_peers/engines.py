"""The engines that are measured, and the environments that they run in."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORKERS = Path(__file__).parent / "workers"
# The CPU build of this version is taken where there is one; the parity tests run on the same.
_TORCH = next(
    line
    for line in (ROOT / "scripts" / "requirements-test-all.txt").read_text(encoding="utf-8").split()
    if line.startswith("torch==")
)


@dataclass(frozen=True)
class EngineSpec:
    """worker: the script in workers/ that runs it. model: what it reads, hf | gguf | openvino | ctranslate2. packages:
    what pip installs into an environment of its own; none: it runs in this one. build: environment variables for
    packages that are built. bits: of most weights. variant: how they are quantised, as the engine calls it. option:
    what the worker is told beside the model. environment: the name of the engine whose environment it shares."""

    name: str
    label: str
    worker: str
    model: str
    packages: tuple[str, ...] = ()
    build: tuple[tuple[str, str], ...] = ()
    # Packages that the ones above bring along and that do not fit the CPU build of PyTorch.
    unwanted: tuple[str, ...] = ()
    bits: int = 16
    variant: str = ""
    option: str = ""
    environment: str = ""


def _ours(scheme: str, bits: int, label: str) -> EngineSpec:
    return EngineSpec(f"charonia_{scheme}", label, "charonia_engine.py", "hf", bits=bits, variant=scheme)


CHARONIA = EngineSpec("charonia", "Charonia, bf16", "charonia_engine.py", "hf")
OURS = (
    CHARONIA,
    _ours("w8a8", 8, "Charonia, W8A8 int8"),
    _ours("w8a16", 8, "Charonia, W8A16 int8"),
    _ours("fp8", 8, "Charonia, FP8"),
    _ours("w4a16", 4, "Charonia, W4A16, groups of 128"),
)
_PEERS_16 = (
    EngineSpec(
        "transformers",
        "transformers, bf16",
        "transformers_model.py",
        "hf",
        packages=(_TORCH, "transformers", "accelerate"),
    ),
    EngineSpec(
        "llama_cpp",
        "llama.cpp, bf16",
        "llama_cpp_model.py",
        "gguf",
        packages=("llama-cpp-python", "gguf"),
        # Built from source for the processor that is here.
        build=(
            ("CMAKE_ARGS", "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"),
        ),
    ),
    EngineSpec(
        "openvino",
        "OpenVINO GenAI, 16 bits",
        "openvino_model.py",
        "openvino",
        packages=("openvino-genai", "optimum-intel", _TORCH),
        unwanted=("torchvision",),
    ),
)


_LLAMA_CPP, _OPENVINO = _PEERS_16[1], _PEERS_16[2]


def _gguf(ftype: str, bits: int) -> EngineSpec:
    name, label = f"llama_cpp_{ftype}", f"llama.cpp, {ftype}"
    return replace(_LLAMA_CPP, name=name, label=label, bits=bits, variant=ftype, environment=_LLAMA_CPP.name)


def _openvino(bits: int, hint: str) -> EngineSpec:
    """hint: the arithmetic that OpenVINO is asked for; each is fast where the other one is slow."""
    return replace(
        _OPENVINO,
        name=f"openvino_int{bits}_{hint}",
        label=f"OpenVINO GenAI, int{bits}, {hint} arithmetic",
        packages=(*_OPENVINO.packages, "nncf"),
        bits=bits,
        variant=f"int{bits}",
        option=hint,
        environment="openvino_nncf",
    )


PEERS = (
    *_PEERS_16,
    _gguf("q8_0", 8),
    _openvino(8, "bf16"),
    _openvino(8, "f32"),
    EngineSpec(
        "ctranslate2",
        "CTranslate2, int8",
        "ctranslate2_model.py",
        "ctranslate2",
        packages=("ctranslate2", "transformers", _TORCH),
        bits=8,
        variant="int8",
    ),
    _gguf("q4_0", 4),
    _gguf("q4_K_M", 4),
    _openvino(4, "bf16"),
    _openvino(4, "f32"),
)


@dataclass(frozen=True)
class Environment:
    """python: what runs the worker. versions: of its packages, as pip names them. missing: why there is none."""

    python: Path
    versions: dict[str, str]
    missing: str = ""


def prepare(spec: EngineSpec, folder: Path, install: bool, say: Callable[[str], None]) -> Environment:
    """The engine's environment in `folder`, made and filled if need be."""
    if not spec.packages:
        return Environment(Path(sys.executable), _versions(Path(sys.executable), ("charonia",)))
    place = folder / (spec.environment or spec.name)
    python = place / "bin" / "python"
    stamp = place / "installed.txt"
    wanted = "\n".join(spec.packages)
    names = tuple(package.split("==")[0] for package in spec.packages)
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        if not install:
            return Environment(python, {}, "not installed, and --no-install was given")
        say(f"installing {', '.join(spec.packages)} into {place}")
        if not python.exists():
            venv.create(place, with_pip=True)
        done = _pip(python, "install", *spec.packages, env=dict(spec.build))
        if done.returncode == 0 and spec.unwanted:
            done = _pip(python, "uninstall", "--yes", *spec.unwanted)
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            errors = [line for line in lines if "error" in line.lower()]
            return Environment(
                python, {}, f"pip install failed: {(errors or lines or ['it said nothing'])[-1].strip()}"
            )
        stamp.write_text(wanted, encoding="utf-8")
    return Environment(python, _versions(python, names))


def _pip(python: Path, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})})


def _versions(python: Path, names: tuple[str, ...]) -> dict[str, str]:
    code = "import importlib.metadata as m, sys; print(*[m.version(n) for n in sys.argv[1:]])"
    done = subprocess.run([str(python), "-c", code, *names], capture_output=True, text=True)
    return dict(zip(names, done.stdout.split(), strict=False))
