"""A child process with its own group and log file, which cannot outlive its parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_KEPT_LINES = 400


def _die_with(parent: int) -> Callable[[], None]:
    def set_death_signal() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died in between
            os._exit(1)

    return set_death_signal


class Child:
    """A running command. Its output goes, line by line, to `on_line` and, as `render` writes it, to a log file
    where there is one.

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
    ) -> None:
        self.name = name
        self.log_file = log_file
        self._tail: deque[str] = deque(maxlen=_KEPT_LINES)
        self._on_line = on_line
        self._render = render
        self._process = subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=_die_with(os.getpid()),
        )
        self._reader = threading.Thread(target=self._read, name=f"{name}-log", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        with Path(self.log_file or os.devnull).open("w", encoding="utf-8", buffering=1) as log:
            for line in self._process.stdout:
                text = line.rstrip("\n")
                if (rendered := self._render(text)) is not None:
                    log.write(f"{rendered}\n")
                self._tail.append(text)
                self._on_line(text)

    @property
    def exit_code(self) -> int | None:
        """None while it runs; a signal's number, negative, where one killed it."""
        return self._process.poll()

    def exit_status(self) -> str | None:
        """None while it runs; else what became of it, for people."""
        code = self._process.poll()
        if code is None:
            return None
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def tail(self) -> list[str]:
        """The last lines of its output; once it has ended, all of the last ones."""
        if self._process.poll() is not None:
            self._reader.join(timeout=2)
        return list(self._tail)

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

    def kill_group(self) -> None:
        """Ends it and whatever is left of what it started, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
