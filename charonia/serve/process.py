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
_LAST_LINES_S = 2  # to read what an ended process has said
_DEATH_S = 5  # that a killed process may take to be gone
LOG_BYTES = 20 << 20  # of a log file; then it becomes NAME.1, and NAME.1 becomes NAME.2
OLD_LOGS = 4


class _LogFile(RotatingFileHandler):
    """A log file of bounded size, begun anew. What cannot be written is dropped and counted, so that a full disk stops
    nobody. `complain` is told, once until a line is written again."""

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
        self._failed = False  # the line that is being written
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

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.close()


class Child:
    """A running command. Its output goes, line by line, to `on_line` and, as `render` writes it, to a log file
    where there is one. Of a log file that cannot be written `complain` is told; the command is read on. It has
    the file descriptors `inherits`, too.

    Start it from the main thread: the kernel ties the child's life to the thread that starts it.
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

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        log = _LogFile(self.log_file, self._tell) if self.log_file else None
        for line in self._process.stdout:
            text = line.rstrip("\n")
            self._tail.append((time.monotonic(), text))
            try:
                if log and (rendered := self._render(text)) is not None:
                    log.write(rendered)
                self._on_line(text)
            except (
                Exception,
                SystemExit,
            ) as error:  # if this thread ended, the process would stop as soon as its pipe is full
                self._tell(f"a line of {self.name} is lost ({error!r}): {text[:200]}")
        if log:
            log.end()

    def _tell(self, text: str) -> None:
        with contextlib.suppress(Exception, SystemExit):
            self._complain(text)

    @property
    def exit_code(self) -> int | None:
        """None while it runs; a signal's number, negative, where one killed it."""
        return self._process.poll()

    def exit_status(self) -> str | None:
        """None while the process runs, else how it ended, for people."""
        code = self._process.poll()
        if code is None or self._killed_because:
            return self._killed_because or None
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def tail(self, seconds: float = math.inf) -> list[str]:
        """The last lines of its output, no older than `seconds`; once it has ended, all of the last ones."""
        since = time.monotonic() - seconds
        if self._process.poll() is not None:
            self._reader.join(_LAST_LINES_S)
        return [text for read, text in self._tail.copy() if read >= since]

    def terminate(self) -> None:
        """Asks it to end; what it started itself is its own business."""
        if self._process.poll() is None:
            self._process.terminate()

    def wait(self, timeout_s: float, hurry: Callable[[], bool] = lambda: False) -> bool:
        """True once it has ended, false after timeout_s or when hurry() says so."""
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
