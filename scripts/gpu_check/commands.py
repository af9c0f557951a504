"""Runs programs, with their output in a log file and in hand."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Done:
    """code: None when it was killed at its time limit."""

    code: int | None
    text: str
    seconds: float

    @property
    def how(self) -> str:
        if self.code is None:
            return f"was killed after {self.seconds:.0f} s"
        if self.code < 0:
            return f"died of {signal.Signals(-self.code).name}"
        return f"ended with exit code {self.code}"


def run(command: Sequence[str | Path], log: Path, *, limit_s: float, env: Mapping[str, str]) -> Done:
    """Output and errors together go to `log` and come back as text."""
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with log.open("wb") as out:
        out.write(("$ " + " ".join(map(str, command)) + "\n").encode())
        out.flush()
        process = subprocess.Popen(
            [*map(str, command)], stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=dict(env)
        )  # fmt: skip
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            kill_tree(process.pid)
            process.wait()
            code = None
    text = log.read_text(encoding="utf-8", errors="replace")
    return Done(code, text, time.monotonic() - began)


def kill_tree(pid: int) -> None:
    """Kills a process and all that descend from it, also the one that calls this, which is then the last."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(folder.name))
    wanted = [pid]
    for each in wanted:
        wanted += children.get(each, [])
    for each in sorted(wanted, key=lambda each: each == os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
