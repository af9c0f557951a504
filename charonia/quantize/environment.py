"""The Python environment that llm-compressor runs in: it needs PyTorch, and other packages than Charonia."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from charonia.errors import CharoniaError
from charonia.settings import read_settings

REQUIREMENTS = Path(__file__).resolve().parent / "requirements.txt"
TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PYTHON_VARIABLE = "CHARONIA_QUANTIZE_PYTHON"
# What it takes on the disk while pip works: 1.5 GB in the end with PyTorch for the CPU, and about 7 GB with CUDA's.
_CPU_BYTES, _CUDA_BYTES = 4 << 30, 12 << 30
_DONE = "complete"
_STDERR = 2  # the descriptor: stdout is for what a command has to say


class QuantizeError(CharoniaError):
    """The environment could not be made, or llm-compressor failed in it."""


def python(say: Callable[[str], None]) -> Path:
    """The environment's interpreter. It is made where there is none: some minutes, and a download of 200 MB or more.

    With CHARONIA_QUANTIZE_PYTHON set, that one is taken as it is. say: is told what is being done. Raises
    QuantizeError.
    """
    if given := os.environ.get(PYTHON_VARIABLE):
        if not os.access(given, os.X_OK):
            raise QuantizeError(f"{PYTHON_VARIABLE} = {given} is no program that can be run")
        return Path(given)
    cuda = shutil.which("nvidia-smi") is not None
    folder = _folder(cuda)
    interpreter = folder / "bin" / "python"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.parent / f"{folder.name}.lock", say):
        if not (folder / _DONE).is_file():
            require_space(folder.parent, _CUDA_BYTES if cuda else _CPU_BYTES, "llm-compressor's environment")
            _install(folder, cuda, say)
    return interpreter


def _folder(cuda: bool) -> Path:
    """Another one for other packages or another Python."""
    text = f"{sys.version_info[:2]} {TORCH} {cuda}\n{REQUIREMENTS.read_text(encoding='utf-8')}"
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return read_settings().run_dir.expanduser() / f"quantize-{digest}"


@contextmanager
def _lock(file: Path, say: Callable[[str], None]) -> Iterator[None]:
    with file.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another charonia quantize works on {file.with_suffix('')}: waiting for it")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _install(folder: Path, cuda: bool, say: Callable[[str], None]) -> None:
    """Where an earlier try was interrupted, it goes on: pip leaves alone what is installed."""
    say(f"installing llm-compressor into {folder}, once: some minutes")
    _run([sys.executable, "-m", "venv", str(folder)], folder)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
    index = [] if cuda else ["--extra-index-url", CPU_INDEX]
    # By itself: of PyTorch's own index nothing else is wanted.
    _run([*pip, *index, "--no-deps", TORCH], folder)
    _run([*pip, TORCH, "-r", str(REQUIREMENTS)], folder)
    (folder / _DONE).touch()


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, stdout=_STDERR, env=_variables(), check=False)
    if done.returncode != 0:
        raise QuantizeError(
            f"llm-compressor could not be installed into {folder} (see above): it needs PyPI, or an index that pip is "
            f"configured for. Run the command again to go on, or set {PYTHON_VARIABLE} to a Python that has the "
            f"packages of {REQUIREMENTS}"
        )


def _variables() -> dict[str, str]:
    """Those of this process, without what would show the environment another one's packages: pip would take them for
    installed."""
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}


def require_space(folder: Path, needed: int, what: str) -> None:
    """QuantizeError when the file system of `folder` has less than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise QuantizeError(
            f"{what} needs about {needed / 1e9:.1f} GB in {folder}, and {free / 1e9:.1f} GB are free there: make room, "
            "or choose another folder"
        )


def run(job: Path, say: Callable[[str], None]) -> None:
    """Runs driver.py with the job; its progress goes to stderr. Raises QuantizeError when it fails."""
    interpreter = python(say)
    environment = _variables() | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONNOUSERSITE": "1"}
    driver = Path(__file__).resolve().parent / "driver.py"
    done = subprocess.run([str(interpreter), str(driver), str(job)], stdout=_STDERR, env=environment, check=False)
    if done.returncode < 0:
        raise QuantizeError(
            f"llm-compressor was killed by signal {-done.returncode}; with 9 the machine had too little memory"
        )
    if done.returncode != 0:
        raise QuantizeError(f"llm-compressor failed with exit code {done.returncode}: its last lines above say why")
