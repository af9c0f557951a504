"""Programs that run with all that they start, none of which outlives them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import IO

from charonia.parent_death import die_with

_GONE_S = 5.0  # that killed processes may take to be gone


@contextmanager
def started(
    command: list[str], variables: Mapping[str, str], *, stdout: int | IO[bytes], stderr: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A program that has ended when the context does: it is waited for, or killed after an error. What it started is
    killed then, and its temporary files are removed, so that pip leaves none of it behind.

    It has a session of its own: of a terminal's keys Ctrl-C reaches this process alone, and Ctrl-Z is passed on.
    """
    with tempfile.TemporaryDirectory(prefix="charonia-quantize-", ignore_cleanup_errors=True) as temporary:
        process = subprocess.Popen(
            command,
            stdout=stdout,
            stderr=stderr,
            env={**variables, "TMPDIR": temporary},
            start_new_session=True,
            preexec_fn=die_with(os.getpid()),
        )
        try:
            with _stops_with_this_process(process.pid):
                yield process
                # It is not reaped yet, so its number is nobody else's.
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        finally:
            _kill(process)


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
        os.kill(os.getpid(), signal.SIGSTOP)
        os.killpg(group, signal.SIGCONT)

    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTSTP) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTSTP, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
