"""What every stage knows: where things are, which device is checked, what the user asked for."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

# An architecture to compile for: the kernels as plain C++, on the emulated device.
HOST = "host"
# What a user says of the device itself; other settings in the environment would change what is tested and measured.
_KEPT = ("CHARONIA_CUDA_", "CHARONIA_CUBLASLT", "CHARONIA_NCCL")

ROOT = Path(__file__).resolve().parents[2]
SITE_CUSTOMIZE = ROOT / "scripts" / "gpu_check" / "site"


def find_tool(name: str) -> str | None:
    """A program's place. CUDA's usual place counts, and that of this Python's programs."""
    places = [os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin", str(Path(sys.executable).parent)]
    return shutil.which(name, path=os.pathsep.join(places))


def cuda_folders(kind: str, *names: str) -> list[str]:
    """The folders `kind` (lib, include) of installed NVIDIA packages that hold files of these names."""
    spec = importlib.util.find_spec("nvidia")
    places = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    files = [file for name in names for place in places for file in sorted(place.glob(f"*/{kind}/{name}"))]
    return list(dict.fromkeys(str(file.parent) for file in files))


@dataclass(frozen=True)
class Context:
    """rehearse: the same stages with device = cpu and tiny models. settings: of the engine, in every benchmark."""

    rehearse: bool
    work: Path  # everything that this makes but the results
    jobs: int
    brought: Path  # what was brought along this time: packages that the machine lacks, what was compiled elsewhere
    results: Path  # the results file
    architecture: str  # to compile for, as nvcc writes it: "90a"; or HOST
    trace: Path | None = None
    trace_requests: int = 400
    model_dir: Path | None = None
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return "cpu" if self.rehearse else "cuda"

    @property
    def carried(self) -> Path:
        """What was brought along, this time and before."""
        return self.work / "carried"

    @property
    def compiled(self) -> Path:
        """Libraries, C++ programs and the backend, brought along or built here; see build.py."""
        return self.work / "compiled"

    @property
    def site(self) -> Path:
        """The charonia package of the build stage: links to the checkout's Python files, and what was compiled."""
        return self.work / "site"

    @property
    def packages(self) -> Path:
        return self.work / "packages"

    @property
    def triton_packages(self) -> Path:
        """What only the Triton server and its clients need; NumPy 1 is among it, which other packages do not like."""
        return self.work / "packages_triton"

    @property
    def logs(self) -> Path:
        return self.work / "logs"

    def environment(self, *, triton: bool = False) -> dict[str, str]:
        """For child processes: where this check's packages are, and the device as a setting."""
        paths = [ROOT / "scripts"]
        if triton:
            paths.append(self.triton_packages)
        paths += [self.site, self.packages, ROOT / "client", ROOT / "gateway"]
        # The checkout's own charonia, which this process uses, has nothing compiled in it.
        own = ("", str(ROOT), str(SITE_CUSTOMIZE))
        before = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part not in own]
        libraries = [part for part in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if part]
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("CHARONIA_") or name.startswith(_KEPT)
        }
        return {
            **kept,
            "PYTHONPATH": os.pathsep.join([*(str(path) for path in paths if path.exists()), *before]),
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONSAFEPATH": "1",  # or charonia would be the checkout's in the checkout's folder
            "CHARONIA_DEVICE": self.device,
            "CHARONIA_CACHE_DIR": str(self.work / "cache"),
            "LD_LIBRARY_PATH": os.pathsep.join([*cuda_folders("lib", "libcublasLt.so*", "libnccl.so*"), *libraries]),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }

    def room_for(self, size: int) -> Path:
        """A folder for models: memory rather than disk, where there is room."""
        if self.model_dir is not None:
            return self.model_dir
        for folder in (Path("/dev/shm"), Path("/tmp")):
            if (
                folder.is_dir()
                and os.access(folder, os.W_OK)
                and shutil.disk_usage(folder).free > 1.2 * size + (4 << 30)
            ):
                return folder / "charonia_gpu_check"
        raise OSError(f"neither /dev/shm nor /tmp has room for {size / 1e9:.0f} GB: name a folder with --model-dir")

    def to_json(self) -> str:
        return json.dumps(
            {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
        )

    @classmethod
    def from_json(cls, text: str) -> Context:
        values = json.loads(text)
        for name in ("work", "brought", "results", "trace", "model_dir"):
            values[name] = None if values[name] is None else Path(values[name])
        return cls(**values)
