"""Runs programs in process groups, and ends all processes of a group with the program."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any

from charonia.parent_death import die_with

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_GONE_S = 5.0  # how long killed processes may take to end
_LOOK_MS = 1000  # interval of the checks whether a program that writes nothing has ended
_PIPE_BYTES = 1 << 20  # maximum capacity of a pipe
_PREFIX, _LOCK = "quantize-tmp-", "lock"


@contextmanager
def started(
    command: list[str],
    variables: Mapping[str, str],
    folder: Path,
    *,
    stdout: int | IO[bytes],
    stderr: int | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program. Wait for its end when the context ends; after an error, kill it. Then kill the processes that
    it started, and remove its temporary files in `folder`.

    The program has its own session: Ctrl-C in a terminal reaches this process only, and Ctrl-Z is forwarded.
    """
    with _interrupts_held() as let_through, _default_sigchld(), _temporary(folder) as temporary:
        process = subprocess.Popen(
            command,
            stdout=stdout,
            stderr=stderr,
            env={**variables, "TMPDIR": str(temporary)},
            start_new_session=True,
            preexec_fn=die_with(os.getpid()),
        )
        try:
            with let_through(), _stops_with_this_process(process.pid):
                yield process
                # Not reaped yet, so that no other process can get its id.
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        finally:
            _kill(process)


def output(process: subprocess.Popen[bytes]) -> Iterator[bytes]:
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


@contextmanager
def locked(file: Path, text: str) -> Iterator[None]:
    """Create a file that is locked as soon as its name exists. Removes the file if no error occurs."""
    new = file.with_suffix(".new")
    with new.open("w", encoding="utf-8") as stream:
        with contextlib.suppress(OSError):  # on a file system without locks, no run removes files of others
            fcntl.flock(stream, fcntl.LOCK_EX)
        stream.write(text)
        stream.flush()
        new.rename(file)
        yield
        file.unlink()


@contextmanager
def _temporary(parent: Path) -> Iterator[Path]:
    """Create a folder for temporary files. Removes the folders of killed runs, whose locks are free."""
    for left in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError), left.open("r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(left.parent)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    try:
        with locked(folder / _LOCK, ""):
            files = folder / "t"
            files.mkdir()
            yield files
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    """Remove the folder, the lock file last, so that the next run can recognise an interrupted removal."""
    shutil.rmtree(folder / "t", ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


def _in_main_thread() -> bool:
    """Only the main thread may set signal handlers, and they run in it."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def _interrupts_held() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Delay interrupting signals, except in the contexts that the yielded function creates. Uses handlers, because the
    kernel would deliver a masked signal to another thread, such as NumPy's."""
    came: list[int] = []
    held = True

    def handle(number: int, frame: FrameType | None) -> None:
        if held:
            came.append(number)
        else:
            before[number](number, frame)

    @contextmanager
    def let_through() -> Iterator[None]:
        nonlocal held
        try:
            held = False
            hand_on()
            yield
        finally:
            held = True

    def hand_on() -> None:
        while came:
            number = came.pop(0)
            if signal.getsignal(number) != signal.SIG_IGN:  # the first signal makes the others ignored
                before[number](number, None)

    handlers = {number: signal.getsignal(number) for number in INTERRUPTS if _in_main_thread()}
    before: dict[int, Callable[[int, FrameType | None], Any]]
    before = {number: handler for number, handler in handlers.items() if callable(handler)}
    try:
        for number in before:
            signal.signal(number, handle)
        yield let_through
    finally:
        held = False
        for number, handler in before.items():
            if signal.getsignal(number) == handle:
                signal.signal(number, handler)
        hand_on()


@contextmanager
def _default_sigchld() -> Iterator[None]:
    """Set SIGCHLD to its default if it is ignored, because the kernel would then reap children: their exit codes would
    be lost, and their ids reused."""
    if not _in_main_thread() or signal.getsignal(signal.SIGCHLD) != signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the whole process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may block it in the kernel
        process.wait(_GONE_S)
    if process.stdout:
        process.stdout.close()


@contextmanager
def _stops_with_this_process(group: int) -> Iterator[None]:
    """Forward Ctrl-Z to the group, and continue it when fg or bg continues this process."""

    def stop(number: int, frame: FrameType | None) -> None:
        os.killpg(group, signal.SIGSTOP)
        try:
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTSTP)  # has no effect if no shell could continue this process
            signal.signal(signal.SIGTSTP, stop)
        finally:
            os.killpg(group, signal.SIGCONT)

    if not _in_main_thread() or signal.getsignal(signal.SIGTSTP) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTSTP, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
