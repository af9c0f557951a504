"""Programs that run with all that they start, none of which outlives them."""

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
_GONE_S = 5.0  # that killed processes may take to be gone
_LOOK_MS = 1000  # between two looks whether a program that writes nothing has ended
_PIPE_BYTES = 1 << 20  # the most that a pipe holds
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
    """A program that has ended when the context does: it is waited for, or killed after an error. What it started is
    killed then, and its temporary files, which are in `folder`, are removed, so that pip leaves none of it behind.

    It has a session of its own: of a terminal's keys Ctrl-C reaches this process alone, and Ctrl-Z is passed on.
    """
    with _interrupts_held() as let_through, _children_told(), _temporary(folder) as temporary:
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
                # It is not reaped yet, so its number is nobody else's.
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        finally:
            _kill(process)


def output(process: subprocess.Popen[bytes]) -> Iterator[bytes]:
    """What is written until the program has ended: what it has started may keep the pipe open."""
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
    """A file that is locked from when it has its name; it goes when all went well."""
    new = file.with_suffix(".new")
    with new.open("w", encoding="utf-8") as stream:
        with contextlib.suppress(OSError):  # a file system without locks: there nobody sweeps
            fcntl.flock(stream, fcntl.LOCK_EX)
        stream.write(text)
        stream.flush()
        new.rename(file)
        yield
        file.unlink()


@contextmanager
def _temporary(parent: Path) -> Iterator[Path]:
    """A folder for temporary files. Those of runs that were killed, whose lock nobody holds, go."""
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
    """The lock last: while it is there, the next run knows what the rest is."""
    shutil.rmtree(folder / "t", ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


def _in_main_thread() -> bool:
    """The one that may set handlers, and that they run in."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def _interrupts_held() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """What would interrupt this thread waits, but in the contexts that the value makes. Handlers do it: what a thread
    masks, the kernel gives to another one, such as NumPy's."""
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
            if signal.getsignal(number) != signal.SIG_IGN:  # as after the first one
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
def _children_told() -> Iterator[None]:
    """Where SIGCHLD is ignored, as a process inherits it, the kernel reaps children: their exit code would be lost, and
    their number another's."""
    if not _in_main_thread() or signal.getsignal(signal.SIGCHLD) != signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Its whole group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it in the kernel for ever
        process.wait(_GONE_S)
    if process.stdout:
        process.stdout.close()


@contextmanager
def _stops_with_this_process(group: int) -> Iterator[None]:
    """Ctrl-Z stops the group, too, and fg or bg lets both go on."""

    def stop(number: int, frame: FrameType | None) -> None:
        os.killpg(group, signal.SIGSTOP)
        try:
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTSTP)  # nothing happens where no shell could continue this process
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
