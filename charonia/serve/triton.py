"""The Triton server of the package nvidia-pytriton: its files, environment, command line and log."""

from __future__ import annotations

import ctypes.util
import importlib.util
import math
import os
import re
import shutil
import socket
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from charonia import guide_library
from charonia.errors import ServeError
from charonia.serve import logs
from charonia.serve.models import Served
from charonia.settings import ServeSettings
from charonia.weights.workspace import sha256

# Time for the server to unload its models, in addition to drain_timeout_s.
EXIT_MARGIN_S = 5
BACKEND_LIBRARY = Path("backends", "charonia", "libtriton_charonia.so")

# Messages of the server that are irrelevant on a machine without a GPU come from these files.
_GPU_SOURCES = (
    "cuda_memory_manager.cc",
    "cuda_utils.cc",
    "ensemble_scheduler.cc",
    "metrics.cc",
    "pinned_memory_manager.cc",
    "server.cc",
)
_GPU_NOISE = re.compile(r"cuda|nvml|dcgm|pinned.*memory|gpu|device", re.IGNORECASE)
_DEPENDS = re.compile(r"ensemble 'ensemble[^']*' depends on")
_ALLOCATORS = re.compile(r"malloc|libasan|libtsan")
_NO_SUCH_GPU = re.compile(r"has kind KIND_GPU but no GPUs are available|invalid or unsupported gpu id")


@dataclass(frozen=True)
class Distribution:
    """The server's files inside the installed package."""

    server: Path
    python_backend: Path  # libtriton_python.so, triton_python_backend_utils.py
    python_stub: Path
    libraries: Path

    @classmethod
    def find(cls, root: Path | None = None) -> Distribution:
        """The server in `root`, with the layout of NVIDIA's images; None: the server of nvidia-pytriton."""
        if root is not None:
            return cls._installed(root)
        spec = importlib.util.find_spec("pytriton")
        if spec is None or spec.origin is None:
            raise ServeError(
                f"nvidia-pytriton is not installed: {sys.executable} -m pip install nvidia-pytriton==0.7.0"
            )
        package = Path(spec.origin).parent
        root = package / "tritonserver"
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        found = cls(
            root / "bin" / "tritonserver",
            root / "backends" / "python",
            root / "python_backend_stubs" / version / "triton_python_backend_stub",
            package.parent / "nvidia_pytriton.libs",
        )
        if not found.python_stub.is_file():
            raise ServeError(
                f"this Triton server has no Python models for Python {version}; use Python 3.10, 3.11 or 3.12"
            )
        return found

    @classmethod
    def _installed(cls, root: Path) -> Distribution:
        python = root / "backends" / "python"
        found = cls(root / "bin" / "tritonserver", python, python / "triton_python_backend_stub", root / "lib")
        for file in (found.server, found.python_stub):
            if not file.is_file():
                raise ServeError(f"CHARONIA_TRITON_DIR={root} has no {file.relative_to(root)}: it is no Triton server")
        return found


def backend_library() -> Path:
    """libtriton_charonia.so, which is installed next to the engine's Python module."""
    from charonia import _engine

    library = Path(str(_engine.__file__)).parent / BACKEND_LIBRARY
    if not library.is_file():
        raise ServeError(f"{library} is missing: install charonia again (it is built with CHARONIA_TRITON=ON)")
    return library


def has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists()


def make_backend_folder(folder: Path, distribution: Distribution) -> Path:
    """Makes the folder of --backend-directory: python/ and charonia/, with links."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "python").mkdir(parents=True)
    for file in {*distribution.python_backend.iterdir(), distribution.python_stub}:
        if file.is_file():
            (folder / "python" / file.name).symlink_to(file)
    (folder / "charonia").mkdir()
    library = backend_library()
    (folder / "charonia" / library.name).symlink_to(library)
    return folder


def command(
    distribution: Distribution,
    settings: ServeSettings,
    repository: Path,
    backend_folder: Path,
    drain_s: float,
    more: Sequence[str] = (),
) -> list[str]:
    """drain_s: the engine's setting drain_timeout_s. more: further options."""
    options = {
        "model-repository": repository,
        "backend-directory": backend_folder,
        "http-address": settings.triton_address,
        "http-port": settings.http_port,
        "grpc-address": settings.triton_address,
        "grpc-port": settings.grpc_port,
        "metrics-address": settings.triton_address,
        "metrics-port": settings.metrics_port,
        # The engine ends running requests after drain_s; the server must wait for that.
        "exit-timeout-secs": math.ceil(drain_s) + EXIT_MARGIN_S,
        "backend-config": "python,stub-timeout-seconds=120",
    }
    if not has_gpu():
        options |= {"allow-gpu-metrics": "false", "pinned-memory-pool-byte-size": 0}
    # `--disable-auto-complete-config`: the configurations are complete.
    return [
        str(distribution.server),
        "--disable-auto-complete-config",
        *(f"--{name}={value}" for name, value in options.items()),
        *(f"--trace-config={setting}" for setting in _trace_config(settings)),
        *more,
    ]


def _trace_config(settings: ServeSettings) -> list[str]:
    """With rate=0 only requests with a trace id are traced, such as the gateway's."""
    if settings.tracing_endpoint is None:
        return []
    url = settings.tracing_endpoint.rstrip("/")
    url = url if url.endswith("/v1/traces") else f"{url}/v1/traces"
    own = {"url": url, "resource": "service.name=charonia-triton"}
    instance = f"resource=service.instance.id={socket.gethostname()}:{settings.grpc_port}"
    common = ["mode=opentelemetry", "level=TIMESTAMPS", "rate=0", "count=-1"]
    return common + [f"opentelemetry,{name}={value}" for name, value in own.items()] + [f"opentelemetry,{instance}"]


def environment(distribution: Distribution, base: Mapping[str, str], jemalloc: bool = False) -> dict[str, str]:
    """The server's environment: its libraries and libpython, and this Python's packages for the Python models.
    jemalloc: allocates memory with it, if it is installed."""
    libraries = [str(distribution.libraries), str(sysconfig.get_config_var("LIBDIR"))]
    if base.get("LD_LIBRARY_PATH"):
        libraries.append(base["LD_LIBRARY_PATH"])
    return {
        **base,
        **guide_library.environment(base),
        **(_preloaded(base.get("LD_PRELOAD", "")) if jemalloc else {}),
        "LD_LIBRARY_PATH": os.pathsep.join(libraries),
        # The Python models' process finds its packages by the first python3 on PATH.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), base.get("PATH", os.defpath)]),
        "CHARONIA_ENGINE_BUILD": sha256(backend_library()),  # for preprocessing/model_fingerprint.py
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _preloaded(given: str) -> dict[str, str]:
    """Adds jemalloc to LD_PRELOAD, unless that has another allocator."""
    library = ctypes.util.find_library("jemalloc")
    if library is None or _ALLOCATORS.search(given):
        return {}
    return {"LD_PRELOAD": f"{library} {given}".strip()}


# The engine logs these when it is loaded: "engine version 1: <model> (<family>, <type>) on GPU 0, sm_90; weights ...".
_LOADED = re.compile(r"engine(?:\.(\S+))? version \d+: .*?\) on (.*?; .*)$")
_CHOSEN = re.compile(r"engine(?:\.(\S+))? version \d+: device = auto is the CPU: (.*)$")


def device_of(line: str) -> list[str]:
    """The device and memory of an engine, or why it uses the CPU, if this log line says so. After the label of its
    model, if there is one."""
    entry = logs.parse(line)
    text = entry.message if entry else ""
    for pattern, why in ((_CHOSEN, "because "), (_LOADED, "")):
        if found := pattern.search(text):
            return [f"{found.group(1)}: {why}{found.group(2)}" if found.group(1) else f"{why}{found.group(2)}"]
    return []


_ADAPTER = re.compile(r"\b(un)?loaded the adapter (.*?)(?: from /.*)?$")


def adapter_of(line: str) -> tuple[str, bool] | None:
    """The name of a LoRA adapter, and whether it was loaded or unloaded, if this log line of an engine says so."""
    if " the adapter " not in line or (entry := logs.parse(line)) is None:
        return None
    found = _ADAPTER.match(entry.message)
    return (found.group(2), not found.group(1)) if found else None


def with_names(devices: Sequence[str], served: Sequence[Served]) -> list[str]:
    """The results of device_of(). If there are several models: in their order, each after the name of its model."""
    if len(served) == 1:
        return list(devices)
    found: dict[str, list[str]] = {one.label: [] for one in served}
    names = {one.label: one.names[0] for one in served}
    for text in devices:
        label, _, device = text.partition(": ")
        label, device = (label, device) if label in names else ("", text)
        found[label].append(f"{names[label]}: {device}")
    return [text for texts in found.values() for text in texts]


def on_cpu(devices: Sequence[str]) -> bool:
    """Whether an engine computes on the CPU. devices: results of device_of()."""
    return any(re.match(r"(\S+: )?cpu, ", text) for text in devices)


def is_noise(line: str) -> bool:
    """Whether the line is a message of the server about a GPU, on a machine without one."""
    entry = logs.parse(line)
    if entry is None or entry.level == "info" or has_gpu():
        return False
    return entry.source in _GPU_SOURCES and _GPU_NOISE.search(entry.message) is not None


def worth_showing(line: str) -> tuple[str, str] | None:
    """("warning" or "error", text) of a log line for the terminal; None for other lines, which only the log file
    has. Parses lines of Triton and of Python's logging."""
    entry = logs.parse(line)
    if entry is None or entry.level in ("debug", "info") or is_noise(line):
        return None
    return "warning" if entry.level == "warning" else "error", entry.message


def _is_of_table(line: str) -> bool:
    """Whether the line is empty, or part of a table of the server's options or models."""
    return not line.strip() or line.startswith(("|", "+-"))


def explain_failure(lines: list[str]) -> list[str]:
    """The lines of a log that explain the end of a process: its errors, else its last lines."""
    found = [shown for line in lines if (shown := worth_showing(line))]
    errors = [text for level, text in found if level == "error"]
    # An error of the ensemble repeats the error of its part.
    causes = [text for text in errors if not _DEPENDS.search(text)]
    if any(_NO_SUCH_GPU.search(text) for text in causes):
        causes.append(
            "The instance_group of the model's engine/config.pbtxt asks for a GPU that the server does not see: "
            "set it to [ { count: 1 kind: KIND_MODEL } ], with which the setting device decides, or check nvidia-smi"
        )
    return (causes or errors)[-10:] or [line for line in lines if not is_noise(line) and not _is_of_table(line)][-20:]
