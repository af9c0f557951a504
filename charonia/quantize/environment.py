"""The Python environment of llm-compressor, which needs PyTorch and other packages than Charonia."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO

from charonia import disk
from charonia.errors import CharoniaError
from charonia.parent_death import die_with
from charonia.quantize.driver import FAILED, SAID
from charonia.settings import read_settings

DRIVER = Path(__file__).resolve().parent / "driver.py"
REQUIREMENTS = Path(__file__).resolve().parent / "requirements.txt"
TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PYTHON_VARIABLE = "CHARONIA_QUANTIZE_PYTHON"
# Disk space while pip works. The installed size is 1.5 GB with PyTorch for the CPU, and about 7 GB with CUDA.
_CPU_BYTES, _CUDA_BYTES = 4 << 30, 12 << 30
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_LOOK_MS = 1000  # interval of the checks whether a program that writes nothing has ended
_PIPE_BYTES = 1 << 20  # maximum capacity of a pipe
_DONE = "complete"
_PREFIX, _DIGITS = "quantize-", 12  # of the folder name
_STEP = re.compile(r"\((\d+)/(\d+)\): (\w+)")  # in llm-compressor's progress bars
_MAX_SHOWN = 300  # characters of another program's message
_STDERR = 2  # file descriptor; stdout is for the result of the command


@contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt on the first SIGINT, SIGTERM, SIGHUP or SIGQUIT, so that partial work is removed. Ignored
    signals stay ignored (nohup). Works in the main thread only."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        for one in before:  # the clean-up is not interrupted, except by a second Ctrl-C, for a download that hangs
            if one != signal.SIGINT:
                signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {one: signal.getsignal(one) for one in _INTERRUPTS if signal.getsignal(one) != signal.SIG_IGN}
    for one in before:
        signal.signal(one, interrupt)
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


class QuantizeError(CharoniaError):
    """The environment could not be created, or llm-compressor failed in it."""


@contextmanager
def interpreter(say: Callable[[str], None]) -> Iterator[Path]:
    """Yield the Python of the environment; the environment is not removed during the context. Creates it if it is
    missing, which takes minutes and downloads 200 MB or more, and removes unused ones of other versions.

    If CHARONIA_QUANTIZE_PYTHON is set, yields that program without checks of its packages. say: called with progress
    messages. Raises QuantizeError.
    """
    if given := os.environ.get(PYTHON_VARIABLE):
        if not os.access(given, os.X_OK) or not Path(given).is_file():
            raise QuantizeError(f"{PYTHON_VARIABLE} = {given} is not an executable program")
        yield Path(given)
        return
    cuda = shutil.which("nvidia-smi") is not None
    folder = _folder(cuda)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock_file(folder).open("w") as lock:
        _lock(lock, fcntl.LOCK_SH, folder, say)
        if not _is_whole(folder):
            _lock(lock, fcntl.LOCK_EX, folder, say)
            if not _is_whole(folder):  # another process may have made it in the meantime
                _remove_others(folder, say)
                require_space(folder.parent, _CUDA_BYTES if cuda else _CPU_BYTES, "llm-compressor's environment")
                _install(folder, cuda, say)
            _lock(lock, fcntl.LOCK_SH, folder, say)
        yield folder / "bin" / "python"


def _is_whole(folder: Path) -> bool:
    """Whether the environment is complete, and its Python is not a link to a removed one."""
    return (folder / _DONE).is_file() and os.access(folder / "bin" / "python", os.X_OK)


def _folder(cuda: bool) -> Path:
    """Return the folder for this set of packages and this Python version."""
    text = f"{sys.version_info[:2]} {TORCH} {cuda}\n{REQUIREMENTS.read_text(encoding='utf-8')}"
    digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
    return _run_dir() / f"{_PREFIX}{digest}"


def _run_dir() -> Path:
    return read_settings().run_dir.expanduser()


def _lock_file(folder: Path) -> Path:
    return folder.parent / f"{folder.name}.lock"


def _lock(stream: IO[str], how: int, folder: Path, say: Callable[[str], None]) -> None:
    """how: LOCK_SH to use the environment, LOCK_EX to create or remove it."""
    try:
        fcntl.flock(stream, how | fcntl.LOCK_NB)
    except BlockingIOError:
        say(f"another charonia quantize uses {folder}: waiting for it")
        fcntl.flock(stream, how)


def _remove_others(kept: Path, say: Callable[[str], None]) -> None:
    for folder in kept.parent.glob(f"{_PREFIX}{'[0-9a-f]' * _DIGITS}"):
        if folder == kept or not (folder / "pyvenv.cfg").is_file():
            continue
        with suppress(BlockingIOError), _lock_file(folder).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            say(f"removing {folder}: llm-compressor's environment of another version of Charonia or Python")
            shutil.rmtree(folder, ignore_errors=True)


def _install(folder: Path, cuda: bool, say: Callable[[str], None]) -> None:
    say(f"installing llm-compressor into {folder}, once; this takes some minutes")
    _run([sys.executable, "-m", "venv", "--clear", str(folder)], folder)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
    index = [] if cuda else ["--extra-index-url", CPU_INDEX]
    # PyTorch alone: its index is not used for other packages.
    _run([*pip, *index, "--no-deps", TORCH], folder)
    _run([*pip, TORCH, "-r", str(REQUIREMENTS)], folder)
    (folder / _DONE).touch()


def _run(command: list[str], folder: Path) -> None:
    with _started(command, _variables(), folder.parent, stdout=_STDERR) as installer:
        pass
    if installer.returncode != 0:
        raise QuantizeError(
            f"llm-compressor could not be installed into {folder} (see above). pip needs PyPI or another configured "
            f"index. Run the command again, or set {PYTHON_VARIABLE} to a Python that has the packages of "
            f"{REQUIREMENTS}"
        )


def _variables() -> dict[str, str]:
    """Return the environment variables, without those that add another environment's packages: pip would treat these
    packages as installed."""
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}


def require_space(folder: Path, needed: int, what: str) -> None:
    """Raises QuantizeError if the file system of `folder` has less than `needed` bytes free."""
    disk.require_space(folder, needed, what, QuantizeError)


def run(job: Path, output: Path, say: Callable[[str], None]) -> None:
    """Run driver.py with the job and pass its messages to `say`. All of its output goes to a log file, which is kept on
    failure. output: the file or folder that it must write. Raises QuantizeError."""
    variables = _variables() | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONNOUSERSITE": "1"}
    with interpreter(say) as program:
        _run_dir().mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix="quantize-", suffix=".log", dir=_run_dir())
        log = Path(name)
        try:
            with os.fdopen(descriptor, "wb", buffering=0) as stream:
                code, error = _follow([str(program), str(DRIVER), str(job)], variables, stream, say)
        except BaseException:  # mostly Ctrl-C: the log is not needed
            log.unlink()
            raise
    if code == 0 and output.exists():
        log.unlink()
        return
    if not error:
        error = f"llm-compressor failed with exit code {code}" if code else f"{program} has written nothing"
        if code < 0:
            error = f"llm-compressor was killed by signal {-code}; signal 9 means that the machine ran out of memory"
        last = _last_line(log)
        error += f": {last}" if last else ""
    raise QuantizeError(f"{error} (all of its output: {log})")


def _follow(
    command: list[str], variables: dict[str, str], log: IO[bytes], say: Callable[[str], None]
) -> tuple[int, str]:
    """Return the exit code and the error message of driver.py. A carriage return of a progress bar also ends a line."""
    error, done, rest = "", "", b""
    with _started(command, variables, _run_dir(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as child:
        for piece in _output(child):
            log.write(piece)
            *lines, rest = re.split(rb"[\r\n]", rest + piece)
            for line in (line.decode(errors="replace") for line in lines):
                if line.startswith(SAID):
                    say(line.removeprefix(SAID))
                elif line.startswith(FAILED):
                    error = line.removeprefix(FAILED)
                elif (step := _STEP.match(line)) and step[0] != done:
                    done = step[0]
                    say(f"{step[3].lower()} part {step[1]} of {step[2]}")
    return child.returncode, error


@contextmanager
def _started(
    command: list[str], variables: dict[str, str], folder: Path, *, stdout: int, stderr: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program in its own session, so that Ctrl-C in a terminal reaches this process only. Wait for its end when
    the context ends; after an error, kill it. Then kill the processes that it started, and remove its temporary files
    in `folder`."""
    with tempfile.TemporaryDirectory(prefix="quantize-tmp-", dir=folder, ignore_cleanup_errors=True) as temporary:
        try:
            process = subprocess.Popen(
                command,
                stdout=stdout,
                stderr=stderr,
                env={**variables, "TMPDIR": temporary},
                start_new_session=True,
                preexec_fn=die_with(os.getpid()),
            )
        except OSError as problem:
            raise QuantizeError(f"{command[0]} cannot be run: {problem.strerror}") from problem
        try:
            yield process
            # Not reaped yet, so that no other process can get its id.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdout:
                process.stdout.close()


def _output(process: subprocess.Popen[bytes]) -> Iterator[bytes]:
    """Yield the output until the program ends. Does not wait for its children, which may keep the pipe open."""
    assert process.stdout is not None
    pipe = process.stdout.fileno()
    readable = select.poll()
    readable.register(pipe, select.POLLIN)
    ended = False
    while not ended:
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
        if readable.poll(0 if ended else _LOOK_MS):
            piece = os.read(pipe, _PIPE_BYTES)
            if not piece:
                return
            yield piece


def _last_line(log: Path) -> str:
    """Return the last line that is not a message of driver.py."""
    lines = re.split(r"[\r\n]", log.read_text(encoding="utf-8", errors="replace"))
    said = (line.strip() for line in reversed(lines) if line.strip() and not line.startswith(SAID))
    return next(said, "")[:_MAX_SHOWN]
