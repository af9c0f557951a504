"""A child process with its own group and log file, which cannot outlive its parent."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from logging.handlers import RotatingFileHandler
from pathlib import Path

from charonia.parent_death import die_with

_KEPT_LINES = 400
_LAST_LINES_S = 2  # time to read the last output of a process that has ended
_DEATH_S = 5  # time for a killed process to be gone
LOG_BYTES = 20 << 20  # of a log file; then it becomes NAME.1, and NAME.1 becomes NAME.2
OLD_LOGS = 4


class _LogFile(RotatingFileHandler):
    """A log file of bounded size. Each run begins a new one. Lines that cannot be written are dropped, so that a full
    disk does not stop the process. `complain` is called when that begins, and when lines are written again."""

    def __init__(self, file: Path, complain: Callable[[str], None]) -> None:
        super().__init__(
            file,
            maxBytes=LOG_BYTES,
            backupCount=OLD_LOGS,
            encoding="utf-8",
            delay=True,
            errors="backslashreplace",  # a lone surrogate, which JSON can spell
        )
        self._file = file
        self._complain = complain
        self._dropped = 0
        self._failed = False  # the current line
        with contextlib.suppress(OSError):
            if file.is_file() and file.stat().st_size > 0:  # of the run before
                self.doRollover()

    def write(self, line: str) -> None:
        self._failed = False
        self.emit(logging.makeLogRecord({"msg": line}))
        if self._dropped and not self._failed:
            self._complain(f"{self._file} is written again; {self._dropped} lines are missing in it")
            self._dropped = 0

    def handleError(self, record: logging.LogRecord) -> None:
        self._failed = True
        self._dropped += 1
        if self._dropped == 1:
            self._complain(f"{self._file} cannot be written ({sys.exc_info()[1]}): lines are dropped until it can be")


class Child:
    """A running command. Each line of its output is passed to `on_line`, and to `render`, whose result is written to
    the log file, if there is one. `complain` is called if the log file cannot be written. The command inherits the
    file descriptors `inherits`.

    Create it in the main thread: the kernel kills the command when the thread that started it ends.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        log_file: Path | None,
        on_line: Callable[[str], None] = lambda _: None,
        render: Callable[[str], str | None] = lambda line: line,
        complain: Callable[[str], None] = lambda _: None,
        inherits: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.log_file = log_file
        self._tail: deque[tuple[float, str]] = deque(maxlen=_KEPT_LINES)
        self._on_line = on_line
        self._render = render
        self._complain = complain
        self._killed_because = ""
        self._process = subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            pass_fds=inherits,
            preexec_fn=die_with(os.getpid()),
        )
        self._reader = threading.Thread(target=self._read, name=f"{name}-log", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        log = _LogFile(self.log_file, self._tell) if self.log_file else None
        for line in self._process.stdout:
            text = line.rstrip("\n")
            self._tail.append((time.monotonic(), text))
            # If this thread ended, the process would stop as soon as its pipe is full.
            try:
                if log and (rendered := self._render(text)) is not None:
                    log.write(rendered)
                self._on_line(text)
            except (Exception, SystemExit) as error:
                self._tell(f"a line of {self.name} is lost ({error!r}): {text[:200]}")
        if log:
            with contextlib.suppress(OSError):  # the disk may be full
                log.close()

    def _tell(self, text: str) -> None:
        with contextlib.suppress(Exception, SystemExit):
            self._complain(text)

    @property
    def exit_code(self) -> int | None:
        """None while the process runs; the negative number of a signal that killed it."""
        return self._process.poll()

    def exit_status(self) -> str | None:
        """None while the process runs, else how it ended, for people."""
        code = self._process.poll()
        if code is None or self._killed_because:
            return self._killed_because or None
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def tail(self, seconds: float = math.inf) -> list[str]:
        """The last lines of the output, no older than `seconds`. After the end of the process it is complete."""
        since = time.monotonic() - seconds
        if self._process.poll() is not None:
            self._reader.join(_LAST_LINES_S)
        return [text for read, text in self._tail.copy() if read >= since]

    def terminate(self) -> None:
        """Sends SIGTERM to the process, and not to the processes that it has started."""
        if self._process.poll() is None:
            self._process.terminate()

    def wait(self, timeout_s: float, hurry: Callable[[], bool] = lambda: False) -> bool:
        """Returns True when the process has ended, and False after timeout_s or when hurry() is true."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not hurry():
            try:
                self._process.wait(0.05)
                return True
            except subprocess.TimeoutExpired:
                continue
        return self._process.poll() is not None

    def kill_group(self, why: str = "") -> None:
        """Kills the process and all that it has started, and reads its last output. why: for exit_status()."""
        self._killed_because = why
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it in the kernel for ever
            self._process.wait(_DEATH_S)
        self._reader.join(_LAST_LINES_S)
